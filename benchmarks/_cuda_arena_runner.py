"""The arena's allocator in front of torch's own, in a CUDA build of torch; for a process of its own.

Reads one JSON from standard input, writes one to standard output. Started by `cuda_arena.py`, which preloads the GPU
that is not there (`cuda_build.py`): its kernels do nothing, so that what is checked here are addresses and bytes.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import json
import os
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

import memfit
from memfit.memory.arena.arena import Arena
from memfit.step.planned_step import PlannedStep

KIB, MIB = 1 << 10, 1 << 20
STREAMS = 3
ACTIONS = ("allocate", "allocate", "allocate", "free", "free", "use", "raw", "side")
STEPS = 6
Tensor = torch.Tensor


class WrongError(Exception):
    """Something that must not be."""


def require(holds: bool, what: str) -> None:
    """Raise WrongError unless it holds."""
    if not holds:
        raise WrongError(what)


def in_front(arena: Arena) -> bool:
    """Whether the arena's allocator is the one that torch asks."""
    return bool(arena._library.library.memfit_arena_cuda_is_in_front())  # pyright: ignore


class RandomStep:
    """A step of random requests, the same each time, on several streams; nothing that lives may overlap."""

    def __init__(self, seed: int) -> None:
        draw = random.Random(seed)
        self._script = [(draw.choice(ACTIONS), draw.random(), draw.random()) for _ in range(draw.randint(5, 120))]
        self._differs = draw.random() < 0.3  # from step to step
        self._streams = [torch.cuda.Stream() for _ in range(STREAMS)]
        self.kept: list[Tensor] = []

    def __call__(self, number: int) -> None:
        """Run it for the n-th time; a few tensors outlive it."""
        live: list[Tensor] = []
        noise = random.Random(number)
        for action, size, choice in self._script:
            size_bytes = int(2 ** (3 + 22 * size)) + (noise.randint(0, 600) if self._differs else 0)
            if action == "allocate":
                live.append(torch.empty(size_bytes, dtype=torch.uint8, device="cuda"))
            elif action == "side":
                with torch.cuda.stream(self._streams[int(choice * STREAMS)]):
                    live.append(torch.empty(size_bytes, dtype=torch.uint8, device="cuda"))
            elif action == "raw":
                pointer = torch.cuda.caching_allocator_alloc(size_bytes)
                torch.cuda.caching_allocator_delete(pointer)
            elif live and action == "free":
                del live[int(choice * len(live))]
            elif live:
                live[int(choice * len(live))].record_stream(self._streams[int(size * STREAMS)])
            require_apart([*live, *self.kept])
        self.kept = [*self.kept, *live[: int(3 * noise.random())]][-4:]


def require_apart(tensors: list[Tensor]) -> None:
    """Raise WrongError if the memory of two tensors overlaps."""
    spans = sorted((t.data_ptr(), t.data_ptr() + t.numel()) for t in tensors if t.numel())
    for (_, end), (begin, _) in itertools.pairwise(spans):
        require(end <= begin, f"two live tensors overlap by {end - begin} bytes")


def life(fake: ctypes.CDLL, seeds: list[int]) -> Iterator[tuple[str, int]]:
    """Random steps in arenas, some of which raise; at the end nothing is left. Yields counts."""
    for seed in seeds:
        step, arena = RandomStep(seed), memfit.arena(device="cuda")
        held_before = torch.cuda.memory_allocated()
        for number in range(STEPS):
            with contextlib.suppress(InterruptedError), arena.step():
                require(in_front(arena), "the arena's allocator is not in front during its step")
                step(number)
                if seed % 5 == number:
                    raise InterruptedError
            slab = arena.held_bytes
            require(torch.cuda.memory_allocated() >= held_before + slab, "the arena is not in torch's statistics")
        yield "requests served", arena.served
        yield "requests that got ordinary memory", arena.not_served
        arena.close()
        require_apart(step.kept)
        step.kept = []
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        require(not in_front(arena), "the arena's allocator stays in front of an empty process")
        left = (
            torch.cuda.memory_allocated(),
            torch.cuda.memory_reserved(),
            ctypes.c_uint64.in_dll(fake, "fake_held_on").value,
        )
        require(left[0] == held_before == 0 and left[1] == left[2] == 0, f"{left} bytes are left")
        yield "steps", STEPS


def beside() -> dict[str, str]:
    """What else torch's allocator does, tried inside a step or while a tensor lies in the arena."""
    arena = memfit.arena(device="cuda")

    def body() -> Tensor:
        first = torch.empty(3 * MIB, dtype=torch.uint8, device="cuda")
        second = torch.empty(5 * MIB, dtype=torch.uint8, device="cuda")
        del first
        return second

    for _ in range(2):
        with arena.step():
            body()
    found: dict[str, str] = {}
    for name, call in BESIDE.items():
        with arena.step():
            inside = body()
            require(bool(arena._library.owns(arena._handle, inside.data_ptr())), "not served")  # pyright: ignore
            try:
                call(inside)
                found[name] = "works"
            except Exception as error:  # noqa: BLE001 - whatever torch raises is the outcome
                found[name] = f"{type(error).__name__}: {str(error).splitlines()[0][:120]}"
            del inside
    with arena.step():
        body()
    require(arena.last_step.not_served == 0, "the arena is disturbed")
    arena.close()
    return found


def _statistics(_inside: Tensor) -> None:
    torch.cuda.reset_peak_memory_stats()
    require(torch.cuda.max_memory_allocated() >= 8 * MIB, "the slab is not counted")
    require(torch.cuda.memory_stats()["reserved_bytes.all.current"] >= 8 * MIB, "the slab is not reserved")
    torch.cuda.memory_summary()


