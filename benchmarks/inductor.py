"""Peak and time of training steps under Inductor: plain, under torch's activation memory budget, and under memfit's.

One process a model and a setting of torch's budget: memfit's budget is the peak that torch reaches there. Forward and
backward of eager, of torch's step, and of memfit's on Inductor's and on eager's kernels take turns. In the setting
"least" memfit is given the least budget that it can keep. Rows are stored as they come; those that are there stay.

    python benchmarks/inductor.py                        # what is not stored yet of GPT-2, BERT, ViT and ResNet-18
    python benchmarks/inductor.py resnet50 --share 0.5   # one row; ResNet-50 takes minutes to compile
    python benchmarks/inductor.py gpt2 --small           # a short try, not stored
    python benchmarks/inductor.py --table                # what is stored, as a table
"""

from __future__ import annotations

import argparse
import copy
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from _baseline_tables import inductor
from _process import answer_if_child, fresh_cache, in_fresh_process
from _record import interleaved_seconds, load, result_path, store
from torch import nn

from memfit.errors import NoPlanError
from memfit.kernels.race import RUNS
from memfit.system.recorder import record, taken_bytes

SHARES = (1.0, 0.9, 0.7, 0.5, 0.3, 0.1)  # of torch's activation memory budget; 1.0 is Inductor as it is
LEAST = 0.0  # stands for the setting "least"
TURNS = 21
SEARCH_SECONDS = 8.0
TRIES = (1.0, 1.005, 1.01, 1.02)  # times the least budget of the try before
CHILD_SECONDS = 1800
SEED = 0
CPU = torch.device("cpu")
PAGE = 4096  # torch's peaks are rounded up to it: the seeds of dropout, which torch draws twice, take some bytes
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
    model = GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"  # else transformers warns while the loss is traced, which divides the graph
    return model, {"input_ids": words, "labels": words}


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
        problem_type="single_label_classification",  # else the first call writes it, and the second compiles anew
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
        num_labels=10,  # pyright: ignore[reportCallIssue]
        problem_type="single_label_classification",
    )
    return ViTForImageClassification(config), {
        "pixel_values": torch.randn(8, 3, side, side),
        "labels": torch.randint(0, 10, (8,)),
    }


def resnet18(*, small: bool) -> tuple[nn.Module, Any]:
    """ResNet-18 of pytorchcv."""
    from pytorchcv.models.resnet import resnet18 as made

    return _resnet(made, 1 if small else 4)


def resnet50(*, small: bool) -> tuple[nn.Module, Any]:
    """ResNet-50 of pytorchcv."""
    from pytorchcv.models.resnet import resnet50 as made

    return _resnet(made, 1 if small else 4)


def _resnet(made: Callable[..., nn.Module], batch: int) -> tuple[nn.Module, Any]:
    images = torch.randn(batch, 3, 224, 224)
    return _WithLoss(made(num_classes=10)), {"images": images, "labels": torch.randint(0, 10, (batch,))}


class _WithLoss(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor]:
        return (nn.functional.cross_entropy(self.inner(images), labels),)


MODELS: dict[str, Callable[..., tuple[nn.Module, Any]]] = {
    "gpt2": gpt2,
    "bert": bert,
    "vit": vit,
    "resnet18": resnet18,
    "resnet50": resnet50,
}
DEFAULT = ("gpt2", "bert", "vit", "resnet18")


