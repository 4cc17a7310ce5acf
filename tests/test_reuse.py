"""Which kernels may write over which input: from torch's schemas, and with the same bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from memfit import TrainingStep
from memfit.binding import Value
from memfit.capture.reuse import in_place_form
from memfit.capture.whole_step import capture_whole_step
from memfit.device import GENERIC
from memfit.doors.step import fit_step
from memfit.graph import Graph
from memfit.plan import Problem
from memfit.planners import make_planner
from memfit.planning import Settings
from memfit.schedule import Compute
from memfit.system.recorder import record

aten = torch.ops.aten


def value(storage: int, *shape: int, dtype: torch.dtype = torch.float32) -> Value:
    strides = torch.empty(shape).stride()
    return Value(storage=storage, dtype=dtype, shape=shape, stride=tuple(strides))


@pytest.mark.parametrize(
    ("target", "args", "storage", "expected"),
    [
        (aten.relu.default, (value(0, 4),), 0, "aten.relu_.default"),
        (aten.add.Tensor, (value(0, 4), value(1, 4)), 0, "aten.add_.Tensor"),
        (aten.add.Tensor, (value(0, 4), value(1, 4)), 1, "aten.add.out"),
        (aten.threshold_backward.default, (value(0, 4), value(1, 4), 0), 0, "aten.threshold_backward.grad_input"),
        (aten.gelu_backward.default, (value(0, 4), value(1, 4)), 1, "aten.gelu_backward.grad_input"),
        (aten.mul.Tensor, (value(0, 4), value(0, 4)), 0, None),  # it shows the storage twice
        (aten.add.Tensor, (value(0, 4), value(1, 1)), 1, None),  # broadcast: not of the result's layout
        (aten.add.Tensor, (value(0, 4, dtype=torch.int32), value(1, 4)), 0, None),  # another dtype
        (aten.native_dropout_backward.default, (value(0, 4), value(1, 4), 2.0), 0, None),  # only a generated kernel
        (aten.mm.default, (value(0, 2, 2), value(1, 2, 2)), 0, None),  # not pointwise
    ],
)
def test_forms(target: Any, args: tuple[Any, ...], storage: int, expected: str | None) -> None:
    shape = next(arg.shape for arg in args if isinstance(arg, Value))
    form = in_place_form(target, args, {}, [value(9, *shape)], storage, "cpu")
    assert (None if form is None else str(form.target)) == expected


def test_products_of_complex_numbers_are_written_over_an_input_where_all_are_laid_out_alike() -> None:
    first, same, short = (
        value(number, *shape, dtype=torch.complex64) for number, shape in enumerate([(4, 3), (4, 3), (3,)])
    )
    result = value(9, 4, 3, dtype=torch.complex64)
    assert in_place_form(aten.mul.Tensor, [first, same], {}, [result], 0, "cpu") is not None
    assert in_place_form(aten.mul.Tensor, [first, short], {}, [result], 0, "cpu") is None


class Filters(nn.Module):
    """Multiplies spectra by a column of a complex parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.filters = nn.ParameterList(nn.Parameter(torch.view_as_complex(torch.randn(17, 32, 2) * 0.3)) for _ in "12")
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in "12")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for filtering, layer in zip(self.filters, self.layers, strict=True):
            spectrum = torch.fft.rfft(x, dim=-1) * filtering[:, 0].conj()
            x = x + torch.tanh(layer(torch.fft.irfft(spectrum, n=32, dim=-1)))
        return x


def test_spectra_that_are_multiplied_have_eagers_bits() -> None:
    torch.manual_seed(0)
    model, batch = Filters(), (torch.randn(256, 32), torch.randn(256, 32))
    nn.functional.mse_loss(model(batch[0]), batch[1]).backward()
    wanted = [parameter.grad for parameter in model.parameters()]
    model.zero_grad(set_to_none=True)
    step = fit_step(
        TrainingStep(model=model, loss=nn.functional.mse_loss, batch=batch),
        Settings(budget="16MiB", time_limit_seconds=0.2),
    )
    step(batch)
    assert all(map(torch.equal, wanted, (parameter.grad for parameter in model.parameters())))


def graph_of(model: nn.Module) -> Graph:
    step = TrainingStep(model=model, loss=nn.functional.mse_loss, batch=(torch.randn(64, 32), torch.randn(64, 32)))
    return capture_whole_step(step).graph


class Twice(nn.Module):
    """An activation that two ops read: relu may not write over it before the product has read it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 32)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        hidden = self.layer(values)
        return torch.relu(hidden) * hidden


def test_an_input_that_is_used_later_is_not_written_over() -> None:
    step = TrainingStep(model=Twice(), loss=nn.functional.mse_loss, batch=(torch.randn(64, 32), torch.randn(64, 32)))
    planned = fit_step(step, Settings(budget=1 << 40, planner="none"))
    graph = planned.captured.graph
    relu = next(op for op in graph.ops if op.name == "relu_0")
    assert relu.reuses, "its kernel can"
    over = {i.op: i.in_place_of for i in planned.plan.schedule if isinstance(i, Compute)}
    assert over[relu.id] is None, "its input has a later reader"
    planned(step.batch)
    gradients = [parameter.grad.clone() for parameter in step.model.parameters() if parameter.grad is not None]
    step.model.zero_grad(set_to_none=True)
    step.run_eager(step.batch)
    assert all(torch.equal(one, two.grad) for one, two in zip(gradients, step.model.parameters(), strict=True))


def test_gradients_of_a_shared_weight_are_added_into_one_storage() -> None:
    """Chen 2016, section 5.3: an unrolled network has one gradient for each weight, never one for each step."""

    class Unrolled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(256, 256, bias=False)

        def forward(self, values: torch.Tensor) -> torch.Tensor:
            for _ in range(8):
                values = torch.tanh(self.layer(values))
            return values

    step = TrainingStep(model=Unrolled(), loss=nn.functional.mse_loss, batch=(torch.randn(2, 256), torch.randn(2, 256)))
    planned = fit_step(step, Settings(budget=1 << 40, planner="none"))
    sums = [op for op in planned.captured.graph.ops if op.name.startswith("add_") and op.writes]
    assert len(sums) == 7
    planned(step.batch)
    with record("cpu") as usage:
        step.model.zero_grad(set_to_none=True)
        planned(step.batch)
    weight_bytes = 256 * 256 * 4
    assert usage.peak_bytes < 2.5 * weight_bytes, "the sum so far, the next gradient, and nothing else of that size"


def test_relu_takes_the_memory_of_what_it_reads() -> None:
    graph = graph_of(nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.ReLU()) for _ in range(3))))
    result = make_planner("none").plan(Problem(graph=graph, device=GENERIC, budget_bytes=1 << 40))
    assert result.plan is not None
    over = {graph.ops[i.op].name: i.in_place_of for i in result.plan.schedule if isinstance(i, Compute)}
    assert all(over[f"relu_{number}"] is not None for number in range(3))
