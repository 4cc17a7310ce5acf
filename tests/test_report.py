"""The report without a browser: live bytes by role, fates, texts, the page's data, the trace."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import re
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from browsing import unpacked
from chains import chain
from hypothesis import given, settings
from hypothesis import strategies as st
from small_plans import LINKED, OFFLOADED, REMATERIALIZED, lowered, plan_of, small_graph

from memfit.checker import check
from memfit.device import GENERIC, Device
from memfit.errors import InvalidFileError, InvalidOptionError, MemfitError
from memfit.graph import Boundary, Graph, Op, Phase, Role, Storage
from memfit.plan import Problem, Status
from memfit.planners.engine.results import unplanned_schedule
from memfit.report import CurvePoint, Measured, explain, text_summary, write_html, write_png, write_trace
from memfit.report.chart_points import chart_points
from memfit.report.formatting import change_text, seconds_text, share_text
from memfit.report.frontier_page import BatchPoint
from memfit.report.live import Layer, play
from memfit.report.page import render
from memfit.report.storage_fates import Kind, fates, totals
from memfit.schedule import Schedule
from memfit.simulate import simulate
from memfit.simulate.overlap import Transfers, simulated_transfers
from memfit.system.lines import printable

MEASURED = Measured(peak_bytes=1, step_seconds=1.0, baseline_peak_bytes=1, baseline_step_seconds=1.0)
HOSTILE = "</script><script>window.hacked=1</script><img src=x onerror=hacked()>@@data@@\x1b[2J\u202e'\"&"


def data_of(page: str) -> dict[str, Any]:
    return json.loads(unpacked(page)[0])


class Tags(HTMLParser):
    """The tags, attributes and text of a page, scripts and styles apart."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: Counter[str] = Counter()
        self.attributes: set[str] = set()
        self.policy = ""
        self.texts: list[str] = []
        self.scripts: list[str] = []
        self.inside = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.attributes |= {name for name, _ in attrs}
        self.inside = tag if tag != "script" or not attrs else "data"
        if ("http-equiv", "Content-Security-Policy") in attrs:
            self.policy = dict(attrs)["content"] or ""

    def handle_endtag(self, tag: str) -> None:
        self.inside = "" if tag else self.inside

    def handle_data(self, data: str) -> None:
        if self.inside == "script":
            self.scripts.append(data)
        elif self.inside not in ("style", "data"):
            self.texts.append(data)


# -- live bytes -------------------------------------------------------------------------------------------------------


def test_layers_of_a_schedule_solved_by_hand() -> None:
    run = play(small_graph(), Schedule.parse(REMATERIALIZED), GENERIC)
    expected = {
        Layer.PARAMETER: [100] * 13,
        Layer.INPUT: [50] * 13,
        Layer.ACTIVATION: [400, 800, 400, 400, 0, 400, 400, 0, 0, 0, 0, 0, 0],
        Layer.OUTPUT: [0, 0, 0, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8],
        Layer.GRADIENT: [0, 0, 0, 0, 400, 400, 800, 800, 400, 500, 100, 100, 0],
        Layer.WORKSPACE: [30, 0, 0, 0, 0, 30, 0, 0, 0, 0, 0, 0, 0],
        Layer.STATE: [0] * 13,
        Layer.CONSTANT: [0] * 13,
        Layer.OUTSIDE: [0] * 13,
    }
    assert {layer: column.tolist() for layer, column in run.layers.items()} == expected
    assert run.timeline.peak_position == 6
    assert run.live_at(6) == [2, 5, 6, 0, 1, 4]
    assert run.computations[0] == (0, 5)
    assert run.doing_at(4) == "while mean_backward runs (backward)"
    assert run.doing_at(2) == "while mean runs (forward)"  # a drop: what comes next
    assert run.doing_at(5) == "while fc1 runs (forward, in net.fc1)"
    assert run.doing_at(12) == ""


