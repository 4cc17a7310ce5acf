"""A claim of a paper, its verdict by stored results, and code that the claims of several papers share.

A row is a `Claim`. Its command is a script of `benchmarks/`, or a test; the paper's own figure is typed in the file of
the paper, from its text, and ours is read from what the script stored: a `Measure` takes `Results`, and returns a
`Found`. It compares our figures with the paper's, so that a figure that changes cannot leave a verdict behind.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

CHEN, FENG, NOTE, SEKIYAMA, DQN = "Chen 2016", "Feng 2018", "MXNet note", "Sekiyama 2018", "DQN 2020"
PLANNERS, PACKERS = "memfit/papers/planners", "memfit/papers/packers"
ON_A_CPU = "measured on a CPU, at sizes that fit it"
NO_GPU_RUN = "no run of a GPU is stored"
MB = 1e6
GIB = 1 << 30
MEMONGER, TFLMS = "sublinear", "tflms"
SUPERNEURONS = ("superneurons_swap", "superneurons_recompute", "superneurons_both")
BASELINES = (MEMONGER, TFLMS, *SUPERNEURONS)
"""The curves of `offloading_planners.py` that are the baselines of the paper on `dqn`."""
TITAN, H100 = "gtx1080ti", "h100"
CNNS = ("alexnet", "googlenet", "resnet50", "inception_resnet_v2")  # of Sekiyama et al.
ON_CPU = {"googlenet": "bninception"}  # what `arena.py` measured in its place

Payload = dict[str, Any]
Results = Callable[[str], dict[str, Payload]]
"""What a script stored, by workload or by the script's own name, given the script's name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What stored results say of a claim: the figures as text, and whether the claim holds by them."""

    text: str
    holds: bool


Measure = Callable[[Results], Found]


class Verdict(enum.Enum):
    """What became of a claim."""

    REPRODUCED = "reproduced"
    OTHER = "reproduced, other figure"
    NOT = "not reproduced"
    NOTHING = "nothing to measure here"


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A claim of a paper.

    Attributes:
        row: its short name.
        paper: whose it is.
        claim: what the paper says, in one sentence, after its place in the paper.
        module: the file of memfit/ where it stands; empty where there is none.
        command: what shows it: a script under benchmarks/ with its arguments, or a test; empty where nothing does.
        against: the reference: the paper's published figure, or the value that the test compares with.
        measure: reads the figure from what the script stored; None for a test.
        why: the reason of any verdict but `reproduced`.
    """

    row: str
    paper: str
    claim: str
    module: str = ""
    command: tuple[str, ...] = ()
    against: str
    measure: Measure | None = None
    verdict: Verdict = Verdict.REPRODUCED
    why: str = ""

    @property
    def is_test(self) -> bool:
        """Whether a test shows it."""
        return bool(self.command) and "::" in self.command[0]


def captured(*models: str) -> tuple[str, ...]:
    """Return the command that captures and packs some of the models anew."""
    return "benchmarks/arena_captured.py", *models, "--again"


def arena(*models: str) -> tuple[str, ...]:
    """Return the command that measures some of the models in the arena anew."""
    return "benchmarks/arena.py", *(ON_CPU.get(model, model) for model in models), "--again"


def planned(*workloads: str, machine: str = TITAN, more: tuple[str, ...] = ()) -> tuple[str, ...]:
    """Return the command that plans some workloads anew with the paper's planners, and others."""
    curves = ("dqn", *BASELINES, *more)
    return "benchmarks/offloading_planners.py", *workloads, "--machines", machine, "--planners", *curves, "--again"


def tested(file: str, name: str) -> tuple[str, ...]:
    """Return a test as a command."""
    return (f"tests/{file}.py::{name}",)


def only(results: Results, script: str) -> Payload:
    """Return what a script stored as one result."""
    (payload,) = results(script).values()
    return payload


def captured_steps(results: Results, models: Iterable[str], kind: str) -> list[tuple[str, str, Payload]]:
    """Return (model, step, result) of the captured steps whose name begins with `kind`."""
    stored = results("arena_captured")
    return [
        (model, step, each)
        for model in models
        for step, each in stored[model]["results"].items()
        if step.startswith(kind)
    ]


def measured_steps(
    results: Results, models: Iterable[str], kind: str, keys: str = "keyed"
) -> list[tuple[str, str, Payload]]:
    """Return (model, step, result) of the measured steps whose name begins with `kind`; of sequences by `keys`."""
    stored = results("arena")
    steps = [
        (model, step, each.get(keys, each))
        for model in models
        for step, each in stored.get(ON_CPU.get(model, model), {"results": {}})["results"].items()
        if step.startswith(kind)
    ]
    return [(model, step, each) for model, step, each in steps if "error" not in each]


def span(values: Sequence[float], form: str) -> str:
    """Return the least and the largest value as text; one of them where they read alike."""
    low, high = (f"{value:{form}}" for value in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"
