"""The rooms of the package: imports point downward only, torch stays in its rooms, its private names in one file."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

import memfit

PACKAGE = Path(memfit.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))

# From the top down: a room, or a file of one, may import what stands below it, and itself.
ORDER = (
    ("__main__",),
    ("cli",),
    ("commands",),
    ("integrations",),
    ("doors",),
    ("baselines",),
    ("workloads",),
    ("report",),
    ("checkpointing",),
    ("dynamo", "eager_mode"),
    ("step",),
    ("kernels",),
    ("memory/in_arena",),
    ("memory/placed_plans", "memory/step_memory", "memory/uncounted"),
    ("memory/arena", "memory/saved_on_host", "memory/snapshot", "memory/what_is_left"),
    ("memory/python_places",),
    ("memory/footprint", "memory/hard_cap", "memory/host"),
    ("capture",),
    ("chunked_loss",),
    ("cost",),
    ("options",),
    ("compile_ahead", "near_plans", "planning", "plan_cache", "progress"),
    ("planners/registry",),
    ("packing/registry",),
    ("papers",),
    ("planners",),
    ("packing",),
    ("plan",),
    ("simulate",),
    ("checker",),
    ("schedule",),
    ("device",),
    ("rebuild",),
    ("graph", "graph_rules"),
    ("binding",),
    ("torch_private",),
    ("memory",),
    ("system",),
    ("errors",),
)
# The same within a room that has rooms or files of its own; files of one level do not import one another.
INNER_ORDER: dict[str, tuple[tuple[str, ...], ...]] = {
    "papers": (("dqn", "packers", "planners"), ("options",)),
    "planners": (
        ("auto",),
        ("offload",),
        ("none", "search"),
        ("protocols",),
        ("engine",),
    ),
    "papers/dqn": (("planner",), ("training",), ("network",), ("environment",), ("copies", "recomputations", "rows")),
    "planners/engine": (
        ("starts",),
        ("carried", "cpsat", "offloading", "pool"),
        ("annealing", "results"),
        ("bounds", "overlapping", "peak_reducing_order", "retention"),
        ("order", "pace", "parts", "solver"),
    ),
    "packing": (
        ("strategies",),
        ("check_parallel",),
        ("parallel",),
        ("portfolio",),
        ("exact",),
        ("best_fit", "improve"),
        ("first_fit",),
        ("fitting",),
        ("check", "from_schedule", "sections", "trace_file"),
        ("blocks", "parts"),
    ),
    "packing/exact": (("exact",), ("apart", "branching", "tree"), ("placing",)),
    "packing/improve": (
        ("tight",),
        ("ejection", "local_search"),
        ("ejecting", "squeaky"),
        ("searching", "starts", "xorshift"),
    ),
    "step": (
        ("planned_step",),
        ("programs", "step"),
        ("proof",),
        ("state_forms",),
        ("chunked", "cuda_graph", "distributed", "freed_run", "near_sizes", "variants"),
        ("behind", "step_program"),
        ("host_states", "measure", "prepare", "update_parts"),
        ("divided_updates", "verify"),
        (
            "agreement",
            "backward_updates",
            "eager_peak",
            "hooks",
            "measured",
            "overhead",
            "signature",
            "turns",
            "uncopied",
        ),
    ),
    "step/distributed": (("across",), ("sharding",), ("ranks",), ("planning",)),
    "kernels": (
        ("inductor",),
        ("halves",),
        ("program",),
        ("lowering",),
        ("absent_gradients", "chains", "direct_calls", "joint_graphs", "node_halves", "race", "rehearse"),
        ("host_copies",),
    ),
    "chunked_loss": (("heads",), ("logits",), ("reductions",), ("rows",)),
    "memory/host": (("layout", "room"), ("store",), ("slab",)),
    "memory/arena": (
        ("arena",),
        ("planned_memory", "probing", "spilling"),
        ("devices",),
        ("cuda",),
        ("library",),
        ("forwarding", "places"),
        ("layout", "orders", "with_blocks"),
    ),
    "eager_mode": (
        ("eager",),
        ("mode",),
        ("aside", "pages"),
        ("contents",),
        ("again", "passes", "releasing"),
        ("kept", "operators"),
        ("needs",),
        ("sources",),
        ("call_times",),
    ),
    "dynamo": (
        ("inductor_step",),
        ("lookup", "model"),
        ("backend",),
        ("parts",),
        ("compiled_graph",),
        ("ready_order", "settings", "share", "gradient_sums"),
        ("account", "inputs"),
        ("optimizers", "outside", "window"),
    ),
    "doors": (("compile", "function"), ("checkpoint", "fit"), ("step",)),
    # The files of `memory` above `capture` stand in ORDER.
    "memory": (("kept_on_host",), ("bits", "contract", "fit_by", "pinned", "place")),
    "checkpointing": (
        ("step",),
        ("handle",),
        ("loop",),
        ("judging",),
        ("shared_policy",),
        ("plans",),
        ("compiled_calls", "installed", "shapes", "windows"),
        ("blocks", "explaining", "reporting", "steering"),
        ("passes",),
        ("chain", "lean_offload", "policy", "recording"),
        ("block_modes",),
        ("contexts", "planning", "snapshots"),
        ("tables",),
        ("reached",),
        ("calls", "groups", "knapsack"),
        ("choices",),
        ("seen",),
    ),
    "torch_private": (
        ("dynamo", "guarding", "inductor"),
        ("aot",),
        ("ambient", "checkpoints"),
        ("absent", "autograd", "cuda", "modules", "ranks", "sharding", "symbols", "tracing"),
        ("autocast", "compiled_regions", "tensors"),
        ("patching",),
    ),
    "integrations": (("accelerate", "lightning", "transformers"), ("metrics",), ("found_models",), ("held",)),
}
LEVEL = {room: level for level, rooms in enumerate(ORDER) for room in rooms}
INNER_LEVEL = {
    room: {name: level for level, names in enumerate(order) for name in names} for room, order in INNER_ORDER.items()
}
TORCH_ROOMS = {
    "baselines",
    "capture",
    "checkpointing",
    "chunked_loss",
    "cost",
    "doors",
    "dynamo",
    "eager_mode",
    "integrations",
    "kernels",
    "memory/arena",
    "memory/footprint",
    "memory/hard_cap",
    "memory/host",
    "memory/in_arena",
    "memory/placed_plans",
    "memory/python_places",
    "memory/saved_on_host",
    "memory/snapshot",
    "memory/step_memory",
    "memory/uncounted",
    "memory/what_is_left",
    "step",
    "torch_private",
    "workloads",
}
TORCH_FILES = {
    "memory/bits.py",
    "memory/kept_on_host.py",
    "memory/pinned.py",
    "memory/place.py",
    "system/cpu_limit.py",
    "system/instruments.py",
    "system/recorder.py",
    "papers/dqn/network.py",
    "papers/dqn/training.py",
}
TORCH_LATE = {"commands/targets.py", "papers/dqn/planner.py"}  # may import torch inside functions
PRIVATE_NAMES = "torch_private/"

# (file, room above it that it imports inside a function) -> why that is right.
UPWARD: dict[tuple[str, str], str] = {
    ("packing/__init__.py", "packing/registry"): "the registry's names are the room's public ones, loaded when used",
    ("planners/__init__.py", "planners/registry"): "the registry's names are the room's public ones, loaded when used",
    ("plan.py", "report"): "`plan.explain()` is a method of plans; its words are the report's",
    ("step/planned_step.py", "report"): "`step.report(path)` is a method of steps; its page is the report's",
}


def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _type_checking_only(tree: ast.Module) -> set[int]:
    """Return the ids of nodes under `if TYPE_CHECKING:`, which never run."""
    blocks = [n for n in ast.walk(tree) if isinstance(n, ast.If) and "TYPE_CHECKING" in ast.unparse(n.test)]
    return {id(inner) for block in blocks for statement in block.body for inner in ast.walk(statement)}


def _imports(tree: ast.Module) -> Iterator[tuple[ast.stmt, str]]:
    """Yield every import that runs, as the dotted name of what is imported."""
    skipped = _type_checking_only(tree)
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from ((node, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import; write the whole name"
            yield from ((node, f"{node.module}.{alias.name}") for alias in node.names)


def _relative(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def _room(path: Path) -> str:
    return _room_of(path.relative_to(PACKAGE).with_suffix("").parts)


def _room_of(parts: Sequence[str]) -> str:
    """Return the room of a file, which a registry in it may stand above."""
    inner = "/".join(parts[:2])
    return inner if inner in LEVEL else parts[0]


def _upward_imports(path: Path, tree: ast.Module) -> list[str]:
    if path == PACKAGE / "__init__.py":
        return []
    room, found = _room(path), []
    for node, name in _imports(tree):
        where = f"{_relative(path)}:{node.lineno} imports {name}"
        if name == "memfit":
            found.append(f"{where}: the package itself stands above all of its rooms")
            continue
        target = _room_of(name.split(".")[1:]) if name.startswith("memfit.") else None
        if target not in LEVEL:
            continue
        if LEVEL[target] < LEVEL[room] and (_relative(path), target) not in UPWARD:
            found.append(f"{where}: {room} is below {target}")
        elif target == room:
            found += [f"{where}: {why}" for why in _upward_inside(path, name)]
    return found


def _upward_inside(path: Path, name: str) -> list[str]:
    """Say which inner rooms an import of the same room climbs over."""
    here = path.relative_to(PACKAGE).with_suffix("").parts
    there = name.split(".")[1:]
    for depth in range(1, min(len(here), len(there))):
        levels = INNER_LEVEL.get("/".join(here[:depth]), {})
        mine, other = here[depth], there[depth]
        if mine != other:
            is_upward = mine in levels and other in levels and levels[other] <= levels[mine]
            return [f"{mine} is not above {other}"] if is_upward else []
    return []


def _torch_imports(path: Path, tree: ast.Module) -> list[str]:
    if _room(path) in TORCH_ROOMS or _relative(path) in TORCH_FILES:
        return []
    top_level = {id(node) for node in tree.body}
    return [
        f"{_relative(path)}:{node.lineno} imports {name}"
        for node, name in _imports(tree)
        if name.split(".")[0] == "torch" and (_relative(path) not in TORCH_LATE or id(node) in top_level)
    ]


def _private_torch_names(path: Path, tree: ast.Module) -> list[str]:
    if _relative(path).startswith(PRIVATE_NAMES):
        return []
    found = [(node.lineno, name) for node, name in _imports(tree) if name.split(".")[0] == "torch"]
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node).startswith("torch."):
            found.append((node.lineno, ast.unparse(node)))
    return [
        f"{_relative(path)}:{line} uses {name}"
        for line, name in found
        if any(part.startswith("_") and not part.endswith("__") for part in name.split("."))
    ]


@pytest.mark.parametrize("path", FILES, ids=_relative)
def test_file_keeps_to_its_room(path: Path) -> None:
    tree = _tree(path)
    assert path.name == "__init__.py" or _room(path) in LEVEL, f"{_room(path)} has no place in ORDER; give it one"
    assert _upward_imports(path, tree) == []
    assert _torch_imports(path, tree) == []
    assert _private_torch_names(path, tree) == []


@pytest.mark.parametrize(("file", "room"), UPWARD)
def test_an_import_that_may_point_upward_stands_in_a_function(file: str, room: str) -> None:
    tree = _tree(PACKAGE / file)
    found = [
        node for node, name in _imports(tree) if name.startswith("memfit.") and _room_of(name.split(".")[1:]) == room
    ]
    assert found, "nothing imports it: the exception can go"
    assert not set(map(id, found)) & set(map(id, tree.body))


@pytest.mark.parametrize("room", INNER_ORDER)
def test_every_file_of_a_room_has_its_place(room: str) -> None:
    files = {path.stem for path in (PACKAGE / room).glob("*.py")} - {"__init__"}
    rooms = {path.parent.name for path in (PACKAGE / room).glob("*/__init__.py")}
    named = [name for names in INNER_ORDER[room] for name in names]
    assert sorted(named) == sorted(name for name in files | rooms if f"{room}/{name}" not in LEVEL)


@pytest.mark.parametrize(
    ("file", "source", "finder"),
    [
        ("graph.py", "from memfit.plan import Plan", _upward_imports),
        ("planners/engine/results.py", "from memfit.papers.planners import segments", _upward_imports),
        ("planners/search.py", "from memfit.papers.planners.segments import SegmentsPlanner", _upward_imports),
        ("planners/offload.py", "from memfit.papers.planners.segments import SegmentsPlanner", _upward_imports),
        ("planners/auto.py", "from memfit.papers.planners.segments import SegmentsPlanner", _upward_imports),
        ("planners/engine/pace.py", "from memfit.planners.engine.order import original_order", _upward_imports),
        ("planners/search.py", "def plan():\n    import memfit.step.step", _upward_imports),
        ("plan.py", "def load():\n    import torch", _torch_imports),
        ("papers/dqn/planner.py", "import torch", _torch_imports),
        ("step/step.py", "from torch._functorch import aot_autograd", _private_torch_names),
        ("step/step.py", "from torch.utils import _pytree", _private_torch_names),
        ("cost/rooflines.py", "import torch\nx = torch._C._get_tracing_state()", _private_torch_names),
    ],
)
def test_each_rule_can_fail(file: str, source: str, finder: object) -> None:
    assert callable(finder)
    assert finder(PACKAGE / file, ast.parse(source))


@pytest.mark.parametrize(
    ("file", "source", "finder"),
    [
        ("plan.py", "from memfit.graph import Graph", _upward_imports),
        ("papers/planners/recursive.py", "from memfit.planners.engine.order import original_order", _upward_imports),
        ("graph.py", "if TYPE_CHECKING:\n    from memfit.plan import Plan", _upward_imports),
        ("papers/dqn/planner.py", "def train():\n    import torch", _torch_imports),
        ("step/step.py", "import torch\nx = torch.__version__", _private_torch_names),
        ("torch_private/aot.py", "from torch._functorch import aot_autograd", _private_torch_names),
    ],
)
def test_each_rule_lets_right_code_pass(file: str, source: str, finder: object) -> None:
    assert callable(finder)
    assert finder(PACKAGE / file, ast.parse(source)) == []


def test_few_public_names() -> None:
    assert len(memfit.__all__) <= 16
    assert sorted(memfit.__all__) == sorted(set(memfit.__all__))
