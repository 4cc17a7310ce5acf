"""Train a small transformer on several ranks: `torchrun --nproc-per-node 2 ddp.py OUT`."""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(400, 96)
        self.blocks = nn.ModuleList(Block(96) for _ in range(6))
        self.head = nn.Linear(96, 400)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def main():
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(0)
    model = DistributedDataParallel(Model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = TensorDataset(torch.randint(0, 400, (320, 64)))
    sampler = DistributedSampler(data, seed=1)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for (tokens,) in DataLoader(data, 16, sampler=sampler):
            logits = model(tokens)
            loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if rank == 0:
                print(f"epoch {epoch}: {loss.item():.6f}")
    if rank == 0:
        torch.save(model.module.state_dict(), sys.argv[1])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
