"""What stock checkpoints get wrong in silence: under `memfit.checkpoint` it is right, or refused by name."""

from __future__ import annotations

import copy
import gc
import io
import itertools
import logging
import random
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from types import FunctionType
from typing import Any

import checkpoint_reaching
import pytest
import torch
from checkpoint_models import Mlp, Net, Trained, convs, cross_entropy, images, mlps, rows, train
from occupied import bytes_now
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import memfit
from memfit.checkpointing.blocks import find_blocks
from memfit.errors import UnsupportedStepError
from memfit.system.recorder import record


@pytest.fixture(autouse=True, scope="module")
def _recorder() -> None:
    with record("cpu"):
        pass


def net(block: Callable[[], torch.nn.Module], count: int = 4) -> Callable[[], Net]:
    def make() -> Net:
        torch.manual_seed(0)
        return Net([block() for _ in range(count)], torch.nn.Linear(8, 64), torch.nn.Linear(64, 4))

    return make


def check_same_as_bare(make: Callable[[], Any], data: Callable[[int], Any] = rows, share: float = 0.75) -> Any:
    """Train bare and within a share of the peak; return the handle."""
    gc.collect()
    wanted = train(make(), data)
    gc.collect()
    model = make()
    budget = int(share * max(wanted.peaks[2:]))
    with memfit.checkpoint(model, budget, budget_is="soft") as handle:
        got = train(model, data)
        handle._loop.end()
        assert got.same_bits(wanted)
        return handle


class TwoDropouts(Mlp):
    """Draws twice, writes in place, and has a cheap part that draws."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.nn.functional.dropout(self.act(self.a(x)), 0.5, True)
        y = torch.nn.functional.dropout(self.b(y) + 1, 0.5, True, inplace=True)
        return x + torch.nn.functional.dropout(y, 0.2)


class Counts(Mlp):
    """Counts its calls in a buffer, in an attribute, and in a tensor that it replaces, and reads all of them."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.register_buffer("calls", torch.zeros(()))
        self.number, self.last = 0, torch.zeros(())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.number += 1
        self.last = self.last * 0.5 + x.detach().mean()
        return super().forward(x * (1 + 0.01 * self.calls + 0.02 * self.number + self.last))


class ReadsBeforeWrite(Mlp):
    """Reads a tensor before it writes to it in place: kept, it would be too new."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x)
        z = y.detach().sin()
        y.mul_(0.5)
        return x + self.b(self.act(y + z))


class Branches(Mlp):
    """Calls other operators as values say."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.act(self.a(x))
        for _ in range(int(x.abs().sum()) % 3):
            y = torch.nn.functional.dropout(y.sin(), 0.5)
        return x + self.b(y)


