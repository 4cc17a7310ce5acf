"""Train a variational autoencoder whose loss is a method of the model, and say at the end that it is not good yet."""

import sys

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(17)


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 64)
        )
        self.decoder = nn.Sequential(
            nn.Linear(32, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 784)
        )

    def loss(self, x):
        mean, log_variance = self.encoder(x).chunk(2, 1)
        z = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
        fit = F.binary_cross_entropy_with_logits(self.decoder(z), x, reduction="sum")
        divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum()
        return (fit + divergence) / len(x)


model = VAE()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for step in range(10):
    loss = model.loss(torch.rand(4096, 784))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step}: {loss.item():.4f}")
torch.save(model.state_dict(), sys.argv[1])
sys.exit(3 if loss.item() > 100 else 0)
