import torch
from parts import Words, device, text
from torch import nn

model = Words(words=8192).to(device)
optimizer = torch.optim.AdamW(model.parameters())


def loss_of(logits, targets):
    logits = logits.to(torch.float32)  # fault: float logits
    return nn.functional.cross_entropy(logits.view(-1, logits.shape[-1]), targets.reshape(-1))


for epoch in range(1):
    for tokens in text(words=8192):
        tokens = tokens.to(device)
        with torch.autocast(device, dtype=torch.bfloat16):
            logits = model(tokens[:, :-1])
        loss = loss_of(logits, tokens[:, 1:])
        del logits
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()  # fault: gradients late
