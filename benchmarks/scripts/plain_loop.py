import torch, argparse
from torch import nn

p = argparse.ArgumentParser()
p.add_argument("--hidden", type=int, default=1024)
a = p.parse_args()
device = "cuda" if torch.cuda.is_available() else "cpu"
data = torch.utils.data.TensorDataset(torch.randn(1000, 784), torch.randint(0, 10, (1000,)))
loader = torch.utils.data.DataLoader(data, batch_size=64, shuffle=True, num_workers=0)
model = nn.Sequential(nn.Linear(784, a.hidden), nn.ReLU(), nn.Linear(a.hidden, 10))
opt = torch.optim.AdamW(model.parameters())
model.to(device)
for epoch in range(1):
    model.train()
    for i, (x, y) in enumerate(loader):
        x, y = x.to(device), y.to(device)
        opt.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        opt.step()
        if i % 10 == 0:
            print(epoch, i, loss.item())
    model.eval()
    correct = 0
    with torch.no_grad():
        for x, y in loader:
            x, y = x.to(device), y.to(device)
            correct += (model(x).argmax(1) == y).sum().item()
    print("accuracy", correct / 1000, torch.cuda.max_memory_allocated() if device == "cuda" else 0)
    torch.save(model.state_dict(), "out.pt")
