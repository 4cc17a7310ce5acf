"""The frame of every page: one file that loads nothing, with inert data, in which only its own scripts can run."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib import resources
from typing import Any

from memfit.system.lines import printable

_PLOTLY = "plotly-basic.min.js"  # plotly.js-basic-dist-min 4.1.1 of npm, unchanged: lines, bars; a quarter of the whole
_PLACE = re.compile(r"@@(\w+)@@")
_SCRIPT = re.compile(r"<script>(.*?)</script>\n", re.DOTALL)
_HEAD = """\
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="@@policy@@">
<meta name="generator" content="memfit">
<title>@@title@@</title>
<style>
@@style@@</style>
"""


def make_page(template: str, texts: Mapping[str, str], data: Any, html: Mapping[str, str] | None = None) -> str:
    """Return a page: a template of this folder with every place `@@name@@` replaced.

    All places are replaced in one pass, so that text like a place inside a part stays text. Every template has the
    place `head` (policy, `title` and the style of all pages); the others are its own. Its script, if it has one, finds
    plotly, and the data as JSON in the element `data`.

    Args:
        template: the name of a file.
        texts: place -> plain text.
        data: read by the script of the page, as JSON.
        html: place -> HTML, escaped already.
    """
    page = _read(template).replace("@@head@@\n", _HEAD)
    scripts = [_read(_PLOTLY), *own] if (own := _SCRIPT.findall(page)) else []
    page = _SCRIPT.sub(lambda _: _read("packed.html"), page)
    policy = _policy([*scripts, *_SCRIPT.findall(page)])
    packed = _packed([json.dumps(data, allow_nan=False, separators=(",", ":")), *scripts])
    filled = {**{name: as_html(text) for name, text in texts.items()}, **(html or {})}
    filled |= {"policy": policy, "style": _read("style.css"), "packed": packed}
    return _PLACE.sub(lambda place: filled[place[1]], page)


def as_html(text: str) -> str:
    """Return any text as HTML text: inert, and without control characters."""
    return escape(printable(text))


def table_row(names: Sequence[str], numbers: Sequence[str], *, columns: int) -> str:
    """Return a row of an HTML table: names as plain text, then numbers, the last of which spans what is left.

    Args:
        names: of the first columns.
        numbers: as text.
        columns: of numbers.
    """
    *most, last = numbers
    rest = columns - len(most)
    cells = [f"<td>{as_html(name)}</td>" for name in names]
    cells += [f'<td class="number">{as_html(number)}</td>' for number in most]
    span = f'colspan="{rest}"' if rest > 1 else 'class="number"'
    return f"<tr>{''.join(cells)}<td {span}>{as_html(last)}</td></tr>"


def _read(name: str) -> str:
    return resources.files("memfit.report").joinpath(name).read_text(encoding="utf-8")


def _policy(scripts: Iterable[str]) -> str:
    """Return a content security policy that allows these scripts and styles in the page, and no loads."""
    hashes = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    allowed = " ".join(f"'sha256-{digest}'" for digest in hashes)
    return f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:"


def _packed(parts: Sequence[str]) -> str:
    return base64.b64encode(zlib.compress(json.dumps(parts).encode(), 9)).decode()
