"""`memfit checkpoint`: the policy of checkpoints that keeps a training loop within a budget, without the loop."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from memfit.commands import options
from memfit.commands.answer import Answer, rows_table
from memfit.commands.targets import require_step, resolve
from memfit.commands.work import working
from memfit.errors import InvalidOptionError
from memfit.memory.contract import FIRM
from memfit.report.formatting import seconds_text
from memfit.system.budget import format_bytes
from memfit.system.files import require_writable, write_atomically

if TYPE_CHECKING:
    from memfit.capture.training_step import TrainingStep
    from memfit.checkpointing.reporting import Report
    from memfit.doors.checkpoint import Checkpointed

EXAMPLES = """
Examples:

memfit checkpoint gpt2 --budget 60% --save policy.json

memfit checkpoint train.py:make_step --budget 6GiB --steps 20

memfit checkpoint unet --set size=64 --budget 300MB --blocks "ups.*" --blocks "downs.*" --json
"""

_LEAST_STEPS = 3


def checkpoint(
    target: options.StepTarget,
    budget: options.Budget,
    steps: Annotated[int, typer.Option("--steps", metavar="N", min=1, help="Steps to run, so that plans settle.")] = 12,
    blocks: Annotated[
        list[str] | None,
        typer.Option("--blocks", metavar="PATTERN", help="Names of the blocks, such as 'layers.*'; may be repeated."),
    ] = None,
    host_budget: Annotated[
        str | None,
        typer.Option(
            "--host-budget",
            metavar="SIZE",
            help="The bytes that inputs of blocks may take on the host: pinned memory for a model on a GPU, a file in "
            "the system's temporary directory for one on a CPU.",
        ),
    ] = None,
    budget_is: Annotated[
        str,
        typer.Option(
            "--budget-is",
            metavar="firm|soft",
            help="firm: a step that takes more than the budget, with as little kept as can be, is an error; soft: a "
            "warning.",
        ),
    ] = FIRM,
    set_: options.WorkloadOptions = None,
    save: Annotated[
        Path | None, typer.Option("--save", "-s", metavar="POLICY", help="Write the policy to this file (JSON).")
    ] = None,
) -> Answer:
    """Train TARGET for some steps under torch's own checkpoints within a budget, and show what is kept.

    The policy is for `memfit.checkpoint(model, policy="policy.json")` in the loop.
    """
    require_writable(save)
    of_workload = options.read_settings(set_, "--set")
    if steps < _LEAST_STEPS:
        raise InvalidOptionError(f"--steps is {steps}, expected at least {_LEAST_STEPS}: the first ones only measure")
    with working() as work:
        refusal = f"{target} is a graph file, which has no model; use `memfit plan`"
        step = require_step(resolve(target, of_workload), refusal)
        from memfit.doors.checkpoint import checkpoint as checkpointed

        with checkpointed(step.model, budget, blocks=blocks, host_budget=host_budget, budget_is=budget_is) as handle:
            work.stage(f"training for {steps} steps")
            _train(step, handle, steps, work.stop_if_interrupted)
            policy, found = handle.policy(), handle.report()
            device = str(next(step.model.parameters()).device)
    if save:
        write_policy(policy, save)
    return _answer(target, device, policy, found, save)


def write_policy(policy: dict[str, Any], path: Path) -> None:
    """Write a policy as the JSON that `memfit.checkpoint` reads.

    Args:
        policy: from a handle or a step.
        path: where it is written.

    Raises:
        InvalidFileError: the file cannot be written.
    """
    write_atomically(path, msgspec.json.format(msgspec.json.encode(policy), indent=1) + b"\n")


def _train(step: TrainingStep, handle: Checkpointed, steps: int, stop_if_interrupted: Any) -> None:
    if step.optimizer is None:
        handle.expect_no_optimizer()
    for _ in range(steps):
        step.run_eager(step.batch)
        if step.optimizer is None:
            step.model.zero_grad(set_to_none=True)
        stop_if_interrupted()
    handle.end_step()


def _blocks_text(blocks: Sequence[str]) -> str:
    if not blocks:
        return "none found, so that nothing is recomputed; name them with --blocks"
    return f"{len(blocks)}, from {blocks[0]} to {blocks[-1]}"


def _answer(target: str, device: str, policy: dict[str, Any], found: Report, save: Path | None) -> Answer:
    size = found.sizes[0]
    last = found.windows[-1]
    keys = {
        "budget_bytes": found.budget_bytes,
        "policy": policy,
        "blocks": list(found.blocks),
        "steps": found.count,
        "steps_over_budget": found.over,
        "plans": size.plans,
        "predicted": {"peak_bytes": size.planned.predicted_bytes, "recomputed_seconds": size.planned.seconds},
        "measured": {"peak_bytes": last.taken_bytes, "most_bytes": found.most_bytes},
        "bounds": {"recomputed_seconds": size.planned.bound_seconds},
    }
    rows = {
        "budget": "-" if found.budget_bytes is None else format_bytes(found.budget_bytes),
        "blocks": _blocks_text(found.blocks),
        "kept": size.kinds_text(),
        "peak": f"{format_bytes(last.taken_bytes)} measured, {format_bytes(size.planned.predicted_bytes)} predicted",
        "recomputed": f"{seconds_text(size.planned.seconds)} of each step (predicted)",
        "most in": size.planned.peak_is_in,
        "steps": f"{found.count}, {found.over} of them over budget",
        **({"policy file": str(save)} if save else {}),
    }
    return Answer(target=target, device=device, keys=keys, parts=(rows_table(rows),))
