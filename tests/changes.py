"""Settings and attributes that are not memfit's own, and that code of memfit changes: found in the sources."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

_SETS = re.compile(r"_?(set|enable|use|register|push|pop)_\w")
_PATCHES = ("config.patch", "config._make_closure_patcher")
_GARBAGE = {f"gc.{name}" for name in ("freeze", "unfreeze", "disable", "enable", "set_threshold")}
_NO_SETTINGS = {"enable_grad", "set_grad_enabled", "set_rng_state"}  # modes of a thread, and state that a step has


def changed_in(file: Path) -> set[str]:
    """Return the names of the settings, attributes and global hooks of others that a file changes.

    These are first arguments of `replaced` and `config.patch`, attributes of torch that are written or deleted, setters
    of torch, of the garbage collector and of `sys`, and attributes of classes.

    Args:
        file: a source of Python's, or of C++'s, whose names are those of c10's setters.
    """
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".cpp":
        return set(re.findall(r"c10::(Set\w+)", text))
    found = _Changes()
    tree = ast.parse(text)
    for node in ast.walk(tree):  # wherever it is in the file
        found.note(node)
    found.visit(tree)
    return found.names


class _Changes(ast.NodeVisitor):
    def __init__(self) -> None:
        self.names: set[str] = set()
        self._imported: set[str] = set()
        self._aliases = {"torch"}
        self._assigned: dict[str, ast.expr] = {}

    def note(self, node: ast.AST) -> None:
        """Note which names are torch's, and what is assigned to the others first."""
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
            self._imported |= {each.asname or each.name for each in node.names}
        elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if isinstance(target, ast.Name):
                    self._assigned.setdefault(target.id, node.value)
                    if isinstance(node.value, ast.Attribute) and self._is_torchs(node.value):
                        self._aliases.add(target.id)

    def _is_torchs(self, node: ast.expr) -> bool:
        while isinstance(node, ast.Attribute):
            node = node.value
        return isinstance(node, ast.Name) and node.id in self._imported | self._aliases

    def _keys(self, node: ast.expr) -> Iterator[str]:
        """Yield the texts that an expression stands for: one, or the keys of a dictionary."""
        if isinstance(node, ast.Constant):
            yield str(node.value)
        elif isinstance(node, ast.Name) and node.id in self._assigned:
            yield from self._keys(self._assigned[node.id])
        elif isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                yield from self._keys(key or value)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        text, is_torchs = ast.unparse(node), self._is_torchs(node)
        if isinstance(node.ctx, ast.Load):
            is_set = is_torchs and node.attr not in _NO_SETTINGS and _SETS.match(node.attr)
            is_set = is_set or text in _GARBAGE or text.startswith("sys.set")
        else:
            is_set = is_torchs or text.startswith("cls.")
        if is_set:
            self.names.add(node.attr)
        self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> None:
        if node.id in self._imported and _SETS.match(node.id):
            self.names.add(node.id)

    def visit_Call(self, node: ast.Call) -> None:
        called = ast.unparse(node.func)
        if called == "replaced" or (called == "setattr" and self._is_torchs(node.args[0])):
            self.names.update(self._keys(node.args[1]))
        if called.endswith(_PATCHES):
            for given in (*node.args, *(each.value for each in node.keywords if each.arg is None)):
                self.names.update(self._keys(given))
            self.names |= {each.arg for each in node.keywords if each.arg is not None}
        self.generic_visit(node)
