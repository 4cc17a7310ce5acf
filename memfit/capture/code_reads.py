"""Names that a Python function reads, from its instructions; and whether its file is the user's or a library's."""

from __future__ import annotations

import dis
import sys
import sysconfig
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import CodeType
from typing import Any

import torch

_LIBRARIES = tuple(
    {
        *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
        str(Path(torch.__file__).parent),
        str(Path(__file__).parent.parent),
    }
)
_INSTALLED = {"site-packages", "dist-packages"}
_HOLDING = {"argparse", "collections", "configparser", "queue", "types", "weakref"}  # of Python's own: users' values
_OPAQUE = (sys.stdlib_module_names | {"torch", "numpy", "memfit"}) - _HOLDING
_GLOBAL_READS = ("LOAD_GLOBAL", "LOAD_NAME")
_ATTRIBUTE_READS = ("LOAD_ATTR", "LOAD_METHOD", "IMPORT_FROM")
_VALUE_READS = ("LOAD_ATTR", "LOAD_METHOD", "LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF", "LOAD_CLASSDEREF")
_NO_CODE = ("CACHE", "COPY", "EXTENDED_ARG", "NOP", "SWAP")


@cache
def is_own(filename: str) -> bool:
    """Return whether a file is the user's: neither of the standard library nor installed in any site-packages.

    There are several where an environment is built on another one, and an installer may have filled any folder on the
    path (`pip install --target`, a `.pth` file). Code without a file, as in a notebook, is the user's too.
    """
    path = Path(filename)
    if filename.startswith(_LIBRARIES) or not _INSTALLED.isdisjoint(path.parts):
        return False
    return not any(_is_filled_by_an_installer(folder) for folder in sys.path if folder and path.is_relative_to(folder))


@cache
def _is_filled_by_an_installer(folder: str) -> bool:
    """Return whether a folder holds what an installer notes of each package; one that cannot be read does not."""
    try:
        return any(entry.name.endswith(".dist-info") for entry in Path(folder).iterdir())
    except OSError:
        return False


def is_librarys(module_name: Any) -> bool:
    """Return whether a module is Python's, torch's, NumPy's or memfit's, and holds no values of users."""
    if not isinstance(module_name, str):  # a class may have a property of that name: then there is no telling
        return False
    return module_name.partition(".")[0] in _OPAQUE and not module_name.startswith("torch.distributions")


def is_opaque(cls: type) -> bool:
    """Return whether objects of a class are a library's, whose own code reads what no step depends on."""
    return is_librarys(cls.__module__) and not issubclass(cls, torch.nn.Module)


def is_users(cls: type) -> bool:
    """Return whether a class is the user's, or one of Python's that holds values of users; of no installed package."""
    if is_librarys(cls.__module__) or not isinstance(cls.__module__, str):
        return False
    file = file_of(sys.modules.get(cls.__module__))
    return file is None or is_own(file) or cls.__module__.partition(".")[0] in sys.stdlib_module_names


def file_of(module: Any) -> str | None:
    """Return the file of a module, if it has one; its own `__getattr__` is not asked.

    Args:
        module: any object that is in the place of one, or None.
    """
    file = getattr(module, "__dict__", {}).get("__file__")
    return file if isinstance(file, str) else None


@cache
def global_reads(code: CodeType) -> frozenset[str]:
    """Return the names of the globals that a function's code reads, functions within it included."""
    return _names(code, _GLOBAL_READS)


@cache
def global_writes(code: CodeType) -> frozenset[str]:
    """Return the names of the globals that a function's code sets, functions within it included."""
    return _names(code, ("STORE_GLOBAL",))


@cache
def attribute_reads(code: CodeType) -> frozenset[str]:
    """Return the names of the attributes that a function's code reads of any object, also by `getattr`."""
    names = _names(code, _ATTRIBUTE_READS)
    return names | texts_in(code) if "getattr" in global_reads(code) else names


@cache
def imported_modules(code: CodeType) -> frozenset[str]:
    """Return the names of the modules that a function imports when it runs."""
    return _names(code, ("IMPORT_NAME",))


@cache
def only_counted(code: CodeType, name: str, offset: int | None = None) -> bool:
    """Return whether all reads of `name` in a function's code are those of `name += number`, which counts calls.

    Args:
        code: of the function; functions within it are looked at too, unless `offset` is given.
        name: of a global, a closure variable or an attribute.
        offset: of the only instruction to look at, as `frame.f_lasti` gives it.
    """
    instructions = [i for i in dis.get_instructions(code) if i.opname not in _NO_CODE]
    reads = [
        position
        for position, instruction in enumerate(instructions)
        if instruction.opname in _VALUE_READS and instruction.argval == name and offset in (None, instruction.offset)
    ]
    if not all(_counts(instructions[position : position + 4], name) for position in reads):
        return False
    if offset is not None:
        return bool(reads)  # else something other than an attribute's name in the code read it, such as getattr
    return all(only_counted(inner, name) for inner in _inner(code))


def _counts(instructions: list[dis.Instruction], name: str) -> bool:
    if len(instructions) < 4:
        return False
    _, number, operation, store = instructions
    return (
        number.opname in ("LOAD_CONST", "LOAD_SMALL_INT")
        and operation.opname == "BINARY_OP"
        and operation.argrepr == "+="
        and store.opname.startswith("STORE_")
        and store.argval == name
    )


def _names(code: CodeType, operations: tuple[str, ...]) -> frozenset[str]:
    found = {i.argval for i in dis.get_instructions(code) if i.opname in operations}
    return frozenset(found.union(*(_names(inner, operations) for inner in _inner(code))))


@cache
def texts_in(code: CodeType) -> frozenset[str]:
    """Return the texts among the constants of a function's code, functions within it included."""
    found = {constant for constant in code.co_consts if isinstance(constant, str)}
    return frozenset(found.union(*map(texts_in, _inner(code))))


def _inner(code: CodeType) -> Iterator[CodeType]:
    return (constant for constant in code.co_consts if isinstance(constant, CodeType))
