"""Pages in the tests: what is packed in them, and a headless Chromium with what they complain about or ask for."""

from __future__ import annotations

import base64
import json
import os
import shutil
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

CHROME = os.environ.get("BROWSER_PATH") or shutil.which("chromium") or shutil.which("google-chrome")
NEEDS_BROWSER = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROME is None, reason="no Chromium: apt-get install chromium, or set BROWSER_PATH"),
]

FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
]
READY = "html[data-ready=true]"  # a selector: waiting for an expression would need eval, which the page forbids


def unpacked(page: str) -> list[str]:
    """Return what a page has packed: its data as JSON, then its scripts."""
    packed = page.split('<script type="text/plain" id="packed">')[1].split("<")[0]
    return json.loads(zlib.decompress(base64.b64decode(packed)))


@dataclass
class Visit:
    """A page that is open, and what it has complained about or asked for."""

    page: Any
    complaints: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def open(self, path: Path) -> None:
        self.page.on("console", lambda message: self.complaints.append(f"{message.type}: {message.text}"))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(path.as_uri())
        self.page.wait_for_selector(READY, timeout=60_000)

    def rows(self, table: str) -> list[list[str]]:
        return self.page.eval_on_selector_all(
            f"{table} tbody tr", "rows => rows.map(row => [...row.cells].map(cell => cell.innerText))"
        )

    def text_under_the_mouse(self, chart: str, x: float, y: float) -> list[str]:
        """Move the mouse to a point of a Plotly chart, in the units of its axes; return the lines of what appears."""
        place = self.page.eval_on_selector(
            chart,
            """(chart, [x, y]) => {
                const {xaxis, yaxis} = chart._fullLayout, box = chart.getBoundingClientRect();
                return [box.left + xaxis._offset + xaxis.d2p(x), box.top + yaxis._offset + yaxis.d2p(y)];
            }""",
            [x, y],
        )
        tip = self.page.locator(f"{chart} .hoverlayer .hovertext").first
        self.page.mouse.move(0, 0)
        tip.wait_for(state="hidden")  # what was under the mouse before is named no more
        self.page.mouse.move(*place)
        tip.wait_for(state="visible")
        return tip.locator("text tspan").all_text_contents() or [tip.inner_text()]
