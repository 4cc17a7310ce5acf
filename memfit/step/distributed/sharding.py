"""Sharding of a bare model over the ranks: `fully_shard` for each of its repeated blocks, and for the rest of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from memfit.capture.data_parallel import DataParallel
from memfit.capture.step_check import check_initialized, check_not_distributed
from memfit.errors import InvalidOptionError
from memfit.step.agreement import agreement_of
from memfit.step.distributed.ranks import require_same_model
from memfit.torch_private.modules import module_tables

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_ASKED = "memfit.fit(shard=True)"


def sharded(
    model: torch.nn.Module, group: dist.ProcessGroup | None, optimizer: torch.optim.Optimizer | None
) -> torch.nn.Module:
    """Give all ranks rank 0's parameters and buffers, and shard them in place; return the model.

    Args:
        model: bare; afterwards its parameters are DTensors, as `fully_shard` makes them.
        group: the ranks.
        optimizer: of the model's parameters; it gets the sharded ones in their places.

    Raises:
        InvalidOptionError: no group, or an optimizer that has taken a step.
        RankError: the ranks have different models.
        UnsupportedStepError: the model is wrapped, or sharded already.
    """
    if not dist.is_available() or not isinstance(group, dist.ProcessGroup):
        raise InvalidOptionError("shard=True needs a process_group, such as torch.distributed.group.WORLD")
    agreement = agreement_of(group)
    agreement.together("sharding the model", lambda: require_bare(model, optimizer, _ASKED))
    require_same_model(agreement, model, [], "models")
    DataParallel(group).begin(model)
    from torch.distributed.device_mesh import DeviceMesh

    shard_blocks(model, DeviceMesh.from_group(group, next(model.parameters()).device.type), optimizer)
    return model


def require_bare(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None, asked: str) -> None:
    """Refuse a model that cannot be sharded, or whose optimizer has a state.

    Args:
        model: of a step.
        optimizer: of the model's parameters.
        asked: by which sharding was asked for; begins messages.

    Raises:
        InvalidTargetError, UnsupportedStepError: the model has lazy modules, or is wrapped or sharded already.
        InvalidOptionError: the optimizer has taken a step.
    """
    check_not_distributed(model, asked)
    check_initialized(model, asked)
    if optimizer is not None and optimizer.state:
        raise InvalidOptionError(
            "shard=True is for an optimizer that has no state yet; shard the model by fully_shard before its first "
            "step, or load its state after memfit.fit"
        )


def shard_blocks(model: torch.nn.Module, mesh: DeviceMesh, optimizer: torch.optim.Optimizer | None) -> None:
    """Apply `fully_shard` to each repeated block of a model and to the rest, in place.

    Args:
        model: bare.
        mesh: of the ranks; of two dimensions for replicas of shards.
        optimizer: of the model's parameters; it gets the sharded ones in their places.
    """
    from torch.distributed.fsdp import fully_shard

    names = {parameter: name for name, parameter in model.named_parameters()}
    for block in repeated_blocks(model):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if optimizer is not None:
        after = dict(model.named_parameters())
        for members in optimizer.param_groups:
            members["params"] = [after[names[p]] if p in names else p for p in members["params"]]


def repeated_blocks(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the modules of a model that are gathered by themselves: the members of its outermost lists of like ones.

        >>> layers = [torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8)]
        >>> repeated_blocks(torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Sequential(*layers)))
        [Linear(in_features=8, out_features=8, bias=True), Linear(in_features=8, out_features=8, bias=True)]

    A member that shares a parameter with the rest of the model is left to the rest.

    Args:
        model: a bare model.
    """
    uses = Counter(parameter for module in model.modules() for parameter in module_tables(module)[0].values())
    return [block for block in _blocks(model) if _is_alone(block, uses)]


def _blocks(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    children = [child for child in module.children() if next(child.parameters(), None) is not None]
    kinds = Counter(map(type, children))
    if isinstance(module, torch.nn.ModuleList | torch.nn.Sequential) and max(kinds.values(), default=0) > 1:
        yield from (child for child in children if kinds[type(child)] > 1)
        children = [child for child in children if kinds[type(child)] == 1]
    for child in children:
        yield from _blocks(child)


def _is_alone(block: torch.nn.Module, uses: Counter[torch.Tensor | None]) -> bool:
    own = Counter(parameter for module in block.modules() for parameter in module_tables(module)[0].values())
    return all(uses[parameter] == count for parameter, count in own.items() if parameter is not None)
