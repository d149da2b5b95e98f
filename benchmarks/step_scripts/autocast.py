"""bf16 by autocast, the loss outside of it."""

import torch
from torch import nn

device = "cuda" if torch.cuda.is_available() else "cpu"
model = nn.Sequential(nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 1000)).to(device)
optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.1)
criterion = nn.CrossEntropyLoss()
for _ in range(10):
    x, y = torch.randn(256, 128).to(device), torch.randint(0, 1000, (256,)).to(device)
    with torch.autocast(device, dtype=torch.bfloat16):
        logits = model(x)
    loss = criterion(logits, y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
