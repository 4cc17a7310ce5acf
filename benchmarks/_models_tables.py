"""Tables, recommendation and retrieval."""

from __future__ import annotations

import torch
from _models_kit import Make, cross_entropy, itself, labels, mlp, plain
from torch import Tensor, nn
from torch.nn import functional


def sparsemax(scores: Tensor) -> Tensor:
    """Return the projection of scores on the simplex, over the last dimension (Martins and Astudillo 2016)."""
    ordered = scores.sort(-1, descending=True).values
    sums = ordered.cumsum(-1) - 1
    counts = torch.arange(1, scores.shape[-1] + 1)
    support = (counts * ordered > sums).sum(-1, keepdim=True)
    return (scores - sums.gather(-1, support - 1) / support).clamp(min=0)


class Tables(nn.Module):
    """TabNet: sparse masks of features, step by step (Arik and Pfister 2021)."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.first = nn.BatchNorm1d(16), nn.Linear(16, 64)
        self.masks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16)) for _ in range(3))
        self.steps = nn.ModuleList(nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.GLU()) for _ in range(3))
        self.out = nn.Linear(16, 10)

    def forward(self, rows: Tensor) -> Tensor:
        """Return logits of rows `[batch, 16]`."""
        rows = self.norm(rows)
        attended, prior, total = functional.glu(self.first(rows))[:, 16:], torch.ones_like(rows), torch.zeros(())
        for mask, step in zip(self.masks, self.steps, strict=True):
            weights = sparsemax(mask(attended) * prior)
            prior = prior * (1.3 - weights)
            made, attended = step(weights * rows).chunk(2, 1)
            total = total + made.relu()
        return self.out(total)


class Features(nn.Module):
    """FT-Transformer: a token for each feature, and one for the class (Gorishniy et al. 2021)."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(12, 32)), nn.Parameter(torch.randn(12, 32))
        self.kinds, self.first = nn.Embedding(40, 32), nn.Parameter(torch.randn(1, 1, 32))
        layer = nn.TransformerEncoderLayer(32, 4, 64, 0.1, "gelu", batch_first=True, norm_first=True)
        self.inner, self.out = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(32, 10)

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Return logits of numbers `[batch, 12]` and kinds `[batch, 4]`."""
        numbers, kinds = batch
        tokens = [self.first.expand(len(numbers), -1, -1), numbers[..., None] * self.weight + self.bias]
        return self.out(self.inner(torch.cat([*tokens, self.kinds(kinds)], 1))[:, 0])


class Machines(nn.Module):
    """DeepFM: products of embeddings beside a tower (Guo et al. 2017)."""

    def __init__(self) -> None:
        super().__init__()
        self.single, self.table, self.tower = nn.Embedding(200, 1), nn.Embedding(200, 16), mlp(96, 64, 64, 1)

    def forward(self, kinds: Tensor) -> Tensor:
        """Return the logit of kinds `[batch, 6]`."""
        vectors = self.table(kinds)
        products = (vectors.sum(1).square() - vectors.square().sum(1)).sum(1, keepdim=True) / 2
        return (self.single(kinds).sum(1) + products + self.tower(vectors.flatten(1)))[:, 0]


class Crossed(nn.Module):
    """DCN-v2, with embeddings that are looked up sparsely in a bag (Wang et al. 2021)."""

    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(200, 32, mode="mean")
        self.crosses, self.out = nn.ModuleList(nn.Linear(40, 40) for _ in range(3)), nn.Linear(40, 1)

    def forward(self, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        """Return the logit of a bag of kinds with offsets, and numbers `[batch, 8]`."""
        kinds, offsets, numbers = batch
        first = values = torch.cat([self.bag(kinds, offsets), numbers], 1)
        for cross in self.crosses:
            values = first * cross(values) + values
        return self.out(values)[:, 0]


class Trees(nn.Module):
    """NODE: oblivious soft trees (Popov et al. 2020)."""

    def __init__(self) -> None:
        super().__init__()
        self.choice, self.bounds = nn.Parameter(torch.randn(16, 8, 4)), nn.Parameter(torch.randn(8, 4))
        self.leaves = nn.Parameter(torch.randn(8, 16, 10))
        self.register_buffer("paths", torch.stack([torch.arange(16) >> bit & 1 for bit in range(4)], 1).float())

    def forward(self, rows: Tensor) -> Tensor:
        """Return logits of rows `[batch, 16]`."""
        chosen = torch.einsum("bf,ftd->btd", rows, self.choice.softmax(0))
        right = (chosen - self.bounds).sigmoid()[:, :, None]
        weights = (right * self.paths + (1 - right) * (1 - self.paths)).prod(3)
        return torch.einsum("btl,tlo->bo", weights, self.leaves)


class Splines(nn.Module):
    """KAN: learned splines on edges (Liu et al. 2024)."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("grid", torch.linspace(-2, 2, 12))
        self.weights = nn.ParameterList(torch.randn(*sizes, 8) / 8 for sizes in ((16, 16), (16, 10)))
        self.bases = nn.ModuleList([nn.Linear(16, 16), nn.Linear(16, 10)])

    def spline(self, values: Tensor) -> Tensor:
        """Return cubic bases `[..., 8]` of values."""
        values, grid = values[..., None], self.grid
        basis = ((values >= grid[:-1]) & (values < grid[1:])).to(values.dtype)
        for order in range(1, 4):
            left = (values - grid[: -order - 1]) / (grid[order:-1] - grid[: -order - 1])
            right = (grid[order + 1 :] - values) / (grid[order + 1 :] - grid[1:-order])
            basis = left * basis[..., :-1] + right * basis[..., 1:]
        return basis

    def forward(self, rows: Tensor) -> Tensor:
        """Return logits of rows `[batch, 16]`."""
        for weight, base in zip(self.weights, self.bases, strict=True):
            rows = base(functional.silu(rows)) + torch.einsum("bik,iok->bo", self.spline(rows), weight)
        return rows


