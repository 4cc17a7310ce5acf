"""Blocks that change Python state beside their own attributes, and read it: a second forward pass must not see that."""

from __future__ import annotations

import array
import collections
import itertools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from checkpoint_models import Mlp

calls, numbers, counted = 0, {"calls": [0]}, itertools.count()


class Holder:
    def __init__(self) -> None:
        self.calls = 0


class Slotted:
    __slots__ = ("calls",)

    def __init__(self) -> None:
        self.calls = 0


class Reaching(Mlp):
    """Multiplies its input by what `factor` says, which it calls once."""

    of_class = 0

    def __init__(self, factor: Callable[[Reaching], float]) -> None:
        super().__init__(64)
        self.factor = factor
        self.array, self.window, self.nested = np.zeros(1), collections.deque([0], maxlen=3), {"a": {"b": [0]}}
        self.grown, self.objects, self.shorts = bytearray(), np.array([0, None]), array.array("h")
        self.range, self.cycle = iter(range(999)), itertools.cycle([1, 2, 3])
        self.zipped, self.product = zip([1, 2, 3] * 99, strict=True), itertools.product(range(9), range(9))
        self.holder, self.slotted, self.log = Holder(), Slotted(), list[float]()
        self.random, self.numpy = random.Random(3), np.random.default_rng(3)
        self.own, self.rates, self.counted = torch.Generator().manual_seed(3), iter(list(range(999))), itertools.count()
        self.stream, self.seen = (number for number in range(999)), set[int]()
        ticks = 0

        def tick() -> int:
            nonlocal ticks
            ticks += 1
            return ticks

        self.tick = tick

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * (1 + 0.01 * self.factor(self)))


def of_array(block: Reaching) -> float:
    block.array += 1
    return float(block.array[0])


def of_buffers(block: Reaching) -> float:
    block.grown += b"x"
    block.objects[0] = block.objects[0] + 1
    block.shorts.append(1)
    return len(block.grown) + block.objects[0] + sum(block.shorts)


def of_window(block: Reaching) -> float:
    block.window.append(block.window[-1] + 1)
    return float(sum(block.window))


def of_nested(block: Reaching) -> float:
    block.nested["a"]["b"][0] += 1
    return block.nested["a"]["b"][0]


def of_log(block: Reaching) -> float:
    block.log.append(1.0)
    return sum(block.log)


def of_set(block: Reaching) -> float:
    block.seen.add(len(block.seen))
    return len(block.seen)


def of_other_object(block: Reaching) -> float:
    block.holder.calls += 1
    block.slotted.calls += 2
    return block.holder.calls + block.slotted.calls


def of_class(_block: Reaching) -> float:
    Reaching.of_class += 1
    return Reaching.of_class


def of_globals(_block: Reaching) -> float:
    global calls
    calls += 1
    numbers["calls"][0] += 1
    return calls + numbers["calls"][0]


def of_closure(block: Reaching) -> float:
    return block.tick()


def of_sequence(block: Reaching) -> float:
    return next(block.rates)


def of_python(block: Reaching) -> float:
    return block.random.random() + random.random()


def of_numpy(block: Reaching) -> float:
    return float(block.numpy.random() + np.random.rand())


def of_own_generator(block: Reaching) -> float:
    return float(torch.rand((), generator=block.own))


HELD = (
    *(of_array, of_buffers, of_window, of_nested, of_log, of_set, of_other_object, of_class, of_globals, of_closure),
    *(of_sequence, of_python, of_numpy, of_own_generator),
)


def of_count(block: Reaching) -> float:
    return next(block.counted)


def of_global_count(_block: Reaching) -> float:
    return next(counted)


def of_stream(block: Reaching) -> float:
    return next(block.stream)


def of_range(block: Reaching) -> float:
    return next(block.range)


def of_cycle(block: Reaching) -> float:
    return next(block.cycle)


def of_zip(block: Reaching) -> float:
    return next(block.zipped)[0]


def of_product(block: Reaching) -> float:
    return next(block.product)[0]


REFUSED: dict[Any, str] = {
    of_range: "range",
    of_cycle: "cycle",
    of_zip: "zipped",
    of_product: "product",
    of_count: "counted",
    of_global_count: "counted",
    of_stream: "stream",
}


def begin() -> None:
    """Set what belongs to no block to the beginning."""
    global calls
    calls, numbers["calls"][0], Reaching.of_class = 0, 0, 0
    random.seed(1)
    np.random.seed(1)