class _LossOnly(nn.Module):
    """A model that returns its loss, and no logits, which would wait for a gradient."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, **batch: torch.Tensor) -> torch.Tensor:
        return self.inner(**batch)[0]


class Ways:
    """The ways to run one model, each with a copy of its own, which is there from the beginning: what comes later would
    count against a budget.

    Args:
        model: its name.
        small: whether it is made small.
        count: of the ways.
    """

    def __init__(self, model: str, *, small: bool, count: int) -> None:
        torch.manual_seed(SEED)
        inner, self.batch = MODELS[model](small=small)
        self._copies = [copy.deepcopy(_LossOnly(inner)) for _ in range(count - 1)] + [_LossOnly(inner)]
        self.steps: dict[str, Step] = {}
        self.found: dict[str, dict[str, Any]] = {}
        self._own_bytes = _bytes_of(self._copies[0])
        self._others_bytes = (count - 1) * self._own_bytes
        self.batch_bytes = sum(taken_bytes(tensor.nbytes, CPU) for tensor in self.batch.values())

    @property
    def resident_bytes(self) -> int:
        """Of one way alone."""
        return self._own_bytes + self.batch_bytes

    def add(self, way: str, compiled: Callable[[nn.Module], Any] | None) -> None:
        """Run the first steps of a way, and then those in which memfit may try several codes, measured.

        Args:
            way: its name.
            compiled: makes of a model what is called in its place; None leaves it as it is.
        """
        model = self._copies[-1]
        call = model if compiled is None else compiled(model)

        def step() -> None:
            call(**self.batch).backward()
            model.zero_grad(set_to_none=True)

        began = time.perf_counter()
        for _ in range(3):  # memfit plans once more after the first step
            step()
        first_seconds = time.perf_counter() - began
        peaks: list[int] = []
        for _ in range(2 * RUNS + 1):
            with record("cpu") as usage:
                step()
            peaks.append(usage.peak_bytes)
        self._copies.pop()
        self.steps[way] = step
        self.found[way] = {"peak_bytes": self.resident_bytes + max(peaks), "first_seconds": first_seconds}

    def add_planned(self, kernels: str, budget_bytes: int) -> None:
        """Add memfit's step within a budget, as if its model were alone on the device."""
        options = {"reserve": 0, "time_limit_seconds": SEARCH_SECONDS, "kernels": kernels}
        try:
            self.add(
                f"memfit on {kernels}",
                lambda model: torch.compile(
                    model, backend="memfit", options=options | {"budget": budget_bytes + self._others_bytes}
                ),
            )
        except NoPlanError as error:
            least_bytes = error.least_budget_found_bytes
            least = None if least_bytes is None else least_bytes - self._others_bytes
            self.found[f"memfit on {kernels}"] = {"status": "no plan", "least_bytes": least}

    def time(self, turns: int) -> None:
        """Let the ways take turns; times are medians of ratios to eager's and to torch's."""
        seconds = dict(zip(self.steps, interleaved_seconds(list(self.steps.values()), turns), strict=True))
        for way, mine in seconds.items():
            found = self.found[way]
            found["seconds"] = statistics.median(mine)
            found["compile_seconds"] = max(0.0, found.pop("first_seconds") - 3 * found["seconds"])
            for other in ("eager", "torch"):
                if other in seconds:
                    pairs = zip(mine, seconds[other], strict=True)
                    found[f"time_over_{other}"] = statistics.median(each / base for each, base in pairs)


def _bytes_of(model: nn.Module) -> int:
    return sum(taken_bytes(tensor.nbytes, CPU) for tensor in (*model.parameters(), *model.buffers()))


def measure(*, model: str, share: float, small: bool) -> Iterator[dict[str, Any]]:
    """Give what each way takes of memory, then also of time."""
    import torch._functorch.config

    ways = Ways(model, small=small, count=2 if share == LEAST else 4)
    ways.add("eager", None)
    if share == LEAST:
        ways.add_planned("inductor", ways.resident_bytes + 4096)
        for times in TRIES:  # searches end after seconds, so that the next may not reach as much
            tried = ways.found["memfit on inductor"]
            if tried.get("least_bytes") is None:
                break
            ways.add_planned("inductor", int(tried["least_bytes"] * times))
    else:
        with torch._functorch.config.patch(activation_memory_budget=share):
            ways.add("torch", torch.compile)
        budget_bytes = -(-ways.found["torch"]["peak_bytes"] // PAGE) * PAGE
        for kernels in ("inductor", "eager"):
            ways.add_planned(kernels, budget_bytes)
    row = {"model": model, "share": share, "resident_bytes": ways.resident_bytes, "ways": ways.found}
    yield row
    ways.time(3 if small else TURNS)
    yield row


def table(rows: list[dict[str, Any]]) -> str:
    """Return rows as Markdown, as `benchmarks/tables.py` puts them into the docs."""
    head, lines, _ = inductor({"rows": rows, "turns": TURNS})
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *lines))


def run(model: str, share: float, *, small: bool) -> dict[str, Any]:
    """Return a row, from a process with caches of its own."""
    with tempfile.TemporaryDirectory(prefix="inductor-", ignore_cleanup_errors=True) as cache:
        request = {"model": model, "share": share, "small": small}
        environment = {"TORCHINDUCTOR_CACHE_DIR": cache}
        with fresh_cache():
            return in_fresh_process(__file__, request, timeout_seconds=CHILD_SECONDS, environment=environment)


def main() -> None:
    """Measure what is not stored yet, and store it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"of {', '.join(MODELS)}")
    parser.add_argument("--share", type=float, action="append", help="only this setting; 0 is the least budget")
    parser.add_argument("--small", action="store_true", help="a short try, not stored")
    parser.add_argument("--again", action="store_true", help="measure what is stored, too")
    parser.add_argument("--table", action="store_true", help="print what is stored")
    given = parser.parse_args()
    path = result_path("inductor")
    rows: list[dict[str, Any]] = load(path)["payload"]["rows"] if path.exists() else []
    if given.table:
        print(table(rows))
        return
    shares = given.share or ((0.5, LEAST) if given.small else (*SHARES, LEAST))
    for model, share in [(model, share) for model in given.models or DEFAULT for share in shares]:
        others = [row for row in rows if (row["model"], row["share"]) != (model, share)]
        if len(others) < len(rows) and not (given.again or given.small):
            continue
        found = run(model, share, small=given.small)
        if "error" in found:
            print(model, share, found["error"], flush=True)
            continue
        print(table([found]), flush=True)
        if not given.small:
            rows = [*others, found]
            store("inductor", {"rows": rows, "turns": TURNS})


if __name__ == "__main__" and not answer_if_child(measure):
    main()
