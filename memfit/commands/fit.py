"""`memfit fit`: plan, run, verify and measure."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import RenderableType
from rich.text import Text

from memfit.commands import options
from memfit.commands.answer import Answer, columns_table, deliver, rows_table
from memfit.commands.curves import write_report
from memfit.commands.plan_keys import bounds_of, offloads_of, offloads_row
from memfit.commands.targets import require_step, resolve
from memfit.commands.without_graph import answer_without_graph, is_of_graph
from memfit.commands.work import Work, working
from memfit.errors import InvalidOptionError, VerificationError
from memfit.plan import Bounds, Plan, Prediction
from memfit.planning import DEFAULT_PLANNER, DEFAULT_TIME_LIMIT_SECONDS, FIRM, Settings
from memfit.report.formatting import change_text, seconds_text
from memfit.report.taken import Taken, is_for_gpu, taken_of
from memfit.simulate.reserved import DEFAULT
from memfit.step.measured import Measured
from memfit.system.budget import format_bytes, parse_budget

if TYPE_CHECKING:
    from memfit.capture.training_step import TrainingStep
    from memfit.checkpointing.step import CheckpointedStep
    from memfit.step.proof import Correction
    from memfit.step.step import PlannedStep

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
        Path | None, typer.Option("--plan", metavar="PLAN", help="Use this plan instead of searching one.")
    ] = None,
    host_budget: options.HostBudget = None,
    host_dir: options.HostDir = None,
    budget_is: options.BudgetIs = FIRM,
    hard: options.Hard = False,
    cuda_graph: options.CudaGraph = False,
    planner: options.Planner = DEFAULT_PLANNER,
    option: options.PlannerOptions = None,
    time_limit: options.TimeLimit = DEFAULT_TIME_LIMIT_SECONDS,
    seed: options.Seed = 0,
    set_: options.WorkloadOptions = None,
    device_profile: options.DeviceProfile = None,
    no_cache: options.NoCache = False,
    save: options.Save = None,
    report: options.Report = None,
    curve: options.CurvePoints = 10,
    repeats: options.Repeats = 3,
    as_json: options.Json = False,
) -> int:
    """Plan TARGET within a budget, run it, prove that its results are the same bits as eager's, and measure both."""
    options.require_writable(save, report)
    given = _given_plan(budget, plan)
    asked = options.plan_settings(
        given.budget_bytes if given else str(budget),
        planner,
        option,
        time_limit,
        seed,
        host_budget=host_budget,
        host_dir=host_dir,
        no_cache=no_cache,
        budget_is=budget_is,
        hard=hard,
        cuda_graph=cuda_graph,
    )
    of_workload = options.read_settings(set_, "--set")
    with working() as work:
        settings = work.follow(asked)
        refusal = f"{target} is a graph file, which can be planned but not run; use `memfit plan`"
        step = require_step(resolve(target, of_workload), refusal)
        planned = _plan(step, given, settings, device_profile)
        if not is_of_graph(planned):
            return deliver(answer_without_graph(target, planned, repeats, work, save, report), as_json=as_json)
        work.keep(planned.plan, save)
        work.stop_if_interrupted()
        fitted = _run(planned, repeats, work)
        if fitted.corrections:
            work.keep(fitted.plan, save)
        if report:
            write_report(fitted.plan, report, curve, settings, work, fitted.measured)
    return deliver(_answer(target, fitted, save, report), as_json=as_json)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """The plan that was run, and the measurement.

    Attributes:
        plan: that was run last.
        budget_bytes: the user's budget; a corrected plan was made for less.
        plan_seconds: of all plans of the step together.
        bounds: of the step.
        prediction: of it.
        measurement: planned and eager steps.
        corrections: made where the first step took more than the budget; `plan` is then the corrected one.
        compared: what has the same bits as eager's.
        served_by: what served the step's requests.
        served_why: why nothing better did.
        host: what the step offloads, as `offloads_of` gives it.
    """

    plan: Plan
    budget_bytes: int
    plan_seconds: float
    bounds: Bounds
    prediction: Prediction
    measurement: Measured
    corrections: tuple[Correction, ...] = ()
    compared: str = "loss, gradients, parameters, buffers, optimizer state, generators"
    served_by: str = DEFAULT
    served_why: str = ""
    host: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])

    @property
    def measured(self) -> Measured:
        """The measurement as the report takes it."""
        return replace(
            self.measurement,
            bitwise_equal=True,
            machine=f"{self.plan.device.name}, torch {self.plan.versions.get('torch', 'unknown')}",
            note=" ".join([*filter(None, [self.measurement.note]), *map(_sentence, self.corrections)]),
        )


def _given_plan(budget: str | None, plan: Path | None) -> Plan | None:
    if (budget is None) == (plan is None):
        raise InvalidOptionError("give either --budget or --plan: a plan has a budget of its own")
    return Plan.load(plan) if plan else None


