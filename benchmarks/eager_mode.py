"""Eager mode: its own cost when nothing has to go, and loops that never repeat at 60% of their peak.

The cost: steps of three workloads, bare, under a dispatch mode that does nothing, and under `memfit.eager` with memory
to spare, in turns; the difference to the bare step, divided by the operators that it calls.

The loops: a ResNet-110 of which blocks are skipped at random (stochastic depth, as dqn2020 runs it), a mixture of
experts, GPT-2 over sentences of all lengths, and a recursive network over random trees. Each trains with and without a
budget from the same seed; the budget is 60% of what the longest, deepest step takes bare, residents included.

    python benchmarks/eager_mode.py              # all, stored as they come: half an hour
    python benchmarks/eager_mode.py lstm trees   # some
    python benchmarks/eager_mode.py --steps 20   # shorter loops, nothing stored
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from _process import answer_if_child, in_fresh_process
from _record import load, result_path, store
from torch import Tensor, nn

import memfit
from memfit.runtime.eager.eager import bytes_of_tensors
from memfit.system.recorder import allocated_bytes, record
from memfit.torch_private import TorchDispatchMode
from memfit.workloads import build

CPU = torch.device("cpu")
COSTS: dict[str, dict[str, Any]] = {  # small, so that the operators' own work does not hide what a mode adds to it
    "resnet50": {"batch": 2, "size": 32},
    "gpt2": {"batch": 1, "tokens": 16, "width": 64, "vocabulary": 500},
    "lstm": {"batch": 2, "width": 32},
}
ROUNDS = 15
SHARE, STEPS = 0.6, 300
CHILD_SECONDS = 3600


class Empty(TorchDispatchMode):
    """Does nothing, and counts."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        return func(*args, **(kwargs or {}))


def cost(workload: str) -> dict[str, Any]:
    """Return microseconds an operator, under an empty mode and under eager mode."""
    torch.set_num_threads(1)
    step = build(workload, **COSTS[workload])
    empty = Empty()
    seconds: dict[str, list[float]] = {"bare": [], "empty": [], "eager": []}
    blocks: dict[str, AbstractContextManager[Any]] = {
        "bare": nullcontext(),
        "empty": empty,
        "eager": memfit.eager(step.model, budget=1 << 40),
    }
    mode = blocks["eager"].__enter__()  # once: it may be entered only once, and first calls are not what is asked for
    for _ in range(3):
        step.run_eager(step.batch)
        step.model.zero_grad(set_to_none=True)
    for _ in range(ROUNDS):
        began = time.perf_counter()
        step.run_eager(step.batch)
        seconds["eager"].append(time.perf_counter() - began)
        step.model.zero_grad(set_to_none=True)
    mode.__exit__(None, None, None)
    for number in range(ROUNDS + 1):
        for name in ("bare", "empty"):
            with blocks[name]:
                empty.calls = 0
                began = time.perf_counter()
                step.run_eager(step.batch)
                took = time.perf_counter() - began
            step.model.zero_grad(set_to_none=True)
            seconds[name] += [took] if number else []
    with empty:
        empty.calls = 0
        step.run_eager(step.batch)
    medians = {name: statistics.median(found) for name, found in seconds.items()}
    return {
        "workload": workload,
        "options": COSTS[workload],
        "calls": empty.calls,
        "seconds": medians,
        "us_a_call": {name: 1e6 * (medians[name] - medians["bare"]) / empty.calls for name in ("empty", "eager")},
    }


class StochasticDepth(nn.Module):
    """ResNet-110 for CIFAR (He et al. 2015) with blocks that survive by chance (Huang et al. 2016, linear decay)."""

    def __init__(self, blocks: int = 18) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU())
        widths = [16] * blocks + [32] * blocks + [64] * blocks
        self.blocks = nn.ModuleList(
            _Block(before, width) for before, width in zip([16, *widths[:-1]], widths, strict=True)
        )
        self.head = nn.Linear(64, 10)
        self.is_whole = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for number, block in enumerate(self.blocks):
            survives = 1 - 0.5 * (number + 1) / len(self.blocks)
            x = block(x, runs=float(torch.rand(())) < survives or self.is_whole)
        return self.head(x.mean((2, 3)))


