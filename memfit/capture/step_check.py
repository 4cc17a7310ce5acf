"""Checks of a TrainingStep that a user made: each part is of the right kind, and all are on one device."""

from __future__ import annotations

import math
from collections.abc import Iterable
from types import FunctionType

import torch

from memfit.capture.across import Across
from memfit.capture.code_reads import global_reads, is_librarys
from memfit.capture.fully_sharded import FullySharded
from memfit.capture.optimizer import innermost
from memfit.capture.placement import require_dense, step_device
from memfit.capture.training_step import TrainingStep
from memfit.errors import BY_CHECKPOINT, InvalidTargetError, UnsupportedStepError
from memfit.torch_private.autocast import any_autocast
from memfit.torch_private.autograd import changing_hooks, in_backward
from memfit.torch_private.ranks import replicated_class
from memfit.torch_private.sharding import gathered_before_it_reshards, is_of_first_fsdp

_FULLY_SHARD, _FSDP_1, _DATA_PARALLEL = "FSDP (fully_shard)", "FSDP", "DataParallel"


def check_step(step: TrainingStep, where: str) -> None:
    """Raise an error if `step` cannot be captured.

    Args:
        step: made by a user.
        where: names its maker in error messages.

    Raises:
        InvalidTargetError: a part of the wrong kind, or an optimizer of another model's parameters.
        InvalidDeviceError: parameters or batch on several devices.
        UnsupportedStepError: a model under DDP, FSDP or tensor parallelism, or a script of torch.jit; a batch with
            sparse, nested or quantized tensors; a chunked loss of a step that has no loss.
    """
    _check_kinds(step, where)
    if step.chunk_loss and not step.has_backward:
        raise UnsupportedStepError(f"{where}: chunk_loss is for the loss of a training step, and this step has none")
    check_not_distributed(step.model, where, step.across)
    check_initialized(step.model, where)
    if step.optimizer is not None:
        _check_optimizer(step.model, step.optimizer, where)
    require_dense(step.batch, f"{where}: batch")
    step_device(step.model, step.batch, where)


def require_training_context(what: str, step: TrainingStep) -> None:
    """Refuse to capture or run a step inside a `with` block of torch that changes what a training step computes.

    Args:
        what: says in the message what was done there.
        step: that is captured or run; one without a backward pass needs no gradients.

    Raises:
        UnsupportedStepError: gradients are off, autocast is on, or hooks of saved tensors that may change values.
    """
    if not step.has_backward and torch.is_inference_mode_enabled():
        raise UnsupportedStepError(f"{what} inside torch.inference_mode(); leave that block, or use torch.no_grad()")
    if step.has_backward and not torch.is_grad_enabled():
        raise UnsupportedStepError(
            f"{what} inside torch.no_grad() or torch.inference_mode(), where nothing is trained; leave that block first"
        )
    if any_autocast():
        raise UnsupportedStepError(
            f"{what} inside torch.autocast, whose cache outlives a step; autocast belongs in the loss function: `with "
            "torch.autocast(...)` around the model's call there"
        )
    if hook := changing_hooks():
        raise UnsupportedStepError(
            f"{what} inside hooks of saved tensors ({hook}), which may change what backward reads; they belong in the "
            "loss function, around the model's call there, or take memfit.checkpoint, inside whose loop they may be on"
        )


def check_initialized(model: torch.nn.Module, where: str) -> None:
    """Raise InvalidTargetError if `model` has lazy modules that have yet to see a batch.

    Args:
        model: any module.
        where: begins the message.
    """
    for name, value in (*model.named_parameters(), *model.named_buffers()):
        if torch.nn.parameter.is_lazy(value):
            raise InvalidTargetError(
                f"{where}: {name} of the {type(model).__name__} has no shape yet (a lazy module): run a batch through "
                "the model first, `model(batch)`"
            )


