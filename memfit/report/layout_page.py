"""The picture of a layout as one HTML file: address over time, with the block under the mouse. It loads nothing."""

from __future__ import annotations

import html
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memfit.budget import format_bytes
from memfit.files import write_atomically
from memfit.packing.blocks import Blocks, Layout, live_bytes
from memfit.report.frame import fill
from memfit.report.words import count_text, printable

MOST_BLOCKS = 20_000  # drawn: a browser takes a second for as many
_MOST_LIVE_POINTS = 4000


def write_layout_html(blocks: Blocks, layout: Layout, path: Path | str, *, name: str = "blocks") -> None:
    """Write the picture to `path`, atomically.

    Of more than `MOST_BLOCKS` blocks the largest by bytes times steps are drawn, and the page says so.
    """
    write_atomically(Path(path), render_layout(blocks, layout, name=name).encode())


def render_layout(blocks: Blocks, layout: Layout, *, name: str = "blocks") -> str:
    """Return the page's text; nothing in the blocks' names can become markup or script."""
    shown = largest(blocks, MOST_BLOCKS)
    ratio = f"{layout.ratio:.4f} of the lower bound" if layout.lower_bound_bytes else "nothing to pack"
    proven = ", proven the lowest" if layout.proven else ""
    hidden = len(blocks) - len(shown)
    note = f"; the {len(shown):,} largest of {len(blocks):,} are drawn" if hidden else ""
    lead = f"{count_text(len(blocks), 'block')} in {format_bytes(layout.height_bytes)}: {ratio}{proven}{note}"
    parts = {
        "title": html.escape(f"memfit: layout of {printable(name)}"),
        "name": html.escape(printable(name)),
        "lead": html.escape(lead),
        "packer": html.escape(layout.packer),
    }
    return fill("layout.html", parts, _data(blocks, layout, shown))


def largest(blocks: Blocks, most: int) -> NDArray[np.int64]:
    """Return the numbers of the blocks that take most bytes times steps, in their own order."""
    areas = blocks.sizes_bytes.astype(np.float64) * (blocks.ends - blocks.starts)
    return np.sort(np.argsort(-areas, kind="stable")[:most])


def _data(blocks: Blocks, layout: Layout, shown: NDArray[np.int64]) -> dict[str, Any]:
    steps, live = live_bytes(blocks)
    every = max(1, -(-len(steps) // _MOST_LIVE_POINTS))
    if every > 1:  # the largest of each bin, so that the peak stays where it is
        bins = np.arange(0, len(steps), every)
        steps, live = steps[bins], np.maximum.reduceat(live, bins)
    return {
        "ids": [printable(str(name)) for name in blocks.ids[shown].tolist()],
        "starts": blocks.starts[shown].tolist(),
        "ends": blocks.ends[shown].tolist(),
        "sizes": blocks.sizes_bytes[shown].tolist(),
        "offsets": layout.offsets_bytes[shown].tolist(),
        "height": layout.height_bytes,
        "bound": layout.lower_bound_bytes,
        "steps": steps.tolist(),
        "live": live.tolist(),
    }
