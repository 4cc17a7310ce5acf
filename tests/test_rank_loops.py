"""A budget under torchrun: cases of `benchmarks/rank_loops.py`, each beside its stock loop on the same ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))  # the scripts import one another as scripts do

import rank_loops
from _rank_cases import CASES, OWN

FAST = [
    "DDP | own | all | checkpoint",
    "FSDP2 | own | all | checkpoint",
    "TP | own | accumulation | checkpoint",
    "DDP, small buckets | own | accumulation | compile",
]
OVER = {  # in one or two steps, by what is said in docs/ranks.md; their bits are stock's
    "FSDP2 | Trainer | gradient_checkpointing | auto",
    "FSDP2 | own | accumulation | eager",
    *(case.name for case in CASES if case.wrapper == "torchtitan, TP"),  # equal steps of the bare loop may differ by 6%
}
BROKEN = {  # in PyTorch's own loop, on torch 2.13
    "torchtitan, TP, compiled | own | plain | checkpoint",
}
OTHER_SUMS = {  # on four ranks, in the last bits, by what is said there, too
    "DDP, compiled inside | own | plain | checkpoint",
    "DDP, compiled outside | own | plain | checkpoint",
}
TOGETHER = 5  # cases that run in one test, so that each fifth of the slow tests has some
LIBRARIES = {"Accelerate": "accelerate", "Lightning": "pytorch_lightning", "Trainer": "transformers", "TRL": "trl"}


def _numbers(names: list[str]) -> list[int]:
    places = {case.name: number for number, case in enumerate(CASES)}
    return [places[name] for name in names]


def _failed(numbers: list[int], count: int) -> dict[str, dict[str, Any]]:
    """Return the cases that did not hold, and not when they ran once more: gloo's threads free late now and then.

    With more ranks than cores they do so often, so that bits alone are compared there.
    """
    has_cores = count <= (os.cpu_count() or 1)
    for _ in range(2):
        rows = {number: rank_loops.summary(CASES[number], on) for number, on in _on_ranks(numbers, count)}
        over = {number for number in rows if CASES[number].name in OVER or not has_cores}
        rows = {number: row | {"over": 0} if number in over else row for number, row in rows.items()}
        summed = {number for number in rows if CASES[number].name in OTHER_SUMS and count > 2}
        rows = {number: row | {"same_bits": True} if number in summed else row for number, row in rows.items()}
        numbers = [number for number, row in rows.items() if not rank_loops.is_held(row)]
        if not numbers:
            break
    return {CASES[number].name: rows[number] for number in numbers}


def _on_ranks(numbers: list[int], count: int) -> Any:
    return rank_loops.on_ranks(numbers, count)


def test_loops_of_ones_own_on_two_ranks_keep_their_bits_and_budgets() -> None:
    assert _failed(_numbers(FAST), 2) == {}


def _groups() -> dict[str, tuple[int, str, list[int]]]:
    """Return the cases that run together, by a name: ranks, the loop, and the numbers of a few cases of one door."""
    found: dict[tuple[int, str, str, str], list[int]] = {}
    for number, case in enumerate(CASES):
        for count in case.ranks if case.name not in BROKEN else ():
            found.setdefault((count, case.loop, case.wrapper.partition(",")[0], case.door), []).append(number)
    parts = ((group, part) for group, numbers in found.items() for part in enumerate(batched(numbers, TOGETHER)))
    return {"-".join(map(str, (*group, n))): (group[0], group[1], numbers) for group, (n, numbers) in parts}


def batched(numbers: list[int], most: int) -> list[list[int]]:
    return [numbers[first : first + most] for first in range(0, len(numbers), most)]


@pytest.mark.slow
@pytest.mark.parametrize(("count", "loop", "numbers"), _groups().values(), ids=_groups())
def test_each_wrapper_in_each_loop_with_each_habit(count: int, loop: str, numbers: list[int]) -> None:
    if loop in LIBRARIES and not (find_spec(LIBRARIES[loop]) and find_spec("peft")):
        pytest.skip(f"{loop} is not installed")
    assert _failed(numbers, count) == {}


def test_there_are_enough_cases_each_with_a_name_of_its_own() -> None:
    assert {case.name for case in CASES} >= OVER | OTHER_SUMS | BROKEN
    assert len({case.name for case in CASES}) == len(CASES) >= 60
    assert {case.loop for case in CASES} == {OWN, "fit", *LIBRARIES}


@pytest.mark.slow
def test_buckets_of_ddp_count_that_are_older_than_the_recorder() -> None:
    late, early = (_most_bytes(program) for program in (_LATE, _EARLY + _LATE))
    assert abs(late - early) <= 1 << 10  # a generator's state, say


_EARLY = """
from memfit.system.recorder import allocated_bytes
allocated_bytes("cpu")
"""
_LATE = """
import torch, torch.distributed as dist
import memfit
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
net = torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Linear(256, 64)) for _ in range(3)])
model = torch.nn.parallel.DistributedDataParallel(net, find_unused_parameters=True)
handle = memfit.checkpoint(model, "1GiB")
for _ in range(2):
    model(torch.ones(8, 64)).sum().backward()
handle.end_step()
print(handle.report().most_bytes)
handle.close()
dist.destroy_process_group()
"""


def _most_bytes(program: str) -> int:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)