def check_not_distributed(model: torch.nn.Module, where: str, across: Across | None = None) -> None:
    """Raise UnsupportedStepError if `model`, or a part of it, is wrapped to run on several devices.

    Args:
        model: any module.
        where: begins the message: the file and line, or the name, of what was asked for.
        across: the ranks of a step; those of a fully sharded one have taken its model apart.
    """
    what, kind = how_distributed(model, across)
    if not kind:
        return
    remedy = "give the bare model, and process_group to memfit.fit" if kind.startswith("DDP") else "give the bare model"
    if kind == _FSDP_1:
        remedy = f"apply fully_shard (FSDP2) in its place, where {BY_CHECKPOINT}"
    elif kind != _DATA_PARALLEL:
        remedy = f"{BY_CHECKPOINT}; or {remedy}"
    raise UnsupportedStepError(f"{where}: {what}; memfit plans only bare models: {remedy}")


def how_distributed(model: torch.nn.Module, across: Across | None = None) -> tuple[str, str]:
    """Return how a model, or a part of it, is spread over devices: a clause, and the kind; two empty texts if not.

    Args:
        model, across: as for `check_not_distributed`.
    """
    wrappers, sharded = _distributed_kinds()
    known: set[torch.Tensor] = set()
    if isinstance(across, FullySharded):
        del wrappers[_FULLY_SHARD]
        known = {each.parameter for group in across.groups for each in group.parameters}
    for name, module in model.named_modules():
        kind = next((word for word, wrapper in wrappers.items() if isinstance(module, wrapper)), "")
        if kind:
            return f"{f'module {name!r} of the model' if name else 'the model'} is wrapped in {kind}", kind
    for name, parameter in model.named_parameters():
        if isinstance(parameter, sharded) and parameter not in known:
            return f"parameter {name!r} is a DTensor that fully_shard has not made", "DTensor"
    return "", ""


def require_module(model: object, where: str) -> None:
    """Raise InvalidTargetError if what is given as a model is none.

    Args:
        model: anything.
        where: begins the message.
    """
    if not isinstance(model, torch.nn.Module):
        raise InvalidTargetError(f"{where}: model is a {_kind(model)}, expected a torch.nn.Module")


def scripts_in(module: torch.nn.Module) -> list[str]:
    """Return the names of what of torch.jit a module calls: modules, methods, and functions that its code names.

    Args:
        module: with all modules inside of it; of libraries, too.
    """
    found: list[str] = []
    for name, each in module.named_modules():
        if isinstance(each, torch.jit.ScriptModule):
            found.append(name or type(each).__name__)
            continue
        found += [key for key, value in vars(each).items() if isinstance(value, torch.jit.ScriptFunction)]
        for kind in type(each).__mro__:
            if not is_librarys(kind.__module__):
                functions = (function for function in vars(kind).values() if isinstance(function, FunctionType))
                found += [name for function in functions for name in _scripts_named(function)]
    return found


def calls_scripts(names: list[str]) -> str:
    """Return in a clause why code that calls these functions or modules of torch.jit is not run again, and what to do.

    Args:
        names: of them.
    """
    return (
        f"calls {names[0]!r}, a function or a module of torch.jit, whose first calls compute gradients otherwise than "
        "later ones do: take torch.jit.script away, or run with PYTORCH_JIT=0 in the environment"
    )


def refuse_first_fsdp(parameters: Iterable[torch.Tensor | None], where: str) -> None:
    """Raise UnsupportedStepError if a model is under FSDP's first version: blocks lose parameters before recomputation.

    Args:
        parameters: of any module; a wrapper around it shows, too.
        where: begins the message.
    """
    if any(map(is_of_first_fsdp, parameters)):
        raise UnsupportedStepError(
            f"{where}: the model is under FSDP's first version, where a block that is recomputed has lost "
            "its parameters; apply fully_shard (FSDP2) in its place: fsdp_version=2 in Accelerate's and the Trainer's "
            "settings, ModelParallelStrategy in Lightning"
        )


