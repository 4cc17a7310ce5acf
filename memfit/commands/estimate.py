"""`memfit estimate`: the memory of a step as it stands, by role and by module, without allocating it."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import RenderableType
from rich.text import Text

from memfit.commands import options
from memfit.commands.answer import Answer, columns_table, rows_table
from memfit.commands.graph_with_costs import Costed, graph_with_costs
from memfit.commands.ranks import RankRow, Ranks, on_ranks, one_of, ranks_answer, require_alone
from memfit.commands.targets import resolve
from memfit.commands.work import Work, working
from memfit.errors import InvalidBudgetError, InvalidOptionError, InvalidTargetError
from memfit.graph import Graph, Phase, Role, Storage
from memfit.options import Cluster
from memfit.packing.strategies import STRATEGIES, ParallelBytes, parallel_bytes, strategy_bytes
from memfit.plan import Problem
from memfit.planners.engine.results import unplanned_peak_bytes, unplanned_schedule
from memfit.rebuild import rebuilt
from memfit.report.formatting import count_text, share_text
from memfit.report.live import Run, play
from memfit.report.ranks import COLUMNS, RankFigures
from memfit.system.budget import format_bytes, parse_budget
from memfit.system.lines import printable

if TYPE_CHECKING:
    from memfit.step.freed_run import FreedRun

EXAMPLES = """
Examples:

memfit estimate resnet50 --set batch=256

memfit estimate train.py:make_step --json

memfit estimate gpt2 --forward-only --device-profile h100

memfit estimate gpt2 --set batch=64 --seconds --within 8GiB

memfit estimate inceptionv3 --forward-only --parallel-safe

