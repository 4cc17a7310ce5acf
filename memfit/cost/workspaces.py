"""Workspaces of calls in the very layouts in which compiled code makes them.

Libraries take other workspaces for tensors of other strides: a convolution's backward pass, say, for channels that are
last.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch

from memfit.cost.collectives import is_collective
from memfit.cost.environment import free_bytes
from memfit.cost.result_check import result_bytes
from memfit.cost.single_op import uncollected, undisturbed
from memfit.system.recorder import record
from memfit.torch_private.tensors import real_tensors, storage_key, tensors_in, tree_map

_log = logging.getLogger("memfit")
OURS = "memfit"
"""The namespace of operators that copy to the host and back, and take nothing beside their results."""


class Workspaces:
    """Measures what calls take beside their results; each call once, on tensors of zeros.

    Args:
        device: where they run.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._known: dict[Any, int] = {}

    def bytes_of(self, operator: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> int:
        """Return the workspace of a call; 0 for one that this device cannot run now.

        Args:
            operator: an overload.
            args: its positional arguments, whose tensors are fakes.
            kwargs: its named ones.
        """
        fakes = tensors_in((args, kwargs))
        if not fakes or is_collective(operator) or operator.is_view or operator.namespace == OURS:
            return 0
        numbers = repr(tree_map(lambda each: "" if isinstance(each, torch.Tensor) else each, (args, kwargs)))
        layouts = [(fake.dtype, fake.device.type, tuple(fake.shape), fake.stride()) for fake in fakes]
        key = operator, tuple(layouts), numbers
        if key not in self._known:
            with real_tensors(), undisturbed(self._device):
                self._known[key] = self._measured(operator, args, kwargs)
        return self._known[key]

    def _measured(self, operator: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> int:
        sizes = {storage_key(fake): fake.untyped_storage().nbytes() for fake in tensors_in((args, kwargs))}
        free = free_bytes(self._device)
        if free is not None and sum(sizes.values()) > free:
            _log.warning(
                "memfit: the workspace of %s is left out of the plan: %s has no room to run it once and measure it",
                operator,
                self._device,
            )
            return 0
        storages: dict[int, torch.Tensor] = {}

        def real(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            key = storage_key(leaf)
            if key not in storages:
                storages[key] = torch.zeros(sizes[key], dtype=torch.uint8, device=leaf.device)
            whole = torch.empty(0, dtype=leaf.dtype, device=leaf.device)
            return whole.set_(storages[key].untyped_storage(), leaf.storage_offset(), leaf.shape, leaf.stride())

        try:
            given, named = tree_map(real, (tuple(args), kwargs))
            if self._device.type == "cuda":
                operator(*given, **named)  # libraries take workspaces of their own at their first call, and keep them
            with uncollected(), record(self._device) as usage:
                returned = operator(*given, **named)
            return max(0, usage.peak_bytes - result_bytes(returned, given, named, self._device))
        except (RuntimeError, ValueError, IndexError) as error:
            why = str(error).strip().partition("\n")[0]
            _log.warning("memfit: the workspace of %s is not known, it refuses inputs of zeros: %s", operator, why)
            return 0
