"""What a step of the fuzzer leaves, and what differs between two."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from _fuzz_cases import Case
from _fuzz_worlds import World


@contextmanager
def seeded(case: Case, number: int) -> Iterator[None]:
    """Give the generators that the process shares the state that they have at a step of a case."""
    seed = (1_000 * case.seed + number + 1) % (1 << 32)
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    yield


def observed(case: Case, number: int, world: World, run: Callable[[], torch.Tensor]) -> dict[str, Any]:
    """Run a step and return what it left: loss, parameters, buffers, gradients, optimizer, generators; by name."""
    with seeded(case, number), torch.autocast("cpu", torch.bfloat16, enabled=world.autocast):
        loss = run()
        if world.autocast:
            loss = run()  # what autocast casts is kept until its block ends
    model, left = world.model, dict[str, Any](loss=loss.detach())
    left |= {f"parameter {name}": each.detach() for name, each in model.named_parameters()}
    left |= {f"buffer {name}": each for name, each in model.named_buffers()}
    left |= {f"gradient of {name}": each.grad for name, each in model.named_parameters()}
    if world.optimizer is not None:
        groups = world.optimizer.param_groups
        members = [each for group in groups for each in group["params"]]
        for place, member in enumerate(members):
            for name, value in world.optimizer.state.get(member, {}).items():
                left[f"optimizer's {name} of parameter {place}"] = value
    left |= {"torch's generator": torch.get_rng_state(), "random's": random.getstate()}
    left["numpy's"] = str(np.random.get_state())
    for name, block in model.named_modules():
        left |= {f"{name}.{key}": _state(value) for key, value in vars(block).items() if key in _KEPT}
    return left


_KEPT = ("generator", "calls", "sizes", "seen", "largest", "scale")


def _state(value: Any) -> Any:
    if isinstance(value, torch.Generator):
        return value.get_state()
    if isinstance(value, random.Random):
        return value.getstate()
    return str(value.bit_generator.state) if isinstance(value, np.random.Generator) else value


def first_difference(wanted: dict[str, Any], got: dict[str, Any]) -> str:
    """Return what differs first between two observations; empty if nothing does."""
    if wanted.keys() != got.keys():
        return f"only one has {min(wanted.keys() ^ got.keys())}"
    return next((name for name, value in wanted.items() if not _is_same(value, got[name])), "")


def _is_same(one: Any, other: Any) -> bool:
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return type(one) is type(other) and one == other
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    first, second = (each.detach().contiguous().reshape(-1).view(torch.uint8) for each in (one, other))
    return torch.equal(first, second)
