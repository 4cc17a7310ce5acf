"""The arena at full size: the models of sekiyama2018, captured with fake tensors and packed, nothing allocated.

For each model, training at batches of 32, 64, 128 (the sequence-to-sequence LSTM at 256, too) and inference of one: the
bytes of the arena beside the peak of live bytes and beside every block apart (the paper's Figure 2); all that the
process takes of a GPU by memfit's model of torch's caching allocator, with its pool, with expandable segments, and with
the arena; and the seconds of the solver (Figure 4). The step is the unplanned one, nothing in place, as eager runs it.
Its workspaces are those of kernels that were not run: none. Heights do not depend on the machine, only the solver's
seconds do.

    python benchmarks/arena_captured.py
    python benchmarks/arena_captured.py resnet50 --batches 32
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from typing import Any

import torch
from _googlenet import classification_loss
from _made_traces import made_trace
from _measure import MIB
from _record import load, result_path, store
from arena import LEARNING_RATE, NETWORKS, SEQ2SEQ, SOLVER_SECONDS, build_network
from arena_seq2seq import LONGEST, Seq2seq

from memfit import TrainingStep
from memfit.capture import capture
from memfit.commands.estimate import forward_part
from memfit.cost.calibration import local_device
from memfit.graph import Graph
from memfit.packing import Blocks, PackingProblem, check_layout, make_packer
from memfit.packing.from_schedule import blocks_of
from memfit.plan import Problem
from memfit.planners.engine.results import unplanned_schedule
from memfit.schedule import Schedule
from memfit.simulate.cuda_allocator import AllocatorSettings, whole_segments_bytes
from memfit.simulate.reserved import reserved

BATCHES, SEQ2SEQ_BATCHES = (32, 64, 128), (32, 64, 128, 256)
MOST_RATIO = 1.005  # of the peak of live bytes, on the convolutional networks


def step_of(name: str, batch: int | None) -> TrainingStep:
    """Return a training step as `arena.py` runs it, or for inference of one a step to take the forward part of.

    A batch takes no memory until it is read, and a capture does not read it.
    """
    count = batch or 1
    if name == SEQ2SEQ:
        model: torch.nn.Module = Seq2seq()
        words = torch.zeros(LONGEST, count, dtype=torch.int64)
        step = TrainingStep(model=model, loss=lambda model, pair: model.loss(*pair), batch=(words, words), name=name)
    else:
        model, pixels = build_network(name).train(batch is not None), NETWORKS[name].pixels
        images, labels = torch.empty(count, 3, pixels, pixels), torch.zeros(count, dtype=torch.int64)
        step = TrainingStep(model=model, loss=_loss, batch=(images, labels), name=name)
    if batch is None:
        return step
    momentum = 0.0 if name == SEQ2SEQ else 0.9
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=momentum)
    return dataclasses.replace(step, optimizer=optimizer)


def _loss(model: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return classification_loss(model(batch[0]), batch[1])


def figures(name: str, batch: int | None) -> dict[str, Any]:
    """Capture and pack one step."""
    begun = time.perf_counter()
    captured = capture(step_of(name, batch))
    capture_seconds = time.perf_counter() - begun
    device = local_device(captured.binding.device)
    graph = forward_part(captured.graph) if batch is None else captured.graph
    schedule = unplanned_schedule(Problem(graph=graph, device=device, budget_bytes=0))
    step = blocks_of(graph, schedule, device)
    exact = blocks_of(graph, schedule).blocks  # sizes as they are, without the device's alignment
    begun, used = time.perf_counter(), time.process_time()
    layout = make_packer("auto").pack(PackingProblem(blocks=step.blocks, time_limit_seconds=SOLVER_SECONDS))
    seconds, processor = time.perf_counter() - begun, time.process_time() - used
    check_layout(step.blocks, layout)
    return {
        "ops": len(graph.ops),
        "blocks": len(step.blocks),
        "arena_bytes": layout.height_bytes,
        "lower_bound_bytes": layout.lower_bound_bytes,
        "peak_live_bytes": exact.lower_bound_bytes,
        "apart_bytes": int(exact.sizes_bytes.sum()),
        "outliving_bytes": int(step.outside_bytes.max(initial=0)),
        "reserved": reserved_by_way(graph, schedule, layout.height_bytes),
        "arena_over_peak": layout.height_bytes / exact.lower_bound_bytes,
        "arena_over_apart": layout.height_bytes / int(exact.sizes_bytes.sum()),
        "proven": layout.proven,
        "solver_seconds": seconds,
        "solver_processor_seconds": processor,
        "capture_seconds": capture_seconds,
    }


def reserved_by_way(graph: Graph, schedule: Schedule, height_bytes: int) -> dict[str, int]:
    """Return the bytes that a process takes of a GPU in three steps, residents included, by what serves the step."""
    paged = AllocatorSettings(expandable_segments=True)
    return {
        "pool": reserved(graph, schedule).peak_bytes,
        "expandable": reserved(graph, schedule, paged).peak_bytes,
        "arena": reserved(graph, schedule, paged, arena_bytes=whole_segments_bytes(height_bytes)).peak_bytes,
    }


def compile_packers() -> None:
    """Compile what is timed."""
    for blocks in (made_trace(300), made_trace(900), made_trace(5000), Blocks.of(())):
        make_packer("auto").pack(PackingProblem(blocks=blocks, time_limit_seconds=0.5))


def main() -> None:
    """Capture and pack what is not stored yet; print and store each result as it comes."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("models", nargs="*", default=[*NETWORKS, SEQ2SEQ], help="default: all")
    parser.add_argument("--batches", type=int, nargs="+", help="batch sizes of training, for all models")
    parser.add_argument("--again", action="store_true", help="also what is stored already")
    parser.add_argument("--dry-run", action="store_true", help="store nothing")
    options = parser.parse_args()
    compile_packers()
    for name in options.models:
        path = f"arena_captured/{name}"
        keep = not options.again and not options.dry_run and result_path(path).exists()
        results: dict[str, Any] = load(result_path(path))["payload"]["results"] if keep else {}
        batches: list[int | None] = [*(options.batches or (SEQ2SEQ_BATCHES if name == SEQ2SEQ else BATCHES)), None]
        for batch in batches:
            what = "inference" if batch is None else f"training {batch}"
            if what not in results:
                results[what] = figures(name, batch)
                if not options.dry_run:
                    store(path, {"model": name, "results": results})
            print(f"{name:20} {what:14} {described(name, results[what])}", flush=True)


def described(name: str, result: dict[str, Any]) -> str:
    """One line of a result for the terminal."""
    high = name != SEQ2SEQ and result["arena_over_peak"] > MOST_RATIO
    return (
        f"arena {result['arena_bytes'] / MIB:.1f} MiB, {result['arena_over_peak']:.5f} of the peak of live bytes"
        f"{' (too high)' if high else ''}, {result['arena_over_apart']:.3f} of apart; {result['blocks']} blocks; "
        f"solver {result['solver_seconds']:.2f} s{', proven' if result['proven'] else ''}; "
        f"capture {result['capture_seconds']:.1f} s"
    )


if __name__ == "__main__":
    main()
