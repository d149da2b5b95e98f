import torch
from parts import device, layers, loader
from torch import nn


class Trainer:
    def __init__(self):
        self.model = layers().to(device)
        self.optimizer = torch.optim.Adam(self.model.parameters())
        self.penalties = []

    def step(self, x, y):
        hidden = self.model[:4](x)
        out = self.model[4:](hidden)
        penalty = (hidden * 2).exp().mean()  # fault: kept graph
        self.penalties.append(penalty)  # fault: kept graph
        loss = nn.functional.cross_entropy(out, y)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def fit(self):
        for x, y in loader():
            print(self.step(x.to(device), y.to(device)))


Trainer().fit()
