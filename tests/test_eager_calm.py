"""Eager mode while memory is plentiful: nothing is noted, and the budget holds all the same when a step grows."""

from __future__ import annotations

import gc

import pytest
import torch
from eager_loops import CPU, Trained, checked, convolutions, images_loss, mlp, mlp_loss
from torch import nn

import memfit
from memfit.eager_mode.eager import bytes_of_tensors
from memfit.eager_mode.needs import key_of
from memfit.torch_private.autograd import default_saved_hooks


def small_then_large(model: nn.Module, number: int) -> torch.Tensor:
    return model(torch.randn(2048 if number in (5, 6, 9) else 64, 64)).square().mean()


def test_nothing_is_noted_while_memory_is_plentiful() -> None:
    loop = Trained(mlp, mlp_loss)
    with memfit.eager(loop.model, budget="1GiB") as block:
        loop.run(1)
        assert default_saved_hooks() is not None  # the first passes are noted
        loop.run(3)
        assert default_saved_hooks() is None
        with torch.autograd.graph.save_on_cpu():
            loop.run(2)
        assert default_saved_hooks() is None
    assert default_saved_hooks() is None
    assert block.report().passes == 6 and block.report().let_go == 0


@pytest.mark.parametrize("share", [0.8, 0.6])
def test_a_calm_loop_that_grows_stays_within_the_budget(share: float) -> None:
    report = checked(mlp, small_then_large, share, steps=11, largest=5)
    assert report.made_again > 0


def test_it_grows_while_other_hooks_are_on() -> None:
    def loss(model: nn.Module, number: int) -> torch.Tensor:
        hidden = torch.randn(2048 if number > 4 else 64, 64)
        with torch.autograd.graph.save_on_cpu():
            hidden = model[:4](hidden)  # type: ignore[index]
        return model[4:](hidden).square().mean()  # type: ignore[index]

    report = checked(mlp, loss, 0.85, steps=8, largest=5)
    assert report.made_again > 0
    assert default_saved_hooks() is None


def test_it_grows_in_evaluation() -> None:
    def loss(model: nn.Module, number: int) -> torch.Tensor:
        if number > 4:
            with torch.no_grad():
                mlp_loss(model, number)
        return small_then_large(model, number)

    assert checked(mlp, loss, 0.7, steps=8, largest=5).made_again > 0


def test_batch_normalization_and_dropout_that_grow() -> None:
    def make_layers() -> nn.Module:
        layers = list(convolutions())  # type: ignore[call-overload]
        return nn.Sequential(nn.Conv2d(3, 3, 1), *layers[:6], nn.Dropout(0.2), *layers[6:])

    def loss(model: nn.Module, number: int) -> torch.Tensor:
        batch = 32 if number in (0, 4, 5) else 1
        return nn.functional.cross_entropy(model(torch.randn(batch, 3, 16, 16)), torch.randint(0, 4, (batch,)))

    assert checked(make_layers, loss, 0.7, steps=7).made_again > 0


def test_a_graph_that_outlives_its_pass_is_noted_on() -> None:
    model = mlp()
    held: list[torch.Tensor] = []
    with memfit.eager(model, budget="1GiB"):
        for _ in range(4):
            held.append(mlp_loss(model, 0))
            model(torch.randn(8, 64)).sum().backward()
        assert default_saved_hooks() is not None
        torch.stack(held).sum().backward()


def test_an_exception_in_a_calm_pass() -> None:
    loop = Trained(mlp, mlp_loss)
    with pytest.raises(ValueError, match="of the loop"), memfit.eager(loop.model, budget="1GiB"):
        loop.run(4)
        raise ValueError("of the loop")
    assert default_saved_hooks() is None


def test_keys_tell_apart_what_takes_other_bytes() -> None:
    x = torch.zeros(4, dtype=torch.bool)
    assert key_of((x, 1)) != key_of((x, True))
    assert key_of((x, 0.5)) == key_of((x, 0.25))
    assert key_of((x,), {"alpha": 0.5}) == key_of((x,), {"alpha": 0.25})
    assert key_of((0.0, 5.0)) != key_of((0.0, 6.0))
    assert key_of(([x, x],)) != key_of(([x],))
    before = key_of(([2, 3],))
    torch.set_default_dtype(torch.float64)
    try:
        assert key_of(([2, 3],)) != before
    finally:
        torch.set_default_dtype(torch.float32)


def test_running_statistics_are_no_readers() -> None:
    """Or each batch normalization would look through all that is kept."""
    loop = Trained(convolutions, images_loss)
    gc.collect()
    with memfit.eager(loop.model, budget=bytes_of_tensors(CPU) + (64 << 20)) as block:
        loop.loss(loop.model, 0)
        sources = block._mode.contents.sources  # pyright: ignore
        for buffer in loop.model.buffers():
            found = sources.find(buffer.untyped_storage())
            assert found is None or not found.readers
