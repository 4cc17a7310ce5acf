"""Measured costs: how ops are measured, checked and kept on disk, and ops that cannot be measured."""

from __future__ import annotations

import gc
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from measuring import QUICK, measured, set_free_bytes

from memfit import Graph
from memfit.binding import Binding, Call, Value
from memfit.capture import capture, finish
from memfit.capture.training_step import TrainingStep
from memfit.commands.check import check
from memfit.cost.calibration import Probe, calibrate, local_device, rates_for_rooflines
from memfit.cost.environment import environment, free_system_bytes
from memfit.cost.measurement import measure
from memfit.cost.observations import Observations, RealResult, call_key
from memfit.cost.op_inputs import InputMaker
from memfit.cost.result_check import check_results
from memfit.cost.single_op import undisturbed
from memfit.doors.step import fit_step
from memfit.errors import CaptureError, WrongFakesError
from memfit.graph import Op, Phase, Role, Storage
from memfit.planning import Settings
from memfit.step.planned_step import PlannedStep
from memfit.system.recorder import allocated_bytes, record
from memfit.workloads import build

CPU = torch.device("cpu")
aten = torch.ops.aten


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the test's own; the recorder is in place before, so that it is not built anew."""
    with record("cpu"):
        pass
    monkeypatch.setenv("MEMFIT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def value(storage: int, *shape: int, dtype: torch.dtype = torch.float32, offset: int = 0) -> Value:
    stride = torch.empty(shape, device="meta").stride()
    return Value(storage=storage, dtype=dtype, shape=shape, stride=tuple(stride), offset=offset)


class Step:
    """A graph and its binding, put together call by call."""

    def __init__(self) -> None:
        self.storages: list[Storage] = []
        self.ops: list[Op] = []
        self.calls: list[Call] = []

    def storage(self, *shape: int, dtype: torch.dtype = torch.float32, role: Role = Role.INPUT) -> Value:
        made = value(len(self.storages), *shape, dtype=dtype)
        size = torch.empty(shape, dtype=dtype, device="meta").untyped_storage().nbytes()
        self.storages.append(Storage(id=made.storage, name=f"s{made.storage}", bytes=size, role=role))
        return made

    def call(self, target: Any, *args: Any, result: Value | None = None, mutates: tuple[int, ...] = ()) -> None:
        number = len(self.ops)
        reads = {a.storage for a in args if isinstance(a, Value)} - set(mutates)
        writes = () if result is None else (result.storage,)
        self.ops.append(
            Op(
                id=number,
                name=f"op_{number}",
                target=str(target),
                phase=Phase.FORWARD,
                reads=tuple(sorted(reads)),
                writes=writes,
                mutates=mutates,
                seconds=0.0,
                workspace_bytes=None,
            )
        )
        self.calls.append(Call(op=number, target=target, args=args, results=(result,)))

    def apply(self, target: Any, *args: Any, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Value:
        result = self.storage(*shape, dtype=dtype, role=Role.ACTIVATION)
        self.call(target, *args, result=result)
        return result

    def done(self) -> tuple[Graph, Binding]:
        graph = Graph.build(name="step", storages=self.storages, ops=self.ops)
        return graph, Binding(device=CPU, calls=tuple(self.calls), residents=(), outputs={})


class Counted:
    """A target that counts its calls and runs `function`."""

    __name__ = "counted"

    def __init__(self, function: Callable[..., Any], name: str = "counted") -> None:
        self.function = function
        self.name = name
        self.calls = 0

    def __call__(self, *args: Any) -> Any:
        self.calls += 1
        return self.function(*args)

    def __repr__(self) -> str:
        return f"Counted({self.name})"


def one_op(target: Any, *shape: int) -> tuple[Graph, Binding]:
    step = Step()
    step.apply(target, step.storage(*shape), shape=shape)
    return step.done()


def mean_squares_step() -> TrainingStep:
    """A step with a kernel that returns a larger storage than its fake."""
    batch = (torch.randn(32, 64), torch.randn(32, 64))
    return TrainingStep(model=torch.nn.Linear(64, 64), loss=torch.nn.functional.mse_loss, batch=batch)


STEPS: dict[str, Callable[[], TrainingStep]] = {
    "convolutions": lambda: build("unet", batch=1, size=16, width=4, levels=2),
    "softmaxes and dropout": lambda: build(
        "gpt2", layers=1, width=32, head_width=16, tokens=32, batch=2, vocabulary=64, optimizer="adamw"
    ),
    "mutations": lambda: build("lstm", steps=3, width=8, batch=2),
    "other bytes than captured": mean_squares_step,
}


@pytest.mark.usefixtures("calibrated")
@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS.keys())
def test_measuring_changes_seconds_and_workspaces_alone(step: Callable[[], TrainingStep]) -> None:
    captured = finish(capture(step()))
    graph = measure(captured.graph, captured.binding, captured.observed)
    assert all(op.seconds > 0 for op in graph.ops)
    assert all(op.workspace_bytes is not None for op in graph.ops)
    costs_of_captured = tuple(
        msgspec.structs.replace(op, seconds=before.seconds, workspace_bytes=before.workspace_bytes)
        for op, before in zip(graph.ops, captured.graph.ops, strict=True)
    )
    assert graph.fingerprint == captured.graph.fingerprint
    assert msgspec.structs.replace(graph, ops=costs_of_captured) == captured.graph


def test_finishing_keeps_what_schemas_promise() -> None:
    captured = capture(build("unet", batch=1, size=16, width=4, levels=2))
    for op, before in zip(finish(captured).graph.ops, captured.graph.ops, strict=True):
        assert set(before.reuses) <= set(op.reuses)


def test_a_capture_is_measured_only_when_it_is_finished() -> None:
    captured = capture(build("unet", batch=1, size=16, width=4, levels=2))
    with pytest.raises(ValueError, match="zip"):
        measure(captured.graph, captured.binding, captured.observed)


def test_workspace_is_what_is_held_beside_the_results() -> None:
    def tripled(x: torch.Tensor) -> torch.Tensor:
        held = torch.cat([x, x, x])
        return held[: x.shape[0]].relu()

    graph = measured(*one_op(tripled, 1000))
    assert graph.ops[0].workspace_bytes == 3 * 4000 + 32  # torch fills up the last 64 bytes


def test_garbage_that_is_collected_meanwhile_does_not_hide_a_workspace() -> None:
    class Cycle:
        def __init__(self) -> None:
            self.own, self.held = self, torch.empty(1 << 10)

    def tripled(x: torch.Tensor) -> torch.Tensor:
        gc.set_threshold(1)
        objects = [[] for _ in range(100)]  # more than a collection waits for
        gc.set_threshold(10**9)
        held = torch.cat([x, x, x])
        return held[: x.shape[0]].relu() if objects else x

    step = one_op(tripled, 1000)
    threshold = gc.get_threshold()
    gc.set_threshold(10**9)
    allocated_bytes("cpu")
    Cycle()
    try:
        graph = measured(*step)
    finally:
        gc.set_threshold(*threshold)
    assert graph.ops[0].workspace_bytes == 3 * 4000 + 32


def test_workspace_freed_before_the_result_is_made_may_hide_behind_it() -> None:
    def freed(x: torch.Tensor) -> torch.Tensor:
        total = (x + 1).sum().item()
        return torch.full((4000,), total)

    step = Step()
    step.apply(freed, step.storage(1000), shape=(4000,))
    assert measured(*step.done()).ops[0].workspace_bytes == 0


def test_equal_ops_are_measured_once_others_by_themselves() -> None:
    target = Counted(torch.add)
    step = Step()
    x, y, wide = step.storage(8), step.storage(8), step.storage(16)
    step.apply(target, x, y, shape=(8,))
    calls_of: list[int] = []

    def calls_in(build_more: Callable[[], object]) -> int:
        build_more()
        before = target.calls
        measured(*step.done())
        calls_of.append(target.calls - before)
        return calls_of[-1]

    assert calls_in(lambda: None) > 0
    assert calls_in(lambda: step.apply(target, y, x, shape=(8,))) == 0
    assert calls_in(lambda: step.apply(target, wide, wide, shape=(16,))) > 0, "another shape, and one storage twice"
    assert calls_in(lambda: step.apply(target, x, x, shape=(8,))) > 0, "the same storage twice"
    assert calls_in(lambda: step.apply(target, x, 2.0, shape=(8,))) > 0, "another scalar"
    assert calls_in(lambda: step.apply(target, x, 2.0, shape=(8,))) == 0


def test_keys_tell_apart_what_costs_differently() -> None:
    x, y = value(0, 4, 6), value(1, 4, 6)
    turned = Value(storage=0, dtype=torch.float32, shape=(4, 6), stride=(1, 4))
    shifted = Value(storage=0, dtype=torch.float32, shape=(4, 6), stride=(6, 1), offset=3)
    lines_on = Value(storage=0, dtype=torch.float32, shape=(4, 6), stride=(6, 1), offset=32)
    half = value(0, 4, 6, dtype=torch.bfloat16)
    calls = [
        Call(op=0, target=aten.add.Tensor, args=(x, y)),
        Call(op=0, target=aten.mul.Tensor, args=(x, y)),
        Call(op=0, target=aten.add.Tensor, args=(x, x)),
        Call(op=0, target=aten.add.Tensor, args=(turned, y)),
        Call(op=0, target=aten.add.Tensor, args=(shifted, y)),
        Call(op=0, target=aten.add.Tensor, args=(half, y)),
        Call(op=0, target=aten.add.Tensor, args=(x, y), kwargs={"alpha": 2}),
        Call(op=0, target=aten.cat.default, args=([x, y],)),
        Call(op=0, target=aten.cat.default, args=([x, y], 1)),
    ]
    keys = [call_key(call) for call in calls]
    assert None not in keys
    assert len(set(keys)) == len(keys)
    renumbered = Call(op=9, target=aten.add.Tensor, args=(value(7, 4, 6), value(3, 4, 6)))
    assert call_key(renumbered) == keys[0]
    aligned = Call(op=0, target=aten.add.Tensor, args=(lines_on, y))
    assert call_key(aligned) == keys[0], "how far from a multiple of 64 bytes counts, not where"


def test_an_object_without_a_name_is_measured_but_not_kept(empty_cache: Path) -> None:
    class Unnamed:
        calls = 0

        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            Unnamed.calls += 1
            return x + 1

    graph, binding = one_op(Unnamed(), 8)
    assert call_key(binding.calls[0]) is None
    assert measured(graph, binding).ops[0].seconds > 0
    first = Unnamed.calls
    measured(graph, binding)
    assert Unnamed.calls == 2 * first
    assert not list(empty_cache.rglob("*.json"))


def test_seconds_are_the_median_of_the_clock() -> None:
    first, second, third = (0.0, 0.04), (1.0, 1.01), (2.0, 2.03)  # three times the shortest is enough
    readings = iter([*first, *second, *third])
    graph = measured(*one_op(Counted(torch.relu), 8), clock=lambda: next(readings))
    assert graph.ops[0].seconds == pytest.approx(0.03)
    assert next(readings, None) is None


def test_a_long_first_run_counts_alone() -> None:
    readings = iter([0.0, 5.0])
    graph = measured(*one_op(Counted(torch.relu), 8), clock=lambda: next(readings))
    assert graph.ops[0].seconds == 5.0


def test_progress_counts_what_is_measured() -> None:
    step = Step()
    x = step.storage(8)
    for target in (aten.relu.default, aten.exp.default, aten.relu.default):
        step.apply(target, x, shape=(8,))
    seen: list[tuple[float, float]] = []
    measured(*step.done(), progress=lambda done, total: seen.append((done, total)))
    assert seen == [(0, 2), (1, 2)]


def test_a_mutating_op_runs_on_copies_of_its_own() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    batch = (torch.randn(8, 4), torch.zeros(8, dtype=torch.long))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    captured = capture(TrainingStep(model=model, loss=torch.nn.functional.cross_entropy, batch=batch))
    assert any(op.mutates for op in captured.graph.ops)
    measured(captured.graph, captured.binding)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_the_generator_and_the_modes_stay_as_they_were() -> None:
    seen: list[tuple[bool, bool, float]] = []

    def noisy(x: torch.Tensor) -> torch.Tensor:
        seen.append((torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), float(torch.rand(()))))
        return torch.bernoulli(x)

    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        measured(*one_op(noisy, 8))
    assert torch.equal(torch.rand(4), expected)
    assert torch.is_grad_enabled()
    assert seen
    assert not any(gradients or autocast for gradients, autocast, _ in seen)


