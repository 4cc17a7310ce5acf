"""The arena beside torch's own allocator, on the models of sekiyama2018: memory, step time, the solver's time.

For each model, training at several batch sizes and inference of one: the bytes of the arena beside the peak of live
bytes (what torch's allocator holds on a CPU) and beside every block apart (the paper's Figure 2; what outlives the step
is in none of the three, and given by itself), the time of a step in the arena over that of the same step without
(Figure 3, in turns), and the seconds of the solver (Figure 4). The sequence-to-sequence LSTM with attention gets
sentences of varying length, once with a key for each pair of lengths and once without, so that every change of length
makes a new layout. Then what one request and its free cost, in nanoseconds, of a real step's sequence and of single
sizes.

    python benchmarks/arena.py
    python benchmarks/arena.py resnet50 --batches 2 --repeats 5
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np
import torch
from _googlenet import classification_loss
from _measure import MIB
from _process import answer_if_child, in_fresh_process
from _record import interleaved_seconds, load, result_path, store
from arena_seq2seq import Seq2seq, sentences

from memfit.memory.arena.arena import Arena
from memfit.memory.arena.layout import ArenaPlan, Recording
from memfit.memory.arena.library import as_pointer

CHILD_SECONDS = 1800
SEED = 20181
LEARNING_RATE = 0.01
CLASSES = 1000
SOLVER_SECONDS = 10.0
SINGLE_SIZES = (64, 4096, 1 << 16, 1 << 20, 1 << 24)
PAIRS = 2000  # requests and frees of each single size
TIMINGS = 11
SEQ2SEQ_STEPS = 12  # of an epoch

Step = Callable[[], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """A model, the images it takes, and the batches of its training that this machine holds.

    Attributes:
        module, function: where pytorchcv has the model; another module is one beside this file.
        pixels: of an image's side.
        batches: of training.
    """

    module: str
    function: str
    pixels: int
    batches: tuple[int, ...]


NETWORKS = {
    "alexnet": Network(module="pytorchcv.models.alexnet", function="alexnet", pixels=224, batches=(8, 16, 32)),
    "googlenet": Network(module="_googlenet", function="GoogLeNet", pixels=224, batches=(4, 8, 16)),
    "bninception": Network(
        module="pytorchcv.models.bninception", function="bninception", pixels=224, batches=(4, 8, 16)
    ),
    "resnet50": Network(module="pytorchcv.models.resnet", function="resnet50", pixels=224, batches=(4, 8, 16)),
    "inception_resnet_v2": Network(
        module="pytorchcv.models.inceptionresnetv2", function="inceptionresnetv2", pixels=299, batches=(2, 4, 8)
    ),
}
SEQ2SEQ = "seq2seq"
SEQ2SEQ_BATCHES = (16, 32, 64)


def build_network(name: str) -> torch.nn.Module:
    """Return the model from pytorchcv, imported alone: its collection of all models asks for torchvision."""
    network = NETWORKS[name]
    torch.manual_seed(SEED)
    return getattr(import_module(network.module), network.function)()


def network_step(name: str, batch: int | None) -> Step:
    """Return a training step with SGD and momentum, or the inference of one image where `batch` is None."""
    model, pixels = build_network(name), NETWORKS[name].pixels
    images, labels = torch.randn(batch or 1, 3, pixels, pixels), torch.randint(0, CLASSES, (batch or 1,))
    if batch is None:
        model.eval()

        def infer() -> None:
            with torch.inference_mode():
                model(images)

        return infer
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=0.9)

    def train() -> None:
        optimizer.zero_grad()
        classification_loss(model(images), labels).backward()
        optimizer.step()

    return train


def in_arena(arena: Arena, step: Step) -> Step:
    """Return the step inside the arena."""

    def run() -> None:
        with arena.step():
            step()

    return run


def measure_network(name: str, batch: int | None, repeats: int) -> dict[str, Any]:
    """Measure one model at one batch; called in a process of its own."""
    step = network_step(name, batch)
    with Arena(time_limit_seconds=SOLVER_SECONDS) as arena:
        served = in_arena(arena, step)
        for _ in range(3):  # recorded; replanned, as the first step made the momentum; steady
            served()
        (plan,) = arena.plans.values()
        assert isinstance(plan, ArenaPlan)
        found = figures(plan) | {"solver_seconds_all": arena.solver_seconds, "reoptimizations": arena.reoptimizations}
        with_seconds, without_seconds = interleaved_seconds([served, step], repeats)
        found |= {
            "served": arena.last_step.served,
            "outliving": arena.last_step.outliving,
            "not_served": arena.last_step.not_served,
            "other_threads": arena.last_step.other_threads,
            **time_ratio(with_seconds, without_seconds),
            "per_request": time_events(arena, events_of(plan.recording)),
        }
    return found


def figures(plan: ArenaPlan) -> dict[str, Any]:
    """What a plan takes, beside the peak of live bytes and every block apart."""
    return {
        "blocks": int((~plan.recording.outlives).sum()),
        "arena_bytes": plan.height_bytes,
        "lower_bound_bytes": plan.lower_bound_bytes,
        "peak_live_bytes": plan.peak_bytes,
        "apart_bytes": plan.apart_bytes,
        "outliving_bytes": plan.recording.outliving_bytes,
        "arena_over_peak": plan.height_bytes / plan.peak_bytes,
        "arena_over_apart": plan.height_bytes / plan.apart_bytes,
        "proven": plan.proven,
        "solver_seconds": plan.seconds,
    }


def time_ratio(with_seconds: tuple[float, ...], without_seconds: tuple[float, ...]) -> dict[str, Any]:
    """The median of the pairs' ratios, and the least time of each side."""
    ratios = [mine / plain for mine, plain in zip(with_seconds, without_seconds, strict=True)]
    return {
        "time_ratio": statistics.median(ratios),
        "time_ratio_range": [min(ratios), max(ratios)],
        "arena_seconds": min(with_seconds),
        "plain_seconds": min(without_seconds),
        "repeats": len(ratios),
    }


