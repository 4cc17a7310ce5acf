"""Lines of code by room, of two commits: docstrings, comments and blank lines are not counted.

python benchmarks/lines_of_code.py c8743a0 HEAD       # prints both tables and stores them
"""

from __future__ import annotations

import ast
import io
import subprocess
import sys
import tarfile
import tokenize
from collections import Counter
from pathlib import PurePosixPath

from _record import store

_NOT_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}


def code_lines(source: str) -> int:
    """Return how many lines of a Python file hold code."""
    lines = {
        number
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type not in _NOT_CODE
        for number in range(token.start[0], token.end[0] + 1)
    }
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.body:
            first = node.body[0]
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and isinstance(first.value.value, str)
            ):
                lines -= set(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    return len(lines)


def room_of(path: PurePosixPath) -> str:
    """Return the folder of the package that a file is in; files beside the folders are a room together."""
    inner = path.parts[1:]
    return "beside the rooms" if len(inner) == 1 else inner[0]


def rooms_at(revision: str) -> dict[str, dict[str, int]]:
    """Return files and lines of code of each room of `memfit/` at a commit."""
    archive = subprocess.run(["git", "archive", revision, "memfit"], capture_output=True, check=True).stdout
    files: Counter[str] = Counter()
    lines: Counter[str] = Counter()
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        for member in tar:
            path = PurePosixPath(member.name)
            data = tar.extractfile(member) if path.suffix == ".py" else None
            if data is not None:
                files[room_of(path)] += 1
                lines[room_of(path)] += code_lines(data.read().decode())
    return {room: {"files": files[room], "lines": lines[room]} for room in sorted(lines)}


def main() -> None:
    """Print and store the tables of two commits."""
    before, after = sys.argv[1:3] if len(sys.argv) > 2 else ("c8743a0", "HEAD")
    tables = {revision: rooms_at(revision) for revision in (before, after)}
    for revision, rooms in tables.items():
        print(f"\n{revision}")
        for room, counts in rooms.items():
            print(f"  {room:18} {counts['files']:4} files {counts['lines']:6,} lines")
        files, lines = (sum(counts[key] for counts in rooms.values()) for key in ("files", "lines"))
        print(f"  {'all':18} {files:4} files {lines:6,} lines")
    store("lines_of_code", {"before": tables[before], "after": tables[after]})


if __name__ == "__main__":
    main()
