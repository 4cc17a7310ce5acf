"""Reports: a plan as one HTML file, as a picture, as a trace for Perfetto, and as plain text.

A report is given data and searches nothing: the points of its trade-off curve are planned by the caller.

>>> import tempfile
>>> from pathlib import Path
>>> from memfit.device import GENERIC
>>> from memfit.graph import Graph, Op, Phase, Role, Storage
>>> from memfit.plan import Problem
>>> from memfit.planners import make_planner
>>> from memfit.report import explain, text_summary, write_html, write_trace
>>> graph = Graph.build(
...     name="double",
...     storages=[
...         Storage(id=0, name="x", bytes=4096, role=Role.INPUT),
...         Storage(id=1, name="y", bytes=4096, role=Role.OUTPUT),
...     ],
...     ops=[Op(id=0, name="mul", phase=Phase.FORWARD, reads=(0,), writes=(1,), seconds=1e-6)],
... )
>>> plan = make_planner("none").plan(Problem(graph=graph, device=GENERIC, budget_bytes=8192)).plan
>>> print(text_summary(plan).splitlines()[0])
double: predicted peak 8 KiB of a budget of 8 KiB (unplanned 8 KiB)
>>> "handed to you at the end of the step" in explain(plan)
True
>>> with tempfile.TemporaryDirectory() as folder:
...     write_html(plan, Path(folder, "report.html"), curve=[(8192, 0.0, "optimal")])
...     write_trace(plan, Path(folder, "plan.trace.json"))
...     sorted(path.name for path in Path(folder).iterdir())
['plan.trace.json', 'report.html']
"""

from __future__ import annotations

from memfit.report.curve import CurvePoint
from memfit.report.memory_viz import write_snapshot
from memfit.report.page import write_html
from memfit.report.perfetto import write_trace
from memfit.report.picture import write_png
from memfit.report.text import explain, text_summary
from memfit.step.measured import Measured

__all__ = [
    "CurvePoint",
    "Measured",
    "explain",
    "text_summary",
    "write_html",
    "write_png",
    "write_snapshot",
    "write_trace",
]
