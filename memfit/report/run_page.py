"""The HTML page of `memfit run`: what the steps of a script took, one chart for each model. It needs no script."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from memfit.report.html_template import as_html, make_page, table_row
from memfit.system.budget import format_bytes
from memfit.system.files import write_atomically

_WIDTH, _HEIGHT, _LEFT = 1000, 220, 90


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldShown:
    """One model that a script has trained.

    Attributes:
        name: of its class.
        by: which door held it, and why.
        budget_bytes: None if it was never known: a share of a peak that no step has told.
        steps: windows of `memfit.checkpoint`, passes of `memfit.eager`.
        over: of these, those that took more than the budget.
        most_bytes: that one took.
        windows: bytes that each of the latest ones took; empty in eager mode.
        lines: the door's report.
    """

    name: str
    by: str
    budget_bytes: int | None
    steps: int
    over: int
    most_bytes: int
    windows: Sequence[int]
    lines: Sequence[str]

    @property
    def steps_text(self) -> str:
        """The number of steps, and of those over the budget, in words."""
        return f"{self.steps:,} steps, {f'{self.over:,} over the budget' if self.over else 'none over the budget'}"


def write_run_page(command: str, held: Sequence[HeldShown], path: Path) -> None:
    """Write one self-contained HTML file with what each model took.

    Args:
        command: the script and its arguments.
        held: the models.
        path: where the page is written.

    Raises:
        InvalidFileError: the file cannot be written.
    """
    texts = {"title": f"memfit run {command}", "name": command, "lead": _lead(held)}
    rows = "".join(
        table_row(
            [each.name, each.by],
            (
                f"{each.steps:,}",
                f"{each.over:,}",
                format_bytes(each.most_bytes),
                format_bytes(each.budget_bytes) if each.budget_bytes else "–",
            ),
            columns=4,
        )
        for each in held
    )
    page = make_page("run.html", texts, None, {"rows": rows, "models": "".join(map(_section, held))})
    write_atomically(path, page.encode())


def _lead(held: Sequence[HeldShown]) -> str:
    if not held:
        return "No call of a model in training was seen."
    over = sum(each.over for each in held)
    most = max(each.most_bytes for each in held)
    kept = f"{over:,} steps took more than the budget" if over else "No step took more than the budget"
    return f"{kept}. The most that one took is {format_bytes(most)}, measured."


def _section(held: HeldShown) -> str:
    lines = "".join(f"<li>{as_html(line)}</li>" for line in held.lines)
    return f"<section><h2>{as_html(held.name)}</h2>{_chart(held)}<ul>{lines}</ul></section>"


def _chart(held: HeldShown) -> str:
    """Return a picture of the windows below their budget, as SVG."""
    if not held.windows or not held.budget_bytes:
        return ""
    top = 1.05 * max(held.budget_bytes, *held.windows)
    step = (_WIDTH - _LEFT) / len(held.windows)
    width = max(0.5, step * 0.8)

    def height(size_bytes: int) -> float:
        return _HEIGHT * size_bytes / top

    bars = "".join(
        f'<rect x="{_LEFT + number * step:.1f}" y="{_HEIGHT - height(taken):.1f}" width="{width:.1f}" '
        f'height="{height(taken):.1f}" fill="var(--{"bad" if taken > held.budget_bytes else "bar"})"/>'
        for number, taken in enumerate(held.windows)
    )
    at = _HEIGHT - height(held.budget_bytes)
    line = f'<line x1="{_LEFT}" x2="{_WIDTH}" y1="{at:.1f}" y2="{at:.1f}" stroke="var(--budget)" stroke-width="2"/>'
    label = f'<text x="0" y="{at + 4:.1f}" font-size="13">{as_html(format_bytes(held.budget_bytes))}</text>'
    what = f"Bytes of the latest {len(held.windows):,} steps below the budget"
    return (
        f'<div class="chart"><svg viewBox="0 0 {_WIDTH} {_HEIGHT}" width="100%" role="img" aria-label="{what}">'
        f"{bars}{line}{label}</svg></div>"
    )
