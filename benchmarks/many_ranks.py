"""Llama 3 8B and 70B, fully sharded over many H100s: predicted peaks and seconds, before there is any.

    python benchmarks/many_ranks.py                        # stored: 8B on 8, 64 and 512 ranks, 70B on 256; half an hour
    python benchmarks/many_ranks.py --cases 8B/64 --budgets 72GiB --time-limit 5 --dry
    memfit plan benchmarks/many_ranks.py:llama --set size=70B --set batch=1 --set length=8192 --ranks 256 \\
        --budget 72GiB --device-profile h100

Each plan is one `memfit plan --ranks` in a process of its own, whose seconds and memory are measured. `llama` is what a
user's file has: the model as transformers makes it, `fully_shard` of each layer and of the rest, bfloat16 compute,
reductions and AdamW in float32.

Seconds are rooflines of the H100's profile, and NCCL's own model of a ring for collectives: no kernel and no link
reaches these, so that real steps take longer. Attention is counted as the fused kernel that a CPU's dispatch chooses.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

import memfit

SIZES = {  # config.json of meta-llama/Meta-Llama-3-8B and 70B
    "8B": {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_hidden_layers": 32},
    "70B": {"hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64, "num_hidden_layers": 80},
}
SHARED = {"vocab_size": 128256, "num_key_value_heads": 8, "max_position_embeddings": 8192, "use_cache": False}
CASES = {  # sequences of a rank, and their tokens
    "8B/8": (2, 4096),
    "8B/64": (2, 4096),
    "8B/512": (2, 4096),
    "70B/256": (1, 8192),
}
BUDGETS = ("72GiB", "48GiB", "32GiB")
TIME_LIMIT_SECONDS = 20.0
NO_PLAN = (3, 5)  # exit statuses


def llama(size: str = "8B", batch: int = 2, length: int = 4096, layers: int = 0) -> memfit.TrainingStep:
    """Return a step of one rank, as a program under torchrun has it.

    Args:
        size: of the model, in `SIZES`.
        batch: sequences of the rank.
        length: of each, in tokens.
        layers: in the place of the model's own; 0 leaves them.
    """
    config = {**SIZES[size], **SHARED, **({"num_hidden_layers": layers} if layers else {})}
    model: Any = LlamaForCausalLM(LlamaConfig(**config))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return memfit.TrainingStep(
        model=model,
        loss=lambda model, tokens: model(input_ids=tokens, labels=tokens).loss,
        batch=torch.zeros(batch, length, dtype=torch.int64),
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-4),
        name=f"Llama {size}",
    )


def command(case: str, budget: str, time_limit_seconds: float, layers: int) -> list[str]:
    """Return the command that plans a case."""
    size, ranks = case.split("/")
    batch, length = CASES[case]
    sizes = {"size": size, "batch": batch, "length": length, "layers": layers}
    chosen = [word for name, value in sizes.items() for word in ("--set", f"{name}={value}")]
    words = [sys.executable, "-m", "memfit", "plan", f"{__file__}:llama", *chosen, "--ranks", ranks, "--budget", budget]
    return [*words, "--device-profile", "h100", "--time-limit", f"{time_limit_seconds}", "--no-cache", "--json"]


def point(case: str, budget: str, time_limit_seconds: float, layers: int) -> dict[str, Any]:
    """Run a command; return its answer, its seconds and its bytes.

    Raises:
        RuntimeError: it failed otherwise than by finding no plan.
    """
    started = time.perf_counter()
    process = subprocess.Popen(command(case, budget, time_limit_seconds, layers), stdout=subprocess.PIPE)
    assert process.stdout is not None
    answer = json.loads(process.stdout.read())
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode not in (0, *NO_PLAN):
        raise RuntimeError(f"{case} at {budget}: {answer}")
    return {
        "budget": budget,
        **answer,
        "wall_seconds": time.perf_counter() - started,
        "processor_seconds": usage.ru_utime + usage.ru_stime,
        "process_bytes": usage.ru_maxrss * 1024,
    }


def main() -> None:
    """Plan, print, and store."""
    from _record import store

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--budgets", nargs="+", default=BUDGETS)
    parser.add_argument("--time-limit", type=float, default=TIME_LIMIT_SECONDS)
    parser.add_argument("--layers", type=int, default=0)
    parser.add_argument("--dry", action="store_true", help="store nothing")
    arguments = parser.parse_args()
    for case in arguments.cases:
        points: list[dict[str, Any]] = []
        for budget in arguments.budgets:
            points.append(point(case, budget, arguments.time_limit, arguments.layers))
            print(case, points[-1], flush=True)
        size, ranks = case.split("/")
        batch, length = CASES[case]
        payload = {
            "device": "h100",
            "model": size,
            "batch": batch,
            "length": length,
            "ranks": int(ranks),
            "time_limit_seconds": arguments.time_limit,
            "points": points,
        }
        if not arguments.dry:
            print(store(f"many_ranks/{size}-{ranks}", payload))


if __name__ == "__main__":
    main()
