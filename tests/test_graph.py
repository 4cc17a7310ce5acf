"""Graphs: the defaults that are filled in, invalid graphs, and graph files."""

from __future__ import annotations

import copy
import json
import math
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from small_step import small_step
from strategies import graphs

from memfit.errors import InvalidFileError, InvalidGraphError
from memfit.graph import Boundary, Graph, Op, Phase, Role, Storage

Document = dict[str, Any]


def document() -> Document:
    """A graph file by hand: x is there, a writes h, b writes y in place of h, one boundary before b."""
    return {
        "format": "memfit-graph",
        "version": 1,
        "name": "hand",
        "storages": [
            {"id": 0, "name": "x", "bytes": 8, "role": "input"},
            {"id": 1, "name": "h", "bytes": 16, "role": "activation"},
            {"id": 2, "name": "y", "bytes": 16, "role": "output"},
            {"id": 3, "name": "t", "bytes": 4, "role": "gradient"},
        ],
        "ops": [
            {"id": 0, "name": "a", "phase": "forward", "reads": [0], "writes": [1], "seconds": 0.5},
            {
                "id": 1,
                "name": "b",
                "phase": "backward",
                "reads": [1, 3],
                "writes": [2],
                "seconds": 1e-4,
                "workspace_bytes": None,
                "reuses": [[1, 2]],
            },
        ],
        "boundaries": [{"position": 1, "arrivals": [3], "departures": [1]}],
    }


def load(folder: Path, content: Document | bytes) -> Graph:
    path = folder / "hand.graph.json"
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    return Graph.load(path)


def test_what_may_be_left_out_is_filled_in(tmp_path: Path) -> None:
    graph = load(tmp_path, document())
    assert [storage.resident for storage in graph.storages] == [True, False, False, False]
    assert [storage.required_at_end for storage in graph.storages] == [False, True, True, False]
    first, second = graph.ops
    assert (first.target, first.module, first.mutates, first.workspace_bytes) == ("", "", (), 0)
    assert (first.recomputable, first.random, first.reuses) == (True, None, ())
    assert second.workspace_bytes is None
    assert (graph.source, graph.notes, graph.device) == ("", "", "")


def test_versions_count_the_mutations_before() -> None:
    graph = small_step()
    assert graph.read_versions[3] == ((5, 0),)
    assert graph.read_versions[4] == ((5, 0), (6, 0))
    assert graph.read_versions[5] == ((5, 1),)
    assert graph.read_versions[8] == ((10, 0), (1, 0))
    assert [s for s, last in enumerate(graph.last_version) if last] == [1, 5]
    assert graph.writer_of[9] == 6
    assert graph.resident_bytes == 300
    assert [op.computed_once for op in graph.ops] == [False] * 4 + [True] + [False] * 2 + [True, True]


# What is done to the document: a path into it, the new value, and the error.
GRAPH_ERRORS = {
    "storage ids count up": ("storages.1.id", 5, "storage 'h' has id 5, expected 1 - at `$.storages[1].id`"),
    "op ids count up": ("ops.1.id", 0, "op 'b' has id 0, expected 1 - at `$.ops[1].id`"),
    "dangling read": ("ops.0.reads", [9], "op 'a' names storage 9, expected 0 to 3 - at `$.ops[0].reads[0]`"),
    "dangling write": ("ops.0.writes", [1, 4], "op 'a' names storage 4, expected 0 to 3 - at `$.ops[0].writes[1]`"),
    "dangling mutation": ("ops.1.mutates", [7], "op 'b' names storage 7, expected 0 to 3 - at `$.ops[1].mutates[0]`"),
    "dangling arrival": (
        "boundaries.0.arrivals",
        [3, 8],
        "boundary names storage 8, expected 0 to 3 - at `$.boundaries[0].arrivals[1]`",
    ),
    "dangling departure": (
        "boundaries.0.departures",
        [8],
        "boundary names storage 8, expected 0 to 3 - at `$.boundaries[0].departures[0]`",
    ),
    "cycle": (
        "ops.0.reads",
        [0, 2],
        "op 'a' needs storage 2 'y' before any op wrote it (a cycle or wrong order) - at `$.ops[0].reads[1]`",
    ),
    "reads its own write": (
        "ops.0.reads",
        [1],
        "op 'a' needs storage 1 'h' before any op wrote it (a cycle or wrong order) - at `$.ops[0].reads[0]`",
    ),
    "written twice": (
        "ops.1.writes",
        [1],
        "op 'b' writes storage 1 'h', which is written before, or arrives at a boundary - at `$.ops[1].writes[0]`",
    ),
    "resident written": (
        "storages.1.resident",
        True,
        "op 'a' writes storage 1 'h', which is resident (say `mutates`) - at `$.ops[0].writes[0]`",
    ),
    "mutated twice": (
        "ops.1.mutates",
        [0, 0],
        "op 'b' mutates a storage twice, expected each once: [0, 0] - at `$.ops[1].mutates`",
    ),
    "reuse of what is not read": (
        "ops.1.reuses",
        [[0, 2]],
        "op 'b' reuses 0 -> 2, expected a read and a write of it - at `$.ops[1].reuses[0]`",
    ),
    "reuse of other bytes": (
        "storages.1.bytes",
        15,
        "op 'b' reuses 1 -> 2 of 15 and 16 bytes, expected equal - at `$.ops[1].reuses[0]`",
    ),
    "arrives twice": (
        "boundaries.0.arrivals",
        [3, 3],
        "storage 3 't' arrives but is there already - at `$.boundaries[0].arrivals[1]`",
    ),
    "departs before it is written": (
        "boundaries.0.departures",
        [2],
        "storage 2 'y' departs before any op wrote it - at `$.boundaries[0].departures[0]`",
    ),
    "boundary after the ops": (
        "boundaries.0.position",
        3,
        "op 'b' needs storage 3 't' before any op wrote it (a cycle or wrong order) - at `$.ops[1].reads[1]`",
    ),
    "boundaries out of order": (
        "boundaries",
        [{"position": 1, "arrivals": [3], "departures": []}, {"position": 0, "arrivals": [], "departures": []}],
        "boundary stands at 0, expected 1: in order, and within the ops - at `$.boundaries[1].position`",
    ),
    "boundary beyond the end": (
        "boundaries",
        [{"position": 1, "arrivals": [3], "departures": []}, {"position": 9, "arrivals": [], "departures": []}],
        "boundary stands at 9, expected 2: in order, and within the ops - at `$.boundaries[1].position`",
    ),
    "more bytes than sums hold": (
        "storages.0.bytes",
        1 << 60,
        f"all storages together have {(1 << 60) + 36} bytes, expected at most {1 << 60} - at `$.storages`",
    ),
    "more workspace than sums hold": (
        "ops.0.workspace_bytes",
        1 << 61,
        f"op 'a' has {1 << 61} workspace bytes, expected 0 to {1 << 60} - at `$.ops[0].workspace_bytes`",
    ),
}