def test_second_copies_are_counted_while_the_op_runs() -> None:
    run = play(
        small_graph(), Schedule.parse(REMATERIALIZED.replace("compute 1\n", "compute 0\ncompute 1\n", 1)), GENERIC
    )
    assert run.layers[Layer.WORKSPACE].tolist()[:3] == [30, 430, 0]
    assert run.timeline.device_bytes.tolist()[1] == 100 + 50 + 400 + 430


@pytest.mark.parametrize("text", [REMATERIALIZED, OFFLOADED])
@pytest.mark.parametrize("alignment_bytes", [1, 64, 512])
def test_layers_add_up_to_the_simulators_bytes(text: str, alignment_bytes: int) -> None:
    device = msgspec.structs.replace(LINKED, alignment_bytes=alignment_bytes)
    run = play(small_graph(), Schedule.parse(text), device)
    assert sum(run.layers.values()).tolist() == run.timeline.device_bytes.tolist()


def test_bytes_outside_and_arrivals_come_at_the_boundary() -> None:
    graph = Graph.build(
        name="halves",
        storages=[
            Storage(id=0, name="x", bytes=10, role=Role.INPUT),
            Storage(id=1, name="y", bytes=20, role=Role.ACTIVATION),
            Storage(id=2, name="tangent", bytes=30, role=Role.GRADIENT),
            Storage(id=3, name="dx", bytes=40, role=Role.OUTPUT),
        ],
        ops=[
            Op(id=0, name="f", phase=Phase.FORWARD, reads=(0,), writes=(1,), seconds=1.0),
            Op(id=1, name="g", phase=Phase.BACKWARD, reads=(1, 2), writes=(3,), seconds=1.0),
        ],
        boundaries=[Boundary(position=1, arrivals=(2,), departures=(1,))],
    )
    schedule = Schedule.parse("compute 0\nboundary 0 bytes_outside 7\ncompute 1\ndrop 2")
    run = play(graph, schedule, GENERIC)
    assert run.layers[Layer.OUTSIDE].tolist() == [0, 7, 7, 7]
    assert run.layers[Layer.GRADIENT].tolist() == [0, 30, 30, 0]
    assert sum(run.layers.values()).tolist() == run.timeline.device_bytes.tolist()
    assert fates(run)[2].why == "last read by g"
    page = data_of(render(plan_of(graph, schedule, bytes_outside=7)))
    assert page["runs"]["planned"]["layers"]["outside"] == [0, 7, 7]  # once, not once more for the whole step


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_layers_and_fates_hold_on_any_chain(data: st.DataObject) -> None:
    graph = chain(data.draw(st.integers(1, 8)))
    forward = [op.writes[0] for op in graph.ops if op.phase == Phase.FORWARD]
    schedule = lowered(graph, data.draw(st.sets(st.sampled_from(forward))))
    check(graph, schedule)
    device = Device(name="aligned", alignment_bytes=data.draw(st.sampled_from([1, 16, 512])))
    run = play(graph, schedule, device)
    assert sum(run.layers.values()).tolist() == run.timeline.device_bytes.tolist()
    at_peak = sum(device.aligned(graph.storages[s].bytes) for s in run.live_at(run.timeline.peak_position))
    assert at_peak + run.layers[Layer.WORKSPACE][run.timeline.peak_position] == run.timeline.peak_bytes
    of_storage = fates(run)
    for fate in of_storage:
        writer = graph.writer_of.get(fate.storage)
        again = len(run.computations[writer]) - 1 if writer is not None else 0
        assert fate.rematerialized <= again
        assert (fate.kind == Kind.REMATERIALIZED) == (fate.rematerialized > 0)
    assert sum(fate.extra_seconds for fate in of_storage) == pytest.approx(
        run.timeline.makespan_seconds - sum(op.seconds for op in graph.ops)
    )


# -- fates ------------------------------------------------------------------------------------------------------------


