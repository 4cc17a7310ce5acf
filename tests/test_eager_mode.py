"""`memfit.eager`: a budget around an unchanged training loop, with the bits of the bare loop."""

from __future__ import annotations

import gc
import math
import random
import re
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from checkpoint_models import cross_entropy, pairs, rows
from eager_loops import CPU, Trained, checked, convolutions, images_loss, mlp, mlp_loss
from torch import nn

import memfit
from memfit.capture.under_modes import gradients_that_differ
from memfit.eager_mode.eager import bytes_of_tensors
from memfit.eager_mode.kept import Kept
from memfit.eager_mode.sources import Call, Sources, seconds_to_make
from memfit.errors import InvalidBudgetError, InvalidOptionError, OverBudgetError, UnsupportedStepError
from memfit.system.recorder import allocated_bytes


class Skips(nn.Module):
    """Residual blocks of which each is left out at random."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            if float(torch.rand(())) < 0.7:
                x = x + block(x)
        return x


class Experts(nn.Module):
    """Tokens go to the expert that their gate prefers."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(32, 3)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(32, 128), nn.SiLU(), nn.Linear(128, 32)) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = self.gate(x).softmax(1)
        chosen = weights.argmax(1)
        result = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            own = (chosen == number).nonzero().squeeze(1)
            result = result.index_add(0, own, expert(x[own]) * weights[own, number].unsqueeze(1))
        return result


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.encoder(x)


class TreeCells(nn.Module):
    """A recursive network over random binary trees."""

    def __init__(self) -> None:
        super().__init__()
        self.leaf, self.join = nn.Linear(32, 128), nn.Linear(256, 640)

    def forward(self, depth: int) -> tuple[torch.Tensor, torch.Tensor]:
        if depth == 0 or float(torch.rand(())) < 0.1:
            hidden = torch.tanh(self.leaf(torch.randn(16, 32)))
            return hidden, hidden
        (left, left_cell), (right, right_cell) = self(depth - 1), self(depth - 1)
        gates = self.join(torch.cat([left, right], 1)).chunk(5, 1)
        i, f, g, o = (torch.sigmoid(gate) for gate in gates[:4])
        cell = f * left_cell + g * right_cell + i * torch.tanh(gates[4])
        return o * torch.tanh(cell), cell


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module, int], torch.Tensor]]] = {
    "mlp": (mlp, mlp_loss),
    "dropout": (lambda: nn.Sequential(mlp()[:6], nn.Dropout(0.3), mlp()[:4], nn.Dropout(0.2)), mlp_loss),  # type: ignore[index]
    "convolutions in place": (convolutions, images_loss),
    "skipped blocks": (Skips, lambda model, _: model(torch.randn(512, 64)).square().mean()),
    "experts": (Experts, lambda model, _: model(torch.randn(2048, 32)).square().mean()),
    "attention": (Attention, lambda model, _: model(torch.randn(8, 32, 32)).square().mean()),
    "sentences of all lengths": (
        Attention,
        lambda model, number: model(torch.randn(8, 20 + 7 * number, 32)).square().mean(),
    ),
    "trees": (TreeCells, lambda model, _: model(5)[0].square().mean()),
}


@pytest.mark.slow
@pytest.mark.parametrize("share", [1.5, 0.85, 0.7])
@pytest.mark.parametrize("case", CASES)
def test_the_loop_has_its_bits_within_the_budget(case: str, share: float) -> None:
    report = checked(*CASES[case], share)
    assert (report.made_again > 0) == (share < 1) or report.peak_bytes < report.budget_bytes


def test_autocast() -> None:
    def loss(model: nn.Module, _number: int) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model(torch.randn(2048, 64)).float().square().mean()

    assert checked(mlp, loss, 0.6).made_again > 0


def test_a_generator_of_the_users_own_is_replayed() -> None:
    generators: dict[int, torch.Generator] = {}

    def loss(model: nn.Module, number: int) -> torch.Tensor:
        generator = generators.setdefault(number, torch.Generator()).manual_seed(number)
        hidden = model[:8](torch.randn(2048, 64))  # type: ignore[index]
        noisy = hidden * torch.empty_like(hidden).bernoulli_(0.5, generator=generator)
        return model[8:](noisy).square().mean()  # type: ignore[index]

    assert checked(mlp, loss, 0.6).made_again > 0


