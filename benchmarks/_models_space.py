"""Point clouds, graphs and molecules."""

from __future__ import annotations

import torch
from _models_kit import Make, cross_entropy, itself, labels, mlp, plain
from torch import Tensor, nn
from torch.nn import functional


class PointNet(nn.Module):
    """PointNet with its input transform (Qi et al. 2017)."""

    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Sequential(nn.Conv1d(3, 32, 1), nn.BatchNorm1d(32), nn.ReLU())
        self.matrix = nn.Linear(32, 9)
        self.points = nn.Sequential(
            nn.Conv1d(3, 32, 1), nn.BatchNorm1d(32), nn.ReLU(), nn.Conv1d(32, 64, 1), nn.BatchNorm1d(64), nn.ReLU()
        )
        self.head = nn.Sequential(nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, 10))

    def forward(self, points: Tensor) -> Tensor:
        """Return logits of points `[batch, 3, points]`."""
        turn = self.matrix(self.turn(points).amax(2)).view(-1, 3, 3) + torch.eye(3)
        return self.head(self.points(turn @ points).amax(2))


def neighbours(points: Tensor, count: int) -> Tensor:
    """Return the nearest neighbours of each of points `[batch, points, 3]`."""
    return torch.cdist(points, points).topk(count, largest=False).indices


class DynamicGraph(nn.Module):
    """DGCNN: convolutions of edges to the nearest neighbours in the space of features (Wang et al. 2019)."""

    def __init__(self) -> None:
        super().__init__()
        self.edges = nn.ModuleList([mlp(6, 24, 24), mlp(48, 24, 24)])
        self.head = mlp(48, 32, 10)

    def forward(self, points: Tensor) -> Tensor:
        """Return logits of points `[batch, points, 3]`."""
        found = []
        for layer in self.edges:
            chosen = neighbours(points.detach(), 6)
            near = points.gather(1, chosen.flatten(1)[..., None].expand(-1, -1, points.shape[2]))
            near = near.view(*chosen.shape, -1)
            centre = points[:, :, None].expand_as(near)
            points = layer(torch.cat([centre, near - centre], 3)).amax(2)
            found.append(points)
        return self.head(torch.cat(found, 2).amax(1))


class Sampled(nn.Module):
    """PointNet++: farthest points are sampled by a loop, balls around them are gathered (Qi et al. 2017)."""

    def __init__(self) -> None:
        super().__init__()
        self.local, self.head = mlp(3, 32, 48), mlp(48, 32, 10)

    def forward(self, points: Tensor) -> Tensor:
        """Return logits of points `[batch, points, 3]`."""
        rows = torch.arange(points.shape[0])
        distances = torch.full(points.shape[:2], 1e10)
        farthest, chosen = torch.zeros(points.shape[0], dtype=torch.long), []
        for _ in range(12):
            chosen.append(farthest)
            centre = points[rows, farthest][:, None]
            distances = torch.minimum(distances, (points - centre).square().sum(2))
            farthest = distances.argmax(1)
        centres = points[rows[:, None], torch.stack(chosen, 1)]
        near = torch.cdist(centres, points).topk(8, largest=False).indices
        balls = points[rows[:, None, None], near] - centres[:, :, None]
        return self.head(self.local(balls).amax(2).amax(1))


class PointAttention(nn.Module):
    """A layer of Point Transformer: attention by subtraction among neighbours (Zhao et al. 2021)."""

    def __init__(self) -> None:
        super().__init__()
        self.lift, self.query, self.key, self.value = (nn.Linear(inner, 24) for inner in (3, 24, 24, 24))
        self.place, self.weigh, self.head = mlp(3, 24, 24), mlp(24, 24, 24), nn.Linear(24, 10)

    def forward(self, points: Tensor) -> Tensor:
        """Return logits of points `[batch, points, 3]`."""
        values, near = self.lift(points), neighbours(points, 6)
        rows = torch.arange(points.shape[0])[:, None, None]
        place = self.place(points[:, :, None] - points[rows, near])
        weights = self.weigh(self.query(values)[:, :, None] - self.key(values)[rows, near] + place).softmax(2)
        values = values + (weights * (self.value(values)[rows, near] + place)).sum(2)
        return self.head(values.mean(1))


class Attention(nn.Module):
    """GAT: softmax over the edges of each node by scatter (Velickovic et al. 2018)."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32, bias=False) for _ in range(3))
        self.scores = nn.ParameterList(torch.randn(2, 4, 8) / 4 for _ in range(3))
        self.out = nn.Linear(32, 10)

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Return logits of nodes `[nodes, 32]` with edges `[2, edges]`."""
        nodes, (sources, targets) = batch
        for layer, score in zip(self.layers, self.scores, strict=True):
            heads = layer(nodes).view(-1, 4, 8)
            raw = functional.leaky_relu((heads * score[0]).sum(2)[sources] + (heads * score[1]).sum(2)[targets], 0.2)
            index = targets[:, None].expand_as(raw)
            most = torch.full((len(nodes), 4), -torch.inf).scatter_reduce(0, index, raw.detach(), "amax")
            weights = (raw - most[targets]).exp()
            weights = weights / torch.zeros(len(nodes), 4).index_add(0, targets, weights)[targets]
            messages = (heads[sources] * weights[..., None]).flatten(1)
            nodes = nodes + functional.elu(torch.zeros_like(nodes).index_add(0, targets, messages))
        return self.out(nodes)


