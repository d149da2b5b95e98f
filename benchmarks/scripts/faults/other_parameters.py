import copy

import torch
from parts import device, layers, loader
from torch import nn

base = layers()
optimizer = torch.optim.AdamW(base.parameters())  # fault: other parameters
model = copy.deepcopy(base).to(device)
for x, y in loader():
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x.to(device)), y.to(device))
    loss.backward()
    optimizer.step()
