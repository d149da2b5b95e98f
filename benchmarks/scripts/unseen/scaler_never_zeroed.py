import torch
from parts import device, layers, loader
from torch import nn


class Trainer:
    def __init__(self):
        self.model = layers().to(device)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        self.scaler = torch.amp.GradScaler("cuda")

    def step(self, x, y):
        with torch.autocast("cuda", dtype=torch.float16):
            loss = nn.functional.cross_entropy(self.model(x), y)
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.model.parameters(), 5.0)
        self.scaler.step(self.optimizer)  # fault: never zeroed
        self.scaler.update()
        return loss.item()


trainer = Trainer()
for epoch in range(2):
    for x, y in loader():
        print(trainer.step(x.to(device), y.to(device)))
