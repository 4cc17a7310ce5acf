"""Sequences of varying length and larger batches on a GPU: figure 2c and the wider batches of sekiyama2018, captured.

Two questions, answered by memfit's model of torch's caching allocator on steps that are captured with fake tensors:

`seq2seq`: what a process takes of a GPU after 10 mini-batches of sentences, each of other lengths: with the allocator's
pool, with expandable segments, with a pool whose blocks serve requests of just their size, and with the arena, whose
layouts (one for each mini-batch) share one piece of memory. Chainer 1 had a pool of exact sizes; what the paper's
Chainer 3 had, it does not say.
The network is that of Chainer's example: three LSTM layers of 1,024 units, vocabularies of 40,000 words, sentences of
up to 50 words, without padding; inference generates 100 words. WMT15 is not on this machine: the lengths are drawn.

`widest`: the largest batch, a multiple of eight, whose training step fits the 16 GiB of the paper's P100, with the pool
and with the arena.

    python benchmarks/arena_growth.py
    python benchmarks/arena_growth.py widest --models resnet50
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from _measure import GIB, MIB
from _record import load, result_path, store
from arena import NETWORKS
from arena_captured import compile_packers, reserved_by_way, step_of
from arena_seq2seq import PAPERS_WORDS, PapersSeq2seq, drawn_lengths, sorted_words

from memfit import TrainingStep
from memfit.capture import capture
from memfit.commands.estimate import forward_part
from memfit.cost.calibration import local_device
from memfit.graph import Graph
from memfit.packing import PackingProblem, make_packer
from memfit.packing.from_schedule import blocks_of
from memfit.plan import Problem
from memfit.planners.engine.results import unplanned_schedule
from memfit.schedule import Schedule
from memfit.simulate.allocator_trace import Event, EventKind, replay
from memfit.simulate.cuda_allocator import AllocatorSettings, whole_segments_bytes
from memfit.simulate.reserved import schedule_events
from memfit.system.recorder import taken_bytes

SEED = 20183
MINI_BATCHES = 10
BATCHES = (32, 64, 128, 256)
GENERATED, SOURCE = 100, 25  # words of an inference
CARD_BYTES = 16 * GIB
MOST_BATCH, BATCHES_OF = 4096, 8
SOLVER_SECONDS = 2.0
WAYS = ("pool", "expandable", "arena")


def laid_out(graph: Graph, schedule: Schedule) -> tuple[int, int]:
    """Return the height of the arena's layout of a step, in bytes, and how many blocks there are."""
    blocks = blocks_of(graph, schedule, local_device(torch.device("cpu"))).blocks
    layout = make_packer("auto").pack(PackingProblem(blocks=blocks, time_limit_seconds=SOLVER_SECONDS))
    return whole_segments_bytes(layout.height_bytes), len(blocks)


def unplanned(step: TrainingStep) -> tuple[Graph, Schedule]:
    """Return the graph of a step, and its schedule as eager runs it."""
    graph = capture(step).graph
    return graph, _as_in_eager(graph)


def _as_in_eager(graph: Graph) -> Schedule:
    return unplanned_schedule(Problem(graph=graph, device=local_device(torch.device("cpu")), budget_bytes=0))


def seq2seq_step(lengths: list[tuple[int, int]]) -> TrainingStep:
    """Return a training step with Adam on sentences of these lengths of source and target."""
    torch.manual_seed(SEED)
    model = PapersSeq2seq()
    batch = sorted_words(lengths)
    optimizer = torch.optim.Adam(model.parameters())
    return TrainingStep(model=model, loss=PapersSeq2seq.loss_of, batch=batch, optimizer=optimizer, name="seq2seq")


def after_mini_batches(batch: int) -> dict[str, Any]:
    """Return the bytes that a process holds after each of 10 mini-batches, for each allocator."""
    generator = torch.Generator().manual_seed(SEED + batch)
    steps = [unplanned(seq2seq_step(drawn_lengths(batch, generator))) for _ in range(MINI_BATCHES)]
    layouts = [laid_out(*step) for step in steps]
    highest_bytes = max(height for height, _ in layouts)
    paged = AllocatorSettings(expandable_segments=True)
    found = {
        "pool": after_each(steps, None, None),
        "expandable": after_each(steps, paged, None),
        "arena": after_each(steps, paged, highest_bytes),
        "exact": in_exact_pool(steps),
    }
    return {"blocks": [blocks for _, blocks in layouts], "highest_bytes": highest_bytes, "after_bytes": found}


def after_each(
    steps: list[tuple[Graph, Schedule]], settings: AllocatorSettings | None, arena_bytes: int | None
) -> list[int]:
    """Return the bytes that are reserved after each of several different steps of one model."""
    events, ends = _one_after_another(steps, arena_bytes)
    reserved_bytes = replay(events, settings).reserved_bytes
    return [int(reserved_bytes[end - 1]) for end in ends]


