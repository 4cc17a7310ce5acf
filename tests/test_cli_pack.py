"""`memfit pack` and `memfit packers`: keys, files, the catalogue of bad traces."""

from __future__ import annotations

import gzip
import json
import os
import re
import subprocess
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from browsing import unpacked
from command_line import Run

from memfit.errors import InvalidFileError
from memfit.packing import PACKERS, Block, Blocks, pack
from memfit.packing.trace_file import read_trace, write_offsets
from memfit.report.layout_page import MOST_BLOCKS, largest, render_layout
from memfit.report.layout_text import layout_text

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))  # the made traces are those of the benchmarks

from _made_traces import made_trace

GOOD = "id,lower,upper,size\n0,0,4,64\n1,2,6,64\n2,4,8,64\n"
KEYS = {"target", "device", "memfit_version", "blocks", "height", "lower_bound", "ratio", "proven", "packer"}


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.csv"
    path.write_text(GOOD)
    return path


def test_pack_answers_with_the_keys_of_the_contract(run: Run, trace: Path) -> None:
    status, out, err = run("pack", trace, "--json")
    answer = json.loads(out)
    assert (status, err) == (0, "")
    assert set(answer) == KEYS | {"pack_seconds"}
    assert (answer["blocks"], answer["height"], answer["lower_bound"], answer["ratio"]) == (3, 128, 128, 1.0)
    assert answer["proven"] is True
    assert answer["packer"] == "auto"


@pytest.mark.parametrize("packer", sorted(PACKERS))
def test_every_packer_can_be_asked_for(run: Run, trace: Path, packer: str) -> None:
    status, out, _ = run("pack", trace, "--packer", packer, "--time-limit", "0.2", "--json")
    assert (status, json.loads(out)["packer"]) == (0, packer)


def test_inclusive_ends_are_a_step_longer(run: Run, trace: Path) -> None:
    assert json.loads(run("pack", trace, "--json", "--ends", "inclusive")[1])["lower_bound"] == 192


def test_alignment_rounds_up(run: Run, trace: Path) -> None:
    assert json.loads(run("pack", trace, "--json", "--align", "512")[1])["height"] == 1024


def test_text_timeline(run: Run, trace: Path) -> None:
    status, out, _ = run("pack", trace, "--timeline", "--packer", "first_fit")
    assert status == 0
    assert "no layout is lower" in out
    assert re.search(r"128 B \| \.+B+\.+\n", out)


def test_offsets_are_written(run: Run, trace: Path, tmp_path: Path) -> None:
    out = tmp_path / "offsets.csv"
    assert run("pack", trace, "-o", out, "--packer", "first_fit")[0] == 0
    assert out.read_text() == "id,lower,upper,size,offset\n0,0,4,64,0\n1,2,6,64,64\n2,4,8,64,0\n"


def test_the_picture_is_one_page_that_loads_nothing(run: Run, trace: Path, tmp_path: Path) -> None:
    page = tmp_path / "layout.html"
    assert run("pack", trace, "--picture", page)[0] == 0
    text = page.read_text()
    assert "default-src 'none'" in text
    assert '"offsets":[0,64,0]' in unpacked(text)[0]
    assert not re.search(r"<(script|link|img)[^>]+(src|href)=", text)


def test_hostile_names_stay_text() -> None:
    blocks = Blocks.of([Block(id="</script><script>alert(1)</script>", bytes=1, start=0, end=1)])
    page = render_layout(blocks, pack(blocks), name="<img src=x onerror=alert(1)>")
    assert "alert(1)</script>" not in page and "alert(1)</script>" in unpacked(page)[0]
    assert "<img" not in page.partition("<script")[0]


