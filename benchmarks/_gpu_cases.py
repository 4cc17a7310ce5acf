"""The cases of gpu.py: a workload, how it is run, what it may take; each with small sizes for a dry run on a CPU."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One thing to measure, in a process of its own.

    Attributes:
        name: of the case.
        workload: a built-in one.
        options: of the workload on a GPU.
        small: of the workload in a dry run.
        how: `fit`, `accumulate` (four micro-batches without an optimizer), `scaler`, `backend` (of torch.compile),
            `inductor` (the same on Inductor's kernels), or a rival: `eager`, `checkpoint` (placed by hand),
            `torch_budget` (torch's activation_memory_budget).
        share: of the unplanned peak, which is the budget.
        tolerance: of gradients on Inductor's kernels, as a share of their norm.
        optimizer: arguments of AdamW.
        seconds: that the case may take.
        arena: serve steps from an arena; None is memfit's default, which is one on a GPU.
        hard: cap the process at the budget.
        host_bytes: that storages may be offloaded to.
        cudnn_benchmark: let cuDNN try its engines.
        environment: more variables of the process.
    """

    name: str
    workload: str
    options: dict[str, Any]
    small: dict[str, Any]
    how: str = "fit"
    share: float = 0.6
    tolerance: float = 0.03
    optimizer: dict[str, Any] = field(default_factory=dict[str, Any])
    seconds: float = 45.0
    arena: bool | None = None
    hard: bool = False
    host_bytes: int = 0
    cudnn_benchmark: bool = False
    environment: dict[str, str] = field(default_factory=dict[str, str])


_RESNET = {"batch": 128}
_SMALL_RESNET = {"batch": 4, "size": 32, "classes": 4, "depth": 18}
_GPT = {"batch": 8, "layers": 12, "width": 768, "tokens": 1024}
_SMALL_GPT = {"batch": 2, "tokens": 32, "layers": 2, "width": 64, "head_width": 16, "vocabulary": 50}
_FOREACH, _FUSED = {"foreach": True}, {"fused": True}
_BF16, _LAST = {"autocast": "bf16"}, {"channels_last": True}


def _resnet(name: str, more: dict[str, Any] | None = None, **how: Any) -> Case:
    return Case(
        name=f"resnet50 {name}",
        workload="resnet50",
        options=_RESNET | (more or {}),
        small=_SMALL_RESNET | (more or {}),
        **how,
    )


def _gpt(name: str, more: dict[str, Any] | None = None, **how: Any) -> Case:
    return Case(
        name=f"gpt2 {name}", workload="gpt2", options=_GPT | (more or {}), small=_SMALL_GPT | (more or {}), **how
    )


CASES = (
    _resnet("fp32, foreach, capped", optimizer=_FOREACH, hard=True),
    _gpt("bf16, fused, arena, capped", _BF16, optimizer=_FUSED, hard=True, arena=True),  # in a dry run, too
    _resnet("bf16, channels_last, fused, capped", _BF16 | _LAST, optimizer=_FUSED, hard=True),
    _resnet("backend", how="backend", share=0.7),
    _gpt("inductor, bf16", _BF16 | {"layers": 3}, how="inductor", share=0.7, seconds=75.0),
    _resnet("inductor", {"depth": 18}, how="inductor", share=0.8, seconds=75.0),
    _resnet("torch's allocator", arena=False),
    _resnet(
        "expandable segments",
        environment={"PYTORCH_ALLOC_CONF": "expandable_segments:True"},
        hard=True,
        arena=False,
    ),
    _resnet("cudnn.benchmark", cudnn_benchmark=True),
    _gpt("offloading 10 GiB", {"batch": 16}, host_bytes=10 * GIB, share=0.5, optimizer=_FUSED),
    _gpt("fp16, GradScaler", {"autocast": "fp16"}, how="scaler", optimizer=_FUSED),
    Case(
        name="unet accumulation",
        workload="unet",
        options={"batch": 8, "size": 512, "width": 64},
        small={"batch": 2, "size": 32, "width": 4, "levels": 3},
        how="accumulate",
        share=0.7,
    ),
    Case(
        name="vgg16",
        workload="vgg16",
        options={"batch": 64},
        small={"batch": 2, "size": 32, "classes": 4, "depth": 11},
        share=0.85,
        optimizer=_FOREACH,
        hard=True,
    ),
    Case(
        name="densenet121",
        workload="densenet121",
        options={"batch": 64, **_BF16},
        small={"batch": 2, "size": 32, "classes": 4, **_BF16},
        hard=True,
    ),
    Case(
        name="inceptionv3",
        workload="inceptionv3",
        options={"batch": 64},
        small={"batch": 2, "size": 107, "classes": 4},
        hard=True,
    ),
    Case(
        name="lstm, which is launch-bound",
        workload="lstm",
        options={"batch": 128},
        small={"batch": 16, "steps": 9, "width": 64},
    ),
    Case(
        name="encoder",
        workload="encoder",
        options={"batch": 64},
        small={"batch": 8, "tokens": 16, "layers": 2, "width": 64, "head_width": 16, "feedforward": 128},
        hard=True,
    ),
    _resnet("eager", how="eager", seconds=25.0),
    _resnet("checkpoints by hand", how="checkpoint", seconds=25.0),
    _resnet("torch's budget 0.5", how="torch_budget", share=0.5),
    _gpt("eager, bf16", _BF16, how="eager", seconds=25.0),
    _gpt("checkpoints by hand, bf16", _BF16, how="checkpoint", seconds=25.0),
    _gpt("torch's budget 0.5, bf16", _BF16, how="torch_budget", share=0.5),
)
RIVALS = ("eager", "checkpoint", "torch_budget")
