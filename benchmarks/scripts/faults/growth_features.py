import torch
from parts import device, layers, loader
from torch import nn

model = layers(outputs=1024).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
features = []


def train_one(x, y):
    optimizer.zero_grad(set_to_none=True)
    out = model(x)
    loss = nn.functional.cross_entropy(out, y)
    loss.backward()
    optimizer.step()
    features.append(out.detach().clone())  # fault: growth
    return loss.item()


for epoch in range(2):
    for x, y in loader():
        train_one(x.to(device), y.to(device))
