"""The picture of a layout as one HTML file: address over time, with the block under the mouse. It loads nothing."""

from __future__ import annotations

import base64
import hashlib
import html
import json
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memfit.budget import format_bytes
from memfit.files import write_atomically
from memfit.packing.blocks import Blocks, Layout, live_bytes
from memfit.report.words import count_text, printable

MOST_BLOCKS = 20_000  # drawn: a browser takes a second for as many
_MOST_LIVE_POINTS = 4000
_TEMPLATE = "layout.html"
_FRAGILE = str.maketrans({"<": "\\u003c", ">": "\\u003e", "&": "\\u0026"})


def write_layout_html(blocks: Blocks, layout: Layout, path: Path | str, *, name: str = "blocks") -> None:
    """Write the picture to `path`, atomically.

    Of more than `MOST_BLOCKS` blocks the largest by bytes times steps are drawn, and the page says so.
    """
    write_atomically(Path(path), render_layout(blocks, layout, name=name).encode())


def render_layout(blocks: Blocks, layout: Layout, *, name: str = "blocks") -> str:
    """Return the page's text; nothing in the blocks' names can become markup or script."""
    from plotly.offline import get_plotlyjs  # pyright: ignore  # it takes as long to import as all else together

    shown = largest(blocks, MOST_BLOCKS)
    ratio = f"{layout.ratio:.4f} of the lower bound" if layout.lower_bound_bytes else "nothing to pack"
    proven = ", proven the lowest" if layout.proven else ""
    hidden = len(blocks) - len(shown)
    note = f"; the {len(shown):,} largest of {len(blocks):,} are drawn" if hidden else ""
    lead = f"{count_text(len(blocks), 'block')} in {format_bytes(layout.height_bytes)}: {ratio}{proven}{note}"
    data = json.dumps(_data(blocks, layout, shown), ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    plotly: str = get_plotlyjs()
    template = resources.files("memfit.report").joinpath(_TEMPLATE).read_text(encoding="utf-8")
    before, script, after = _split(template)
    parts = {
        "@@policy@@": _policy(plotly, script),
        "@@title@@": html.escape(f"memfit: layout of {printable(name)}"),
        "@@name@@": html.escape(printable(name)),
        "@@lead@@": html.escape(lead),
        "@@packer@@": html.escape(layout.packer),
    }
    for place, text in parts.items():
        before = before.replace(place, text)
    inert = data.translate(_FRAGILE)
    return f"{before}{inert}</script>\n<script>{plotly}</script>\n<script>{script}</script>{after}"


def largest(blocks: Blocks, most: int) -> NDArray[np.int64]:
    """Return the numbers of the blocks that take most bytes times steps, in their own order."""
    areas = blocks.sizes_bytes.astype(np.float64) * (blocks.ends - blocks.starts)
    return np.sort(np.argsort(-areas, kind="stable")[:most])


def _split(template: str) -> tuple[str, str, str]:
    before, _, rest = template.partition("@@data@@</script>")
    script, _, after = rest.partition("<script>")[2].partition("</script>")
    return before, script, after


def _policy(*scripts: str) -> str:
    """Return a content security policy that allows these scripts, styles in the page, and no loads at all."""
    digests = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
    return f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:"


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
