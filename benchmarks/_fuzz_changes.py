"""What users change between steps of the fuzzer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from _fuzz_blocks import WIDTH
from _fuzz_worlds import SCALES, World
from torch import nn


def _first_linear(world: World) -> nn.Linear:
    return world.model[0]  # pyright: ignore[reportIndexIssue, reportReturnType]


def _blocks_with(world: World, name: str) -> list[Any]:
    return [block for block in world.model.modules() if name in vars(block)]


def _dropout(world: World) -> None:
    for block in world.model.modules():
        if isinstance(block, nn.Dropout):
            block.p = 0.6


def _temperature(world: World) -> None:
    for block in _blocks_with(world, "temperature"):
        block.temperature *= 2


def _settings(world: World) -> None:
    for block in _blocks_with(world, "settings"):
        block.settings["gain"] = -1.0


def _plain_in_place(world: World) -> None:
    for block in _blocks_with(world, "plain"):
        block.plain.table.mul_(1.5)
        block.plain.one.mul_(1.25)


def _replace_plain(world: World) -> None:
    for block in _blocks_with(world, "plain"):
        block.plain.table, block.plain.one = block.plain.table * 0.5, block.plain.one * 2


def _plain_by_numpy(world: World) -> None:
    for block in _blocks_with(world, "plain"):
        block.plain.table.numpy()[:] += 0.25


def _gain(world: World) -> None:
    for block in _blocks_with(world, "gain"):
        block.gain *= 2
        vars(block).pop("scale", None)


def _weights(world: World) -> None:
    world.tensors["weights"] = world.tensors["weights"].flip(0) + 1


def _teacher(world: World) -> None:
    world.tensors["teacher"] = world.tensors["teacher"] * 2


def _weights_in_place(world: World) -> None:
    world.tensors["weights"].mul_(2)


def _scale() -> None:
    SCALES["loss"] += 0.5


def _learning_rate(world: World) -> None:
    for group in world.optimizer.param_groups if world.optimizer else ():
        group["lr"] *= 0.5


def _decay(world: World) -> None:
    for group in world.optimizer.param_groups if world.optimizer else ():
        group["weight_decay"] = 0.1


def _add_group(world: World) -> None:
    if world.optimizer is None:
        return
    known = {id(each) for group in world.optimizer.param_groups for each in group["params"]}
    left = [each for each in world.model.parameters() if id(each) not in known]
    if left:
        world.optimizer.add_param_group({"params": left, "lr": 0.5})


def _remove_group(world: World) -> None:
    if world.optimizer is not None and len(world.optimizer.param_groups) > 1:
        del world.optimizer.param_groups[-1]


def _clear_group(world: World) -> None:
    if world.optimizer is not None:
        world.optimizer.param_groups[0]["params"] = world.optimizer.param_groups[0]["params"][1:]


def _reverse_groups(world: World) -> None:
    if world.optimizer is not None:
        world.optimizer.param_groups.reverse()


def _replace_layer(world: World) -> None:
    torch.manual_seed(99)
    world.model[0] = nn.Linear(WIDTH, WIDTH).to(world.dtype)  # pyright: ignore[reportIndexIssue]


def _replace_parameter(world: World) -> None:
    _first_linear(world).weight = nn.Parameter(_first_linear(world).weight.detach() * 0.5)


def _tie(world: World) -> None:
    linears = [each for each in world.model.modules() if isinstance(each, nn.Linear) and type(each) is nn.Linear]
    if len(linears) > 1 and linears[0].weight.shape == linears[1].weight.shape:
        linears[1].weight = linears[0].weight


def _restride(world: World) -> None:
    weight = _first_linear(world).weight
    weight.data = weight.data.t().contiguous().t() * 1.5


def _flatten(world: World) -> None:
    parameters = list(world.model.parameters())
    flat = torch.cat([each.data.reshape(-1) for each in parameters])
    at = 0
    for each in parameters:
        each.data = flat[at : at + each.numel()].view(each.shape)
        at += each.numel()


def _channels_last(world: World) -> None:
    world.model.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]


def _double(world: World) -> None:
    world.model.double()
    world.dtype = torch.float64


def _scale_weights(world: World) -> None:
    with torch.no_grad():
        for each in world.model.parameters():
            each.mul_(0.9)


def _load(world: World) -> None:
    world.model.load_state_dict(
        {name: value * 0.5 if value.is_floating_point() else value for name, value in world.model.state_dict().items()}
    )


def _reload_optimizer(world: World) -> None:
    if world.optimizer is not None:
        world.optimizer.load_state_dict(world.optimizer.state_dict())


def _forget_state(world: World) -> None:
    if world.optimizer is not None:
        world.optimizer.state.clear()


def _batch(world: World) -> None:
    world.size = world.size // 2 if world.size > 8 else 24


def _autocast(world: World) -> None:
    world.autocast = not world.autocast


def _add_hook(world: World) -> None:
    _first_linear(world).register_forward_hook(lambda _module, _inputs, results: results * 1.1)


def _freeze(world: World) -> None:
    _first_linear(world).requires_grad_(False)


def _unfreeze(world: World) -> None:
    world.model.requires_grad_(True)


def _replace_function(world: World) -> None:
    for block in _blocks_with(world, "function"):
        if "inner" not in dict(block.named_modules()):
            block.function = lambda _block, inputs: inputs * 0.75


CHANGES: dict[str, Callable[[World], object]] = {
    "evaluate": lambda world: world.model.eval(),
    "train": lambda world: world.model.train(),
    "dropout": _dropout,
    "temperature": _temperature,
    "settings": _settings,
    "replace_function": _replace_function,
    "plain_in_place": _plain_in_place,
    "replace_plain": _replace_plain,
    "plain_by_numpy": _plain_by_numpy,
    "gain": _gain,
    "replace_class_weights": _weights,
    "class_weights_in_place": _weights_in_place,
    "replace_teacher": _teacher,
    "learning_rate": _learning_rate,
    "weight_decay": _decay,
    "add_group": _add_group,
    "remove_group": _remove_group,
    "clear_group": _clear_group,
    "reverse_groups": _reverse_groups,
    "replace_layer": _replace_layer,
    "replace_parameter": _replace_parameter,
    "tie": _tie,
    "restride": _restride,
    "flatten": _flatten,
    "channels_last": _channels_last,
    "double": _double,
    "scale_weights": _scale_weights,
    "load_model": _load,
    "load_optimizer": _reload_optimizer,
    "forget_optimizer_state": _forget_state,
    "batch_size": _batch,
    "autocast": _autocast,
    "hook": _add_hook,
    "freeze": _freeze,
    "unfreeze": _unfreeze,
}
"""Changes that users make between steps to a world, by name. One that does not concern it leaves it as it is."""

GLOBAL_CHANGES: dict[str, Callable[[], object]] = {
    "loss_scale": _scale,
    "deterministic": lambda: torch.use_deterministic_algorithms(not torch.are_deterministic_algorithms_enabled()),
}
"""Changes of what all of the process shares, by name."""


def reset() -> None:
    """Take the global changes back."""
    SCALES["loss"] = 1.0
    torch.use_deterministic_algorithms(False)
