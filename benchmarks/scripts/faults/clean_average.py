import copy
from collections import deque

import torch
from parts import device, layers, loader
from torch import nn

model = layers().to(device)
average = copy.deepcopy(model).requires_grad_(False)
optimizer = torch.optim.AdamW(model.parameters())
recent = deque(maxlen=100)
for x, y in loader():
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x.to(device)), y.to(device))
    loss.backward()
    optimizer.step()
    recent.append(loss.detach())
    with torch.no_grad():
        for mean, weight in zip(average.parameters(), model.parameters()):
            mean.lerp_(weight, 0.001)
average.eval()
with torch.no_grad():
    for x, y in loader():
        print(nn.functional.cross_entropy(average(x.to(device)), y.to(device)).item())
