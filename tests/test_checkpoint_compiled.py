"""`memfit.checkpoint` where blocks, or the whole model, are compiled: the compiler's bits, within the budget."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from checkpoint_models import Net, Trained, convs, images, mlps, rows, train
from occupied import bytes_now
from torch._dynamo.utils import counters

import memfit
from memfit.errors import InvalidOptionError, UnsupportedStepError
from memfit.system.recorder import record

pytestmark = pytest.mark.filterwarnings("ignore")  # the compiler's own
MODELS: dict[str, tuple[Callable[[], Net], Any]] = {
    "mlps": (mlps, rows),
    "with dropout": (lambda: mlps(dropout=0.1), rows),
    "convs": (convs, images),
}


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Any:
    with record("cpu"):
        pass
    torch.compiler.reset()
    counters.clear()
    yield
    torch.compiler.reset()


def train_compiled(
    kind: str, compile_it: Callable[[Net], Any], above_bytes: int | None, *, compiled_after: bool = False
) -> tuple[Trained, int, Any]:
    """Train within so many bytes above those that are there; return (what it gave, its peak above them, handle)."""
    torch.compiler.reset()
    counters.clear()
    gc.collect()
    gc.collect()  # the first one finalizes what the compiler kept, the second one frees it
    before_bytes = bytes_now(torch.device("cpu"))  # records that pytest keeps of the compiler's log have tensors
    make, data = MODELS[kind]
    model = make()
    call = model if compiled_after else compile_it(model)
    handle = memfit.checkpoint(call, before_bytes + above_bytes) if above_bytes else None
    if compiled_after:
        call = compile_it(model)
    got = train(model, data, steps=16, call=call)
    if handle is not None:
        handle.end_step()
        handle.close()
    return got, max(got.peaks[2:]) - before_bytes, handle


def by_blocks(backend: str) -> Callable[[Net], Net]:
    def compile_it(model: Net) -> Net:
        for layer in model.layers:
            layer.compile(backend=backend)
        return model

    return compile_it


def by_wrapped_blocks(backend: str) -> Callable[[Net], Net]:
    """As torchtitan's `apply_compile`."""

    def compile_it(model: Net) -> Net:
        for name, layer in model.layers.named_children():
            model.layers.register_module(name, torch.compile(layer, backend=backend, fullgraph=True))
        return model

    return compile_it


def by_method(model: Net) -> Net:
    model.compile(backend="aot_eager")
    return model


def by_wrapper(model: Net) -> Any:
    return torch.compile(model, backend="aot_eager")


@pytest.mark.parametrize("share", [0.9, 0.8])
@pytest.mark.parametrize("kind", ["with dropout", "convs"])
@pytest.mark.parametrize(("backend", "is_after"), [("aot_eager", False), ("aot_eager", True), ("inductor", False)])
@pytest.mark.slow
def test_compiled_blocks_are_compiled_once_and_keep_their_bits(
    kind: str, backend: str, share: float, is_after: bool
) -> None:
    bare, peak_bytes, _ = train_compiled(kind, by_blocks(backend), None)
    graphs = counters["stats"]["unique_graphs"]
    got, _, handle = train_compiled(kind, by_blocks(backend), int(share * peak_bytes), compiled_after=is_after)
    assert counters["stats"]["unique_graphs"] == graphs
    assert got.same_bits(bare)
    assert handle.report().over == 0
    assert "recomputed" in str(handle.report())


@pytest.mark.parametrize("is_after", [False, True])
def test_blocks_that_torch_compile_wraps_are_steered_around_it(is_after: bool) -> None:
    bare, peak_bytes, _ = train_compiled("mlps", by_wrapped_blocks("aot_eager"), None)
    graphs = counters["stats"]["unique_graphs"]
    compile_it = by_wrapped_blocks("aot_eager")
    got, _, handle = train_compiled("mlps", compile_it, int(0.8 * peak_bytes), compiled_after=is_after)
    assert counters["stats"]["unique_graphs"] == graphs
    assert got.same_bits(bare)
    assert handle.report().over == 0
    assert "recomputed" in str(handle.report())


