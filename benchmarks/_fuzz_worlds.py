"""What a seed of the fuzzer means: a module, a loss, an optimizer, batches, a budget, and changes between the steps."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, distributions, nn
from torch._subclasses.fake_tensor import is_fake
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

WIDTH, CLASSES, STEPS, HEADS = 16, 5, 20, 4
SCALES = {"loss": 1.0}  # a global of the loss, by name


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One step to try: all that is random in it is drawn from `seed`, the rest is said here."""

    seed: int
    blocks: tuple[str, ...]
    loss: str
    optimizer: str
    clip_norm: float | None
    budget: str
    batch: int
    steps: int = STEPS
    changes: tuple[tuple[int, str], ...] = ()

    def smaller(self) -> Iterator[Case]:
        """Yield cases with one thing less, the largest cuts first."""
        for number in range(len(self.changes)):
            yield replace(self, changes=self.changes[:number] + self.changes[number + 1 :])
        for number in range(len(self.blocks)):
            yield replace(self, blocks=self.blocks[:number] + self.blocks[number + 1 :])
        if self.steps > 1:
            last = max((step for step, _ in self.changes), default=-1) + 2
            yield from (replace(self, steps=steps) for steps in {last, self.steps - 1} if last <= steps < self.steps)
        if self.clip_norm is not None:
            yield replace(self, clip_norm=None)
        plainest = {"loss": "cross_entropy", "optimizer": "sgd", "budget": "100%"}
        for name, value in plainest.items():
            if getattr(self, name) != value:
                yield replace(self, **{name: value})


@dataclass(slots=True)
class World:
    """A model in training, and what its step takes from Python. Two worlds of one case are the same to the bit."""

    model: nn.Module
    loss: Callable[[nn.Module, Any], Tensor]
    optimizer: torch.optim.Optimizer | None
    clip_norm: float | None
    draws: torch.Generator
    size: int
    tensors: dict[str, Tensor] = field(default_factory=dict)
    autocast: bool = False
    dtype: torch.dtype = torch.float32

    def batch(self) -> tuple[Tensor, Tensor]:
        """Return the next batch: inputs and labels."""
        inputs = torch.randn(self.size, WIDTH, generator=self.draws).to(self.dtype)
        return inputs, torch.randint(0, CLASSES, (self.size,), generator=self.draws)


def case_of(seed: int) -> Case:
    """Return the case that a seed stands for."""
    draw = random.Random(seed)
    changes = sorted(
        (draw.randrange(1, STEPS), draw.choice([*CHANGES, *GLOBAL_CHANGES]))
        for _ in range(draw.choice((0, 1, 1, 2, 3)))
    )
    return Case(
        seed=seed,
        blocks=tuple(draw.choice(list(BLOCKS)) for _ in range(draw.randint(1, 5))),
        loss=draw.choice(list(LOSSES)),
        optimizer=draw.choice(list(OPTIMIZERS)),
        clip_norm=draw.choice((None, None, 0.1, 1.0)),
        budget=draw.choice(("100%", "95%", "85%", "75%")),
        batch=draw.choice((8, 64, 256)),
        changes=tuple(changes),
    )


def world_of(case: Case) -> World:
    """Build the world that a case begins with."""
    torch.manual_seed(case.seed)
    layers = [BLOCKS[name](case.seed + number) for number, name in enumerate(case.blocks)]
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), *layers, nn.Linear(WIDTH, CLASSES))
    tensors = {"weights": torch.rand(CLASSES), "teacher": torch.randn(WIDTH, CLASSES)}
    parameters = list(model.parameters())
    make = OPTIMIZERS[case.optimizer]
    return World(
        model=model,
        loss=LOSSES[case.loss](tensors),
        optimizer=None if make is None else make(parameters),
        clip_norm=case.clip_norm if make else None,
        draws=torch.Generator().manual_seed(case.seed),
        size=case.batch,
        tensors=tensors,
    )


class Function(nn.Module):
    """A block that is a function of its inputs and of what it holds."""

    def __init__(self, function: Callable[..., Tensor], **held: Any) -> None:
        super().__init__()
        self.function = function
        for name, value in held.items():
            if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
                self.register_buffer(name, value)
            else:
                setattr(self, name, value)

    def forward(self, inputs: Tensor) -> Tensor:
        """Apply it."""
        return self.function(self, inputs)