def test_fates_of_a_schedule_solved_by_hand() -> None:
    of_storage = fates(play(small_graph(), Schedule.parse(REMATERIALIZED), GENERIC))
    assert [fate.kind for fate in of_storage] == [
        Kind.RESIDENT,
        Kind.RESIDENT,
        Kind.REMATERIALIZED,
        Kind.KEPT,
        Kind.KEPT,
        Kind.FREED,
        Kind.FREED,
        Kind.KEPT,
    ]
    a = of_storage[2]
    assert (a.text, a.extra_seconds, a.held_seconds) == ("rematerialized once", 1.0, 5.0)
    assert a.why == "off the device 3.000 s between relu and relu_backward; computing it takes 1.000 s each time"
    assert of_storage[0].why == "parameter, there for the whole step; updated in place by sgd"
    assert of_storage[3].why.startswith("read in backward by mean_backward; recomputing it would take 1.000 s")
    assert of_storage[4].why == "handed to you at the end of the step"
    assert of_storage[6].why == "last read by fc1_backward"


def test_an_offloaded_storage_says_so() -> None:
    run = play(small_graph(), Schedule.parse(OFFLOADED), LINKED)
    fate = fates(run)[2]
    assert (fate.kind, fate.offloaded, fate.rematerialized, fate.text) == (Kind.OFFLOADED, 1, 0, "offloaded once")
    assert fate.why == "off the device 3.000 s between relu and relu_backward"


def test_a_computation_for_another_write_is_not_a_fate() -> None:
    """Op 0 writes two storages; only the second is dropped and wanted again, the first comes along unread."""
    graph = Graph.build(
        name="twins",
        storages=[Storage(id=0, name="x", bytes=8, role=Role.INPUT)]
        + [Storage(id=n, name=f"s{n}", bytes=8, role=Role.ACTIVATION) for n in (1, 2, 3)]
        + [Storage(id=4, name="y", bytes=8, role=Role.OUTPUT)],
        ops=[
            Op(id=0, name="split", phase=Phase.FORWARD, reads=(0,), writes=(1, 2), seconds=1.0),
            Op(id=1, name="left", phase=Phase.FORWARD, reads=(1,), writes=(3,), seconds=1.0),
            Op(id=2, name="join", phase=Phase.BACKWARD, reads=(2, 3), writes=(4,), seconds=1.0),
        ],
    )
    schedule = Schedule.parse("compute 0\ncompute 1\ndrop 1\ndrop 2\ncompute 0\ndrop 1\ncompute 2\ndrop 2\ndrop 3")
    check(graph, schedule)
    of_storage = fates(play(graph, schedule, GENERIC))
    assert [of_storage[1].kind, of_storage[2].kind] == [Kind.FREED, Kind.REMATERIALIZED]
    assert [(total.kind, total.count) for total in totals(of_storage, graph)] == [
        (Kind.RESIDENT, 1),
        (Kind.KEPT, 2),
        (Kind.REMATERIALIZED, 1),
        (Kind.FREED, 1),
    ]


# -- thinning out -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("most_points", [1, 7, 100, 100_000])
def test_thinning_keeps_the_largest_of_each_bin(most_points: int) -> None:
    graph = chain(300)
    run = play(graph, lowered(graph, {n for n in range(1, 301) if n % 3}), GENERIC)
    thin = chart_points(run, most_points=most_points)
    growing = [position for position, code in enumerate(run.schedule.codes) if code == 0]
    assert len(thin["total"]) <= most_points
    assert sum(thin["binned"]) == len(growing)
    first = 0
    for total, count in zip(thin["total"], thin["binned"], strict=True):
        assert total == max(run.timeline.device_bytes[growing[first : first + count]])
        first += count
    assert thin["total"][thin["peak"]] == run.timeline.peak_bytes
    assert np.sum(list(thin["layers"].values()), axis=0).tolist() == thin["total"]


def test_parts_of_the_step_follow_the_first_computations() -> None:
    thin = chart_points(play(small_graph(), Schedule.parse(REMATERIALIZED), GENERIC))
    assert thin["phases"] == [("forward", 0.0, 3.0, 0, 3), ("backward", 3.0, 10.0, 3, 7), ("update", 10.0, 11.0, 7, 8)]
    assert thin["strips"] == {"recomputed": [(5.0, 6.0, 4.0, 5.0)]}
    assert thin["recomputed"] == [False, False, False, False, True, False, False, False]


