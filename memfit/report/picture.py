"""The picture of a plan as a PNG, drawn by a headless Chrome: live bytes, unplanned and planned, under the budget."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from memfit.errors import InvalidOptionError, MemfitError
from memfit.plan import Plan
from memfit.report.page import render
from memfit.system.files import write_atomically

_CHROMES = (
    "chromium",
    "chromium-browser",
    "google-chrome",
    "google-chrome-stable",
    "chrome",
    "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome",
)
_CHROME_VARIABLE = "BROWSER_PATH"  # the variable of plotly's own exporter
_FLAGS = (
    "--headless",
    "--no-sandbox",  # Chrome's sandbox does not start in most containers; the page is memfit's own and loads nothing
    "--disable-gpu",
    "--disable-quic",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--hide-scrollbars",
)
_PAGE_SECONDS = 20  # of Chrome's virtual time, for drawing the chart
_CHROME_SECONDS = 120
_PNG_MAGIC = b"\x89PNG\r\n\x1a\n"
_SCALE = 2  # device pixels for each pixel of a page
_LEAST_PIXELS, _MOST_PIXELS = 300, 4096  # a chart needs the first; Chrome draws no more than the second at scale 2


def write_png(plan: Plan, path: Path | str, *, width_pixels: int = 1000, height_pixels: int = 540) -> None:
    """Write a picture of the plan to `path`: live bytes over the step, unplanned and planned, and the budget line.

    Args:
        plan: checked.
        path: where the picture is written.
        width_pixels: of the chart; the picture has twice as many, for sharp text.
        height_pixels: likewise.

    Raises:
        MemfitError: no Chrome was found (see `find_chrome`), or it fails.
        InvalidOptionError: a size too small to hold a chart, or too large to draw.
        InvalidFileError: the file cannot be written.
    """
    page = render(plan, picture_height_pixels=height_pixels)
    write_screenshot(page, path, width_pixels=width_pixels, height_pixels=height_pixels)


def write_screenshot(page_text: str, path: Path | str, *, width_pixels: int, height_pixels: int) -> None:
    """Write a picture of an HTML page to `path`, atomically.

    Args:
        page_text: the page, which loads nothing.
        path: of the PNG.
        width_pixels, height_pixels: of the window; the picture has twice as many.

    Raises:
        MemfitError: there is no Chrome, or it fails.
        InvalidOptionError: a size too small to hold a chart, or too large to draw.
        InvalidFileError: the file cannot be written.
    """
    for name, pixels in (("width_pixels", width_pixels), ("height_pixels", height_pixels)):
        if not _LEAST_PIXELS <= pixels <= _MOST_PIXELS:
            raise InvalidOptionError(f"{name} is {pixels}, expected {_LEAST_PIXELS} to {_MOST_PIXELS}")
    browser = find_chrome()
    with tempfile.TemporaryDirectory(prefix="memfit-picture-") as folder:
        page, picture = Path(folder, "page.html"), Path(folder, "picture.png")
        page.write_text(page_text, encoding="utf-8")
        size = (f"--window-size={width_pixels},{height_pixels}", f"--force-device-scale-factor={_SCALE}")
        _run_chrome([browser, *_FLAGS, *size, f"--user-data-dir={folder}/profile"], page, picture)
        write_atomically(Path(path), picture.read_bytes())


def find_chrome() -> str:
    """Return the path of the Chrome to draw with: that of the variable BROWSER_PATH, or the first one installed.

    Raises:
        MemfitError: the one named does not exist, or none is installed.
    """
    named = os.environ.get(_CHROME_VARIABLE)
    for candidate in (named,) if named else _CHROMES:
        if found := shutil.which(candidate):
            return found
    what = f"no browser at {named!r}" if named else "no Chrome or Chromium was found"
    raise MemfitError(
        f"a PNG needs a Chrome to be drawn, and {what}; install one (apt-get install chromium), or set "
        f"{_CHROME_VARIABLE} to one; the HTML report needs none"
    )


def _run_chrome(command: list[str], page: Path, picture: Path) -> None:
    """Write the screenshot of `page` to `picture`, or raise MemfitError."""
    command = [*command, f"--virtual-time-budget={_PAGE_SECONDS * 1000}", f"--screenshot={picture}", page.as_uri()]
    try:
        ended = subprocess.run(command, capture_output=True, timeout=_CHROME_SECONDS, check=False)
    except subprocess.TimeoutExpired as error:
        raise MemfitError(
            f"{command[0]} drew no picture within {_CHROME_SECONDS} s; is the machine overloaded?"
        ) from error
    except OSError as error:
        raise MemfitError(f"{command[0]} cannot be started: {error.strerror}; name another browser") from error
    if not picture.exists() or not picture.read_bytes().startswith(_PNG_MAGIC):
        said = ended.stderr.decode(errors="replace").strip().splitlines()
        last = said[-1][:200] if said else f"exit status {ended.returncode}, and no word"
        raise MemfitError(f"{command[0]} drew no picture of {page.name}: {last}")
