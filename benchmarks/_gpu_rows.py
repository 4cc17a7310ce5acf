"""What `make gpu` runs, the most valuable first: rows, and the children that measure them, each one model in a fork."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from _gpu_doors import CASES, Case, measure_case
from _gpu_hardware import measure_hardware
from _gpu_ways import TORCHS, USUAL, compare

Measure = Callable[..., Iterator[dict[str, Any]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Child:
    """One measurement, in a fork of the process that has imported everything.

    Attributes:
        name: in results, and in lines on the terminal.
        rows: that it answers; the key of the row's part of the answer, empty for the whole.
        seconds: that it should take on the GPU.
        measure: yields what is known after each stage; gets `arguments`.
        arguments: of `measure`.
        rehearsal: what replaces them where nothing is computed.
        fails: why the rehearsal fails, if it does: something that memfit does wrong. It is an error if it does not.
    """

    name: str
    rows: dict[int, str]
    seconds: float
    measure: Measure
    arguments: dict[str, Any] = field(default_factory=dict[str, Any])
    rehearsal: dict[str, Any] = field(default_factory=dict[str, Any])
    fails: str = ""


ROWS = {
    0: "clocks, rates of copies alone and together, ceilings of matrix products",
    1: "every door, ten steps, bytes reserved within the budget",
    2: "GPT-2 medium, bf16, fused AdamW",
    3: "the same under a hard cap, 50 steps",
    4: "a Llama of 1B, 4,096 tokens, bf16",
    5: "ResNet-50, batch 256, bf16, channels last",
    12: "ViT-L, bf16",
}
"""The title of each row, by its number in the order of value."""

_GPT_MEDIUM = {"batch": 8, "tokens": 1024, "layers": 24, "width": 1024, "autocast": "bf16"}
_FEW = {"turns": 2}  # device times mean nothing in a rehearsal


def _doors(row: int, cases: tuple[Case, ...], seconds: float) -> Iterator[Child]:
    for case in cases:
        yield Child(
            name=case.name,
            rows={row: ""},
            seconds=seconds,
            measure=measure_case,
            arguments={"case": case},
            rehearsal={"rehearsal": True},
        )


CHILDREN: tuple[Child, ...] = (
    Child(
        name="hardware",
        rows={0: ""},
        seconds=15,
        measure=measure_hardware,
        arguments={"copied_bytes": 1 << 30, "side": 8192},
        rehearsal={"copied_bytes": 1 << 26},
    ),
    *_doors(1, CASES, 2.5),
    Child(
        name="gpt2-medium",
        rows={2: "", 3: "hard"},
        seconds=55,
        measure=compare,
        arguments={"seconds": 55, "model": "gpt2", "options": _GPT_MEDIUM, "asks": USUAL, "hard": True},
        rehearsal={**_FEW, "hard_steps": 10},
    ),
    Child(
        name="llama-1b",
        rows={4: ""},
        seconds=45,
        measure=compare,
        arguments={"seconds": 45, "model": "llama", "options": {"batch": 2, "tokens": 4096}, "asks": USUAL},
        rehearsal=_FEW,
    ),
    Child(
        name="resnet50",
        rows={5: ""},
        seconds=40,
        measure=compare,
        arguments={
            "seconds": 40,
            "model": "resnet50",
            "options": {"batch": 256, "channels_last": True, "autocast": "bf16"},
            "asks": (*USUAL, TORCHS),
        },
        rehearsal=_FEW,
    ),
    Child(
        name="vit-large",
        rows={12: ""},
        seconds=35,
        measure=compare,
        arguments={"seconds": 35, "model": "vit", "options": {"batch": 64}, "asks": USUAL},
        rehearsal=_FEW,
    ),
)
"""In the order in which they run."""
