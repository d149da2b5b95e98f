import torch
from parts import device, layers, loader
from torch import nn


def main():
    pretrained = layers(width=2048).to(device)  # fault: unused copy
    model = layers(width=2048).to(device)
    model.load_state_dict(pretrained.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for x, y in loader():
        loss = nn.functional.cross_entropy(model(x.to(device)), y.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()  # fault: gradients late
    torch.save(model.state_dict(), "out.pt")


main()