def test_inputs_are_noise_zeros_or_shared() -> None:
    maker = InputMaker(CPU)
    floats, indices, flags = value(0, 300_000), value(1, 5, dtype=torch.long), value(2, 5, dtype=torch.bool)
    part = value(0, 10, offset=100)
    as_integers = value(3, 4, dtype=torch.int32)
    as_floats = value(3, 4)
    storages = tuple(
        Storage(id=number, name="", bytes=size, role=Role.INPUT) for number, size in enumerate((1_200_000, 40, 5, 16))
    )
    call = Call(op=0, target=print, args=(floats, [indices, (flags, part)]), kwargs={"a": as_floats, "b": as_integers})
    (made, (made_indices, (made_flags, made_part))), named = maker.make(call, storages)
    assert made.shape == (300_000,)
    assert 0.25 <= float(made.min()) < 0.26
    assert 0.74 < float(made.max()) <= 0.75
    assert made.std() > 0.1
    assert not made_indices.any()
    assert not made_flags.any()
    assert torch.equal(made_part, made[100:110])
    assert made_part.untyped_storage().data_ptr() == made.untyped_storage().data_ptr()
    assert not named["a"].any(), "zeros where anything reads the storage as whole numbers"
    assert not named["b"].any()
    again, _ = maker.make(call, storages)
    assert torch.equal(again[0], made)


