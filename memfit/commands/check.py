"""`memfit check`: replay a plan on a graph with the checker, which shares no code with the planners."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from memfit.checker import check as check_schedule
from memfit.commands import options
from memfit.commands.answer import VERIFICATION_FAILED, Answer, rows_table
from memfit.commands.targets import resolve
from memfit.errors import InvalidScheduleError
from memfit.graph import Graph
from memfit.plan import Plan
from memfit.report.formatting import count_text, seconds_text
from memfit.simulate import Timeline, simulate
from memfit.system.budget import format_bytes

if TYPE_CHECKING:
    from memfit.capture.training_step import TrainingStep

EXAMPLES = """
Examples:

memfit check step.graph.json.gz step.plan.json

memfit check resnet50 resnet50.plan.json --json
"""


def check(
    graph: Annotated[
        str, typer.Argument(metavar="GRAPH", help="A graph file, or any other TARGET, which is then captured.")
    ],
    plan: options.PlanFile,
    set_: options.WorkloadOptions = None,
) -> Answer:
    """Replay PLAN on GRAPH instruction by instruction. Exit status 4 says that the plan is not valid."""
    resolved = resolve(graph, options.read_settings(set_, "--set"))
    try:
        loaded = _load(plan, resolved)
        timeline = _replay(loaded, resolved)
    except InvalidScheduleError as error:
        return _invalid(graph, error)
    return _valid(graph, loaded, timeline)


def _load(path: Path, resolved: TrainingStep | Graph) -> Plan:
    """Return the plan, which was made for this very graph."""
    if isinstance(resolved, Graph):
        return Plan.load(path, graph=resolved)
    from memfit.capture import capture, finish, with_real_results  # torch's rooms
    from memfit.capture.finish import with_every_form

    captured = capture(resolved)
    plan = Plan.load(path)
    if plan.fingerprint != captured.graph.fingerprint:  # it may be for the real bytes of the device at hand
        captured = with_real_results(lambda corrections: finish(capture(resolved, corrections=corrections)))
    plan.require_graph(with_every_form(captured.graph, captured.binding))
    return plan


def _replay(plan: Plan, resolved: TrainingStep | Graph) -> Timeline:
    """Replay the plan on the graph of the command line where that is a file: its workspace and seconds may differ."""
    graph = resolved if isinstance(resolved, Graph) else plan.graph
    check_schedule(graph, plan.schedule)
    timeline = simulate(graph, plan.schedule, plan.device)
    if timeline.peak_bytes > plan.budget_bytes:
        position = timeline.peak_position
        raise InvalidScheduleError(
            f"instruction {position} {plan.schedule.lines()[position]}: {timeline.peak_bytes} bytes are live, "
            f"the budget of the plan is {plan.budget_bytes} bytes; plan again"
        )
    return timeline


def _valid(target: str, plan: Plan, timeline: Timeline) -> Answer:
    keys = {"valid": True, "peak_bytes": timeline.peak_bytes, "seconds": timeline.makespan_seconds}
    rows = {
        "valid": f"{count_text(len(plan.schedule), 'instruction')} by planner {plan.planner}",
        "peak": f"{format_bytes(timeline.peak_bytes)} of a budget of {format_bytes(plan.budget_bytes)}",
        "time": f"{seconds_text(timeline.makespan_seconds)} a step (predicted)",
    }
    return Answer(target=target, device=plan.device.name, keys=keys, parts=(rows_table(rows),))


def _invalid(target: str, error: InvalidScheduleError) -> Answer:
    keys = {"valid": False, "peak_bytes": None, "seconds": None, "error": str(error)}
    parts = (rows_table({"not valid": str(error)}),)
    return Answer(target=target, device=None, keys=keys, parts=parts, exit_status=VERIFICATION_FAILED)
