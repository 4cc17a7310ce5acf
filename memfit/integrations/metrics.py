"""What steps take, as numbers for TensorBoard, Weights & Biases, MLflow, and the loggers of training libraries."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from memfit.checkpointing.handle import Checkpointed
from memfit.checkpointing.reporting import Report
from memfit.checkpointing.step import CheckpointedStep
from memfit.dynamo.model import PlannedCalls
from memfit.eager_mode.eager import Eager
from memfit.errors import InvalidTargetError
from memfit.integrations.held import HeldModel, Reporting
from memfit.step.planned_step import PlannedStep
from memfit.torch_private.modules import own_call

_PREFIX = "memfit/"
_WHERE = "memfit.integrations.metrics"


class Metrics:
    """Writes what the latest step took to a logger: call it after each step, or after every tenth.

        >>> import torch, memfit
        >>> from memfit.integrations.metrics import Metrics
        >>> blocks = [torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.ReLU()) for _ in range(4)]
        >>> model = torch.nn.Sequential(*blocks)
        >>> handle = memfit.checkpoint(model, budget="1MiB")
        >>> metrics = Metrics(handle, lambda numbers, step: print(step, sorted(numbers)[:2]))
        >>> model(torch.randn(64, 32)).sum().backward()
        >>> handle.end_step()
        >>> metrics(1)
        1 ['memfit/budget_bytes', 'memfit/most_bytes']
        >>> handle.close()

    Args:
        held: a planned step, the handle of `memfit.checkpoint`, the block of `memfit.eager`, a model of
            `memfit.compile`, a `MemfitCallback`, or one of `accelerator.memfit`.
        writer: a `SummaryWriter`, the module `wandb` or a run of it, the module `mlflow`, a logger of Lightning, an
            Accelerator, or a function of a dictionary and the number of the step.

    Raises:
        InvalidTargetError: none of these.
    """

    def __init__(self, held: Any, writer: Any) -> None:
        if not isinstance(held, Reporting | HeldModel):  # whose model comes later
            figures(held)
        self._held, self._write = held, _writing(writer)
        self._last: tuple[int, float] | None = None  # the number of the step that was written last, and when

    def __call__(self, step: int) -> None:
        """Write the figures under the number of a step, once; `step_seconds` is wall time since the last, by step."""
        now, last = time.perf_counter(), self._last
        if last is not None and step == last[0]:  # micro-batches of one step
            return
        self._last = step, now
        numbers = figures(self._held)
        if last is not None and step > last[0]:
            numbers["step_seconds"] = (now - last[1]) / (step - last[0])
        self._write({f"{_PREFIX}{name}": value for name, value in numbers.items()}, step)


def figures(held: Any) -> dict[str, float]:
    """Return what the steps of a held model took so far, by name; sizes in bytes, `overhead` as a share.

    `peak_bytes` is of the latest step that was measured, `most_bytes` of any, `over` counts those above the budget.

    Args:
        held: as for `Metrics`.

    Raises:
        InvalidTargetError: something else.
    """
    if isinstance(held, Reporting):
        held = held.held
    if isinstance(held, HeldModel):
        report = held.report()
        return {"most_bytes": held.most_bytes} if report is None else _of_report(report)
    if isinstance(held, Checkpointed | CheckpointedStep | Eager):
        return _of_report(held.report())
    if isinstance(held, PlannedStep):
        return {
            "budget_bytes": held.budget_bytes,
            "peak_bytes": held.taken_bytes,
            "predicted_bytes": held.plan.predicted.peak_bytes,
            "corrections": len(held.corrections),
            "plans": len(held.plans),
            "overhead": held.plan.overhead,
        }
    call = own_call(held) if hasattr(held, "forward") else held
    if isinstance(call, PlannedCalls):
        account = call.account
        return {
            "budget_bytes": account.budget_bytes,
            "most_bytes": account.most_bytes,
            "plans": len(call.plans),
        }
    raise InvalidTargetError(
        f"{_WHERE}: a {type(held).__name__} is held by no door of memfit; give the planned step, the handle of "
        "memfit.checkpoint, the block of memfit.eager, the compiled model, or a MemfitCallback"
    )


def _of_report(report: Any) -> dict[str, float]:
    if not isinstance(report, Report):
        return {
            "budget_bytes": report.budget_bytes,
            "most_bytes": report.peak_bytes,
            "passes": report.passes,
            "recomputed_calls": report.made_again,
            "recomputed_seconds": report.again_seconds,
            "to_host_bytes": report.to_host_bytes,
        }
    latest = report.windows[-1] if report.windows else None
    return {
        **({} if report.budget_bytes is None else {"budget_bytes": report.budget_bytes}),
        **({} if latest is None else {"peak_bytes": latest.taken_bytes}),
        **({} if latest is None or latest.predicted_bytes is None else {"predicted_bytes": latest.predicted_bytes}),
        "most_bytes": report.most_bytes,
        "steps": report.count,
        "over": report.over,
        "recomputed_seconds": max((size.planned.seconds for size in report.sizes), default=0.0),
    }


def _writing(writer: Any) -> Callable[[Mapping[str, float], int], None]:
    """Return what writes a dictionary of numbers under the number of a step."""
    if hasattr(writer, "add_scalar"):  # TensorBoard

        def write(numbers: Mapping[str, float], step: int) -> None:
            for name, value in numbers.items():
                writer.add_scalar(name, value, step)

        return write
    if hasattr(writer, "log_metrics"):  # MLflow, Lightning
        return lambda numbers, step: writer.log_metrics(dict(numbers), step=step)
    if hasattr(writer, "log"):  # Weights & Biases, Accelerate
        return lambda numbers, step: writer.log(dict(numbers), step=step)
    if callable(writer):
        return writer
    raise InvalidTargetError(
        f"{_WHERE}: writer is a {type(writer).__name__}, expected a SummaryWriter, wandb, mlflow, a logger of "
        "Lightning, an Accelerator, or a function of a dictionary and the number of the step"
    )