def test_embedding_takes_the_made_indices() -> None:
    step = Step()
    table, indices = step.storage(10, 4), step.storage(3, dtype=torch.long)
    step.apply(aten.embedding.default, table, indices, shape=(3, 4))
    assert measured(*step.done()).ops[0].seconds > 0


def _wrong(result: torch.Tensor) -> tuple[Graph, Binding]:
    def lied_about(_x: torch.Tensor) -> torch.Tensor:
        return result

    return one_op(lied_about, 4, 6)


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (
            torch.zeros(4, 5),
            r"is float32\[4, 5\] at offset 0, expected float32\[4, 6\] at offset 0",
        ),
        (torch.zeros(30)[6:].view(4, 6), r"at offset 6, expected .* at offset 0"),
    ],
)
def test_results_other_than_captured_are_an_error(result: torch.Tensor, message: str) -> None:
    with pytest.raises(CaptureError, match=rf"result 0 of op 'op_0' .*{message}"):
        measured(*_wrong(result))


@pytest.mark.parametrize(
    ("result", "dtype", "stride"),
    [(torch.zeros(4, 6, dtype=torch.float64), "float64", (6, 1)), (torch.zeros(6, 4).t(), "float32", (1, 4))],
)
def test_a_result_of_another_dtype_or_other_strides_is_a_correction(
    result: torch.Tensor, dtype: str, stride: tuple[int, ...]
) -> None:
    with pytest.raises(WrongFakesError) as raised:
        measured(*_wrong(result))
    (corrections,) = raised.value.corrections.values()
    assert corrections == {0: RealResult(dtype=dtype, stride=stride)}