def test_compiled_blocks_are_compiled_again_as_they_were_when_it_closes() -> None:
    model = by_blocks("aot_eager")(mlps(2))
    before = [layer._compiled_call_impl for layer in model.layers]
    with memfit.checkpoint(model, "1GiB") as handle:
        handle.expect_no_optimizer()
        assert all(layer._compiled_call_impl is not own for layer, own in zip(model.layers, before, strict=True))
    assert all(layer._compiled_call_impl is own for layer, own in zip(model.layers, before, strict=True))
    assert all("forward" not in vars(layer) for layer in model.layers)


@pytest.mark.parametrize("share", [0.9, 0.8])
@pytest.mark.parametrize("kind", ["mlps", "convs"])  # the compiler draws dropout otherwise than eager mode does
@pytest.mark.parametrize("compile_it", [by_method, by_wrapper])
@pytest.mark.slow
def test_a_model_that_is_compiled_as_a_whole_settles_in_eager_mode_first(
    kind: str, compile_it: Callable[[Net], Any], share: float
) -> None:
    bare, peak_bytes, _ = train_compiled(kind, compile_it, None)
    got, _, handle = train_compiled(kind, compile_it, int(share * peak_bytes))
    assert got.same_bits(bare)  # of aot_eager, which has eager's kernels
    report = handle.report()
    assert report.over <= 2  # the plan was made in eager mode, and is corrected at most twice
    assert all(window.taken_bytes <= report.budget_bytes for window in report.windows[-2:])
    assert 1 <= counters["stats"]["unique_graphs"] <= 3


def test_what_memfit_compile_runs_is_refused() -> None:
    model = memfit.compile(mlps(2), budget="1GiB")
    with pytest.raises(UnsupportedStepError, match=r"use one of memfit\.compile and memfit\.checkpoint"):
        memfit.checkpoint(model, "1GiB")


def test_a_host_budget_of_a_model_that_is_compiled_as_a_whole_is_refused() -> None:
    model = mlps(2)
    model.compile(backend="eager")
    before = model._compiled_call_impl
    with pytest.raises(InvalidOptionError, match="compile its blocks by themselves"):
        memfit.checkpoint(model, "1GiB", host_budget="1GiB")
    assert model._compiled_call_impl is before


@pytest.mark.parametrize("is_wrapped", [False, True])
def test_a_backend_without_aot_draws_the_same_numbers_when_a_block_is_recomputed(
    is_wrapped: bool, caplog: pytest.LogCaptureFixture
) -> None:
    def compiled(model: Net) -> Any:
        if is_wrapped:
            return torch.compile(model, backend="eager")
        model.compile(backend="eager")
        return model

    torch.manual_seed(3)
    bare, peak_bytes, _ = train_compiled("with dropout", compiled, None)
    with caplog.at_level(logging.WARNING):
        got, above_bytes, _ = train_compiled("with dropout", compiled, int(0.8 * peak_bytes))
    assert got.same_bits(bare) and above_bytes <= int(0.8 * peak_bytes)
    assert caplog.text.count("does not use AOTAutograd") == 1


def test_a_loop_that_does_not_call_the_model_is_told_so(caplog: pytest.LogCaptureFixture) -> None:
    model = mlps(2)
    with caplog.at_level(logging.WARNING), memfit.checkpoint(model, "1GiB"):
        train(model, steps=3, call=torch.compile(model, backend="eager"))
    assert caplog.text.count("no call of the model was seen") == 1


def test_a_model_compiled_without_breaks_stays_so_under_a_handle() -> None:
    bare, model = train(mlps(2), steps=2), mlps(2)
    with memfit.checkpoint(model, "1GiB"):
        assert train(model, steps=2, call=torch.compile(model, backend="eager", fullgraph=True)).same_bits(bare)
