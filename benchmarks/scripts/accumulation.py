"""Train an encoder in bfloat16 by autocast, with four micro-batches a step and weights averaged over time."""

import copy
import sys

import torch
from torch import nn

torch.manual_seed(1)


class Classifier(nn.Module):
    def __init__(self, width=128, layers=4):
        super().__init__()
        self.embed = nn.Embedding(500, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers)
        self.head = nn.Linear(width, 5)

    def forward(self, tokens):
        return self.head(self.encoder(self.embed(tokens)).mean(1))


model = Classifier()
average = None
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
loss_of = nn.CrossEntropyLoss()
micro_batches = 4
for step in range(6):
    total = 0.0
    for _ in range(micro_batches):
        tokens, labels = torch.randint(0, 500, (16, 96)), torch.randint(0, 5, (16,))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = loss_of(model(tokens), labels) / micro_batches
        loss.backward()
        total += loss.item()
    optimizer.step()
    optimizer.zero_grad()
    if average is None:
        average = copy.deepcopy(model)  # made while the model is trained, as many scripts do
    with torch.no_grad():
        for mean, now in zip(average.parameters(), model.parameters()):
            mean.lerp_(now, 0.1)
    print(f"step {step}: {total:.6f}")
torch.save({"model": model.state_dict(), "average": average.state_dict()}, sys.argv[1])
torch.save(model, sys.argv[1] + ".whole")
