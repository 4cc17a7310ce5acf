"""CUDA graphs of a GPU that is not here: calls are recorded with the addresses of their tensors, and made again there.

As on a GPU, what writes to a tensor is not carried out while it is recorded, nothing keeps the recorded tensors alive,
and a replay reads and writes whatever is at their addresses by then.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import pytest
import torch

from memfit.memory.place import reinterpret, span_bytes
from memfit.step import cuda_graph
from memfit.torch_private.autograd import TorchDispatchMode
from memfit.torch_private.tensors import tree_flatten, tree_unflatten

_NOT_RECORDED = ("aten::empty", "aten::set_", "aten::lift", "profiler::")


class At(NamedTuple):
    """A tensor by its address."""

    address: int
    span_bytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def tensor(self) -> torch.Tensor:
        if self.span_bytes == 0:
            return torch.empty(self.shape, dtype=self.dtype)
        memory = (ctypes.c_char * self.span_bytes).from_address(self.address)
        return reinterpret(torch.frombuffer(memory, dtype=torch.uint8), self.dtype, self.shape, self.stride, 0)


def at(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    start, end = span_bytes(leaf)
    return At(leaf.data_ptr(), end - start, leaf.dtype, tuple(leaf.shape), leaf.stride())


class Graph:
    """`torch.cuda.CUDAGraph`."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, list[Any], Any, list[Any]]] = []
        self.generators: list[Any] = []
        self.replays = 0
        made.append(self)

    def register_generator_state(self, generator: Any) -> None:
        self.generators.append(generator)

    def replay(self) -> None:
        self.replays += 1
        with torch.no_grad():
            for function, leaves, structure, results in self.calls:
                args, kwargs = tree_unflatten([x.tensor() if isinstance(x, At) else x for x in leaves], structure)
                returned = tree_flatten(function(*args, **kwargs))[0]
                for place, result in zip(results, returned, strict=True):
                    if isinstance(place, At):
                        place.tensor().copy_(result)


made: list[Graph] = []


class _Recording(TorchDispatchMode):
    def __init__(self, graph: Graph) -> None:
        super().__init__()
        self.graph = graph

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        schema = func._schema
        writes = [argument.alias_info is not None and argument.alias_info.is_write for argument in schema.arguments]
        if schema.name.startswith(_NOT_RECORDED):
            return func(*args, **kwargs)
        if not any(writes) and any(returned.alias_info is not None for returned in schema.returns):
            return func(*args, **kwargs)  # a view
        leaves, structure = tree_flatten((args, kwargs))
        described = [at(leaf) for leaf in leaves]
        if not any(writes):
            returned = func(*args, **kwargs)
            self.graph.calls.append((func, described, structure, [at(leaf) for leaf in tree_flatten(returned)[0]]))
            return returned
        assert all(each.alias_info is not None for each in schema.returns), f"{schema.name} also makes tensors"
        given = [*args, *(kwargs.get(argument.name) for argument in schema.arguments[len(args) :])]
        written = [value for value, write in zip(given, writes, strict=True) if write]
        returned = written[0] if len(schema.returns) == 1 else None
        self.graph.calls.append((func, described, structure, [None] * len(tree_flatten(returned)[0])))
        return returned


@contextmanager
def capture(graph: Graph, *, stream: Any, capture_error_mode: str) -> Iterator[None]:
    """`torch.cuda.graph`."""
    assert isinstance(stream, Stream) and capture_error_mode == "thread_local"
    with _Recording(graph):
        yield


class Stream:
    """A stream whose work is done at once."""

    cuda_stream = 0

    def __init__(self, _device: object = None) -> None:
        self.waited_for = 0

    def wait_stream(self, other: Stream) -> None:
        other.waited_for += 1


def install(patch: pytest.MonkeyPatch) -> None:
    """Let steps in an arena of this CPU be captured."""
    made.clear()
    cuda: Any = torch.cuda
    caller = Stream()
    patch.setattr(cuda, "Stream", Stream)
    patch.setattr(cuda, "stream", lambda _stream: nullcontext())
    patch.setattr(cuda, "current_stream", lambda _device=None: caller)
    patch.setattr(cuda, "CUDAGraph", Graph)
    patch.setattr(cuda, "graph", capture)
    patch.setattr(cuda_graph, "DEVICES", {"cpu"})
