"""Every example in the documents and docstrings runs, and every command line in them exists."""

from __future__ import annotations

import ast
import doctest
import importlib
import inspect
import pkgutil
import re
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
from changes import changed_in
from forks import Forks

import memfit

ROOT = Path(__file__).parent.parent
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
RUN_ELSEWHERE = ROOT / "docs" / "integrations.md"  # by test_extras, in environments of their own
EXAMPLES = sorted({*(ROOT / "examples").glob("*.py")} - {ROOT / "examples" / "ranks.py"})  # torchrun: test_ranks
MODULES = sorted(
    info.name
    for info in pkgutil.walk_packages(memfit.__path__, "memfit.")
    if not info.name.startswith("memfit.workloads.") or info.name.endswith("target")
)
_BRIEFLY = """
from memfit.planning import Settings
_checked = Settings.__post_init__
def _searching_briefly(self):
    _checked(self)
    object.__setattr__(self, "time_limit_seconds", min(1.0, self.time_limit_seconds))
Settings.__post_init__ = _searching_briefly
"""
"""Comes before a block: its searches end after a second."""
_MOST_SECONDS = 600  # of one example, on a machine busy with others; it ends an example that hangs
_FENCE = re.compile(r"^```(?P<language>\w+)[^\n]*\n(?P<code>.*?)^```", re.MULTILINE | re.DOTALL)


def _blocks(language: str) -> list[tuple[str, str]]:
    """Return (where, code) of every fenced block in this language."""
    found: list[tuple[str, str]] = []
    for document in (each for each in DOCUMENTS if each != RUN_ELSEWHERE):
        text = document.read_text(encoding="utf-8")
        for match in _FENCE.finditer(text):
            if match["language"] == language:
                line = text[: match.start()].count("\n") + 1
                found.append((f"{document.relative_to(ROOT)}:{line}", match["code"]))
    return found


def _command_lines() -> list[tuple[str, str]]:
    """Return (where, line) of every `memfit ...` line in shell blocks and in the commands' own help."""
    lines = [(where, line) for where, code in _blocks("sh") for line in code.splitlines()]
    from memfit.cli import COMMANDS

    for _, epilog in COMMANDS.values():
        lines += [("--help", line) for line in epilog.splitlines()]
    return [(where, line) for where, line in lines if line.startswith("memfit ")]


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    started = Forks(_MOST_SECONDS)
    yield started
    started.close()


@pytest.mark.parametrize(("where", "code"), _blocks("python"), ids=lambda value: value if ":" in value[:40] else "")
def test_python_block_runs(where: str, code: str, forks: Forks, tmp_path: Path) -> None:
    """In a process of its own, as a reader would, with shorter searches: what other tests hold would count towards its
    budgets.
    """
    assert code.strip(), where
    status, output = forks.run(_BRIEFLY + code, tmp_path)
    assert status == 0, output


@pytest.mark.parametrize(("where", "diff"), _blocks("diff"), ids=lambda value: value if ":" in value[:40] else "")
def test_both_sides_of_a_diff_are_python(where: str, diff: str) -> None:
    for kept, left in (("+", "-"), ("-", "+")):
        lines = [line[1:] for line in diff.splitlines() if not line.startswith(left)]
        compile("\n".join(lines), f"{where} {kept}", "exec")
    assert {line[:1] for line in diff.splitlines()} <= {"+", "-", " "}


def test_a_block_that_fails_is_told(forks: Forks, tmp_path: Path) -> None:
    status, output = forks.run("import memfit\nassert memfit.fit is None", tmp_path)
    assert status == 1 and "AssertionError" in output


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_example_runs(example: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(example)], cwd=tmp_path, capture_output=True, text=True, timeout=_MOST_SECONDS, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples_run(name: str) -> None:
    result = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS)
    assert result.failed == 0