def test_a_png_without_a_browser_is_refused_before_any_work(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BROWSER_PATH", str(tmp_path / "nowhere"))
    status, out, err = run("pack", tmp_path / "missing.csv", "--picture", tmp_path / "layout.png")
    assert (status, out) == (2, "")
    assert "a PNG needs a Chrome to be drawn, and no browser at" in err


def test_the_largest_are_drawn_where_there_are_too_many() -> None:
    blocks = made_trace(MOST_BLOCKS + 5)
    shown = largest(blocks, MOST_BLOCKS)
    areas = blocks.sizes_bytes * (blocks.ends - blocks.starts)
    assert len(shown) == MOST_BLOCKS
    assert areas[shown].min() >= np.sort(areas)[4]


def test_layout_text_marks_each_block_where_it_lies() -> None:
    blocks = Blocks.of([Block(id=i, bytes=8, start=0, end=2) for i in range(2)])
    assert layout_text(blocks, pack(blocks, "first_fit"), columns=2, rows=2) == ["16 B | BB", "   0 | AA"]


def test_crlf_spaces_names_and_gzip_are_read(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv.gz"
    path.write_bytes(gzip.compress(b"\xef\xbb\xbfSize, ID ,start,end\r\n64, conv1 ,0,4\r\n32,b,2,6"))
    blocks = read_trace(path)
    assert [(b.id, b.bytes, b.start, b.end) for b in blocks] == [("conv1", 64, 0, 4), ("b", 32, 2, 6)]


def test_written_offsets_have_the_names_of_the_trace(tmp_path: Path) -> None:
    blocks = Blocks.of([Block(id="a", bytes=8, start=0, end=2)])
    write_offsets(tmp_path / "out.csv", blocks, pack(blocks))
    assert (tmp_path / "out.csv").read_text().splitlines()[1] == "a,0,2,8,0"


HEAD = "id,lower,upper,size\n"
BAD = {
    "empty file": ("", "row 1, column 'id': the file is empty"),
    "header only": (HEAD, "row 2, column 'id': there is no block"),
    "no header": ("0,0,4,64\n1,2,6,64\n", "row 1, column 'id': there is no header"),
    "missing column": ("id,lower,upper\n0,0,4\n", "row 1, column 'size': the column is missing"),
    "unknown column": ("id,lower,upper,size,colour\n", "row 1, column 'colour': the column is not known"),
    "column twice": ("id,lower,start,upper,size\n", "row 1, column 'start': the column stands there twice"),
    "value missing": (HEAD + "0,0,4,64\n1,2,6\n", "row 3, column 'size': is missing: expected 4 values, got 3"),
    "value empty": (HEAD + "0,0,,64\n", "row 2, column 'upper': got '', expected a whole number"),
    "id empty": (HEAD + ",0,4,64\n", "row 2, column 'id': got '', expected an id"),
    "value too many": (HEAD + "0,0,4,64,5\n", "row 2, column 'size': expected 4 values, got 5"),
    "inclusive ends": (HEAD + "0,0,4,64\n1,5,5,64\n", "row 3, column 'upper': the range is empty"),
    "reversed range": (HEAD + "0,4,2,64\n", "row 2, column 'upper': the range is reversed"),
    "zero size": (HEAD + "0,0,4,0\n", "row 2, column 'size': got 0, expected 1 or more"),
    "negative size": (HEAD + "0,0,4,-64\n", "row 2, column 'size': got '-64', expected a whole number from 1"),
    "negative start": (HEAD + "0,-1,4,64\n", "row 2, column 'lower': got '-1', expected a whole number from 0"),
    "size beyond 63 bits": (HEAD + "0,0,4,9223372036854775808\n", "row 2, column 'size': got '9223372036854775808'"),
    "size of many digits": (HEAD + "0,0,4," + "9" * 400 + "\n", "row 2, column 'size': got '999"),
    "sums beyond 62 bits": (HEAD + f"0,0,4,{1 << 61}\n1,0,4,{1 << 61}\n2,0,4,{1 << 61}\n", "row 4, column 'size'"),
    "fraction": (HEAD + "0,0,4,6.5\n", "row 2, column 'size': got '6.5', expected a whole number"),
    "exponent": (HEAD + "0,0,4,1e9\n", "row 2, column 'size': got '1e9'"),
    "not a number": (HEAD + "0,0,4,nan\n", "row 2, column 'size': got 'nan'"),
    "other digits": (HEAD + "0,0,4,٣\n", "row 2, column 'size'"),
    "duplicate id": (HEAD + "7,0,4,64\n8,0,4,64\n7,2,6,64\n", "row 4, column 'id': got 7, which row 2 has already"),
    "duplicate name": (HEAD + "a,0,4,64\na,2,6,64\n", "row 3, column 'id': got a, which row 2 has already"),
    "blank line": (HEAD + "0,0,4,64\n\n1,2,6,64\n", "row 3, column 'id': the line is blank"),
    "blank line of CRLF": ("id,lower,upper,size\r\n0,0,4,64\r\n\r\n", "row 3, column 'id': the line is blank"),
    "spaces only": (HEAD + "   \n0,0,4,64\n", "row 2, column 'id': the line is blank"),
    "lone CR": (HEAD + "0,0,4,64\r1,2,6,64\n", "row 2, column 'size'"),
    "null byte": (HEAD + "0,0,4,6\x004\n", "row 2, column 'size'"),
    "quotes": (HEAD + '0,0,4,"64"\n', "row 2, column 'size'"),
    "id in no UTF-8": ("size,Buffer,lower,upper\n64,\xe9,0,1\n", "row 2, column 'buffer': got b'\\xe9'"),
    "semicolons": ("id;lower;upper;size\n0;0;4;64\n", "row 1"),
}


@pytest.mark.parametrize("case", BAD, ids=[case.replace(" ", "-") for case in BAD])
def test_bad_traces_name_file_row_and_column(run: Run, tmp_path: Path, case: str) -> None:
    path = tmp_path / "bad.csv"
    content, message = BAD[case]
    path.write_bytes(content.encode("latin-1" if "UTF-8" in case else "utf-8"))
    status, out, err = run("pack", path, "--json")
    assert status == 2
    assert err.startswith(f"memfit: error: {path}: row ")
    assert message in err
    assert err.count("\n") == 1
    assert set(json.loads(out)) == {"error", "exit_status", "memfit_version"}


def test_a_file_of_blank_lines_takes_no_more_memory_than_its_rows_could(tmp_path: Path) -> None:
    path = tmp_path / "blank.csv.gz"
    path.write_bytes(gzip.compress(HEAD.encode() + b"\n" * (1 << 22)))
    tracemalloc.start()
    with pytest.raises(InvalidFileError, match="row 2, column 'id': the line is blank"):
        read_trace(path)
    most_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most_bytes < 64 << 20  # 48 bytes for each newline were 200 MB


@pytest.mark.parametrize("bad", ["5,3,9,x", "5,3,9,8,1", "5,3", "5,3,9,"], ids=["text", "five", "two", "empty"])
def test_a_bad_row_far_down_is_shown(tmp_path: Path, bad: str) -> None:
    path = tmp_path / "bad.csv"
    path.write_text(HEAD + "".join(f"{i},{i},{i + 9},64\n" for i in range(6, 20_000)) + bad)
    with pytest.raises(InvalidFileError, match=f"row 19996, column '(size|upper)'.*{bad.split(',')[-1]}"):
        read_trace(path)


def test_one_long_id_among_many_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "long.csv"
    path.write_text(HEAD + "x" * 100_000 + ",0,1,8\n" + "".join(f"t{i},{i},{i + 1},8\n" for i in range(5000)))
    blocks = read_trace(path)
    assert blocks[0].id == "x" * 100_000
    assert blocks[5000].id == "t4999"
    write_offsets(tmp_path / "out.csv", blocks, pack(blocks))
    assert (tmp_path / "out.csv").read_text().splitlines()[5001].startswith("t4999,4999,5000,8,")
    path.write_text(path.read_text() + "t7,0,1,8\n")
    with pytest.raises(InvalidFileError, match="row 5003, column 'id': got t7, which row 10 has already"):
        read_trace(path)


def test_an_id_with_leading_zeros_is_a_text(tmp_path: Path) -> None:
    path = tmp_path / "padded.csv"
    path.write_text(HEAD + "007,0,1,8\n7,1,2,8\n0,2,3,8\n")
    assert [block.id for block in read_trace(path)] == ["007", "7", "0"]


def test_reversed_inclusive_ranges_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "bad.csv"
    path.write_text(HEAD + "0,5,5,8\n1,5,4,8\n")
    with pytest.raises(InvalidFileError, match=r"row 3, column 'upper': the range is reversed: got \[5, 4\]"):
        read_trace(path, ends="inclusive")


@pytest.mark.parametrize("place", [0, 500_000, 999_999])
def test_one_bad_row_in_a_million(tmp_path: Path, place: int) -> None:
    rows = [f"{i},{i},{i + 9},64" for i in range(1_000_000)]
    rows[place] = f"{place},{place},{place},64"
    path = tmp_path / "long.csv"
    path.write_text(HEAD + "\n".join(rows) + "\n")
    with pytest.raises(InvalidFileError, match=rf"long.csv: row {place + 2}, column 'upper': the range is empty"):
        read_trace(path)


def test_text_that_is_not_utf8(tmp_path: Path) -> None:
    path = tmp_path / "bad.csv"
    path.write_bytes(HEAD.encode() + b"\xff\xfe,0,4,64\n")
    with pytest.raises(InvalidFileError, match=r"row 2, column .id.: got .*expected text in UTF-8"):
        read_trace(path)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--align", "0"], "Input should be greater than or equal to 1, got '0' (see `memfit pack --help`)"),
        (["--align", "8%"], "Invalid value for '--align': Input should be a valid integer"),
        (["--align", str(1 << 41)], "alignment is 2199023255552, expected 1"),
        (["--ends", "open"], "ends is 'open', expected exclusive"),
        (["--packer", "worst_fit"], "no packer is called 'worst_fit'; there are auto"),
        (["--packer", "first_fit", "--option", "by=name"], "by"),
        (["--packer", "exact", "--option", "nodes=-1"], "nodes -1"),
        (["--option", "speed=1"], "no option 'speed'"),
        (["--time-limit", "0"], "--time-limit is 0.0"),
        (["--picture", "layout.svg"], "expected .html or .png"),
        (["-o", "no/such/folder/out.csv"], "cannot be written"),
    ],
)
def test_bad_options_are_one_line(run: Run, trace: Path, words: list[str], message: str) -> None:
    status, _, err = run("pack", trace, *words)
    assert status == 2
    assert message in err
    assert err.count("\n") == 1


