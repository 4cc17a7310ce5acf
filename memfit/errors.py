"""All errors that memfit raises on purpose. A message names the fault, the object, expected and actual, and a remedy.

The command line prints an error as one line on standard error, and exits with its `exit_status`.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any

BY_CHECKPOINT = "memfit.checkpoint(model, budget) holds the budget of this model in your own loop"
"""Ends refusals of planned steps."""
EAGER_MODE = 'eager mode (memfit.eager, memfit run --door eager, door="eager" of a callback)'
"""In refusals of `memfit.checkpoint`."""


class MemfitError(Exception):
    """Base of all errors that memfit raises on purpose; catch this one to catch them all."""

    exit_status = 2


class InvalidTargetError(MemfitError, ValueError):
    """The target does not exist, or does not give a training step."""


class InvalidBudgetError(MemfitError, ValueError):
    """The budget is not a positive size."""


class InvalidGraphError(MemfitError, ValueError):
    """A graph breaks a rule of `memfit.graph`: a dangling id, a read before its write, a negative size."""


class InvalidScheduleError(MemfitError, ValueError):
    """A schedule cannot be carried out on its graph; the message names the instruction and the storage."""


class InvalidBlocksError(MemfitError, ValueError):
    """Blocks to be packed are invalid: an empty live range, a size below 1, an id twice."""


class InvalidLayoutError(MemfitError, ValueError):
    """Two blocks of a layout that are live together overlap, or its height is wrong; the message names the blocks."""


class InvalidFileError(MemfitError, ValueError):
    """A file cannot be read, or has the wrong content; the message names the file and the place in it."""


class InvalidOptionError(MemfitError, ValueError):
    """An option has a value, or a name, that does not exist."""


class InvalidDeviceError(MemfitError, ValueError):
    """No device profile has that name, a device is not at hand, or tensors are on the wrong device."""


class MissingPackageError(MemfitError, ModuleNotFoundError):
    """A package that one of memfit's extras brings is not installed."""


@contextmanager
def naming_extra(extra: str) -> Generator[None]:
    """Let an import inside of the block that fails say which extra of memfit's brings the package.

    Args:
        extra: such as `lightning`.

    Raises:
        MissingPackageError: in the place of ModuleNotFoundError.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        raise MissingPackageError(
            f"memfit.integrations.{extra} needs the package {(error.name or '').partition('.')[0]}, which is not "
            f"installed: pip install 'memfit[{extra}]'",
            name=error.name,
        ) from None


class PlanMismatchError(MemfitError, ValueError):
    """A plan was made for another graph, torch or device than those at hand."""


class HostMemoryError(MemfitError, RuntimeError):
    """Storages cannot be offloaded: there is no room for them on the host or disk, or a copy failed."""


class CaptureError(MemfitError, RuntimeError):
    """A training step cannot be captured as a graph; the message names the user's line.

    Attributes:
        why: no graph can be made of it, in words.
        line: the user's, where it is known by itself.
    """

    line: str | None = None

    @property
    def why(self) -> str:
        return str(self)


def capture_error(text: str, raised: Exception) -> CaptureError:
    """Return a CaptureError for what a step's code raised, which code that catches the latter's class catches, too.

    >>> isinstance(capture_error("train.py:3: the step raised ValueError: odd", ValueError("odd")), ValueError)
    True

    Args:
        text: the message.
        raised: the error of the step's code.
    """

    def told(error: Exception) -> str:
        return str(error.args[0])

    def reduced(error: Exception) -> tuple[type[CaptureError], tuple[str]]:
        return CaptureError, (told(error),)  # another process does not have the class

    members: dict[str, Any] = {"__str__": told, "__init__": RuntimeError.__init__, "__reduce__": reduced}
    members["__module__"] = __name__
    try:
        return type("CaptureError", (CaptureError, type(raised)), members)(text)
    except TypeError:  # of another layout in memory, as OSError
        return CaptureError(text)


class GraphBreakError(CaptureError):
    """A step depends on the value of a tensor, so it is not one graph; `line` is the user's."""

    def __init__(self, message: str, *, line: str) -> None:
        super().__init__(message)
        self.line = line

    @property
    def why(self) -> str:
        return f"{self.line}: the step depends on the value of a tensor"


class WrongFakesError(CaptureError):
    """Fake kernels returned other results than the real ones do; `corrections` has these, by the key of the call."""

    def __init__(self, message: str, *, corrections: Mapping[str, Mapping[int, object]]) -> None:
        super().__init__(message)
        self.corrections = corrections


class UnsupportedStepError(MemfitError, RuntimeError):
    """The step contains something that memfit does not plan: tensor parallelism, retain_graph, a second backward."""


class NoGraphError(UnsupportedStepError):
    """The step's Python code does what a graph cannot repeat; `memfit.fit` runs it under `memfit.checkpoint`.

    Args:
        why: no graph can be made of it.
        advice: what to change, so that one can.
    """

    line: str | None = None

    def __init__(self, why: str, advice: str) -> None:
        super().__init__(f"{why}; {advice}")
        self.why = why

    def __reduce__(self) -> tuple[type[UnsupportedStepError], tuple[str]]:
        return UnsupportedStepError, (str(self),)


class NotOneGraphError(UnsupportedStepError):
    """The calls of a model cannot be planned as one graph: PyTorch's compiler breaks it, or it runs collectives."""


class RankError(MemfitError, RuntimeError):
    """Another rank failed, or does not answer, or does something else than this one; names the rank."""


class NoPlanError(MemfitError, RuntimeError):
    """No plan was found.

    Attributes:
        least_budget_found_bytes: the least budget for which a plan was found; None if there was none.
        least_budget_bound_bytes: no plan fits a smaller budget.
        unused_bytes: that the allocator is predicted to leave unused beside the plan for the former.
    """

    unused_bytes = 0

    def __init__(self, message: str, *, least_budget_found_bytes: int | None, least_budget_bound_bytes: int) -> None:
        super().__init__(message)
        self.least_budget_found_bytes = least_budget_found_bytes
        self.least_budget_bound_bytes = least_budget_bound_bytes


class InfeasibleBudgetError(NoPlanError):
    """A bound proves that no plan fits the budget."""

    exit_status = 3


class OverBudgetError(MemfitError, RuntimeError):
    """A call or a step does not fit, and nothing is left that could be freed; in eager mode, names the line."""

    exit_status = 3


class BudgetNotHeldError(OverBudgetError):
    """A planned step took more than its budget, and no other plan helps; `over_bytes` says by how much."""

    def __init__(self, message: str, *, over_bytes: int) -> None:
        super().__init__(message)
        self.over_bytes = over_bytes


class VerificationError(MemfitError, RuntimeError):
    """A planned step and the unplanned one differ; names the first differing tensor."""

    exit_status = 4


class TimeLimitError(NoPlanError):
    """The planner found no plan that fits, in its time or among all of its plans; nothing proves that there is none."""

    exit_status = 5