class CountsInside(Mlp):
    """Has a module inside that counts, and that may be checkpointed by itself."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.inside = Counts(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.inside(x))


class Initialises(Mlp):
    """Sets its scale and shift by the first batch that it sees, as ActNorm does; the shift has memory beside others."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.scale = torch.nn.Parameter(torch.ones(width))
        self.shift = torch.nn.Parameter(torch.zeros(9, width)[3])
        self.register_buffer("is_set", torch.tensor(False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.is_set:
            with torch.no_grad():
                self.scale.copy_(1 / (x.std(0) + 0.1))
                self.shift.data.sub_(x.mean(0))
                self.is_set.fill_(True)
        return super().forward((x + self.shift) * self.scale)


class LimitsNorms(Mlp):
    """Limits the norms of its weights before it uses them: one is given other memory, as in EEGNet; so is a buffer."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.register_buffer("average", torch.zeros(300, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.a.weight.data = torch.renorm(self.a.weight.data, 2, 0, 0.5)
        self.b.weight.data.mul_(0.99)
        self.average.data = 0.5 * self.average + x.detach().mean(0)
        return super().forward(x - 0.1 * self.average.mean(0))


@pytest.mark.parametrize(
    "block", [TwoDropouts, Counts, CountsInside, ReadsBeforeWrite, Branches, Initialises, LimitsNorms]
)
@pytest.mark.parametrize("share", [0.85, 0.7, 0.0])
def test_bits_are_those_of_the_bare_loop(block: type[Mlp], share: float) -> None:
    check_same_as_bare(net(lambda: block(64)), share=share or 1e-6)


class Decays(Mlp):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.b.weight.data.mul_(0.99)
        return super().forward(x)


@pytest.mark.parametrize("calls", [1, 2])
def test_a_parameter_that_is_written_again_before_backward_is_refused(calls: int) -> None:
    """PyTorch's own backward pass would read what was written last."""
    model = net(lambda: Decays(64))()
    x = rows(0)[0]
    with memfit.checkpoint(model, "64MiB"):
        loss = torch.stack([model(x).square().mean() for _ in range(calls)]).sum()
        if calls == 1:
            model.layers[0].b.weight.data.mul_(0.5)
        with pytest.raises(UnsupportedStepError, match=r"of a module in block 'layers.\d' was written to"):
            loss.backward()


def reaching(factor: Any) -> Callable[[], Net]:
    made = net(lambda: checkpoint_reaching.Reaching(factor))

    def make() -> Net:
        checkpoint_reaching.begin()
        return made()

    return make


@pytest.mark.parametrize("factor", checkpoint_reaching.HELD)
@pytest.mark.parametrize("share", [0.8, 0.0])
def test_python_state_that_a_block_changes_is_held_for_its_second_forward_pass(factor: Any, share: float) -> None:
    check_same_as_bare(reaching(factor), share=share or 1e-6)


@pytest.mark.parametrize("factor", checkpoint_reaching.REFUSED)
def test_an_iterator_that_a_block_advances_and_that_cannot_be_set_back_is_refused(factor: Any) -> None:
    name = checkpoint_reaching.REFUSED[factor]
    with pytest.raises(UnsupportedStepError, match=rf"block '.*' takes values from .*{name}, an iterator"):
        check_same_as_bare(reaching(factor))


class Memory:
    """An object that a block is given, and changes."""

    def __init__(self) -> None:
        self.held: torch.Tensor | None = None

    def __getitem__(self, _key: str) -> torch.Tensor:
        assert self.held is not None
        return self.held

    def __setitem__(self, _key: str, value: torch.Tensor) -> None:
        self.held = value


class Remembers(Mlp):
    """Reads what it is given beside its input, and leaves its output there."""

    def forward(self, x: torch.Tensor, memory: Any, *, key: Any, detached: bool) -> torch.Tensor:
        y = super().forward(x * torch.sigmoid(memory[key]))
        memory[key] = y.detach() if detached else y
        return y


class Remembering(Net):
    """Gives each block a memory of its own, or one to all, and runs twice through them."""

    def __init__(self, kind: Callable[[], Any], key: Any, *, detached: bool, shared: bool) -> None:
        torch.manual_seed(0)
        super().__init__([Remembers(64) for _ in range(3)], torch.nn.Linear(8, 64), torch.nn.Linear(64, 4))
        self.kind, self.key, self.detached, self.shared = kind, key, detached, shared

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.before(x)
        memories = [self.kind()] * 3 if self.shared else [self.kind() for _ in range(3)]
        for memory in memories:
            memory[self.key] = torch.zeros_like(x)
        for _ in range(2):
            for layer, memory in zip(self.layers, memories, strict=True):
                x = layer(x, memory, key=self.key, detached=self.detached)
        return self.after(x)


@pytest.mark.parametrize(
    ("detached", "shared", "share"),
    [(False, False, 0.8), (False, True, 0.0), (True, False, 0.0), (True, True, 0.8)],  # each pair of two of them
)
@pytest.mark.parametrize(
    ("kind", "key"), [(lambda: [None], 0), (dict, "k"), (Memory, "k")], ids=["list", "dict", "own"]
)
def test_what_a_block_is_given_and_changes_is_held_for_its_second_forward_pass(
    kind: Callable[[], Any], key: Any, detached: bool, shared: bool, share: float
) -> None:
    check_same_as_bare(lambda: Remembering(kind, key, detached=detached, shared=shared), share=share or 1e-6)


class Memoizes(torch.nn.Module):
    """Keeps noise by a key, which is new in a planned step."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = torch.nn.ParameterList(torch.nn.Parameter(torch.randn(64) * 0.5) for _ in range(8))
        self.noise, self.calls = dict[int, torch.Tensor](), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls // 3 not in self.noise:
            self.noise[self.calls // 3] = torch.rand(512, 64) + 0.5
        y = x * self.noise[self.calls // 3]
        for scale in self.scales:
            y = torch.nn.functional.gelu((y * scale).tanh())
        return x + y


@pytest.mark.parametrize("share", [0.0, 0.7, 0.9])
def test_what_a_block_keeps_by_a_new_key_is_held_for_its_second_forward_pass(share: float) -> None:
    def make() -> Net:
        torch.manual_seed(0)
        return Net([Memoizes() for _ in range(5)], torch.nn.Linear(8, 64), torch.nn.Linear(64, 4))

    check_same_as_bare(make, share=share or 1e-6)


class Hidden(torch.nn.Module):
    """Computes by what memfit does not look at: an object of a library."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logger = logging.getLogger("memfit.tests.hidden")
        y = self.inner(x).tanh() if logger.level else self.inner(x).sigmoid().tanh()
        logger.setLevel(logging.DEBUG)
        return x + y


def test_a_block_that_computes_otherwise_the_second_time_is_refused_by_name() -> None:
    model = torch.nn.Sequential(*[Hidden() for _ in range(5)])
    logging.getLogger("memfit.tests.hidden").setLevel(logging.NOTSET)
    with (
        memfit.checkpoint(model, "64MiB"),
        pytest.raises(UnsupportedStepError, match=r"^block '0' computes something else.*memfit\.eager.*$") as refused,
    ):
        model(torch.randn(512, 64, requires_grad=True)).square().mean().backward()
    assert "\n" not in str(refused.value)


class AddsToInput(torch.nn.Module):
    """Adds to its input in place, as some encodings of positions do."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x += 0.5
        return self.inside(x)


def with_stem(block: Callable[[], torch.nn.Module]) -> Callable[[], Net]:
    def make() -> Net:
        torch.manual_seed(0)
        before = torch.nn.Sequential(torch.nn.Linear(8, 64), block())
        return Net([Mlp(64) for _ in range(3)], before, torch.nn.Sequential(block(), torch.nn.Linear(64, 4)))

    return make


@pytest.mark.parametrize("share", [0.85, 0.6, 0.0])
@pytest.mark.parametrize("block", [TwoDropouts, Counts, Branches, Mlp])
def test_bits_with_a_stem_and_a_head_beside_the_blocks(block: type[Mlp], share: float) -> None:
    handle = check_same_as_bare(with_stem(lambda: block(64)), share=share or 1e-6)
    (size,) = handle.report().sizes
    assert {"before", "after"} <= size.planned.rules.keys()
    assert share or size.planned.rules["before"] != "none"


def test_a_stem_that_writes_to_its_input_stays_as_it_is() -> None:
    handle = check_same_as_bare(with_stem(AddsToInput), share=0.5)
    (size,) = handle.report().sizes
    assert size.planned.rules["after"] == "none"
    (call,) = [
        call for shape in handle._loop.plans.shapes.values() for call in shape.lean.calls if call.block == "after"
    ]
    assert "writes to its input (aten.add_.Tensor)" in call.must_stay
    assert size.planned.rules["before"] != "none"  # there it is the stem's own tensor


@pytest.mark.parametrize("block", [TwoDropouts, ReadsBeforeWrite])
def test_each_storage_that_may_be_kept_gives_the_same_bits(block: type[Mlp]) -> None:
    """What is not refused is right: results of each storage by themselves, and all but these."""
    make = net(lambda: block(64), count=1)
    wanted = train(make(), steps=3)
    model = make()
    with memfit.checkpoint(model, 1 << 40, blocks=["layers.0"]) as handle:
        train(model, steps=3)
        (call,) = next(iter(handle._loop.plans.shapes.values())).lean.calls
    storages = {op.storage for op in call.ops}
    alone = [[f"{op.name}#{op.nth}" for op in call.ops if op.storage == storage] for storage in storages]
    everything = {name for rule in alone for name in rule}
    carried_out = 0
    for rule in [*alone, *(sorted(everything - set(rule)) for rule in alone)]:
        model = make()
        handle = memfit.checkpoint(model, policy={"4096": {"layers.0": rule}}, blocks=["layers.0"])
        try:
            assert train(model, steps=3).same_bits(wanted), rule
            carried_out += 1
        except memfit.MemfitError as error:
            assert "cannot be kept without others" in str(error)
        finally:
            handle.close()
    assert carried_out >= 3


def test_statistics_of_batch_normalization_are_written_once() -> None:
    handle = check_same_as_bare(convs, images, share=1e-6)
    assert handle is not None


class Norms(Mlp):
    """With a batch normalization of more elements than a buffer that is always copied."""

    def __init__(self, kind: type[torch.nn.Module] = torch.nn.BatchNorm1d) -> None:
        super().__init__(64)
        self.wide, self.norm, self.narrow = torch.nn.Linear(64, 300), kind(300), torch.nn.Linear(300, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.narrow(self.norm(self.wide(x))))


class Later(torch.nn.BatchNorm1d):
    """Reads its statistics from its fourth call on."""

    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        normed = super().forward(x)
        return normed if self.calls < 4 else normed + self.running_mean


class Own(torch.nn.Module):
    """A normalization of the user's own, whose statistics PyTorch's kernel writes without counting it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("spread", torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.batch_norm(x, self.mean, self.spread, training=self.training)


def set_norms(model: Any, train: Callable[[int], bool]) -> None:
    norms = [layer.norm for layer in model.layers]
    for number, norm in enumerate(norms):
        norm.train(train(number))


def frozen_in_turns(model: torch.nn.Module, batch: Any, numbers: Any) -> torch.Tensor:
    step = next(numbers)
    set_norms(model, lambda number: (number + step) % 3 > 0)
    return cross_entropy(model, batch)


def frozen_in_the_second_call(model: torch.nn.Module, batch: Any, numbers: Any) -> torch.Tensor:
    set_norms(model, lambda _: True)
    one = cross_entropy(model, batch)
    set_norms(model, lambda _: next(numbers) < 12)
    return one + cross_entropy(model, batch)


def frozen_in_the_first_call(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    set_norms(model, lambda _: False)
    one = cross_entropy(model, batch)
    set_norms(model, lambda _: True)
    return one + cross_entropy(model, batch)


def never_frozen(model: torch.nn.Module, batch: Any, **_: Any) -> torch.Tensor:
    return cross_entropy(model, batch)


@pytest.mark.parametrize(
    ("block", "loss"),
    [
        (Norms, frozen_in_turns),
        (Norms, frozen_in_the_second_call),
        (partial(Norms, Own), frozen_in_turns),
        (partial(Norms, Later), never_frozen),
    ],
)
def test_statistics_that_some_passes_read_and_others_write(block: Any, loss: Any) -> None:
    def trained(model: torch.nn.Module) -> Any:
        return train(model, loss=partial(loss, numbers=itertools.count()))

    wanted, model = trained(net(block)()), net(block)()
    with memfit.checkpoint(model, 1 << 20, budget_is="soft"):
        assert trained(model).same_bits(wanted)


def test_statistics_that_are_written_before_the_backward_pass_of_a_call_that_read_them() -> None:
    """PyTorch's backward pass then reads the later ones, and nothing says so."""
    wanted, model = train(net(Norms)(), loss=frozen_in_the_first_call), net(Norms)()
    with memfit.checkpoint(model, 1 << 20), pytest.raises(UnsupportedStepError, match=r"'layers\.3' ran a batch norm"):
        train(model, loss=frozen_in_the_first_call)
    model = net(Norms)()
    with memfit.eager(model, budget=int(0.8 * max(wanted.peaks))):
        assert train(model, loss=frozen_in_the_first_call).same_bits(wanted)


class AsksForIdentity(Mlp):
    """As `nn.MultiheadAttention`, which multiplies once if query, key and value are one tensor."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.inner = Inner(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        return super().forward(self.inner(y, y, other=y))

    def norm(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.layer_norm(x, x.shape[-1:])


class Inner(torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.a = torch.nn.Linear(width, width)

    def forward(self, x: torch.Tensor, y: torch.Tensor, *, other: torch.Tensor) -> torch.Tensor:
        return self.a(x).exp().cos() if x is y and y is other else self.a(x) + self.a(y)


@pytest.mark.parametrize("inner", ["none", "full"])
def test_arguments_that_are_one_tensor_stay_one(inner: str) -> None:
    make = net(lambda: AsksForIdentity(64))
    wanted = train(make())
    model = make()
    rules = {name: inner for name, _ in find_blocks(model)} | {f"layers.{n}.inner": "full" for n in range(4)}
    with memfit.checkpoint(model, policy={"4096": rules}):
        assert train(model).same_bits(wanted)


class WritesToInput(Mlp):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.relu_())


def test_a_block_that_writes_to_its_input_is_refused_with_op_and_remedy() -> None:
    model = net(lambda: WritesToInput(64))()
    with memfit.checkpoint(model, "1GiB") as handle:
        with pytest.raises(
            UnsupportedStepError, match=r"'layers.0' writes to its input \(aten.relu_.default\).*blocks="
        ):
            model(rows(0)[0])
        assert handle.report().windows == ()
    train(model, steps=2)


class WritesOutside(Mlp):
    seen: torch.Tensor = torch.zeros(64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        WritesOutside.seen += x.detach().mean(0)
        return super().forward(x)


def test_a_block_that_writes_to_a_tensor_of_nobody_is_refused() -> None:
    model = net(lambda: WritesOutside(64))()
    with memfit.checkpoint(model, "1GiB"), pytest.raises(UnsupportedStepError, match="a tensor from outside of it"):
        model(rows(0)[0])


class Reentrant(Mlp):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.utils.checkpoint.checkpoint(super().forward, x, use_reentrant=True)


class NotReentrant(Mlp):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.utils.checkpoint.checkpoint(super().forward, x, use_reentrant=False)


class WritesTwo(Mlp):
    """Writes to two of its tensors in one call."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.act(self.a(x))
        two = [y.detach().sin(), y.detach().cos()]
        torch._foreach_add_(two, 1.0)
        return x + self.b(y * two[0] + two[1] * y.tanh())


def test_a_call_that_writes_to_several_tensors_is_right() -> None:
    for share in (0.9, 0.75, 0.6):
        check_same_as_bare(net(lambda: WritesTwo(64)), share=share)


def test_noise_that_autograd_saves_before_it_is_drawn_is_refused() -> None:
    """Torch's own checkpoint around RReLU alone ends its second forward pass before the noise is there."""
    model = net(lambda: torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.RReLU()))()
    with (
        memfit.checkpoint(model, "1GiB"),
        pytest.raises(UnsupportedStepError, match=r"rrelu_with_noise.*memfit\.eager"),
    ):
        train(model)


def _layers() -> torch.nn.Sequential:
    torch.manual_seed(0)
    layers = [layer for _ in range(6) for layer in (torch.nn.Linear(8, 8), torch.nn.Tanh())]
    return torch.nn.Sequential(*layers, torch.nn.Linear(8, 4))


@pytest.mark.parametrize("is_frozen", [False, True])
def test_a_layer_of_a_sequence_in_pieces_that_is_replaced_counts_from_the_next_call_on(is_frozen: bool) -> None:
    """A call takes up the model's forward before hooks on the model run."""

    def trained(*, is_held: bool) -> tuple[list[torch.Tensor], torch.nn.Sequential]:
        model, losses = _layers(), list[torch.Tensor]()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        handle = memfit.checkpoint(model, "1GiB") if is_held else None
        for number in range(7):
            if number == 3 and is_frozen and handle is not None:
                handle.freeze()
            if number == 4:
                torch.manual_seed(1)
                model[2] = torch.nn.Linear(8, 8)
            if number == 5:
                model.append(torch.nn.Linear(4, 4))
            losses.append(model(rows(number)[0]).square().mean())
            losses[-1].backward()
            optimizer.step()
            optimizer.zero_grad()
        if handle is not None:
            handle.close()
            assert "forward" not in vars(model)
        return losses, model

    (wanted, bare), (got, model) = trained(is_held=False), trained(is_held=True)
    assert all(map(torch.equal, got, wanted))
    assert all(map(torch.equal, model.parameters(), bare.parameters()))


def test_copies_of_a_sequence_in_pieces_run_their_own_layers() -> None:
    model, values = _layers(), rows(0)[0]
    with memfit.checkpoint(model, "1GiB"):
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
            assert torch.equal(other(values), model(values))
            other[0] = torch.nn.Linear(8, 8)
            assert not torch.equal(other(values), model(values))


def test_a_forward_that_the_user_puts_there_meanwhile_stays() -> None:
    model = mlps()
    layer: Any = model.layers[0]
    with memfit.checkpoint(model, "1GiB"):
        train(model, steps=3)
        before = layer.forward
        layer.forward = lambda x: 2 * before(x)
        doubled = layer(torch.ones(2, 64))
    assert torch.equal(layer(torch.ones(2, 64)), doubled)
    train(model, steps=2)
    del layer.forward
    assert torch.equal(2 * layer(torch.ones(2, 64)), doubled) is False  # trained on
    assert all("forward" not in vars(each) for each in model.modules())


def _plain_gelu(y: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    x = y + bias
    return x * 0.5 * (1.0 + torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x)))


_PLAIN = _plain_gelu


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_a_function_of_torch_jit_is_refused_and_has_its_bits_in_eager_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its second call has other formulas for gradients than its first one."""

    class Scripted(Mlp):
        def __init__(self) -> None:
            super().__init__(64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.b(_plain_gelu(self.a(x), self.a.bias))

    def make() -> Net:
        monkeypatch.setitem(globals(), "_plain_gelu", torch.jit.script(FunctionType(_PLAIN.__code__, globals())))
        return net(Scripted)()

    wanted = train(make())
    model = make()
    with memfit.checkpoint(model, "1GiB"), pytest.raises(UnsupportedStepError, match=r"'_plain_gelu', .*memfit\.eager"):
        train(model)
    model = make()
    with memfit.eager(model, budget=int(0.75 * max(wanted.peaks)) + bytes_now(torch.device("cpu"))):
        assert train(model).same_bits(wanted)


def test_a_reentrant_checkpoint_in_a_block_is_refused_by_name() -> None:
    model = net(lambda: Reentrant(64))()
    with memfit.checkpoint(model, "1GiB"), pytest.raises(UnsupportedStepError, match="use_reentrant=True"):
        model(rows(0)[0])


def test_other_checkpoints_in_a_block_stay() -> None:
    check_same_as_bare(net(lambda: NotReentrant(64)), share=0.9)


def keeps_products(_context: Any, operator: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    is_product = operator is torch.ops.aten.addmm.default
    return CheckpointPolicy.MUST_SAVE if is_product else CheckpointPolicy.PREFER_RECOMPUTE


SELECTIVE = partial(create_selective_checkpoint_contexts, keeps_products)


def own_contexts() -> Any:
    return nullcontext(), nullcontext()


def wrapped(**options: Any) -> Net:
    model = mlps()
    for n, layer in enumerate(model.layers):
        model.layers[n] = checkpoint_wrapper(layer, **options)
    return model


@pytest.mark.parametrize("options", [{}, {"context_fn": SELECTIVE}, {"checkpoint_impl": CheckpointImpl.REENTRANT}])
def test_a_wrapper_that_checkpoints_is_taken_over(options: dict[str, Any]) -> None:
    wanted = train(mlps())
    gc.collect()
    model = wrapped(**options)
    with memfit.checkpoint(model, int(1.2 * max(wanted.peaks[2:]))) as handle:
        got = train(model)
        assert set(handle.policy()["4096"].values()) == {"none"}
    assert got.losses == wanted.losses


class BlocksBySelection(Net):
    """Calls its blocks in checkpoints of its own, which keep products."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.before(x)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False, context_fn=SELECTIVE)
        return self.after(x)


def test_blocks_in_a_selective_checkpoint_of_the_models_run_as_they_are() -> None:
    def make() -> Net:
        model = mlps()
        return BlocksBySelection(list(model.layers), model.before, model.after)

    before_bytes = bytes_now(torch.device("cpu"))
    wanted = train(make())
    kept_bytes = bytes_now(torch.device("cpu")) - before_bytes
    model = make()
    with memfit.checkpoint(model, max(wanted.peaks[2:]) + kept_bytes + (64 << 10)):
        assert train(model).same_bits(wanted)


def test_a_wrapper_with_contexts_of_the_users_is_refused() -> None:
    with pytest.raises(UnsupportedStepError, match=r"'layers.0' is checkpointed with a context_fn .*own_contexts"):
        memfit.checkpoint(wrapped(context_fn=own_contexts), "1GiB")


# -- calls and backward passes


class Varying(Net):
    """Calls of its blocks that data choose.

    Args:
        how: layers are dropped; the pass ends early; each block, or the first one alone, is called several times; each
            call goes to another block; blocks get other numbers of rows.
    """

    def __init__(self, how: str) -> None:
        super().__init__([Mlp(64) for _ in range(8)], torch.nn.Linear(8, 64), torch.nn.Linear(64, 4))
        self.how = how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chance = random.Random(int(x[0, 0].item() * 1e4))
        x = self.before(x)
        for number, count in self._calls(chance):
            rows = int(len(x) * chance.uniform(0.7, 1)) if self.how == "rows" else len(x)
            for _ in range(count):
                x = torch.cat([self.layers[number](x[:rows]), x[rows:]])
        return self.after(x)

    def _calls(self, chance: random.Random) -> list[tuple[int, int]]:
        count = len(self.layers)
        return {
            "dropped": [(number, int(chance.random() < 0.6)) for number in range(count)],
            "ends early": [(number, 1) for number in range(chance.randint(2, count))],
            "several calls": [(number, chance.randint(1, 3)) for number in range(count)],
            "one block": [(0, chance.randint(2, count))],
            "routed": [(chance.randrange(count), 1) for _ in range(count)],
            "rows": [(number, 1) for number in range(count)],
        }[self.how]


@pytest.mark.parametrize("how", ["dropped", "ends early", "several calls", "one block", "routed", "rows"])
def test_blocks_beyond_what_the_plan_was_made_from_are_computed_again(how: str) -> None:
    def make() -> Varying:
        torch.manual_seed(0)
        return Varying(how)

    wanted = train(make(), rows, steps=30)
    model, budget = make(), int(0.8 * max(wanted.peaks[2:]))
    with memfit.checkpoint(model, budget, budget_is="soft") as handle:
        got = train(model, rows, steps=30)
        handle._loop.end()
        assert got.same_bits(wanted)
        assert sum(peak > budget for peak in got.peaks) <= 2  # each is a reason for another plan
        assert max(got.peaks) < 1.03 * budget
        assert handle.report().lean <= 9


class TwoOutputs(Net):
    """Returns what a loop leaves aside before what it uses, as some models of TRL do."""

    def forward(self, x: torch.Tensor) -> Any:
        output = super().forward(x)
        return {"loss": output.sum(), "scores": output}


def loss_of_scores(model: Any, batch: Any) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(model(batch[0])["scores"], batch[1])


def loss_beside_a_reference(model: Any, batch: Any) -> torch.Tensor:
    """Calls the model without gradients between its forward and its backward pass, as TRL's DPO with adapters does."""
    output = model(batch[0])
    with torch.no_grad():
        reference = model(batch[0] + 1)
    return torch.nn.functional.cross_entropy(output - reference, batch[1])


@pytest.mark.parametrize(("kind", "loss"), [(TwoOutputs, loss_of_scores), (Net, loss_beside_a_reference)])
def test_each_step_is_seen_and_planned(kind: type[Net], loss: Any) -> None:
    def make() -> Net:
        model = mlps()
        return kind(list(model.layers), model.before, model.after)

    train(make(), loss=loss)
    gc.collect()
    wanted = train(make(), loss=loss)
    gc.collect()
    model = make()
    with memfit.checkpoint(model, int(0.7 * max(wanted.peaks[2:]))) as handle:
        assert train(model, loss=loss).same_bits(wanted)
        handle.end_step()
        report = handle.report()
    assert (report.count, report.lean, report.over) == (8, 1, 0)


# -- transformers


def gpt2(**options: Any) -> Any:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=3, n_embd=32, n_head=2, vocab_size=100, n_positions=64, bos_token_id=0, eos_token_id=0, **options
    )
    model = transformers.GPT2LMHeadModel(config).train()
    model.loss_type = "ForCausalLM"
    return model


def tokens(step: int) -> Any:
    ids = torch.randint(0, 100, (8, 64), generator=torch.Generator().manual_seed(step))
    return {"input_ids": ids, "labels": ids}


def language_loss(model: Any, batch: Any) -> torch.Tensor:
    return model(**batch).loss


def trained(model: Any) -> Trained:
    return train(model, tokens, loss=language_loss, steps=6)


@pytest.mark.parametrize("has_cache", [True, False])
@pytest.mark.parametrize("checkpoints_before", [True, False])
def test_a_library_that_checkpoints_by_itself(has_cache: bool, checkpoints_before: bool) -> None:
    wanted = trained(gpt2(use_cache=has_cache))
    gc.collect()
    model = gpt2(use_cache=has_cache)
    if checkpoints_before:
        enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
        enable({"use_reentrant": True})
    tables = [dict(vars(module)) for module in model.modules()]
    with memfit.checkpoint(model, int(0.8 * max(wanted.peaks[2:]))) as handle:
        got = trained(model)
        assert got.same_bits(wanted)
        assert list(handle.policy()["1024"]) and all(
            name.startswith("transformer.h.") for name in handle.policy()["1024"]
        )
    assert [table.keys() for table in tables] == [vars(module).keys() for module in model.modules()]
    assert model.transformer.h[0].gradient_checkpointing == checkpoints_before


@pytest.mark.parametrize("settings", [{"preserve_rng_state": False}, {"use_reentrant": False, "context_fn": SELECTIVE}])
def test_settings_of_a_librarys_checkpoints_are_taken_over(settings: dict[str, Any]) -> None:
    wanted = trained(gpt2())
    gc.collect()
    model = gpt2()
    model.activation_checkpointing_enable(settings)
    with memfit.checkpoint(model, int(0.8 * max(wanted.peaks[2:]))) as handle:
        assert trained(model).same_bits(wanted)
        assert "none" in handle.policy()["1024"].values()


@pytest.mark.parametrize(
    ("settings", "offload", "what"),
    [
        ({"use_reentrant": False, "context_fn": own_contexts}, False, r"a context_fn of its own \(.*own_contexts\)"),
        ({"use_reentrant": False, "depth": 2}, False, "depth=..., no argument of torch.utils.checkpoint"),
        (None, True, r"a function of its own .*offload=True"),
    ],
)
@pytest.mark.parametrize("is_after", [False, True])
def test_settings_that_would_be_lost_are_refused(settings: Any, offload: bool, what: str, is_after: bool) -> None:
    model = gpt2()
    handle = memfit.checkpoint(model, "1GiB") if is_after else None
    model.activation_checkpointing_enable(settings, offload=offload)
    with pytest.raises(UnsupportedStepError, match=f"'transformer' is checkpointed with {what}.*leave it out of"):
        trained(model) if is_after else memfit.checkpoint(model, "1GiB")
    if handle is not None:
        handle.close()


@pytest.mark.parametrize("is_on", [True, False])
def test_checkpoints_that_a_loop_turns_on_or_off_stay_memfits(is_on: bool) -> None:
    wanted = trained(gpt2())
    gc.collect()
    model = gpt2()

    def loss(model: Any, batch: Any) -> torch.Tensor:  # as loops do that generate in between
        (model.activation_checkpointing_enable if is_on else model.activation_checkpointing_disable)()
        return language_loss(model, batch)

    with memfit.checkpoint(model, int(0.8 * max(wanted.peaks[2:]))) as handle:
        assert train(model, tokens, loss=loss, steps=6).same_bits(wanted)
        handle.end_step()
        assert handle.report().over == 0
        assert len(handle.policy()["1024"]) > 3
    assert model.is_activation_checkpointing == is_on


class _Products(TorchDispatchMode):
    """Counts products of matrices in the forward passes of blocks."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten.addmm.default
        return func(*args, **(kwargs or {}))


def test_what_is_to_go_to_the_host_goes_there() -> None:
    """Stock's policies of offloading recompute in eager mode, and say nothing (pytorch#196956)."""

    def offload(*_: Any, **__: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_CPU_OFFLOAD

    x = torch.randn(8, 64, requires_grad=True)
    contexts = partial(create_selective_checkpoint_contexts, offload)
    loss = torch.utils.checkpoint.checkpoint(Mlp(64), x, use_reentrant=False, context_fn=contexts).sum()
    with _Products() as again:
        loss.backward()
    assert again.count == 1  # of the two, the last one that saves anything is not reached: so it was not on the host
    model = net(lambda: Mlp(64), count=8)()
    away: list[int] = []
    with memfit.checkpoint(model, 1, budget_is="soft", host_budget="64MiB") as handle:
        model.after.register_forward_pre_hook(lambda *_: away.append(len(handle._loop.steering.present.hosted)))
        train(model, lambda step: rows(step, 4096), steps=4)
    assert away == [0, 7, 7, 7]


class Gated(torch.nn.Module):
    """Two linear layers read its input: autocast casts it twice, and each weight once."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.a, self.b = torch.nn.LayerNorm(64), torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)
        self.up, self.down = torch.nn.Linear(64, 256), torch.nn.Linear(256, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + torch.sigmoid(self.a(x)) * torch.tanh(self.b(x))
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


def _backward_outside(model: torch.nn.Module, x: torch.Tensor) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(x).float().square().mean()
    loss.backward()


def _backward_inside(model: torch.nn.Module, x: torch.Tensor) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        model(x).float().square().mean().backward()


def _inside_of_none(model: torch.nn.Module, x: torch.Tensor) -> None:
    with torch.autocast("cpu", enabled=False):
        _backward_outside(model, x)


def _called_twice(model: torch.nn.Module, x: torch.Tensor) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        loss = (model(x) - model(x * 2)).float().square().mean()
    loss.backward()


@pytest.mark.parametrize("share", [0.7, 0.9])
@pytest.mark.parametrize("run", [_backward_outside, _backward_inside, _inside_of_none, _called_twice])
def test_what_autocasts_cache_holds_is_no_other_computation(
    run: Callable[[torch.nn.Module, torch.Tensor], None], share: float
) -> None:
    """The cache holds casts of weights in one forward pass of a block, and not in the other."""
    ends: list[list[torch.Tensor]] = []
    budget_bytes = 0
    for is_planned in (False, True):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(64, 64), *(Gated() for _ in range(4)), torch.nn.Linear(64, 4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        gc.collect()
        before_bytes = bytes_now(torch.device("cpu"))
        with memfit.checkpoint(model, before_bytes + budget_bytes) if is_planned else nullcontext():
            for number in range(5):
                x = torch.randn(512, 64)
                with record("cpu") as usage:
                    run(model, x)
                    optimizer.step()
                    optimizer.zero_grad()
                if is_planned and number > 1:
                    assert usage.peak_bytes + x.nbytes <= budget_bytes
        ends.append([each.detach().clone() for each in model.parameters()])
        budget_bytes = int(share * usage.peak_bytes)
        del model, optimizer, x
    assert all(map(torch.equal, *ends))


def test_an_attribute_whose_result_is_kept_stays_that_of_the_first_forward_pass() -> None:
    class Balanced(Mlp):
        aux = torch.zeros(())

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            outputs = super().forward(inputs)
            self.aux = outputs.mean().tanh()
            return outputs.sin()  # what it saves is saved after the attribute was set

    model = torch.nn.Sequential(*(Balanced(8) for _ in range(3)))
    rules = {str(number): ["aten.tanh.default#1"] for number in range(3)}
    inputs = rows(0)[0]
    with memfit.checkpoint(model, policy={str(inputs.numel()): rules}, blocks=["0", "1", "2"]):
        for _ in range(3):
            loss = model(inputs).square().mean() + sum(each.aux for each in model)
            before = [each.aux for each in model]
            loss.backward()
            assert all(each.aux is aux for each, aux in zip(model, before, strict=True))
            assert all(torch.equal(each.aux, aux) for each, aux in zip(model, before, strict=True))
