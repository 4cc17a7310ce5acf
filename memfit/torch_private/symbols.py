"""Sizes that stand for all sizes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from importlib import import_module
from typing import Any

import torch

from memfit.torch_private.patching import replaced


def make_size_environment() -> Any:
    """Return torch's bookkeeping of symbolic sizes: which there are, and what was asked of them."""
    import_module("torch._refs")  # which registers what kernels do with symbolic sizes
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    return ShapeEnv()


def make_size_symbol(environment: Any, number: int, size: int) -> torch.SymInt:
    """Return a new symbolic size.

    Args:
        environment: it belongs to.
        number: tells it from the others.
        size: that it has at hand.
    """
    from torch._dynamo.source import ConstantSource
    from torch.fx.experimental.symbolic_shapes import DimDynamic

    source = ConstantSource(f"size_{number}")
    symbol = environment.create_symbol(size, source, dynamic_dim=DimDynamic.DYNAMIC)
    return environment.create_symintnode(symbol, hint=size, source=source)


@contextmanager
def guesses_noted(environment: Any) -> Iterator[None]:
    """Note what C++ code would leave open in the block: whether something of symbolic sizes is known to be true.

    Where torch takes a shorter way only if it is known to be possible for all sizes (indexing with whole slices), eager
    takes it wherever it is possible. Here it is decided by the sizes at hand, and noted as a condition.

    Args:
        environment: of the sizes; others are not touched.
    """
    from torch.fx.experimental.sym_node import SymNode

    known = SymNode.statically_known_true

    def decided(self: Any, file: str, line: int) -> bool:
        return self.guard_bool(file, line) if self.shape_env is environment else known(self, file, line)

    with replaced(SymNode, "statically_known_true", decided):
        yield


def symbolic_kernels() -> AbstractContextManager[None]:
    """Return a block in which fake kernels that are written in Python take the place of those that need numbers."""
    from torch._dispatch.python import enable_python_dispatcher

    return enable_python_dispatcher()
