"""A regression with two losses, by SGD with momentum and a schedule."""

import torch
from torch import nn
from torch.nn import functional as F

device = "cuda" if torch.cuda.is_available() else "cpu"


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(32, 512), nn.Tanh(), nn.Linear(512, 512), nn.Tanh())
        self.mean, self.kind = nn.Linear(512, 1), nn.Linear(512, 7)

    def forward(self, x):
        x = self.body(x)
        return {"mean": self.mean(x), "kind": self.kind(x)}


model = Two().to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
for _ in range(10):
    x = torch.randn(128, 32).to(device)
    value, kind = torch.randn(128).to(device), torch.randint(0, 7, (128,)).to(device)
    out = model(x)
    loss = F.mse_loss(out["mean"].squeeze(1), value)
    loss = loss + 0.1 * F.cross_entropy(out["kind"], kind)
    loss.backward()
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()