# -- text -------------------------------------------------------------------------------------------------------------


EXPLANATION = """\
small: predicted peak 1.326 KiB of a budget of 1.367 KiB (unplanned 1.326 KiB)
  predicted time: 11.000 s a step, +10.0% against 10.000 s unplanned
  limits: least budget reached by a plan 1.326 KiB, no plan at all below 1.318 KiB
  no plan within this budget adds less than +1.0% in any order
  planner by_hand in 250 ms: feasible: the best plan found in the time given; a longer time limit may find a faster \
one

at the peak, instruction 6 of 13, while relu_backward runs (backward):
       400 B  activation  a [net.fc1]
       400 B  gradient    grad_b
       400 B  gradient    grad_a
       100 B  parameter   w
        50 B  input       x
         8 B  output      loss

rematerialized: 1 storage, 400 B together (dropped, and recomputed when it is needed)
       400 B  activation  a [net.fc1]: rematerialized once; off the device 3.000 s between relu and relu_backward; \
computing it takes 1.000 s each time

kept: 3 storages, 508 B together (stays on the device from one part of the step to the next, as it would without a \
plan)
       400 B  activation  b [net.act]: read in backward by mean_backward; recomputing it would take 1.000 s if \
its inputs are on the device
       108 B  in 2 more storages

freed at once: 2 storages, 800 B together (dropped in the part of the step that made it, as it would be without a \
plan)
       400 B  gradient    grad_b: last read by relu_backward
       400 B  in 1 more storage

resident: 2 storages, 150 B together (on the device for the whole step; no plan can change that)
       100 B  parameter   w: parameter, there for the whole step; updated in place by sgd
        50 B  in 1 more storage

what the next 140 B buys:
  +5.0% time in place of +10.0%, 5.0 percentage points less, with the best plan that a search found for that budget
  +2.0% time in place of +10.0%, 8.0 percentage points less, at most: proved for every plan within that budget

why no plan needs less than 1.318 KiB:
  relu_backward needs 1.172 KiB at once: reads a (400 B), grad_b (400 B), writes grad_a (400 B), beside 150 B always \
there

the cost of other budgets (this plan: +10.0%):
  300 B less (1.074 KiB): no plan (infeasible)
  140 B more (1.504 KiB): +5.0%, 5.0 percentage points less
  512 B more (1.867 KiB): +0.0%, 10.0 percentage points less"""


def test_explanation_of_a_plan_solved_by_hand() -> None:
    plan = plan_of(small_graph(), REMATERIALIZED)
    larger = CurvePoint(1540, 0.05, Status.FEASIBLE, 0.02)
    curve = [(1100, None, "infeasible"), (1400, 0.1, "feasible"), larger, (1912, 0.0, "optimal")]
    assert explain(plan, curve=curve, storages_per_fate=1) == EXPLANATION


def test_a_budget_that_buys_nothing_is_said_in_words() -> None:
    plan = plan_of(small_graph(), REMATERIALIZED)
    text = explain(plan, curve=[(plan.budget_bytes + 140, plan.overhead, "feasible"), (900, None, "timed_out")])
    assert "140 B more (1.504 KiB): +10.0%, the same" in text
    assert "no plan (none found)" in text


def test_a_batch_without_a_plan_says_whether_that_is_proved() -> None:
    assert BatchPoint(batch=8, least_bytes=101).no_plan_text(100) == "no plan fits"
    assert BatchPoint(batch=8, least_bytes=100).no_plan_text(100) == "no plan found"


def test_summary_says_what_is_not_known() -> None:
    graph = small_graph(seconds=0.0)
    unknown = tuple(msgspec.structs.replace(op, workspace_bytes=None) for op in graph.ops)
    plan = plan_of(Graph.build(name="x", storages=graph.storages, ops=unknown), REMATERIALIZED, bytes_outside=64)
    text = text_summary(plan)
    assert "predicted time: unknown" in text
    assert "workspace of 7 ops is unknown and counted as 0" in text
    assert "The workspace of 7 operations is not known" in render(plan)
    assert "outside the graph: 64 B" in text