@pytest.mark.parametrize("case", GRAPH_ERRORS.values(), ids=GRAPH_ERRORS.keys())
def test_a_broken_rule_is_named(case: tuple[str, Any, str], tmp_path: Path) -> None:
    place, value, message = case
    with pytest.raises(InvalidGraphError, match=f"^{re.escape(f'{tmp_path}/hand.graph.json: {message}')}$"):
        load(tmp_path, changed(place, value))


FILE_ERRORS = {
    "unknown key": ("storages.1.colour", 1, "Object contains unknown field `colour` - at `$.storages[1]`"),
    "unknown key at the top": ("extra", 1, "Object contains unknown field `extra`"),
    "unknown role": ("storages.0.role", "blob", "Invalid enum value 'blob' - at `$.storages[0].role`"),
    "unknown phase": ("ops.0.phase", "sideways", "Invalid enum value 'sideways' - at `$.ops[0].phase`"),
    "negative bytes": ("storages.2.bytes", -1, "Expected `int` >= 0, got -1 - at `$.storages[2].bytes`"),
    "huge bytes": ("storages.2.bytes", 10**30, "Expected `int` <= 4611686018427387904, got 1000"),
    "fractional bytes": ("storages.2.bytes", 1.5, "Expected `int`, got `float` - at `$.storages[2].bytes`"),
    "negative seconds": ("ops.0.seconds", -1.0, "Expected `float` >= 0.0, got -1.0 - at `$.ops[0].seconds`"),
    "seconds as text": ("ops.0.seconds", "1", "Expected `float`, got `str` - at `$.ops[0].seconds`"),
    "negative workspace": ("ops.0.workspace_bytes", -1, "Expected `int` >= 0, got -1 - at `$.ops[0].workspace_bytes`"),
    "negative id": ("ops.0.reads", [-1], "Expected `int` >= 0, got -1 - at `$.ops[0].reads[0]`"),
    "id as text": ("ops.0.reads", ["0"], "Expected `int`, got `str` - at `$.ops[0].reads[0]`"),
    "no list": ("ops.0.reads", 3, "Expected `array`, got `int` - at `$.ops[0].reads`"),
    "triple": ("ops.1.reuses", [[1, 2, 3]], "Expected `array` of length 2, got [1, 2, 3] - at `$.ops[1].reuses[0]`"),
    "null": ("storages.0.name", None, "Expected `str`, got `null` - at `$.storages[0].name`"),
    "other format": ("format", "onnx", "format is 'onnx', expected 'memfit-graph' - at `$.format`"),
    "other version": ("version", 2, "version is 2, this memfit reads 1 - at `$.version`; upgrade memfit"),
}


@pytest.mark.parametrize("case", FILE_ERRORS.values(), ids=FILE_ERRORS.keys())
def test_a_wrong_file_is_named(case: tuple[str, Any, str], tmp_path: Path) -> None:
    place, value, message = case
    with pytest.raises(InvalidFileError, match=f"^{re.escape(f'{tmp_path}/hand.graph.json: {message}')}"):
        load(tmp_path, changed(place, value))


@pytest.mark.parametrize("key", ["format", "version", "name", "storages", "ops"])
def test_a_missing_key_is_named(key: str, tmp_path: Path) -> None:
    without = document()
    del without[key]
    with pytest.raises(InvalidFileError, match=f"Object missing required field `{key}`"):
        load(tmp_path, without)


