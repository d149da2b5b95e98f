import torch
from parts import device, layers, loader
from torch import nn

model = layers().to(device)
optimizer = torch.optim.AdamW(model.parameters())
replay = []


def train(epoch):
    for x, y in loader(num=8192, batch=1024):
        x, y = x.to(device), y.to(device)  # fault: growth
        if epoch == 0:
            replay.append((x, y))  # fault: growth
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()


for epoch in range(2):
    train(epoch)
