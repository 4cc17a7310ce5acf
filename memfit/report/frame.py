"""What all pages share: one file that loads nothing, whose data are inert, and which lets only its own scripts run."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from importlib import resources
from typing import Any

_PLACE = re.compile(r"@@(\w+)@@")
_SCRIPT = re.compile(r"<script>(.*?)</script>", re.DOTALL)
_FRAGILE = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026"}  # in JSON inside a script element
_HEAD = """\
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="@@policy@@">
<meta name="generator" content="memfit">
<title>@@title@@</title>
<style>
@@style@@</style>
"""


def fill(template: str, parts: Mapping[str, str], data: Any) -> str:
    """Return the page that a template of this folder makes of its parts, filled in one pass, so that what looks like a
    place in them stays text.

    A template has the places `head` (policy, `title` and the style of all pages), `plotly` and `data`, and its own.

    Args:
        template: a file's name.
        parts: place -> HTML that is safe already.
        data: what the page's script reads, as JSON that nothing in it can end.
    """
    from plotly.offline import get_plotlyjs  # pyright: ignore  # it takes as long to import as all else together

    page = _read(template).replace("@@head@@\n", _HEAD)
    plotly: str = get_plotlyjs()
    scripts = [plotly if script == "@@plotly@@" else script for script in _SCRIPT.findall(page)]
    filled = {**parts, "plotly": plotly, "policy": _policy(scripts), "style": _read("style.css"), "data": _inert(data)}
    return _PLACE.sub(lambda place: filled[place[1]], page)


def _read(name: str) -> str:
    return resources.files("memfit.report").joinpath(name).read_text(encoding="utf-8")


def _policy(scripts: Iterable[str]) -> str:
    """Return a content security policy that allows these scripts, styles in the page, and no loads at all."""
    hashes = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    allowed = " ".join(f"'sha256-{digest}'" for digest in hashes)
    return f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:"


def _inert(content: Any) -> str:
    """Return JSON that cannot end the script element it stands in: pure ASCII, without `<`, `>` and `&`."""
    encoded = json.dumps(content, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return re.sub("[<>&]", lambda character: _FRAGILE[character[0]], encoded)
