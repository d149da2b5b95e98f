import torch
from parts import Words, device, text
from torch import nn

model = Words().to(device).to(torch.bfloat16)
optimizer = torch.optim.AdamW(model.parameters())
for tokens in text():
    tokens = tokens.to(device)
    logits = model(tokens[:, :-1])
    logits = logits.float()  # fault: float logits
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    del logits
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
