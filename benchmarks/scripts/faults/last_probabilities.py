import torch
from parts import Words, device, text
from torch import nn

model = Words().to(device)
optimizer = torch.optim.AdamW(model.parameters())
for tokens in text():
    tokens = tokens.to(device)
    logits = model(tokens[:, :-1])
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    probabilities = logits.detach().softmax(-1)  # fault: last step
    del logits
    print(loss.item(), probabilities.amax(-1).mean().item())
