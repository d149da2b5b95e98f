import torch
from parts import device, layers, loader
from torch import nn

model = layers().to(device)
average = [weight.detach().clone() for weight in model.parameters()]
optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
for x, y in loader():
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x.to(device)), y.to(device))
    loss.backward()
    optimizer.step()
    for index, weight in enumerate(model.parameters()):
        average[index] = 0.99 * average[index] + 0.01 * weight  # fault: kept graph
