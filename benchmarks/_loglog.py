"""A log-log picture as SVG, and the slope of a line fitted to it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

_COLORS = ("#5b6770", "#2f8f9d", "#2b6ca3", "#c9772c", "#b5446e", "#2f7d4f", "#8b5e3c")
_APART = 28  # pixels between two numbers on the axis, at least
_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP, _RIGHT = 620, 400, 64, 48, 34, 190


def slope(points: Sequence[tuple[float, float]]) -> float:
    """Return the exponent b of y = a x^b fitted by least squares of the logarithms."""
    xs, ys = [math.log(x) for x, _ in points], [math.log(y) for _, y in points]
    x_mean, y_mean = sum(xs) / len(xs), sum(ys) / len(ys)
    covered = sum((x - x_mean) * (y - y_mean) for x, y in zip(xs, ys, strict=True))
    return covered / sum((x - x_mean) ** 2 for x in xs)


def loglog_svg(title: str, x_title: str, y_title: str, lines: Mapping[str, Sequence[tuple[float, float]]]) -> str:
    """Return the picture; each line's name carries its fitted slope."""
    xs = sorted({x for points in lines.values() for x, _ in points})
    ys = [y for points in lines.values() for _, y in points]
    low, high = math.floor(math.log2(min(ys))), math.ceil(math.log2(max(ys)))

    def across(x: float) -> float:
        span = math.log(xs[-1] / xs[0]) or 1.0
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * math.log(x / xs[0]) / span

    def up(y: float) -> float:
        return _HEIGHT - _BOTTOM - (_HEIGHT - _BOTTOM - _TOP) * (math.log2(y) - low) / max(1, high - low)

    drawn = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" '
        f'font-size="12"><rect width="100%" height="100%" fill="#fff"/><text x="{_LEFT}" y="20">{escape(title)}</text>'
    ]
    for power in range(low, high + 1):
        y = up(2.0**power)
        drawn.append(f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#e2e5e9"/>')
        drawn.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{2.0**power:g}</text>')
    labelled = -math.inf
    for x in xs:
        if across(x) - labelled < _APART:
            continue
        labelled = across(x)
        drawn.append(f'<text x="{across(x):.1f}" y="{_HEIGHT - _BOTTOM + 16}" text-anchor="middle">{x:g}</text>')
    drawn.append(f'<text x="{(_LEFT + _WIDTH - _RIGHT) / 2}" y="{_HEIGHT - 10}" text-anchor="middle">{x_title}</text>')
    drawn.append(f'<text transform="translate(14,{_HEIGHT / 2}) rotate(-90)" text-anchor="middle">{y_title}</text>')
    for number, (name, points) in enumerate(lines.items()):
        color = _COLORS[number % len(_COLORS)]
        path = " ".join(f"{across(x):.1f},{up(y):.1f}" for x, y in points)
        drawn.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"/>')
        drawn += [f'<circle cx="{across(x):.1f}" cy="{up(y):.1f}" r="3" fill="{color}"/>' for x, y in points]
        words = f"{name}, slope {slope(points):.2f}" if len(points) > 1 else name
        drawn.append(f'<text x="{_WIDTH - _RIGHT + 10}" y="{_TOP + 18 * number + 10}" fill="{color}">{words}</text>')
    return "".join([*drawn, "</svg>\n"])
