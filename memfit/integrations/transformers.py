"""Transformers' Trainer inside a budget: `Trainer(..., callbacks=[MemfitCallback(budget="6GiB")])`."""

from __future__ import annotations

from typing import Any

import torch
import transformers

from memfit.errors import InvalidOptionError, UnsupportedStepError
from memfit.plan import Plan
from memfit.runtime.compile.model import PlannedCalls, compile_anew, release
from memfit.torch_private.modules import own_call

_WHERE = "memfit.integrations.transformers"


class MemfitCallback(transformers.TrainerCallback):
    """Runs the model of a Trainer inside a budget, in training and in evaluation.

        >>> from memfit.integrations.transformers import MemfitCallback
        >>> callback = MemfitCallback(budget="6GiB")

    Give it to the Trainer when that is made (`callbacks=[callback]`), so that an evaluation without training is held to
    the budget too. Accumulation, mixed precision, clipping, label smoothing, saving and resuming stay the Trainer's.

    Args:
        budget: the bytes for everything on the device: `"6GiB"`, or an integer.
        options: `planner`, `options`, `time_limit_seconds`, `seed`, `host_budget`, `host_dir` as in `memfit.compile`.

    Raises:
        InvalidOptionError, InvalidBudgetError: when the Trainer is made; other errors as `memfit.compile`.
        UnsupportedStepError: TrainingArguments that ask for several devices, or for another compiler.
    """

    def __init__(self, budget: str | int, **options: Any) -> None:
        self._options = {"budget": budget, **options}
        self._model: torch.nn.Module | None = None
        self._calls: PlannedCalls | None = None

    @property
    def plans(self) -> list[Plan]:
        """The plans in use, one for each graph and tuple of sizes."""
        return [] if self._calls is None else self._calls.plans

    @property
    def most_bytes(self) -> int:
        """The most bytes on the device in any step that was measured: forward, loss, backward and update."""
        return 0 if self._calls is None else self._calls.account.most_bytes

    def on_init_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:  # noqa: ARG002
        """Let the model's calls run planned."""
        _require_one_device(args)
        self._plan(given["model"])

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:  # noqa: ARG002
        """Follow the optimizer of this training; a `model_init` has made another model by now."""
        _require_one_device(args)
        self._plan(given["model"]).account.follow(given["optimizer"])

    def on_prediction_step(self, args: Any, state: Any, control: Any, **given: Any) -> None:  # noqa: ARG002
        """Refuse an evaluation that runs unplanned."""
        if self._calls is None or self._calls.account.ran == 0:
            raise UnsupportedStepError(
                f"{_WHERE}: the evaluation does not call the Trainer's model, or the callback was added after the "
                "Trainer was made; give it to the Trainer as callbacks=[MemfitCallback(...)]"
            )

    def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:  # noqa: ARG002
        """Let go of the optimizer."""
        if self._calls is not None:
            self._calls.account.follow()

    def _plan(self, model: Any) -> PlannedCalls:
        if self._calls is None or own_call(model) is not self._calls:
            if self._model is not None and own_call(self._model) is self._calls:
                release(self._model)
            self._calls = compile_anew(model, self._options, _WHERE)
            self._model = model
        return self._calls


class MemfitTrainer(transformers.Trainer):
    """A Trainer whose steps run inside a budget: a Trainer with a MemfitCallback, which is its attribute `memfit`.

    Args:
        budget: the bytes for everything on the device: `"6GiB"`, or an integer.
        memfit_options: a dictionary of what `MemfitCallback` takes beside it.
        arguments: as for Trainer.
        named: as for Trainer.

    Raises:
        MemfitError: as `MemfitCallback`.
    """

    def __init__(
        self, *arguments: Any, budget: str | int, memfit_options: dict[str, Any] | None = None, **named: Any
    ) -> None:
        self.memfit = MemfitCallback(budget, **(memfit_options or {}))
        named["callbacks"] = [*(named.get("callbacks") or ()), self.memfit]
        super().__init__(*arguments, **named)


def _require_one_device(args: Any) -> None:
    if args.world_size > 1 or args.n_gpu > 1 or args.deepspeed or args.fsdp:
        raise UnsupportedStepError(
            f"{_WHERE}: the Trainer runs on several devices (DDP, DataParallel, FSDP or DeepSpeed), and memfit does "
            "not plan across ranks yet; show it one device, for example by CUDA_VISIBLE_DEVICES=0"
        )
    if args.torch_compile:
        raise InvalidOptionError(
            f"{_WHERE}: TrainingArguments(torch_compile=True) compiles the model by itself, and its steps would have "
            "no budget; leave it out"
        )
