"""What no schema promises is written over only where this device was seen to give the same bits."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from measuring import finished, measured, set_free_bytes
from torch import nn

from memfit import TrainingStep
from memfit.binding import Binding, Call, InPlaceForm, Value
from memfit.capture import capture
from memfit.capture.reuse import ROW_BY_ROW, in_place_form
from memfit.cost import observe
from memfit.cost.device_profiles import load_device
from memfit.cost.environment import environment
from memfit.cost.in_place_trials import gives_same_bits
from memfit.cost.observations import Observation, Observations, call_key
from memfit.cost.op_inputs import InputMaker
from memfit.cost.rooflines import roofline
from memfit.device import GENERIC
from memfit.doors.step import fit_step
from memfit.errors import PlanMismatchError
from memfit.graph import Graph, Op, Phase, Role, Storage
from memfit.plan import Problem
from memfit.planners import make_planner
from memfit.planning import Settings
from memfit.schedule import Compute
from memfit.step.planned_step import PlannedStep
from memfit.system.recorder import record
from memfit.workloads import build

aten = torch.ops.aten
CPU = torch.device("cpu")
SHAPE = (8, 33)
WORKLOADS = {
    "gpt2": {"layers": 1, "width": 32, "head_width": 16, "tokens": 32, "batch": 2, "vocabulary": 64},
    "encoder": {"layers": 1, "batch": 2},
}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with record("cpu"):  # built before its folder is another
        pass
    monkeypatch.setenv("MEMFIT_CACHE", str(tmp_path / "cache"))


def value(storage: int, *shape: int) -> Value:
    return Value(storage=storage, dtype=torch.float32, shape=shape, stride=tuple(torch.empty(shape).stride()))


def one_softmax(overwrite: Callable[..., Any]) -> tuple[Graph, Binding]:
    """x -> exp -> softmax; the form of the second that writes over the first's result is `overwrite`."""
    size = SHAPE[0] * SHAPE[1] * 4
    roles = {"x": Role.INPUT, "e": Role.ACTIVATION, "y": Role.OUTPUT}
    graph = Graph.build(
        name="softmax",
        storages=[Storage(id=i, name=name, bytes=size, role=role) for i, (name, role) in enumerate(roles.items())],
        ops=[
            Op(id=0, name="exp", phase=Phase.FORWARD, reads=(0,), writes=(1,), seconds=0.0),
            Op(id=1, name="softmax", phase=Phase.FORWARD, reads=(1,), writes=(2,), seconds=0.0),
        ],
    )
    x, e, y = (value(number, *SHAPE) for number in range(3))
    form = InPlaceForm(target=overwrite, extra={"out": replace(y, storage=1)}, promised=False)
    calls = (
        Call(op=0, target=aten.exp.default, args=(x,), results=(e,)),
        Call(op=1, target=aten._softmax.default, args=(e, 1, False), results=(y,), in_place_forms={1: form}),
    )
    return graph, Binding(device=CPU, calls=calls, residents=(), outputs={})


def writing_first(*args: Any, out: torch.Tensor) -> torch.Tensor:
    """Right wherever `out` is not what it reads."""
    return aten._softmax.out(*args, out=out.zero_())


def one_bit_off(*args: Any, out: torch.Tensor) -> torch.Tensor:
    aten._softmax.out(*args, out=out)
    out.view(torch.int32)[-1, -1] ^= 1
    return out


