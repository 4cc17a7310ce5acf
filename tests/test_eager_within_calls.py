"""Memory that calls take without having announced it: eager mode makes room while they run, or refuses it to them."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from eager_loops import CPU, Trained, checked, mlp
from torch import nn

import memfit
from memfit.eager_mode.eager import bytes_of_tensors
from memfit.errors import OverBudgetError

F = nn.functional
ROWS = 256


def hidden(model: Any, rows: int = ROWS) -> torch.Tensor:
    return model[:8](torch.randn(rows, 64))


def end(model: Any, x: torch.Tensor) -> torch.Tensor:
    return model[8:](x).square().mean()


def einsum(model: Any, _number: int) -> torch.Tensor:
    x = hidden(model)
    return end(model, x) + torch.einsum("bi,bj,kij->bk", x, x, torch.randn(2, 64, 64)).mean()


def large_windows(model: Any, _number: int) -> torch.Tensor:
    x = hidden(model).double().view(1, 16, 32, 32)
    return end(model, F.conv2d(x, torch.randn(16, 16, 5, 5).double(), padding=2).float().view(ROWS, 64) / 20)


def dilated(model: Any, _number: int) -> torch.Tensor:
    x = hidden(model)
    return end(model, x) + F.conv3d(x.view(4, 4, 16, 8, 8), torch.randn(4, 4, 3, 3, 3), padding=4, dilation=2).mean()


def sorting(model: Any, _number: int) -> torch.Tensor:
    x = hidden(model)
    return end(model, x.sort(dim=0).values) + x.median(0).values.sum() + x.flatten().topk(100).values.sum()


def decompositions(model: Any, _number: int) -> torch.Tensor:
    x = hidden(model)
    gram = x.T @ x + torch.eye(64)
    values = torch.linalg.svd(x, full_matrices=False)[1].sum() + torch.linalg.cholesky(gram).diagonal().sum()
    return end(model, torch.linalg.qr(x)[0] * 16) + 1e-3 * (values + torch.linalg.eigh(gram)[0].sum())


def distances(model: Any, _number: int) -> torch.Tensor:
    x = hidden(model)
    return end(model, x) + torch.cdist(x, torch.randn(64, 64)).mean() + torch.pdist(x[:64]).mean()


def sampled(model: Any, _number: int) -> torch.Tensor:
    x = hidden(model).view(4, 16, 16, 16)
    y = F.grid_sample(x, torch.rand(4, 16, 16, 2) * 2 - 1, align_corners=False)
    return end(model, y.reshape(ROWS, 64)) + F.interpolate(y, scale_factor=2, mode="bicubic").mean()


def counted(model: Any, _number: int) -> torch.Tensor:
    x, places = hidden(model), torch.randint(0, 20, (ROWS,))
    sums = torch.zeros(20, 64).index_put((places,), x, accumulate=True)
    sums = sums + torch.zeros(20, 64).scatter_add(0, places[:, None].expand(-1, 64), x)
    size = torch.unique(x.detach().round(), dim=0).shape[0] + x.detach().gt(0).nonzero().shape[0]
    return end(model, x) + sums.square().mean() * size / 1e6


def penalty(model: Any, _number: int) -> torch.Tensor:
    x = torch.randn(ROWS, 64, requires_grad=True)
    y = model(x)
    (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    return y.square().mean() + (gradient.norm(dim=1) - 1).square().mean()


class Widened(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.save_for_backward(x)
        return torch.cat([x] * 8).view(8, *x.shape).sum(0)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        (x,) = ctx.saved_tensors
        return torch.cat([gradient + 0 * x] * 8).view(8, *x.shape).sum(0)


def temporaries(model: Any, _number: int) -> torch.Tensor:
    return end(model, Widened.apply(hidden(model)))  # pyright: ignore[reportArgumentType]


@torch.library.custom_op("memfit_tests::widened", mutates_args=())
def widened(x: torch.Tensor) -> torch.Tensor:
    return torch.cat([x] * 8).view(8, *x.shape).sum(0)


widened.register_autograd(lambda _ctx, gradient: widened(gradient))


def own_operator(model: Any, _number: int) -> torch.Tensor:
    return end(model, widened(hidden(model)))


def transformed(model: Any, _number: int) -> torch.Tensor:
    x, fixed = hidden(model), {name: value.detach() for name, value in model.named_parameters()}

    def loss(rows: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(model, fixed, (rows,)).square().mean()

    slope = torch.func.grad(loss)(torch.randn(ROWS, 64))
    _, change = torch.func.jvp(loss, (torch.randn(8, 64),), (torch.randn(8, 64),))
    each = torch.func.vmap(torch.func.grad(loss))(torch.randn(8, 1, 64))
    outer = torch.func.vmap(lambda row: torch.outer(row, row).sum(0))(x[:16])
    return end(model, x + slope) + outer.mean() + change + each.mean()


def sparse_product(model: Any, _number: int) -> torch.Tensor:
    places = torch.randint(0, ROWS, (2, 4 * ROWS))
    matrix = torch.sparse_coo_tensor(places, torch.randn(4 * ROWS), (ROWS, ROWS), check_invariants=True)
    return end(model, torch.sparse.mm(matrix, hidden(model)))


class Bags(nn.Module):
    def __init__(self, *, sparse: bool = False) -> None:
        super().__init__()
        self.largest, self.mean = nn.EmbeddingBag(400, 64, mode="max"), nn.EmbeddingBag(400, 64, mode="mean")
        self.single, self.rest = nn.Embedding(400, 64, sparse=sparse), mlp()

    def forward(self, places: torch.Tensor) -> torch.Tensor:
        return self.rest(self.largest(places) + self.mean(places) + self.single(places[:, 0]))


def bags(model: nn.Module, _number: int) -> torch.Tensor:
    return model(torch.randint(0, 400, (ROWS, 6))).square().mean()


LOOPS: dict[str, tuple[Callable[[], nn.Module], Callable[[Any, int], torch.Tensor], float]] = {
    "einsum": (mlp, einsum, 0.97),
    "large windows": (mlp, large_windows, 0.97),
    "dilated": (mlp, dilated, 0.9),
    "sorting": (mlp, sorting, 0.8),
    "decompositions": (mlp, decompositions, 0.9),
    "distances": (mlp, distances, 0.8),
    "sampled": (mlp, sampled, 0.8),
    "counted": (mlp, counted, 0.8),
    "penalty": (mlp, penalty, 0.8),
    "temporaries": (mlp, temporaries, 0.9),
    "an operator of one's own": (mlp, own_operator, 0.9),
    "torch.func": (mlp, transformed, 0.9),
    "sparse product": (mlp, sparse_product, 0.8),
    "embedding bags": (Bags, bags, 0.8),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LOOPS)
@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")  # torch 2.11's, of what it makes
def test_the_budget_holds_for_memory_that_is_not_announced(name: str) -> None:
    make, loss, share = LOOPS[name]
    checked(make, loss, share, steps=2)


@pytest.mark.slow
@pytest.mark.parametrize("name", LOOPS)
@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_a_budget_that_is_too_small_is_refused_and_never_passed(name: str) -> None:
    make, loss, _ = LOOPS[name]
    trained = Trained(make, loss)
    gc.collect()
    budget = bytes_of_tensors(CPU) + (160 << 10)
    block = memfit.eager(trained.model, budget=budget)
    with (
        pytest.raises(
            OverBudgetError, match=r"give more \(this call needs a budget of \d+ bytes\), or a smaller batch"
        ),
        block,
    ):
        trained.run(2)
    assert block.report().peak_bytes <= budget


def _nested(x: torch.Tensor) -> torch.Tensor:
    return torch.nested.nested_tensor([x[:3], x[3:]], layout=torch.jagged)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("made", "loss"),
    [
        (_nested, lambda model, x: model(x).values().square().mean()),
        (torch.Tensor.to_sparse, lambda model, x: model[1:](torch.sparse.mm(x, model[0].weight)).square().mean()),
        (torch.Tensor.to_sparse_csr, lambda model, x: model[1:](x @ model[0].weight).square().mean()),
        (torch.Tensor.to_mkldnn, lambda model, x: model(x.to_dense()).square().mean()),
        (
            lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8),
            lambda model, x: model(x.dequantize()).square().mean(),
        ),
    ],
)
@pytest.mark.parametrize("spare", [1 << 20, 60 << 10])
@pytest.mark.filterwarnings("ignore:Sparse:UserWarning", "ignore:torch.quantize:UserWarning")
def test_batches_of_other_kinds_have_their_bits(made: Any, loss: Any, spare: int) -> None:
    plain, budgeted = mlp(), mlp()
    budgeted.load_state_dict(plain.state_dict())
    x = made(torch.randn(8, 64))
    loss(plain, x).backward()
    gc.collect()
    budget = bytes_of_tensors(CPU) + sum(p.nbytes for p in budgeted.parameters()) + spare
    with memfit.eager(budgeted, budget=budget) as block:
        for _ in range(2):
            budgeted.zero_grad()
            loss(budgeted, x).backward()
    assert block.report().peak_bytes <= budget
    for one, other in zip(plain.parameters(), budgeted.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None)
        assert one.grad is None or torch.equal(one.grad, other.grad)  # pyright: ignore[reportArgumentType]


def test_a_recurrent_layer_is_never_made_again() -> None:
    """oneDNN leaves parts of its workspace unwritten: contents that are made again would be taken for lost."""

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.head = nn.LSTM(32, 32), mlp()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(torch.cat([self.layer(x)[0]] * 2, -1).flatten(0, 1))

    def loss(model: nn.Module, _number: int) -> torch.Tensor:
        return model(torch.randn(16, 16, 32)).square().mean()

    assert checked(Recurrent, loss, 0.85, steps=2).made_again > 0


def test_a_call_of_a_calm_pass_is_stopped_too() -> None:
    model = mlp()
    x = torch.randn(1024, 64)
    gc.collect()
    budget = bytes_of_tensors(CPU) + (2 << 20)
    block = memfit.eager(model, budget=budget)
    with pytest.raises(OverBudgetError, match=r"memfit_tests\.widened"), block:
        for _ in range(4):
            model(x[:4]).sum().backward()
        assert block.report().calm.passes > 0
        with torch.no_grad():
            widened(x)
    assert block.report().peak_bytes <= budget


def test_memory_beside_all_calls_is_refused_too() -> None:
    model, numbers = mlp(), [0.5] * (1 << 18)
    gc.collect()
    budget = bytes_of_tensors(CPU) + (512 << 10)
    block = memfit.eager(model, budget=budget)
    with pytest.raises(OverBudgetError, match=r"within_calls\.py:\d+: this line takes up to 1 MiB"), block:
        torch.tensor(numbers)
    assert block.report().peak_bytes <= budget
