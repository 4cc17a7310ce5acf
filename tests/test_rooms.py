"""The rooms of the package: imports point downward only, torch stays in its rooms, its private names in one file."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import memfit

PACKAGE = Path(memfit.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))

# From the top down: a room may import what stands below it, and itself.
ORDER = (
    ("__main__",),
    ("cli",),
    ("commands",),
    ("workloads",),
    ("report",),
    ("runtime",),
    ("capture",),
    ("cost",),
    ("planners",),
    ("packing",),
    ("plan",),
    ("in_place",),
    ("simulate", "simulate_loop"),
    ("checker",),
    ("schedule",),
    ("device", "device_profiles"),
    ("graph",),
    ("binding",),
    ("native",),
    ("files",),
    ("budget",),
    ("errors",),
    ("compiled",),
)
LEVEL = {room: level for level, rooms in enumerate(ORDER) for room in rooms}
TORCH_ROOMS = {"capture", "cost", "native", "runtime", "workloads"}
TORCH_LATE = {"planners/dqn.py"}  # may import torch inside functions
PRIVATE_NAMES = "capture/torch_private.py"

# (file, room above it that it imports inside a function) -> why that is right.
UPWARD: dict[tuple[str, str], str] = {
    ("plan.py", "report"): "`plan.explain()` is a method of plans; its words are the report's",
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
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def _upward_imports(path: Path, tree: ast.Module) -> list[str]:
    if path == PACKAGE / "__init__.py":
        return []
    room, found = _room(path), []
    for node, name in _imports(tree):
        target = name.split(".")[1] if name.startswith("memfit.") else None
        if target in LEVEL and LEVEL[target] < LEVEL[room] and (_relative(path), target) not in UPWARD:
            found.append(f"{_relative(path)}:{node.lineno} imports {name}: {room} is below {target}")
    return found


def _torch_imports(path: Path, tree: ast.Module) -> list[str]:
    if _room(path) in TORCH_ROOMS:
        return []
    top_level = {id(node) for node in tree.body}
    return [
        f"{_relative(path)}:{node.lineno} imports {name}"
        for node, name in _imports(tree)
        if name.split(".")[0] == "torch" and (_relative(path) not in TORCH_LATE or id(node) in top_level)
    ]


def _private_torch_names(path: Path, tree: ast.Module) -> list[str]:
    if _relative(path) == PRIVATE_NAMES:
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


@pytest.mark.parametrize(
    ("file", "source", "finder"),
    [
        ("graph.py", "from memfit.plan import Plan", _upward_imports),
        ("planners/search.py", "def plan():\n    import memfit.runtime.fit", _upward_imports),
        ("plan.py", "def load():\n    import torch", _torch_imports),
        ("planners/dqn.py", "import torch", _torch_imports),
        ("runtime/fit.py", "from torch._functorch import aot_autograd", _private_torch_names),
        ("runtime/fit.py", "from torch.utils import _pytree", _private_torch_names),
        ("cost/flops.py", "import torch\nx = torch._C._get_tracing_state()", _private_torch_names),
    ],
)
def test_each_rule_can_fail(file: str, source: str, finder: object) -> None:
    assert callable(finder)
    assert finder(PACKAGE / file, ast.parse(source))


@pytest.mark.parametrize(
    ("file", "source", "finder"),
    [
        ("plan.py", "from memfit.graph import Graph", _upward_imports),
        ("graph.py", "if TYPE_CHECKING:\n    from memfit.plan import Plan", _upward_imports),
        ("planners/dqn.py", "def train():\n    import torch", _torch_imports),
        ("runtime/fit.py", "import torch\nx = torch.__version__", _private_torch_names),
        ("capture/torch_private.py", "from torch._functorch import aot_autograd", _private_torch_names),
    ],
)
def test_each_rule_lets_right_code_pass(file: str, source: str, finder: object) -> None:
    assert callable(finder)
    assert finder(PACKAGE / file, ast.parse(source)) == []


def test_few_public_names() -> None:
    assert len(memfit.__all__) <= 10
    assert sorted(memfit.__all__) == sorted(set(memfit.__all__))
