"""What `make gpu` runs, the most valuable first: rows, and the children that measure them, each one model in a fork."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from _gpu_bits import measure_bits
from _gpu_copies import measure_copies, measure_workspaces
from _gpu_doors import BY_ITERATIONS, CASES, NO_OPTIMIZER, USERS_SEGMENTS, Case, measure_case
from _gpu_hardware import measure_hardware
from _gpu_limits import most_tokens
from _gpu_ways import BY_MEMFIT, CHECKPOINTS, EAGER, SIXTY, THERE, TORCHS, USUAL, Ask, compare

Measure = Callable[..., Iterator[dict[str, Any]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Child:
    """One measurement, in a fork of the process that has imported everything.

    Attributes:
        name: in results, and in lines on the terminal.
        rows: that it answers; the key of the row's part of the answer, empty for the whole.
        seconds: that it should take on the GPU.
        measure: yields what is known after each stage; gets `arguments`.
        arguments: of `measure`.
        rehearsal: what replaces them where nothing is computed.
        fails: why the rehearsal fails, if it does: something that memfit does wrong. It is an error if it does not.
    """

    name: str
    rows: dict[int, str]
    seconds: float
    measure: Measure
    arguments: dict[str, Any] = field(default_factory=dict[str, Any])
    rehearsal: dict[str, Any] = field(default_factory=dict[str, Any])
    fails: str = ""


ROWS = {
    0: "clocks, rates of copies alone and together, ceilings of matrix products",
    1: "every door, ten steps, bytes reserved within the budget",
    2: "GPT-2 medium, bf16, fused AdamW",
    3: "the same under a hard cap, 50 steps",
    4: "a Llama of 1B, 4,096 tokens, bf16",
    5: "ResNet-50, batch 256, bf16, channels last",
    6: "bits, with deterministic algorithms",
    7: "Inductor's kernels, GPT-2 of six layers",
    8: "most tokens under caps of 24 and 80 GB",
    9: "offloading, the Llama",
    10: "workspaces that no step takes: predicted and measured live bytes, without an arena",
    11: "a CUDA graph, beside eager",
    12: "ViT-L, bf16",
    13: "GradScaler, cudnn.benchmark, the user's expandable segments, U-Net in accumulation",
    14: "what was published: Chen 2016, Feng 2018, Sekiyama 2018, dqn2020",
}
"""The title of each row, by its number; they run in this order."""

_GPT = {"batch": 8, "tokens": 1024, "layers": 12, "width": 768, "autocast": "bf16"}
_GPT_MEDIUM = _GPT | {"layers": 24, "width": 1024}
_LLAMA = {"batch": 2, "tokens": 4096}
_RESNET = {"batch": 256, "channels_last": True, "autocast": "bf16"}
_FEW = {"turns": 2, "computed": False}  # times of the device mean nothing in a rehearsal
_RESNET_CASE = {"options": {"batch": 128}, "rehearsal": {"batch": 16}, "model": "resnet50", "timed": True, "share": 0.6}

LARGER_CASES = (
    Case(
        name="GPT-2 fp16, GradScaler",
        door="fit",
        model="gpt2",
        options=_GPT | {"autocast": "fp16"},
        scaler=True,
        timed=True,
        rehearsal={"layers": 2},
    ),
    Case(name="ResNet-50, cudnn.benchmark", door="fit", cudnn_benchmark=True, **_RESNET_CASE),
    Case(
        name="ResNet-50, the user's expandable segments",
        door="fit",
        allocator=USERS_SEGMENTS,
        given={"hard": True},
        **_RESNET_CASE,
    ),
    Case(
        name="U-Net, accumulation",
        loop="accumulation",
        percent=True,
        model="unet",
        options={"batch": 8, "size": 512, "width": 64},
        optimizer=NO_OPTIMIZER,
        timed=True,
        rehearsal={"batch": 2},
    ),
)
"""The doors of row 13."""


def _doors(row: int, cases: tuple[Case, ...], seconds: float) -> Iterator[Child]:
    for case in cases:
        yield Child(
            name=case.name,
            rows={row: ""},
            seconds=seconds,
            measure=measure_case,
            arguments={"case": case},
            rehearsal={"rehearsal": True, "search": BY_ITERATIONS},
            fails=FAULTS.get(case.name, ""),
        )


def _compared(
    name: str,
    rows: dict[int, str],
    seconds: float,
    model: str,
    options: dict[str, Any],
    asks: Sequence[Ask] = USUAL,
    *,
    smaller: dict[str, Any] | None = None,
    **more: Any,
) -> Child:
    """A child that compares ways; `smaller` are options of the model that a rehearsal has others of."""
    arguments = {"model": model, "options": options, "asks": asks, "seconds": seconds, **more}
    rehearsal = _FEW | ({"options": options | smaller} if smaller else {}) | ({"hard_steps": 10} if 3 in rows else {})
    return Child(
        name=name,
        rows=rows,
        seconds=seconds,
        measure=compare,
        arguments=arguments,
        rehearsal=rehearsal,
        fails=FAULTS.get(name, ""),
    )


def _child(name: str, row: int, seconds: float, measure: Measure, smaller: dict[str, Any], **arguments: Any) -> Child:
    return Child(
        name=name,
        rows={row: ""},
        seconds=seconds,
        measure=measure,
        arguments=arguments,
        rehearsal=smaller,
        fails=FAULTS.get(name, ""),
    )


FAULTS: dict[str, str] = {}
"""Children that fail in a rehearsal, by a fault of memfit, and which. One that no longer fails has to go from here."""

_INDUCTOR_WAYS = (
    Ask(name="Inductor", kind="inductor"),
    Ask(name="Inductor, budget 0.5", kind="inductor", share=0.5),
    Ask(name="memfit at its bytes", kind="fit", bytes_of="Inductor, budget 0.5", given={"kernels": "inductor"}),
    Ask(
        name="memfit, chunked loss",
        kind="fit",
        bytes_of="Inductor, budget 0.5",
        given={"kernels": "inductor", "chunk_loss": True},
    ),
    Ask(
        name="memfit, offloading",
        kind="fit",
        bytes_of="Inductor, budget 0.5",
        given={"kernels": "inductor", "host_budget": "8GiB"},
    ),
)
_WHOLE = Ask(name="memfit", kind="fit")
_GRAPH = Ask(name="memfit, CUDA graph", kind="fit", share=1.1, given={"cuda_graph": True})
_CAPTURABLE = {"fused": True, "capturable": True}


def _published(name: str, planner: str, share: float) -> Ask:
    return Ask(name=name, kind="fit", share=share, given={"planner": planner}, may_fail=True)


_CHEN_WAYS = (
    EAGER,
    _published("sublinear at 40%", "sublinear", 0.4),
    Ask(name="memfit at 7 of 48", kind="fit", share=7 / 48),
)
_DQN_WAYS = (
    EAGER,
    _published("sublinear at 60%", "sublinear", 0.6),
    *(
        Ask(
            name=f"memfit at {share:.0%}",
            kind="fit",
            share=share,
            given={"planner": "offload", "host_budget": "16GiB"},
        )
        for share in (0.6, 0.4)
    ),
)
_FENG_WAYS = (
    EAGER,
    _published("Re-forwarding at 80%", "division_tree", 0.8),
    Ask(name="memfit at 80%", kind="fit", share=0.8),
)
_SEKIYAMA_WAYS = (EAGER, Ask(name="memfit, only placed", kind="fit", given={"planner": "none"}))

CHILDREN: tuple[Child, ...] = (
    _child("hardware", 0, 15, measure_hardware, {"copied_bytes": 1 << 26}, copied_bytes=1 << 30, side=8192),
    *_doors(1, CASES, 2.5),
    _compared("gpt2-medium", {2: "", 3: "hard"}, 55, "gpt2", _GPT_MEDIUM, hard=True, smaller={"layers": 6}),
    _compared(
        "llama-1b",
        {4: ""},
        45,
        "llama",
        _LLAMA,
        (EAGER, CHECKPOINTS, BY_MEMFIT, THERE, SIXTY),
        smaller={"num_hidden_layers": 4},
    ),
    _compared("resnet50", {5: ""}, 40, "resnet50", _RESNET, (*USUAL, TORCHS), smaller={"batch": 32}),
    _child(
        "bits-resnet50",
        6,
        15,
        measure_bits,
        {"options": {"batch": 8}, "share": "85%", "computed": False},
        model="resnet50",
        options=_RESNET | {"batch": 64},
        share="50%",
    ),
    _child(
        "bits-gpt2",
        6,
        15,
        measure_bits,
        {"options": _GPT | {"layers": 2, "vocabulary": 1000}, "share": "85%", "computed": False},
        model="gpt2",
        options=_GPT,
        share="50%",
    ),
    _compared("inductor-gpt2", {7: ""}, 80, "gpt2", _GPT | {"layers": 6}, _INDUCTOR_WAYS, smaller={"layers": 2}),
    _child(
        "tokens",
        8,
        40,
        most_tokens,
        {"options": {"num_hidden_layers": 4}},
        model="llama",
        options={},
        caps_bytes=(24 * 10**9, 80 * 10**9),
        probes=(4096, 8192),
    ),
    _child(
        "offloading",
        9,
        35,
        measure_copies,
        {"options": _LLAMA | {"num_hidden_layers": 4}, "planner": "tflms", "share": 0.55},  # recomputing costs nothing
        model="llama",
        options=_LLAMA,
        share=0.65,
        host_bytes=24 << 30,
    ),
    _child(
        "workspaces-resnet50",
        10,
        10,
        measure_workspaces,
        {"options": {"batch": 16}},
        model="resnet50",
        options={"batch": 128},
    ),
    _child(
        "workspaces-gpt2",
        10,
        10,
        measure_workspaces,
        {"options": _GPT | {"layers": 2}, "share": "99%"},
        model="gpt2",
        options=_GPT,
    ),
    _compared(
        "graph-lstm",
        {11: ""},
        12,
        "lstm",
        {"batch": 128},
        (EAGER, _WHOLE, _GRAPH),
        optimizer=_CAPTURABLE,
        smaller={"steps": 32},
    ),
    _compared(
        "graph-gpt2", {11: ""}, 13, "gpt2", _GPT, (EAGER, _WHOLE, _GRAPH), optimizer=_CAPTURABLE, smaller={"layers": 4}
    ),
    _compared("vit-large", {12: ""}, 35, "vit", {"batch": 64}, smaller={"num_hidden_layers": 8}),
    *_doors(13, LARGER_CASES, 10),
    _compared(
        "chen-resnet1000",
        {14: ""},
        40,
        "chen resnet",
        {"layers": 1000, "batch": 32},
        _CHEN_WAYS,
        optimizer={"sgd": True},
        turns=4,
        smaller={"layers": 152, "batch": 48},
    ),
    _compared("dqn-resnet50", {14: ""}, 15, "resnet50", {"batch": 128}, _DQN_WAYS, turns=4, smaller={"batch": 16}),
    _compared("feng-vgg16", {14: ""}, 10, "vgg16", {"batch": 64}, _FENG_WAYS, turns=4, smaller={"batch": 32}),
    _compared(
        "sekiyama-inception", {14: ""}, 10, "inceptionv3", {"batch": 64}, _SEKIYAMA_WAYS, turns=4, smaller={"batch": 8}
    ),
)
"""In the order in which they run."""
