"""What stock checkpoints get wrong in silence: under `memfit.checkpoint` it is right, or refused by name."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from checkpoint_models import Mlp, Net, Trained, convs, images, mlps, rows, train

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


def same_as_bare(make: Callable[[], Any], data: Callable[[int], Any] = rows, share: float = 0.75) -> Any:
    """Train bare and within a share of the peak; return the report."""
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


@pytest.mark.parametrize("block", [TwoDropouts, Counts, CountsInside, ReadsBeforeWrite, Branches])
@pytest.mark.parametrize("share", [0.85, 0.7, 0.0])
def test_bits_are_those_of_the_bare_loop(block: type[Mlp], share: float) -> None:
    same_as_bare(net(lambda: block(64)), share=share or 1e-6)


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
    handle = same_as_bare(with_stem(lambda: block(64)), share=share or 1e-6)
    (size,) = handle.report().sizes
    assert {"before", "after"} <= size.planned.rules.keys()
    assert share or size.planned.rules["before"] != "none"


def test_a_stem_that_writes_to_its_input_stays_as_it_is() -> None:
    handle = same_as_bare(with_stem(AddsToInput), share=0.5)
    (size,) = handle.report().sizes
    assert size.planned.rules["after"] == "none"
    (call,) = [call for shape in handle._loop.shapes.values() for call in shape.lean.calls if call.block == "after"]
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
        (call,) = next(iter(handle._loop.shapes.values())).lean.calls
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
    handle = same_as_bare(convs, images, share=1e-6)
    assert handle is not None


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


def test_a_reentrant_checkpoint_in_a_block_is_refused_by_name() -> None:
    model = net(lambda: Reentrant(64))()
    with memfit.checkpoint(model, "1GiB"), pytest.raises(UnsupportedStepError, match="use_reentrant=True"):
        model(rows(0)[0])


def test_other_checkpoints_in_a_block_stay() -> None:
    same_as_bare(net(lambda: NotReentrant(64)), share=0.9)


def test_a_wrapper_that_checkpoints_is_taken_over() -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper

    def make() -> Net:
        model = mlps()
        for n, layer in enumerate(model.layers):
            model.layers[n] = checkpoint_wrapper(layer, checkpoint_impl=CheckpointImpl.NO_REENTRANT)
        return model

    wanted = train(mlps())
    gc.collect()
    model = make()
    with memfit.checkpoint(model, int(1.2 * max(wanted.peaks[2:]))) as handle:
        got = train(model)
        assert set(handle.policy()["4096"].values()) == {"none"}
    assert got.losses == wanted.losses


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
