"""The memory of generated code before it has run: its calls to the allocator are made with fakes, its kernels are not.

What a compiler fused never exists, and what it reordered lives longer than planned. The code that it generated says
which tensors are allocated, and where each is freed, so that a rehearsal on fakes has the peak of the real run. What
the libraries that it calls allocate for themselves is measured, in the layouts of these calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from memfit.capture.live_bytes import LiveBytes
from memfit.cost.workspaces import Workspaces
from memfit.memory.place import Place
from memfit.system.recorder import taken_bytes
from memfit.torch_private.tensors import FakeTensorMode, storage_key, tensors_in

Generated = Callable[[list[Any]], Sequence[Any]]
"""Generated code whose kernels do nothing; it empties its list of arguments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Halves:
    """What the halves of a compiled graph take.

    Attributes:
        given_bytes: of the arguments of the forward half.
        forward_bytes: at the peak of the forward half, without its arguments.
        between_bytes: of what the forward half returned.
        backward_bytes: at the peak of the backward half, without the arguments of the forward half.
        tangent_bytes: of the gradients that the backward half is given; autograd holds them until it ends.
    """

    given_bytes: int
    forward_bytes: int
    between_bytes: int
    backward_bytes: int
    tangent_bytes: int

    def peak_bytes(self, between_bytes: int, held_bytes: int) -> int:
        """Return the peak of the step.

        Args:
            between_bytes: the most that is outside of the graph between its halves.
            held_bytes: by how much more was live when the backward half began than when the forward half had ended,
                the tangents included; less than 0 where results were freed meanwhile.
        """
        after = max(self.between_bytes + between_bytes, self.backward_bytes + held_bytes - self.tangent_bytes)
        return self.given_bytes + max(self.forward_bytes, after)


def rehearse(
    forward: Generated,
    backward: Generated,
    *,
    primals: Sequence[Any],
    tangents: Sequence[Any],
    outputs: int,
    mode: FakeTensorMode,
    device: torch.device,
    workspaces: Workspaces,
) -> Halves:
    """Return what two halves take.

    Args:
        forward, backward: generated code.
        primals: fakes of the forward half's arguments.
        tangents: fakes of the gradients that the backward half is given after what the forward half has saved.
        outputs: how many of the forward half's results are not saved only; these are the first.
        mode: of the fakes.
        device: of the step.
        workspaces: what operators take for themselves.
    """
    tally = _Tally(device, workspaces)
    with torch.no_grad(), mode, tally:
        results = list(forward(list(primals)))
        forward_bytes, between_bytes = tally.peak_bytes, tally.live_bytes
        tally.peak_bytes = 0
        seeds = [Place.of(each).empty(each.device) if isinstance(each, torch.Tensor) else each for each in tangents]
        kept, given = [*results[:outputs], *seeds], [*results[outputs:], *seeds]
        del results
        gradients = backward(given)
        backward_bytes = tally.peak_bytes
        seed_bytes = {storage_key(each): each.untyped_storage().nbytes() for each in tensors_in(seeds)}
        del gradients, kept, seeds
    storages = {storage_key(each): each.untyped_storage().nbytes() for each in tensors_in(primals)}
    return Halves(
        given_bytes=sum(taken_bytes(size, device) for size in storages.values()),
        forward_bytes=forward_bytes,
        between_bytes=between_bytes,
        backward_bytes=backward_bytes,
        tangent_bytes=sum(taken_bytes(size, device) for size in seed_bytes.values()),
    )


class _Tally(LiveBytes):
    """Adds up the bytes of the storages that calls make, for as long as these live, and of the calls' workspaces."""

    def __init__(self, device: torch.device, workspaces: Workspaces) -> None:
        super().__init__(
            lambda made: taken_bytes(made.untyped_storage().nbytes(), device) if made.device.type == device.type else 0
        )
        self._workspaces = workspaces

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        returned = super().__torch_dispatch__(func, types, args, kwargs)
        workspace_bytes = self._workspaces.bytes_of(func, args, kwargs or {})
        self.peak_bytes = max(self.peak_bytes, self.live_bytes + workspace_bytes)
        return returned
