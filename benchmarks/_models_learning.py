"""Reinforcement learning, self-supervision, and learning to learn."""

from __future__ import annotations

import copy

import torch
from _models_kit import Make, Tried, itself, labels, mlp, plain
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional


def averaged(online: nn.Module, slow: nn.Module, share: float = 0.1) -> None:
    """Move the parameters of `slow` by a share towards those of `online`."""
    with torch.no_grad():
        for old, new in zip(slow.parameters(), online.parameters(), strict=True):
            old.lerp_(new, share)


def frozen(module: nn.Module) -> nn.Module:
    """Return a copy whose parameters need no gradients."""
    return copy.deepcopy(module).requires_grad_(False)


class Siamese(nn.Module):
    """One network called twice, with a loss of triplets and hard negatives."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            nn.Conv2d(1, 8, 3, 2, 1),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Conv2d(8, 16, 3, 2, 1),
            nn.Flatten(),
            nn.Linear(256, 32),
        )

    def forward(self, images: Tensor) -> Tensor:
        """Return codes of images `[batch, 1, 16, 16]`."""
        return self.inner(images)


def _triplets(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    left, right = model(batch[0]), model(batch[1])
    distances = torch.cdist(left, right)
    hardest = (distances + 1e6 * torch.eye(len(left))).amin(1)
    return (distances.diagonal() - hardest + 1).relu().mean()


class Values(nn.Module):
    """DQN: a dueling network with a slow target, double Q-learning, a Huber loss."""

    def __init__(self) -> None:
        super().__init__()
        self.online = nn.ModuleDict({"body": mlp(8, 64, 64), "value": nn.Linear(64, 1), "gain": nn.Linear(64, 4)})
        self.slow = frozen(self.online)

    def values(self, net: nn.ModuleDict, states: Tensor) -> Tensor:
        """Return the values of the actions."""
        body = net["body"](states).relu()
        gain = net["gain"](body)
        return net["value"](body) + gain - gain.mean(1, keepdim=True)

    def forward(self, batch: tuple[Tensor, ...]) -> Tensor:
        """Return the loss of states, actions, rewards, next states and ends."""
        states, actions, rewards, later, ends = batch
        with torch.no_grad():
            best = self.values(self.online, later).argmax(1, keepdim=True)
            wanted = rewards + 0.99 * ~ends * self.values(self.slow, later).gather(1, best)[:, 0]
        return functional.smooth_l1_loss(self.values(self.online, states).gather(1, actions[:, None])[:, 0], wanted)


class Critic(nn.Module):
    """SAC: a squashed Gaussian policy, two critics, slow targets and a learned temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.policy, self.critics = mlp(8, 64, 4), nn.ModuleList(mlp(10, 64, 64, 1) for _ in range(2))
        self.slow, self.temperature = frozen(self.critics), nn.Parameter(torch.zeros(()))

    def act(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Return actions `[batch, 2]` and their log-probabilities."""
        mean, spread = self.policy(states).chunk(2, 1)
        normal = torch.distributions.Normal(mean, spread.clamp(-5, 2).exp())
        raw = normal.rsample()
        return raw.tanh(), (normal.log_prob(raw) - (1 - raw.tanh().square() + 1e-6).log()).sum(1)

    def forward(self, batch: tuple[Tensor, ...]) -> Tensor:
        """Return the loss of states, actions, rewards, next states and ends."""
        states, actions, rewards, later, ends = batch
        heat = self.temperature.exp()
        with torch.no_grad():
            moves, chances = self.act(later)
            slow = torch.cat([critic(torch.cat([later, moves], 1)) for critic in self.slow], 1).amin(1)
            wanted = rewards + 0.99 * ~ends * (slow - heat * chances)
        known = torch.cat([states, actions], 1)
        loss = sum(functional.mse_loss(critic(known)[:, 0], wanted) for critic in self.critics)
        moves, chances = self.act(states)
        mine = torch.cat([states, moves], 1)
        judged = [functional_call(critic, {k: v.detach() for k, v in critic.named_parameters()}, (mine,))
                  for critic in self.critics]  # fmt: skip
        loss = loss + (heat.detach() * chances - torch.cat(judged, 1).amin(1)).mean()
        return loss - (heat * (chances.detach() - 2)).mean()


class Clipped(nn.Module):
    """PPO: clipped ratios, normalized advantages, an entropy bonus."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.policy, self.value = mlp(8, 64, 64, activation=nn.Tanh), nn.Linear(64, 4), nn.Linear(64, 1)

    def forward(self, batch: tuple[Tensor, ...]) -> Tensor:
        """Return the loss of states, actions, their old log-probabilities, and returns."""
        states, actions, before, returns = batch
        body = self.body(states).tanh()
        chances, values = torch.distributions.Categorical(logits=self.policy(body)), self.value(body)[:, 0]
        gains = returns - values.detach()
        gains = (gains - gains.mean()) / (gains.std() + 1e-8)
        ratio = (chances.log_prob(actions) - before).exp()
        policy = -torch.minimum(ratio * gains, ratio.clamp(0.8, 1.2) * gains).mean()
        return policy + functional.mse_loss(values, returns) / 2 - 0.01 * chances.entropy().mean()


class Recurrent(nn.Module):
    """A recurrent policy with rewards to go, and states that ends of episodes set to zero (A2C)."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.out = nn.GRUCell(8, 32), nn.Linear(32, 5)

    def forward(self, batch: tuple[Tensor, ...]) -> Tensor:
        """Return the loss of states `[time, batch, 8]`, actions, rewards and ends."""
        states, actions, rewards, ends = batch
        hidden, found = torch.zeros(states.shape[1], 32), []
        for state, end in zip(states, ends, strict=True):
            hidden = self.cell(state, hidden)
            found.append(self.out(hidden))
            hidden = hidden * ~end[:, None]
        logits, values = torch.stack(found).split([4, 1], 2)
        total, returns = torch.zeros(states.shape[1]), []
        for reward, end in zip(rewards.flip(0), ends.flip(0), strict=True):
            total = reward + 0.95 * total * ~end
            returns.append(total)
        gains = torch.stack(returns[::-1]) - values[..., 0]
        chances = logits.log_softmax(2).gather(2, actions[..., None])[..., 0]
        return gains.square().mean() - (chances * gains.detach()).mean()


class Contrast(nn.Module):
    """SimCLR: two views by random crops and noise, NT-Xent (Chen et al. 2020)."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(2))
        self.head = mlp(64, 64, 32)

    def forward(self, images: Tensor) -> Tensor:
        """Return the loss of images `[batch, 3, 32, 32]`."""
        left = images[..., 4:28, 4:28] + 0.1 * torch.randn(len(images), 3, 24, 24)
        right = images[..., :24, 8:].flip(3) * torch.empty(len(images), 1, 1, 1).uniform_(0.8, 1.2)
        codes = functional.normalize(self.head(self.inner(torch.cat([left, right])).flatten(1)))
        scores = (codes @ codes.T / 0.2).fill_diagonal_(-1e9)
        return functional.cross_entropy(scores, torch.arange(len(codes)).roll(len(images)))


class Teacher(nn.Module):
    """BYOL: a slow teacher, a predictor, both views (Grill et al. 2020)."""

    def __init__(self) -> None:
        super().__init__()
        self.online = nn.Sequential(
            nn.Conv2d(3, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Linear(4096, 32)
        )
        self.slow, self.guess = frozen(self.online), mlp(32, 64, 32)

    def forward(self, images: Tensor) -> Tensor:
        """Return the loss of images `[batch, 3, 32, 32]`."""
        left, right = images + 0.1 * torch.randn_like(images), images.flip(3)
        with torch.no_grad():
            wanted = [self.slow(right), self.slow(left)]
        guesses = [self.guess(self.online(view)) for view in (left, right)]
        return sum(2 - 2 * functional.cosine_similarity(*pair).mean() for pair in zip(guesses, wanted, strict=True))


class Twins(nn.Module):
    """VICReg: variance, invariance and covariance (Bardes et al. 2022)."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp(64, 128, 64)

    def forward(self, rows: Tensor) -> Tensor:
        """Return the loss of rows `[batch, 64]`."""
        codes = [self.inner(functional.dropout(rows, 0.2)) for _ in range(2)]
        loss = 25 * functional.mse_loss(*codes)
        for code in codes:
            code = code - code.mean(0)
            matrix = code.T @ code / (len(code) - 1)
            loss = loss + 25 * (1 - (code.var(0) + 1e-4).sqrt()).relu().mean()
            loss = loss + (matrix.square().sum() - matrix.diagonal().square().sum()) / 64
        return loss


class Distilled(nn.Module):
    """DINO: a centred and sharpened teacher, whose centre is a buffer that the step writes (Caron et al. 2021)."""

    centre: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.student = mlp(64, 96, 32, activation=nn.GELU)
        self.slow = frozen(self.student)
        self.register_buffer("centre", torch.zeros(32))

    def forward(self, rows: Tensor) -> Tensor:
        """Return the loss of rows `[batch, 64]`."""
        with torch.no_grad():
            taught = self.slow(rows)
            wanted = ((taught - self.centre) / 0.05).softmax(1)
            self.centre.lerp_(taught.mean(0), 0.1)
        return -(wanted * (self.student(functional.dropout(rows, 0.3)) / 0.1).log_softmax(1)).sum(1).mean()


class Inner(nn.Module):
    """MAML: three steps of SGD inside, through which the outer loss is differentiated (Finn et al. 2017)."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(1, 40, 40, 1)

    def forward(self, batch: tuple[Tensor, ...]) -> Tensor:
        """Return the loss of points and values, of a task and of its test."""
        points, values, test_points, test_values = batch
        weights = dict(self.net.named_parameters())
        for _ in range(3):
            loss = functional.mse_loss(functional_call(self.net, weights, (points,)), values)
            slopes = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
            weights = {name: each - 0.01 * slope for (name, each), slope in zip(weights.items(), slopes, strict=True)}
        return functional.mse_loss(functional_call(self.net, weights, (test_points,)), test_values)


class Prototypes(nn.Module):
    """Prototypical networks: means of each class, by groups (Snell et al. 2017)."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp(32, 64, 64, 32)

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Return the loss of supports `[ways, shots, 32]` and queries."""
        means = self.inner(batch[0]).mean(1)
        distances = torch.cdist(self.inner(batch[1]).flatten(0, 1), means)
        wanted = torch.arange(len(means)).repeat_interleave(batch[1].shape[1])
        return functional.cross_entropy(-distances, wanted)


class Adversary(nn.Module):
    """A domain adversary behind a reversed gradient, by a custom function (Ganin et al. 2016)."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.label, self.domain = mlp(32, 64, 32), nn.Linear(32, 10), mlp(32, 32, 2)

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Return the loss of rows `[2, batch, 32]` of two domains and classes of the first."""
        codes = self.body(batch[0])
        domains = torch.arange(2).repeat_interleave(codes.shape[1])
        fooled = functional.cross_entropy(self.domain(_Reversed.apply(codes)).flatten(0, 1), domains)
        return functional.cross_entropy(self.label(codes[0]), batch[1]) + fooled


class _Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, inputs: Tensor) -> Tensor:  # noqa: ARG004
        return inputs.view_as(inputs)

    @staticmethod
    def backward(ctx: object, slopes: Tensor) -> Tensor:  # noqa: ARG004
        return -slopes


def _moves(rows: int, actions: Tensor) -> tuple[Tensor, ...]:
    return (
        torch.randn(16 * rows, 8),
        actions,
        torch.randn(16 * rows),
        torch.randn(16 * rows, 8),
        torch.rand(16 * rows) > 0.9,
    )


def _slowly(model: type[nn.Module], online: str, batch: object) -> Make:
    def after(made: nn.Module) -> None:
        averaged(getattr(made, online), made.slow)

    return lambda: Tried(model=model(), loss=itself, batch=batch, after=after)


LEARNING: dict[str, Make] = {
    "siamese": plain(Siamese, _triplets, lambda rows: (torch.randn(rows, 1, 16, 16), torch.randn(rows, 1, 16, 16))),
    "dqn": _slowly(Values, "online", lambda rows: _moves(4 * rows, labels(64 * rows, 4))),
    "sac": _slowly(Critic, "critics", lambda rows: _moves(4 * rows, torch.rand(64 * rows, 2))),
    "ppo": plain(
        Clipped, itself,
        lambda rows: (
            torch.randn(64 * rows, 8), labels(64 * rows, 4), -torch.rand(64 * rows) - 1, torch.randn(64 * rows)
        ),
    ),
    "recurrent policy": plain(
        Recurrent, itself,
        lambda rows: (
            torch.randn(12, 4 * rows, 8), torch.randint(0, 4, (12, 4 * rows)), torch.randn(12, 4 * rows),
            torch.rand(12, 4 * rows) > 0.9,
        ),
    ),
    "simclr": plain(Contrast, itself, lambda rows: torch.randn(rows, 3, 32, 32)),
    "byol": _slowly(Teacher, "online", lambda rows: torch.randn(rows, 3, 32, 32)),
    "vicreg": plain(Twins, itself, lambda rows: torch.randn(16 * rows, 64)),
    "dino": _slowly(Distilled, "student", lambda rows: torch.randn(16 * rows, 64)),
    "maml": plain(Inner, itself, lambda rows: tuple(torch.randn(16 * rows, 1) for _ in range(4))),
    "prototypes": plain(Prototypes, itself, lambda rows: (torch.randn(5, 4 * rows, 32), torch.randn(5, 4 * rows, 32))),
    "domain adversary": plain(Adversary, itself, lambda rows: (torch.randn(2, 16 * rows, 32), labels(16 * rows))),
}  # fmt: skip
"""Makers of models, by name."""
