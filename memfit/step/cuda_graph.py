"""CUDA graphs of planned steps: a step in an arena has fixed addresses, so that it is captured once and replayed.

A graph holds addresses and numbers. What it was captured with is compared before each replay: where all tensors lie but
the batch's, the optimizer's state and settings, the arena's memory. Batches are copied to tensors of the graph. Before
a graph is used, two replays are compared with two planned steps, bit by bit, from the same state.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from memfit.binding import Origin
from memfit.capture import Captured, TrainingStep
from memfit.capture.draws_in_graphs import PhiloxStates
from memfit.errors import InvalidOptionError, UnsupportedStepError, VerificationError
from memfit.memory.bits import same_bits
from memfit.memory.footprint import footprint
from memfit.memory.place import Place, reinterpret, span_bytes
from memfit.memory.snapshot import StepState
from memfit.memory.step_memory import StepMemory
from memfit.planning import Settings
from memfit.step.step_program import StepProgram
from memfit.torch_private.modules import optimizer_hooks

_log = logging.getLogger(__name__)

DEVICES = {"cuda"}
MOST_CAPTURES = 3
"""Of one step: where addresses keep changing, capturing costs more than replays save."""

_COMPARED_STEPS = 2  # a number that was to change between steps shows in the second


def require_capturable(settings: Settings, step: TrainingStep, device: torch.device, memory: StepMemory) -> None:
    """Refuse `cuda_graph=True` for a step that cannot be captured.

    Args:
        settings: say whether there is a host budget, whose copies the host waits for.
        step: has ranks, a scaler or an optimizer, all of which may compute on the host.
        device: that the step runs on.
        memory: of the step; addresses stay only in an arena.

    Raises:
        InvalidOptionError: says why.
    """
    why = _refusal(settings, step, device, memory)
    if why:
        raise InvalidOptionError(f"cuda_graph=True: {why}; leave cuda_graph out, or change that")


def _refusal(settings: Settings, step: TrainingStep, device: torch.device, memory: StepMemory) -> str:
    if device.type not in DEVICES:
        return f"the step runs on {device}, and only CUDA has graphs"
    if step.across is not None:
        return "the step runs on several ranks, which a graph does not wait for"
    if memory.arena is None:
        return f"the step has no arena ({memory.served.why or 'arena=False'}), so that its addresses change"
    if settings.host_budget_bytes:
        return "the step may copy to the host (host_budget), which the host waits for"
    if step.optimizer is None:
        return "the step has no optimizer, and adds to gradients that a graph would overwrite"
    if step.scaler is not None:
        return "the step has a GradScaler, which reads on the host whether gradients are finite"
    return _refusal_of_optimizer(step.optimizer)


def _refusal_of_optimizer(optimizer: torch.optim.Optimizer) -> str:
    name = type(optimizer).__name__
    if any(optimizer_hooks(optimizer)):
        return f"{name} has hooks, whose Python code a graph does not run"
    if type(optimizer) is torch.optim.SGD:
        return ""
    if not type(optimizer).__module__.startswith("torch.optim"):
        return f"{name} is not one of torch.optim, and may compute on the host"
    if not all("capturable" in group for group in optimizer.param_groups):
        return f"{name} counts its steps on the host"
    if not all(group["capturable"] for group in optimizer.param_groups):
        return f"{name} counts its steps on the host unless it is made with capturable=True"
    return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Replayable:
    """A captured graph.

    Attributes:
        program: of which it was captured.
        fixed: what it holds of the state outside (see `StepGraphs._fixed`).
        inputs: position among the program's arguments -> the tensor that the batch's is copied to.
        outputs: by name; each replay overwrites them.
        states: of random ops that are recomputed.
    """

    program: StepProgram
    fixed: list[Any]
    graph: Any
    inputs: dict[int, torch.Tensor]
    outputs: dict[str, torch.Tensor]
    states: PhiloxStates

    def replay(self, arguments: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        for position, place in self.inputs.items():
            _bytes_of(place).copy_(_bytes_of(arguments[position]))
        self.states.set_for_replay()
        self.graph.replay()
        torch.autograd.graph.increment_version([arguments[position] for position in self.program.written])
        return {name: output.clone() for name, output in self.outputs.items()}


class StepGraphs:
    """Captures and replays the steps of a planned step, on a stream of its own.

    There is one graph: of the program that was proved first. Batches of other shapes run without.

    Args:
        step: the training step.
        memory: its memory, an arena.
        device: that it runs on.
    """

    def __init__(self, step: TrainingStep, memory: StepMemory, device: torch.device) -> None:
        assert memory.arena is not None
        self._step, self._memory, self._arena, self._device = step, memory, memory.arena, device
        self._stream = torch.cuda.Stream(device)
        self._graph: _Replayable | None = None
        self._latest: tuple[StepProgram, list[Any]] | None = None
        self._next: list[torch.Tensor] | None = None
        self._captures = 0
        self._has_told = False

    @property
    def held_bytes(self) -> int:
        """The bytes of the batch that the graph reads."""
        inputs = self._graph.inputs.values() if self._graph is not None else ()
        return sum(footprint(inputs, self._device).values())

    @property
    def has_graph(self) -> bool:
        """Whether a graph was captured, and is still in use."""
        return self._graph is not None

    @contextmanager
    def stream(self) -> Iterator[None]:
        """Run the block on the graphs' stream: after all that the caller's was given, and before what it gets next."""
        caller = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(caller)
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            caller.wait_stream(self._stream)

    def forget(self, program: StepProgram) -> None:
        """Drop the graph of a program, if there is one."""
        if self._graph is not None and self._graph.program is program:
            self._graph = None

    def prepare(
        self, key: Hashable, program: StepProgram, batch: Any, run: Callable[[], Any], *, is_proved: bool
    ) -> bool:
        """Prepare the next call; return whether it is the first to replay a new graph.

        Args:
            key: of the call's memory.
            program: of the call.
            batch: of the call.
            run: runs the call as it is planned.
            is_proved: whether the plan was seen to keep its budget.

        Raises:
            UnsupportedStepError: the step cannot be captured.
            VerificationError: replays have other bits than planned steps.
        """
        self._next, is_new = None, False
        arguments = program.arguments(batch)
        fixed = self._fixed(program, arguments)
        if not self._is_for(program, fixed):
            if not self._may_capture(program, fixed, is_proved=is_proved):
                return False
            self._graph = None
            self._graph = self._captured(key, program, fixed, arguments, run)
            self._captures += 1
            is_new = True
        if self._arena.is_empty:
            self._next = arguments
        return is_new

    def outputs(self) -> dict[str, torch.Tensor] | None:
        """Replay the call that was prepared, and return its outputs by name; None if it has to run as planned."""
        arguments, self._next = self._next, None
        return None if arguments is None or self._graph is None else self._graph.replay(arguments)

    def _is_for(self, program: StepProgram, fixed: list[Any]) -> bool:
        return self._graph is not None and self._graph.program is program and self._graph.fixed == fixed

    def _may_capture(self, program: StepProgram, fixed: list[Any], *, is_proved: bool) -> bool:
        """Return whether nothing has changed since the last call, and another program's graph is not in use."""
        before, self._latest = self._latest, (program, fixed)
        if not is_proved:
            return False
        if self._graph is not None and self._graph.program is not program:
            return False
        if before is None or before[0] is not program:
            return False
        if before[1] == fixed and self._captures < MOST_CAPTURES:
            return True
        if not self._has_told:
            _log.warning(
                "memfit: the step runs without a CUDA graph: the optimizer's settings, or addresses, keep changing; "
                "give a learning rate that a schedule changes as a tensor on the GPU"
            )
        self._has_told = True
        if before[1] == fixed:
            self.forget(program)  # the change stays
        return False

    def _fixed(self, program: StepProgram, arguments: Sequence[torch.Tensor]) -> list[Any]:
        """Return all that a graph of the call would hold of the state outside: addresses, and numbers."""
        optimizer, inputs = self._step.optimizer, _inputs(program)
        assert optimizer is not None
        found: list[Any] = [self._arena.moves, torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic]
        found += [each.data_ptr() for position, each in enumerate(arguments) if position not in inputs]
        for group in optimizer.param_groups:
            found += [self._held(value) for name, value in group.items() if name != "params"]
            for parameter in group["params"]:
                found += [self._held(value) for value in optimizer.state.get(parameter, {}).values()]
        return found

    def _held(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return value.data_ptr() if value.device.type == self._device.type else value.tolist()

    def _captured(
        self,
        key: Hashable,
        program: StepProgram,
        fixed: list[Any],
        arguments: list[torch.Tensor],
        run: Callable[[], Any],
    ) -> _Replayable:
        """Capture a call, compare its replays with planned steps, and leave the state as it was."""
        step, captured = self._step, program.prepared.captured
        require_on_device(program, arguments)
        before = StepState.take(step, captured.generators)
        states = PhiloxStates(self._device)
        try:
            with states.noted():
                losses = [run()]
            losses += [run() for _ in range(1, _COMPARED_STEPS)]
            expected = StepState.take(step, captured.generators)
            before.put_back(step)
            if self._fixed(program, arguments) != fixed:
                raise UnsupportedStepError(
                    "cuda_graph=True: the step replaces tensors that it updates, so that a graph would write to those "
                    "of an earlier step; leave it out"
                )
            graph = self._capture(key, program, fixed, arguments, states)
            replayed = [graph.replay(arguments)["loss"] for _ in range(_COMPARED_STEPS)]
            difference = expected.first_difference(StepState.take(step, captured.generators))
            if difference is None and not all(map(same_bits, losses, replayed)):
                difference = "the loss"
            if difference is not None:
                raise VerificationError(
                    f"a replayed CUDA graph of the step differs from the planned step in {difference}. Either its "
                    "kernels are not deterministic (torch.use_deterministic_algorithms), or it computes on the host: "
                    "leave cuda_graph out"
                )
        finally:
            before.put_back(step)
        _log.info("memfit: the step is replayed as a CUDA graph from here on")
        return graph

    def _capture(
        self,
        key: Hashable,
        program: StepProgram,
        fixed: list[Any],
        arguments: Sequence[torch.Tensor],
        states: PhiloxStates,
    ) -> _Replayable:
        (half,) = program.prepared.program.halves
        inputs = {position: _place_like(arguments[position]) for position in sorted(_inputs(program))}
        for position, place in inputs.items():
            _bytes_of(place).copy_(_bytes_of(arguments[position]))
        graph = torch.cuda.CUDAGraph()
        for generator in program.prepared.captured.generators:
            graph.register_generator_state(generator)
        states.register(graph)
        given = [inputs.get(position, argument) for position, argument in enumerate(arguments)]
        try:
            with (
                self._arena.step(key=key),
                torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"),
                states.captured(),
            ):
                results = half.function(given)
        except RuntimeError as error:
            why = str(error).partition("\n")[0]
            raise UnsupportedStepError(f"cuda_graph=True: the step cannot be captured ({why}); leave it out") from error
        outputs = dict(zip(program.prepared.captured.binding.outputs, results, strict=True))
        return _Replayable(program=program, fixed=fixed, graph=graph, inputs=inputs, outputs=outputs, states=states)


def _inputs(program: StepProgram) -> set[int]:
    """Return the positions of the batch's tensors among a program's arguments."""
    (half,) = program.prepared.program.halves
    residents = program.prepared.captured.binding.residents
    inputs = {resident.value.storage for resident in residents if resident.origin is Origin.INPUT}
    return {position for position, storage in enumerate(half.takes) if storage in inputs}


def require_on_device(program: StepProgram, arguments: Sequence[torch.Tensor]) -> None:
    """Refuse a program that reads or makes tensors elsewhere than on its device, writes to its batch, or offloads."""
    captured = program.prepared.captured
    device: torch.device = captured.binding.device
    why = [f"the step writes to {program.names[position]!r} of its batch" for position in program.written_batch]
    why += [
        f"{name!r} lies on {argument.device}, and is read by the host"
        for name, argument in zip(program.names, arguments, strict=True)
        if argument.device.type != device.type or argument.layout is not torch.strided
    ]
    why += [f"it draws from a generator of {each.device}" for each in captured.generators if each.device != device]
    why += list(_made_elsewhere(captured, device))
    if program.plan.offloaded_bytes:
        why.append("the plan copies to the host, which the host waits for")
    if why:
        raise UnsupportedStepError(f"cuda_graph=True: {why[0]}; leave cuda_graph out, or change that")


def _made_elsewhere(captured: Captured, device: torch.device) -> Iterator[str]:
    for op, call in zip(captured.graph.ops, captured.binding.calls, strict=True):
        place = call.kwargs.get("device")
        if place is not None and torch.device(place).type != device.type:
            yield f"{op.name} makes a tensor on {place}"


def _place_like(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the same form, with memory of its own."""
    start, end = span_bytes(tensor)
    base = torch.empty(end - start, dtype=torch.uint8, device=tensor.device)
    return replace(Place.of(tensor), offset=0).on(base)


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of the memory that a tensor spans."""
    start, end = span_bytes(tensor)
    return reinterpret(tensor, torch.uint8, (end - start,), (1,), start)
