"""The report in a headless Chromium: it draws, nothing complains, nothing is loaded, and what is clicked answers."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from browsing import NEEDS_BROWSER, Visit
from devices import linked
from small_plans import plan_of

from memfit.graph import Graph, Op, Phase, Role, Storage
from memfit.plan import Plan, Problem
from memfit.planners.engine.results import unplanned_schedule
from memfit.report import Measured, write_html, write_png
from memfit.report.comparison import ComparedPoint, write_comparison
from memfit.report.frontier_page import BatchPoint, FrontierRow, write_frontier_page
from memfit.schedule import Compute, Drop, Instruction, Offload, Prefetch, Schedule, Wait
from memfit.simulate import simulate

pytestmark = NEEDS_BROWSER

HOSTILE = "</script><script>window.hacked=1</script><img src=x onerror=window.hacked=2><b>bold</b>@@data@@"
DEVICE = linked(1e7, 1e7)


def deep_step(layers: int, hostile: str = "") -> Graph:
    """A forward chain of `layers` ops and its backward, under names that `hostile` makes dangerous."""
    storages = [
        Storage(id=0, name=f"weight{hostile}", bytes=3000, role=Role.PARAMETER),
        Storage(id=1, name="batch", bytes=500, role=Role.INPUT),
    ]
    ops: list[Op] = []
    for number in range(2 * layers):
        forward = number < layers
        name = f"{'conv' if forward else 'conv_backward'}_{number if forward else 2 * layers - 1 - number}"
        size, role = (1000 + 10 * number, Role.ACTIVATION) if forward else (900, Role.GRADIENT)
        storages.append(Storage(id=number + 2, name=f"{name}.out{hostile}", bytes=size, role=role))
        reads = (0, number + 1) if forward else (0, number + 1, 2 * layers - number + 1)
        module = f"model.layers.{number % layers}{hostile}"
        phase = Phase.FORWARD if forward else Phase.BACKWARD
        ops.append(
            Op(id=number, name=f"{name}{hostile}", phase=phase, reads=reads, writes=(number + 2,), seconds=1e-4,
               module=module, workspace_bytes=100)
        )  # fmt: skip
    return Graph.build(name=f"deep step{hostile}", storages=storages, ops=ops)


def rematerialize_every_other(graph: Graph) -> Schedule:
    """Compute every other activation again in backward, and offload the first one. Layers are even in number."""
    layers = len(graph.ops) // 2
    again = set(range(3, layers + 1, 2))
    schedule: list[Instruction] = []
    for op in graph.ops[:layers]:
        schedule.append(Compute(op=op.id))
        if op.id == 1:
            schedule += [Offload(storage=2), Wait(storage=2), Drop(storage=2)]
        schedule += [Drop(storage=s) for s in op.reads if s in again]
    for op in graph.ops[layers:]:
        saved = op.reads[2]
        if saved in again:
            schedule += [Prefetch(storage=2)] if saved == 3 else []
            schedule.append(Compute(op=saved - 2))
        schedule.append(Compute(op=op.id))
        schedule += [Drop(storage=s) for s in dict.fromkeys(op.reads[1:])]
    return Schedule.of(schedule)


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> tuple[Plan, Path]:
    graph = deep_step(30)
    plan = plan_of(graph, rematerialize_every_other(graph), DEVICE)
    path = tmp_path_factory.mktemp("report") / "report.html"
    budget = plan.budget_bytes
    curve = [(budget // 2, None, "infeasible"), (budget, plan.overhead, "feasible"), (2 * budget, 0.0, "optimal")]
    measured = Measured(
        peak_bytes=1,
        step_seconds=1.0,
        baseline_peak_bytes=1,
        baseline_step_seconds=1.0,
        bitwise_equal=True,
        machine="a test",
    )
    write_html(plan, path, curve=curve, measured=measured)
    return plan, path


def test_the_report_draws_and_nothing_complains(report: tuple[Plan, Path], visit: Visit) -> None:
    _, path = report
    visit.open(path)
    page = visit.page
    assert visit.complaints == []
    assert visit.requests == [path.as_uri()]
    for layer in ("unplanned", "planned"):
        assert page.evaluate(f"Object.keys(data.runs.{layer}.layers).length") >= 4
    # Both charts: one filled area for each role, and the three strips of the plan.
    areas = page.locator("#live .scatterlayer .trace").count()
    assert (
        areas == page.evaluate("Object.values(data.runs).reduce((n, run) => n + Object.keys(run.layers).length, 0)") + 3
    )
    assert page.locator("#live .shapelayer path").count() >= 4
    assert page.locator("#curve .scatterlayer .trace").count() == 4
    assert page.locator("#copies .scatterlayer .trace").count() == 3
    texts = page.locator("#live .annotation-text").all_text_contents()
    assert any(text.startswith("budget ") for text in texts)
    assert sum(text.startswith("peak ") for text in texts) == 2
    assert {"forward", "backward"} <= set(texts)
    assert page.locator("#legend").inner_text().split("\n")[-3:] == ["recomputed", "to host", "from host"]


def test_the_op_under_the_mouse_is_named(report: tuple[Plan, Path], visit: Visit) -> None:
    plan, path = report
    visit.open(path)
    chart = visit.page.locator("#live")
    chart.scroll_into_view_if_needed()
    box = chart.bounding_box()
    visit.page.mouse.move(box["x"] + 0.3 * box["width"], box["y"] + 0.3 * box["height"])
    tip = visit.page.locator("#live-tip")
    tip.wait_for(state="visible")
    lines = tip.inner_text().split("\n")
    names = {op.name: op for op in plan.graph.ops}
    assert lines[0] in names
    assert lines[1] == f"{names[lines[0]].phase} · {names[lines[0]].module} · 100 µs"
    assert "activations" in lines
    assert lines[-2] == "on the device"
    visit.page.mouse.move(5, 5)
    tip.wait_for(state="hidden")


def test_axis_by_operation(report: tuple[Plan, Path], visit: Visit) -> None:
    plan, path = report
    visit.open(path)
    visit.page.click("#axis-switch [data-axis=step]")
    visit.page.locator("#live .xtitle", has_text="operations").wait_for()
    last = visit.page.evaluate("Math.max(...document.getElementById('live').data.flatMap(trace => trace.x))")
    assert last == int((plan.schedule.codes == 0).sum())
    assert visit.complaints == []


def test_what_is_live_at_the_peak(report: tuple[Plan, Path], visit: Visit) -> None:
    plan, path = report
    visit.open(path)
    for run, schedule in (
        ("planned", plan.schedule),
        ("unplanned", unplanned_schedule(Problem(graph=plan.graph, device=DEVICE, budget_bytes=1))),
    ):
        visit.page.click(f"#peak-switch [data-run={run}]")
        rows = visit.rows("#peak-table")
        assert rows[0][0] == "2.93 KiB"  # the parameter, largest of all
        assert rows[0][2:] == ["weight", "parameter"]
        peak = simulate(plan.graph, schedule, DEVICE).peak_bytes
        assert (
            visit.page.evaluate(
                f"[...data.peaks.{run}.rows, ...data.peaks.{run}.others].reduce((sum, row) => sum + row[1], 0)"
            )
            == peak
        )
        assert rows[1][2] == "conv_29.out\nmodel.layers.29"


def test_the_table_of_storages_is_searched_sorted_and_paged(report: tuple[Plan, Path], visit: Visit) -> None:
    plan, path = report
    visit.open(path)
    page = visit.page
    count = len(plan.graph.storages)
    assert len(visit.rows("#storage-table")) == 25
    assert page.locator("#storage-pager").inner_text().startswith(f"1–25 of {count}")
    page.click("#storage-pager button:has-text('next')")
    assert page.locator("#storage-pager").inner_text().startswith(f"26–50 of {count}")
    page.fill("#storage-search", "CONV_BACKWARD_7.")
    assert [row[0] for row in visit.rows("#storage-table")] == ["conv_backward_7.out\nmodel.layers.22"]
    page.fill("#storage-search", "")
    page.select_option("#storage-fate", "offloaded")
    (row,) = visit.rows("#storage-table")
    assert (row[0], row[2]) == ("conv_0.out\nmodel.layers.0", "offloaded once")
    page.select_option("#storage-fate", "rematerialized")
    sizes = [row[1] for row in visit.rows("#storage-table")]
    page.click("#storage-table th button:has-text('size')")
    assert page.locator("#storage-table th[aria-sort=ascending]").inner_text().startswith("size")
    assert [row[1] for row in visit.rows("#storage-table")] == sizes[::-1]
    page.click("#storage-table th button:has-text('name')")
    names = [row[0] for row in visit.rows("#storage-table")]
    assert names == sorted(names, key=lambda name: int(name.split("_")[1].split(".")[0]))
    assert visit.complaints == []


def test_the_time_of_recomputation_is_sorted_and_the_stays_are_at_hand(report: tuple[Plan, Path], visit: Visit) -> None:
    _, path = report
    visit.open(path)
    page = visit.page
    assert page.locator("#more-section li").count() == 1
    assert " at once: reads conv" in page.locator("#least-section li").first.inner_text()
    page.click("#storage-table th button:text-is('recompute')")
    seconds = [row[4] for row in visit.rows("#storage-table")]
    assert seconds == sorted(seconds, key=lambda text: text == "–")  # kept storages have none, and are last
    assert seconds[0] == "100 µs"
    page.select_option("#storage-fate", "rematerialized")
    stays = page.locator("#storage-table tbody tr td:nth-child(4)").first.get_attribute("title")
    assert stays.startswith("on the device: ") and stays.count("–") == 2
    assert visit.complaints == []


def test_the_page_of_batches_draws_both_curves(tmp_path: Path, visit: Visit) -> None:
    fitting = [
        BatchPoint(batch=size, least_bytes=1, unplanned_bytes=size << 20, peak_bytes=1 << 20, overhead=0.01 * size,
                   samples_per_second=speed)
        for size, speed in ((1, 10.0), (2, 18.0), (4, 15.0))
    ]  # fmt: skip
    points = [*fitting, BatchPoint(batch=8, least_bytes=2 << 20)]
    row = FrontierRow(options={}, largest_batch=4, points=points)
    write_frontier_page("memfit batch", HOSTILE, 1 << 20, DEVICE, [row], tmp_path / "batch.html")
    visit.open(tmp_path / "batch.html")
    page = visit.page
    assert visit.complaints == []
    assert visit.requests == [(tmp_path / "batch.html").as_uri()]
    assert page.evaluate("window.hacked") is None
    assert HOSTILE in page.locator("h1").inner_text()
    assert "The fastest is 2, at 18.0" in page.locator("header").inner_text()
    drawn = page.evaluate("document.getElementById('chart').data.map(trace => [trace.x, trace.y])")
    assert drawn == [[[1, 2, 4], [10, 18, 15]], [[1, 2, 4], [1, 2, 4]]]
    assert page.locator("#chart .annotation-text").all_text_contents() == ["no plan fits"]
    assert visit.rows("#points")[-1] == ["as it is", "8", "no plan fits"]


def test_hostile_names_do_nothing(tmp_path: Path, visit: Visit) -> None:
    graph = deep_step(6, HOSTILE)
    write_html(plan_of(graph, rematerialize_every_other(graph), DEVICE, planner=HOSTILE), tmp_path / "hostile.html")
    visit.open(tmp_path / "hostile.html")
    page = visit.page
    page.locator("#live").scroll_into_view_if_needed()
    box = page.locator("#live").bounding_box()
    page.mouse.move(box["x"] + 0.3 * box["width"], box["y"] + 0.3 * box["height"])
    page.locator("#live-tip").wait_for(state="visible")
    assert HOSTILE in page.locator("#live-tip").inner_text()
    assert page.evaluate("window.hacked") is None
    assert page.locator("img, main b:text-is('bold')").count() == 0
    assert any(HOSTILE in row[0] for row in visit.rows("#storage-table"))
    assert visit.complaints == []
    assert len(visit.requests) == 1


def test_an_injected_script_would_be_refused(report: tuple[Plan, Path], tmp_path: Path, visit: Visit) -> None:
    """Break the escaping on purpose: the content security policy still stops the script."""
    _, path = report
    broken = path.read_text().replace("<h1>", "<h1><script>window.hacked = 1</script>", 1)
    (tmp_path / "broken.html").write_text(broken)
    visit.open(tmp_path / "broken.html")
    assert visit.page.evaluate("window.hacked") is None
    assert any("Content Security Policy" in complaint for complaint in visit.complaints)


@pytest.mark.parametrize("width", [360, 700, 1600])
def test_no_width_scrolls_sideways(width: int, report: tuple[Plan, Path], visit: Visit) -> None:
    _, path = report
    visit.page.set_viewport_size({"width": width, "height": 800})
    visit.open(path)
    assert visit.page.evaluate("document.documentElement.scrollWidth") <= width
    assert visit.page.locator("#live .main-svg").first.bounding_box()["width"] <= width


def test_dark_on_screen_light_on_paper(report: tuple[Plan, Path], visit: Visit) -> None:
    _, path = report
    visit.page.emulate_media(color_scheme="dark")
    visit.open(path)
    background = "getComputedStyle(document.body).backgroundColor"
    assert visit.page.evaluate(background) == "rgb(21, 24, 28)"
    tick = "getComputedStyle(document.querySelector('#live .xtick text')).fill"
    assert visit.page.evaluate(tick) == "rgb(169, 178, 187)"
    visit.page.emulate_media(color_scheme="dark", media="print")
    assert visit.page.evaluate(background) == "rgb(255, 255, 255)"


@pytest.mark.parametrize("layers", [0, 4])
def test_steps_without_ops_or_times_are_drawn(layers: int, tmp_path: Path, visit: Visit) -> None:
    timed = deep_step(layers)
    ops = [msgspec.structs.replace(op, seconds=0.0) for op in timed.ops]
    graph = Graph.build(name=timed.name, storages=timed.storages, ops=ops)
    write_html(
        plan_of(graph, rematerialize_every_other(graph) if layers else Schedule.of([]), DEVICE),
        tmp_path / "report.html",
    )
    visit.open(tmp_path / "report.html")
    assert visit.complaints == []
    assert (visit.page.locator("#live .xtitle").text_content() or "").startswith("operations")


def test_ten_thousand_ops_are_drawn(tmp_path: Path, visit: Visit) -> None:
    graph = deep_step(5000)
    write_html(plan_of(graph, rematerialize_every_other(graph), DEVICE), tmp_path / "large.html")
    assert (tmp_path / "large.html").stat().st_size <= 1_500_000
    visit.open(tmp_path / "large.html")
    assert visit.complaints == []
    assert visit.page.evaluate("data.runs.unplanned.total.length") <= 1500
    assert visit.page.locator("#storage-pager").inner_text().startswith("1–25 of 10,002")
    visit.page.fill("#storage-search", "conv_4321.")
    assert [row[0] for row in visit.rows("#storage-table")] == ["conv_4321.out\nmodel.layers.4321"]


def test_picture(tmp_path: Path, report: tuple[Plan, Path]) -> None:
    plan, _ = report
    write_png(plan, tmp_path / "plan.png", width_pixels=700, height_pixels=400)
    content = (tmp_path / "plan.png").read_bytes()
    assert content.startswith(b"\x89PNG")
    assert (int.from_bytes(content[16:20]), int.from_bytes(content[20:24])) == (1400, 800)
    assert len(content) > 15_000  # an empty white page of this size takes 3 kB


def compared(plan: Plan, planner: str, measured: Measured | None = None) -> ComparedPoint:
    return ComparedPoint(
        planner=planner,
        budget_bytes=plan.budget_bytes,
        status=str(plan.status),
        peak_bytes=plan.predicted.peak_bytes,
        overhead=plan.overhead,
        plan_seconds=plan.plan_seconds,
        measured=measured,
        plan=plan,
    )


def test_two_chosen_plans_are_compared(tmp_path: Path, visit: Visit) -> None:
    graph = deep_step(30, HOSTILE)
    everything = unplanned_schedule(Problem(graph=graph, device=DEVICE, budget_bytes=1))
    measured = Measured(
        peak_bytes=20_000,
        step_seconds=0.2,
        baseline_peak_bytes=30_000,
        baseline_step_seconds=0.1,
        bitwise_equal=True,
        machine="a test",
    )
    points = [
        compared(plan_of(graph, everything, DEVICE), "none", measured),
        compared(plan_of(graph, rematerialize_every_other(graph), DEVICE), "auto"),
        compared(plan_of(graph, everything, DEVICE), "segments"),
        ComparedPoint(planner="none", budget_bytes=1, status="infeasible"),
        ComparedPoint(planner="checkpoint:block", setting="block", status="measured", measured=measured),
    ]
    write_comparison(graph, DEVICE, points, tmp_path / "comparison.html")
    visit.open(tmp_path / "comparison.html")
    page = visit.page
    assert visit.complaints == []
    assert visit.requests == [(tmp_path / "comparison.html").as_uri()]
    assert page.evaluate("window.hacked") is None
    assert page.locator("#predicted .scatterlayer .trace").count() == 3
    assert page.locator("#measured .scatterlayer .trace").count() == 2
    page.locator("#predicted").scroll_into_view_if_needed()
    peak_mib, overhead = page.evaluate("[data.points[1].peak_bytes / MIB, 100 * data.points[1].overhead]")
    under = visit.text_under_the_mouse("#predicted", peak_mib, overhead)
    assert under[0].startswith("auto: ")
    assert under[1].startswith("asked for ")
    assert [row[0] for row in visit.rows("#points")] == ["none", "auto", "segments", "none", "checkpoint:block"]
    assert visit.rows("#points")[4][6:] == ["19.53 KiB", "+100.0%", "yes"]
    assert page.locator("#one option").count() == 3  # what was not planned has nothing to compare
    assert page.locator("#other").input_value() == "1", "memfit's own plan is compared first"
    fates = {row[0].split("\n")[0].removesuffix(HOSTILE): row[2:] for row in visit.rows("#fates")}
    assert fates["conv_0.out"] == ["kept", "offloaded"]
    assert fates["conv_1.out"] == ["kept", "rematerialized"]
    assert "conv_2.out" not in fates
    page.select_option("#other", "0")
    assert visit.rows("#fates") == []
    assert page.locator("#difference").inner_text() == "The two plans treat every storage alike."
