import torch
from parts import device, layers
from torch import nn

G = layers(inputs=64, outputs=256, width=512).to(device)
D = layers(inputs=256, outputs=1, width=512).to(device)
oG, oD = (torch.optim.Adam(net.parameters(), lr=2e-4) for net in (G, D))
history = {"G": [], "D": []}


def train_step(real):
    fake = G(torch.randn(len(real), 64, device=device))
    oD.zero_grad()
    d_loss = nn.functional.softplus(D(fake.detach())).mean()
    d_loss = d_loss + nn.functional.softplus(-D(real)).mean()
    d_loss.backward()
    oD.step()
    oG.zero_grad()
    g_loss = nn.functional.softplus(-D(fake)).mean()  # fault: kept graph
    g_loss.backward()
    oG.step()  # fault: gradients late
    history["G"].append(g_loss)  # fault: kept graph
    history["D"].append(d_loss.item())


for step in range(500):
    train_step(torch.randn(128, 256, device=device))