def test_a_result_that_is_none_is_a_correction() -> None:
    with pytest.raises(WrongFakesError) as raised:
        measured(*one_op(lambda x: None, 8))  # noqa: ARG005
    assert list(raised.value.corrections.values()) == [{0: None}]


@pytest.mark.parametrize("target", [lambda x: x, lambda x: x.view_as(x)])
def test_a_result_on_the_memory_of_an_argument_is_an_error(target: Callable[[torch.Tensor], torch.Tensor]) -> None:
    with pytest.raises(CaptureError, match=r"result 0 of op 'op_0' .* lies on the memory of an argument"):
        measured(*one_op(target, 8))


def test_another_number_of_results_is_an_error() -> None:
    with pytest.raises(CaptureError, match=r"op 'op_0' .* returned 2 values, expected 1 by its capture"):
        measured(*one_op(lambda x: (x + 1, x + 2), 8))
    with pytest.raises(CaptureError, match=r"result 0 of op 'op_0' .* is a int, expected a tensor"):
        measured(*one_op(lambda x: 3, 8))  # noqa: ARG005


def test_strides_of_single_elements_do_not_count() -> None:
    def single(x: torch.Tensor) -> torch.Tensor:
        return (x + 1).as_strided((4, 1), (1, 77))

    assert measured(*one_op(single, 4, 1)).ops[0].seconds > 0


