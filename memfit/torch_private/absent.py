"""Ranks that are not there, and tensors without memory: what a step of a cluster is captured with on any machine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from memfit.torch_private.tensors import (
    FakeTensorMode,
    contiguous_strides,
    is_fake,
    storage_key,
    tree_flatten,
)

_MOST_REAL_BYTES = 1 << 20  # of a real tensor: code that prepares a model reads values of small ones
_ALL_REAL_BYTES = 1 << 28  # of all real tensors together


@contextmanager
def absent_ranks(count: int) -> Iterator[torch.distributed.ProcessGroup]:
    """Let this process be rank 0 of a group of ranks inside the block, none of which is there.

    torch's `fake` backend stands for them: collectives return at once, and leave their tensors as they are.

    Args:
        count: of the ranks.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=count)
    try:
        world = torch.distributed.group.WORLD
        assert world is not None
        yield world
    finally:
        torch.distributed.destroy_process_group()


def is_absent(group: Any) -> bool:
    """Return whether the ranks of a process group are those of `absent_ranks`."""
    return group is not None and torch.distributed.get_backend(group) == "fake"


class WithoutMemory(FakeTensorMode):
    """Gives tensors that code makes inside a `with` block no memory, unless they are small.

    A small tensor is real if what it is made from is: code that prepares a model reads the values of some. Devices that
    are not here, `meta` among them, are the CPU.
    """

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self._real_bytes = 0

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Return what a call returns: real tensors, or fake ones of this mode."""
        try:
            return self._returned(func, types, args, kwargs)
        finally:  # weak references to parameters, with which `module.bfloat16()` would fail
            self.fake_tensor_converter.meta_converter.tensor_memo.clear()

    def _returned(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        kwargs = dict(kwargs or {})
        if isinstance(kwargs.get("device"), torch.device):
            kwargs["device"] = _here(kwargs["device"])
        args = tuple(_here(each) if isinstance(each, torch.device) else each for each in args)
        given = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, torch.Tensor)]
        if any(map(is_fake, given)) or _is_elsewhere(kwargs.get("device"), given):
            return super().dispatch(func, types, args, kwargs)
        try:
            faked = super().dispatch(func, types, args, kwargs)
        except Exception:  # noqa: BLE001 (values are needed, or fakes cannot do it; what is wrong is so for real ones, too)
            return func(*args, **kwargs)
        made = [leaf for leaf in tree_flatten(faked)[0] if is_fake(leaf)]
        sizes = [tensor.untyped_storage().nbytes() for tensor in made]
        known = {storage_key(tensor) for tensor in given}
        if func.is_view or not made or all(storage_key(tensor) in known for tensor in made):
            return func(*args, **kwargs)
        if max(sizes) > _MOST_REAL_BYTES or self._real_bytes + sum(sizes) > _ALL_REAL_BYTES:
            return faked
        self._real_bytes += sum(sizes)
        return func(*args, **kwargs)


class DevicesHere(TorchFunctionMode):
    """Lets code inside a `with` block move to devices that are not here: what it moves stays on the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Return what a call returns, with the CPU in the place of devices that are not here."""
        if func is torch.Tensor.cuda and not torch.cuda.is_available():
            return args[0]
        if func is torch.device:
            return _here(func(*args, **(kwargs or {})))
        args = tuple(_named_here(each) for each in args)
        return func(*args, **{name: _named_here(each) for name, each in (kwargs or {}).items()})


def has_no_memory(tensor: object) -> bool:
    """Return whether a tensor was made inside `WithoutMemory`, and has a form, but no memory."""
    return is_fake(tensor) and isinstance(getattr(tensor, "fake_mode", None), WithoutMemory)


def real_form(tensor: torch.Tensor) -> torch.Tensor:
    """Return a real tensor of the form of one without memory, on memory of its own; another tensor itself."""
    if not has_no_memory(tensor):
        return tensor
    form = {"dtype": tensor.dtype, "device": _here(tensor.device)}
    if tensor.stride() == contiguous_strides(tensor.shape):
        return torch.zeros(tensor.shape, **form)
    return torch.empty_strided(tensor.shape, tensor.stride(), **form).zero_()


def _here(device: torch.device) -> torch.device:
    is_there = device.type != "meta" and (device.type != "cuda" or torch.cuda.is_available())
    return device if is_there else torch.device("cpu")


def _named_here(value: Any) -> Any:
    """Return a device, or a text that names one, as a device that is here; anything else as it is."""
    if isinstance(value, torch.device) or (isinstance(value, str) and value.partition(":")[0] in ("cuda", "meta")):
        return _here(torch.device(value))
    return value


def _is_elsewhere(device: Any, given: list[torch.Tensor]) -> bool:
    devices = [each for each in (device, *(tensor.device for tensor in given)) if each is not None]
    return any(torch.device(each).type != "cpu" for each in devices)
