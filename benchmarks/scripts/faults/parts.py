"""Models and made-up data of the scripts beside this file."""

import torch
from torch import nn

device = "cuda" if torch.cuda.is_available() else "cpu"


def layers(width=1024, depth=4, inputs=256, outputs=100):
    inner = [part for _ in range(depth) for part in (nn.Linear(width, width), nn.GELU())]
    return nn.Sequential(nn.Linear(inputs, width), nn.GELU(), *inner, nn.Linear(width, outputs))


class Words(nn.Module):
    def __init__(self, words=16384, width=256, depth=2):
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True) for _ in range(depth)
        )
        self.head = nn.Linear(width, words, bias=False)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loader(num=2560, batch=256, inputs=256, classes=100):
    data = torch.utils.data.TensorDataset(
        torch.randn(num, inputs), torch.randint(0, classes, (num,))
    )
    return torch.utils.data.DataLoader(data, batch, shuffle=True)


def text(num=128, batch=8, length=128, words=16384):
    return torch.utils.data.DataLoader(torch.randint(0, words, (num, length + 1)), batch)