class Tanh(torch.autograd.Function):
    """A custom function with a backward of its own."""

    @staticmethod
    def forward(context: Any, inputs: Tensor) -> Tensor:
        """Return tanh of the inputs."""
        context.save_for_backward(inputs.tanh())
        return inputs.tanh()

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the gradient of tanh."""
        (results,) = context.saved_tensors
        return gradients[0] * (1 - results * results)


def _attention(block: Any, inputs: Tensor) -> Tensor:
    query, key, value = block.inner(inputs).view(1, -1, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
    mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    return mixed.transpose(1, 2).reshape(-1, WIDTH)


def _moving_mean(block: Any, inputs: Tensor) -> Tensor:
    if block.training:
        block.mean.mul_(0.9).add_(inputs.detach().mean(0), alpha=0.1)
    return inputs - block.mean


def _counted(block: Any, inputs: Tensor) -> Tensor:
    block.calls += 1
    return inputs * (1 + block.calls / 10)


def _drawn_by_python(block: Any, inputs: Tensor) -> Tensor:
    return inputs * (0.5 + block.generator.random())


def _drawn_by_numpy(block: Any, inputs: Tensor) -> Tensor:
    return inputs + torch.from_numpy(block.generator.standard_normal(WIDTH)).to(inputs)


def _drawn_by_torch(block: Any, inputs: Tensor) -> Tensor:
    return inputs + torch.randn(WIDTH, generator=block.generator).to(inputs)


def _images(block: Any, inputs: Tensor) -> Tensor:
    return block.inner(inputs.view(-1, 1, 4, 4)).flatten(1)


def _half(_block: Any, inputs: Tensor) -> Tensor:
    left, right = inputs.chunk(2, 1)
    return torch.cat([left * right.sigmoid(), right], 1)


def _spectrum(_block: Any, inputs: Tensor) -> Tensor:
    return torch.fft.irfft(torch.fft.rfft(inputs) * 0.5, n=WIDTH)


def _sorted(_block: Any, inputs: Tensor) -> Tensor:
    values, places = inputs.sort(1)
    return values.gather(1, places) + inputs.cumsum(1) / WIDTH


def _in_place(_block: Any, inputs: Tensor) -> Tensor:
    results = inputs * 2
    results.add_(1).clamp_(min=-3)
    results[:, ::2].mul_(0.5)
    return results


def _asks(_block: Any, inputs: Tensor) -> Tensor:
    """Libraries ask whether they are traced, and then compute in another way."""
    is_traced = is_fake(inputs) or torch.compiler.is_compiling() or torch.jit.is_tracing()
    return inputs.exp().log() if is_traced else inputs * 1.0


def _written_constant(_block: Any, inputs: Tensor) -> Tensor:
    scale = torch.tensor(float(WIDTH))
    scale.sqrt_().add_(inputs.detach().float().abs().mean())
    return inputs / scale.to(inputs)


def _value_read(block: Any, inputs: Tensor) -> Tensor:
    return inputs * block.plain.table.tolist()[1] + float(block.plain.table.numpy()[0])


def _values_listed(block: Any, inputs: Tensor) -> Tensor:
    return inputs + torch.tensor([block.plain.one, 2.0, block.plain.one]).to(inputs).sum()


def _value_asked(block: Any, inputs: Tensor) -> Tensor:
    return inputs * 2 if block.plain.one > 1.5 else inputs * 3


def _sizes_numbered(block: Any, inputs: Tensor) -> Tensor:
    number = block.sizes.setdefault(len(inputs), len(block.sizes))
    return inputs + block.inner.weight[number % 4].to(inputs)


def _noted(block: Any, inputs: Tensor) -> Tensor:
    block.seen, block.largest = tuple(inputs.shape), max(block.largest, len(inputs))
    return inputs / block.largest


def _draw_unused(block: Any, inputs: Tensor) -> Tensor:
    torch.rand(3)
    return functional.dropout(inputs, 0.2, block.training)


def _draw_into_slice(_block: Any, inputs: Tensor) -> Tensor:
    noise = torch.zeros_like(inputs)
    noise[:, :4].normal_()
    noise[:, 4:8].bernoulli_(0.3)
    return inputs + noise * 0.1


def _part_unused(block: Any, inputs: Tensor) -> Tensor:
    first, _ = block.inner(inputs).chunk(2, 1)
    block.other(inputs)
    return inputs + first


def _copied_then_written(_block: Any, inputs: Tensor) -> Tensor:
    results = inputs * 2
    kept = results[:, :4].clone()
    results[:, :4] = results[:, 4:8]
    results[:, 4:8] = kept
    return results


def _statistics_read(block: Any, inputs: Tensor) -> Tensor:
    normed = block.norm(inputs.to(block.norm.weight))
    return normed + block.norm.running_mean * 0.1


class Cached(nn.Module):
    """A block with a property that is computed once, and that reads what the object holds."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.gain = nn.Linear(WIDTH, WIDTH), 1.5

    @cached_property
    def scale(self) -> float:
        """A number that is made of others."""
        return self.gain * len(vars(self)["_parameters"]) + 2.0

    def forward(self, inputs: Tensor) -> Tensor:
        """Apply it."""
        return self.inner(inputs) * self.scale


