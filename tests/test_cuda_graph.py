"""`memfit.fit(..., cuda_graph=True)`: captured once, replayed with the same bits, refused where that cannot be."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import fake_graphs
import pytest
import torch
from torch import nn

import memfit
from memfit.capture import generators
from memfit.capture.draws_in_graphs import PhiloxStates
from memfit.errors import InvalidOptionError, UnsupportedStepError, VerificationError
from memfit.memory.snapshot import StepState
from memfit.planning import Settings
from memfit.simulate.reserved import DEFAULT
from memfit.step.cuda_graph import MOST_CAPTURES, require_capturable, require_on_device
from memfit.step.planned_step import PlannedStep

CAPTURED_IN = 4  # the first step makes the optimizer's state, two prove the plan, and the fourth is captured


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[fake_graphs.Graph]:
    fake_graphs.install(monkeypatch)
    return fake_graphs.made


def net() -> nn.Module:
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 4))


def loss_of(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def batch_of(size: int = 24, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, 16, generator=generator), torch.randint(0, 4, (size,), generator=generator)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def graphed_and_eager() -> tuple[PlannedStep, memfit.TrainingStep]:
    model = net()
    planned = memfit.fit(
        model,
        loss_of,
        batch_of(),
        optimizer=sgd(model.parameters()),
        budget="200%",
        planner="none",
        arena=True,
        cuda_graph=True,
    )
    assert isinstance(planned, PlannedStep)
    return planned, copy.deepcopy(planned.step)


def step_both(planned: PlannedStep, eager: memfit.TrainingStep, batch: Any) -> None:
    assert torch.equal(planned(batch), eager.run_eager(batch))
    difference = StepState.take(eager).first_difference(StepState.take(planned.step))
    assert difference is None, difference


def test_a_step_is_captured_once_and_replayed_with_eagers_bits(graphs: list[fake_graphs.Graph]) -> None:
    planned, eager = graphed_and_eager()
    for seed in range(8):
        assert planned.is_replayed == (seed >= CAPTURED_IN)
        step_both(planned, eager, batch_of(seed=seed))
    (graph,) = graphs
    assert graph.replays == 2 + 8 - CAPTURED_IN + 1, "two were compared"
    batch_bytes = sum(tensor.nbytes for tensor in batch_of())
    assert planned.arena is not None
    assert 0 <= planned.held_bytes - planned.arena.held_bytes - batch_bytes < 128
    step_both(planned, eager, batch_of(8))
    step_both(planned, eager, batch_of(24))
    assert len(graphs) <= 2, "another shape runs as planned"

    for step in (planned.step, eager):
        assert step.optimizer is not None
        step.optimizer.param_groups[0]["lr"] = 0.01
    before = len(graphs)
    for seed in range(3):
        step_both(planned, eager, batch_of(seed=seed))
    assert len(graphs) == before + 1, "a number that the graph holds has changed"
    replays = graphs[-1].replays
    planned.verify()
    step_both(planned, eager, batch_of())
    assert len(graphs) == before + 1, "what is put back keeps its address"
    assert graphs[-1].replays == replays + 2, "verified from the present state, and with a rate that it does not hold"


def test_a_step_whose_settings_keep_changing_runs_as_planned(
    graphs: list[fake_graphs.Graph], caplog: pytest.LogCaptureFixture
) -> None:
    planned, eager = graphed_and_eager()
    for number in range(16):
        if number % 3 == 0:
            for step in (planned.step, eager):
                assert step.optimizer is not None
                step.optimizer.param_groups[0]["lr"] = 0.1 / (1 + number)
        step_both(planned, eager, batch_of(seed=number))
    assert len(graphs) == MOST_CAPTURES and not planned.is_replayed
    assert caplog.text.count("the step runs without a CUDA graph") == 1


def test_a_step_that_reads_on_the_host_is_refused_when_it_is_captured(graphs: list[fake_graphs.Graph]) -> None:
    weights = torch.ones(4, device="meta")
    planned, _ = graphed_and_eager()
    program = planned._programs.first
    require_on_device(program, program.arguments(batch_of()))
    with pytest.raises(UnsupportedStepError, match="lies on meta, and is read by the host"):
        require_on_device(program, [weights, *program.arguments(batch_of())[1:]])
    with pytest.raises(UnsupportedStepError, match=r"writes to .* of its batch"):
        require_on_device(replace(program, written_batch=(0,)), program.arguments(batch_of()))
    assert not graphs


def test_a_graph_with_other_bits_is_an_error_and_leaves_no_trace(
    graphs: list[fake_graphs.Graph], monkeypatch: pytest.MonkeyPatch
) -> None:
    planned, eager = graphed_and_eager()
    for _ in range(CAPTURED_IN - 1):
        step_both(planned, eager, batch_of())
    with monkeypatch.context() as patch:
        patch.setattr(fake_graphs.Graph, "replay", lambda _graph: None)
        with pytest.raises(VerificationError, match="a replayed CUDA graph of the step differs from the planned step"):
            planned(batch_of())
    assert len(graphs) == 1 and not planned.is_replayed
    step_both(planned, eager, batch_of())


def test_what_cannot_be_captured_is_said(graphs: list[fake_graphs.Graph], monkeypatch: pytest.MonkeyPatch) -> None:
    planned, eager = graphed_and_eager()
    for _ in range(CAPTURED_IN - 1):
        step_both(planned, eager, batch_of())

    def refused(*_given: Any, **_named: Any) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "graph", refused)
        with pytest.raises(UnsupportedStepError, match=r"cannot be captured \(operation not .* capturing\); "):
            planned(batch_of())
    assert len(graphs) == 1 and not planned.is_replayed
    step_both(planned, eager, batch_of())
    assert planned.is_replayed


class Served:
    def __init__(self, arena: object, why: str = "") -> None:
        self.arena = arena
        self.served = type("Served", (), {"by": DEFAULT, "why": why})


ARENA: Any = Served(arena=object())


def hooked(parameters: Any) -> torch.optim.Optimizer:
    optimizer = sgd(parameters)
    optimizer.register_step_pre_hook(lambda *_given: None)
    return optimizer


class Own(torch.optim.SGD):
    pass


@pytest.mark.parametrize(
    ("settings", "make", "more", "memory", "why"),
    [
        ({}, sgd, {}, Served(None, "no arena: no C++ compiler"), "has no arena .no arena: no C.. compiler."),
        ({"host_budget_bytes": 1 << 20}, sgd, {}, ARENA, "may copy to the host"),
        ({}, None, {}, ARENA, "has no optimizer, and adds to gradients"),
        ({}, sgd, {"scaler": torch.amp.GradScaler("cpu")}, ARENA, "has a GradScaler, which reads on the host"),
        ({}, torch.optim.Adam, {}, ARENA, "unless it is made with capturable=True"),
        ({}, torch.optim.Adagrad, {}, ARENA, "Adagrad counts its steps on the host;"),
        ({}, hooked, {}, ARENA, "has hooks"),
        ({}, lambda parameters: Own(parameters, lr=0.1), {}, ARENA, "Own is not one of torch.optim"),
    ],
)
def test_refusals(
    settings: dict[str, Any],
    make: Callable[[Any], torch.optim.Optimizer] | None,
    more: dict[str, Any],
    memory: Any,
    why: str,
) -> None:
    model = net()
    optimizer = None if make is None else make(model.parameters())
    step = memfit.TrainingStep(model=model, loss=loss_of, batch=batch_of(), optimizer=optimizer, **more)
    asked, cuda = Settings(budget="100%", cuda_graph=True, **settings), torch.device("cuda")
    with pytest.raises(InvalidOptionError, match=f"^cuda_graph=True: .*{why}"):
        require_capturable(asked, step, cuda, memory)


def test_a_capturable_optimizer_is_taken_and_a_cpu_is_not() -> None:
    model = net()
    adam = torch.optim.Adam(model.parameters(), capturable=True)
    step = memfit.TrainingStep(model=model, loss=loss_of, batch=batch_of(), optimizer=adam)
    require_capturable(Settings(budget="100%", cuda_graph=True), step, torch.device("cuda"), ARENA)
    with pytest.raises(InvalidOptionError, match="runs on cpu, and only CUDA has graphs"):
        require_capturable(Settings(budget="100%", cuda_graph=True), step, torch.device("cpu"), ARENA)
    with pytest.raises(InvalidOptionError, match='cuda_graph does not go with kernels="inductor"'):
        memfit.fit(model, loss_of, batch_of(), budget="1GiB", kernels="inductor", cuda_graph=True)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_a_step_with_a_graph_break_is_refused(graphs: list[fake_graphs.Graph]) -> None:
    def looks(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        found = loss_of(model, batch)
        return found * 2 if found.item() > 0 else found

    model = net()
    with pytest.raises(InvalidOptionError, match="cuda_graph=True is for graphs; leave it out"):
        memfit.fit(
            model, looks, batch_of(), optimizer=sgd(model.parameters()), budget="64MiB", arena=True, cuda_graph=True
        )
    assert not graphs


class Philox:
    """A generator of CUDA that is not here: what it draws is (seed, offset); objects share states as torch's do."""

    def __init__(self, state: dict[str, int] | None = None) -> None:
        self.state = state or {"seed": 7, "offset": 0}

    def get_offset(self) -> int:
        return self.state["offset"]

    def set_offset(self, offset: int) -> None:
        self.state["offset"] = offset

    def initial_seed(self) -> int:
        return self.state["seed"]

    def manual_seed(self, seed: int) -> None:
        self.state |= {"seed": seed, "offset": 0}

    def clone_state(self) -> Philox:
        return Philox(dict(self.state))

    def graphsafe_get_state(self) -> Philox:
        return Philox(self.state)

    def graphsafe_set_state(self, other: Philox) -> None:
        self.state = other.state

    def draw(self, increment: int) -> tuple[int, int]:
        drawn = self.state["seed"], self.state["offset"]
        self.state["offset"] += increment
        return drawn


