"""`memfit pack`: checked offsets for an allocation trace, or parallel-safe ones for a graph, with a picture."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
import typer
from rich.console import RenderableType
from rich.text import Text

from memfit.commands import options
from memfit.commands.answer import Answer, rows_table
from memfit.commands.targets import GRAPH_ENDINGS
from memfit.commands.work import Work, working
from memfit.device import GENERIC, Device
from memfit.errors import InvalidOptionError
from memfit.graph import Graph
from memfit.packing import PACKERS, Blocks, Layout, Packer, PackingProblem, check_layout, make_packer
from memfit.packing.blocks import make_layout
from memfit.packing.check_parallel import check_parallel
from memfit.packing.parallel import PATHS, WAYS, ParallelLayout, pack_parallel, serial_blocks
from memfit.packing.registry import SEARCHING, compile_packers
from memfit.packing.trace_file import read_trace, write_offsets
from memfit.report.formatting import count_text, seconds_text
from memfit.report.layout_page import write_layout_html, write_layout_png
from memfit.report.layout_text import layout_text
from memfit.report.picture import find_chrome
from memfit.system.budget import format_bytes
from memfit.system.files import require_writable
from memfit.system.shipped import shipped_functions

EXAMPLES = """
Examples:

memfit pack trace.csv

memfit pack trace.csv --packer exact --time-limit 60 --output offsets.csv

memfit pack trace.csv --ends inclusive --align 512 --picture layout.html --timeline

memfit pack step.graph.json.gz --parallel-safe ancestors --picture layout.html
"""

_HTML, _PNG = (".html", ".htm"), (".png",)


_File = Annotated[
    Path,
    typer.Argument(
        metavar="FILE",
        help="A CSV file, or gzip of it, with one block a row: id,lower,upper,size. Or a graph file.",
    ),
]
_Packer = Annotated[str, typer.Option("--packer", "-p", metavar="NAME", help="See `memfit packers`.")]
_PackerOptions = Annotated[
    list[str] | None,
    typer.Option("--option", metavar="NAME=VALUE", help="An option of the packer; may be given several times."),
]
_TimeLimit = Annotated[
    float, typer.Option("--time-limit", "-t", metavar="SECONDS", help="How long packers may improve their answer.")
]
_Ends = Annotated[
    str, typer.Option("--ends", metavar="exclusive|inclusive", help="Whether a block is live in its `upper` step.")
]
_Align = Annotated[int, typer.Option("--align", metavar="N", min=1, help="Every offset is a multiple of N.")]
_Seed = Annotated[int, typer.Option("--seed", metavar="N", help="The same seed gives the same layout.")]
_Output = Annotated[
    Path | None,
    typer.Option("--output", "-o", metavar="OUT.csv", help="Write blocks with their offsets."),
]
_Picture = Annotated[
    Path | None,
    typer.Option("--picture", metavar="FILE.html|.png", help="Draw address over time."),
]
_Timeline = Annotated[bool, typer.Option("--timeline", help="Draw the layout as text.")]
_ParallelSafe = Annotated[
    str | None,
    typer.Option(
        "--parallel-safe",
        metavar="|".join(WAYS),
        help="Pack the storages of a graph file so that its ops may run at the same time: share where the graph "
        "orders the ops, or along its longest paths only, or as in series, with the dependences that this needs.",
    ),
]
_Paths = Annotated[
    int, typer.Option("--paths", metavar="K", min=1, help="With --parallel-safe paths: how many of the longest.")
]


def pack(
    file: _File,
    packer: _Packer = "auto",
    option: _PackerOptions = None,
    time_limit: _TimeLimit = 10.0,
    ends: _Ends = "exclusive",
    align: _Align = 1,
    seed: _Seed = 0,
    output: _Output = None,
    picture: _Picture = None,
    timeline: _Timeline = False,
    parallel_safe: _ParallelSafe = None,
    paths: _Paths = PATHS,
) -> Answer:
    """Give every block of FILE an address, as low as possible. Steps are half-open, [lower, upper)."""
    require_writable(output, picture)
    _require_picture(picture)
    _require_kind(file, parallel_safe, packer, option)
    if paths != PATHS and parallel_safe != "paths":
        raise InvalidOptionError("--paths is for --parallel-safe paths; leave it out")
    settings = options.read_settings(option, "--option")
    chosen = make_packer(packer, **options.typed_options("packer", packer, PACKERS, settings))
    limit = options.require_time_limit(time_limit)
    with working() as work:
        work.stage("reading the file")
        if parallel_safe is None:
            blocks = read_trace(file, ends=ends, alignment_bytes=align)
            if isinstance(chosen, SEARCHING):
                _compile(work)
            layout, seconds = _packed(blocks, chosen, limit, seed, work)
            extra: dict[str, Any] = {}
        else:
            device = msgspec.structs.replace(GENERIC, alignment_bytes=align)
            graph = Graph.load(file)
            _compile(work)
            work.stage("packing", expected_seconds=limit)
            found = partial(pack_parallel, graph, parallel_safe, device, paths=paths, seconds=limit, seed=seed)
            blocks, layout, seconds, extra = _packed_in_parallel(graph, parallel_safe, device, found, work)
        if output is not None:
            write_offsets(output, blocks, layout)
        if picture is not None:
            draw = write_layout_png if picture.suffix.lower() in _PNG else write_layout_html
            draw(blocks, layout, picture, name=file.name)
    return _answer(file, blocks, layout, seconds, extra, timeline, work.exit_status)


def _compile(work: Work) -> None:
    if not shipped_functions():  # else the machine code is there
        work.stage("compiling the packers, once on this machine")
        compile_packers()


def _packed(blocks: Blocks, packer: Packer, limit: float, seed: int, work: Work) -> tuple[Layout, float]:
    """Return a layout that the checker has passed, and the seconds that the packer took for it."""
    work.stage("packing", expected_seconds=limit)
    problem = PackingProblem(
        blocks=blocks,
        time_limit_seconds=limit,
        seed=seed,
        progress=lambda progress: work.done(progress.seconds, limit),
    )
    started = time.perf_counter()
    layout = packer.pack(problem)
    seconds = time.perf_counter() - started
    work.stage("checking")
    check_layout(blocks, layout)
    return layout, seconds


def _packed_in_parallel(
    graph: Graph, way: str, device: Device, pack: Callable[[], ParallelLayout], work: Work
) -> tuple[Blocks, Layout, float, dict[str, Any]]:
    """Return the storages as blocks of the graph's own order, their layout, the seconds it took, and more JSON keys."""
    started = time.perf_counter()
    found = pack()
    seconds = time.perf_counter() - started
    work.stage("checking")
    check_parallel(graph, found, device)
    storages = list(found.offsets_bytes)
    blocks = serial_blocks(graph, storages, device)
    layout = make_layout(blocks, np.array([found.offsets_bytes[s] for s in storages], np.int64), packer=way)
    check_layout(blocks, layout)
    return blocks, layout, seconds, {"parallel_safe": way, "dependences": found.dependences}


