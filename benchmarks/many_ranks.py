"""Llama 3 8B, fully sharded over many H100s: predicted peaks and seconds at several budgets, before there is any.

    python benchmarks/many_ranks.py                      # 8, 64 and 512 ranks, each stored in a file of its own
    python benchmarks/many_ranks.py --layers 2 --ranks 8 --budgets 24GiB --dry

No device is at hand and nothing is computed. The model is made of fake tensors, which have no memory. torch's `fake`
backend stands for the other ranks, which all do the same. The step is the one that `memfit.fit` would capture on a
rank: `fully_shard` of each layer and of the rest, bfloat16 compute, reductions and AdamW in float32.

Seconds are rooflines of the H100's profile, and NCCL's own model of a ring for collectives: no kernel and no link
reaches these, so that real steps take longer. Attention is counted as the fused kernel that a CPU's dispatch chooses.
"""

from __future__ import annotations

import argparse
import resource
import time
from typing import Any

import torch
import torch.distributed as dist
from _record import store
from torch._subclasses import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import LlamaConfig, LlamaForCausalLM

from memfit.capture import Captured, TrainingStep, capture
from memfit.capture.fully_sharded import fully_sharded
from memfit.cost.collectives import CollectiveRates, with_collectives
from memfit.cost.device_profiles import load_device
from memfit.cost.rooflines import roofline
from memfit.errors import NoPlanError
from memfit.graph import Graph
from memfit.planning import Settings, make_plan

RANKS, BUDGETS = (8, 64, 512), ("72GiB", "48GiB", "32GiB")
LAYERS, BATCH, LENGTH = 32, 2, 4096
LLAMA_3_8B = {  # config.json of meta-llama/Meta-Llama-3-8B
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
}
TIME_LIMIT_SECONDS = 60.0

RANKS_PER_NODE = 8  # NVIDIA DGX H100 datasheet, as the two rates
NVLINK_BYTES_PER_SECOND = 450e9  # of a GPU, one direction
NETWORK_BYTES_PER_SECOND = 8 * 50e9  # of a node, one direction: eight links of 400 Gb/s
# NCCL, src/graph/tuning.cc, ring and protocol Simple: of a collective, of a hop within a node, of a hop between nodes
BASE_SECONDS, NVLINK_HOP_SECONDS, NETWORK_HOP_SECONDS = 8.4e-6, 3.4e-6, 9.6e-6


def ring_rates(ranks: int) -> CollectiveRates:
    """Return what NCCL expects of an all-gather or a reduce-scatter of so many bytes in total, by rings.

    Args:
        ranks: on full nodes, or on a part of one.
    """
    nodes = -(-ranks // RANKS_PER_NODE)
    rate = NVLINK_BYTES_PER_SECOND if nodes == 1 else min(NVLINK_BYTES_PER_SECOND, NETWORK_BYTES_PER_SECOND)
    latency = BASE_SECONDS + (ranks - nodes) * NVLINK_HOP_SECONDS + (nodes - 1) * NETWORK_HOP_SECONDS
    return CollectiveRates(latency_seconds=latency, bytes_per_second=rate * ranks / (ranks - 1))


def captured_on(ranks: int, layers: int, batch: int, length: int) -> Captured:
    """Return the step of one of `ranks` ranks."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        with torch.device("meta"):
            model: Any = LlamaForCausalLM(LlamaConfig(num_hidden_layers=layers, use_cache=False, **LLAMA_3_8B))
        rotary = type(model.model.rotary_emb)(model.config)  # its buffers are small, and real
        mesh = init_device_mesh("cpu", (ranks,))
        with FakeTensorMode(allow_non_fake_inputs=True):
            model.to_empty(device="cpu")
            model.model.rotary_emb = rotary
            policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
            for layer in model.model.layers:
                fully_shard(layer, mesh=mesh, mp_policy=policy)
            fully_shard(model, mesh=mesh, mp_policy=policy)
            across = fully_sharded(model, None)
        tokens = torch.zeros(batch, length, dtype=torch.int64)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        return capture(
            TrainingStep(
                model=model,
                loss=lambda model, tokens: model(input_ids=tokens, labels=tokens).loss,
                batch=tokens,
                optimizer=optimizer,
                across=across,
                name=f"llama of {layers} layers on {ranks} ranks",
            )
        )
    finally:
        dist.destroy_process_group()


def costed(captured: Captured, ranks: int) -> Graph:
    """Return the graph of a step with the seconds of an H100."""
    rates = ring_rates(ranks)
    graph = roofline(captured.graph, captured.binding, load_device("h100"))
    return with_collectives(graph, lambda _kind, size_bytes: rates.seconds(size_bytes))


def points(graph: Graph, budgets: list[str], time_limit_seconds: float) -> list[dict[str, Any]]:
    """Return what a plan at each budget takes."""
    found: list[dict[str, Any]] = []
    for budget in budgets:
        settings = Settings(budget=budget, time_limit_seconds=time_limit_seconds, reads_kept_plans=False)
        point: dict[str, Any] = {"budget": budget}
        try:
            plan = make_plan(graph, load_device("h100"), settings)
        except NoPlanError as error:
            point |= {"least_bytes": error.least_budget_found_bytes, "bound_bytes": error.least_budget_bound_bytes}
        else:
            gathers = [op.id for op in graph.ops if op.is_gather]
            computed = [getattr(instruction, "op", None) for instruction in plan.schedule]
            point |= {
                "peak_bytes": plan.predicted.peak_bytes,
                "seconds": plan.predicted.seconds,
                "unplanned_peak_bytes": plan.unplanned.peak_bytes,
                "unplanned_seconds": plan.unplanned.seconds,
                "overhead": plan.overhead,
                "bound": plan.bounds.overhead,
                "gathers": sum(computed.count(op) for op in gathers) / len(gathers),
                "plan_seconds": plan.plan_seconds,
            }
        print(point, flush=True)
        found.append(point)
    return found


def main() -> None:
    """Capture, plan, print, and store."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS)
    parser.add_argument("--budgets", nargs="+", default=BUDGETS)
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--batch", type=int, default=BATCH)
    parser.add_argument("--length", type=int, default=LENGTH)
    parser.add_argument("--time-limit", type=float, default=TIME_LIMIT_SECONDS)
    parser.add_argument("--dry", action="store_true", help="store nothing")
    arguments = parser.parse_args()
    sizes = {"layers": arguments.layers, "batch": arguments.batch, "length": arguments.length}
    for ranks in arguments.ranks:
        started = time.perf_counter()
        captured = captured_on(ranks, arguments.layers, arguments.batch, arguments.length)
        capture_seconds = time.perf_counter() - started
        graph = costed(captured, ranks)
        print(f"{ranks} ranks: {len(graph.ops):,} ops, captured in {capture_seconds:.0f} s", flush=True)
        payload = {
            "device": "h100",
            "model": LLAMA_3_8B | sizes,
            "ranks": ranks,
            "ops": len(graph.ops),
            "resident_bytes": sum(storage.bytes for storage in graph.storages if storage.resident),
            "capture_seconds": capture_seconds,
            "process_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            "time_limit_seconds": arguments.time_limit,
            "points": points(graph, list(arguments.budgets), arguments.time_limit),
        }
        if not arguments.dry:
            print(store(f"many_ranks/{ranks}", payload))


if __name__ == "__main__":
    main()
