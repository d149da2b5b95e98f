import torch
from parts import device, layers, loader
from torch import nn

model = layers(outputs=2048).to(device)
optimizer = torch.optim.AdamW(model.parameters())
for epoch in range(2):
    model.train()
    for x, y in loader():
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x.to(device)), y.to(device)).backward()
        optimizer.step()
    model.eval()
    outputs = []
    with torch.no_grad():
        for x, y in loader():
            outputs.append(model(x.to(device)).softmax(-1))  # fault: evaluation kept
    print(torch.cat(outputs).argmax(-1).float().mean().item())