def _require_kind(file: Path, way: str | None, packer: str, option: list[str] | None) -> None:
    """Refuse a graph without `--parallel-safe`, and what cannot be packed with it."""
    is_graph = file.name.endswith(GRAPH_ENDINGS)
    if way is None:
        if is_graph:
            raise InvalidOptionError(
                f"{file} is a graph file: give --parallel-safe ({'|'.join(WAYS)}) to pack its storages, or use "
                "`memfit plan`, whose plans have their layout"
            )
        return
    if way not in WAYS:
        raise InvalidOptionError(f"--parallel-safe is {way!r}, expected one of {', '.join(WAYS)}")
    if not is_graph:
        raise InvalidOptionError(
            f"--parallel-safe needs the dependences of ops, and {file} has none; give a graph file (*.graph.json)"
        )
    if packer != "auto" or option:
        raise InvalidOptionError("--parallel-safe has its own way of packing; leave out --packer and --option")


def _require_picture(path: Path | None) -> None:
    """Refuse a picture that cannot be drawn, before any work is done."""
    if path is None:
        return
    if path.suffix.lower() not in (*_HTML, *_PNG):
        raise InvalidOptionError(f"--picture {str(path)!r} ends in {path.suffix!r}, expected .html or .png")
    if path.suffix.lower() in _PNG:
        find_chrome()


def _answer(
    file: Path, blocks: Blocks, layout: Layout, seconds: float, extra: dict[str, Any], timeline: bool, status: int
) -> Answer:
    keys: dict[str, Any] = {
        "blocks": len(blocks),
        "height": layout.height_bytes,
        "lower_bound": layout.lower_bound_bytes,
        "ratio": layout.ratio,
        "proven": layout.proven,
        "packer": layout.packer,
        "pack_seconds": seconds,
        **extra,
    }
    proof = "no layout is lower" if layout.proven else "a lower layout may exist"
    rows = {
        "blocks": f"{len(blocks):,}",
        "height": f"{layout.height_bytes} ({format_bytes(layout.height_bytes)})",
        "lower bound": f"{layout.lower_bound_bytes} ({format_bytes(layout.lower_bound_bytes)}), the most live bytes",
        "ratio": f"{layout.ratio:.4f}; {proof}",
        "shared by" if extra else "packer": f"{layout.packer}, {seconds_text(seconds)}",
    }
    if extra:
        rows["added"] = f"{count_text(len(extra['dependences']), 'dependence')} beside those of the graph"
    parts: list[RenderableType] = [rows_table(rows)]
    if timeline:
        parts += [Text(), *layout_text(blocks, layout)]
    return Answer(target=str(file), device=None, keys=keys, parts=tuple(parts), exit_status=status)
