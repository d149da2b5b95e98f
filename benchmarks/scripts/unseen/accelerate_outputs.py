import torch
from accelerate import Accelerator
from parts import Words, text
from torch import nn

accelerator = Accelerator()
model = Words()
optimizer = torch.optim.AdamW(model.parameters())
model, optimizer, train, valid = accelerator.prepare(model, optimizer, text(), text(num=48))


def step(tokens):
    out = model(tokens[:, :-1])  # fault: evaluation kept
    return out, nn.functional.cross_entropy(out.flatten(0, 1), tokens[:, 1:].flatten())


for epoch in range(2):
    model.train()
    for tokens in train:
        _, loss = step(tokens)
        del _
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    logits = []
    for tokens in valid:
        with torch.no_grad():
            out, loss = step(tokens)  # fault: evaluation kept
        logits.append(accelerator.gather_for_metrics(out))  # fault: evaluation kept
    del out
    print(torch.cat(logits).argmax(-1).cpu().float().mean())
    del logits
