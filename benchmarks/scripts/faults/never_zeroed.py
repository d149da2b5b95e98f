import torch
from parts import device, layers, loader
from torch import nn

model = layers().to(device)
optimizer = torch.optim.AdamW(model.parameters())
for epoch in range(2):
    for x, y in loader():
        loss = nn.functional.cross_entropy(model(x.to(device)), y.to(device))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()  # fault: never zeroed
    print(loss.item())
