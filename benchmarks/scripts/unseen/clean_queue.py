import copy

import torch
from parts import device, layers, loader
from torch import nn

encoder = layers(outputs=128).to(device)
momentum = copy.deepcopy(encoder)
for weight in momentum.parameters():
    weight.requires_grad = False
queue = nn.functional.normalize(torch.randn(128, 16384, device=device), dim=0)
place = 0
optimizer = torch.optim.SGD(encoder.parameters(), lr=0.03, momentum=0.9, weight_decay=1e-4)
for epoch in range(2):
    for x, _ in loader():
        x = x.to(device)
        with torch.no_grad():
            for mine, theirs in zip(momentum.parameters(), encoder.parameters()):
                mine.data = mine.data * 0.999 + theirs.data * 0.001
            keys = nn.functional.normalize(momentum(x + 0.1 * torch.randn_like(x)), dim=1)
        found = nn.functional.normalize(encoder(x), dim=1)
        positive = (found * keys).sum(1, keepdim=True)
        logits = torch.cat([positive, found @ queue.clone().detach()], dim=1) / 0.07
        labels = torch.zeros(len(logits), dtype=torch.long, device=device)
        loss = nn.functional.cross_entropy(logits, labels)
        queue[:, place : place + len(x)] = keys.T
        place = (place + len(x)) % 16384
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        del logits, positive
        print(loss.item())
