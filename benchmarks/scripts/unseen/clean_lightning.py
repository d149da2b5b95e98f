import lightning as L
import torch
from parts import layers, loader
from torch import nn


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = layers(outputs=4096)
        self.right = []

    def training_step(self, batch, index):
        x, y = batch
        loss = nn.functional.cross_entropy(self.net(x), y)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, index):
        x, y = batch
        out = self.net(x)
        self.right.append((out.argmax(-1) == y).float().mean())
        self.log("valid", nn.functional.cross_entropy(out, y))

    def on_validation_epoch_end(self):
        self.log("right", torch.stack(self.right).mean())
        self.right.clear()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


trainer = L.Trainer(
    max_epochs=2, accelerator="auto", devices=1, accumulate_grad_batches=2, precision="bf16-mixed"
)
trainer.fit(Net(), loader(), loader())
