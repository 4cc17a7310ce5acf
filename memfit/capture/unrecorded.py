"""Tensors that a step sets in Python: a planned step computes none of them, so that reading one later is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

from torch.nn import Parameter

from memfit.errors import UnsupportedStepError
from memfit.torch_private.tensors import is_fake, tree_flatten

_BINARY = ("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor")
_OTHERS = (
    *("eq", "ne", "lt", "le", "gt", "ge", "neg", "pos", "abs", "invert", "bool", "int", "float", "complex", "index"),
    *("len", "iter", "contains", "getitem", "setitem", "delitem", "call", "format", "array", "enter"),
)


class Unrecorded:
    """Stands for a tensor, or what holds some, that a step has set: any use but `is` and printing raises.

    Args:
        path: names the place in messages.
    """

    __slots__ = ("_path",)
    __hash__ = object.__hash__

    def __init__(self, path: str) -> None:
        self._path = path

    def __repr__(self) -> str:
        return f"<{self._path}, which planned steps do not compute>"

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("_"):  # asked for by copy and pickle
            raise AttributeError(name)
        self.refuse()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        next(leaf for leaf in tree_flatten((args, kwargs or {}))[0] if isinstance(leaf, cls)).refuse()

    def refuse(self, *_: Any) -> NoReturn:
        """Raise the error that names the place, and says what to do."""
        raise UnsupportedStepError(
            f"the step sets {self._path!r}, and a planned step runs no Python, so that its value is not known: "
            "read a buffer that the step writes in place, or call the model once more under torch.no_grad()"
        )


for _name in (*_BINARY, *(f"r{name}" for name in _BINARY), *_OTHERS):
    setattr(Unrecorded, f"__{_name}__", Unrecorded.refuse)


@dataclass(frozen=True, slots=True)
class Left:
    """A place where a captured step has left something.

    Attributes:
        value: that each step leaves there; in the place of tensors, what refuses to be used.
        holds: whether a value is there.
        write: puts one there.
    """

    value: Any
    holds: Callable[[Any], bool]
    write: Callable[[Any], Any]

    def take(self) -> None:
        """Leave it there, as a planned step has run in the place of the user's code."""
        if not self.holds(self.value):
            self.write(self.value)


def holds_fakes(value: Any) -> bool:
    """Return whether a value is a fake tensor, or a container with one in it; a parameter's fake is none that counts.

    Parameters are swapped for fakes meanwhile, and recurrent layers collect them anew then.
    """
    return any(is_fake(leaf) and not isinstance(leaf, Parameter) for leaf in tree_flatten(value)[0])
