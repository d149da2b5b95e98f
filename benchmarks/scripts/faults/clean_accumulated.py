import torch
from parts import Words, device, text
from torch import nn

model = Words().to(device)
optimizer = torch.optim.AdamW(model.parameters())
every, losses = 4, []
for epoch in range(3):
    for index, tokens in enumerate(text()):
        tokens = tokens.to(device)
        loss = nn.functional.cross_entropy(
            model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()
        )
        (loss / every).backward()
        losses.append(loss.detach())
        if (index + 1) % every == 0:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    print(torch.stack(losses).mean().item())