def test_texts_keep_the_terminal_safe() -> None:
    plan = plan_of(small_graph(HOSTILE), REMATERIALIZED, planner=HOSTILE)
    for text in (explain(plan), text_summary(plan)):
        assert "\x1b" not in text
        assert "\u202e" not in text


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (seconds_text(0.9999), "1.000 s"),
        (seconds_text(123.456), "123 s"),
        (seconds_text(3e-12), "0.00 ns"),
        (change_text(-1e-9), "+0.0%"),
        (change_text(1.5), "+150.0%"),
        (share_text(1, 3), "33%"),
        (share_text(1, 50), "2.0%"),
        (printable("a\tb\x00"), "a?b?"),
    ],
)
def test_words(shown: str, expected: str) -> None:
    assert shown == expected


# -- the page ---------------------------------------------------------------------------------------------------------


def test_the_pages_figures_are_the_plans() -> None:
    plan = plan_of(small_graph(), REMATERIALIZED)
    page = render(plan, curve=[(1400, 0.1, "feasible"), CurvePoint(1100, None, Status.INFEASIBLE)])
    data = data_of(page)
    assert data["budget_bytes"] == plan.budget_bytes
    assert data["bound_bytes"] == plan.bounds.least_budget_bound_bytes
    for name, prediction in (("planned", plan.predicted), ("unplanned", plan.unplanned)):
        run = data["runs"][name]
        assert max(run["total"]) == prediction.peak_bytes
        assert run["end"][0] == prediction.seconds
        peak = data["peaks"][name]
        assert sum(size for _, size in peak["rows"] + peak["others"]) == prediction.peak_bytes
        assert [size for _, size in peak["rows"]] == sorted((size for _, size in peak["rows"]), reverse=True)
    assert data["this_point"] == {
        "budget_bytes": plan.budget_bytes, "overhead": plan.overhead, "text": "+10.0% time (feasible)", "bound": 0.01
    }  # fmt: skip
    assert [point["budget_bytes"] for point in data["curve"]] == [1100, 1400]
    text = " ".join(Tags(page).texts)
    for figure in (f"{plan.budget_bytes:,} bytes", f"{plan.predicted.peak_bytes:,} bytes", "11.000 s", "10.0% longer"):
        assert figure in text


def test_storages_of_the_page() -> None:
    table = data_of(render(plan_of(small_graph(), REMATERIALIZED)))
    storages = table["storages"]
    assert storages["name"] == ["w", "x", "a", "b", "loss", "grad_b", "grad_a", "grad_w"]
    assert storages["bytes"] == [100, 50, 400, 400, 8, 400, 400, 100]
    assert table["strings"][storages["module"][2]] == "net.fc1"
    assert table["strings"][storages["fate"][2]] == "rematerialized once"
    assert storages["held"][2] == round(5 / 11, 4)
    assert storages["extra_seconds"] == [None, None, 1.0, *[None] * 5]
    assert table["strings"][storages["live"][2]] == "0 s – 2.000 s, 5.000 s – 8.000 s"


def test_hostile_names_are_inert() -> None:
    graph = small_graph(HOSTILE)
    hostile = Graph.build(
        name=HOSTILE,
        storages=[msgspec.structs.replace(storage, name=HOSTILE) for storage in graph.storages],
        ops=[msgspec.structs.replace(op, name=HOSTILE, module=HOSTILE) for op in graph.ops],
        source=HOSTILE,
        notes=HOSTILE,
    )
    device = Device(name=HOSTILE, source=HOSTILE)
    plan = plan_of(hostile, REMATERIALIZED, device, planner=HOSTILE, versions={HOSTILE: HOSTILE})
    measured = replace(MEASURED, machine=HOSTILE)
    named, plain = Tags(render(plan, measured=measured)), Tags(
        render(plan_of(graph, REMATERIALIZED, LINKED), measured=MEASURED)
    )  # fmt: skip
    assert named.tags == plain.tags + Counter(dt=1, dd=1)  # the notes
    assert named.tags["script"] == 3
    assert not named.attributes & {"onerror", "onload", "src", "href"}
    shown = "</script><script>window.hacked=1</script><img src=x onerror=hacked()>@@data@@?[2J?'\"&"
    assert any(shown in text for text in named.texts)