memfit estimate train.py:make_step --ranks 8,16,32,64 --shard --device-profile h100
"""

_STRATEGY_ROWS = {"none": "each storage apart", "inplace": "and in place", "sharing": "and shared, packed"}
_PARALLEL_ROWS = {
    "apart": "each storage apart",
    "ancestors": "shared where the graph orders the ops",
    "paths": "shared along the 8 longest paths",
    "series": "shared as in series",
}
_MODULES_SHOWN = 10
_STORAGES_SHOWN = 10
_MODULE_DEPTH = 3  # `features.stage1.unit1.body.conv1` is counted under `features.stage1.unit1`


def estimate(
    target: options.Target,
    ranks: Ranks,
    forward_only: Annotated[
        bool, typer.Option("--forward-only", help="Leave out backward and update: what inference needs.")
    ] = False,
    strategy: Annotated[
        list[str] | None,
        typer.Option(
            "--strategy",
            metavar="none|inplace|sharing",
            help="How memory is given out: each storage apart, in place where an input dies, one packed arena. "
            "May be repeated; all three unless given.",
        ),
    ] = None,
    parallel_safe: Annotated[
        bool,
        typer.Option("--parallel-safe", help="Also compare sharing that stays safe when ops run at the same time."),
    ] = False,
    set_: options.WorkloadOptions = None,
    device_profile: Annotated[
        str | None,
        typer.Option(
            "--device-profile",
            metavar="NAME|FILE",
            help="Round sizes up as this device does (see `memfit devices`) instead of the one here.",
        ),
    ] = None,
    seconds: Annotated[
        bool,
        typer.Option(
            "--seconds",
            help="Run the ops here, and estimate the step's seconds without its memory: large storages are "
            "freed at once, and made anew before they are read.",
        ),
    ] = False,
    within: Annotated[
        str | None, typer.Option("--within", metavar="SIZE", help="What that run may take: 6GiB, or 60% of the peak.")
    ] = None,
) -> Answer:
    """Say how much memory TARGET needs unplanned, and which storages hold it. No op runs, no activation is allocated.

    The workspace of kernels, and the real bytes of what they return, are not known without running them: workspace is
    left out unless TARGET is a graph file that has it, and bytes are those of fake tensors. With --seconds ops run.
    """
    settings, clusters = options.read_settings(set_, "--set"), ranks.clusters()
    strategies = _read_strategies(strategy)
    _require_no_run_asked_in_vain(seconds, within, forward_only, device_profile)
    if clusters:
        require_alone({"--seconds": seconds} | ({"--parallel-safe": parallel_safe} if len(clusters) > 1 else {}))
    if len(clusters) > 1:
        with working() as work:
            rows = [_row(target, settings, device_profile, each, work, forward_only=forward_only) for each in clusters]
        return ranks_answer(target, rows, f"{target}, unplanned", work.exit_status)
    with working() as work:
        with on_ranks(one_of(clusters)) as there:
            costed = graph_with_costs(
                resolve(target, settings, there.ranks),
                device_profile,
                work,
                costs=seconds or _has_rates(clusters, device_profile),
            )
        timed = _freed_run(costed, within, work) if seconds else None
        run = _unplanned(costed, forward_only=forward_only)
        work.stage("packing")
        needs = strategy_bytes(run.graph, run.schedule, run.device, strategies=strategies)
        parallel = parallel_bytes(run.graph, run.device) if parallel_safe else None
        has_seconds = bool(device_profile)
        figures = there.figures_of(run, costed.step, has_seconds=has_seconds) if clusters else None
    return _answer(target, run, needs, parallel, timed, figures)


def _row(
    target: str,
    settings: dict[str, str],
    device_profile: str | None,
    cluster: Cluster,
    work: Work,
    *,
    forward_only: bool,
) -> RankRow:
    """Return the row of one number of ranks in the table."""
    has_seconds = _has_rates([cluster], device_profile)
    with on_ranks(cluster) as there:
        costed = graph_with_costs(resolve(target, settings, there.ranks), device_profile, work, costs=has_seconds)
        run = _unplanned(costed, forward_only=forward_only)
        figures = there.figures_of(run, costed.step, has_seconds=has_seconds)
    return RankRow(cluster=cluster, device=costed.device.name, figures=figures)


def _has_rates(clusters: list[Cluster], device_profile: str | None) -> bool:
    """Return whether ops get seconds: those of a roofline, for which nothing runs."""
    return bool(clusters) and device_profile is not None


def _unplanned(costed: Costed, *, forward_only: bool) -> Run:
    graph = forward_part(costed.graph) if forward_only else costed.graph
    schedule = unplanned_schedule(Problem(graph=graph, device=costed.device, budget_bytes=0))
    return play(graph, schedule, costed.device)


def _require_no_run_asked_in_vain(
    seconds: bool, within: str | None, forward_only: bool, device_profile: str | None
) -> None:
    if within is not None and not seconds:
        raise InvalidOptionError("--within is what the run of --seconds may take; give both")
    for option, value in (("--forward-only", forward_only), ("--device-profile", device_profile)):
        if seconds and value:
            raise InvalidOptionError(f"--seconds runs the whole step on the device here; leave out {option}")


def _freed_run(costed: Costed, within: str | None, work: Work) -> FreedRun:
    if costed.step is None or costed.captured is None:
        raise InvalidOptionError("--seconds runs ops, which a graph file does not have; name a workload or a script")
    from memfit.step.freed_run import run_freed  # torch: other answers need none

    whole_bytes = unplanned_peak_bytes(costed.graph, costed.device)
    try:
        within_bytes = None if within is None else parse_budget(within, whole_bytes)
    except InvalidBudgetError as error:
        raise InvalidBudgetError(f"--within: {error}") from error
    work.stage("running the ops, freeing what is big")
    return run_freed(costed.step, costed.captured, costed.graph, within_bytes=within_bytes, progress=work.done)


def _read_strategies(names: list[str] | None) -> list[str]:
    for name in names or ():
        if name not in STRATEGIES:
            raise InvalidOptionError(f"--strategy is {name!r}, expected one of {', '.join(STRATEGIES)}")
    return list(dict.fromkeys(names or STRATEGIES))


def forward_part(graph: Graph) -> Graph:
    """Return the graph of the forward pass alone: its ops, and the storages that they touch or that are the model's.

    What only backward reads is then dropped at once, as in inference.

    Raises:
        InvalidTargetError: the graph has no op of the forward phase.
    """
    ops = [op for op in graph.ops if op.phase is Phase.FORWARD]
    if not ops:
        raise InvalidTargetError(f"graph {graph.name!r} has no op of phase 'forward'; leave out --forward-only")
    touched = {storage for op in ops for storage in (*op.reads, *op.mutates, *op.writes)}
    kept = [s.id for s in graph.storages if s.id in touched or (s.resident and s.role is Role.PARAMETER)]
    return rebuilt(graph, ops, kept, name=f"{graph.name}, forward only")


def _answer(
    target: str,
    run: Run,
    needs: dict[str, int],
    parallel: ParallelBytes | None,
    timed: FreedRun | None,
    figures: RankFigures | None,
) -> Answer:
    graph, position = run.graph, run.timeline.peak_position
    live = [graph.storages[storage] for storage in run.live_at(position)]
    layers = run.layers.items() if graph.ops else ()
    by_role = {layer.value: int(sizes[position]) for layer, sizes in layers if sizes[position]}
    op = run.op_at(position)
    keys: dict[str, Any] = {
        "peak_bytes": run.timeline.peak_bytes,
        "by_role": dict(sorted(by_role.items(), key=lambda entry: -entry[1])),
        "peak_op": None if op is None else graph.ops[op].name,
        "storages_at_peak": [
            {"name": s.name, "bytes": s.bytes, "role": s.role, "module": module_of(graph, s)} for s in live
        ],
        "strategies": needs,
    }
    if parallel is not None:
        keys["parallel"] = {**parallel.needed_bytes, "series_dependences": parallel.series_dependences}
    if figures is not None:
        keys["rank"] = figures.keys()
    if timed is not None:
        keys["seconds"] = {
            "freed_run": timed.step_seconds,
            "ops_one_by_one": sum(op.seconds for op in graph.ops),
            "freed_run_peak_bytes": timed.peak_bytes,
            "freed_bytes": timed.freed_bytes,
        }
    return Answer(target=target, device=run.device.name, keys=keys, parts=_parts(run, keys, op, figures))


def _parts(run: Run, keys: dict[str, Any], op: int | None, figures: RankFigures | None) -> tuple[RenderableType, ...]:
    peak_bytes = run.timeline.peak_bytes
    head = {"peak": format_bytes(peak_bytes), "step": printable(run.graph.name)}
    if op is not None:
        peak_op = run.graph.ops[op]
        head["reached at"] = f"{peak_op.name} ({peak_op.phase}{f', {peak_op.module}' if peak_op.module else ''})"
    unknown = sum(o.workspace_bytes is None for o in run.graph.ops)
    if unknown:
        head["left out"] = f"workspace of {count_text(unknown, 'op')}, which is known only when they run"
    if "seconds" in keys:
        found = keys["seconds"]
        took = format_bytes(found["freed_run_peak_bytes"])
        head["step time"] = f"about {found['freed_run']:.3g} s, of a run that took {took}"
        head["its ops alone"] = f"{found['ops_one_by_one']:.3g} s"
    for name, needed_bytes in keys["strategies"].items():
        head[_STRATEGY_ROWS[name]] = format_bytes(needed_bytes)
    roles = [(role, format_bytes(size), share_text(size, peak_bytes)) for role, size in keys["by_role"].items()]
    modules = _by_module(run)[:_MODULES_SHOWN]
    shown = [(name, format_bytes(size), share_text(size, peak_bytes)) for name, size in modules]
    storages = [
        (s["name"], format_bytes(s["bytes"]), s["role"], s["module"])
        for s in keys["storages_at_peak"][:_STORAGES_SHOWN]
    ]
    return (
        rows_table(head),
        *((Text(), columns_table(COLUMNS, [figures.cells()])) if figures else ()),
        *(_parallel_parts(keys["parallel"]) if "parallel" in keys else ()),
        Text(),
        columns_table(("role", "bytes at the peak", "share"), roles),
        Text(),
        columns_table(("module", "bytes at the peak", "share"), shown),
        Text(),
        columns_table(("largest storages", "bytes", "role", "module"), storages),
    )


def _parallel_parts(needs: dict[str, int]) -> tuple[RenderableType, ...]:
    added = f"with {count_text(needs['series_dependences'], 'dependence')} beside the graph's own"
    rows = [(row, format_bytes(needs[way]), added if way == "series" else "") for way, row in _PARALLEL_ROWS.items()]
    return Text(), columns_table(("safe when ops run at the same time", "bytes", ""), rows)


def module_of(graph: Graph, storage: Storage) -> str:
    """Return the module that a storage belongs to: its writer's, or for a parameter the one it is named after."""
    writer = graph.writer_of.get(storage.id)
    if writer is not None:
        return graph.ops[writer].module
    return storage.name.rpartition(".")[0]


def _by_module(run: Run) -> list[tuple[str, int]]:
    """Return bytes at the peak by module, largest first; deep modules count under the one at `_MODULE_DEPTH`."""
    sizes: defaultdict[str, int] = defaultdict(int)
    for storage in run.live_at(run.timeline.peak_position):
        module = module_of(run.graph, run.graph.storages[storage]).split(".")
        name = ".".join(module[:_MODULE_DEPTH]) or "(no module)"
        sizes[name] += run.device.aligned(run.graph.storages[storage].bytes)
    return sorted(sizes.items(), key=lambda entry: (-entry[1], entry[0]))
