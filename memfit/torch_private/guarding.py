"""What a step depends on, held against later steps by Dynamo's guards."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from memfit.system.addresses import returns_same
from memfit.torch_private.autograd import changing_hooks
from memfit.torch_private.modules import leaf_hooks
from memfit.torch_private.tensors import PLAIN_TYPES

dict_version: Callable[[dict[Any, Any]], int] = torch._C._dynamo.guards.dict_version
"""Returns a number that is another one after each change of a dictionary; but see ATTRIBUTES_HAVE_VERSIONS."""


ATTRIBUTES_HAVE_VERSIONS = sys.version_info < (3, 13)
"""Whether an attribute that is set changes the version of its object's `__dict__`: no longer from Python 3.13 on."""


class GlobalState:
    """torch's settings that decide which ops a step runs, as they are when this object is made.

    Gradient mode, autocast, the default dtype, deterministic algorithms, reduced precision and the number of threads,
    by Dynamo's own guard; modes and devices of `with` blocks, and the switches of attention and of mkldnn.
    """

    def __init__(self) -> None:
        self._guard = torch._C._dynamo.guards.GlobalStateGuard()
        self._switches = _present_switches()

    def difference(self) -> str | None:
        """Return the names of the settings that are others now, or None."""
        if not self._guard.check():
            return self._guard.reason().strip()
        pairs = zip(_SWITCHES, _present_switches(), self._switches, strict=True)
        return ", ".join(name for name, now, before in pairs if now != before) or None


_C = torch._C
_SWITCHES: dict[str, Callable[[], Any]] = {
    "torch function modes": _C._len_torch_function_stack,
    "flash attention": _C._get_flash_sdp_enabled,
    "efficient attention": _C._get_mem_efficient_sdp_enabled,
    "math attention": _C._get_math_sdp_enabled,
    "mkldnn": _C._get_mkldnn_enabled,
    "cudnn": _C._get_cudnn_enabled,
    "hooks of saved tensors": changing_hooks,
}


def _present_switches() -> list[Any]:
    return [read() for read in _SWITCHES.values()]


class DictVersions:
    """Holds dictionaries against their versions from before, by Dynamo's guards, which take 20 ns a dictionary."""

    def __init__(self, tables: Sequence[dict[Any, Any]]) -> None:
        from torch._dynamo.guards import GuardManagerType

        self._tables = tuple(tables)
        self._root = torch._C._dynamo.guards.RootGuardManager()
        for number, table in enumerate(self._tables):
            manager = self._root.tuple_getitem_manager(number, str(number), table, GuardManagerType.GUARD_MANAGER)
            manager.add_dict_version_guard(table, ["dict"], *_STACK)

    def match(self) -> bool:
        """Return whether no dictionary was changed."""
        return self._root.check(self._tables)


class TensorMetadata:
    """Holds tensors against their metadata from before, by Dynamo's guards, which take 0.1 us a tensor.

    Args:
        tensors: dense ones.
        watched: how many of them, from the first on, are leaves that are held against their `.grad` and hooks too.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], watched: int) -> None:
        from torch._dynamo.guards import GuardManagerType  # takes a second to import, once a process

        kind = GuardManagerType.GUARD_MANAGER
        self._root = torch._C._dynamo.guards.RootGuardManager()
        for number, tensor in enumerate(tensors):
            manager = self._root.tuple_getitem_manager(number, str(number), tensor, kind)
            _match_metadata(manager, tensor)
            if number < watched:
                gradient = manager.grad_manager(f"{number}.grad", tensor.grad, kind)
                _match(gradient, tensor.grad)
                for name, hooks in zip(_LEAF_HOOKS, leaf_hooks(tensor), strict=True):
                    held = manager.generic_getattr_manager(name, f"{number}.{name}", hooks, kind)
                    held.add_id_match_guard(id(hooks), [name], *_STACK)

    def matches(self, tensors: tuple[torch.Tensor, ...]) -> bool:
        """Return whether type, sizes, strides, dtype, device and requires_grad of each tensor are as before.

        Of the leaves among them also the metadata of `.grad`, and the dictionaries of hooks.
        """
        return self._root.check(tensors)


class TensorAddresses:
    """Holds the addresses of real dense tensors' first elements against those from before."""

    def __init__(self, tensors: tuple[torch.Tensor, ...]) -> None:
        self._tensors = tensors
        exact = [each for each in tensors if type(each) in PLAIN_TYPES]  # torch asks classes of others by Python code
        self._objects = np.array(list(map(id, exact)), dtype=np.int64)
        self._addresses = np.array(list(map(torch.Tensor.data_ptr, exact)), dtype=np.int64)
        self._others = [(each, each.data_ptr()) for each in tensors if type(each) not in PLAIN_TYPES]

    def match(self) -> bool:
        """Return whether all tensors are where they were."""
        if any(each.data_ptr() != address for each, address in self._others):
            return False
        # Inductor hands this function to the code that it compiles, for the same use
        function = torch._C._dynamo.guards._torchinductor_pyobject_tensor_data_ptr
        return returns_same(function, self._objects, self._addresses)


def _match(manager: Any, tensor: torch.Tensor | None) -> None:
    if tensor is None:
        manager.add_none_match_guard(["None"], *_STACK)
    else:
        _match_metadata(manager, tensor)


def _match_metadata(manager: Any, tensor: torch.Tensor) -> None:
    sizes, strides = list(tensor.shape), list(tensor.stride())
    keys = torch._C._dispatch_keys(tensor)
    manager.add_tensor_match_guard(tensor, sizes, strides, "tensor", ["tensor"], *_STACK, type(tensor), keys)


# Dynamo's guards take the user's stack as an argument where torch is new enough.
_STACK = (None,) if "arg2" in (torch._C._dynamo.guards.GuardManager.add_dict_version_guard.__doc__ or "") else ()


_LEAF_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
