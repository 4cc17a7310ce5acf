"""Defects that memfit once had, put back one at a time: what the fuzzer has to find.

A defect is put back by switching off what mended it. `concerns` says which cases can show it, so that the others need
no run: where it is not put back, they end well.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest import mock

from _fuzz_cases import Case

from memfit.capture import call_recorder, generators, special_calls, step_recording, whole_step
from memfit.capture.compare import Comparisons
from memfit.capture.guards import Guards
from memfit.step import programs
from memfit.step.proof import Proof

Patch = tuple[Any, str, Any]

# What else would see the defect: the comparison of a capture with eager's calls, and the measurement of each step.
_UNCOMPARED: tuple[Patch, ...] = ((Comparisons, "require_as_eager", lambda *_, **__: None),)
_UNMEASURED: tuple[Patch, ...] = ((Proof, "_judge", lambda *_: None),)


@dataclass(frozen=True, slots=True, kw_only=True)
class Defect:
    """A defect.

    Attributes:
        patches: (object, attribute, value) that put it back.
        concerns: returns whether a case may show it.
    """

    patches: tuple[Patch, ...]
    concerns: Callable[[Case], bool]

    @contextmanager
    def put_back(self) -> Iterator[None]:
        """Have the defect inside the block."""
        with ExitStack() as stack:
            for target, name, value in self.patches:
                if isinstance(target, dict):
                    stack.enter_context(mock.patch.dict(target, {name: value}))
                else:
                    stack.enter_context(mock.patch.object(target, name, value))
            yield


def _changes(*names: str) -> Callable[[Case], bool]:
    return lambda case: any(name in names for _, name in case.changes)


def _blocks(*names: str) -> Callable[[Case], bool]:
    return lambda case: any(name in names for name in case.blocks)


def _without_checks(*names: str) -> tuple[Patch, ...]:
    return tuple((Guards, name, lambda _guards: None) for name in names)


DEFECTS: Mapping[str, Defect] = {
    "a parameter's layout changes": Defect(
        patches=_without_checks("_tensor_difference", "_memory_difference"),
        concerns=_changes("restride", "flatten"),
    ),
    "the optimizer's groups change": Defect(
        patches=_without_checks("_group_difference", "_table_difference", "_value_difference"),
        concerns=_changes("add_group", "remove_group", "clear_group", "reverse_groups"),
    ),
    "a module is replaced, or a weight tied": Defect(
        patches=_without_checks("_table_difference", "_memory_difference"),
        concerns=_changes("replace_layer", "replace_parameter", "tie"),
    ),
    "an attribute, a global or a closure changes": Defect(
        patches=_without_checks("_table_difference", "_value_difference"),
        concerns=_changes("dropout", "temperature", "settings", "replace_teacher", "loss_scale"),
    ),
    "parameters become float64": Defect(
        patches=(*_without_checks("_tensor_difference", "_state_difference"), *_UNMEASURED),
        concerns=_changes("double"),
    ),
    "replays hold a generator's state": Defect(
        patches=((generators.STATE_BYTES, "cpu", 0), *_UNMEASURED),
        concerns=_blocks("dropout", "noise", "checkpoint"),
    ),
    "fakes differ from real results": Defect(
        patches=((programs, "with_real_results", lambda make: make({})),),
        concerns=_blocks("frozen", "batch_norm", "cumulative_batch_norm", "layer_norm", "group_norm"),
    ),
    "the second micro-batch is refused": Defect(
        patches=((programs.Programs, "_settings_for", lambda made, _captured: made.settings),),
        concerns=lambda case: case.optimizer == "none",
    ),
    "the capture runs inside autocast, or the step": Defect(
        patches=(
            (programs, "require_training_context", lambda *_: None),
            (whole_step, "require_training_context", lambda _what: None),
            *_without_checks("_state_difference"),
        ),
        concerns=_changes("autocast"),
    ),
    "libraries see that tensors are fake": Defect(
        patches=((step_recording, "answered_as_eager", nullcontext), *_UNCOMPARED),
        concerns=_blocks("asks"),
    ),
    "a constant is frozen with what the step wrote into it": Defect(
        patches=(
            (special_calls.SPECIAL_CASES, call_recorder._aten.lift_fresh, special_calls.functionalize),
            *_UNCOMPARED,
        ),
        concerns=_blocks("written_constant"),
    ),
    "draws of Python and NumPy are frozen": Defect(
        patches=((whole_step, "host_draws_refused", lambda _run_again: nullcontext()), *_UNCOMPARED),
        concerns=_blocks("python_draw", "numpy_draw", "module_draw"),
    ),
    "a false bound: updates' workspaces are guessed": Defect(
        patches=((sys.modules["memfit.capture.finish"], "with_measured_updates", lambda graph, _binding: graph),),
        concerns=lambda case: case.optimizer in ("foreach_adamw", "adamw", "adam", "two_groups", "amsgrad"),
    ),
    "checks of distributions end the capture": Defect(
        patches=((call_recorder.CallRecorder, "_is_checked", lambda _recorder, _tensor: False),),
        concerns=lambda case: case.loss == "distribution",
    ),
    "kernels that autocast casts inside": Defect(
        patches=(
            *((special_calls.SPECIAL_CASES, kernel, lambda *_: None) for kernel in special_calls.CAST_INSIDE),
            *_UNCOMPARED,
        ),
        concerns=lambda case: case.loss == "autocast" and "bilinear" in case.blocks,
    ),
    "a batch normalization counts no steps": Defect(
        patches=((step_recording, "with_a_momentum", lambda _model: nullcontext({})),),
        concerns=_blocks("cumulative_batch_norm"),
    ),
}
"""Defects by name."""