@pytest.mark.parametrize(("where", "line"), _command_lines())
def test_command_line_exists(where: str, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    from memfit.cli import main

    words = shlex.split(line, comments=True)
    assert main([words[1], "--help"]) == 0 or words[1].startswith("-")
    shown = capsys.readouterr().out
    for word in words[2:]:
        if word.startswith("-"):
            assert re.search(rf"(?<![\w-]){re.escape(word)}(?![\w-])", shown), f"{where}: {word} is not an option"


@pytest.mark.parametrize(
    ("where", "target"),
    [
        (document, target)
        for document in DOCUMENTS
        for target in re.findall(r"\]\((?!https?:|#|mailto:)([^)#]+)", document.read_text(encoding="utf-8"))
    ],
    ids=str,
)
def test_link_leads_somewhere(where: Path, target: str) -> None:
    assert (where.parent / target).exists(), f"{where}: link to {target}"


def test_the_navigation_names_every_page() -> None:
    named = re.findall(r"^ +- [^:]+: (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(named) == sorted(page.name for page in (ROOT / "docs").glob("*.md"))


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_named_files_exist(document: Path) -> None:
    """Every file of this repository that a document names in code type."""
    named = re.findall(r"`((?:memfit|tests|benchmarks|docs|examples)/[\w./-]+)`", document.read_text(encoding="utf-8"))
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_the_api_reference_has_every_public_name() -> None:
    """And each of its entries exists: mkdocs reads the sources, and does not import them."""
    entries = re.findall(r"^::: (\S+)$", (ROOT / "docs" / "api.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert {f"memfit.{name}" for name in memfit.__all__} <= set(entries)
    for entry in entries:
        pkgutil.resolve_name(entry)


def test_the_api_reference_shows_true_defaults() -> None:
    """mkdocs shows a default as the source has it: a name in its place would tell nothing."""
    for entry in re.findall(r"^::: (\S+)$", (ROOT / "docs" / "api.md").read_text(encoding="utf-8"), re.MULTILINE):
        found = pkgutil.resolve_name(entry)
        functions = [found, *vars(found).values()] if isinstance(found, type) else [found]
        for function in (each for each in functions if inspect.isfunction(each)):
            is_shown = not function.__name__.startswith("_") or function.__name__ == "__init__"
            if not is_shown or not Path(function.__code__.co_filename).is_file():  # or made by a dataclass
                continue
            tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
            made = next(node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))
            defaults = [*made.args.defaults, *filter(None, made.args.kw_defaults)]
            named = [ast.unparse(each) for each in defaults if isinstance(each, ast.Name | ast.Attribute)]
            assert named == [], f"{entry}.{function.__name__}"


def _changes_told() -> list[tuple[set[str], set[str], set[str]]]:
    """Return for each row of the table of changes the files of memfit, the names in code type, and the tests."""
    page = (ROOT / "docs" / "how-it-works.md").read_text(encoding="utf-8")
    table = page.partition("## What memfit changes in torch\n")[2].partition("\n## ")[0]
    told: list[tuple[set[str], set[str], set[str]]] = []
    for row in re.findall(r"^\| `.*$", table, re.MULTILINE):
        files, names, *_, tests = [set(re.findall(r"`([^`]+)`", cell)) for cell in row.split("|")[1:-1]]
        told.append((files, {name.rpartition(".")[2] for name in names}, tests))
    return told


def test_each_change_of_a_setting_or_an_attribute_of_others_is_told_with_its_test() -> None:
    """All but what the program `memfit` changes when its own process ends."""
    told = {(file, name) for files, names, _ in _changes_told() for file in files for name in names}
    sources = [file for suffix in ("py", "cpp") for file in (ROOT / "memfit").rglob(f"*.{suffix}")]
    found = {(str(file.relative_to(ROOT)), name.rpartition(".")[2]) for file in sources for name in changed_in(file)}
    assert {each for each in found - told if each[0] != "memfit/__main__.py"} == set()
    tests = "".join(file.read_text(encoding="utf-8") for file in (ROOT / "tests").rglob("test_*.py"))
    for files, names, shown_by in _changes_told():
        assert files and names and shown_by
        code = "".join((ROOT / file).read_text(encoding="utf-8") for file in files)
        assert [name for name in names if not re.search(rf"\b{name}\b", code)] == [], files
        assert [name for name in shown_by if f"def {name}(" not in tests] == []


def test_changes_are_found(tmp_path: Path) -> None:
    file = tmp_path / "code.py"
    file.write_text(_CHANGES)
    assert changed_in(file) == {f"change_{number}" for number in range(8)} | {"set_it", "register_it", "freeze"}


_CHANGES = """
import gc, sys, torch
from torch.somewhere import register_it
_C = torch._C
_MORE = {"change_0": 1}
replaced(Owner, "change_1", None)
with torch._dynamo.config.patch({"change_2": 1, **_MORE}), torch._inductor.config.patch(change_3=1):
    gc.freeze()
torch.backends.change_4 = 1
def change(cls):
    cls.change_5 = own.left_out = 1
    name = "change_6"
    setattr(torch.nn.Module, name, 1)
    del torch.nn.Module.change_7
    _C.set_it(1)
    register_it(own)
    with torch.enable_grad():
        own.set_mine(1)
"""


def test_the_documents_are_found() -> None:
    assert {"README.md", "CONTRIBUTING.md", "how-it-works.md", "commands.md"} <= {d.name for d in DOCUMENTS}
    assert len(_blocks("python")) >= 5
    assert len(EXAMPLES) >= 3
    assert len(_command_lines()) >= 15