def test_a_file_that_is_not_there(run: Run, tmp_path: Path) -> None:
    status, _, err = run("pack", tmp_path / "none.csv")
    assert (status, err.count("\n")) == (2, 1)
    assert "cannot be read" in err


def test_packers_lists_all(run: Run) -> None:
    status, out, _ = run("packers", "--json")
    listed = json.loads(out)["packers"]
    assert status == 0
    assert {entry["name"] for entry in listed} == set(PACKERS)
    assert all(entry["source"] and entry["description"] for entry in listed)
    assert run("packers")[0] == 0


def test_compilation_does_not_count_as_time_of_a_packer(tmp_path: Path) -> None:
    """The first `memfit pack` of a machine is as good as the second."""
    random = np.random.default_rng(7)
    starts = random.integers(0, 100, 200)
    rows = zip(range(200), starts, starts + random.integers(1, 50, 200), random.integers(1, 40, 200), strict=True)
    trace = tmp_path / "trace.csv"
    trace.write_text("id,lower,upper,size\n" + "".join(f"{','.join(map(str, row))}\n" for row in rows))
    heights = set()
    for _ in ("cold", "warm"):
        done = subprocess.run(
            [sys.executable, "-m", "memfit", "pack", str(trace), "--time-limit", "1", "--json"],
            capture_output=True,
            text=True,
            check=True,
            env=os.environ | {"NUMBA_CACHE_DIR": str(tmp_path / "numba")},
        )
        answer = json.loads(done.stdout)
        assert answer["pack_seconds"] < 5
        heights.add(answer["ratio"])
    assert max(heights) <= 1.02 * min(heights)
