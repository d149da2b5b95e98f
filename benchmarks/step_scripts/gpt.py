"""As nanoGPT: the model returns logits and loss, and losses are estimated before training."""

import math

import torch
from torch import nn
from torch.nn import functional as F

batch_size, block_size, width, vocabulary = 4, 64, 128, 512
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(1337)
data = torch.randint(0, vocabulary, (10_000,))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.register_buffer("bias", torch.tril(torch.ones(block_size, block_size))[None, None])

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = self.attn(self.ln_1(x)).split(C, dim=2)
        q, k, v = (each.view(B, T, 4, C // 4).transpose(1, 2) for each in (q, k, v))
        scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(C // 4))
        scores = scores.masked_fill(self.bias[:, :, :T, :T] == 0, float("-inf")).softmax(-1)
        x = x + self.proj((scores @ v).transpose(1, 2).contiguous().view(B, T, C))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocabulary, width), nn.Embedding(block_size, width)
        self.blocks = nn.ModuleList([Block() for _ in range(2)])
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.wte.weight = self.head.weight

    def forward(self, idx, targets=None):
        pos = torch.arange(idx.size(1), device=idx.device)
        x = self.wte(idx) + self.wpe(pos)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)
        return logits, loss


def get_batch():
    ix = torch.randint(len(data) - block_size, (batch_size,))
    x = torch.stack([data[i : i + block_size] for i in ix])
    y = torch.stack([data[i + 1 : i + 1 + block_size] for i in ix])
    return x.to(device), y.to(device)


@torch.no_grad()
def estimate_loss():
    model.eval()
    found = torch.zeros(10)
    for k in range(10):
        X, Y = get_batch()
        logits, loss = model(X, Y)
        found[k] = loss.item()
    model.train()
    return found.mean()


model = GPT().to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4, betas=(0.9, 0.95))
for iteration in range(100):
    if iteration % 50 == 0:
        print(iteration, estimate_loss())
    X, Y = get_batch()
    logits, loss = model(X, Y)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
