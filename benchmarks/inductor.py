"""Peak and time of training steps under Inductor: plain, under torch's activation memory budget, and under memfit's.

Each model runs in processes of its own, on eager's and on Inductor's kernels, forward and backward. memfit on Inductor
gets the peak of each setting of torch's budget for its own. Times are ratios to the eager step, in paired turns.

    python benchmarks/inductor.py                        # all models, stored
    python benchmarks/inductor.py gpt2 resnet            # only these
    python benchmarks/inductor.py gpt2 --small           # a short try of one setting, not stored
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable
from typing import Any

import torch
from _process import answer_if_child, fresh_cache, in_fresh_process
from _record import interleaved_ratio, load, result_path, store
from torch import nn

from memfit.system.recorder import record

SHARES = (0.9, 0.7, 0.5, 0.3, 0.1)
REPEATS = 7
CHILD_SECONDS = 1800
SEED = 0
Step = Callable[[], None]


def gpt2(*, small: bool) -> tuple[nn.Module, Any]:
    """A language model with dropout."""
    from transformers import GPT2Config, GPT2LMHeadModel

    layers, width, tokens = (2, 64, 64) if small else (4, 256, 256)
    config = GPT2Config(
        n_layer=layers,
        n_head=4,
        n_embd=width,
        vocab_size=1000,
        n_positions=tokens,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    words = torch.randint(0, 1000, (4, tokens))
    return GPT2LMHeadModel(config), {"input_ids": words, "labels": words}


def bert(*, small: bool) -> tuple[nn.Module, Any]:
    """A classifier of sentences with dropout."""
    from transformers import BertConfig, BertForSequenceClassification

    layers, width, tokens = (2, 64, 64) if small else (4, 256, 128)
    config = BertConfig(
        num_hidden_layers=layers,
        hidden_size=width,
        num_attention_heads=4,
        intermediate_size=4 * width,
        vocab_size=1000,
        max_position_embeddings=tokens,
    )
    words = torch.randint(0, 1000, (8, tokens))
    return BertForSequenceClassification(config), {"input_ids": words, "labels": torch.randint(0, 2, (8,))}


def vit(*, small: bool) -> tuple[nn.Module, Any]:
    """A transformer over the patches of images."""
    from transformers import ViTConfig, ViTForImageClassification

    layers, width, side = (2, 64, 32) if small else (4, 192, 112)
    config = ViTConfig(
        num_hidden_layers=layers,
        hidden_size=width,
        num_attention_heads=4,
        intermediate_size=4 * width,
        image_size=side,
        patch_size=8,
        num_labels=10,
    )
    return ViTForImageClassification(config), {
        "pixel_values": torch.randn(8, 3, side, side),
        "labels": torch.randint(0, 10, (8,)),
    }


def resnet(*, small: bool) -> tuple[nn.Module, Any]:
    """ResNet-18 of pytorchcv."""
    from pytorchcv.models.resnet import resnet18

    batch = 1 if small else 4
    return _WithLoss(resnet18(num_classes=10)), {
        "images": torch.randn(batch, 3, 224, 224),
        "labels": torch.randint(0, 10, (batch,)),
    }


class _WithLoss(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor]:
        return (nn.functional.cross_entropy(self.inner(images), labels),)


MODELS: dict[str, Callable[..., tuple[nn.Module, Any]]] = {"gpt2": gpt2, "resnet": resnet, "vit": vit, "bert": bert}


def measure(*, model: str, way: str, small: bool, share: float = 1.0, budget: int = 0) -> dict[str, Any]:
    """Return the peak of one way to run a model, residents included, and its time over eager's.

    Args:
        model: a name in MODELS.
        way: `eager`, `inductor`, or `memfit on eager` and `memfit on inductor`, which have a budget.
        small: a short try.
        share: torch's activation memory budget.
        budget: in bytes, of memfit.
    """
    import torch._functorch.config

    torch.manual_seed(SEED)
    eager, batch = MODELS[model](small=small)
    planned = copy.deepcopy(eager)
    resident_bytes = sum(t.nbytes for t in (*eager.parameters(), *eager.buffers(), *batch.values()))
    call: Any = planned
    if way == "inductor":
        call = torch.compile(planned)
    elif way != "eager":
        options = {"budget": budget, "reserve": 0, "kernels": way.removeprefix("memfit on ")}
        call = torch.compile(planned, backend="memfit", options=options)
    with torch._functorch.config.patch(activation_memory_budget=share):
        step = _step(planned, call, batch)
        for _ in range(3):  # memfit plans once more after the first step
            step()
        with record("cpu") as usage:
            step()
        times = interleaved_ratio(step, _step(eager, eager, batch), 1 if small else REPEATS)
    return {"peak_bytes": resident_bytes + usage.peak_bytes, **times.summary()}


def _step(model: nn.Module, call: Any, batch: Any) -> Step:
    def step() -> None:
        model.zero_grad(set_to_none=True)
        call(**batch)[0].backward()

    return step


def points(model: str, *, small: bool) -> dict[str, Any]:
    """Return what each way to run a model takes; an error where it gave no answer."""

    def run(way: str, **settings: Any) -> dict[str, Any]:
        request = {"model": model, "way": way, "small": small, **settings}
        answer = settings | in_fresh_process(__file__, request, timeout_seconds=CHILD_SECONDS)
        print(model, way, answer, flush=True)
        return answer

    found: dict[str, Any] = {way: run(way) for way in ("eager", "inductor")}
    found["torch"] = [run("inductor", share=share) for share in (SHARES[2:3] if small else SHARES)]
    budgets = [point["peak_bytes"] for point in found["torch"] if "peak_bytes" in point]
    for way in ("memfit on inductor",) if small else ("memfit on eager", "memfit on inductor"):
        found[way] = [run(way, budget=budget) for budget in budgets]
    return found


def main() -> None:
    """Measure and store."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", choices=[[], *MODELS], metavar="MODEL", help=", ".join(MODELS))
    parser.add_argument("--small", action="store_true", help="a short try, not stored")
    given = parser.parse_args()
    with fresh_cache():
        found = {name: points(name, small=given.small) for name in given.models or MODELS}
    if not given.small:
        path = result_path("inductor")
        known = load(path)["payload"] if path.exists() else {}
        print(store("inductor", known | found))


if __name__ == "__main__" and not answer_if_child(measure):
    main()