def test_what_code_holds_stays_and_can_be_read_anyhow() -> None:
    def loss(model: nn.Module, _number: int) -> torch.Tensor:
        hidden = torch.randn(2048, 64)
        held: list[torch.Tensor] = []
        for layer in model:  # type: ignore[attr-defined]
            hidden = layer(hidden)
            held.append(hidden)
        read = sum(float(each.detach().numpy()[-1, -1]) + each.tolist()[0][0] for each in held[::4])
        return hidden.square().mean() * (1 + read / 64)

    checked(mlp, loss, 1.0)


def test_checkpoints_of_torch_inside() -> None:
    from torch.utils.checkpoint import checkpoint

    def loss(model: nn.Module, _number: int) -> torch.Tensor:
        hidden: Any = torch.randn(2048, 64)
        for start in range(0, 16, 4):
            hidden = checkpoint(model[start : start + 4], hidden, use_reentrant=False)  # type: ignore[index]
        return model[16](hidden).square().mean()  # type: ignore[index]

    checked(mlp, loss, 0.9)


def test_a_second_backward_and_gradients_of_gradients() -> None:
    def loss(model: nn.Module, _number: int) -> torch.Tensor:
        x = torch.randn(512, 64, requires_grad=True)
        out = model(x).square().mean()
        out.backward(retain_graph=True)
        (gradient,) = torch.autograd.grad(out, x, create_graph=True)
        return out + gradient.square().sum()

    checked(mlp, loss, 0.8)


def test_kernels_that_autocast_casts_inside() -> None:
    def loss(model: nn.Module, number: int) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return cross_entropy(model, rows(number, 4096))

    def loss_inside(model: nn.Module, number: int) -> torch.Tensor:
        inputs, labels = rows(number, 4096)
        with torch.autocast("cpu", torch.bfloat16), torch.autocast("cpu", enabled=False):
            hidden = model.before(inputs)  # pyright: ignore[reportCallIssue]
            for layer in model.layers:  # pyright: ignore[reportGeneralTypeIssues]
                with torch.autocast("cpu", torch.bfloat16):
                    hidden = layer(hidden)
            return nn.functional.cross_entropy(hidden.float(), labels)

    assert checked(pairs, loss, 0.7).made_again > 0
    checked(pairs, loss_inside, 1.0)


def test_accumulation_and_evaluation_between() -> None:
    def loss(model: nn.Module, _number: int) -> torch.Tensor:
        for _ in range(2):
            mlp_loss(model, 0).backward()
        with torch.no_grad():
            mlp_loss(model, 0)
        return mlp_loss(model, 0)

    plain, budgeted = Trained(mlp, loss), Trained(mlp, loss)
    expected = plain.run(2)
    with memfit.eager(budgeted.model, budget=bytes_of_tensors(CPU) + (4 << 20)) as steps:
        assert budgeted.run(2) == expected
    assert steps.report().passes == 6 and steps.report().made_again > 0