def test_random_ops_that_are_computed_again_draw_what_they_drew_first(monkeypatch: pytest.MonkeyPatch) -> None:
    default = Philox()
    cuda: Any = torch.cuda
    monkeypatch.setattr(cuda, "default_generators", (default,))

    def packed(_device: str) -> torch.Tensor:
        return torch.tensor([default.initial_seed(), default.get_offset()]).view(torch.uint8)

    def unpack(_device: str, state: torch.Tensor) -> None:
        seed, offset = state.view(torch.int64).tolist()
        default.manual_seed(seed)
        default.set_offset(offset)

    monkeypatch.setattr(generators, "get_state", packed)
    monkeypatch.setattr(generators, "set_state", unpack)
    save = generators.SaveGeneratorState(device="cuda:0")
    calls: list[Callable[[], Any]] = []  # of a graph: what each reads and draws at a replay

    def step(draw: Callable[[int], Any]) -> list[Any]:
        first = draw(4)
        state = save()
        second = draw(8)
        third = draw(4)
        again = [generators.replay(state, "cuda:0", draw, 8) for _ in range(2)]
        return [first, second, third, *again]

    states = PhiloxStates(torch.device("cuda", 0))
    default.set_offset(100)
    with states.noted():
        planned = step(default.draw)
    assert planned == [(7, 100), (7, 104), (7, 112), (7, 104), (7, 104)] and default.get_offset() == 116
    states.register(type("Graph", (), {"register_generator_state": lambda _graph, _generator: None})())

    def recorded(increment: int) -> None:
        state = default.state  # the one that stands in the generator: a replay reads it where it is
        calls.append(lambda: Philox(state).draw(increment))

    with states.captured():
        step(recorded)
    assert len(calls) == 5
    default.manual_seed(9)
    default.set_offset(200)
    for start in (200, 216):
        states.set_for_replay()
        assert [call() for call in calls] == [
            (9, start), (9, start + 4), (9, start + 12), (9, start + 4), (9, start + 4),
        ]  # fmt: skip
    with pytest.raises(UnsupportedStepError, match="draws random numbers on cpu again"), states.noted():
        generators.replay(save(), "cpu", default.draw, 4)
