"""`memfit fit`: plan, run, verify and measure."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from rich.table import Table
from rich.text import Text

from memfit.commands import options
from memfit.commands.answer import Answer, columns_table, rows_table
from memfit.commands.checkpoint import write_policy
from memfit.commands.curves import write_report
from memfit.commands.plan_keys import bounds_of, offloads_of, offloads_row
from memfit.commands.targets import require_step, resolve
from memfit.commands.work import Work, working
from memfit.errors import InvalidOptionError, VerificationError
from memfit.memory.contract import FIRM
from memfit.plan import Plan, Status
from memfit.report.formatting import age_text, change_text, count_text, seconds_text
from memfit.report.taken import is_for_gpu, taken_of
from memfit.step.measured import Measured
from memfit.system.budget import format_bytes, parse_budget
from memfit.system.files import require_writable

if TYPE_CHECKING:
    from typing_extensions import TypeIs

    from memfit.checkpointing.step import CheckpointedStep
    from memfit.step.planned_step import PlannedStep

EXAMPLES = """
Examples:

memfit fit resnet50 --budget 60%

memfit fit train.py:make_step --budget 6GiB --report step.html

memfit fit gpt2 --set batch=2 --set layers=6 --budget 500MB --json

memfit fit resnet50 --plan resnet50.plan.json
"""


def fit(
    target: options.Target,
    *,
    budget: options.OptionalBudget = None,
    plan: Annotated[
        Path | None, typer.Option("--plan", metavar="PLAN", help="Use this plan instead of searching one.")
    ] = None,
    budget_is: options.BudgetIs = FIRM,
    hard: options.Hard = False,
    cuda_graph: options.CudaGraph = False,
    chunk_loss: options.ChunkLoss = False,
    search: options.Search,
    set_: options.WorkloadOptions = None,
    device_profile: options.DeviceProfile = None,
    save: options.Save = None,
    report: options.Report = None,
    curve: options.CurvePoints = 10,
    repeats: options.Repeats = None,
) -> Answer:
    """Plan TARGET within a budget, run it, prove that its results are the same bits as eager's, and measure both."""
    require_writable(save, report)
    given = _given_plan(budget, plan)
    asked = search.settings(
        given.budget_bytes if given else str(budget), budget_is=budget_is, hard=hard, cuda_graph=cuda_graph
    )
    of_workload = options.read_settings(set_, "--set")
    with working() as work:
        from memfit.capture.step_check import check_step
        from memfit.cost.device_profiles import load_device
        from memfit.doors.step import fit_step

        settings = replace(work.follow(asked), device=load_device(device_profile) if device_profile else None)
        refusal = f"{target} is a graph file, which can be planned but not run; use `memfit plan`"
        step = require_step(resolve(target, of_workload), refusal)
        if chunk_loss:
            step = replace(step, chunk_loss=True)
            check_step(step, target)
        planned = fit_step(step, settings, plan=given)
        if report and not _is_of_graph(planned):
            raise InvalidOptionError(
                f"{planned.why}: it is no graph, of which --report would draw the plan; leave it out"
            )
        _keep(planned, save, work)
        work.stop_if_interrupted()
        facts, measured = _verified(planned, repeats, work)
        _keep(planned, save, work)
        if report and _is_of_graph(planned):
            shown = replace(planned.noted(measured), bitwise_equal=True)
            write_report(planned.plan, report, curve, settings, work, shown)
    return _answer(target, facts, planned, measured, save, report)


def _is_of_graph(planned: PlannedStep | CheckpointedStep) -> TypeIs[PlannedStep]:
    """Return whether a step was captured as a graph, and has a plan; else it runs under `memfit.checkpoint`."""
    from memfit.step.planned_step import PlannedStep

    return isinstance(planned, PlannedStep)


def _given_plan(budget: str | None, plan: Path | None) -> Plan | None:
    if (budget is None) == (plan is None):
        raise InvalidOptionError("give either --budget or --plan: a plan has a budget of its own")
    return Plan.load(plan) if plan else None


def _keep(planned: PlannedStep | CheckpointedStep, path: Path | None, work: Work) -> None:
    if _is_of_graph(planned):
        work.keep(planned.plan, path)
    elif path is not None:
        write_policy(planned.policy(), path)
        work.kept = path


class Facts(NamedTuple):
    """The facts about a planned step that are printed beside its measurement.

    Attributes:
        device: its name.
        budget_bytes: the user's budget; a corrected plan was made for less.
        predicted: the JSON keys of the prediction.
        keys: the other JSON keys.
        rows: the same as text.
        compared: what has the same bits as eager's.
        by_part: what the budget covers, as text.
    """

    device: str
    budget_bytes: int
    predicted: dict[str, Any]
    keys: dict[str, Any]
    rows: dict[str, str]
    compared: str = "loss, gradients, parameters, buffers, optimizer state, generators"
    by_part: dict[str, str] = {}  # noqa: RUF012 - never changed


def _verified(planned: PlannedStep | CheckpointedStep, repeats: int | None, work: Work) -> tuple[Facts, Measured]:
    """Run the planned step beside eager; return facts about it, and the measurement.

    Raises:
        VerificationError: the bits differ, or the measured peak is over the budget.
    """
    work.stage("verifying against eager, bit by bit")
    planned.verify()
    if planned.corrections:
        work.stage("verifying the corrected plan, bit by bit")
        planned.verify()
    work.stage("measuring eager and planned steps")
    measured = planned.measure(repeats=repeats)
    facts = _of_plan(planned) if _is_of_graph(planned) else _of_checkpoints(planned, measured)
    if measured.peak_bytes > facts.budget_bytes and planned.settings.budget_is == FIRM:
        raise VerificationError(
            f"the measured peak is {measured.peak_bytes} bytes, the budget is {facts.budget_bytes} bytes and the "
            f"prediction was {facts.predicted['peak_bytes']} bytes; lower the budget by the difference"
        )
    return facts, measured


