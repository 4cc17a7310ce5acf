"""Train a generator against a discriminator, each with an optimizer of its own."""

import sys

import torch
from torch import nn

torch.manual_seed(11)


def up(inner, outer):
    return nn.Sequential(nn.ConvTranspose2d(inner, outer, 4, 2, 1), nn.BatchNorm2d(outer), nn.ReLU())


def down(inner, outer):
    return nn.Sequential(nn.Conv2d(inner, outer, 4, 2, 1), nn.LeakyReLU(0.2))


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(32, 128 * 4 * 4)
        self.ups = nn.ModuleList([up(128, 64), up(64, 32), up(32, 16)])
        self.last = nn.Conv2d(16, 3, 3, padding=1)

    def forward(self, z):
        x = self.first(z).view(-1, 128, 4, 4)
        for layer in self.ups:
            x = layer(x)
        return torch.tanh(self.last(x))


class Discriminator(nn.Module):
    def __init__(self):
        super().__init__()
        self.downs = nn.ModuleList([down(3, 32), down(32, 64), down(64, 128)])
        self.last = nn.Linear(128 * 4 * 4, 1)

    def forward(self, x):
        for layer in self.downs:
            x = layer(x)
        return self.last(x.flatten(1))


generator, discriminator = Generator(), Discriminator()
optimizer_g = torch.optim.Adam(generator.parameters(), lr=2e-4, betas=(0.5, 0.999))
optimizer_d = torch.optim.Adam(discriminator.parameters(), lr=2e-4, betas=(0.5, 0.999))
loss_of = nn.BCEWithLogitsLoss()
for step in range(12):
    real, noise = torch.rand(64, 3, 32, 32) * 2 - 1, torch.randn(64, 32)
    ones, zeros = torch.ones(64, 1), torch.zeros(64, 1)
    fake = generator(noise)
    optimizer_d.zero_grad()
    loss_d = loss_of(discriminator(real), ones) + loss_of(discriminator(fake.detach()), zeros)
    loss_d.backward()
    optimizer_d.step()
    optimizer_g.zero_grad()
    loss_g = loss_of(discriminator(fake), ones)
    loss_g.backward()
    optimizer_g.step()
    print(f"step {step}: generator {loss_g.item():.6f}, discriminator {loss_d.item():.6f}")
torch.save([generator.state_dict(), discriminator.state_dict()], sys.argv[1])
