"""AdamW with weight decay for matrices only."""

import torch
from torch import nn

device = "cuda" if torch.cuda.is_available() else "cpu"
layer = nn.TransformerEncoderLayer(64, 4, 256, batch_first=True)
model = nn.Sequential(nn.Embedding(100, 64), nn.TransformerEncoder(layer, 2), nn.Linear(64, 100))
model.to(device)
decayed = [p for p in model.parameters() if p.dim() >= 2]
others = [p for p in model.parameters() if p.dim() < 2]
groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
optimizer = torch.optim.AdamW(groups, lr=3e-4, betas=(0.9, 0.95))
for _ in range(10):
    x = torch.randint(0, 100, (8, 48)).to(device)
    logits = model(x)
    loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), x[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
