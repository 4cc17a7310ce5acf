"""`memfit fit`: plan, run, verify and measure."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import RenderableType
from rich.text import Text

from memfit.budget import format_bytes, parse_budget
from memfit.commands import options
from memfit.commands.answer import Answer, columns_table, deliver, rows_table
from memfit.commands.planning import (
    Search,
    bounds_of,
    host_of,
    load_target,
    make_search,
    write_report,
)
from memfit.commands.work import Work, working
from memfit.errors import InvalidOptionError, InvalidTargetError, VerificationError
from memfit.graph import Graph
from memfit.plan import Plan, Prediction
from memfit.report import Measured
from memfit.report.words import change_text, seconds_text

if TYPE_CHECKING:
    from memfit.capture.training_step import TrainingStep
    from memfit.runtime.fit import Correction, PlannedStep
    from memfit.runtime.measure import Measurement
    from memfit.runtime.parts import PartlyPlannedStep

EXAMPLES = """
Examples:

memfit fit resnet50 --budget 60%

memfit fit train.py:make_step --budget 6GiB --report step.html

memfit fit gpt2 --set batch=2 --set layers=6 --budget 500MB --json

memfit fit resnet50 --plan resnet50.plan.json
"""

# What holds for one graph of a step, and not for all together; a bound on the budget of one is a bound for all.
_UNKNOWN_FOR_PARTS = {"least_budget_found_bytes": None, "overhead": 0.0, "overhead_in_order": None}


def fit(
    target: options.Target,
    budget: options.OptionalBudget = None,
    plan: Annotated[
        Path | None,
        typer.Option("--plan", metavar="PLAN", show_default=False, help="Use this plan instead of searching one."),
    ] = None,
    host_budget: options.HostBudget = None,
    planner: options.Planner = "auto",
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
    search = make_search(planner, option, time_limit, seed, host_budget)
    with working() as work:
        step = _step(target, load_target(target, settings))
        planned = _plan(step, given if given else str(budget), search, device_profile, work)
        work.keep(planned.plan, save)
        work.stop_if_interrupted()
        fitted = _run(planned, repeats, work)
        if fitted.corrections:
            work.keep(fitted.plan, save)
        if report:
            write_report(fitted.plan, report, curve, search, work, fitted.measured)
    return deliver(_answer(target, fitted, save, report), as_json=as_json)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """What came out: the plan, or of a step in several graphs the one with the highest peak, and the measurement.

    `prediction` is None for a step in several graphs: nothing predicts them together. `corrections` say that the plan
    is a second one, made after the first step of the first one had taken more than the budget.
    """

    plan: Plan
    budget_bytes: int
    plan_seconds: float
    prediction: Prediction | None
    measurement: Measurement
    corrections: tuple[Correction, ...] = ()

    @property
    def measured(self) -> Measured:
        """The measurement as the report takes it."""
        return Measured(
            peak_bytes=self.measurement.peak_bytes,
            step_seconds=self.measurement.step_seconds,
            baseline_peak_bytes=self.measurement.baseline_peak_bytes,
            baseline_step_seconds=self.measurement.baseline_step_seconds,
            overhead=self.measurement.overhead,
            bitwise_equal=True,
            machine=f"{self.plan.device.name}, torch {self.plan.versions.get('torch', 'unknown')}",
            note=" ".join(_sentence(correction) for correction in self.corrections),
        )


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


def _plan(
    step: TrainingStep, given: Plan | str, search: Search, device_profile: str | None, work: Work
) -> PlannedStep | PartlyPlannedStep:
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
        options=search.options,
        time_limit_seconds=search.time_limit_seconds,
        seed=search.seed,
        host_budget_bytes=search.host_budget_bytes,
        device=load_device(device_profile) if device_profile else None,
        on_stage=on_stage,
        progress=work.on_search,
    )
    return fit_step(step, settings, plan=given if isinstance(given, Plan) else None)


def _run(planned: PlannedStep | PartlyPlannedStep, repeats: int, work: Work) -> Fitted:
    """Run the planned step beside eager.

    Raises:
        VerificationError: the bits differ, or the measured peak is over the budget.
    """
    from memfit.runtime.parts import PartlyPlannedStep

    work.stage("verifying against eager, bit by bit")
    planned.verify()
    in_parts = isinstance(planned, PartlyPlannedStep)
    corrections = () if in_parts else tuple(planned.corrections)
    if corrections:
        work.stage("verifying the corrected plan, bit by bit")
        planned.verify()
    work.stage("measuring eager and planned steps")
    measurement = planned.measure(repeats=repeats)
    plan = planned.plan
    # The user's: a corrected plan was made for less.
    budget_bytes = parse_budget(planned.settings.budget, plan.unplanned.peak_bytes)
    if measurement.peak_bytes > budget_bytes:
        raise VerificationError(
            f"the measured peak is {measurement.peak_bytes} bytes, the budget is {budget_bytes} bytes and the "
            f"prediction was {plan.predicted.peak_bytes} bytes; lower the budget by the difference"
        )
    return Fitted(
        plan=plan,
        budget_bytes=budget_bytes,
        plan_seconds=sum(part.plan_seconds for part in planned.plans),
        prediction=None if in_parts else plan.predicted,
        measurement=measurement,
        corrections=corrections,
    )


def _sentence(correction: Correction) -> str:
    words = str(correction)
    return f"{words[0].upper()}{words[1:]}."


def _answer(target: str, fitted: Fitted, save: Path | None, report: Path | None) -> Answer:
    plan, prediction, measurement = fitted.plan, fitted.prediction, fitted.measurement
    baseline = {"peak_bytes": measurement.baseline_peak_bytes, "step_seconds": measurement.baseline_step_seconds}
    measured = {"peak_bytes": measurement.peak_bytes, "step_seconds": measurement.step_seconds}
    predicted = {
        "peak_bytes": prediction.peak_bytes if prediction else None,
        "step_seconds": prediction.seconds if prediction else None,
    }
    keys: dict[str, Any] = {
        "budget_bytes": fitted.budget_bytes,
        "resident_bytes": measurement.resident_bytes,
        "planner": plan.planner,
        "status": plan.status,
        "plan_seconds": fitted.plan_seconds,
        "baseline": baseline,
        "predicted": predicted,
        "measured": measured,
        "overhead": measurement.overhead,
        "bitwise_equal": True,
        **host_of(plan),
        "bounds": bounds_of(plan) if prediction else {**bounds_of(plan), **_UNKNOWN_FOR_PARTS},
    }
    if fitted.corrections:
        keys["corrections"] = [asdict(correction) for correction in fitted.corrections]
    return Answer(target=target, device=plan.device.name, keys=keys, parts=_parts(fitted, keys, save, report))


def _parts(fitted: Fitted, keys: dict[str, Any], save: Path | None, report: Path | None) -> tuple[RenderableType, ...]:
    resident = format_bytes(keys["resident_bytes"])
    whole = "" if fitted.prediction else ", of the part with the highest peak"
    rows = {
        "budget": f"{format_bytes(fitted.budget_bytes)}, {resident} of it resident",
        "same bits as eager": "loss, gradients, parameters, buffers, optimizer state, generators",
        "overhead": f"{change_text(keys['overhead'])} (measured, against eager)",
        "plan": f"by planner {fitted.plan.planner} in {seconds_text(fitted.plan_seconds)}: {fitted.plan.status}",
        **({"corrected": " ".join(map(_sentence, fitted.corrections))} if fitted.corrections else {}),
        **({f"plan file{whole}": str(save)} if save else {}),
        **({f"report{whole}": str(report)} if report else {}),
    }
    sides = (keys["baseline"], keys["measured"], keys["predicted"])
    peaks = ["peak", *("-" if s["peak_bytes"] is None else format_bytes(s["peak_bytes"]) for s in sides)]
    seconds = ["step", *("-" if s["step_seconds"] is None else seconds_text(s["step_seconds"]) for s in sides)]
    columns = ("", "eager, measured", "planned, measured", "planned, predicted")
    return rows_table(rows), Text(), columns_table(columns, [tuple(peaks), tuple(seconds)])