def _snapshot(_inside: Tensor) -> None:
    segments = torch.cuda.memory_snapshot()
    require(
        any(block["size"] >= 8 * MIB for segment in segments for block in segment["blocks"]), "no block of the slab"
    )


def _history(_inside: Tensor) -> None:
    torch.cuda.memory._record_memory_history(max_entries=100)  # pyright: ignore
    kept = torch.empty(40 * MIB, dtype=torch.uint8, device="cuda")
    require(bool(torch.cuda.memory._snapshot()["device_traces"][0]), "no trace")  # pyright: ignore
    torch.cuda.memory._record_memory_history(enabled=None)  # pyright: ignore
    del kept


def _cap(_inside: Tensor) -> None:
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + MIB) / total)
    try:
        torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
        raise WrongError("the cap does not hold")
    except torch.OutOfMemoryError:
        pass
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def _pool(_inside: Tensor) -> None:
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        kept = torch.empty(40 * MIB, dtype=torch.uint8, device="cuda")
    require(any(tuple(s["segment_pool_id"]) == tuple(pool.id) for s in pool.snapshot()), "no segment in the pool")
    del kept, pool


def _raw(_inside: Tensor) -> None:
    pointer = torch.cuda.caching_allocator_alloc(MIB)
    torch.cuda.caching_allocator_delete(pointer)


def _empty_cache(inside: Tensor) -> None:
    torch.cuda.empty_cache()
    require(inside.data_ptr() != 0, "gone")


def _backend(_inside: Tensor) -> None:
    require(torch.cuda.get_allocator_backend() == "native", torch.cuda.get_allocator_backend())


def _resized(inside: Tensor) -> None:
    inside.untyped_storage().resize_(7 * MIB)


def _record_stream(inside: Tensor) -> None:
    inside.record_stream(torch.cuda.Stream())


BESIDE: dict[str, Callable[[Tensor], None]] = {
    "memory_stats, memory_summary, peaks": _statistics,
    "memory_snapshot": _snapshot,
    "_record_memory_history": _history,
    "set_per_process_memory_fraction": _cap,
    "MemPool, use_mem_pool": _pool,
    "caching_allocator_alloc, _delete": _raw,
    "empty_cache": _empty_cache,
    "get_allocator_backend": _backend,
    "UntypedStorage.resize_": _resized,
    "Tensor.record_stream": _record_stream,
}


def net(width: int, depth: int) -> torch.nn.Module:
    """Return a deep residual-free MLP, whose products go through the fake's cuBLAS."""
    layers: list[torch.nn.Module] = []
    for _ in range(depth):
        layers += [torch.nn.Linear(width, 4 * width), torch.nn.GELU(), torch.nn.Dropout(0.1)]
        layers += [torch.nn.Linear(4 * width, width), torch.nn.LayerNorm(width)]
    return torch.nn.Sequential(*layers, torch.nn.Linear(width, 16)).cuda()


def planned(job: dict[str, Any]) -> dict[str, Any]:
    """Fit a step and run it; return the bytes that each step reserved, beside the prediction."""
    torch.manual_seed(0)
    model, rows = net(job["width"], job["depth"]), job["rows"]
    batch = torch.randn(rows, job["width"]).cuda(), torch.zeros(rows, dtype=torch.long, device="cuda")
    optimizer = torch.optim.AdamW(model.parameters()) if job["updates"] else None

    def loss(model: torch.nn.Module, batch: Any) -> Tensor:
        return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])

    step = memfit.fit(
        model,
        loss,
        batch,
        optimizer=optimizer,
        budget=job["budget"],
        arena={"arena": None, "expandable segments": False, "torch's allocator": False}[job["served"]],
        hard=job["hard"],
        options={"iterations": 20_000, "threads": 1},
        time_limit_seconds=60.0,
        budget_is="firm" if job["hard"] else "soft",
    )
    assert isinstance(step, PlannedStep)
    steps: list[dict[str, int]] = []
    for _ in range(job["steps"]):
        if optimizer is None:
            model.zero_grad(set_to_none=True)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        step(batch)
        counts = step.arena.last_step if step.arena else None
        steps.append(
            {
                "reserved_bytes": torch.cuda.max_memory_reserved(),
                "allocated_bytes": torch.cuda.max_memory_allocated(),
                "served": counts.served if counts else 0,
                "not_served": counts.not_served if counts else 0,
            }
        )
    return {
        "served_by": str(step.memory),
        "budget_bytes": int(step.settings.budget),
        "peak_bytes": step.plan.predicted.peak_bytes,
        "predicted_bytes": step._programs.first.predicted_bytes,  # pyright: ignore
        "steps": steps,
        "corrections": len(step.corrections),
        "in_front": in_front(step.arena) if step.arena else False,
    }


def main() -> None:
    """Run the job of the input."""
    job = json.load(sys.stdin)
    fake = ctypes.CDLL(os.environ["FAKE_GPU"])
    found: dict[str, Any] = {"torch": torch.__version__}
    with contextlib.redirect_stdout(sys.stderr):
        torch.cuda.init()
        if job["kind"] == "life":
            counts: dict[str, int] = {}
            for name, count in life(fake, job["seeds"]):
                counts[name] = counts.get(name, 0) + count
            found["counts"] = counts
        elif job["kind"] == "beside":
            found["beside"] = beside()
        else:
            found |= planned(job)
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