def _curved(block: Any, inputs: Tensor) -> Tensor:
    curvature = torch.func.vmap(torch.func.hessian(lambda row: block.inner(row).tanh().sum()))(inputs[:4])
    return inputs + 0.01 * curvature.diagonal(dim1=-2, dim2=-1).mean()


def _plain() -> SimpleNamespace:
    """Return an object with tensors that are neither parameters nor buffers."""
    return SimpleNamespace(table=torch.linspace(1, 2, 4), one=torch.tensor(1.0))


BLOCKS: dict[str, Callable[[int], nn.Module]] = {
    "linear": lambda _: nn.Linear(WIDTH, WIDTH),
    "no_bias": lambda _: nn.Linear(WIDTH, WIDTH, bias=False),
    "gelu": lambda _: nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)),
    "relu": lambda _: nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.ReLU(inplace=True), nn.Linear(4 * WIDTH, WIDTH)),
    "dropout": lambda _: nn.Dropout(0.3),
    "layer_norm": lambda _: nn.LayerNorm(WIDTH),
    "group_norm": lambda _: nn.GroupNorm(4, WIDTH),
    "batch_norm": lambda _: nn.BatchNorm1d(WIDTH),
    "cumulative_batch_norm": lambda _: nn.BatchNorm1d(WIDTH, momentum=None),
    "residual": lambda _: Function(lambda block, x: x + block.inner(x).tanh(), inner=nn.Linear(WIDTH, WIDTH)),
    "attention": lambda _: Function(_attention, inner=nn.Linear(WIDTH, 3 * WIDTH)),
    "convolution": lambda _: Function(_images, inner=nn.Conv2d(1, 1, 3, padding=1)),
    "convolution_norm": lambda _: Function(
        _images, inner=nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 1, 1))
    ),
    "checkpoint": lambda _: Function(
        lambda block, x: checkpoint(block.inner, x, use_reentrant=False),  # pyright: ignore[reportReturnType]
        inner=nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Dropout(0.1), nn.Linear(4 * WIDTH, WIDTH)),
    ),
    "reentrant_checkpoint": lambda _: Function(
        lambda block, x: checkpoint(block.inner, x, use_reentrant=True),  # pyright: ignore[reportReturnType]
        inner=nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()),
    ),
    "temperature": lambda _: Function(lambda block, x: x / block.temperature, temperature=1.5),
    "settings": lambda _: Function(lambda block, x: x * block.settings["gain"], settings={"gain": 1.25}),
    "counter": lambda _: Function(_counted, calls=0),
    "moving_mean": lambda _: Function(_moving_mean, mean=torch.zeros(WIDTH)),
    "noise": lambda _: Function(lambda block, x: x + torch.randn_like(x) * 0.1 if block.training else x),
    "python_draw": lambda seed: Function(_drawn_by_python, generator=random.Random(seed)),
    "numpy_draw": lambda seed: Function(_drawn_by_numpy, generator=np.random.default_rng(seed)),
    "generator_draw": lambda seed: Function(_drawn_by_torch, generator=torch.Generator().manual_seed(seed)),
    "module_draw": lambda _: Function(lambda _block, x: x * (0.5 + random.random())),
    "custom": lambda _: Function(lambda _block, x: Tanh.apply(x)),  # pyright: ignore[reportReturnType]
    "recurrent": lambda _: Function(lambda block, x: block.inner(x[None])[0][0], inner=nn.GRU(WIDTH, WIDTH)),
    "tied": lambda _: Function(
        lambda block, x: functional.linear(block.inner(x).tanh(), block.inner.weight.t()), inner=nn.Linear(WIDTH, WIDTH)
    ),
    "frozen": lambda _: nn.Linear(WIDTH, WIDTH).requires_grad_(False),
    "weight_norm": lambda _: nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)),
    "half": lambda _: Function(_half),
    "spectrum": lambda _: Function(_spectrum),
    "sorted": lambda _: Function(_sorted),
    "in_place": lambda _: Function(_in_place),
    "bilinear": lambda _: Function(
        lambda block, x: block.inner(x.to(block.inner.weight), x.to(block.inner.weight)),
        inner=nn.Bilinear(WIDTH, WIDTH, WIDTH),
    ),
    "asks": lambda _: Function(_asks),
    "written_constant": lambda _: Function(_written_constant),
    "hessian": lambda _: Function(_curved, inner=nn.Linear(WIDTH, 2)),
    "value_read": lambda _: Function(_value_read, plain=_plain()),
    "values_listed": lambda _: Function(_values_listed, plain=_plain()),
    "value_asked": lambda _: Function(_value_asked, plain=_plain()),
    "sizes_numbered": lambda _: Function(_sizes_numbered, inner=nn.Embedding(4, WIDTH), sizes={}),
    "noted": lambda _: Function(_noted, largest=1),
    "draw_unused": lambda _: Function(_draw_unused),
    "draw_into_slice": lambda _: Function(_draw_into_slice),
    "part_unused": lambda _: Function(_part_unused, inner=nn.Linear(WIDTH, 2 * WIDTH), other=nn.Linear(WIDTH, WIDTH)),
    "copied_then_written": lambda _: Function(_copied_then_written),
    "statistics_read": lambda _: Function(_statistics_read, norm=nn.BatchNorm1d(WIDTH)),
    "cached": lambda _: Cached(),
    "by_value": lambda _: Function(lambda _block, x: x * 2 if bool(x.sum() > 0) else x * 3),
    "embedding": lambda _: Function(
        lambda block, x: block.inner(x.abs().mul(3).long().clamp(max=9)).sum(1), inner=nn.Embedding(10, WIDTH)
    ),
}
"""Makers of blocks from and to `[batch, WIDTH]`, by name; each is given a seed for generators of its own."""

