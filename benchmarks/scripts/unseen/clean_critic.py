import torch
from parts import device, layers, loader
from torch import nn

generator = layers(inputs=64, outputs=256, width=512).to(device)
critic = layers(inputs=256, outputs=1, width=512).to(device)
of_generator = torch.optim.Adam(generator.parameters(), lr=1e-4)
of_critic = torch.optim.Adam(critic.parameters(), lr=1e-4)


def penalty(real, fake):
    mix = torch.rand(len(real), 1, device=device)
    between = (mix * real + (1 - mix) * fake).requires_grad_()
    (gradient,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
    return ((gradient.norm(dim=1) - 1) ** 2).mean()


for index, (real, _) in enumerate(loader()):
    real = real.to(device)
    with torch.no_grad():
        fake = generator(torch.randn(len(real), 64, device=device))
    of_critic.zero_grad()
    loss = critic(fake).mean() - critic(real).mean() + 10 * penalty(real, fake)
    loss.backward()
    of_critic.step()
    if index % 2 == 1:
        of_generator.zero_grad()
        made = generator(torch.randn(len(real), 64, device=device))
        loss = -critic(made).mean()
        loss.backward()
        of_generator.step()
