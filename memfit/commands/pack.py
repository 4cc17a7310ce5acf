"""`memfit pack`: offsets for any allocation trace, checked, with a picture; `memfit packers` lists who can."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import RenderableType
from rich.text import Text

from memfit.budget import format_bytes
from memfit.commands import options
from memfit.commands.answer import DONE, INTERRUPTED, Answer, deliver, rows_table
from memfit.commands.work import Work, working
from memfit.errors import InvalidOptionError
from memfit.packing import PACKERS, Blocks, Layout, Packer, PackingProblem, Progress, check_layout, make_packer
from memfit.packing.trace_file import read_trace, write_offsets
from memfit.report.layout_page import write_layout_html
from memfit.report.layout_picture import layout_text, write_layout_png
from memfit.report.words import seconds_text

EXAMPLES = """
Examples:

memfit pack trace.csv

memfit pack trace.csv --packer exact --time-limit 60 --output offsets.csv

memfit pack trace.csv --ends inclusive --align 512 --picture layout.html --timeline
"""

_HTML, _PNG = (".html", ".htm"), (".png",)


def pack(
    file: Annotated[
        Path,
        typer.Argument(metavar="FILE.csv", show_default=False, help="One block a row: id,lower,upper,size; or gzip."),
    ],
    packer: Annotated[str, typer.Option("--packer", "-p", metavar="NAME", help="See `memfit packers`.")] = "auto",
    option: Annotated[
        list[str] | None,
        typer.Option("--option", metavar="NAME=VALUE", help="An option of the packer; may be given several times."),
    ] = None,
    time_limit: Annotated[
        float, typer.Option("--time-limit", "-t", metavar="SECONDS", help="When packers that improve have to answer.")
    ] = 10.0,
    ends: Annotated[
        str,
        typer.Option("--ends", metavar="exclusive|inclusive", help="Whether a block is live in its `upper` step."),
    ] = "exclusive",
    align: Annotated[int, typer.Option("--align", metavar="N", help="Every offset is a multiple of N.")] = 1,
    seed: Annotated[int, typer.Option("--seed", metavar="N", help="The same seed gives the same layout.")] = 0,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="OUT.csv", show_default=False, help="Write blocks with their offsets."),
    ] = None,
    picture: Annotated[
        Path | None,
        typer.Option("--picture", metavar="FILE.html|.png", show_default=False, help="Draw address over time."),
    ] = None,
    timeline: Annotated[bool, typer.Option("--timeline", help="Draw the layout as text.")] = False,
    as_json: options.Json = False,
) -> int:
    """Give every block of FILE.csv an address, as low as can be. Steps are half-open, [lower, upper)."""
    options.require_writable(output, picture)
    _require_picture(picture)
    settings = options.read_settings(option, "--option")
    chosen = make_packer(packer, **options.typed_options("packer", packer, PACKERS, settings))
    limit = options.require_time_limit(time_limit)
    with working() as work:
        work.stage("reading the trace")
        blocks = read_trace(file, ends=_read_ends(ends), alignment_bytes=align)
        layout, seconds = _packed(blocks, chosen, limit, seed, work)
        if output is not None:
            write_offsets(output, blocks, layout)
        if picture is not None:
            _draw(picture, blocks, layout, file.name)
    status = INTERRUPTED if work.interrupted else DONE
    return deliver(_answer(file, blocks, layout, seconds, timeline, status), as_json=as_json)


def _packed(blocks: Blocks, packer: Packer, limit: float, seed: int, work: Work) -> tuple[Layout, float]:
    """Return a layout that the checker has passed, and the seconds that the packer took for it."""
    work.stage("packing", expected_seconds=limit)

    def tell(progress: Progress) -> None:
        work.done(progress.seconds, limit)

    started = time.perf_counter()
    layout = packer.pack(PackingProblem(blocks=blocks, time_limit_seconds=limit, seed=seed, progress=tell))
    seconds = time.perf_counter() - started
    work.stage("checking")
    check_layout(blocks, layout)
    return layout, seconds


def _read_ends(text: str) -> Any:
    if text not in ("exclusive", "inclusive"):
        raise InvalidOptionError(f"--ends is {text!r}, expected exclusive (half-open ranges) or inclusive")
    return text


def _require_picture(path: Path | None) -> None:
    if path is not None and path.suffix.lower() not in (*_HTML, *_PNG):
        raise InvalidOptionError(f"--picture {str(path)!r} ends in {path.suffix!r}, expected .html or .png")


def _draw(path: Path, blocks: Blocks, layout: Layout, name: str) -> None:
    if path.suffix.lower() in _PNG:
        write_layout_png(blocks, layout, path)
    else:
        write_layout_html(blocks, layout, path, name=name)


def _answer(file: Path, blocks: Blocks, layout: Layout, seconds: float, timeline: bool, status: int) -> Answer:
    keys: dict[str, Any] = {
        "blocks": len(blocks),
        "height": layout.height_bytes,
        "lower_bound": layout.lower_bound_bytes,
        "ratio": layout.ratio,
        "proven": layout.proven,
        "packer": layout.packer,
        "pack_seconds": seconds,
    }
    proof = "no layout is lower" if layout.proven else "a lower layout may exist"
    rows = {
        "blocks": f"{len(blocks):,}",
        "height": f"{layout.height_bytes} ({format_bytes(layout.height_bytes)})",
        "lower bound": f"{layout.lower_bound_bytes} ({format_bytes(layout.lower_bound_bytes)}), the most live bytes",
        "ratio": f"{layout.ratio:.4f}; {proof}",
        "packer": f"{layout.packer}, {seconds_text(seconds)}",
    }
    parts: list[RenderableType] = [rows_table(rows)]
    if timeline:
        parts += [Text(), *layout_text(blocks, layout)]
    return Answer(target=str(file), device=None, keys=keys, parts=tuple(parts), exit_status=status)
