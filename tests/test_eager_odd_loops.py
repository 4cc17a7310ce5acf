"""Eager mode around loops that few would expect: the bits of the bare loop, within the budget."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from eager_loops import CPU, Trained, checked, convolutions, mlp, mlp_loss
from torch import nn
from torch.autograd import forward_ad
from torch.distributed.fsdp import fully_shard
from torch.nn import functional

import memfit
from memfit.eager_mode.eager import bytes_of_tensors
from memfit.eager_mode.kept import BOX_WORDS, checksum
from memfit.eager_mode.needs import Need, Needs
from memfit.eager_mode.operators import Operator, is_dense
from memfit.errors import InvalidTargetError
from memfit.system.recorder import record


def early_exit(model: Any, number: int) -> torch.Tensor:
    hidden = torch.randn(2048, 64)
    for place, layer in enumerate(model[:16]):
        hidden = layer(hidden)
        if place > 9 and number and float(hidden.detach().abs().mean()) < 0.9:
            break
    return hidden.square().mean()


def layers_of(model: Any) -> Any:
    yield from model


def from_a_generator(model: Any, _number: int) -> torch.Tensor:
    hidden = torch.randn(2048, 64)
    for layer in layers_of(model):
        hidden = layer(hidden)
    return hidden.square().mean()


def frozen_midway(model: Any, number: int) -> torch.Tensor:
    for parameter in model[:6].parameters():
        parameter.requires_grad_(number % 2 == 0)
    return mlp_loss(model, number)


def caught_errors(model: Any, _number: int) -> torch.Tensor:
    hidden = model[:8](torch.randn(2048, 64))
    try:
        lost = hidden.exp().sin() @ torch.ones(3, 3)
        return lost.sum()
    except RuntimeError:
        return model[8:](hidden).square().mean()


def kept_graph(model: Any, _number: int) -> torch.Tensor:
    loss = mlp_loss(model, 0)
    loss.backward(retain_graph=True)
    return loss * 0.5


def two_losses(model: Any, _number: int) -> torch.Tensor:
    hidden = model[:8](torch.randn(2048, 64))
    first = model[8:](hidden).square().mean()
    first.backward(retain_graph=True)
    return model[8:](hidden.tanh()).square().mean()


def nested_checkpoints(model: Any, _number: int) -> torch.Tensor:
    from torch.utils.checkpoint import checkpoint

    def inner(x: torch.Tensor) -> Any:
        return checkpoint(model[2:4], x, use_reentrant=False)

    def outer(x: torch.Tensor) -> torch.Tensor:
        return model[4:6](inner(model[:2](x)))

    hidden: Any = checkpoint(outer, torch.randn(2048, 64), use_reentrant=False)
    return model[6:](hidden).square().mean()


def in_place_on_views(model: Any, _number: int) -> torch.Tensor:
    hidden = model[:8](torch.randn(2048, 64)) * 1.0
    hidden[:, :8].mul_(0.5)
    hidden[::2].add_(1.0)
    return model[8:](hidden).square().mean()


def channels_last(model: Any, _number: int) -> torch.Tensor:
    images = torch.randn(8, 3, 16, 16).to(memory_format=torch.channels_last)
    return nn.functional.cross_entropy(model(images), torch.randint(0, 4, (8,)))


def hooks_of_tensors(model: Any, _number: int) -> torch.Tensor:
    hidden = model[:8](torch.randn(2048, 64))
    hidden.register_hook(lambda gradient: gradient * 0.5)
    return model[8:](hidden).square().mean()


LOOPS: dict[str, tuple[Callable[[], nn.Module], Callable[[Any, int], torch.Tensor], float]] = {
    "early exit": (mlp, early_exit, 0.7),
    "a generator": (mlp, from_a_generator, 0.7),
    "frozen midway": (mlp, frozen_midway, 0.7),
    "errors that are caught": (mlp, caught_errors, 0.7),
    "retained graphs": (mlp, kept_graph, 0.8),
    "two losses": (mlp, two_losses, 0.7),
    "nested checkpoints": (mlp, nested_checkpoints, 0.85),
    "in place on views": (mlp, in_place_on_views, 0.75),
    "channels last": (convolutions, channels_last, 0.7),
    "hooks of tensors": (mlp, hooks_of_tensors, 0.7),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LOOPS)
def test_an_odd_loop_has_its_bits(name: str) -> None:
    make, loss, share = LOOPS[name]
    assert checked(make, loss, share, steps=4).made_again > 0


def test_a_thread_that_trains_beside() -> None:
    """Another thread has no mode: its calls are its own, and what it allocates is seen."""
    beside = Trained(mlp, mlp_loss)
    loop, plain = Trained(mlp, mlp_loss), Trained(mlp, mlp_loss)
    expected = plain.run(3)
    found: list[float] = []
    with memfit.eager(loop.model, budget=bytes_of_tensors(CPU) + (64 << 20)):
        x = torch.randn(256, 64)
        thread = threading.Thread(target=lambda: found.append(beside.model(x).square().mean().item()))
        thread.start()
        thread.join()
        assert loop.run(3) == expected
    assert found == [beside.model(x).square().mean().item()]


_x, _row = torch.randn(24, 40), torch.randn(40)


def _ctc(lengths: Any) -> tuple[Any, ...]:
    targets = torch.randint(1, 9, (4, 7))
    return torch.randn(20, 4, 9).log_softmax(-1), targets, lengths([20, 18, 20, 12]), lengths([7, 3, 5, 6])


CALLS: dict[str, tuple[Any, tuple[Any, ...], dict[str, Any]]] = {
    "broadcast": (torch.ops.aten.mul.Tensor, (_x, _row), {}),
    "both ways": (torch.ops.aten.add.Tensor, (_x[:, :1], _row), {}),
    "comparison": (torch.ops.aten.gt.Scalar, (_x, 0.0), {}),
    "integers and a fraction": (torch.ops.aten.mul.Tensor, (torch.ones(24, dtype=torch.uint8), 0.5), {}),
    "true division": (torch.ops.aten.div.Tensor, (torch.ones(24, dtype=torch.int8), 2), {}),
    "double": (torch.ops.aten._to_copy.default, (_x,), {"dtype": torch.float64}),
    "complex": (torch.ops.aten.mul.Tensor, (_x, torch.tensor(1j)), {}),
    "complex number": (torch.ops.aten.mul.Tensor, (_x, 1j), {}),
    "dropout": (torch.ops.aten.native_dropout.default, (_x, 0.5, True), {}),
    "in place": (torch.ops.aten.tanh_.default, (torch.randn(64),), {}),
    "out": (torch.ops.aten.sin.out, (_row,), {"out": torch.empty(40)}),
    "product": (torch.ops.aten.mm.default, (_x, _x.t()), {}),
    "rows": (torch.ops.aten.index.Tensor, (_x, [torch.tensor([1, 2, 3])]), {}),
    "chosen": (torch.ops.aten.nonzero.default, (_x > 0,), {}),
    "masked": (torch.ops.aten.index.Tensor, (_x, [_x > 0]), {}),
    "masked rows": (torch.ops.aten.index.Tensor, (torch.randn(30, 4, 5), [torch.rand(30, 4) > 0.5]), {}),
    "masked columns": (torch.ops.aten.index.Tensor, (_x, [None, _x[0] > 0]), {}),
    "two masks": (torch.ops.aten.index.Tensor, (torch.randn(8, 8), [torch.arange(8) < 3, torch.arange(8) > 4]), {}),
    "selected": (torch.ops.aten.masked_select.default, (_x, _x[:1] > 0), {}),
    "a loss over alignments": (torch.ops.aten._ctc_loss.Tensor, _ctc(torch.tensor), {}),
    "a loss over alignments of lists": (torch.ops.aten._ctc_loss.default, _ctc(list), {}),
    "random": (torch.ops.aten.randn.default, ([30, 50],), {"device": CPU}),
    "with a generator": (torch.ops.aten.randn.generator, ([9, 9],), {"generator": torch.Generator()}),
    "mean and variance": (torch.ops.aten.var_mean.correction, (_x, [1]), {}),
    "two results": (torch.ops.aten.frexp.Tensor, (_x,), {}),
    "packed": (torch.ops.aten._pack_padded_sequence.default, (torch.randn(2, 6, 8), torch.tensor([6, 2]), True), {}),
    "polar": (torch.ops.aten.polar.default, (_row, _row), {}),
}


@pytest.mark.parametrize("name", CALLS)
def test_results_are_bounded_before_the_first_call(name: str) -> None:
    function, args, kwargs = CALLS[name]
    bound_bytes = Needs(CPU)._result_bytes(function, args, kwargs)  # pyright: ignore[reportPrivateUsage]
    with record(CPU) as usage:
        result = function(*args, **kwargs)
    assert usage.end_bytes - usage.start_bytes <= bound_bytes
    assert bound_bytes <= 8 * max(usage.peak_bytes, 1 << 10)
    del result


def test_sizes_that_values_decide_are_not_remembered() -> None:
    pack = Operator(torch.ops.aten._pack_padded_sequence.default)
    args = torch.randn(2, 6, 8), torch.tensor([1, 1]), True
    pack.learn(args, {}, Need(0, 0, 0.0, 0))
    assert pack.need(args, {}) is None


def losses_on_the_way(model: Any, number: int) -> torch.Tensor:
    """What they save lies in storages that kernels leave partly unwritten."""
    torch.manual_seed(number)
    hidden, other, bags = torch.randn(320, 64), torch.randn(320, 64), torch.arange(0, 1281, 4)
    labels, found = torch.randint(1, 64, (16, 8)), torch.zeros(())
    for layer in model[:16]:
        hidden = layer(hidden)
        weight = model[0].weight.flatten()[0].exp()
        found = found + weight * functional.mse_loss(hidden, other) + weight * functional.smooth_l1_loss(hidden, other)
        probabilities = hidden.view(20, 16, 64).log_softmax(-1)
        found = found + weight * functional.ctc_loss(
            probabilities, labels, torch.arange(5, 21), torch.arange(16) % 3 + 1
        )
        hidden = hidden + functional.embedding_bag(
            torch.randint(0, 320, (1280,)), hidden, bags, mode="sum", include_last_offset=True
        )
    return found + hidden.square().mean()


@pytest.mark.parametrize("share", [0.8, 0.6, 0.5])
def test_storages_that_kernels_leave_partly_unwritten(share: float) -> None:
    checked(mlp, losses_on_the_way, share, steps=2)


def test_contents_in_another_order_have_another_checksum() -> None:
    for count in (512, 700, 4096, 70_001, BOX_WORDS + 4_000):
        words = torch.randn(count, dtype=torch.float64)
        before = checksum(words.untyped_storage(), words.nbytes)
        rows = words[: count // 64 * 64].view(-1, 64)
        others = (words.flip(0), words.roll(1), torch.cat([rows.flip(0).flatten(), words[rows.numel() :]]))
        swapped = words.clone()
        swapped[[0, count - 1]] = words[[count - 1, 0]]
        for other in (*others, swapped):
            assert checksum(other.clone().untyped_storage(), other.nbytes) != before
        assert checksum(words.clone().untyped_storage(), words.nbytes) == before


@pytest.mark.parametrize("count", [130_000, 12 * BOX_WORDS + 4_000])
def test_a_checksum_takes_less_than_the_modes_reserve(count: int) -> None:
    words = torch.zeros(count, dtype=torch.float64)
    with record("cpu") as usage:
        checksum(words.untyped_storage(), words.nbytes)
    assert usage.peak_bytes < 1 << 12


@pytest.mark.filterwarnings("ignore:`torch.jit.script`")  # torch's own, at the first derivative
def test_zero_tensors_of_forward_derivatives_have_no_memory() -> None:
    lin = torch.nn.Sequential(*(layer for _ in range(3) for layer in (torch.nn.Linear(16, 16), torch.nn.Tanh())))
    with memfit.eager(lin, budget="16MiB"), forward_ad.dual_level():
        dual = forward_ad.make_dual(torch.randn(32, 16), torch.randn(32, 16))
        out = forward_ad.unpack_dual(lin(dual))
        (out.primal.square().mean() + out.tangent.square().mean()).backward()
    assert not is_dense(torch._efficientzerotensor(3))


def test_lazy_modules_here_and_elsewhere() -> None:
    elsewhere = torch.nn.LazyLinear(3)
    model = torch.nn.Sequential(torch.nn.LazyLinear(8), torch.nn.LazyLinear(2))
    with memfit.eager(model, budget="16MiB"):
        model(torch.randn(4, 4)).sum().backward()
    assert model[0].weight.grad is not None
    assert elsewhere.has_uninitialized_params()


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("optimizer", [torch.optim.SparseAdam, torch.optim.Adagrad])
def test_sparse_gradients(optimizer: type[torch.optim.Optimizer]) -> None:
    found: list[torch.Tensor] = []
    for around in (nullcontext(), None):
        torch.manual_seed(0)
        model = torch.nn.Embedding(100, 16, sparse=True)
        updates = optimizer(model.parameters())
        with around if around is not None else memfit.eager(model, budget="16MiB"):
            for _ in range(2):
                model(torch.randint(0, 100, (32,))).square().mean().backward()
                updates.step()
                updates.zero_grad()
        found.append(model.weight.detach())
    assert torch.equal(*found)


def test_a_plan_of_a_model_without_shapes_is_refused() -> None:
    model = torch.nn.Sequential(torch.nn.LazyLinear(8))
    with pytest.raises(InvalidTargetError, match="run a batch through the model first"):
        memfit.fit(model, mlp_loss, torch.randn(4, 4), budget="16MiB")


def test_parameters_that_one_rank_has_all_of_are_restored_by_copies(tmp_path: Path) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    mesh = torch.distributed.init_device_mesh("cpu", (1,))

    def make() -> nn.Module:
        pairs = [[nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh()] for _ in range(4)]
        model = nn.Sequential(*[fully_shard(nn.Sequential(*pair), mesh=mesh) for pair in pairs])
        return fully_shard(model, mesh=mesh)

    try:
        assert checked(make, mlp_loss, 0.7, steps=4).made_again > 0
    finally:
        torch.distributed.destroy_process_group()