def refuse_gathered_over_updates(model: torch.nn.Module, where: str) -> None:
    """Raise UnsupportedStepError if `fully_shard` keeps parameters gathered over an update that was just made.

    The next forward pass computes with those from before the update, its backward pass gathers those from after it,
    and a block would be recomputed from the latter. Updates in a backward pass are made while some are gathered.

    Args:
        model: whose parameters were updated.
        where: begins the message.
    """
    name = "" if in_backward() else gathered_before_it_reshards(model)
    if name:
        raise UnsupportedStepError(
            f"{where}: fully_shard keeps the parameters of {name!r} gathered over an optimizer's step, so that the "
            "next forward pass would compute with those from before it, and recomputed blocks with those from after "
            "it; call set_reshard_after_backward(True) before the last backward pass of each step"
        )


def is_over_ranks(model: torch.nn.Module) -> str:
    """Return in a clause how several processes train a model; empty if they do not, or by DataParallel in one."""
    what, kind = how_distributed(model)
    return "" if kind == _DATA_PARALLEL else what


def _distributed_kinds() -> tuple[dict[str, type], tuple[type, ...]]:
    wrappers: dict[str, type] = {_DATA_PARALLEL: torch.nn.DataParallel}
    if not torch.distributed.is_available():
        return wrappers, ()
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
    from torch.distributed.tensor import DTensor
    from torch.nn.parallel import DistributedDataParallel

    wrappers |= {"DDP": DistributedDataParallel, _FSDP_1: FullyShardedDataParallel, _FULLY_SHARD: FSDPModule}
    wrappers["DDP (replicate)"] = replicated_class()
    return wrappers, (DTensor,)


def _check_kinds(step: TrainingStep, where: str) -> None:
    require_module(step.model, where)
    if isinstance(step.model, torch.jit.ScriptModule):
        raise UnsupportedStepError(f"{where}: model is a script of torch.jit; give the module that it was made from")
    scripts = scripts_in(step.model)
    if scripts:
        raise UnsupportedStepError(
            f"{where}: the model {calls_scripts(scripts)}, or train in eager mode (memfit.eager)"
        )
    if not callable(step.loss):
        raise InvalidTargetError(
            f"{where}: loss is a {_kind(step.loss)}, expected a function loss(model, batch) or a loss module"
        )
    if step.optimizer is not None and not isinstance(step.optimizer, torch.optim.Optimizer):
        raise InvalidTargetError(
            f"{where}: optimizer is a {_kind(step.optimizer)}, expected a torch.optim.Optimizer or None"
        )
    inner = innermost(step.optimizer)
    if inner is not step.optimizer:
        raise InvalidTargetError(
            f"{where}: optimizer is a {_kind(step.optimizer)} around a {_kind(inner)}, and its own step would not run; "
            "give its attribute `optimizer`"
        )
    if step.scaler is not None and not isinstance(step.scaler, torch.amp.GradScaler):
        raise InvalidTargetError(f"{where}: scaler is a {_kind(step.scaler)}, expected a torch.amp.GradScaler or None")
    norm = step.clip_norm
    if norm is not None and not (isinstance(norm, int | float) and math.isfinite(norm) and norm > 0):
        raise InvalidTargetError(f"{where}: clip_norm is {norm!r}, expected a number above 0, or None")
    if step.has_backward and not any(parameter.requires_grad for parameter in step.model.parameters()):
        raise InvalidTargetError(
            f"{where}: no parameter of the model requires a gradient, so there is nothing to train"
        )


def _check_optimizer(model: torch.nn.Module, optimizer: torch.optim.Optimizer, where: str) -> None:
    own = {id(parameter) for parameter in model.parameters()}
    for number, group in enumerate(optimizer.param_groups):
        for place, parameter in enumerate(group["params"]):
            if id(parameter) not in own:
                raise InvalidTargetError(
                    f"{where}: parameter {place} of the optimizer's group {number}, of shape {tuple(parameter.shape)}, "
                    "is not the model's; make the optimizer from model.parameters(), after the model is complete"
                )


def _scripts_named(function: FunctionType) -> list[str]:
    names = global_reads(function.__code__) & function.__globals__.keys()
    return [name for name in sorted(names) if isinstance(function.__globals__[name], torch.jit.ScriptFunction)]


def _kind(value: object) -> str:
    return f"class {value.__name__}" if isinstance(value, type) else type(value).__name__
