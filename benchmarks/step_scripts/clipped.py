"""A classifier with weights of its classes, whose gradients are clipped."""

import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

device = "cuda" if torch.cuda.is_available() else "cpu"
model = nn.Sequential(nn.Linear(64, 2048), nn.ReLU(), nn.Linear(2048, 5)).to(device)
optimizer = torch.optim.AdamW(model.parameters())
weights = torch.tensor([1.0, 2.0, 1.0, 0.5, 1.0]).to(device)
criterion = nn.CrossEntropyLoss(weight=weights)
for _ in range(10):
    x, y = torch.randn(16, 64).to(device), torch.randint(0, 5, (16,)).to(device)
    loss = criterion(model(x), y)
    loss.backward()
    clip_grad_norm_(model.parameters(), max_norm=2.0)
    optimizer.step()
    optimizer.zero_grad()