NO_GRAPH = frozenset({"by_value", "counter", "python_draw", "numpy_draw", "module_draw", "own_backward"})
"""Blocks and losses whose steps are no graphs, and run under `memfit.checkpoint`."""


def _with_weights(tensors: dict[str, Tensor]) -> Callable[[nn.Module, Any], Tensor]:
    return lambda model, batch: functional.cross_entropy(model(batch[0]).float(), batch[1], weight=tensors["weights"])


def _with_teacher(tensors: dict[str, Tensor]) -> Callable[[nn.Module, Any], Tensor]:
    return lambda model, batch: functional.mse_loss(model(batch[0]).float(), batch[0].float() @ tensors["teacher"])


def _in_autocast(model: nn.Module, batch: Any) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        outputs = model(batch[0])
    return functional.cross_entropy(outputs.float(), batch[1])


def _likelihood(model: nn.Module, batch: Any) -> Tensor:
    outputs = model(batch[0]).float()
    chosen = distributions.Categorical(logits=outputs)
    spread = distributions.Normal(outputs.mean(1), functional.softplus(outputs[:, 0]) + 0.1)
    return -chosen.log_prob(batch[1]).mean() - 0.01 * spread.rsample().mean()


def _own_backward(model: nn.Module, batch: Any) -> Tensor:
    outputs = model(batch[0]).float()
    outputs.square().mean().backward(retain_graph=True)
    return functional.cross_entropy(outputs, batch[1])


LOSSES: dict[str, Callable[[dict[str, Tensor]], Callable[[nn.Module, Any], Tensor]]] = {
    "cross_entropy": lambda _: lambda model, batch: functional.cross_entropy(model(batch[0]).float(), batch[1]),
    "scaled": lambda _: (
        lambda model, batch: SCALES["loss"] * functional.cross_entropy(model(batch[0]).float(), batch[1])
    ),
    "weights": _with_weights,
    "teacher": _with_teacher,
    "autocast": lambda _: _in_autocast,
    "distribution": lambda _: _likelihood,
    "own_backward": lambda _: _own_backward,
    "penalty": lambda _: (
        lambda model, batch: (
            functional.cross_entropy(model(batch[0]).float(), batch[1])
            + 0.01 * sum(parameter.float().square().sum() for parameter in model.parameters())
        )
    ),
}
"""Makers of losses, by name; each is given the world's tensors."""

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer] | None] = {
    "none": None,
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    "foreach_adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, foreach=True),
    "fused_adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, fused=True),
    "amsgrad": lambda parameters: torch.optim.Adam(parameters, lr=0.01, amsgrad=True),
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, lr=0.01, momentum=0.5),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.05),
    "nadam": lambda parameters: torch.optim.NAdam(parameters, lr=0.01),
    "two_groups": lambda parameters: torch.optim.AdamW(
        [{"params": parameters[:1]}, {"params": parameters[1:], "lr": 0.002}], lr=0.01
    ),
    "all_but_one": lambda parameters: torch.optim.SGD(parameters[:-1] or parameters, lr=0.05),
}
"""Makers of optimizers of parameters, by name; `none` leaves the gradients to the user."""


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
