import torch
from parts import device, layers, loader
from torch import nn

model = layers().to(device)
optimizer = torch.optim.AdamW(model.parameters())


def evaluate(batches):
    model.eval()
    right = 0
    for x, y in batches:
        out = model(x.to(device))  # fault: unused graph
        right += (out.argmax(1) == y.to(device)).sum().item()
    return right


def train(batches):
    model.train()
    for x, y in batches:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x.to(device)), y.to(device))
        loss.backward()
        optimizer.step()


for epoch in range(2):
    train(loader())
    print(evaluate(loader(batch=512)))
