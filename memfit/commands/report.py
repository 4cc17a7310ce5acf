"""`memfit report`: a plan as a page, a picture, a trace, or an explanation in text."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import RenderableType

from memfit.commands import options
from memfit.commands.answer import Answer, rows_table
from memfit.commands.curves import report_curve, write_report
from memfit.commands.work import Work, working
from memfit.errors import InvalidOptionError
from memfit.plan import Plan
from memfit.planning import DEFAULT_TIME_LIMIT_SECONDS, Settings
from memfit.report import write_png, write_snapshot, write_trace
from memfit.report.explanation import explained, explanation_keys
from memfit.report.text import explanation_text
from memfit.system.files import require_writable

EXAMPLES = """
Examples:

memfit report step.plan.json

memfit report step.plan.json -o step.html

memfit report step.plan.json -o step.png -o step.trace.json -o step.pickle --curve 0
"""

_SUFFIXES = (".html", ".png", ".json", ".pickle")


def report(
    plan: options.PlanFile,
    output: Annotated[
        list[Path] | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="FILE.html is a page, FILE.png a picture, FILE.json a trace for Chrome or Perfetto, FILE.pickle "
            "a snapshot for pytorch.org/memory_viz; may be repeated.",
        ),
    ] = None,
    curve: options.CurvePoints = 10,
    time_limit: options.TimeLimit = DEFAULT_TIME_LIMIT_SECONDS,
    seed: options.Seed = 0,
) -> Answer:
    """Show a plan: as a page, a picture, a trace, or (without -o) as an explanation in plain text."""
    files = output or []
    for path in files:
        _require_suffix(path)
    require_writable(*files)
    loaded = Plan.load(plan)
    asked = Settings(budget=loaded.budget_bytes, time_limit_seconds=options.require_time_limit(time_limit), seed=seed)
    with working() as work:
        settings = work.follow(asked)
        for path in files:
            _write(loaded, path, curve, settings, work)
        keys: dict[str, Any] = {"files": [str(path) for path in files]}
        parts: Iterable[RenderableType] = (rows_table({str(path): "written" for path in files}),)
        if not files:
            explanation = explained(loaded, report_curve(loaded, curve, settings, work))
            parts = map(explanation_text, (explanation,))  # takes a while, which JSON does not need
            keys["explanation"] = explanation_keys(explanation)
    return Answer(target=str(plan), device=loaded.device.name, keys=keys, parts=parts)


def _require_suffix(path: Path) -> None:
    if path.suffix not in _SUFFIXES:
        raise InvalidOptionError(
            f"--output {str(path)!r} ends in {path.suffix!r}, expected one of {', '.join(_SUFFIXES)}"
        )


def _write(plan: Plan, path: Path, curve: int, settings: Settings, work: Work) -> None:
    if path.suffix == ".html":
        write_report(plan, path, curve, settings, work)
    elif path.suffix == ".png":
        work.stage("drawing the picture")
        write_png(plan, path)
    elif path.suffix == ".json":
        write_trace(plan, path)
    else:
        write_snapshot(plan, path)
