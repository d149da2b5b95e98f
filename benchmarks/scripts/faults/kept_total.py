import torch
from parts import device, layers, loader
from torch import nn

model = layers().to(device)
optimizer = torch.optim.AdamW(model.parameters())
total = 0
for x, y in loader():
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x.to(device)), y.to(device))
    loss.backward()
    optimizer.step()
    total += loss  # fault: kept graph
print(total)
