import copy

import torch
from parts import device, layers, loader
from torch import nn

model = layers().to(device)
average = copy.deepcopy(model)  # fault: unused copy
optimizer = torch.optim.AdamW(model.parameters())
for x, y in loader():
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x.to(device)), y.to(device))
    loss.backward()
    optimizer.step()
torch.save(model.state_dict(), "model.pt")