def test_only_the_pages_own_scripts_may_run() -> None:
    page = render(plan_of(small_graph(), REMATERIALIZED))
    tags = Tags(page)
    scripts = [*unpacked(page)[1:], *tags.scripts]
    hashes = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    assert len(hashes) == 3 and "plotly.js" in scripts[0]
    assert tags.policy.startswith("default-src 'none'; script-src ")
    assert re.findall(r"'sha256-([^']+)'", tags.policy) == hashes


def test_copies_are_drawn_as_predicted_and_as_measured() -> None:
    plan = plan_of(small_graph(), OFFLOADED, LINKED)
    transfers = Transfers(to_host=((1.0, 2.0),), to_device=((4.0, 6.0),), stalls=((5.0, 6.0),))
    page = render(plan, measured=replace(MEASURED, step_seconds=10.0, transfers=transfers))
    section = page.split('id="copies-section"')[1].split("</section>")[0]
    measured = "Measured: compute waits for 1.000 s (10% of the step), and works beside copies for 2.000 s (20%)"
    assert measured in section
    assert "Predicted: compute waits for" in section
    lanes = data_of(page)["copies"]
    assert lanes["measured"] == {"to the host": [[1, 2]], "from the host": [[4, 6]], "compute waits": [[5, 6]]}
    found = simulated_transfers(simulate(plan.graph, plan.schedule, LINKED), plan.graph, plan.schedule)
    assert [len(spans) for spans in lanes["predicted"].values()] == [1, 1, len(found.stalls)]
    assert 'id="copies"' not in render(plan_of(small_graph(), REMATERIALIZED, LINKED), measured=MEASURED)


def test_measurements_stand_in_columns_of_their_own() -> None:
    plan = plan_of(small_graph(), REMATERIALIZED)
    measured = Measured(
        peak_bytes=1300,
        step_seconds=12.5,
        baseline_peak_bytes=1500,
        baseline_step_seconds=10.0,
        overhead_spread=(0.2, 0.31),
        bitwise_equal=False,
    )
    page = render(plan, measured=measured)
    rows = re.findall(r"<tr><th scope=\"row\">(.*?)</tr>", page.split('id="figures"')[1].split("</table>")[0])
    cells = [re.findall(r">([^<>]+)<", f">{row}<") for row in rows]
    assert cells == [
        ["Peak memory", "1.465 KiB", "1.27 KiB", "1.326 KiB", "1.326 KiB"],
        ["Step time", "10.000 s", "12.500 s", "10.000 s", "11.000 s"],
        ["Extra time", "–", "+25.0% (20.0 to 31.0)", "–", "+10.0%"],
    ]
    assert "differed</b> from those of the unplanned step" in page
    assert "nothing was run for this report" in render(plan)


def test_what_was_measured_leads_and_what_fills_the_budget_is_one_bar() -> None:
    plan = plan_of(small_graph(), REMATERIALIZED)
    measured = Measured(peak_bytes=1300, step_seconds=12.5, baseline_peak_bytes=1500, baseline_step_seconds=10.0)
    page = render(plan, measured=measured)
    lead = page.split('<p class="lead">')[1].split("</p>")[0]
    assert lead.startswith("Measured, a step took") and "+25.0%" in lead
    assert re.findall(r"<dt>(.*?)</dt>", page)[:3] == ["Budget", "Peak memory, measured", "Step time, measured"]
    section = page.split('id="taken-section"')[1].split("</section>")[0]
    widths = [float(width) for width in re.findall(r"width:([\d.]+)%", section)]
    assert len(widths) == 2, "parts without bytes are left out"
    assert sum(widths) == pytest.approx(100 * plan.predicted.peak_bytes / plan.budget_bytes, abs=0.1)


