"""The cases of `rank_loops.py`: (wrapper, loop, habit)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from _rank_libraries import accelerate, lightning
from _rank_rows import HABITS, WRAPPERS, Row, fitted, own, pipeline_1f1b, pipeline_gpipe
from _rank_trainers import adapted_library_model, fsdp2_arguments, peft, trainer, trl

OWN = "own"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One row of the table.

    Attributes:
        wrapper: of the model.
        loop: that trains it.
        habit: of the loop.
        row: runs it.
        share: of the bare peak: the budget.
        ranks: how many of them it is for.
        door: that holds the budget; `auto`: the one that the loop takes by itself.
    """

    wrapper: str
    loop: str
    habit: str
    row: Row
    share: float = 0.7
    ranks: tuple[int, ...] = (2, 4)
    door: str = "checkpoint"

    @property
    def name(self) -> str:
        """Its three names."""
        return f"{self.wrapper} | {self.loop} | {self.habit} | {self.door}"


_SHARES = {
    "FSDP2, root only": 0.75,
    "torchtitan, TP": 0.75,
    "torchtitan, TP, compiled": 0.75,
}
_BF16_SHARE = 0.8  # activations halve; parameters and the optimizer's state do not
_EACH = ["accumulation", "clipping", "evaluation first", "lengths", "last batches", "bf16", "scaler"]
_EACH += ["save and resume", "momentum", "all"]
_MORE = {
    "DDP": [*_EACH, "Join", "collectives in the loss", "ZeRO"],
    "DDP after the line": ["accumulation"],
    "DDP, bucket views": ["accumulation"],
    "DDP, LoRA on bf16": ["accumulation"],
    "DDP, blocks compiled": ["accumulation", "lengths"],
    "FSDP2": [*_EACH, "collectives in the loss"],
    "FSDP2 after the line": ["accumulation"],
    "FSDP2, bf16 policy": ["all"],
    "FSDP2, CPU offload": ["accumulation"],
    "FSDP2, LoRA on bf16": ["accumulation", "clipping"],
    "FSDP2, blocks compiled": ["accumulation", "lengths"],
    "HSDP": ["accumulation", "clipping", "save and resume"],
    "TP": ["accumulation", "evaluation"],
    "torchtitan, FSDP": ["accumulation", "clipping", "save and resume", "all"],
    "torchtitan, FSDP, compiled": ["accumulation", "clipping"],
    "torchtitan, TP": ["clipping", "accumulation"],
}
_COMPILED = {
    "DDP": ["plain", *_EACH, "Join", "collectives in the loss"],
    "DDP after the line": ["plain", "accumulation"],
    "DDP, small buckets": ["plain", "accumulation"],
    "DDP, static_graph": ["plain"],
    "DDP, bucket views": ["plain", "accumulation"],
    "DDP, unused": ["plain"],
    "DDP, fp16 hook": ["plain"],
    "FSDP2": ["plain", *_EACH],
    "FSDP2 after the line": ["plain"],
    "FSDP2, bf16 policy": ["plain"],
    "FSDP2, not resharded": ["plain"],
    "FSDP2, prefetch": ["plain"],
    "FSDP2, CPU offload": ["plain", "accumulation"],
    "FSDP2, LoRA on bf16": ["plain"],
    "HSDP": ["plain"],
    "torchtitan, FSDP": ["plain", "accumulation"],
}
_FOUR_ONLY = ("HSDP",)


def _own_cases() -> list[Case]:
    found = []
    for wrapper, wrap in WRAPPERS.items():
        for habit in ["plain", *_MORE.get(wrapper, ())]:
            four = wrapper in _FOUR_ONLY
            both = habit == "plain" or (habit == "all" and wrapper in ("DDP", "FSDP2"))
            ranks = (4,) if four else (2, 4) if both else (2,)
            row = own(wrap, HABITS[habit])
            share = _BF16_SHARE if habit == "bf16" else _SHARES.get(wrapper, 0.7)
            found.append(Case(wrapper=wrapper, loop=OWN, habit=habit, row=row, share=share, ranks=ranks))
    for wrapper in ("DDP", "FSDP2", "FSDP2, not resharded", "FSDP2, bf16 policy", "HSDP"):
        ranks = (4,) if wrapper == "HSDP" else (2,)
        row = own(WRAPPERS[wrapper], HABITS["all" if wrapper == "DDP" else "accumulation"])
        found.append(Case(wrapper=wrapper, loop=OWN, habit="accumulation", row=row, ranks=ranks, door="eager"))
    for wrapper, habits in _COMPILED.items():
        for habit in habits:
            row = own(WRAPPERS[wrapper], HABITS[habit])
            share = _BF16_SHARE if habit == "bf16" else 0.7
            door = "compile" if wrapper.startswith("DDP") else "backend"
            names = {"wrapper": wrapper, "loop": OWN, "habit": habit, "door": door}
            both = (2, 4) if (wrapper, habit) == ("DDP", "plain") else (2,)
            ranks = (4,) if wrapper in _FOUR_ONLY else both
            found.append(Case(**names, row=row, share=share, ranks=ranks))
    for wrapper in ("DDP", "FSDP2"):
        for habit in ("plain", "evaluation first"):
            row = fitted(WRAPPERS[wrapper], HABITS[habit])
            found.append(Case(wrapper=wrapper, loop="fit", habit=habit, row=row, ranks=(2,), door="fit"))
    for name, row in (("pipeline, GPipe", pipeline_gpipe), ("pipeline, 1F1B", pipeline_1f1b)):
        found.append(Case(wrapper=name, loop=OWN, habit="plain", row=row, share=0.8, ranks=(2,)))
    bf16: Any = partial(peft, dtype=torch.bfloat16)
    found.append(Case(wrapper="DDP", loop=OWN, habit="PEFT on bf16", row=bf16, ranks=(2,)))
    return found


