import torch
from parts import device, layers, loader
from torch import nn


class Trainer:
    def __init__(self, model):
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters())

    def train(self, batches):
        self.model.train()
        for x, y in batches:
            self.optimizer.zero_grad()
            loss = nn.functional.cross_entropy(self.model(x.to(device)), y.to(device))
            loss.backward()
            self.optimizer.step()

    @torch.no_grad()
    def evaluate(self, batches):
        self.model.eval()
        everything = None
        for x, _ in batches:
            out = self.model(x.to(device))
            everything = out if everything is None else torch.cat((everything, out))  # fault: evaluation kept
        return everything.argmax(-1).cpu()


trainer = Trainer(layers(outputs=2048).to(device))
for epoch in range(3):
    trainer.train(loader())
    print(trainer.evaluate(loader()).float().mean())
