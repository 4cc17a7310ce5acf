"""A C function of one pointer, called for many objects in compiled code."""

from __future__ import annotations

from typing import Any

from memfit.system.compiled import entry_point

_call: Any = None  # defined before numba compiles; the library that comes with memfit needs none


def _define_call() -> None:
    """Define the call of a C function at an address with one word, which returns a word."""
    from llvmlite import ir
    from numba.core import types
    from numba.extending import intrinsic

    def call(_typing_context: Any, _function: Any, _argument: Any) -> Any:
        def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            word = ir.IntType(64)
            function = builder.inttoptr(arguments[0], ir.FunctionType(word, [word]).as_pointer())
            return builder.call(function, [arguments[1]])

        return types.int64(types.int64, types.int64), generate

    global _call
    _call = intrinsic(call)


def _returns_same(function: Any, objects: Any, expected: Any) -> bool:
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


returns_same = entry_point(_returns_same, _define_call)
