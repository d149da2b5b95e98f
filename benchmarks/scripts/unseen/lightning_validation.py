import lightning as L
import torch
from parts import layers, loader
from torch import nn


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = layers(outputs=4096)
        self.seen = []

    def training_step(self, batch, index):
        x, y = batch
        return nn.functional.cross_entropy(self.net(x), y)

    def validation_step(self, batch, index):
        x, y = batch
        scores = self.net(x).log_softmax(-1)  # fault: evaluation kept
        self.seen.append(scores)  # fault: evaluation kept
        self.log("loss", nn.functional.nll_loss(scores, y))

    def on_validation_epoch_end(self):
        print(torch.cat(self.seen).argmax(-1).float().mean())
        self.seen.clear()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


trainer = L.Trainer(max_epochs=2, accelerator="auto", devices=1, num_sanity_val_steps=0)
trainer.fit(Net(), loader(), loader())
