import torch
from parts import Words, device, text
from torch import nn


class Engine:
    def __init__(self):
        self.model = Words(words=8192).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.last = None

    def step(self, tokens):
        out = self.model(tokens[:, :-1])  # fault: last step
        loss = nn.functional.cross_entropy(out.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.last = out.detach()  # fault: last step
        return loss.item()

    def run(self):
        for tokens in text(words=8192):
            print(self.step(tokens.to(device)))


Engine().run()
