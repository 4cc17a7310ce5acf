"""Fully sharded training: each rank keeps a part of each parameter, of its gradient and of the optimizer's state.

A model that `fully_shard` (FSDP2) was applied to is taken apart: its groups of parameters are gathered by ops of the
graph, which a plan may repeat, and their gradients are reduced by others, in the arithmetic and the layout of
`fully_shard`. The model keeps its parameters (DTensors), so that its checkpoints are those of any such model.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from memfit.capture.across import Across, refuse_asked
from memfit.capture.data_parallel import data_parallel
from memfit.errors import BY_CHECKPOINT, InvalidOptionError, InvalidTargetError, UnsupportedStepError
from memfit.torch_private.absent import is_absent
from memfit.torch_private.ranks import is_gloo, start_sum
from memfit.torch_private.sharding import (
    GroupFacts,
    ShardedFacts,
    divisions,
    is_fully_sharded,
    is_sharded,
    local,
    reduces_gradients,
    reshard,
    sharded_groups,
)

SUM = start_sum.__name__


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardedGroup:
    """Parameters that are gathered by one collective, and whose gradients are reduced by one.

    Attributes:
        facts: as torch keeps them.
        names: of the parameters, in the order in which they are gathered.
    """

    facts: GroupFacts
    names: tuple[str, ...]

    @property
    def parameters(self) -> tuple[ShardedFacts, ...]:
        """The parameters, in the order of `names`."""
        return self.facts.parameters


class FullySharded(Across):
    """A model's groups, and the ranks that its parameters are sharded over.

    Args:
        model: `fully_shard` was applied to it.
        groups: of it; all have the same process group.

    Attributes:
        groups: see above.
        replicas: the ranks that have the same parts of other replicas (HSDP); None for one replica.
    """

    def __init__(self, model: torch.nn.Module, groups: list[GroupFacts]) -> None:
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        self.groups = tuple(
            ShardedGroup(facts=facts, names=tuple(names[id(each.parameter)] for each in facts.parameters))
            for facts in groups
        )
        super().__init__(groups[0].process_group)
        self.replicas: dist.ProcessGroup | None = groups[0].replicas

    @property
    def shards(self) -> int:
        """Over how many ranks the model is sharded."""
        return self.size

    @property
    def reduces(self) -> bool:
        """Whether steps reduce their gradients now: always.

        Raises:
            UnsupportedStepError: `set_requires_gradient_sync(False)` was called.
        """
        if not reduces_gradients([each.facts for each in self.groups]):
            raise UnsupportedStepError(
                "set_requires_gradient_sync(False) was called on the sharded model, but a planned step reduces its "
                "gradients in each call: leave it out, gradients add up in `.grad` all the same; or else "
                f"{BY_CHECKPOINT}"
            )
        return True

    def settle(self) -> None:
        """Let go of the root's parameters, which an evaluation leaves gathered."""
        reshard([each.facts for each in self.groups])

    def no_sync(self) -> AbstractContextManager[None]:
        """Refuse: whole gradients would have to be kept on each rank.

        Raises:
            UnsupportedStepError: always.
        """
        raise UnsupportedStepError(
            "no_sync is not for sharded models, whose gradients are reduced in each call: leave it out, they add up "
            f"in `.grad` all the same; or else {BY_CHECKPOINT}"
        )

    def ring_of(self, kind: str) -> Sequence[int]:
        """Return the ranks that parts are gathered from and scattered to; of a sum those of the other replicas."""
        group = self.replicas if kind == SUM and self.replicas is not None else self.group
        return dist.get_process_group_ranks(group)

    def divisions(self, group: ShardedGroup, dtype: torch.dtype) -> tuple[float | None, float | None, str]:
        """Return by what gradients are divided before their sum and after it, and the name of the sum.

        Args:
            group: one of `groups`.
            dtype: in which they are reduced.

        Raises:
            UnsupportedStepError: a factor for which torch has a sum of its own.
        """
        device = local(group.parameters[0].parameter).device
        before, after, operation = divisions(group.facts, dtype, device.type)
        if operation is None:
            raise UnsupportedStepError(
                f"{_title(group.facts)} has a gradient divide factor of its own, whose sum a planned step does not "
                f"make; leave it out, or call set_force_sum_reduction_for_comms(True); or else {BY_CHECKPOINT}"
            )
        if operation == "avg" and (self.replicas is not None or is_gloo(self.group, device)):
            replicas = 1 if self.replicas is None else self.replicas.size()
            return before, float(self.size * replicas), "sum"  # as gloo does, of which each rank needs its part only
        return before, after, operation


def across_ranks(model: torch.nn.Module, group: dist.ProcessGroup | None) -> tuple[torch.nn.Module, Across | None]:
    """Return the model that a step captures, and how its gradients are averaged; None for this rank alone.

    Args:
        model: bare, wrapped in DistributedDataParallel, or given to `fully_shard`.
        group: the ranks that train together; None leaves it to the model.

    Raises:
        InvalidOptionError, UnsupportedStepError: as `data_parallel` and `fully_sharded`.
    """
    sharded = fully_sharded(model, group)
    is_bare = not isinstance(model, torch.nn.parallel.DistributedDataParallel)
    if sharded is not None or (group is None and is_bare):
        return model, sharded
    return data_parallel(model, group)


def fully_sharded(model: torch.nn.Module, group: dist.ProcessGroup | None) -> FullySharded | None:
    """Return how a model is sharded; None for one that is not.

    Args:
        model: bare, or given to `fully_shard`, all of it or in parts.
        group: the ranks that train together; None leaves it to the model.

    Raises:
        InvalidOptionError: another group than the model's.
        InvalidTargetError: a parameter is on the meta device.
        UnsupportedStepError: the model is sharded in another way than a planned step can carry out; names the module.
    """
    if not dist.is_available() or not dist.is_initialized() or not any(map(is_sharded, model.parameters())):
        return None
    if not is_fully_sharded(model):
        return None
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            raise InvalidTargetError(
                f"memfit.fit: parameter {name!r} is on the meta device and has no values yet: call "
                "model.to_empty(device=...) and initialize it, or load a checkpoint, first"
            )
    groups = sharded_groups(model)
    reshard(groups)
    for facts in groups:
        _require_plain(facts)
    found = {id(facts.process_group): facts for facts in groups}
    if len(found) > 1:
        one, other = list(found.values())[:2]
        raise UnsupportedStepError(
            f"memfit.fit: {_title(one)} and {_title(other)} are sharded over different process groups, expected one; "
            f"give the same mesh to each fully_shard; or else {BY_CHECKPOINT}"
        )
    sharded = FullySharded(model, groups)
    if group is not None and group is not sharded.group:
        raise InvalidOptionError(
            "process_group differs from that of the mesh that the model is sharded over: leave it out, the mesh has "
            "its own"
        )
    return sharded


def _title(facts: GroupFacts) -> str:
    return f"module {facts.name!r}" if facts.name else "the model"


def _require_plain(facts: GroupFacts) -> None:
    """Refuse a group that does more than gather rows, and average gradients."""
    dtypes = {each.dtype for each in facts.parameters}
    trained = {each.parameter.dtype for each in facts.parameters if each.parameter.requires_grad}
    found = {
        **dict.fromkeys(facts.refused, True),
        **dict.fromkeys((what for each in facts.parameters for what in each.refused), True),
        "a mesh of several dimensions": facts.process_group is None
        or (facts.replicas is not None and not is_absent(facts.replicas)),
        "parameters of several dtypes": len(dtypes) > 1 or len(trained) > 1,
    }
    refuse_asked(f"fully_shard of {_title(facts)} has", found)
