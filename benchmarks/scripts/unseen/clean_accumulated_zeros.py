import torch
from parts import Words, device, text
from torch import nn

model = Words(width=512, depth=6, words=4096).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
every = 2
for epoch in range(2):
    for index, tokens in enumerate(text(words=4096, batch=4)):
        tokens = tokens.to(device)
        out = model(tokens[:, :-1])
        loss = nn.functional.cross_entropy(out.flatten(0, 1), tokens[:, 1:].flatten()) / every
        loss.backward()
        del out
        if index % every == every - 1:
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