def _plan(
    step: TrainingStep, given: Plan | None, settings: Settings, device_profile: str | None
) -> PlannedStep | CheckpointedStep:
    """Return the planned step, by the given plan or by one that the settings ask for."""
    from memfit.cost.device_profiles import load_device
    from memfit.doors.fit import fit_step

    device = load_device(device_profile) if device_profile else None
    return fit_step(step, replace(settings, device=device), plan=given)


def _run(planned: PlannedStep, repeats: int, work: Work) -> Fitted:
    """Run the planned step beside eager.

    Raises:
        VerificationError: the bits differ, or the measured peak is over the budget.
    """
    work.stage("verifying against eager, bit by bit")
    planned.verify()
    corrections = tuple(planned.corrections)
    if corrections:
        work.stage("verifying the corrected plan, bit by bit")
        planned.verify()
    work.stage("measuring eager and planned steps")
    measurement = planned.measure(repeats=repeats)
    plan = planned.plan
    budget_bytes = parse_budget(planned.settings.budget, plan.unplanned.peak_bytes)
    if measurement.peak_bytes > budget_bytes and planned.settings.budget_is == FIRM:
        raise VerificationError(
            f"the measured peak is {measurement.peak_bytes} bytes, the budget is {budget_bytes} bytes and the "
            f"prediction was {plan.predicted.peak_bytes} bytes; lower the budget by the difference"
        )
    return Fitted(
        plan=plan,
        budget_bytes=budget_bytes,
        plan_seconds=sum(part.plan_seconds for part in planned.plans),
        bounds=plan.bounds,
        prediction=plan.predicted,
        measurement=measurement,
        corrections=corrections,
        served_by=planned.memory.by,
        served_why=planned.memory.why,
        host=offloads_of([plan], planned.device.type, planned.settings.host_dir),
        **({} if planned.step.has_backward else {"compared": "the next state, generators"}),
    )


def _sentence(correction: Correction) -> str:
    words = str(correction)
    return f"{words[0].upper()}{words[1:]}."


def _answer(target: str, fitted: Fitted, save: Path | None, report: Path | None) -> Answer:
    plan, prediction, measurement = fitted.plan, fitted.prediction, fitted.measurement
    taken = taken_of(plan, fitted.served_by)
    baseline = {"peak_bytes": measurement.baseline_peak_bytes, "step_seconds": measurement.baseline_step_seconds}
    measured = {"peak_bytes": measurement.peak_bytes, "step_seconds": measurement.step_seconds}
    predicted = {
        "peak_bytes": prediction.peak_bytes,
        "step_seconds": prediction.seconds,
    }
    if taken is not None:
        predicted["reserved_bytes"] = taken.reserved_bytes
    if measurement.reserved_bytes is not None:
        measured["reserved_bytes"] = measurement.reserved_bytes
    if measurement.transfers is not None:
        measured |= {
            "stall_seconds": measurement.transfers.stall_seconds,
            "overlap_seconds": measurement.transfers.overlap_seconds,
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
        **fitted.host,
        **({"reserved": taken.keys()} if taken else {}),
        **({"memory": {"served_by": fitted.served_by, "why": fitted.served_why}} if is_for_gpu(plan) else {}),
        "bounds": bounds_of(fitted.bounds),
    }
    if fitted.corrections:
        keys["corrections"] = [asdict(correction) for correction in fitted.corrections]
    return Answer(target=target, device=plan.device.name, keys=keys, parts=_parts(fitted, keys, taken, save, report))


def _parts(
    fitted: Fitted, keys: dict[str, Any], taken: Taken | None, save: Path | None, report: Path | None
) -> tuple[RenderableType, ...]:
    resident = format_bytes(keys["resident_bytes"])
    why = f": {fitted.served_why}" if fitted.served_why else ""
    rows = {
        "budget": f"{format_bytes(fitted.budget_bytes)}, {resident} of it resident",
        "same bits as eager": fitted.compared,
        "overhead": f"{change_text(keys['overhead'])} (measured, against eager)",
        **({"memory from": f"{fitted.served_by}{why}"} if is_for_gpu(fitted.plan) else {}),
        **({"offloaded": offloads_row(keys["host"])} if fitted.host else {}),
        **({"eager": fitted.measurement.note} if fitted.measurement.note else {}),
        "plan": f"by planner {fitted.plan.planner} in {seconds_text(fitted.plan_seconds)}: {fitted.plan.status}",
        **({"corrected": " ".join(map(_sentence, fitted.corrections))} if fitted.corrections else {}),
        **({"plan file": str(save)} if save else {}),
        **({"report": str(report)} if report else {}),
    }
    sides = (keys["baseline"], keys["measured"], keys["predicted"])
    sizes = [
        (name, *("-" if s.get(key) is None else format_bytes(s[key]) for s in sides))
        for name, key in (("peak", "peak_bytes"), ("reserved", "reserved_bytes"))
    ]
    seconds = ("step", *("-" if s["step_seconds"] is None else seconds_text(s["step_seconds"]) for s in sides))
    columns = ("", "eager, measured", "planned, measured", "planned, predicted")
    by_part = (rows_table(taken.rows()), Text()) if taken else ()
    return rows_table(rows), Text(), *by_part, columns_table(columns, [*sizes, seconds])
