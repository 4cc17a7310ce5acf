"""`fit`: plan a training step within a budget of bytes, of whatever kind the step is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Unpack

import torch

from memfit.capture import TrainingStep
from memfit.capture.fully_sharded import across_ranks
from memfit.capture.placement import step_device
from memfit.capture.step_check import check_step
from memfit.checkpointing.step import CheckpointedStep
from memfit.cost.calibration import card_of
from memfit.doors.step import fit_step
from memfit.dynamo.inductor_step import InductorStep, refuse_with_inductor
from memfit.dynamo.settings import INDUCTOR, read_kernels
from memfit.options import FitOptions, require_options, settings_from
from memfit.plan import Plan
from memfit.step.distributed.sharding import sharded
from memfit.step.planned_step import PlannedStep


def fit(
    model: torch.nn.Module,
    loss: Callable[..., torch.Tensor],
    batch: Any,
    *,
    budget: str | int,
    optimizer: torch.optim.Optimizer | None = None,
    clip_norm: float | None = None,
    scaler: torch.amp.GradScaler | None = None,
    plan: Plan | Path | str | None = None,
    verify: bool = False,
    process_group: torch.distributed.ProcessGroup | None = None,
    shard: bool = False,
    kernels: str = "eager",
    chunk_loss: bool | str = False,
    **options: Unpack[FitOptions],
) -> PlannedStep | CheckpointedStep | InductorStep:
    """Plan a training step within `budget` and return it, ready to be called with batches.

        >>> import torch, memfit
        >>> def loss(model, batch):
        ...     inputs, labels = batch
        ...     return torch.nn.functional.cross_entropy(model(inputs), labels)
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.ReLU(), torch.nn.Linear(64, 2))
        >>> batch = torch.randn(32, 8), torch.randint(0, 2, (32,))
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> step = memfit.fit(model, loss, batch, optimizer=optimizer, budget="1MiB")
        >>> loss_value = step(batch)

    Args:
        model: see `TrainingStep`, also for the next two arguments.
        loss: of the model and a batch.
        batch: an example of the later batches.
        budget: the bytes that the step may use on its device, everything included: `"6GiB"`, `"60%"` of the peak of the
            step as it is written, with checkpointed regions (of the measured eager peak, if the step depends on a
            tensor's value), `"90% of the card"`, or an integer.
        optimizer: see `TrainingStep`, also for the next two arguments.
        clip_norm: the largest global norm of the gradients of the optimizer's parameters.
        scaler: scales the loss and guards the update.
        plan: a plan made before (or its file), used instead of searching.
        verify: run a planned and an eager step from the same state, and another pair from changed parameters, and raise
            at the first tensor that differs.
        process_group: the ranks that train the model together, each on its own batches: gradients are averaged as
            DistributedDataParallel does. All ranks call `fit` and the step at the same time. A model that is wrapped in
            DistributedDataParallel brings its group along, and so does one that `fully_shard` (FSDP2) was applied to.
        shard: shard a bare model over `process_group` as `fully_shard` does: each of its repeated blocks, and the rest
            of it, is gathered when it is used, as often as the plan says. Each rank keeps a part of the parameters
            (DTensors from now on), of the gradients and of the optimizer's state.
        kernels: `"eager"`: those that eager calls, to the bit; `"inductor"`: generated, as `torch.compile` does, for
            forward, loss and backward. Such a step is compiled and planned when it is first called.
        chunk_loss: compute the logits of the model's head, and what the loss makes of them, some rows at a time, so
            that they are never whole: True finds the head, or name it. Last bits differ.
        options: how plans are searched and steps are run: `planner`, `time_limit_seconds`, `host_budget`, `arena`,
            `budget_is` and more; see `memfit.options.FitOptions`.

    Raises:
        InvalidOptionError: an option that does not exist, or a value that it cannot have.
        InfeasibleBudgetError: no plan fits. The error has the least budget found and the least that any plan could
            reach.
        TimeLimitError: the planner found no plan that fits, and nothing proves that there is none.
        CaptureError: the step cannot be captured, or the captured step differs from the one that eager runs; the
            message names the user's line.
        VerificationError: the planned step's bits differ from eager's; the message names the first differing tensor.
        HostMemoryError: the host, or the disk, has no room for what the plan offloads; or a copy failed during a step.
        BudgetNotHeldError: a step took more than a firm budget, and no other plan helps; raised after the step.
        RankError: another rank failed, or has another model, batch or setting.
        ArenaUnavailableError: an arena is asked for, and there can be none on this machine, for example without a C++
            compiler.
        MemfitError: any other bad input; each message says what to do.

    Guarantees: outputs, gradients, buffers and random streams are those of the unplanned step, wherever kernels are
    deterministic. A step whose Python code does what a graph cannot repeat (it depends on a tensor's value, draws from
    Python's generators, counts) runs under `memfit.checkpoint`, and a warning says why. With an optimizer every `.grad`
    is None after the step; without one gradients are added to `.grad`.
    """
    require_options(options, FitOptions, "memfit.fit")
    settings = settings_from(budget, options)
    if shard:
        model = sharded(model, process_group, optimizer)
    bare, across = across_ranks(model, process_group)
    step = TrainingStep(
        model=bare,
        loss=loss,
        batch=batch,
        optimizer=optimizer,
        clip_norm=clip_norm,
        scaler=scaler,
        across=across,
        chunk_loss=chunk_loss,
    )
    check_step(step, "memfit.fit")
    settings = settings.on_card(lambda: card_of(step_device(step.model, step.batch)))
    if read_kernels(kernels) == INDUCTOR:
        refuse_with_inductor(
            settings, plan=plan, verify=verify, process_group=across is not None, chunk_loss=bool(chunk_loss)
        )
        return InductorStep(step, settings)
    return fit_step(step, settings, plan=plan, verify=verify)
