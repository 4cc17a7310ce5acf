"""What a seed of the fuzzer means: a module, a loss, an optimizer, batches, a budget, and changes between the steps."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from _fuzz_blocks import BLOCKS, WIDTH
from _fuzz_changes import CHANGES, GLOBAL_CHANGES
from _fuzz_worlds import CLASSES, LOSSES, OPTIMIZERS, World
from torch import nn

STEPS = 20


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
