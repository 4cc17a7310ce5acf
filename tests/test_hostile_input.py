"""What others wrote, as names and as files: no name becomes code or markup, and no file ends in a traceback."""

from __future__ import annotations

import ast
import io
import json
import os
from contextlib import redirect_stderr, redirect_stdout
from functools import cache, partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from chains import chain
from hypothesis import example, given, settings
from hypothesis import strategies as st
from small_plans import LINKED, REMATERIALIZED, plan_of, small_graph
from steps import make_pair
from test_report import MEASURED, Tags
from torch import nn

import memfit
from memfit.capture import Captured, capture
from memfit.cli import main
from memfit.errors import MemfitError
from memfit.graph import Graph
from memfit.kernels.program import make_program
from memfit.plan import Plan, Problem
from memfit.planners.engine.results import unplanned_schedule
from memfit.report.page import render

ENDS_A_LINE = ["\n", "\r", "\x0b", "\x0c", "\x1c", "\x85", "\u2028", "\u2029"]
PIECES = [*ENDS_A_LINE, "raise SystemExit(7)", "#", "  # ", "'", '"""', "\\", "s0", "del s1", "\x00", "\ud800", "{0}"]
PIECES += ["</script>", "<script>", "<img src=x onerror=a()>", "@@data@@", "&lt;", "\x1b[2J", "\u202e", "a.b", "é"]
hostile_names = st.lists(st.one_of(st.sampled_from(PIECES), st.text(max_size=4)), min_size=1, max_size=6).map("".join)


def renamed(graph: Graph, name: str) -> Graph:
    """Return the graph with `name` for all its names, as UTF-8 can hold it."""
    name = name.encode(errors="replace").decode()
    return msgspec.structs.replace(
        graph,
        name=name,
        source=name,
        notes=name,
        storages=tuple(msgspec.structs.replace(storage, name=name) for storage in graph.storages),
        ops=tuple(msgspec.structs.replace(op, name=name, module=name, target=name) for op in graph.ops),
    )


# -- names ------------------------------------------------------------------------------------------------------------


@cache
def captured_step() -> Captured:
    return capture(make_pair("conv")[0])


def source_of(graph: Graph) -> str:
    captured = captured_step()
    schedule = unplanned_schedule(Problem(graph=captured.graph, device=LINKED, budget_bytes=1))
    outputs = [list(captured.binding.outputs.values())]
    return make_program(Captured(graph=graph, binding=captured.binding), schedule, outputs).source


@settings(max_examples=40)
@given(name=hostile_names)
@example(name="\nraise SystemExit(7)\n")
def test_no_name_changes_the_code_that_is_compiled(name: str) -> None:
    plain = captured_step().graph
    assert ast.dump(ast.parse(source_of(renamed(plain, name)))) == ast.dump(ast.parse(source_of(plain)))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["\nraise SystemExit(7)\n", "x\u2028raise SystemExit(7)", "\r\f\n", "\x00", "\ud800", "s0  # ", "\\"]
)
def test_a_module_of_any_name_is_planned(name: str, tmp_path: Path) -> None:
    model, twin = nn.Sequential(), nn.Sequential()
    model.add_module(name, nn.Linear(4, 2))
    twin.add_module("plain", nn.Linear(4, 2))
    twin.plain.load_state_dict(model.get_submodule(name).state_dict())
    batch = torch.randn(8, 4), torch.randint(0, 2, (8,))
    step = memfit.fit(model, nn.CrossEntropyLoss(), batch, budget="100%", planner="none")
    assert step(batch).equal(nn.functional.cross_entropy(twin(batch[0]), batch[1]))
    step.plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json").explain()


def test_texts_and_odd_keywords_among_arguments_are_never_written_into_code() -> None:
    class Steep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, values: torch.Tensor) -> torch.Tensor:
            noise = torch.empty_like(values).random_(0, 4)  # torch calls its argument `from`
            return nn.functional.gelu(self.layer(values), approximate="tanh") + noise

    torch.manual_seed(0)
    model, values = Steep(), torch.randn(8, 4)
    step = memfit.fit(model, lambda model, batch: model(batch).sum(), values, budget="100%", planner="none")
    assert "tanh" not in step.source
    step.verify()


@settings(max_examples=15)
@given(name=hostile_names)
def test_no_name_becomes_markup(name: str) -> None:
    graph, name = small_graph(), f"x{name}"  # a report leaves out what is empty
    device = msgspec.structs.replace(LINKED, name=name, source=name)
    hostile = plan_of(renamed(graph, name), REMATERIALIZED, device, planner=name, versions={name: name})
    plain = plan_of(renamed(graph, "plain"), REMATERIALIZED, LINKED)
    assert Tags(render(hostile, measured=MEASURED)).tags == Tags(render(plain, measured=MEASURED)).tags
    assert hostile.explain()


# -- files ------------------------------------------------------------------------------------------------------------

TRACE = "id,lower,upper,size\n0,0,4,64\n1,2,6,64\n2,4,8,64\n"


def write_all(folder: Path) -> dict[str, Path]:
    """Write a good file of each kind, and return it by its kind."""
    files = {kind: folder / f"x.{kind}" for kind in ("graph.json", "plan.json", "profile.json", "csv")}
    graph = chain(3, 4096)
    graph.save(files["graph.json"])
    profile = {"name": "mine", "flops_per_second": {"float32": 1e12}, "memory_bytes_per_second": 1e11}
    files["profile.json"].write_text(json.dumps(profile))
    files["csv"].write_text(TRACE)
    assert silent(commands(files)["profile.json"] + ["--save", str(files["plan.json"])])[0] == 0
    return files


