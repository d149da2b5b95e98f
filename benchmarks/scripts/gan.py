import torch
from torch import nn

dev = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
G = nn.Sequential(
    nn.ConvTranspose2d(100, 256, 4, 1, 0, bias=False),
    nn.BatchNorm2d(256),
    nn.ReLU(True),
    nn.ConvTranspose2d(256, 128, 4, 2, 1, bias=False),
    nn.BatchNorm2d(128),
    nn.ReLU(True),
    nn.ConvTranspose2d(128, 3, 4, 2, 1, bias=False),
    nn.Tanh(),
).to(dev)
D = nn.Sequential(
    nn.Conv2d(3, 128, 4, 2, 1, bias=False),
    nn.LeakyReLU(0.2, inplace=True),
    nn.Conv2d(128, 256, 4, 2, 1, bias=False),
    nn.BatchNorm2d(256),
    nn.LeakyReLU(0.2, inplace=True),
    nn.Conv2d(256, 1, 4, 1, 0, bias=False),
    nn.Sigmoid(),
).to(dev)


def init(m):
    if "Conv" in m.__class__.__name__:
        nn.init.normal_(m.weight.data, 0.0, 0.02)


G.apply(init)
D.apply(init)
crit = nn.BCELoss()
fixed = torch.randn(64, 100, 1, 1, device=dev)
oD = torch.optim.Adam(D.parameters(), lr=2e-4, betas=(0.5, 0.999))
oG = torch.optim.Adam(G.parameters(), lr=2e-4, betas=(0.5, 0.999))
data = torch.utils.data.DataLoader(
    torch.utils.data.TensorDataset(torch.randn(512, 3, 16, 16)), 64, shuffle=True, num_workers=0
)
for epoch in range(2):
    for i, (real,) in enumerate(data):
        D.zero_grad()
        real = real.to(dev)
        b = real.size(0)
        label = torch.full((b,), 1.0, dtype=torch.float, device=dev)
        out = D(real).view(-1)
        errR = crit(out, label)
        errR.backward()
        Dx = out.mean().item()
        noise = torch.randn(b, 100, 1, 1, device=dev)
        fake = G(noise)
        label.fill_(0.0)
        out = D(fake.detach()).view(-1)
        errF = crit(out, label)
        errF.backward()
        oD.step()
        G.zero_grad()
        label.fill_(1.0)
        out = D(fake).view(-1)
        errG = crit(out, label)
        errG.backward()
        oG.step()  # fault: gradients late
        print(f"[{epoch}][{i}] {errG.item():.4f} {Dx:.4f}")
        if i % 4 == 0:
            with torch.no_grad():
                fake = G(fixed).detach().cpu()
    torch.save(G.state_dict(), f"G_{epoch}.pth")