def in_exact_pool(steps: list[tuple[Graph, Schedule]]) -> list[int]:
    """Return the same of a pool that divides no block: one serves requests of its own size, in pages of 512 bytes."""
    events, ends = _one_after_another(steps, None)
    free, sizes, found = Counter[int](), dict[int, int](), list[int]()
    total_bytes = 0
    for number, event in enumerate(events, 1):
        if event.kind == EventKind.FREE:
            free[sizes.pop(event.block)] += 1
        else:
            size_bytes = sizes[event.block] = taken_bytes(event.size_bytes, torch.device("cuda"))
            total_bytes += 0 if free[size_bytes] else size_bytes
            free[size_bytes] -= bool(free[size_bytes])
        if number in ends:
            found.append(total_bytes)
    return found


def _one_after_another(steps: list[tuple[Graph, Schedule]], arena_bytes: int | None) -> tuple[list[Event], list[int]]:
    """Return the events of different steps of one model, whose residents come first, and where each step ends."""
    events: list[Event] = []
    ends: list[int] = []
    numbered = 0
    for graph, schedule in steps:
        own, (first,) = schedule_events(graph, schedule, arena_bytes=arena_bytes)
        events += [event._replace(block=event.block + numbered) for event in (own[first:] if events else own)]
        numbered += 1 + max(event.block for event in own)
        ends.append(len(events))
    return events, ends


def generation() -> dict[str, int]:
    """Return the bytes that a process takes of a GPU for the inference of one sentence, for each allocator."""
    torch.manual_seed(SEED)
    batch = sorted_words([(SOURCE, 1)])
    step = TrainingStep(model=PapersSeq2seq(), loss=PapersSeq2seq.generated(GENERATED), batch=batch, name="generation")
    graph = forward_part(capture(step).graph)
    return taken(graph, _as_in_eager(graph))


def taken(graph: Graph, schedule: Schedule) -> dict[str, int]:
    """Return a step's blocks, and the bytes that a process takes of a GPU for equal steps, for each allocator."""
    height_bytes, blocks = laid_out(graph, schedule)
    return {"blocks": blocks, **reserved_by_way(graph, schedule, height_bytes)}


def widest(name: str) -> dict[str, Any]:
    """Return the largest batch of a network that fits the card, for each allocator, and all batches that were tried."""
    seen: dict[int, dict[str, int]] = {}

    def fits(way: str, batch: int) -> bool:
        if batch not in seen:
            seen[batch] = taken(*unplanned(step_of(name, batch)))
            print(f"  {name} {batch}: " + ", ".join(f"{w} {seen[batch][w] / MIB:.0f} MiB" for w in WAYS), flush=True)
        return seen[batch][way] <= CARD_BYTES

    return {"batches": {way: _last(lambda batch, way=way: fits(way, batch)) for way in WAYS}, "seen": seen}


def _last(holds: Callable[[int], bool]) -> int:
    """Return the largest multiple of eight for which something holds that holds for all smaller ones."""
    low, high = 0, 8 * BATCHES_OF
    while high < MOST_BATCH and holds(high):
        low, high = high, 2 * high
    while high - low > BATCHES_OF:
        middle = (low + high) // (2 * BATCHES_OF) * BATCHES_OF
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def results_of(options: argparse.Namespace) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield the name of each result that is asked for, and the function that returns it."""
    if options.what in ("all", "seq2seq"):
        for batch in BATCHES:
            yield f"training {batch}", lambda batch=batch: after_mini_batches(batch)
        yield "inference", generation
    if options.what in ("all", "widest"):
        for name in options.models:
            yield f"widest {name}", lambda name=name: widest(name)


def main() -> None:
    """Find what is not stored yet; print and store each result as it comes."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("what", nargs="?", default="all", choices=("all", "seq2seq", "widest"))
    parser.add_argument("--models", nargs="+", default=list(NETWORKS), choices=list(NETWORKS))
    parser.add_argument("--again", action="store_true", help="also what is stored already")
    options = parser.parse_args()
    compile_packers()
    path = result_path("arena_growth")
    results: dict[str, Any] = load(path)["payload"]["results"] if path.exists() else {}
    for name, find in results_of(options):
        if options.again or name not in results:
            results[name] = find()
            store("arena_growth", {"mini_batches": MINI_BATCHES, "words": PAPERS_WORDS, "results": results})
        print(f"{name:20} {described(results[name])}", flush=True)


def described(result: dict[str, Any]) -> str:
    """One line of a result for the terminal."""
    if "batches" in result:
        return ", ".join(f"{way} {batch}" for way, batch in result["batches"].items())
    last = {way: each[-1] for way, each in result["after_bytes"].items()} if "after_bytes" in result else result
    return ", ".join(f"{way} {last[way] / MIB:.0f} MiB" for way in WAYS)


if __name__ == "__main__":
    main()
