"""The picture of a layout in a headless Chromium: it draws, nothing complains, the block under the mouse is named."""

from __future__ import annotations

import struct
import sys
from pathlib import Path

import pytest
from browsing import NEEDS_BROWSER, Visit

from memfit.cli import main
from memfit.packing import Block, Blocks, pack
from memfit.report.layout_page import MOST_BLOCKS, write_layout_html, write_layout_png

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))  # the made traces are those of the benchmarks

from _made_traces import made_trace

pytestmark = NEEDS_BROWSER

HOSTILE = "</script><script>window.hacked=1</script><img src=x onerror=window.hacked=2><b>bold</b>"


def test_the_block_under_the_mouse_is_named(tmp_path: Path, visit: Visit) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("id,lower,upper,size\nconv,0,40,4096\nrelu,20,60,4096\nhead,40,80,4096\n")
    path = tmp_path / "layout.html"
    assert main(["pack", str(trace), "--packer", "first_fit", "--picture", str(path), "--json"]) == 0
    visit.open(path)
    page = visit.page
    assert visit.complaints == []
    assert visit.requests == [path.as_uri()]
    assert page.locator("#chart .barlayer .point").count() == 3
    texts = page.locator("#chart .annotation-text").all_text_contents()
    assert texts == ["height 8.00 KiB", "lower bound 8.00 KiB"]
    expected = {
        (10, 2048): ["block conv", "4.00 KiB (4096)", "steps [0, 40)", "bytes [0, 4096)"],
        (30, 6144): ["block relu", "4.00 KiB (4096)", "steps [20, 60)", "bytes [4096, 8192)"],
        (70, 2048): ["block head", "4.00 KiB (4096)", "steps [40, 80)", "bytes [0, 4096)"],
    }
    for (step, address), lines in expected.items():
        assert visit.text_under_the_mouse("#chart", step, address) == lines
    assert visit.complaints == []


def test_the_png_is_the_page(tmp_path: Path) -> None:
    trace, path = tmp_path / "trace.csv", tmp_path / "layout.png"
    trace.write_text("id,lower,upper,size\nconv,0,40,4096\nrelu,20,60,4096\n")
    assert main(["pack", str(trace), "--picture", str(path), "--json"]) == 0
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    assert struct.unpack(">II", content[16:24]) == (2 * 1328, 2 * 960)
    write_layout_png(Blocks.of([]), pack(Blocks.of([])), tmp_path / "empty.png", name="empty")
    assert len(content) > 1.1 * len((tmp_path / "empty.png").read_bytes())  # two bars more


def test_hostile_names_do_nothing(tmp_path: Path, visit: Visit) -> None:
    blocks = Blocks.of([Block(id=HOSTILE, bytes=64, start=0, end=10)])
    path = tmp_path / "layout.html"
    write_layout_html(blocks, pack(blocks), path, name=HOSTILE)
    visit.open(path)
    assert HOSTILE in "".join(visit.text_under_the_mouse("#chart", 5, 32))
    assert visit.page.evaluate("window.hacked") is None
    assert visit.page.locator("img, main b").count() == 0
    assert visit.complaints == []


@pytest.mark.parametrize("count", [0, 1, MOST_BLOCKS + 1000])
def test_as_many_blocks_as_there_are(count: int, tmp_path: Path, visit: Visit) -> None:
    blocks = made_trace(count) if count else Blocks.of([])
    path = tmp_path / "layout.html"
    write_layout_html(blocks, pack(blocks, "first_fit"), path, name="blocks")
    visit.open(path)
    assert visit.complaints == []
    assert visit.page.locator("#chart .barlayer .point").count() == min(count, MOST_BLOCKS)
    assert ("are drawn" in visit.page.locator("p").first.inner_text()) == (count > MOST_BLOCKS)
