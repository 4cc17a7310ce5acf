"""Comparison of a captured step with eager: the calls that both dispatch, one by one."""

from __future__ import annotations

import logging
from typing import Any

from memfit.capture.eager_run import NotComparableError, leaves_are_real, run_as_eager
from memfit.capture.generators import states_kept
from memfit.capture.placement import step_device
from memfit.capture.stream import Difference, Stream
from memfit.capture.stream_structure import structure_of
from memfit.capture.training_step import TrainingStep
from memfit.errors import CaptureError, NoGraphError

_log = logging.getLogger("memfit")


class Comparisons:
    """Compares the captures of one step with eager, one for each structure of the calls.

    A comparison finds code that treats fake tensors otherwise than real ones. Each size of a batch is captured on its
    own, so that what Python computes from sizes is right for that size without it. What is left to one comparison for
    all sizes is the choice of operators: a capture of an equal structure (`memfit.capture.stream_structure`) was made
    by the same lines of the user's code, which called the same operators on the same data flow, as the one that was
    compared. Each op is still run by itself at each size, where its results are compared with the captured ones.
    """

    def __init__(self) -> None:
        self._compared: set[str] = set()

    def require_as_eager(
        self, step: TrainingStep, batch: Any, captured: Stream | None, *, limit_bytes: int | None = None
    ) -> None:
        """Compare a capture by the function of this name, unless one of its structure was compared before.

        Args:
            step, batch, captured, limit_bytes: as for the function.

        Raises:
            MemfitError: as the function.
        """
        structure = None if captured is None else structure_of(captured)
        if structure in self._compared:
            return
        if require_as_eager(step, batch, captured, limit_bytes=limit_bytes) and structure is not None:
            self._compared.add(structure)


def require_as_eager(
    step: TrainingStep, batch: Any, captured: Stream | None, *, limit_bytes: int | None = None
) -> bool:
    """Run forward and backward once as eager does, and refuse a captured step that dispatches other calls.

    If they differ, two eager runs are compared too: the message blames the step only if these differ as well. A step
    that cannot be compared gives a warning that says why, as does a difference that torch makes: in autograd's own
    formulas, or in the kernel for a line of code on a GPU. torch chooses there by more than what a fake has.

    Args:
        step: the training step.
        batch: that it was captured on.
        captured: what the captured step dispatched.
        limit_bytes: how many bytes the results of the forward pass may take together; None is no limit.

    Returns:
        whether both were compared: they were found equal, or a warning named what torch makes different.

    Raises:
        NoGraphError: two eager runs differ: the step draws or counts outside of torch. Names the line.
        CaptureError: the captured step is not the one that eager runs. Names the line.
    """
    if captured is None or not leaves_are_real(step, batch):
        return False
    try:
        with states_kept(captured.generators()):
            difference = run_as_eager(step, batch, expected=captured, limit_bytes=limit_bytes)[1]
            if difference is None:
                return True
            first = run_as_eager(step, batch)[0]
            own = run_as_eager(step, batch, expected=first)[1]
    except NotComparableError as error:
        _log.warning("memfit: the captured step was not compared with eager's: %s", error)
        return False
    if own is not None and not own.is_autograds:
        raise NoGraphError(
            f"{own.lines[1]}: two eager runs of the step from the same state differ: {_calls(own, 'first', 'then')}; "
            "the step draws from a generator, counts, or reads a clock where memfit does not see it",
            "do that outside of the step, and pass it in the batch",
        )
    where, calls = difference.lines[1], _calls(difference, "captured", "eager")
    if _is_torchs(step, batch, difference):
        outcome = "a planned step has the bits of the captured call, and the rest of it was not compared"
        _log.warning("memfit: %s: %s; %s", where, calls, outcome)
        return True
    raise CaptureError(
        f"{where}: the captured step is not the one that eager runs: {calls}; the code there asks what kind of tensor "
        "it is given: report this, with the code"
    )


def _is_torchs(step: TrainingStep, batch: Any, difference: Difference) -> bool:
    """Return whether torch, and no code of the user's, made the choice: in backward, or of a kernel on a GPU."""
    same_line = len(set(difference.lines)) == 1
    return difference.is_autograds or (same_line and step_device(step.model, batch).type != "cpu")


def _calls(difference: Difference, one: str, other: str) -> str:
    mine, theirs = difference.lines
    where = "" if mine == theirs else f" at {mine}"
    expected = f"calls {difference.expected}{where}" if difference.expected else "ends"
    found = f"calls {difference.found}" if difference.found else "ends"
    return f"{one} it {expected}, {other} it {found}"
