import torch
from parts import device, layers, loader
from torch import nn

generator = layers(inputs=64, outputs=256, width=2048).to(device)
critic = layers(inputs=256, outputs=1, width=512).to(device)
loss_of = nn.BCEWithLogitsLoss()
of_generator = torch.optim.Adam(generator.parameters(), lr=2e-4)
of_critic = torch.optim.Adam(critic.parameters(), lr=2e-4)
for real, _ in loader(num=8192, batch=1024):
    real = real.to(device)
    ones, zeros = torch.ones(len(real), 1, device=device), torch.zeros(len(real), 1, device=device)
    of_critic.zero_grad()
    fake = generator(torch.randn(len(real), 64, device=device))  # fault: unused graph
    loss = loss_of(critic(real), ones) + loss_of(critic(fake.detach()), zeros)
    loss.backward()
    of_critic.step()
    of_generator.zero_grad()
    made = generator(torch.randn(len(real), 64, device=device))
    loss = loss_of(critic(made), ones)
    loss.backward()
    of_generator.step()
    del fake, made
    print(loss.item())
