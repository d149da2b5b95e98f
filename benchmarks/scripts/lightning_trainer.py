import torch, lightning as L
from torch import nn


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(32 * 14 * 14, 10),
        )

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, i):
        x, y = batch
        loss = nn.functional.cross_entropy(self(x), y)
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, i):
        x, y = batch
        self.log("acc", (self(x).argmax(1) == y).float().mean(), prog_bar=True)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), 1e-3)


data = torch.utils.data.TensorDataset(torch.randn(2000, 1, 28, 28), torch.randint(0, 10, (2000,)))
train = torch.utils.data.DataLoader(data, 64, shuffle=True, num_workers=0)
valid = torch.utils.data.DataLoader(data, 64)
L.Trainer(
    max_epochs=2,
    accelerator="auto",
    devices=1,
    precision="16-mixed" if torch.cuda.is_available() else 32,
).fit(Net(), train, valid)
