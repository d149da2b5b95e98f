"""Gradients of four micro-batches are added up."""

import torch
from torch import nn

steps = 4
device = "cuda" if torch.cuda.is_available() else "cpu"
model = nn.Sequential(nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 128)).to(device)
optimizer = torch.optim.AdamW(model.parameters())
for update in range(8):
    for micro_step in range(steps):
        x, y = torch.randn(32, 128).to(device), torch.randn(32, 128).to(device)
        loss = nn.functional.mse_loss(model(x), y)
        loss = loss / steps
        loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
