import torch
from parts import device, layers, loader
from torch import nn


def main():
    model = layers(outputs=1000)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)  # fault: other parameters
    model[-1] = nn.Linear(1024, 10)
    model.to(device)
    for epoch in range(2):
        for x, y in loader(classes=10):
            optimizer.zero_grad(set_to_none=True)
            loss = nn.functional.cross_entropy(model(x.to(device)), y.to(device))
            loss.backward()
            optimizer.step()


main()
