"""A script with arguments, a data set and an evaluation."""

import argparse

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=4)
parser.add_argument("--width", type=int, required=True)
parser.add_argument("--epochs", type=int, default=2)
args = parser.parse_args()


class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 256

    def __getitem__(self, index):
        torch.manual_seed(index)
        return torch.randn(3, 16, 16), index % 2


class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.conv = nn.Conv2d(3, width, 3, padding=1)
        self.head = nn.Linear(width * 256, 1)

    def forward(self, x):
        return self.head(self.conv(x).relu().flatten(1))


def main():
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    loader = torch.utils.data.DataLoader(Data(), args.batch_size, shuffle=True, num_workers=2)
    model = Net(args.width).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, weight_decay=1e-5)
    for epoch in range(args.epochs):
        model.train()
        for x, y in loader:
            x, y = x.to(device), y.to(device).float()
            prediction = model(x).squeeze(-1)
            loss = nn.functional.binary_cross_entropy_with_logits(prediction, y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            right = sum(((model(x.to(device)) > 0).squeeze(-1).cpu() == y).sum() for x, y in loader)
        print(epoch, right)


if __name__ == "__main__":
    main()
