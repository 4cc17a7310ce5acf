"""Every error memfit raises on purpose. Each message says what is wrong, in which object, expected and got, what to do.

The command line turns an error into one line on standard error and exits with `exit_status` (DESIGN.md, section 6).
"""

from __future__ import annotations


class MemfitError(Exception):
    """Base of all errors that memfit raises on purpose; catch this one to catch them all."""

    exit_status = 2


class InvalidTargetError(MemfitError, ValueError):
    """The target does not exist, or does not give a training step."""


class InvalidBudgetError(MemfitError, ValueError):
    """The budget is not a positive number of bytes that memfit can read."""


class InvalidGraphError(MemfitError, ValueError):
    """A graph breaks a rule of `memfit.graph`: a dangling id, a read before its write, a negative size."""


class InvalidScheduleError(MemfitError, ValueError):
    """A schedule cannot be carried out on its graph; the message names the instruction and the storage."""


class InvalidBlocksError(MemfitError, ValueError):
    """Blocks to be packed are not blocks: an empty live range, a size below 1, an id twice."""


class InvalidLayoutError(MemfitError, ValueError):
    """A layout puts two live blocks over each other, or says more than is true; the message names the blocks."""


class InvalidFileError(MemfitError, ValueError):
    """A file cannot be read as what it should be; the message names the file and the place in it."""


class InvalidOptionError(MemfitError, ValueError):
    """An option has a value, or a name, that does not exist."""


class InvalidDeviceError(MemfitError, ValueError):
    """No device profile of that name or file exists, or tensors sit on the wrong device."""


class PlanMismatchError(MemfitError, ValueError):
    """A plan was made for another graph, another torch or another device than the one at hand."""


class CaptureError(MemfitError, RuntimeError):
    """A training step cannot be captured as a graph; the message names the user's line."""


class GraphBreakError(CaptureError):
    """A step looks at the value of a tensor, so that it is not one graph; `line` is the user's."""

    def __init__(self, message: str, *, line: str) -> None:
        super().__init__(message)
        self.line = line


class UnsupportedStepError(MemfitError, RuntimeError):
    """The step asks for something memfit refuses to plan: DDP or FSDP, retain_graph, a second backward."""


class InfeasibleBudgetError(MemfitError, RuntimeError):
    """No plan fits the budget; carries the least budget found by a plan and the least proved for any."""

    exit_status = 3

    def __init__(self, message: str, *, least_budget_found_bytes: int | None, least_budget_bound_bytes: int) -> None:
        super().__init__(message)
        self.least_budget_found_bytes = least_budget_found_bytes
        self.least_budget_bound_bytes = least_budget_bound_bytes


class VerificationError(MemfitError, RuntimeError):
    """A planned step and the unplanned one differ; names the first differing tensor."""

    exit_status = 4


class TimeLimitError(MemfitError, RuntimeError):
    """Time was up before any plan was found."""

    exit_status = 5