class _Block(nn.Module):
    def __init__(self, before: int, width: int) -> None:
        super().__init__()
        self.stride = 1 if before == width else 2
        self.inner = nn.Sequential(
            nn.Conv2d(before, width, 3, self.stride, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
        )

    def forward(self, x: Tensor, *, runs: bool) -> Tensor:
        skipped = x if self.stride == 1 else nn.functional.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, 0, x.shape[1]))
        return torch.relu(skipped + self.inner(x)) if runs else skipped


class Experts(nn.Module):
    """A transformer whose tokens go to the two experts that their gates prefer."""

    def __init__(self, width: int = 128, experts: int = 4, layers: int = 4) -> None:
        super().__init__()
        self.attention = nn.ModuleList(nn.MultiheadAttention(width, 4, batch_first=True) for _ in range(layers))
        self.gates = nn.ModuleList(nn.Linear(width, experts) for _ in range(layers))
        self.experts = nn.ModuleList(
            nn.ModuleList(
                nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
                for _ in range(experts)
            )
            for _ in range(layers)
        )

    def forward(self, x: Tensor) -> Tensor:
        for attention, gate, experts in zip(self.attention, self.gates, self.experts, strict=True):
            x = x + attention(x, x, x, need_weights=False)[0]
            flat = x.flatten(0, 1)
            weights, chosen = gate(flat).softmax(1).topk(2, 1)
            for number, expert in enumerate(experts):
                row, place = (chosen == number).nonzero(as_tuple=True)
                flat = flat.index_add(0, row, expert(flat[row]) * weights[row, place].unsqueeze(1))
            x = flat.view_as(x)
        return x


class Trees(nn.Module):
    """A tree LSTM over random binary trees (Tai et al. 2015)."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.leaf, self.join = nn.Linear(width, 2 * width), nn.Linear(2 * width, 5 * width)
        self.is_whole = False

    def forward(self, x: Tensor, depth: int = 7) -> tuple[Tensor, Tensor]:
        if depth == 0 or (depth < 5 and float(torch.rand(())) < 0.2 and not self.is_whole):
            hidden, cell = self.leaf(x).chunk(2, 1)
            return torch.tanh(hidden), cell
        (left, left_cell), (right, right_cell) = self(x, depth - 1), self(x.roll(1, 1), depth - 1)
        i, f, g, o, new = self.join(torch.cat([left, right], 1)).chunk(5, 1)
        cell = f.sigmoid() * left_cell + g.sigmoid() * right_cell + i.sigmoid() * new.tanh()
        return o.sigmoid() * cell.tanh(), cell


@dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """A model, and the loss of its step; `whole` is the loss of its largest step."""

    make: Callable[[], nn.Module]
    loss: Callable[[nn.Module], Tensor]
    whole: Callable[[nn.Module], Tensor]


def _images(model: nn.Module) -> Tensor:
    return nn.functional.cross_entropy(model(torch.randn(32, 3, 32, 32)), torch.randint(0, 10, (32,)))


def _whole(loss: Callable[[nn.Module], Tensor]) -> Callable[[nn.Module], Tensor]:
    def run(model: nn.Module) -> Tensor:
        model.is_whole = True  # pyright: ignore
        try:
            return loss(model)
        finally:
            model.is_whole = False  # pyright: ignore

    return run


def _sentence(model: nn.Module, tokens: int) -> Tensor:
    text = torch.randint(0, 5000, (4, tokens))
    return model(input_ids=text, labels=text).loss


def _trees(model: nn.Module) -> Tensor:
    return model(torch.randn(64, 128))[0].square().mean()


def _gpt2() -> nn.Module:
    return build("gpt2", layers=6, width=256, vocabulary=5000, tokens=216).model


LOOPS: dict[str, Loop] = {
    "stochastic depth": Loop(make=StochasticDepth, loss=_images, whole=_whole(_images)),
    "experts": Loop(
        make=Experts,
        loss=lambda model: model(torch.randn(8, int(torch.randint(64, 129, ())), 128)).square().mean(),
        whole=lambda model: model(torch.randn(8, 128, 128)).square().mean(),
    ),
    "sentences of 200 lengths": Loop(
        make=_gpt2,
        loss=lambda model: _sentence(model, int(torch.randint(16, 216, ()))),
        whole=lambda model: _sentence(model, 215),
    ),
    "trees": Loop(make=Trees, loss=_trees, whole=_whole(_trees)),
}


def train(loop: Loop, model: nn.Module, steps: int) -> Iterator[tuple[float, float]]:
    """Yield the loss and the seconds of each step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    torch.manual_seed(1)
    for _ in range(steps):
        began = time.perf_counter()
        loss = loop.loss(model)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item(), time.perf_counter() - began


