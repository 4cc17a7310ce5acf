"""Sharding of a bare model over the ranks: `fully_shard` for each of its repeated blocks, and for the rest of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import torch
import torch.distributed as dist

from memfit.capture.data_parallel import DataParallel
from memfit.capture.step_check import check_initialized, check_not_distributed
from memfit.errors import InvalidOptionError
from memfit.step.agreement import agreement_of
from memfit.step.distributed.ranks import require_same_model
from memfit.torch_private.modules import module_tables


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
    agreement.together("sharding the model", lambda: _require_bare(model, optimizer))
    require_same_model(agreement, model, [], "models")
    DataParallel(group).begin(model)
    names = {parameter: name for name, parameter in model.named_parameters()}
    _apply(model, group)
    if optimizer is not None:
        after = dict(model.named_parameters())
        for members in optimizer.param_groups:
            members["params"] = [after[names[p]] if p in names else p for p in members["params"]]
    return model


def _require_bare(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
    check_not_distributed(model, "memfit.fit(shard=True)")
    check_initialized(model, "memfit.fit(shard=True)")
    if optimizer is not None and optimizer.state:
        raise InvalidOptionError(
            "shard=True is for an optimizer that has no state yet; shard the model by fully_shard before its first "
            "step, or load its state after memfit.fit"
        )


def _apply(model: torch.nn.Module, group: dist.ProcessGroup) -> None:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    device_type = next(model.parameters()).device.type
    mesh = DeviceMesh.from_group(group, device_type)
    for block in repeated_blocks(model):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


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
