"""A language model whose loss views the logits with the sizes of its batch."""

import torch
from torch import nn
from torch.nn import functional as F

B, T, V = 8, 32, 1000
device = "cuda" if torch.cuda.is_available() else "cpu"


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(V, 64)
        self.rnn = nn.LSTM(64, 64, batch_first=True)
        self.head = nn.Linear(64, V)

    def forward(self, x):
        return self.head(self.rnn(self.embedding(x))[0])


model = Model().to(device)
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(10):
    tokens = torch.randint(0, V, (B, T + 1))
    x, y = tokens[:, :-1].to(device), tokens[:, 1:].to(device)
    logits = model(x)
    logits = logits.view(B * T, V)
    targets = y.reshape(B * T)
    loss = F.cross_entropy(logits, targets)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
