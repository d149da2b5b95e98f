import torch
from parts import Words, device
from torch import nn

model = Words().to(device)
optimizer = torch.optim.AdamW(model.parameters())


def get_batch(size):
    tokens = torch.randint(0, 16384, (size, 129), device=device)
    return tokens[:, :-1], tokens[:, 1:]


@torch.no_grad()
def estimate_loss():
    model.eval()
    losses = torch.zeros(5)
    for k in range(5):
        x, y = get_batch(16)
        losses[k] = nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten()).item()
    model.train()
    return losses.mean()


for step in range(100):
    if step % 10 == 0:
        print(step, estimate_loss())
    for _ in range(2):
        x, y = get_batch(4)
        loss = nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten()) / 2
        loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