def events_of(recording: Recording) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return a recording as requests (their bytes) and frees (-1 - number), without what outlives the step."""
    inside = np.flatnonzero(~recording.outlives)
    requests = np.stack([2 * inside + 1, recording.sizes_bytes[inside]])
    frees = np.stack([2 * recording.ends[inside], -1 - np.arange(len(inside))])
    both = np.concatenate([requests, frees], axis=1)
    return np.ascontiguousarray(both[1, np.argsort(both[0], kind="stable")])


def time_events(arena: Arena, events: np.ndarray[Any, np.dtype[np.int64]]) -> dict[str, Any]:
    """Nanoseconds of a request and its free, in an arena and of the allocator in place, touching no memory."""
    library = arena._library.library
    pairs = len(events) / 2

    def run(where: AbstractContextManager[Any]) -> float:
        with where:
            return library.memfit_arena_time(len(events), as_pointer(events)) / pairs

    with Arena(time_limit_seconds=SOLVER_SECONDS) as own:
        run(own.step())
        mine, plain = list[float](), list[float]()
        for _ in range(TIMINGS):
            mine.append(run(own.step()))
            plain.append(run(nullcontext()))
        assert own.not_served == 0
    return {
        "arena_nanoseconds": statistics.median(mine),
        "plain_nanoseconds": statistics.median(plain),
        "arena_nanoseconds_least": min(mine),
        "plain_nanoseconds_least": min(plain),
    }


def measure_single_sizes(repeats: int) -> dict[str, Any]:
    """Nanoseconds of a request and its free for blocks of one size, ten alive at once."""
    found: dict[str, Any] = {}
    with Arena() as arena:
        for size in SINGLE_SIZES:
            events = [value for number in range(PAIRS) for value in ((size, 9 - number) if number >= 10 else (size,))]
            events += [-1 - number for number in range(PAIRS - 10, PAIRS)]
            found[str(size)] = time_events(arena, np.array(events, np.int64))
    return found | {"repeats": repeats}


def measure_seq2seq(batch: int | None, repeats: int) -> dict[str, Any]:
    """Measure the LSTM over sentences of varying length, with a key for each pair of lengths and without."""
    return {
        "keyed": _measure_seq2seq(batch, repeats, keyed=True),
        "unkeyed": _measure_seq2seq(batch, repeats, keyed=False),
    }


def _measure_seq2seq(batch: int | None, repeats: int, *, keyed: bool) -> dict[str, Any]:
    torch.manual_seed(SEED)
    model = Seq2seq()
    pairs = sentences(batch or 1, SEQ2SEQ_STEPS, SEED)
    step = model.trainer(LEARNING_RATE) if batch else model.translate

    def epoch(arena: Arena | None) -> Iterator[None]:
        for source, target in pairs:
            key = (source.shape, target.shape) if keyed else None
            with nullcontext() if arena is None else arena.step(key=key):
                step(source, target)
            yield

    with Arena(time_limit_seconds=1.0) as arena:
        for _ in range(2):
            for _ in epoch(arena):
                pass
        warm, warm_seconds = arena.counts, arena.solver_seconds
        with_seconds, without_seconds = interleaved_seconds(
            [lambda: list(epoch(arena)), lambda: list(epoch(None))], repeats
        )
        highest = max(arena.plans.values(), key=lambda plan: plan.height_bytes)
        return figures(highest) | {
            "plans": len(arena.plans),
            "reoptimizations": arena.reoptimizations,
            "solver_seconds_warm": warm_seconds,
            "solver_seconds_all": arena.solver_seconds,
            "not_served_warm": warm.not_served,
            "served": arena.counts.served - warm.served,
            "not_served": arena.counts.not_served - warm.not_served,
            **time_ratio(with_seconds, without_seconds),
        }


def measure(what: str, **request: Any) -> dict[str, Any]:
    """Answer one request; called in a process of its own."""
    torch.manual_seed(SEED)
    kinds: dict[str, Callable[..., dict[str, Any]]] = {
        "network": measure_network,
        "seq2seq": measure_seq2seq,
        "single": measure_single_sizes,
    }
    return kinds[what](**request)


def requests(name: str, batches: list[int] | None) -> dict[str, dict[str, Any]]:
    """What is measured of a model, by the name it is stored under."""
    sizes = batches or list(SEQ2SEQ_BATCHES if name == SEQ2SEQ else NETWORKS[name].batches)
    kind = {"what": "seq2seq"} if name == SEQ2SEQ else {"what": "network", "name": name}
    return {f"training {batch}": kind | {"batch": batch} for batch in sizes} | {"inference": kind | {"batch": None}}


def run(name: str, wanted: dict[str, dict[str, Any]], options: argparse.Namespace) -> None:
    """Measure what is not stored yet, each in a process of its own; print and store each result as it comes."""
    path = f"arena/{name}"
    stored = {} if options.again or not result_path(path).exists() else load(result_path(path))["payload"]["results"]
    results = {what: result for what, result in stored.items() if "error" not in result}
    for what, request in wanted.items():
        if what not in results:
            request = request | {"repeats": options.repeats}
            results[what] = in_fresh_process(__file__, request, timeout_seconds=CHILD_SECONDS)
            store(path, {"model": name, "results": results})
        print(f"{name:20} {what:14} {described(results[what])}", flush=True)


def described(result: dict[str, Any]) -> str:
    """One line of a result for the terminal."""
    if "error" in result:
        return result["error"]
    if "keyed" in result:
        return f"keyed {described(result['keyed'])}\n{'':36}unkeyed {described(result['unkeyed'])}"
    if "arena_bytes" not in result:
        return ", ".join(
            f"{int(size):,} bytes: {times['arena_nanoseconds']:.0f} ns, plain {times['plain_nanoseconds']:.0f} ns"
            for size, times in result.items()
            if size.isdigit()
        )
    request = result.get("per_request")
    return (
        f"arena {result['arena_bytes'] / MIB:.1f} MiB, {result['arena_over_peak']:.4f} of the peak of live bytes, "
        f"{result['arena_over_apart']:.3f} of apart; time {result['time_ratio']:.3f}; {result['blocks']} blocks, "
        f"solver {result['solver_seconds']:.2f} s; {result['served']} served, {result['not_served']} not"
        + (f"; {request['arena_nanoseconds']:.0f} ns, plain {request['plain_nanoseconds']:.0f} ns" if request else "")
    )


def main() -> None:
    if answer_if_child(measure):
        return
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("models", nargs="*", default=[*NETWORKS, SEQ2SEQ], help="default: all five")
    parser.add_argument("--batches", type=int, nargs="+", help="batch sizes of training, for all models")
    parser.add_argument("--repeats", type=int, default=7, help="pairs of steps (seq2seq: of epochs) that are timed")
    parser.add_argument("--again", action="store_true", help="measure what is stored already, too")
    options = parser.parse_args()
    for name in options.models:
        run(name, requests(name, options.batches), options)
    run("single_sizes", {"all": {"what": "single"}}, options)


if __name__ == "__main__":
    main()