def test_a_function_of_the_users_own() -> None:
    class Cube(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            return x**3

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            (x,) = ctx.saved_tensors
            return gradients[0] * 3 * x**2

    def loss(model: nn.Module, _number: int) -> torch.Tensor:
        hidden = torch.randn(2048, 64)
        for layer in model:  # type: ignore[attr-defined]
            hidden = Cube.apply(layer(hidden)) * 0.1
        return hidden.square().mean()

    assert checked(mlp, loss, 0.6).made_again > 0


def test_what_was_written_to_after_it_was_saved_is_refused_as_ever() -> None:
    model = mlp()
    with memfit.eager(model, budget="64MiB"):
        hidden = model[0](torch.randn(64, 64)).exp()  # type: ignore[index]
        loss = hidden.square().sum()
        hidden.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_what_depends_on_something_written_to_is_made_again_before() -> None:
    torch.manual_seed(0)
    scale, x = torch.ones(2048, 64), torch.randn(2048, 64)
    weight = torch.randn(64, 64, requires_grad=True)

    def gradient() -> torch.Tensor:
        scale.fill_(1.5)
        hidden = (x @ weight) * scale
        result = hidden.tanh()
        for _ in range(6):
            result = (result @ weight).tanh()
        scale.fill_(7.0)  # after all readers in forward; the product needs what it was
        (found,) = torch.autograd.grad(result.sum(), weight)
        return found

    def unsaved() -> torch.Tensor:
        scale.fill_(1.5)
        hidden = (x @ weight) + scale  # addition saves nothing
        result = hidden.tanh()
        for _ in range(6):
            result = (result @ weight).tanh()
        scale.fill_(7.0)
        (found,) = torch.autograd.grad(result.sum(), weight)
        return found

    expected = unsaved()
    gc.collect()
    with memfit.eager(nn.Linear(1, 1), budget=bytes_of_tensors(CPU) + (7 << 19)) as steps:
        assert torch.equal(unsaved(), expected)
        assert steps.report().made_again > 0
        with pytest.raises(RuntimeError, match="inplace"):
            gradient()


def test_over_the_budget_names_the_call_and_the_line() -> None:
    model = mlp()
    gc.collect()
    with (
        memfit.eager(model, budget=bytes_of_tensors(CPU) + (1 << 19)),
        pytest.raises(OverBudgetError, match=r"eager_loops\.py:\d+: aten\..* takes up to .* of the budget of"),
    ):
        mlp_loss(model, 0).backward()
    with (
        memfit.eager(model, budget=4096),  # less than the mode's own numbers take
        pytest.raises(OverBudgetError, match=r"of the budget of 4 KiB are taken .*, 8 KiB by memfit; give more"),
    ):
        mlp_loss(model, 0)


def test_the_budget_that_is_named_has_room_for_the_call() -> None:
    model = torch.nn.Linear(64, 1024)
    rows = torch.randn(256, 64)
    budget = bytes_of_tensors(CPU) + (1 << 19)
    with pytest.raises(OverBudgetError) as refusal, memfit.eager(model, budget=budget):
        model(rows)
    named = re.search(r"this call needs a budget of (\d+) bytes", str(refusal.value))
    assert named is not None
    with memfit.eager(model, budget=int(named[1])) as steps:
        model(rows)
    assert budget < steps.report().peak_bytes <= int(named[1])


def test_bad_arguments() -> None:
    with pytest.raises(InvalidBudgetError, match="share of a step's peak"):
        memfit.eager(mlp(), budget="60%")


def _peaks(*, asks: bool) -> list[int]:
    model, peaks = mlp(), list[int]()
    with memfit.eager(model, budget="1GiB") as steps:
        for seed in range(3):
            loss = mlp_loss(model, seed)
            peaks += [steps.report().peak_bytes] if asks else []
            loss.backward()
            peaks += [steps.report().peak_bytes] if asks else []
    return [*peaks, steps.report().peak_bytes]


def test_the_peak_so_far_is_that_of_the_whole_block() -> None:
    peaks = _peaks(asks=True)
    assert peaks == sorted(peaks)
    assert peaks[-2] == peaks[-1]
    gc.collect()
    assert _peaks(asks=False) == peaks[-1:]


def test_nothing_is_left_after_the_block() -> None:
    model = mlp()
    with memfit.eager(model, budget="1GiB") as steps:
        mlp_loss(model, 0).backward()
    before = steps.report()
    mlp_loss(model, 0).backward()
    assert steps.report() == before
    with pytest.raises(InvalidOptionError, match="entered before"), steps:
        pass


def test_what_pytorch_computes_otherwise_under_a_mode_is_refused() -> None:
    matrix = torch.randn(8, 8)
    with memfit.eager(mlp(), budget="1GiB"):
        with pytest.raises(UnsupportedStepError, match=r"test_eager_mode\.py:\d+: .*svdvals"):
            torch.linalg.svdvals(matrix).sum()
        if gradients_that_differ():
            with pytest.raises(UnsupportedStepError, match=r"test_eager_mode\.py:\d+: .*torch\.prod"):
                matrix.clone().requires_grad_().prod(1)


def test_decompositions_have_the_bare_loops_bits_where_their_vectors_are_read() -> None:
    matrix = torch.randn(24, 24, generator=torch.Generator().manual_seed(0))

    def decomposed() -> list[torch.Tensor]:
        values, vectors = torch.linalg.eigh(matrix @ matrix.T)
        left, singular, right = torch.linalg.svd(matrix, full_matrices=False)
        return [values.abs().sqrt(), vectors @ vectors.T, left * singular, right]

    bare = decomposed()
    with memfit.eager(mlp(), budget="1GiB"):
        assert all(map(torch.equal, decomposed(), bare))
    with pytest.raises(UnsupportedStepError, match="eigvalsh"), memfit.eager(mlp(), budget="1GiB"):
        torch.linalg.eigvalsh(matrix @ matrix.T).tolist()


def test_a_block_that_refuses_at_its_end_is_left() -> None:
    model = mlp()
    with pytest.raises(UnsupportedStepError, match="svdvals"), memfit.eager(model, budget="1GiB"):
        torch.linalg.svdvals(torch.randn(8, 8))

    def train() -> bool:
        with memfit.eager(model, budget="1GiB"):
            mlp_loss(model, 0).backward()
        return True

    assert gc.get_freeze_count() == 0
    with ThreadPoolExecutor(1) as threads:
        assert threads.submit(train).result()


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # which forward mode uses
def test_a_refusal_inside_of_a_transformation_is_one_line() -> None:
    model = mlp()
    parameters = {name: each.detach() for name, each in model.named_parameters()}
    inputs = torch.randn(4096, next(model.parameters()).shape[1])

    def called(given: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.func.functional_call(model, given, (inputs,)).square().mean()

    gc.collect()
    with (
        memfit.eager(model, budget=bytes_of_tensors(CPU) + (1 << 18)),
        pytest.raises(OverBudgetError, match="cannot be freed"),
    ):
        torch.func.jvp(called, (parameters,), (parameters,))


def test_what_was_let_go_and_is_saved_again() -> None:
    def loss(model: nn.Module, _number: int) -> torch.Tensor:
        return model(torch.randn(40, 32, 32))[0].square().mean()

    for make in (lambda: nn.GRU(32, 64, 2, dropout=0.2), lambda: nn.RNN(32, 64, 2)):
        checked(make, loss, 0.9)


def test_contents_that_others_wrote_are_kept_or_refused() -> None:
    """What NumPy has written into a tensor is not seen: no other contents may take its place unnoticed."""
    weight = torch.randn(64, 64, requires_grad=True)

    def gradient(through: str) -> torch.Tensor:
        x = torch.arange(2048 * 64, dtype=torch.float32).view(2048, 64) / 1e5
        noise = torch.empty(2048, 64)
        noise.numpy()[:] = 0.5
        hidden = (x @ weight) * noise if through == "saved" else (x @ weight) + noise
        del noise
        hidden = hidden.tanh()
        for _ in range(8):
            hidden = (hidden @ weight).tanh()
        return torch.autograd.grad(hidden.sum(), weight)[0]

    for through in ("saved", "read"):
        expected = gradient(through)
        gc.collect()
        with memfit.eager(nn.Linear(1, 1), budget=bytes_of_tensors(CPU) + (7 << 19)) as steps:
            try:
                found = gradient(through)
            except UnsupportedStepError as error:
                assert "cannot be recomputed with the same contents" in str(error)
            else:
                assert torch.equal(found, expected) and steps.report().made_again > 0


def test_a_buffer_that_is_filled_anew_while_a_graph_lives() -> None:
    buffer = torch.zeros(2048, 64)
    weight = torch.randn(64, 64, requires_grad=True)
    with memfit.eager(nn.Linear(1, 1), budget=bytes_of_tensors(CPU) + (6 << 19)):
        hidden = (buffer.add(1.0) @ weight).tanh()
        for _ in range(8):
            hidden = (hidden @ weight).tanh()
        buffer.numpy()[:] = 7.0
        try:
            (found,) = torch.autograd.grad(hidden.sum(), weight)
        except UnsupportedStepError as error:
            assert "cannot be recomputed" in str(error)
            return
    again = (torch.ones(2048, 64) @ weight).tanh()
    for _ in range(8):
        again = (again @ weight).tanh()
    assert torch.equal(found, torch.autograd.grad(again.sum(), weight)[0])


def test_a_generator_that_is_given_by_position() -> None:
    def loss(model: nn.Module, number: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(number)
        hidden = model[:8](torch.randn(2048, 64))  # type: ignore[index]
        noisy = hidden * torch.poisson(torch.ones(2048, 64), generator=generator)
        return model[8:](noisy).square().mean() + torch.poisson(torch.ones(4), generator=generator).sum()  # type: ignore[index]

    assert checked(mlp, loss, 0.6).made_again > 0


@pytest.mark.parametrize("seed", range(5))
def test_writes_lose_nothing_in_whatever_order_contents_go(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = random.Random(seed)

    def policy(free: Sequence[Kept], _now: int, _seconds_of: Any) -> Iterable[Kept]:
        shuffled = drawn.sample(free, len(free))
        return (kept for kept in shuffled if seconds_to_make(kept.source) < float("inf"))

    monkeypatch.setattr("memfit.eager_mode.releasing.cheap_and_stale", policy)
    test_statistics_that_batch_normalization_hides()


def test_statistics_that_batch_normalization_hides() -> None:
    torch.manual_seed(0)
    norm, weight, x = nn.BatchNorm1d(64), torch.randn(64, 64, requires_grad=True), torch.randn(2048, 64)

    def gradient() -> torch.Tensor:
        norm.reset_running_stats()
        norm.eval()
        hidden = norm(x @ weight).tanh()
        for _ in range(6):
            hidden = (hidden @ weight).tanh()
        norm.train()
        norm(x * 3)
        return torch.autograd.grad(hidden.sum(), weight)[0]

    expected = gradient()
    gc.collect()
    with memfit.eager(norm, budget=bytes_of_tensors(CPU) + (7 << 19)) as steps:
        assert torch.equal(gradient(), expected)
    assert steps.report().made_again > 0


def test_nothing_grows_from_step_to_step() -> None:
    model, optimizer, sizes = mlp(), None, []
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    average = torch.zeros(64)
    with memfit.eager(model, budget=bytes_of_tensors(CPU) + (8 << 20)) as steps:
        for number in range(30):
            batch = torch.randn(512 + number, 64)
            average = 0.9 * average + 0.1 * batch.mean(0)
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                model(batch)
            if number in (9, 19, 29):
                gc.collect()
                sizes.append(allocated_bytes(CPU))
    assert sizes[2] - sizes[0] < 20 * 64 * 4 + (1 << 14)
    assert steps.report().passes == 30


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_tensors_that_are_not_dense_stay_as_they_are() -> None:
    embedding = nn.Embedding(100, 64, sparse=True)
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2).eval()
    with memfit.eager(embedding, budget="1GiB"):
        for _ in range(2):
            embedding(torch.randint(0, 100, (16,))).square().sum().backward()
        with torch.no_grad():
            encoder(torch.randn(2, 8, 32), src_key_padding_mask=torch.tensor([[False] * 8, [False] * 5 + [True] * 3]))
    assert embedding.weight.grad is not None and embedding.weight.grad.is_sparse


def test_a_library_that_writes_in_place_unseen_by_its_schema() -> None:
    """An operator of another library may write to what it is given, whatever its schema says."""
    library = torch.library.Library("memfit_eager_test", "DEF")
    library.define("double(Tensor x) -> Tensor")

    def double(x: torch.Tensor) -> torch.Tensor:
        x.numpy()[:] *= 2
        return x.clone()

    library.impl("double", double, "CPU")
    weight = torch.randn(64, 64, requires_grad=True)
    x = torch.randn(2048, 64)

    def gradient() -> torch.Tensor:
        hidden = (x @ weight).exp()  # its result is what exp saves
        with torch.no_grad():
            torch.ops.memfit_eager_test.double(hidden.detach())
        result = hidden.tanh()
        del hidden
        for _ in range(8):
            result = (result @ weight).tanh()
        return torch.autograd.grad(result.sum(), weight)[0]

    expected = gradient()
    gc.collect()
    with memfit.eager(nn.Linear(1, 1), budget=bytes_of_tensors(CPU) + (7 << 19)) as steps:
        assert torch.equal(gradient(), expected)
    assert steps.report().made_again > 0


def test_what_code_holds_and_numpy_changes_is_as_it_is_or_refused() -> None:
    weight, x = torch.randn(64, 64, requires_grad=True), torch.randn(2048, 64)

    def gradient() -> torch.Tensor:
        held = (x @ weight).tanh()
        result = held
        for _ in range(8):
            result = (result @ weight).tanh()
        held.detach().numpy()[:] = 0.25
        return torch.autograd.grad(result.sum(), weight)[0]

    expected = gradient()
    gc.collect()
    with memfit.eager(nn.Linear(1, 1), budget=bytes_of_tensors(CPU) + (7 << 19)):
        try:
            assert torch.equal(gradient(), expected)
        except UnsupportedStepError as error:
            assert "cannot be recomputed with the same contents" in str(error)


def chain_of_calls(length: int) -> tuple[Sources, list[torch.Tensor]]:
    """Return what is known after so many calls, each of which reads the result of the one before; and the results."""
    made, sources = [torch.ones(4)], Sources()
    for number in range(1, length + 1):
        call = Call(number, torch.ops.aten.relu.default, 0.0, 0, None)
        call.read(sources, (made[-1],), {})
        made.append(torch.ones(4))
        sources.made(made[-1].untyped_storage(), call, 0)
    return sources, made[1:]


@pytest.mark.parametrize(("length", "is_known"), [(3, True), (1000, False)])
def test_what_was_just_made_is_not_forgotten_unless_all_of_the_loop_would_be_remembered_with_it(
    length: int, is_known: bool
) -> None:
    """What reads it next would hold it as what cannot be recomputed: a loop near its budget was refused there."""
    sources, made = chain_of_calls(length)
    sources.forget(set(), since=length)
    known = [sources.of(each.untyped_storage()).call is not None for each in made]
    assert known == [is_known] * length
    sources.forget(set(), since=math.inf)
    assert all(sources.of(each.untyped_storage()).call is None for each in made)
