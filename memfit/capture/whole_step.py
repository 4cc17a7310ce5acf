"""Capture of a whole step: forward, loss, backward and update run once on fake tensors, and every call is recorded.

Autograd itself runs, so the recorded kernels and their order are those of eager PyTorch. Parameters, buffers and batch
are fakes meanwhile: no memory is used, no generator advances, and no tensor of the user's changes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from memfit.capture.build import Captured
from memfit.capture.copies import ATOMS, MISSING, is_same
from memfit.capture.draws import host_draws_refused
from memfit.capture.guards import Guards
from memfit.capture.reads import Reads
from memfit.capture.step_check import require_training_context
from memfit.capture.step_recording import Recorded, StepRecording
from memfit.capture.symbols import Symbols
from memfit.capture.training_step import TrainingStep
from memfit.cost.observations import Corrections
from memfit.errors import (
    CaptureError,
    MemfitError,
    NoGraphError,
)


def capture_whole_step(step: TrainingStep, batch: Any = None, corrections: Corrections | None = None) -> Captured:
    """Return the graph of one step, and its binding.

    Gradients already in `.grad` are residents that the step adds to. Without an optimizer the gradients are outputs
    named `grad:<parameter>`; the loss is the output `loss`.

    Args:
        step: the training step.
        batch: the batch to capture it on; None stands for the step's own.
        corrections: what real kernels return in the place of their fakes' results (see `with_real_results`).

    Raises:
        GraphBreakError: the step depends on a tensor's value; names the user's line.
        CaptureError: the step's code raises; names the user's line.
        InvalidDeviceError: the batch is on another device than the model.
        NoGraphError: the step's Python code does what a graph cannot repeat.
        UnsupportedStepError: LBFGS, collectives.
    """
    batch = step.batch if batch is None else batch
    require_training_context("the step was captured", step)
    with Reads(step) as reads:
        try:
            with host_draws_refused(lambda: StepRecording(step, batch, corrections).run()):
                first = StepRecording(step, batch, corrections)
                with reads.tracked():
                    captured = first.run()
                _require_unread(step, batch, first, reads)
        except (CaptureError, NoGraphError):  # it will be run, from the state before
            reads.put_iterators_back()
            raise
        left = reads.left()
    return replace(captured, guards=Guards(step, reads, left, first.values.tensors))


def capture_with_checkpoints(step: TrainingStep, corrections: Corrections | None = None) -> Captured:
    """Return the graph of one step as eager runs it: regions of `torch.utils.checkpoint` are computed twice.

    Args:
        step: a training step that `capture_whole_step` has captured, on its own batch.
        corrections: as for `capture_whole_step`.

    Raises:
        MemfitError: as `capture_whole_step`.
    """
    with Reads(step) as reads, reads.tracked():
        return StepRecording(step, step.batch, corrections, inlines=False).run()


def record_at_all_sizes(step: TrainingStep, batch: Any, symbols: Symbols) -> tuple[Recorded, Guards]:
    """Return what a step does on batches of many sizes, with symbols in it, and what it took from Python.

    Args:
        step: a training step that `capture_whole_step` has captured, and that needed no corrections.
        batch: an example; its sizes that change are symbols, in the order of its leaves.
        symbols: of those sizes.

    Raises:
        Exception: torch cannot run the step on symbols.
    """
    with Reads(step) as reads:
        with reads.tracked(), symbols.noting():
            recording = StepRecording(step, batch, symbols=symbols)
            recorded = recording.record()
        left = reads.left()
    return recorded, Guards(step, reads, left, recording.values.tensors)


def _require_unread(step: TrainingStep, batch: Any, first: StepRecording, reads: Reads) -> None:
    """Refuse a step that reads what it has itself set in the step before, unless the next step's ops are the same.

    They are the same in all later steps if a second capture, which starts with what the first one set, makes the same
    calls and leaves the same values.

    Raises:
        NoGraphError: names what the step sets.
    """
    carried = reads.carried()
    if not carried:
        return
    held = reads.held()
    second = StepRecording(step, batch, first.trace.corrections)
    try:
        second.run()
        same = second.trace.is_as(first.trace) and second.stream.numbers() == first.stream.numbers()
    except MemfitError:  # what the step raised, for example for a fake of the first capture among its attributes
        same = False
    later = reads.carried()
    moving = [
        name
        for name, value in carried.items()
        if isinstance(value, ATOMS) and not is_same(value, later.get(name, MISSING))
    ]
    if same and not moving:
        reads.accept_present(carried, held)
        return
    names = sorted(name.removeprefix("model.") for name in (moving if same else carried))
    where = " in its model" if all(name.startswith("model.") for name in carried) else ""
    raise NoGraphError(
        f"the step sets {', '.join(map(repr, names[:3]))}{' and more' if len(names) > 3 else ''}{where} and "
        "reads it in the next step, but a planned step runs no Python",
        "keep what later steps read in a buffer (register_buffer before memfit.fit) or in the batch; if it is made "
        "only once, run one eager forward first",
    )
