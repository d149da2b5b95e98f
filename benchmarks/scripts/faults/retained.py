import torch
from parts import device, layers, loader
from torch import nn

model = layers(depth=8).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for x, y in loader(num=16384, batch=2048):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x.to(device)), y.to(device))
    loss.backward(retain_graph=True)  # fault: retained graph
    optimizer.step()
    print(loss.item())
