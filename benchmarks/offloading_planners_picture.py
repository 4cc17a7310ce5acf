"""Draw what `offloading_planners.py` stored: one picture a machine, one panel a workload, as dqn2020's Figure 5.

python benchmarks/offloading_planners_picture.py     # docs/offloading_planners_MACHINE.svg
"""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import Any

from _record import load, machine_name
from offloading_planners import CURVES, FOLDER, MACHINES, WORKLOADS

DOCS = Path(__file__).parents[1] / "docs"
RESULTS = Path(__file__).parent / "results"
_COLUMNS, _WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP, _GAP = 2, 400, 230, 44, 30, 24, 16
_MOST_OVERHEAD = 1.0  # of the scale; points above it stand on its upper end
_COLORS = [
    "#5b6770",
    "#c9772c",
    "#d9a441",
    "#8b5e3c",
    "#7a9a3a",
    "#a3b86c",
    "#4f8a5b",
    "#2f8f9d",
    "#b5446e",
    "#7b4fa3",
    "#9aa5b1",
    "#2b6ca3",
]
_STRONG = {"auto", "dqn"}  # drawn with thick lines


def picture(points: dict[str, dict[str, Any]]) -> str:
    """Return the panels of one machine as SVG.

    Args:
        points: workload -> `curve@share` -> point.
    """
    rows = -(-len(points) // _COLUMNS)
    width, height = _COLUMNS * (_WIDTH + _GAP), rows * (_HEIGHT + _GAP) + 18 * (-(-len(CURVES) // 4)) + 16
    drawn = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        'font-size="11"><rect width="100%" height="100%" fill="#fff"/>'
    ]
    for number, (workload, of_workload) in enumerate(points.items()):
        left, top = number % _COLUMNS * (_WIDTH + _GAP), number // _COLUMNS * (_HEIGHT + _GAP)
        drawn.append(f'<g transform="translate({left},{top})">{_panel(workload, of_workload)}</g>')
    for number, (curve, color) in enumerate(zip(CURVES, _COLORS, strict=True)):
        x, y = 12 + number % 4 * width // 4, rows * (_HEIGHT + _GAP) + 14 + 18 * (number // 4)
        drawn.append(f'<circle cx="{x}" cy="{y - 4}" r="5" fill="{color}"/><text x="{x + 10}" y="{y}">{curve}</text>')
    return "".join([*drawn, "</svg>\n"])


def _panel(workload: str, points: dict[str, Any]) -> str:
    drawn = [f'<text x="{_LEFT}" y="14" font-weight="600">{escape(workload)}</text>']
    for step in range(5):
        y, x = _up(step / 4 * _MOST_OVERHEAD), _across(step / 4)
        drawn.append(f'<line x1="{_LEFT}" x2="{_WIDTH}" y1="{y:.1f}" y2="{y:.1f}" stroke="#e2e5e9"/>')
        drawn.append(f'<text x="{_LEFT - 5}" y="{y + 4:.1f}" text-anchor="end">{step / 4 * _MOST_OVERHEAD:.0%}</text>')
        drawn.append(f'<text x="{x:.1f}" y="{_HEIGHT - _BOTTOM + 14}" text-anchor="middle">{step / 4:.0%}</text>')
    drawn.append(f'<text x="{_WIDTH}" y="{_HEIGHT - 2}" text-anchor="end">memory reduction; up: overhead</text>')
    for curve, color in zip(CURVES, _COLORS, strict=True):
        places = sorted(
            {
                (1 - point["peak_bytes"] / point["unplanned_bytes"], point["overhead"])
                for name, point in points.items()
                if name.partition("@")[0] == curve and "overhead" in point
            }
        )
        path = " ".join(f"{_across(x):.1f},{_up(y):.1f}" for x, y in places)
        thick = 3 if curve in _STRONG else 1.3
        drawn.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="{thick}"/>')
        drawn += [f'<circle cx="{_across(x):.1f}" cy="{_up(y):.1f}" r="2.5" fill="{color}"/>' for x, y in places]
    return "".join(drawn)


def _across(reduction: float) -> float:
    return _LEFT + (_WIDTH - _LEFT) * min(1.0, max(0.0, reduction))


def _up(overhead: float) -> float:
    share = min(1.0, max(0.0, overhead) / _MOST_OVERHEAD)
    return _HEIGHT - _BOTTOM - (_HEIGHT - _BOTTOM - _TOP) * share


def main() -> None:
    """Draw each machine that has results."""
    for machine in MACHINES:
        paths = {name: RESULTS / machine_name() / FOLDER / f"{name}_{machine}.json" for name in WORKLOADS}
        points = {name: load(path)["payload"]["points"] for name, path in paths.items() if path.exists()}
        if points:
            path = DOCS / f"offloading_planners_{machine}.svg"
            path.write_text(picture(points), encoding="utf-8")
            print(path)


if __name__ == "__main__":
    main()
