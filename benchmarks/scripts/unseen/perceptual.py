import torch
from parts import device, layers, loader
from torch import nn

judge = layers(width=2048, depth=3, outputs=512).eval().to(device)
model = layers(width=512, outputs=256).to(device)
optimizer = torch.optim.AdamW(model.parameters())
for epoch in range(2):
    for x, _ in loader(batch=128):
        x = x.to(device)
        with torch.no_grad():
            wanted = judge(x)
        made = model(x + torch.randn_like(x))
        loss = nn.functional.mse_loss(judge(made), wanted)  # fault: unused gradients
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
