"""Train a LightningModule in a loop of one's own by Fabric, with an evaluation before the first step."""

import sys

import lightning_fabric
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.inner = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        return x + self.inner(self.norm(x))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(64) for _ in range(6)])
        self.head = nn.Linear(64, 5)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@torch.no_grad()
def evaluate(model, loader):
    model.eval()
    right = sum((model(x).argmax(1) == y).sum().item() for x, y in loader)
    model.train()
    return right


if __name__ == "__main__":
    torch.manual_seed(7)
    fabric = lightning_fabric.Fabric(accelerator="cpu", devices=1)
    model, data = Net(), TensorDataset(torch.randn(2048, 64), torch.randint(0, 5, (2048,)))
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    training, validation = fabric.setup_dataloaders(DataLoader(data, 512), DataLoader(data, 128))
    print("before", evaluate(model, validation))
    for epoch in range(3):
        for x, y in training:
            loss = F.cross_entropy(model(x), y)
            fabric.backward(loss)
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()
        print(epoch, f"{loss.item():.6f}", evaluate(model, validation))
    torch.save(model.state_dict(), sys.argv[1])