_LIBRARIES: dict[str, dict[str, dict[str, Any]]] = {
    "Accelerate": {
        "plain": {},
        "accumulation": {"micro_batches": 2},
        "bf16": {"precision": "bf16"},
        "lengths": {"lengths": True},
        "evaluation": {"evaluates": True},
        "save and resume": {"saves": True},
    },
    "Lightning": {
        "plain": {},
        "accumulation": {"accumulate_grad_batches": 2},
        "clipping": {"gradient_clip_val": 1.0},
        "bf16": {"precision": "bf16-mixed"},
        "evaluation": {"evaluates": True},
        "save and resume": {"saves": True},
    },
    "Trainer": {
        "plain": {},
        "accumulation": {"arguments": {"gradient_accumulation_steps": 2}},
        "bf16": {"arguments": {"bf16": True}},
        "lengths": {"lengths": True},
        "evaluation": {"evaluates": True},
        "save and resume": {"saves": True},
        "LoRA": {"make": adapted_library_model},
        "LoRA on bf16": {"make": partial(adapted_library_model, dtype=torch.bfloat16)},
        "gradient_checkpointing": {"arguments": {"gradient_checkpointing": True}},
    },
}


def _library_cases() -> list[Case]:
    found = []
    for loop, row in (("Accelerate", accelerate), ("Lightning", lightning), ("Trainer", trainer)):
        for habit, given in _LIBRARIES[loop].items():
            for wrapper in ("DDP", "FSDP2"):
                if (loop, wrapper, habit) == ("Trainer", "FSDP2", "save and resume"):
                    continue  # Accelerate writes no such checkpoint of a model on CPUs, without memfit neither
                more: dict[str, Any] = {}
                if wrapper == "FSDP2":
                    more = {"Accelerate": {"plugin": "fsdp2"}, "Lightning": {"strategy": "fsdp2"}}.get(loop, {})
                    if loop == "Trainer":
                        more = {"arguments": given.get("arguments", {}) | fsdp2_arguments()}
                ranks = (2, 4) if habit == "plain" else (2,)
                share = 1.0 if habit == "gradient_checkpointing" else _BF16_SHARE if habit == "bf16" else 0.7
                whole: Any = partial(row, **{**given, **more})
                names = {"wrapper": wrapper, "loop": loop, "habit": habit, "door": "auto"}
                found.append(Case(**names, row=whole, ranks=ranks, share=share))
                if habit == "plain" or (habit, wrapper) == ("accumulation", "DDP"):
                    found.append(Case(**{**names, "door": "compile"}, row=whole, ranks=(2,), share=share))
    found.append(Case(wrapper="DDP", loop="TRL", habit="plain", row=trl, share=0.8, ranks=(2,), door="auto"))
    return found


CASES = [*_library_cases(), *_own_cases()]

FOUR_RANKS_ONLY = ("fsdp2, hsdp",)
TIMED: dict[str, Row] = {  # of `checkpoint_ranks.py`
    "ddp": own(WRAPPERS["DDP"]),
    "ddp, accumulation": own(WRAPPERS["DDP after the line"], HABITS["accumulation"]),
    "fsdp2": own(WRAPPERS["FSDP2"]),
    "fsdp2, evaluation": own(WRAPPERS["FSDP2"], HABITS["evaluation"]),
    "fsdp2, accumulation": own(WRAPPERS["FSDP2"], HABITS["accumulation"]),
    "fsdp2, lengths": own(WRAPPERS["FSDP2"], HABITS["lengths"]),
    "fsdp2, hsdp": own(WRAPPERS["HSDP"]),
    "fsdp2, cpu offload": own(WRAPPERS["FSDP2, CPU offload"]),
    "fsdp2, bf16": own(WRAPPERS["FSDP2, bf16 policy"]),
    "tensor parallel": own(WRAPPERS["TP"]),
    "torchtitan": own(WRAPPERS["torchtitan, FSDP"]),
    "pipeline, gpipe": pipeline_gpipe,
    "pipeline, 1f1b": pipeline_1f1b,
    "trainer": trainer,
    "accelerate": accelerate,
    "lightning": lightning,
    "trl": trl,
    "peft": peft,
}