def test_the_bound_stands_beside_the_curve() -> None:
    plan = plan_of(small_graph(), REMATERIALIZED)
    curve = [CurvePoint(1100, 0.4, Status.FEASIBLE, 0.25), CurvePoint(1300, 0.2, Status.FEASIBLE)]
    assert [point["bound"] for point in data_of(render(plan, curve=curve))["curve"]][:2] == [0.25, None]


def test_a_page_takes_at_most_a_megabyte_and_a_half() -> None:
    assert len(render(plan_of(small_graph(), REMATERIALIZED)).encode()) < 1.25 * 2**20


def test_a_plan_over_its_budget_says_so() -> None:
    plan = plan_of(small_graph(), REMATERIALIZED, budget_bytes=500)
    assert "over the budget" in render(plan)
    assert "fits the budget" not in render(plan)


def test_a_graph_without_times_is_drawn_by_operation() -> None:
    page = render(plan_of(small_graph(seconds=0.0), REMATERIALIZED))
    assert data_of(page)["axis"] == "step"
    assert data_of(page)["storages"]["held"] == [None] * 8
    assert "the graph carries no times" in page


def test_a_graph_without_ops_has_a_report(tmp_path: Path) -> None:
    graph = Graph.build(name="nothing", storages=[Storage(id=0, name="x", bytes=5, role=Role.INPUT)], ops=[])
    plan = plan_of(graph, "")
    assert data_of(render(plan))["runs"]["planned"]["total"] == []
    assert "at the peak, instruction 0 of 0:" in explain(plan)
    write_trace(plan, tmp_path / "trace.json")
    assert all(event["ph"] == "M" for event in json.loads((tmp_path / "trace.json").read_text())["traceEvents"])


def test_ten_thousand_ops_stay_below_eight_megabytes(tmp_path: Path) -> None:
    graph = chain(5000)
    plan = plan_of(graph, lowered(graph, {n for n in range(1, 5001) if n % 4}))
    write_html(plan, tmp_path / "large.html")
    assert (tmp_path / "large.html").stat().st_size < 8_000_000


@pytest.mark.parametrize(
    ("point", "message"),
    [
        ((0, 0.1, "feasible"), "point 1 of the curve has a budget of 0 bytes"),
        ((10, float("nan"), "feasible"), "point 1 of the curve has the overhead nan"),
        ((10, 0.1, "splendid"), "point 1 of the curve has the status 'splendid', expected one of optimal"),
    ],
)
def test_a_malformed_point_is_refused(point: tuple[int, float, str], message: str, tmp_path: Path) -> None:
    plan = plan_of(small_graph(), REMATERIALIZED)
    with pytest.raises(InvalidOptionError, match=message):
        write_html(plan, tmp_path / "report.html", curve=[(20, 0.0, "optimal"), point])
    with pytest.raises(InvalidOptionError, match=message):
        explain(plan, curve=[(20, 0.0, "optimal"), point])
    assert list(tmp_path.iterdir()) == []


def test_a_negative_count_is_refused() -> None:
    with pytest.raises(InvalidOptionError, match="storages_per_fate is -1"):
        explain(plan_of(small_graph(), REMATERIALIZED), storages_per_fate=-1)


@pytest.mark.parametrize("write", [write_html, write_trace])
def test_a_missing_folder_is_one_clear_error(write: Any, tmp_path: Path) -> None:
    with pytest.raises(InvalidFileError, match=r"no_such/report: cannot be written: No such file"):
        write(plan_of(small_graph(), REMATERIALIZED), tmp_path / "no_such" / "report")


