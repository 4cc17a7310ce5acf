"""`memfit fit`: plan, run, verify and measure."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from memfit.budget import format_bytes
from memfit.commands import options
from memfit.commands.answer import Answer, columns_table, deliver, rows_table
from memfit.commands.planning import (
    Search,
    bounds_of,
    load_target,
    make_search,
    typed_options,
    write_report,
)
from memfit.commands.work import Work, working
from memfit.errors import InvalidOptionError, InvalidTargetError, VerificationError
from memfit.graph import Graph
from memfit.plan import Plan
from memfit.report import Measured
from memfit.report.words import change_text, seconds_text

if TYPE_CHECKING:
    from memfit.capture.training_step import TrainingStep
    from memfit.runtime.fit import PlannedStep
    from memfit.runtime.measure import Measurement

EXAMPLES = """
Examples:

memfit fit resnet50 --budget 60%

memfit fit train.py:make_step --budget 6GiB --report step.html

memfit fit gpt2 --set batch=2 --set layers=6 --budget 500MB --json

memfit fit resnet50 --plan resnet50.plan.json
"""


def fit(
    target: options.Target,
    budget: options.OptionalBudget = None,
    plan: Annotated[
        Path | None,
        typer.Option("--plan", metavar="PLAN", show_default=False, help="Use this plan instead of searching one."),
    ] = None,
    planner: options.Planner = "search",
    option: options.PlannerOptions = None,
    time_limit: options.TimeLimit = 5.0,
    seed: options.Seed = 0,
    set_: options.Settings = None,
    device_profile: options.DeviceProfile = None,
    save: options.Save = None,
    report: options.Report = None,
    curve: options.CurvePoints = 10,
    repeats: Annotated[int, typer.Option("--repeats", metavar="N", help="Steps to measure; medians are shown.")] = 3,
    as_json: options.Json = False,
) -> int:
    """Plan TARGET within a budget, run it, prove that its results are the same bits as eager's, and measure both."""
    options.require_writable(save, report)
    options.require_count(curve, "--curve")
    options.require_count(repeats, "--repeats", least=1)
    given = _given_plan(budget, plan)
    settings = options.read_settings(set_, "--set")
    search = make_search(planner, option, time_limit, seed)
    with working() as work:
        step = _step(target, load_target(target, settings))
        planned = _plan(step, given if given else str(budget), search, device_profile, work)
        work.keep(planned.plan, save)
        work.stop_if_interrupted()
        measurement = _run(planned, repeats, work)
        if report:
            measured = _measured(planned, measurement)
            write_report(planned.plan, report, curve, search, work, measured)
    return deliver(_answer(target, planned.plan, measurement, save, report), as_json=as_json)


def _given_plan(budget: str | None, plan: Path | None) -> Plan | None:
    if (budget is None) == (plan is None):
        raise InvalidOptionError("give either --budget or --plan: a plan has a budget of its own")
    if budget is not None:
        options.require_budget(budget)
    return Plan.load(plan) if plan else None


def _step(target: str, resolved: TrainingStep | Graph) -> TrainingStep:
    if isinstance(resolved, Graph):
        raise InvalidTargetError(f"{target} is a graph file, which can be planned but not run; use `memfit plan`")
    return resolved


def _plan(step: TrainingStep, given: Plan | str, search: Search, device_profile: str | None, work: Work) -> PlannedStep:
    """Return the planned step, by the plan that is given or by one within the budget that is given."""
    from memfit.device_profiles import load_device
    from memfit.runtime.fit import fit_step
    from memfit.runtime.planning import Settings

    def on_stage(title: str) -> None:
        searching = title == "searching a plan"
        work.stage(title, expected_seconds=search.time_limit_seconds if searching else None)

    settings = Settings(
        budget=given.budget_bytes if isinstance(given, Plan) else given,
        planner=search.planner,
        options=typed_options(search),
        time_limit_seconds=search.time_limit_seconds,
        seed=search.seed,
        device=load_device(device_profile) if device_profile else None,
        on_stage=on_stage,
        progress=work.on_search,
    )
    return fit_step(step, settings, plan=given if isinstance(given, Plan) else None)


def _run(planned: PlannedStep, repeats: int, work: Work) -> Measurement:
    """Run the planned step beside eager.

    Raises:
        VerificationError: the bits differ, or the measured peak is over the budget.
    """
    work.stage("verifying against eager, bit by bit")
    planned.verify()
    work.stage("measuring eager and planned steps")
    measurement = planned.measure(repeats=repeats)
    if measurement.peak_bytes > planned.plan.budget_bytes:
        raise VerificationError(
            f"the measured peak is {measurement.peak_bytes} bytes, the budget is {planned.plan.budget_bytes} bytes and "
            f"the prediction was {planned.plan.predicted.peak_bytes} bytes; lower the budget by the difference"
        )
    return measurement


def _measured(planned: PlannedStep, measurement: Measurement) -> Measured:
    return Measured(
        peak_bytes=measurement.peak_bytes,
        step_seconds=measurement.step_seconds,
        baseline_peak_bytes=measurement.baseline_peak_bytes,
        baseline_step_seconds=measurement.baseline_step_seconds,
        bitwise_equal=True,
        machine=f"{planned.plan.device.name}, torch {planned.plan.versions.get('torch', 'unknown')}",
    )


def _answer(target: str, plan: Plan, measurement: Measurement, save: Path | None, report: Path | None) -> Answer:
    predicted, baseline = plan.predicted, measurement
    keys: dict[str, Any] = {
        "budget_bytes": plan.budget_bytes,
        "resident_bytes": measurement.resident_bytes,
        "planner": plan.planner,
        "status": plan.status,
        "plan_seconds": plan.plan_seconds,
        "baseline": {"peak_bytes": baseline.baseline_peak_bytes, "step_seconds": baseline.baseline_step_seconds},
        "predicted": {"peak_bytes": predicted.peak_bytes, "step_seconds": predicted.seconds},
        "measured": {"peak_bytes": measurement.peak_bytes, "step_seconds": measurement.step_seconds},
        "overhead": measurement.overhead,
        "bitwise_equal": True,
        "bounds": bounds_of(plan),
    }
    rows = {
        "budget": f"{format_bytes(plan.budget_bytes)}, {format_bytes(measurement.resident_bytes)} of it resident",
        "same bits as eager": "loss, gradients, parameters, buffers, optimizer state, generators",
        "overhead": f"{change_text(measurement.overhead)} (measured, against eager)",
        "plan": f"by planner {plan.planner} in {seconds_text(plan.plan_seconds)}: {plan.status}",
        **({"plan file": str(save)} if save else {}),
        **({"report": str(report)} if report else {}),
    }
    columns = ("", "eager, measured", "planned, measured", "planned, predicted")
    peaks = (measurement.baseline_peak_bytes, measurement.peak_bytes, predicted.peak_bytes)
    seconds = (measurement.baseline_step_seconds, measurement.step_seconds, predicted.seconds)
    figures = columns_table(columns, [("peak", *map(format_bytes, peaks)), ("step", *map(seconds_text, seconds))])
    return Answer(target=target, device=plan.device.name, keys=keys, parts=(rows_table(rows), Text(), figures))
