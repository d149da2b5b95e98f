import torch
from parts import Words, device
from torch import nn

model = Words().to(device)
optimizer = torch.optim.AdamW(model.parameters())


def get_batch(size):
    tokens = torch.randint(0, 16384, (size, 129), device=device)
    return tokens[:, :-1], tokens[:, 1:]


def estimate_loss():
    model.eval()
    losses = []
    for _ in range(5):
        x, y = get_batch(16)
        logits = model(x)  # fault: unused graph
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten())
        losses.append(loss.item())
    model.train()
    return sum(losses) / len(losses)


for step in range(100):
    if step % 10 == 0:
        print(step, estimate_loss())
    x, y = get_batch(4)
    loss = nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
