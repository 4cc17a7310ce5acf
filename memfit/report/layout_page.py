"""The picture of a layout, address over time: one HTML file that loads nothing, or a PNG of that page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memfit.packing.blocks import Blocks, Layout, live_bytes
from memfit.report.formatting import count_text
from memfit.report.html_template import make_page
from memfit.report.picture import write_screenshot
from memfit.system.budget import format_bytes
from memfit.system.files import write_atomically
from memfit.system.lines import printable

MOST_BLOCKS = 20_000  # drawn: a browser takes a second for as many
_MOST_LIVE_POINTS = 4000
_PICTURE_WIDTH, _PICTURE_HEIGHT = 1328, 960  # pixels: the page's width, its margins and its chart


def write_layout_html(blocks: Blocks, layout: Layout, path: Path | str, *, name: str) -> None:
    """Write the picture to `path`, atomically.

    If there are more than `MOST_BLOCKS` blocks, the largest by bytes times steps are drawn, and the page says so.

    Args:
        blocks: those of the layout.
        layout: their offsets.
        path: of the HTML file.
        name: what is packed; it heads the page.

    Raises:
        InvalidFileError: the file cannot be written.
    """
    write_atomically(Path(path), render_layout(blocks, layout, name=name).encode())


def write_layout_png(blocks: Blocks, layout: Layout, path: Path | str, *, name: str) -> None:
    """Write a PNG of the page to `path`, atomically; a headless Chrome draws it.

    Args:
        blocks: those of the layout.
        layout: their offsets.
        path: of the PNG.
        name: what is packed; it heads the page.

    Raises:
        MemfitError: there is no Chrome, or it fails.
        InvalidFileError: the file cannot be written.
    """
    page = render_layout(blocks, layout, name=name)
    write_screenshot(page, path, width_pixels=_PICTURE_WIDTH, height_pixels=_PICTURE_HEIGHT)


def render_layout(blocks: Blocks, layout: Layout, *, name: str) -> str:
    """Return the page's text; nothing in the blocks' names can become markup or script.

    Args:
        blocks: those of the layout.
        layout: their offsets.
        name: what is packed; it heads the page.
    """
    shown = largest(blocks, MOST_BLOCKS)
    ratio = f"{layout.ratio:.4f} of the lower bound" if layout.lower_bound_bytes else "nothing to pack"
    proven = ", proven the lowest" if layout.proven else ""
    hidden = len(blocks) - len(shown)
    note = f"; the {len(shown):,} largest of {len(blocks):,} are drawn" if hidden else ""
    texts = {
        "title": f"memfit: layout of {name}",
        "name": name,
        "lead": f"{count_text(len(blocks), 'block')} in {format_bytes(layout.height_bytes)}: {ratio}{proven}{note}",
        "packer": layout.packer,
    }
    return make_page("layout.html", texts, _data(blocks, layout, shown))


def largest(blocks: Blocks, most: int) -> NDArray[np.int64]:
    """Return the numbers of the blocks that take most bytes times steps, in their own order.

    Args:
        blocks: any number of them.
        most: how many numbers to return at most.
    """
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
