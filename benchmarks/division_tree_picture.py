"""Draw the division tree of a small U-Net as SVG: every closed set a box, its division the boxes in it.

python benchmarks/division_tree_picture.py docs/division_tree.svg
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from memfit.capture import capture
from memfit.device import GENERIC
from memfit.papers.planners.closed_sets import ClosedSet, Kind, division_tree
from memfit.papers.planners.vertices import vertices_of
from memfit.plan import Problem
from memfit.planners.engine.order import update_at_once_order
from memfit.planners.engine.retention.instance import build_instance
from memfit.workloads import build

_COLORS = {Kind.SPLITTABLE: "#dbe9f6", Kind.BRANCHED: "#fbe3cf", Kind.WHOLE: "#f6d6dd", Kind.EDGE: "#ffffff"}
_LINE, _PAD, _LETTER = 16, 6, 6.2  # pixels: height of a line of text, space around, width of a letter


@dataclass(frozen=True, slots=True)
class _Box:
    width: float
    height: float
    drawing: tuple[str, ...]  # with the box's own corner at (0, 0)


def unet_svg() -> str:
    """Return the division tree of a U-Net's forward part, as `division_svg` draws it."""
    graph = capture(build("unet", batch=2, size=32, width=4, levels=3)).graph
    problem = Problem(graph=graph, device=GENERIC, budget_bytes=graph.resident_bytes)  # the tree needs no budget
    vertices = vertices_of(build_instance(problem, update_at_once_order(graph)))
    return division_svg(division_tree(vertices.readers), vertices.names, vertices.cost_bytes)


def division_svg(tree: ClosedSet, names: Sequence[str], cost_bytes: Sequence[int]) -> str:
    """Return the division tree as one SVG element: blue is type 1, orange type 2, red type 3; vertices are words.

    Args:
        tree: the root, as `division_tree` returns it.
        names: of each vertex.
        cost_bytes: of each vertex.
    """
    box = _draw(tree, names, cost_bytes)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{box.width:.0f}" height="{box.height:.0f}" '
        f'viewBox="0 0 {box.width:.0f} {box.height:.0f}" font-family="sans-serif" font-size="11">'
        + "".join(box.drawing)
        + "</svg>"
    )


def _draw(node: ClosedSet, names: Sequence[str], cost_bytes: Sequence[int]) -> _Box:
    if node.kind is Kind.EDGE:
        return _Box(0.0, 0.0, ())
    cost = sum(cost_bytes[vertex] for vertex in node.inside)
    title = f"{node.kind}: {names[node.first]} to {names[node.last]}, {cost:,} bytes"
    parts = [_draw(child, names, cost_bytes) for child in node.children]
    if node.kind is Kind.SPLITTABLE:
        words = [_text(f"{names[vertex]} ({cost_bytes[vertex]:,})") for vertex in node.between]
        parts = [part for pair in zip(parts, [*words, None], strict=True) for part in pair if part is not None]
        return _framed(node.kind, title, parts, is_column=True)
    if node.kind is Kind.BRANCHED and any(child.kind is Kind.EDGE for child in node.children):
        parts.append(_text("an edge past it"))
    stored = [_text(f"{names[vertex]} ({cost_bytes[vertex]:,})") for vertex in node.between]
    return _framed(node.kind, title, [*stored, *parts], is_column=False)


def _text(words: str) -> _Box:
    drawn = f'<text x="0" y="{_LINE - 4}">{escape(words)}</text>'
    return _Box(len(words) * _LETTER, _LINE, (drawn,))


def _framed(kind: Kind, title: str, parts: list[_Box], *, is_column: bool) -> _Box:
    """Return a box with a title, and `parts` in it: one below the other, or side by side."""
    x, y = float(_PAD), float(_PAD + _LINE)
    width, height = len(title) * _LETTER + 2 * _PAD, float(_LINE + 2 * _PAD)
    drawing: list[str] = []
    for part in parts:
        if not part.drawing:
            continue
        drawing += [f'<g transform="translate({x:.0f},{y:.0f})">', *part.drawing, "</g>"]
        width, height = max(width, x + part.width + _PAD), max(height, y + part.height + _PAD)
        if is_column:
            y += part.height + _PAD
        else:
            x += part.width + _PAD
    frame = (
        f'<rect width="{width:.0f}" height="{height:.0f}" rx="4" fill="{_COLORS[kind]}" stroke="#667"/>'
        f'<text x="{_PAD}" y="{_LINE - 2}" fill="#445">{escape(title)}</text>'
    )
    return _Box(width, height, (frame, *drawing))


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(unet_svg(), encoding="utf-8")
