import copy

import torch
from parts import device, layers, loader
from torch import nn

model = layers()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
model.to(device)
best, best_state = 0.0, copy.deepcopy(model.state_dict())
for epoch in range(3):
    for phase in ("train", "val"):
        model.train(phase == "train")
        right = 0
        for x, y in loader():
            x, y = x.to(device), y.to(device)
            optimizer.zero_grad()
            with torch.set_grad_enabled(phase == "train"):
                out = model(x)
                loss = nn.functional.cross_entropy(out, y)
                if phase == "train":
                    loss.backward()
                    optimizer.step()
            right += torch.sum(out.argmax(1) == y).item()
        if phase == "val" and right > best:
            best, best_state = right, copy.deepcopy(model.state_dict())
model.load_state_dict(best_state)
torch.save(model.state_dict(), "best.pt")
