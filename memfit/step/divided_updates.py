"""Updates in a loop of the user's, in several calls where a single one might take more than the budget.

With `foreach`, the default on a GPU, torch's optimizers hold temporary tensors of all parameters at once: Adam as many
bytes as the parameters. Divided, an update holds those of one part, with the same bits, since these optimizers treat
their parameters one by one.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from memfit.capture.optimizer import alone, is_of_torch, overlap, updates_many_at_once, without_hooks
from memfit.step.hooks import WeakHook
from memfit.system.recorder import record
from memfit.torch_private.modules import no_hooks_on_all_optimizers
from memfit.torch_private.sharding import local

PARTS = 12
"""Of an update that is divided."""
_TEMPORARY = 3  # times the bytes of the parameters: more than torch's optimizers hold beside the state that they make
_STATES = 2  # of a parameter that has none yet

Groups = list[dict[str, Any]]


class DividedUpdates:
    """Divides the updates of parameters on a device until `remove()`.

    Args:
        device: of the parameters.
        left: returns the bytes that the budget leaves beside all that is live; None as long as it is not known.

    Attributes:
        more_bytes: that the last update would have taken in one call, above what is live after it; 0 if it was one.
    """

    def __init__(self, device: torch.device, left: Callable[[], float | None]) -> None:
        self.device, self._left = device, left
        self.more_bytes = 0
        hook = register_optimizer_step_pre_hook(WeakHook(self._before_step))
        self.remove = weakref.finalize(self, hook.remove)

    def _before_step(self, optimizer: torch.optim.Optimizer, given: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Let another object with the same state step, whose groups hold the last part alone.

        The others are updated in its closure, which runs once all hooks have run.
        """
        self.more_bytes = 0
        if torch.compiler.is_compiling() or not self._may_divide(optimizer):
            return None
        _, closure, *_ = *given, named.get("closure")
        if isinstance(closure, Parts):  # those of another budget
            closure.budgets.append(self)
            return None
        last = alone(optimizer)
        return (last,), {"closure": Parts(self, optimizer, last, closure)}

    def _may_divide(self, optimizer: torch.optim.Optimizer) -> bool:
        return is_of_torch(optimizer) and all(map(self._is_foreach, optimizer.param_groups))

    def _is_foreach(self, group: dict[str, Any]) -> bool:
        """Return whether a group is updated by `foreach`, whichever of its parameters are updated together."""
        is_many = updates_many_at_once(group, self.device) and not group.get("fused")
        return is_many and (
            bool(group["foreach"]) or all(type(each) in (torch.Tensor, torch.nn.Parameter) for each in group["params"])
        )

    def parts_of(self, optimizer: torch.optim.Optimizer) -> list[Groups]:
        """Return the groups of each part of an update: all of the optimizer's, if one call has room.

        Args:
            optimizer: whose gradients are there.
        """
        whole = [optimizer.param_groups]
        parameters = [each for group in optimizer.param_groups for each in group["params"] if each.grad is not None]
        if any(each.grad.is_sparse or each.device != self.device for each in parameters):
            return whole
        sizes = {each: local(each).nbytes for each in parameters}
        states = sum(_STATES * sizes[each] for each in parameters if not optimizer.state.get(each))
        size_bytes, left_bytes = sum(sizes.values()), self._left()
        has_room = left_bytes is not None and states + _TEMPORARY * size_bytes <= left_bytes
        if has_room or overlap(parameters):
            return whole
        return list(_divided(optimizer.param_groups, sizes, size_bytes // PARTS)) or whole


class Parts:
    """The closure of a step: makes gradients by that of the user, if there is one, and updates all but the last part.

    Args:
        budget: divides them.
        optimizer: the user's.
        last: steps with this closure.
        own: the user's closure.

    Attributes:
        budgets: that may divide them.
        own: the same; who has something to do before the update does it after this one.
    """

    def __init__(
        self, budget: DividedUpdates, optimizer: torch.optim.Optimizer, last: Any, own: Callable[..., Any] | None
    ) -> None:
        self.budgets, self._optimizer, self._last, self.own = [budget], optimizer, last, own

    def __call__(self) -> Any:
        value = None if self.own is None else self.own()
        divided = [(each.device, each.parts_of(self._optimizer)) for each in self.budgets]
        device, parts = max(divided, key=lambda each: len(each[1]))
        second, temporary_bytes = without_hooks(self._optimizer), 0
        for second.param_groups in parts[:-1]:
            with record(device) as usage, no_hooks_on_all_optimizers():
                type(self._optimizer).step(second)
            temporary_bytes += usage.most_live_bytes - usage.end_bytes
        self._last.param_groups = parts[-1]
        measured, last = (_size_of(each) for each in (list(chain(*parts[:-1])), parts[-1]))
        for each in self.budgets:
            each.more_bytes = temporary_bytes * (measured + last) // max(1, measured)
        return value


def _size_of(groups: Groups) -> int:
    return sum(local(each).nbytes for group in groups for each in group["params"])


def _divided(groups: Groups, sizes: dict[torch.Tensor, int], most_bytes: int) -> Iterator[Groups]:
    """Yield the groups of each part; a part holds parameters of one group, in its order."""
    for group in groups:
        part: list[torch.Tensor] = []
        part_bytes = 0
        for parameter in group["params"]:
            if parameter in sizes:
                part.append(parameter)
                part_bytes += sizes[parameter]
                if part_bytes >= most_bytes:
                    yield [{**group, "params": part}]
                    part, part_bytes = [], 0
        if part:
            yield [{**group, "params": part}]
