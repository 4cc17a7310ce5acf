"""Train a convolutional network by Lightning, with validation."""

import logging
import sys

import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)


def stage(inner, outer):
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(inner, outer, 3, padding=1), nn.BatchNorm2d(outer), nn.GELU()),
        nn.Sequential(nn.Conv2d(outer, outer, 3, padding=1), nn.BatchNorm2d(outer), nn.GELU()),
    )


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stages = nn.Sequential(stage(3, 16), nn.MaxPool2d(2), stage(16, 32), nn.MaxPool2d(2), stage(32, 64))
        self.head = nn.Linear(64, 10)

    def forward(self, x):
        return self.head(self.stages(x).mean((2, 3)))


class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = Net()

    def training_step(self, batch, _):
        x, y = batch
        loss = F.cross_entropy(self.net(x), y)
        print(f"loss {loss.item():.6f}")
        return loss

    def validation_step(self, batch, _):
        x, y = batch
        print(f"validation {F.cross_entropy(self.net(x), y).item():.6f}")

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


if __name__ == "__main__":
    pl.seed_everything(5, verbose=False)
    data = TensorDataset(torch.randn(320, 3, 32, 32), torch.randint(0, 10, (320,)))
    loader = DataLoader(data, 64)
    trainer = pl.Trainer(
        max_epochs=2,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    module = Module()
    trainer.fit(module, loader, DataLoader(data, 32))
    torch.save(module.state_dict(), sys.argv[1])
