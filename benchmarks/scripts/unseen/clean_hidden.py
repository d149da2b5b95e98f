import torch
from parts import device
from torch import nn


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.GRU(128, 512, batch_first=True)
        self.head = nn.Linear(512, 128)

    def forward(self, x, state):
        out, state = self.cell(x, state)
        return self.head(out), state


model = Reader().to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
state = torch.zeros(1, 32, 512, device=device)
for step in range(200):
    x = torch.randn(32, 64, 128, device=device)
    out, state = model(x, state.detach())
    loss = nn.functional.mse_loss(out[:, :-1], x[:, 1:])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