def commands(files: dict[str, Path]) -> dict[str, list[str]]:
    """Return for each kind of file a command that reads it."""
    path = {kind: str(file) for kind, file in files.items()}
    plan = ["plan", path["graph.json"], "--budget", "100%", "--planner", "none", "--no-cache"]
    return {
        "graph.json": ["estimate", path["graph.json"]],
        "plan.json": ["check", path["graph.json"], path["plan.json"]],
        "profile.json": [*plan, "--device-profile", path["profile.json"]],
        "csv": ["pack", path["csv"], "--packer", "first_fit"],
    }


def silent(words: list[str]) -> tuple[int, str, str]:
    """Run a command; return its status, and what it wrote."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        status = main(words)
    return status, out.getvalue(), err.getvalue()


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_all(tmp_path_factory.mktemp("good"))


ODD_VALUES: list[Any] = [None, True, -1, 0, 1, 1 << 63, 1 << 70, 1e308, 0.5, "", "x", "\u2028", [], [[]], {}, {"": 0}]

ODD_BYTES = [b"]", b"}", b",", b"-1", b"\xff", b"1e999"]


def changed(document: Any, chooses: Any) -> Any:
    """Return a JSON document with one value replaced, left out, or doubled."""
    if isinstance(document, dict | list) and document and chooses(st.booleans()):
        places = sorted(document) if isinstance(document, dict) else range(len(document))
        place, what = chooses(st.sampled_from(list(places))), chooses(st.sampled_from(["inside", "gone", "odd"]))
        copy: Any = document.copy()
        if what == "gone":
            del copy[place]
        elif what == "odd":
            copy[place] = chooses(st.sampled_from(ODD_VALUES))
        else:
            copy[place] = changed(document[place], chooses)
        return copy
    return chooses(st.sampled_from(ODD_VALUES))


@pytest.mark.parametrize("kind", ["graph.json", "plan.json", "profile.json", "csv"])
@settings(max_examples=60)
@given(data=st.data())
def test_a_damaged_file_is_one_line_and_status_2(kind: str, data: st.DataObject, good: dict[str, Path]) -> None:
    content = good[kind].read_bytes()
    if kind != "csv" and data.draw(st.booleans()):
        content = json.dumps(changed(json.loads(content), data.draw)).encode()
    for _ in range(data.draw(st.integers(0, 2))):
        begin = data.draw(st.integers(0, len(content)))
        end = min(len(content), begin + data.draw(st.integers(0, 12)))
        added = data.draw(
            st.one_of(st.binary(max_size=6), st.sampled_from([b"]", b"}", b",", b"-1", b"\xff", b"1e999"]))
        )
        content = content[:begin] + added + content[end:]
    damaged = good[kind].with_name(f"damaged.{kind}")
    damaged.write_bytes(content)
    status, out, err = silent(commands({**good, kind: damaged})[kind])
    assert status in ((0, 2, 4) if kind == "plan.json" else (0, 2))  # 4: read, but its schedule is not legal
    if status == 2:
        assert (out, err.count("\n")) == ("", 1)
        assert err.startswith("memfit: error: ")


@pytest.mark.parametrize("kind", ["graph.json", "plan.json", "profile.json"])
def test_a_wrong_value_before_malformed_text_is_named(kind: str, good: dict[str, Path]) -> None:
    first = {"graph.json": '"storages": [{"id": -1, ]', "plan.json": '"seed": "x", ]', "profile.json": '"name": 1, ]'}
    damaged = good[kind].with_name(f"malformed.{kind}")
    damaged.write_text("{" + first[kind])
    status, out, err = silent(commands({**good, kind: damaged})[kind])
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert "Expected `" in err


@pytest.mark.parametrize("kind", ["plan.json", "profile.json", "csv"])
def test_a_pipe_is_read(kind: str, good: dict[str, Path]) -> None:
    reader, writer = os.pipe()
    os.write(writer, good[kind].read_bytes())
    os.close(writer)
    try:
        status, _, err = silent(commands({**good, kind: Path(f"/dev/fd/{reader}")})[kind])
    finally:
        os.close(reader)
    assert (status, err) == (0, "")


def test_a_trace_is_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from memfit.packing import trace_file
    from memfit.packing.trace_file import read_trace
    from memfit.system.files import read_chunks

    path = tmp_path / "pieces.csv"
    for ids in (range(50), [f"t{i}" for i in range(50)], [*range(49), "x"], ["007", *range(1, 50)]):
        rows = [f"{name},{place},{place + 3},{64 + place}" for place, name in enumerate(ids)]
        path.write_text("\ufeffid,lower,upper,size\r\n" + "\r\n".join(rows), encoding="utf-8")
        whole = list(read_trace(path))
        assert [str(block.id) for block in whole] == [str(name) for name in ids]
        for piece_bytes in (1, 7, 64):
            monkeypatch.setattr(trace_file, "read_chunks", partial(read_chunks, chunk_bytes=piece_bytes))
            assert list(read_trace(path)) == whole
            path.write_text(path.read_text() + "\n9,9,9,9\n")
            with pytest.raises(MemfitError, match="row 52, column 'upper': the range is empty"):
                read_trace(path)
            path.write_text(path.read_text().replace("9,9,9,9\n", "9,9,9\n"))
            with pytest.raises(MemfitError, match="row 52, column 'size': is missing"):
                read_trace(path)
            path.write_text(path.read_text().removesuffix("\n9,9,9\n"))
        monkeypatch.undo()
