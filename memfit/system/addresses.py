"""A C function of one pointer, called for many objects in compiled code."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from memfit.system.compiled import entry_point


@intrinsic
def _call(_typing_context: Any, _function: Any, _argument: Any) -> Any:
    """Call the C function at an address with one word, and return the word that it returns."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        word = ir.IntType(64)
        function = builder.inttoptr(arguments[0], ir.FunctionType(word, [word]).as_pointer())
        return builder.call(function, [arguments[1]])

    return types.int64(types.int64, types.int64), generate


@entry_point
def returns_same(function: Any, objects: Any, expected: Any) -> bool:
    """Return whether a C function returns the expected words for all objects.

    Args:
        function: the address of a function from a pointer to a word, which neither raises nor keeps the pointer.
        objects: the objects' addresses, as int64.
        expected: what it has to return, as int64.
    """
    for number in range(len(objects)):  # noqa: SIM110 (compiled)
        if _call(function, objects[number]) != expected[number]:  # pyright: ignore
            return False
    return True
