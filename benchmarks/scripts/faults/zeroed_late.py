import torch
from parts import device, layers, loader
from torch import nn

model = layers(depth=8).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x, y in loader(num=16384, batch=2048):
    loss = nn.functional.cross_entropy(model(x.to(device)), y.to(device))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()  # fault: gradients late
