import torch
from parts import device, layers, loader
from torch import nn

trunk = layers(outputs=512).to(device)
actor, value = nn.Linear(512, 16).to(device), nn.Linear(512, 1).to(device)
parameters = [*trunk.parameters(), *actor.parameters(), *value.parameters()]
optimizer = torch.optim.Adam(parameters)
for x, y in loader(classes=16):
    x, y = x.to(device), y.to(device)
    hidden = trunk(x)
    first = nn.functional.cross_entropy(actor(hidden), y)
    second = value(hidden).pow(2).mean()
    optimizer.zero_grad()
    first.backward(retain_graph=True)
    second.backward()
    optimizer.step()
    print(first.item(), second.item())