def _of_plan(planned: PlannedStep) -> Facts:
    plan, by, why = planned.plan, planned.memory.by, planned.memory.why
    taken = taken_of(plan, by)
    host = offloads_of([plan], planned.device.type, planned.settings.host_dir)
    seconds = sum(each.plan_seconds for each in planned.plans)
    age = max((each.age_seconds for each in planned.plans if each.age_seconds is not None), default=None)
    is_gpu, corrections = is_for_gpu(plan), planned.corrections
    return Facts(
        device=plan.device.name,
        budget_bytes=parse_budget(planned.settings.budget, plan.unplanned.peak_bytes),
        predicted={
            "peak_bytes": plan.predicted.peak_bytes,
            "step_seconds": plan.predicted.seconds,
            "overhead": plan.overhead,
            **({"reserved_bytes": taken.reserved_bytes} if taken else {}),
        },
        keys={
            "planner": plan.planner,
            "status": plan.status,
            "plan_seconds": seconds,
            "age_seconds": age,
            **host,
            **({"reserved": taken.keys()} if taken else {}),
            **({"memory": {"served_by": by, "why": why}} if is_gpu else {}),
            "bounds": bounds_of(plan.bounds),
            **({"corrections": [asdict(correction) for correction in corrections]} if corrections else {}),
        },
        rows={
            **({"memory from": f"{by}{f': {why}' if why else ''}"} if is_gpu else {}),
            **({"offloaded": offloads_row(host["host"])} if host else {}),
            "plan": f"by planner {plan.planner} in {seconds_text(seconds)}{age_text(age)}: {plan.status}",
            **({"corrected": " ".join(correction.sentence for correction in corrections)} if corrections else {}),
        },
        by_part=taken.rows() if taken else {},
        **({} if planned.step.has_backward else {"compared": "the next state, generators"}),
    )


def _of_checkpoints(planned: CheckpointedStep, measured: Measured) -> Facts:
    size = planned.report().sizes[0]
    return Facts(
        device=str(planned.device),
        budget_bytes=planned.budget_bytes,
        predicted={"peak_bytes": size.planned.predicted_bytes, "step_seconds": None, "overhead": None},
        keys={
            "planner": "checkpoint",
            "status": Status.FEASIBLE,
            "plan_seconds": planned.plan_seconds,
            "why": planned.why,
            "line": planned.line,
            "policy": planned.policy(),
            "bounds": {
                "least_budget_found_bytes": measured.peak_bytes,
                "least_budget_bound_bytes": measured.resident_bytes,
                "overhead": None,
            },
        },
        rows={
            "no graph": f"{planned.why}; the step runs under memfit.checkpoint",
            "kept": size.kinds_text(),
        },
    )


def _answer(
    target: str,
    facts: Facts,
    planned: PlannedStep | CheckpointedStep,
    measured: Measured,
    save: Path | None,
    report: Path | None,
) -> Answer:
    baseline: dict[str, Any] = {
        "peak_bytes": measured.baseline_peak_bytes,
        "step_seconds": measured.baseline_step_seconds,
    }
    run: dict[str, Any] = {
        "peak_bytes": measured.peak_bytes,
        "step_seconds": measured.step_seconds,
        **({} if measured.reserved_bytes is None else {"reserved_bytes": measured.reserved_bytes}),
    }
    if measured.transfers is not None:
        run |= {
            "stall_seconds": measured.transfers.stall_seconds,
            "overlap_seconds": measured.transfers.overlap_seconds,
        }
    keys: dict[str, Any] = {
        "budget_bytes": facts.budget_bytes,
        "resident_bytes": measured.resident_bytes,
        "baseline": baseline,
        "predicted": facts.predicted,
        "measured": run,
        "overhead": measured.overhead,
        "overhead_spread": measured.overhead_spread,
        "turns": measured.turns,
        "bitwise_equal": True,
        **facts.keys,
    }
    rows = {
        "budget": f"{format_bytes(facts.budget_bytes)}, {format_bytes(measured.resident_bytes)} of it resident",
        "same bits as eager": facts.compared,
        "overhead": f"{measured.overhead_text} measured, against eager, in {count_text(measured.turns, 'turn')}",
        **({"note": measured.note} if measured.note else {}),
        **facts.rows,
        **({"plan file" if _is_of_graph(planned) else "policy file": str(save)} if save else {}),
        **({"report": str(report)} if report else {}),
    }
    by_part = (rows_table(facts.by_part), Text()) if facts.by_part else ()
    parts = (rows_table(rows), Text(), *by_part, _sides(baseline, run, facts.predicted, measured.overhead_text))
    return Answer(target=target, device=facts.device, keys=keys, parts=parts)


def _sides(baseline: dict[str, Any], run: dict[str, Any], predicted: dict[str, Any], overhead: str) -> Table:
    """Return eager's, the planned step's and the predicted figures side by side."""
    texts = (("peak", "peak_bytes", format_bytes), ("reserved", "reserved_bytes", format_bytes))
    cells = [
        (name, *("-" if side.get(key) is None else text(side[key]) for side in (baseline, run, predicted)))
        for name, key, text in (*texts, ("step", "step_seconds", seconds_text))
    ]
    foreseen = predicted["overhead"]
    cells.append(("overhead", "-", overhead, "-" if foreseen is None else change_text(foreseen)))
    return columns_table(("", "eager, measured", "planned, measured", "planned, predicted"), cells)