# -- the trace --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["plan.trace.json", "plan.trace.json.gz"])
def test_trace_of_three_streams(name: str, tmp_path: Path) -> None:
    plan = plan_of(small_graph(HOSTILE), OFFLOADED, LINKED)
    write_trace(plan, tmp_path / name)
    content = (tmp_path / name).read_bytes()
    document = json.loads(gzip.decompress(content) if name.endswith(".gz") else content)
    events = document["traceEvents"]
    threads = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert threads == {1: "compute", 2: "to host", 3: "to device"}
    timeline = simulate(plan.graph, plan.schedule, LINKED)
    slices = [event for event in events if event["ph"] == "X"]
    for event in slices:
        position = event["args"]["instruction"]
        assert event["ts"] == pytest.approx(timeline.start_seconds[position] * 1e6)
        assert event["ts"] + event["dur"] == pytest.approx(timeline.end_seconds[position] * 1e6)
    assert len(slices) == int(np.isin(plan.schedule.codes, (0, 2, 3, 4)).sum())
    for stream in threads:
        in_order = sorted((e["ts"], e["ts"] + e["dur"]) for e in slices if e["tid"] == stream)
        assert in_order
        assert all(end <= start for (_, end), (start, _) in pairwise(in_order))
    counters = {e["name"]: [] for e in events if e["ph"] == "C"}
    for event in events:
        if event["ph"] == "C":
            counters[event["name"]].append(event["args"]["bytes"])
    assert max(counters["device bytes"]) == plan.predicted.peak_bytes
    assert max(counters["host bytes"]) == plan.predicted.host_peak_bytes == 400


def test_trace_marks_recomputations(tmp_path: Path) -> None:
    write_trace(plan_of(small_graph(), REMATERIALIZED), tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    recomputed = [event for event in events if event["args"].get("recomputed")]
    assert [(event["name"], event["ts"], event["dur"], event["args"]["module"]) for event in recomputed] == [
        ("fc1 (recomputed)", 5e6, 1e6, "net.fc1")
    ]


# -- the picture ------------------------------------------------------------------------------------------------------


def test_without_chrome_a_picture_is_one_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of(small_graph(), REMATERIALIZED)
    monkeypatch.delenv("BROWSER_PATH", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MemfitError, match=r"no Chrome or Chromium was found; install one"):
        write_png(plan, tmp_path / "plan.png")
    monkeypatch.setenv("BROWSER_PATH", "/no/such/chrome")
    with pytest.raises(MemfitError, match=r"no browser at '/no/such/chrome'"):
        write_png(plan, tmp_path / "plan.png")
    assert list(tmp_path.iterdir()) == []


def test_a_chrome_that_fails_is_one_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chrome = tmp_path / "chrome"
    chrome.write_text("#!/bin/sh\necho first >&2\necho 'cannot open display' >&2\nexit 3\n")
    chrome.chmod(0o755)
    monkeypatch.setenv("BROWSER_PATH", str(chrome))
    with pytest.raises(MemfitError, match=r"drew no picture of page.html: cannot open display"):
        write_png(plan_of(small_graph(), REMATERIALIZED), tmp_path / "plan.png")
    assert not (tmp_path / "plan.png").exists()


@pytest.mark.parametrize(("width", "height"), [(0, 500), (5000, 500), (500, 299)])
def test_a_picture_of_no_sensible_size_is_refused(width: int, height: int, tmp_path: Path) -> None:
    with pytest.raises(InvalidOptionError, match=r"_pixels is \d+, expected 300 to 4096"):
        write_png(
            plan_of(small_graph(), REMATERIALIZED), tmp_path / "plan.png", width_pixels=width, height_pixels=height
        )


def test_the_summary_says_where_a_host_budget_was_left_out() -> None:
    hint = "host memory: not used, for no host budget was given"
    slower = plan_of(small_graph(), REMATERIALIZED, LINKED)
    assert hint in text_summary(slower)
    assert hint not in text_summary(msgspec.structs.replace(slower, host_budget_bytes=1))
    assert hint not in text_summary(plan_of(small_graph(), REMATERIALIZED))
    free = Problem(graph=small_graph(), device=LINKED, budget_bytes=1)
    assert hint not in text_summary(plan_of(small_graph(), unplanned_schedule(free), LINKED))
