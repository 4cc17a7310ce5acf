"""Train an LSTM on sequences of several lengths; its hidden state is carried from batch to batch, and cut off."""

import sys

import torch
from torch import nn

torch.manual_seed(13)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.LSTMCell(64, 256)

    def forward(self, x, state):
        seen = []
        for step in range(x.shape[1]):
            state = self.cell(x[:, step], state)
            seen.append(torch.tanh(state[0]) * torch.sigmoid(state[1]))
        return torch.stack(seen, 1), state


model = Model()
optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
state = (torch.zeros(32, 256), torch.zeros(32, 256))
for step in range(10):
    x = torch.randn(32, 60 + 10 * (step % 3), 64)
    seen, state = model(x, state)
    loss = (seen[..., :64] - x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    state = tuple(each.detach() for each in state)
    print(f"step {step}: {loss.item():.6f}")
torch.save(model.state_dict(), sys.argv[1])
