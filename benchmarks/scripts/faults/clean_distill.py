import torch
from parts import device, layers, loader
from torch import nn

teacher = layers(width=2048).to(device).eval()
student = layers(width=512).to(device)
optimizer = torch.optim.AdamW(student.parameters())
for x, y in loader():
    x = x.to(device)
    with torch.no_grad():
        target = teacher(x)
    loss = nn.functional.mse_loss(student(x), target)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