class Sometimes:
    """Right the first time only: what the order of threads decides."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, *args: Any, out: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return (one_bit_off if self.calls > 1 else aten._softmax.out)(*args, out=out)


def elsewhere(*args: Any, **_out: torch.Tensor) -> torch.Tensor:
    return aten._softmax.default(*args)


def refusing(*_args: Any, **_out: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("unsupported operation: some elements of the input tensor and the written-to tensor overlap")


def test_what_gives_the_same_bits_is_allowed() -> None:
    assert measured(*one_softmax(aten._softmax.out)).ops[1].reuses == ((1, 2),)


@pytest.mark.parametrize("overwrite", [writing_first, one_bit_off, Sometimes(), elsewhere, refusing])
def test_what_does_not_is_not(overwrite: Callable[..., Any]) -> None:
    assert measured(*one_softmax(overwrite)).ops[1].reuses == ()


def test_what_was_seen_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, binding = one_softmax(aten._softmax.out)
    known = measured(graph, binding)

    def again(*_args: Any) -> bool:
        raise AssertionError("it is known")

    monkeypatch.setattr(observe, "gives_same_bits", again)
    assert measured(graph, binding).ops[1].reuses == known.ops[1].reuses == ((1, 2),)


def test_nothing_is_tried_that_the_device_has_no_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, binding = one_softmax(aten._softmax.out)
    size = graph.storages[0].bytes
    set_free_bytes(monkeypatch, 2 * size - 1)
    key = call_key(binding.calls[1])
    assert key is not None
    known = {key: Observation(seconds=1e-6, workspace_bytes=0)}
    Observations.load(environment(CPU)).add({**known, str(call_key(binding.calls[0])): known[key]})
    assert finished(graph, binding).graph.ops[1].reuses == ()
    set_free_bytes(monkeypatch, 2 * size)
    assert finished(graph, binding).graph.ops[1].reuses == ((1, 2),)


def test_the_kernel_that_writes_first_is_right_elsewhere() -> None:
    x = torch.randn(SHAPE)
    assert torch.equal(writing_first(x, 1, False, out=torch.empty(SHAPE)), torch.softmax(x, 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("name", sorted(name.removeprefix("aten::") for name in ROW_BY_ROW))
def test_torchs_own_softmaxes_may_write_over_each_input(name: str, dim: int, dtype: torch.dtype) -> None:
    """Rows longer than a vector, and than what fits one; the form is one that capture offers, and not as promised."""
    shape, target = (65, 2003), getattr(aten, name).default
    backward = name.endswith("backward_data")
    values = [replace(value(number, *shape), dtype=dtype) for number in range(1 + backward)]
    args = (*values, dim, dtype) if backward else (*values, dim, False)
    storages = tuple(
        Storage(id=number, name="", bytes=65 * 2003 * dtype.itemsize, role=Role.INPUT) for number in range(2)
    )
    for read in range(len(values)):
        form = in_place_form(target, args, {}, [replace(values[0], storage=9)], read, "cpu")
        assert form is not None
        assert not form.promised
        call = Call(op=0, target=target, args=args, in_place_forms={read: form})
        assert gives_same_bits(call, read, InputMaker(CPU), storages)


def of_a_workload(name: str) -> tuple[TrainingStep, PlannedStep]:
    step = build(name, **WORKLOADS[name])
    planned = fit_step(step, Settings(budget=1 << 40, planner="none"), verify=True)
    assert isinstance(planned, PlannedStep)
    return step, planned


@pytest.mark.parametrize("name", WORKLOADS)
def test_language_models_write_over_their_softmaxes_with_eagers_bits(name: str) -> None:
    _, planned = of_a_workload(name)
    graph = planned.captured.graph
    over = {
        graph.ops[i.op].target for i in planned.plan.schedule if isinstance(i, Compute) and i.in_place_of is not None
    }
    wanted = {"gpt2": {"aten._log_softmax.default", "aten._log_softmax_backward_data.default"}, "encoder": set[str]()}
    assert {"aten._softmax_backward_data.default", *wanted[name]} <= over
    assert name != "gpt2" or re.search(r"_log_softmax_\d+\((s\d+), .*, out=\1\)", planned.source)


class Logits(nn.Module):
    """A vocabulary so large that nothing but logits counts."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 5000, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(tokens).view(-1, 5000)


def logits_step() -> TrainingStep:
    batch = (torch.randn(8, 64, 4), torch.randint(0, 5000, (512,)))
    return TrainingStep(model=Logits(), loss=nn.functional.cross_entropy, batch=batch)


def test_the_peak_of_the_logits_falls_from_three_of_them_to_two() -> None:
    step = logits_step()
    planned = fit_step(step, Settings(budget=1 << 40, planner="none"), verify=True)
    planned(step.batch)
    logits_bytes = 512 * 5000 * 4
    peaks: list[int] = []
    for run in (planned, step.run_eager):
        step.model.zero_grad(set_to_none=True)
        with record("cpu") as usage:
            run(step.batch)
        peaks.append(usage.peak_bytes)
    assert peaks[0] < 2.1 * logits_bytes
    assert peaks[1] > 2.9 * logits_bytes


def test_only_the_device_at_hand_is_asked() -> None:
    """A capture, and a roofline of a device that is not here, keep to what schemas promise."""
    captured = capture(logits_step())
    targets = {name.replace("aten::", "aten.") + ".default" for name in ROW_BY_ROW}
    for graph in (captured.graph, roofline(captured.graph, captured.binding, load_device("a100"))):
        softmaxes = [op for op in graph.ops if op.target in targets]
        assert len(softmaxes) == 2
        assert all(not op.reuses for op in softmaxes)
    known = measured(captured.graph, captured.binding)
    assert all(op.reuses for op in known.ops if op.target in targets)


def test_a_plan_that_does_without_runs_here_and_the_other_way_is_refused() -> None:
    step = logits_step()
    captured = capture(step)
    known = measured(captured.graph, captured.binding)
    elsewhere = msgspec.structs.replace(
        known, ops=tuple(msgspec.structs.replace(op, reuses=captured.graph.ops[op.id].reuses) for op in known.ops)
    )

    def plan_of(graph: Graph) -> Any:
        return make_planner("none").plan(Problem(graph=graph, device=GENERIC, budget_bytes=1 << 40)).plan

    planned = fit_step(step, Settings(budget=1 << 40), plan=plan_of(elsewhere), verify=True)
    assert planned.plan.graph == elsewhere
    with pytest.raises(PlanMismatchError, match=r"whose kernels reuse other memory in place: .* its `reuses`"):
        plan_of(known).require_graph(elsewhere)