class Isomorphism(nn.Module):
    """GIN with sums over the nodes of each graph of a batch (Xu et al. 2019)."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 32)) for _ in range(3)
        )
        self.weights, self.out = nn.Parameter(torch.zeros(3)), nn.Linear(32, 10)

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Return logits of graphs of 16 nodes each."""
        nodes, (sources, targets) = batch
        for layer, weight in zip(self.layers, self.weights, strict=True):
            sums = torch.zeros_like(nodes).scatter_add(0, targets[:, None].expand(-1, 32), nodes[sources])
            nodes = layer((1 + weight) * nodes + sums).relu()
        graphs = torch.arange(len(nodes)) // 16
        return self.out(torch.zeros(len(nodes) // 16, 32).index_add(0, graphs, nodes))


class Spectrum(nn.Module):
    """A graph convolution by a sparse matrix (Kipf and Welling 2017)."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))
        self.out = nn.Linear(32, 10)

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Return logits of nodes, with edges as a sparse matrix."""
        nodes, edges = batch
        matrix = torch.sparse_coo_tensor(edges, torch.ones(edges.shape[1]) / 4, (len(nodes), len(nodes)))
        for layer in self.layers:
            nodes = torch.sparse.mm(matrix, layer(nodes)).relu()
        return self.out(nodes)


class Atoms(nn.Module):
    """SchNet: continuous filters over distances; its loss is of energies and forces (Schuett et al. 2017)."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 24)
        self.filters = nn.ModuleList(mlp(16, 24, 24, activation=nn.Softplus) for _ in range(2))
        self.updates = nn.ModuleList(mlp(24, 24, 24, activation=nn.Softplus) for _ in range(2))
        self.out = mlp(24, 24, 1, activation=nn.Softplus)
        self.register_buffer("centres", torch.linspace(0, 5, 16))

    def energies(self, kinds: Tensor, places: Tensor) -> Tensor:
        """Return the energies of molecules of kinds `[batch, atoms]` at places `[batch, atoms, 3]`."""
        gaps = places[:, :, None] - places[:, None]
        distances = (gaps.square().sum(3) + 1e-6).sqrt()
        basis = (-(distances[..., None] - self.centres).square()).exp()
        atoms = self.embed(kinds)
        for filters, update in zip(self.filters, self.updates, strict=True):
            atoms = atoms + update((filters(basis) * atoms[:, None]).sum(2))
        return self.out(atoms).sum((1, 2))

    def forward(self, batch: tuple[Tensor, ...]) -> Tensor:
        """Return the loss."""
        kinds, places, energies, forces = batch
        places = places.detach().requires_grad_()
        found = self.energies(kinds, places)
        (slopes,) = torch.autograd.grad(found.sum(), places, create_graph=True)
        return functional.mse_loss(found, energies) + functional.mse_loss(-slopes, forces)


class Equivariant(nn.Module):
    """EGNN: messages move the places of nodes (Satorras et al. 2021)."""

    def __init__(self) -> None:
        super().__init__()
        self.messages = nn.ModuleList(mlp(49, 24, 24, activation=nn.SiLU) for _ in range(2))
        self.moves = nn.ModuleList(mlp(24, 24, 1, activation=nn.SiLU) for _ in range(2))
        self.updates = nn.ModuleList(mlp(48, 24, 24, activation=nn.SiLU) for _ in range(2))
        self.embed = nn.Embedding(10, 24)

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Return moved places of kinds `[batch, atoms]` at places `[batch, atoms, 3]`."""
        kinds, places = batch
        atoms, count = self.embed(kinds), kinds.shape[1]
        for message, move, update in zip(self.messages, self.moves, self.updates, strict=True):
            gaps = places[:, :, None] - places[:, None]
            pairs = torch.cat(
                [
                    atoms[:, :, None].expand(-1, -1, count, -1),
                    atoms[:, None].expand(-1, count, -1, -1),
                    gaps.square().sum(3, keepdim=True),
                ],
                3,
            )
            sent = message(pairs)
            places = places + (gaps * move(sent)).mean(2)
            atoms = atoms + update(torch.cat([atoms, sent.sum(2)], 2))
        return places


def _graph(rows: int) -> tuple[Tensor, Tensor]:
    return torch.randn(16 * rows, 32), torch.randint(0, 16 * rows, (2, 64 * rows))


def _of_nodes(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    return functional.cross_entropy(model(batch[:2]), batch[2])


def _points(rows: int) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, 48, 3), labels(rows)


def _moved(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    return functional.mse_loss(model(batch[:2]), batch[2])


def _molecules(rows: int) -> tuple[Tensor, Tensor]:
    return labels(rows * 10).view(rows, 10), torch.randn(rows, 10, 3)


SPACE: dict[str, Make] = {
    "pointnet": plain(PointNet, cross_entropy, lambda rows: (torch.randn(rows, 3, 64), labels(rows))),
    "pointnet++": plain(Sampled, cross_entropy, _points),
    "dgcnn": plain(DynamicGraph, cross_entropy, _points),
    "point transformer": plain(PointAttention, cross_entropy, _points),
    "gat": plain(Attention, _of_nodes, lambda rows: (*_graph(rows), labels(16 * rows))),
    "gin": plain(Isomorphism, _of_nodes, lambda rows: (*_graph(rows), labels(rows))),
    "gcn, sparse": plain(Spectrum, _of_nodes, lambda rows: (*_graph(rows), labels(16 * rows))),
    "schnet, forces": plain(
        Atoms, itself, lambda rows: (*_molecules(rows), torch.randn(rows), torch.randn(rows, 10, 3))
    ),
    "egnn": plain(Equivariant, _moved, lambda rows: (*_molecules(rows), torch.randn(rows, 10, 3))),
}
"""Makers of models, by name."""