def test_check_knows_the_real_bytes_of_the_device_at_hand(tmp_path: Path) -> None:
    """The plan is for larger storages than the fake tensors of `memfit check`'s own capture have."""
    target = tmp_path / "step.py"
    target.write_text(
        "import torch\n"
        "from memfit import TrainingStep\n"
        "def make():\n"
        "    batch = (torch.randn(32, 64), torch.randn(32, 64))\n"
        "    return TrainingStep(model=torch.nn.Linear(64, 64), loss=torch.nn.functional.mse_loss, batch=batch)\n"
    )
    planned = fit_step(mean_squares_step(), Settings(budget=1 << 20, planner="none"))
    assert isinstance(planned, PlannedStep)
    planned.plan.save(tmp_path / "plan.json")
    assert check(f"{target}:make", tmp_path / "plan.json").exit_status == 0


def test_a_storage_larger_than_its_fake_is_counted_in_full() -> None:
    step = mean_squares_step()
    batch = step.batch
    captured = capture(step)
    op = next(op for op in captured.graph.ops if "mse_loss" in op.target and "backward" not in op.target)
    real = torch.nn.functional.mse_loss(*batch).untyped_storage().nbytes()
    for _ in ("measured", "from the cache"):
        graph = measured(captured.graph, captured.binding)
        assert graph.storages[op.writes[0]].bytes == real
        assert [s.bytes for s in graph.storages if s.id not in op.writes] == [
            s.bytes for s in captured.graph.storages if s.id not in op.writes
        ]


class Update:
    """A target as an optimizer's update is: it must not be run for itself."""

    measurable = False
    __name__ = "update"

    def __call__(self, *_args: Any) -> None:
        pytest.fail("an update must not be run to measure it")


@pytest.fixture
def calibrated() -> None:
    """Have rates of the CPU, measured on so little data that they are not right."""
    calibrate(CPU, amounts=QUICK)