class Towers(nn.Module):
    """Retrieval by two towers, with the other rows of the batch as negatives."""

    def __init__(self) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(300, 32), nn.Embedding(300, 32)
        self.left, self.right = mlp(32, 64, 32), mlp(32, 64, 32)
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Return the loss of users and the items that they took."""
        left = functional.normalize(self.left(self.users(batch[0])))
        right = functional.normalize(self.right(self.items(batch[1])))
        scores = left @ right.T * self.scale.exp()
        scores = scores.masked_fill((batch[1] == batch[1][:, None]).fill_diagonal_(False), -1e9)
        return functional.cross_entropy(scores, torch.arange(len(left)))


def _judged(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return functional.binary_cross_entropy_with_logits(model(batch[0]), batch[1])


def _rows(rows: int) -> tuple[Tensor, Tensor]:
    return torch.randn(16 * rows, 16), labels(16 * rows)


def _bags(rows: int) -> tuple[tuple[Tensor, ...], Tensor]:
    count = 16 * rows
    bags = torch.randint(0, 200, (5 * count,)), torch.arange(count) * 5, torch.randn(count, 8)
    return bags, torch.randint(0, 2, (count,)).float()


TABLES: dict[str, Make] = {
    "tabnet": plain(Tables, cross_entropy, _rows),
    "ft-transformer": plain(
        Features, cross_entropy,
        lambda rows: ((torch.randn(4 * rows, 12), torch.randint(0, 40, (4 * rows, 4))), labels(4 * rows)),
    ),
    "deepfm": plain(
        Machines, _judged,
        lambda rows: (torch.randint(0, 200, (64 * rows, 6)), torch.randint(0, 2, (64 * rows,)).float()),
    ),
    "dcn": plain(Crossed, _judged, _bags, rows=32),
    "soft trees": plain(Trees, cross_entropy, _rows),
    "kan": plain(Splines, cross_entropy, _rows),
    "two towers": plain(
        Towers, itself, lambda rows: (torch.randint(0, 300, (16 * rows,)), torch.randint(0, 300, (16 * rows,)))
    ),
}  # fmt: skip
"""Makers of models, by name."""
