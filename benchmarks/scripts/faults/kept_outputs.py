import torch
from parts import device, layers
from torch import nn

model = layers(outputs=2048).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
history = []
for step in range(1000):
    x = torch.randn(256, 256, device=device)
    y = torch.randint(0, 100, (256,), device=device)
    out = model(x)  # fault: kept graph
    loss = nn.functional.cross_entropy(out, y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    history.append(out)  # fault: kept graph