def test_products_in_tf32_are_measured_in_tf32(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = torch.backends.cuda.matmul
    before = settings.fp32_precision
    monkeypatch.setattr(Probe, "flops_per_second", lambda *_: float(settings.fp32_precision == "tf32"))
    assert Probe(device=torch.device("cuda"), clock=float).tf32_flops_per_second() == 1.0
    assert settings.fp32_precision == before != "tf32"


@pytest.mark.usefixtures("calibrated")
def test_what_must_not_be_run_gets_a_roofline_and_keeps_its_workspace(caplog: pytest.LogCaptureFixture) -> None:
    step = Step()
    gradient, parameter = step.storage(1000), step.storage(1000, role=Role.PARAMETER)
    step.call(Update(), gradient, mutates=(parameter.storage,))
    graph, binding = step.done()
    graph = msgspec.structs.replace(graph, ops=(msgspec.structs.replace(graph.ops[0], workspace_bytes=4321),))
    with caplog.at_level(logging.WARNING, "memfit"):
        op = measured(graph, binding).ops[0]
    assert op.workspace_bytes == 4321
    assert op.seconds > 0
    assert not caplog.records


@pytest.mark.usefixtures("calibrated")
def test_an_op_that_refuses_made_up_inputs_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "memfit"):
        op = measured(*one_op(aten.linalg_cholesky.default, 4, 4)).ops[0]
    assert op.seconds > 0
    assert op.workspace_bytes is None
    assert [record.message.partition(":")[0] for record in caplog.records] == [
        "op op_0 cannot be measured, a roofline gives its seconds"
    ]


@pytest.mark.usefixtures("empty_cache")
def test_rates_for_a_roofline_are_measured_within_few_bytes() -> None:
    """They are needed in the first step of a model whose memory is full."""
    graph, binding = one_op(aten.linalg_cholesky.default, 4, 4)
    rates_for_rooflines.cache_clear()
    with record("cpu") as usage:
        op = measured(graph, binding).ops[0]
    assert op.seconds > 0
    assert usage.peak_bytes <= 8 << 20
    assert local_device(CPU).memory_bytes_per_second is None