def test_every_truncation_of_a_file_is_one_error(tmp_path: Path) -> None:
    content = json.dumps(document()).encode()
    for kept in range(0, len(content), 7):
        with pytest.raises(InvalidFileError, match=r"hand.graph.json: "):
            load(tmp_path, content[:kept])


def test_seconds_are_finite(tmp_path: Path) -> None:
    content = json.dumps(document()).encode()
    for hostile in (b"1e999", b"NaN", b"Infinity", b"-0.5"):
        with pytest.raises((InvalidFileError, InvalidGraphError), match=r"hand.graph.json: "):
            load(tmp_path, content.replace(b"0.5", hostile))
    for seconds in (math.nan, math.inf, -1.0):
        op = Op(id=0, name="op", phase=Phase.FORWARD, reads=(), writes=(0,), seconds=seconds)
        storage = Storage(id=0, name="s", bytes=1, role=Role.ACTIVATION)
        with pytest.raises(InvalidGraphError, match="seconds, expected a number from 0"):
            Graph.build(name="seconds", storages=[storage], ops=[op])


def test_what_no_op_writes_is_there_or_an_error() -> None:
    storage = Storage(id=0, name="s", bytes=1, role=Role.ACTIVATION)
    assert Graph.build(name="none", storages=[storage], ops=[]).storages[0].resident
    with pytest.raises(InvalidGraphError, match="storage 's' is not resident and nothing writes it"):
        Graph(name="none", storages=(storage,), ops=()).verify()


def test_negative_bytes_are_refused_without_a_file() -> None:
    storage = Storage(id=0, name="s", bytes=-1, role=Role.INPUT)
    with pytest.raises(InvalidGraphError, match="storage 's' has -1 bytes, expected 0 or more"):
        Graph.build(name="negative", storages=[storage], ops=[])


@given(graphs(collectives=True))
def test_every_graph_survives_its_file(tmp_path_factory: pytest.TempPathFactory, graph: Graph) -> None:
    folder = tmp_path_factory.mktemp("graphs")
    for name in ("drawn.graph.json", "drawn.graph.json.gz"):
        graph.save(folder / name)
        assert Graph.load(folder / name) == graph


def test_a_saved_graph_is_readable_and_carries_its_text(tmp_path: Path) -> None:
    graph = msgspec.structs.replace(small_step(), source="by hand", notes="for tests", device="cpu")
    graph.save(tmp_path / "a.graph.json")
    assert Graph.load(str(tmp_path / "a.graph.json")) == graph
    assert '"name": "conv"' in (tmp_path / "a.graph.json").read_text()


CHANGES = {
    "bytes": ("storages.1.bytes", 17),
    "a read": ("ops.1.reads", [1, 3, 0]),
    "a mutation": ("ops.1.mutates", [0]),
    "what is required": ("storages.3.required_at_end", True),
    "what is recomputable": ("ops.0.recomputable", False),
    "a generator": ("ops.0.random", "cpu"),
    "an op's target": ("ops.0.target", "aten.mm"),
    "a phase": ("ops.0.phase", "update"),
    "a boundary": ("boundaries.0.departures", []),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_the_fingerprint_covers_structure(change: tuple[str, Any], tmp_path: Path) -> None:
    edited = changed(*change)
    if change[0] == "storages.1.bytes":
        edited["ops"][1]["reuses"] = []
    assert load(tmp_path, edited).fingerprint != load(tmp_path, document()).fingerprint


def test_the_fingerprint_covers_neither_names_nor_costs_nor_reuses(tmp_path: Path) -> None:
    edited = changed("ops.0.seconds", 7.0)
    edited["ops"][1]["reuses"] = []
    edited["ops"][1]["workspace_bytes"] = 99
    edited["name"] = edited["storages"][0]["name"] = edited["ops"][0]["module"] = "renamed"
    edited["storages"][1]["role"] = "constant"
    assert load(tmp_path, edited).fingerprint == load(tmp_path, document()).fingerprint


def test_boundaries_may_stand_together_and_at_the_end() -> None:
    storages = [Storage(id=i, name=f"s{i}", bytes=1, role=Role.ACTIVATION) for i in range(2)]
    op = Op(id=0, name="op", phase=Phase.FORWARD, reads=(0,), writes=(1,), seconds=0.0)
    boundaries = [
        Boundary(position=0, arrivals=(0,), departures=()),
        Boundary(position=0, arrivals=(), departures=(0,)),
        Boundary(position=1, arrivals=(), departures=(1,)),
    ]
    graph = Graph.build(name="together", storages=storages, ops=[op], boundaries=boundaries)
    assert [storage.required_at_end for storage in graph.storages] == [True, True]


def changed(place: str, value: Any) -> Document:
    """Return the document with the value at a dotted place replaced, or added."""
    whole = copy.deepcopy(document())
    *path, last = place.split(".")
    inner: Any = whole
    for step in path:
        inner = inner[int(step)] if step.isdigit() else inner[step]
    inner[last] = value
    return whole
