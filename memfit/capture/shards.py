"""The sharded parameters of one capture: they are gathered by calls in front of the module that uses them first.

A gathered parameter is a storage that an op writes, as an activation is: a plan may drop it and gather it again. What
the optimizer updates is the rank's own part, a resident.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch

from memfit.binding import Origin
from memfit.capture.fully_sharded import FullySharded, ShardedGroup
from memfit.capture.trace import Trace
from memfit.capture.traced import TracedCall
from memfit.graph import Phase, Role
from memfit.torch_private.autograd import only_mode
from memfit.torch_private.ranks import finish_gather, start_gather
from memfit.torch_private.sharding import GroupFacts, ShardedFacts, groups_shown, local_gradient
from memfit.torch_private.tensors import FakeTensorMode, storage_key

COLLECTIVES = "fully sharded"  # the group of their ops


class Shards:
    """Fakes of gathered parameters and of parts, and the calls that make the ones from the others.

    Args:
        sharded: the model's groups.
        trace: of the step.
        mode: of the fakes.
        phase: returns the phase of the step at hand.

    Attributes:
        fakes: of the gathered parameters, by the parameter.
        parts: the fakes of this rank's parts, by the fake of the gathered parameter. Each is as large as on any rank.
        gradients: the fakes of the parts of gradients that were there before the step, likewise.
    """

    def __init__(self, sharded: FullySharded, trace: Trace, mode: FakeTensorMode, phase: Callable[[], Phase]) -> None:
        self._sharded, self._trace, self._mode, self._phase = sharded, trace, mode, phase
        self._gathered: set[int] = set()
        self._storages: dict[int, torch.Tensor] = {}  # of gradients
        self.fakes: dict[torch.Tensor, torch.Tensor] = {}
        self.parts: dict[torch.Tensor, torch.Tensor] = {}
        self.gradients: dict[torch.Tensor, torch.Tensor] = {}
        for group in sharded.groups:
            for each in group.parameters:
                self._make_fakes(each)

    def enter(self) -> None:
        """Enter parts, and gradients that are there, as residents."""
        for group in self._sharded.groups:
            for name, each in zip(group.names, group.parameters, strict=True):
                fake = self.fakes[each.parameter]
                row = self.parts[fake].view(-1)
                self._trace.add_resident(row, role=Role.PARAMETER, origin=Origin.PARAMETER, key=name, name=name)
                if fake in self.gradients:
                    gradient, title = self.gradients[fake], f"{name}.grad"
                    self._trace.add_resident(gradient, role=Role.GRADIENT, origin=Origin.GRADIENT, key=name, name=title)

    def shown(self) -> AbstractContextManager[None]:
        """Let modules find gathered fakes inside the block, where `fully_shard` would show gathered parameters."""
        return groups_shown([group.facts for group in self._sharded.groups], self._show, self._hide)

    def _make_fakes(self, each: ShardedFacts) -> None:
        with self._mode:
            fake = each.gathered(self._sharded.size)
            self.parts[fake] = torch.empty(each.padded, dtype=each.parameter.dtype, device=fake.device)
        gradient = local_gradient(each.parameter)
        if gradient is not None:
            self.gradients[fake] = self._fake_gradient(gradient.detach(), each)
        self.fakes[each.parameter] = fake.requires_grad_(each.parameter.requires_grad)

    def _fake_gradient(self, gradient: torch.Tensor, each: ShardedFacts) -> torch.Tensor:
        """Return the fake of a part of a gradient, which others may share a storage with; as large as on any rank."""
        size, offset = gradient.element_size(), int(gradient.storage_offset())
        size_bytes = max(gradient.untyped_storage().nbytes(), (offset + math.prod(each.padded)) * size)
        key = storage_key(gradient)
        with self._mode:
            whole = self._storages.setdefault(key, torch.empty(size_bytes, dtype=torch.uint8, device=gradient.device))
            fake = torch.empty(0, dtype=gradient.dtype, device=gradient.device)
            return fake.set_(whole.untyped_storage(), offset, gradient.shape, gradient.stride())

    def _show(self, facts: GroupFacts) -> None:
        if id(facts) not in self._gathered:
            self._gathered.add(id(facts))
            self._gather(next(group for group in self._sharded.groups if group.facts is facts))
        for each in facts.parameters:
            each.show(self.fakes[each.parameter])

    def _hide(self, facts: GroupFacts) -> None:
        for each in facts.parameters:
            each.show(each.parameter)

    def _gather(self, group: ShardedGroup) -> None:
        """Enter the two calls that gather a group: one that starts, and one that waits and takes the parts apart."""
        trace, fakes = self._trace, [self.fakes[each.parameter] for each in group.parameters]
        lengths = [math.prod(each.padded) for each in group.parameters]
        dtype, device = group.parameters[0].dtype, fakes[0].device
        with only_mode(self._mode):  # the capture does not see it
            whole = torch.empty(self._sharded.size * sum(lengths), dtype=dtype, device=device)
        gathered = trace.add_storage(whole, name="gathered", role=Role.PARAMETER)
        parts = [trace.value(self.parts[fake].view(-1)) for fake in fakes]
        results = [
            trace.add_storage(fake, name=name, role=Role.PARAMETER)
            for name, fake in zip(group.names, fakes, strict=True)
        ]
        places = [(length, each.shape) for length, each in zip(lengths, group.parameters, strict=True)]
        name = self._sharded.group.group_name
        given = {"phase": self._phase(), "module": group.facts.name}
        trace.calls += [
            TracedCall.of("gather", start_gather, (parts, dtype, name), made=[gathered], group=COLLECTIVES, **given),
            TracedCall.of("gathered", finish_gather, (gathered, self._sharded.size, places), made=results, **given),
        ]