@pytest.mark.usefixtures("calibrated")
def test_an_op_without_room_on_the_device_is_not_run(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Step()
    small, large = step.storage(1000), step.storage(100_000)
    step.apply(aten.relu.default, small, shape=(1000,))
    step.apply(aten.relu.default, large, shape=(100_000,))
    set_free_bytes(monkeypatch, 700_000)
    with caplog.at_level(logging.WARNING, "memfit"), record("cpu") as usage:
        graph = measured(*step.done())
    assert usage.peak_bytes < 700_000
    assert graph.ops[0].workspace_bytes == 0
    assert graph.ops[1].workspace_bytes is None
    assert "op op_1 cannot be measured, a roofline gives its seconds: " in caplog.text
    assert "its inputs and results take 800000 bytes, more than cpu has free" in caplog.text


@pytest.mark.usefixtures("calibrated")
def test_fit_runs_no_op_that_the_device_has_no_room_for(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A frozen table is on the device once; a copy of it, to measure one op, would not fit."""
    table = torch.nn.Embedding(100_000, 4).requires_grad_(False)
    model = torch.nn.Sequential(table, torch.nn.Linear(4, 4))
    batch = (torch.arange(64), torch.zeros(64, dtype=torch.long))
    step = TrainingStep(model=model, loss=torch.nn.functional.cross_entropy, batch=batch)
    set_free_bytes(monkeypatch, 1_000_000)
    with caplog.at_level(logging.WARNING, "memfit"), record("cpu") as usage:
        planned = fit_step(step, Settings(budget=3_000_000, planner="none"))
    assert "op embedding_0 cannot be measured" in caplog.text
    assert usage.peak_bytes < 1_000_000
    assert torch.isfinite(planned(batch))


def test_free_bytes_of_a_cpu_are_those_of_the_system_or_of_its_cgroup(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 9000 kB\nMemAvailable: 5000 kB\n")
    assert free_system_bytes(meminfo, tmp_path) == 5000 * 1024
    for name, text in (("max", "max"), ("current", "4000"), ("stat", "anon 3000\ninactive_file 1000\n")):
        (tmp_path / f"memory.{name}").write_text(text)
    assert free_system_bytes(meminfo, tmp_path) == 5000 * 1024
    (tmp_path / "memory.max").write_text("10000")
    assert free_system_bytes(meminfo, tmp_path) == 10000 - (4000 - 1000)
    assert free_system_bytes(tmp_path / "missing", tmp_path) is None


def test_what_is_made_for_an_op_is_freed_at_once() -> None:
    step = Step()
    for width in range(20):
        step.apply(aten.relu.default, step.storage(100_000 + width), shape=(100_000 + width,))
    with record("cpu") as usage:
        measured(*step.done())
    assert usage.peak_bytes < 2 * 400_000 + 400_000 + 100_000, "inputs and results of one op, and the pattern"


def test_ctrl_c_keeps_what_was_measured() -> None:
    def interrupt(_x: torch.Tensor) -> torch.Tensor:
        raise KeyboardInterrupt

    first = Counted(torch.relu)
    step = Step()
    x = step.storage(8)
    step.apply(first, x, shape=(8,))
    step.apply(interrupt, x, shape=(8,))
    with pytest.raises(KeyboardInterrupt):
        measured(*step.done())
    calls = first.calls
    assert calls > 0
    with pytest.raises(KeyboardInterrupt):
        measured(*step.done())
    assert first.calls == calls


def _cache_file(folder: Path) -> Path:
    (path,) = (folder / "costs").iterdir()
    return path


def test_the_cache_holds_its_environment(empty_cache: Path) -> None:
    measured(*one_op(aten.relu.default, 8))
    document = msgspec.json.decode(_cache_file(empty_cache).read_bytes())
    assert document["environment"] == environment(CPU)
    assert [key.partition("(")[0] for key in document["costs"]] == ["aten.relu.default"]
    elsewhere = Observations.load(environment(CPU) | {"torch": "0.0"})
    assert elsewhere.by_key == {}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"format": "memfit-costs", "ver', "measured costs cannot be read and are measured again"),
        (b"\xff\xfe\x00", "measured costs cannot be read and are measured again"),
        (
            b'{"format":"memfit-costs","version":1,"environment":{},"costs":{"a":{"seconds":-1,"workspace_bytes":0}}}',
            "cannot",
        ),
        (b'{"format":"memfit-costs","version":3,"environment":{},"costs":{}}', "holds memfit-costs version 3"),
        (b"[" * 100_000, "measured costs cannot be read"),
    ],
)
def test_a_damaged_cache_is_said_and_mended(
    empty_cache: Path, content: bytes, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    measured(*one_op(aten.relu.default, 8))
    path = _cache_file(empty_cache)
    path.write_bytes(content)
    with caplog.at_level(logging.WARNING, "memfit"):
        assert measured(*one_op(aten.relu.default, 8)).ops[0].seconds > 0
    assert message in caplog.text
    assert all("\n" not in record.message for record in caplog.records)
    caplog.clear()
    with caplog.at_level(logging.WARNING, "memfit"):
        measured(*one_op(aten.relu.default, 8))
    assert not caplog.records


def test_no_space_on_the_disk_is_one_warning(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with caplog.at_level(logging.WARNING, "memfit"):
        assert measured(*one_op(aten.relu.default, 8)).ops[0].seconds > 0
    assert len(caplog.records) == 1
    assert "measured costs are not kept: " in caplog.text
    assert "No space left on device" in caplog.text
    assert not list((empty_cache / "costs").iterdir()), "nothing half-written remains"


def test_a_folder_that_cannot_be_made_is_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MEMFIT_CACHE", str(tmp_path / "file" / "cache"))
    with caplog.at_level(logging.WARNING, "memfit"):
        assert measured(*one_op(aten.relu.default, 8)).ops[0].seconds > 0
    assert len(caplog.records) == 1
    assert "Not a directory; MEMFIT_CACHE names another folder" in caplog.text


PROCESS = """
import sys
from memfit.cost.observations import Observation, Observations
kept = Observations.load({"device": "cpu"})
for number in range(15):
    kept.add({f"{sys.argv[1]} {number}": Observation(seconds=number, workspace_bytes=0)})
"""


@pytest.fixture
def two_writers() -> Iterator[list[subprocess.Popen[bytes]]]:
    processes = [subprocess.Popen([sys.executable, "-c", PROCESS, name]) for name in ("left", "right")]
    yield processes
    for process in processes:
        process.kill()


@pytest.mark.slow
def test_two_processes_may_write_at_once(
    two_writers: list[subprocess.Popen[bytes]], caplog: pytest.LogCaptureFixture
) -> None:
    assert [process.wait(timeout=60) for process in two_writers] == [0, 0]
    costs = Observations.load({"device": "cpu"}).by_key
    assert not caplog.records
    counts = [sum(key.startswith(name) for key in costs) for name in ("left", "right")]
    assert max(counts) == 15, "who wrote last kept all of its own"


def test_modes_are_put_back_after_an_error() -> None:
    with pytest.raises(ZeroDivisionError), undisturbed(CPU):
        1 / 0  # noqa: B018
    assert torch.is_grad_enabled()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_costs_on_cuda() -> None:
    captured = capture(build("encoder", device="cuda", batch=2, tokens=64, layers=2))
    graph = measured(captured.graph, captured.binding)
    assert all(op.seconds > 0 for op in graph.ops)
    assert all(op.workspace_bytes is not None for op in graph.ops)


def test_the_seeds_of_attention_are_made_where_its_gradient_reads_them() -> None:
    """On the host: the kernel reads them through plain pointers, and would end the process."""
    block = Value(storage=0, dtype=torch.float32, shape=(1, 1, 8, 8), stride=(64, 64, 8, 1))
    lines = Value(storage=1, dtype=torch.float32, shape=(1, 1, 8), stride=(8, 8, 1))
    seed, offset = (Value(storage=number, dtype=torch.int64, shape=(), stride=()) for number in (2, 3))
    storages = tuple(
        Storage(id=number, name=str(number), bytes=size, role=Role.INPUT) for number, size in enumerate((256, 32, 8, 8))
    )
    aten = torch.ops.aten
    arguments = (block, block, block, block, None, block, lines, seed, offset, 0.1, [True, True, True, False])
    backward = aten._scaled_dot_product_efficient_attention_backward.default
    for call in (
        Call(op=0, target=backward, args=arguments),
        Call(op=0, target=backward, args=arguments[:8], kwargs={"philox_offset": offset, "dropout_p": 0.1}),
    ):
        args, kwargs = InputMaker(torch.device("meta")).make(call, storages)
        made = [*args, *kwargs.values()]
        assert [tensor.device.type for tensor in made[7:9]] == ["cpu", "cpu"]
        assert {tensor.device.type for tensor in made[:7] if tensor is not None} == {"meta"}
    args, _ = InputMaker(torch.device("meta")).make(Call(op=0, target=aten.add.Tensor, args=(seed, offset)), storages)
    assert {tensor.device.type for tensor in args} == {"meta"}


def test_a_reserve_has_as_many_bytes_as_its_kernel_says() -> None:
    """cudnn_batch_norm's fake kernel says none; where it keeps some, they are counted."""
    op = Op(
        id=0,
        name="norm",
        target="aten.cudnn_batch_norm",
        phase=Phase.FORWARD,
        module="",
        reads=(),
        writes=(0, 1),
        seconds=0.0,
    )
    output, reserve = value(0, 4), value(1, 0, dtype=torch.uint8)
    call = Call(op=0, target=print, args=(), results=(output, reserve))
    storages = tuple(
        Storage(id=number, name="", bytes=size, role=Role.ACTIVATION) for number, size in enumerate((16, 0))
    )
    kept = torch.empty(96, dtype=torch.uint8)
    assert check_results(op, call, (torch.empty(4), kept), storages, CPU) == ({1: 96}, {})
    assert check_results(op, call, (torch.empty(4), kept[:0].clone()), storages, CPU) == ({}, {})
    with pytest.raises(CaptureError, match=r"result 1 of op 'norm'.* is float32\[96\]"):
        check_results(op, call, (torch.empty(4), kept.float()), storages, CPU)