def made(loop: Loop) -> nn.Module:
    """Return a loop's model, the same in every call."""
    torch.manual_seed(0)
    return loop.make()


def run_loop(name: str, steps: int) -> dict[str, Any]:
    """Train bare and within a budget; return bits, peaks, seconds."""
    loop = LOOPS[name]
    model = made(loop)
    allocated_bytes(CPU)
    loop.whole(model).backward()
    model.zero_grad(set_to_none=True)
    with record(CPU) as usage:
        loop.whole(model).backward()
    parameter_bytes = sum(parameter.nbytes for parameter in model.parameters())
    whole_bytes = 2 * parameter_bytes + usage.peak_bytes  # parameters and momenta; gradients are in the record
    model = made(loop)
    bare = list(train(loop, model, steps))
    expected = [parameter.detach().clone() for parameter in model.parameters()]
    del model
    gc.collect()
    before_bytes = bytes_of_tensors(CPU) - 0
    model = made(loop)
    budget_bytes = before_bytes + int(SHARE * whole_bytes)
    with memfit.eager(model, budget=budget_bytes) as block:
        within = list(train(loop, model, steps))
    report = block.report()
    same = [a for a, _ in bare] == [a for a, _ in within]
    same = same and all(torch.equal(a, b) for a, b in zip(expected, model.parameters(), strict=True))
    return {
        "loop": name,
        "steps": steps,
        "share": SHARE,
        "whole_bytes": whole_bytes,
        "budget_bytes": int(SHARE * whole_bytes),
        "peak_bytes": report.peak_bytes - before_bytes,
        "same_bits": same,
        "bare_seconds": sum(took for _, took in bare),
        "seconds": sum(took for _, took in within),
        "later_overhead": sum(t for _, t in within[steps // 3 :]) / sum(t for _, t in bare[steps // 3 :]) - 1,
        "calls": report.calls,
        "made_again": report.made_again,
        "again_seconds": report.again_seconds,
        "bounded": report.bounded,
        "exceeded": report.exceeded,
    }


def child(what: str, name: str, steps: int) -> dict[str, Any]:
    """Return what a process of its own is asked for."""
    return cost(name) if what == "costs" else run_loop(name, steps)


def main() -> None:
    """Measure, print, and store."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="default: " + ", ".join([*COSTS, *LOOPS]))
    parser.add_argument("--steps", type=int, default=STEPS)
    options = parser.parse_args()
    path = result_path("eager_mode")
    found: dict[str, Any] = load(path)["payload"] if path.exists() else {"costs": [], "loops": []}
    names = options.names or [*COSTS, *LOOPS]
    for name in names:
        what = "costs" if name in COSTS else "loops"
        request = {"what": what, "name": name, "steps": options.steps}
        row = in_fresh_process(__file__, request, timeout_seconds=CHILD_SECONDS)
        if "error" in row:
            raise SystemExit(f"{name}: {row['error']}")
        print(row, flush=True)
        key = "workload" if what == "costs" else "loop"
        found[what] = [each for each in found[what] if each[key] != name] + [row]
        if options.steps == STEPS:
            store("eager_mode", found | {"rounds": ROUNDS})


if __name__ == "__main__" and not answer_if_child(child):
    main()
