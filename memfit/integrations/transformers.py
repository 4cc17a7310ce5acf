"""Transformers' Trainer inside a budget: `Trainer(..., callbacks=[MemfitCallback(budget="6GiB")])`."""

from __future__ import annotations

from typing import Any

import torch

from memfit.checkpointing.blocks import find_blocks
from memfit.errors import UnsupportedStepError, naming_extra
from memfit.integrations.held import DDP, HeldModel, Reporting
from memfit.integrations.metrics import Metrics
from memfit.torch_private.modules import is_compiled

with naming_extra("transformers"):
    import transformers
    from accelerate.state import AcceleratorState
    from accelerate.utils import DynamoBackend

_WHERE = "memfit.integrations.transformers"


class MemfitCallback(Reporting, transformers.TrainerCallback):
    """Runs the model of a Trainer inside a budget, in training and in evaluation.

        >>> from memfit.integrations.transformers import MemfitCallback
        >>> callback = MemfitCallback(budget="6GiB")

    Give it to the Trainer when that is made (`callbacks=[callback]`), so that an evaluation without training is held to
    the budget too. Accumulation, mixed precision, clipping, label smoothing, saving and resuming stay the Trainer's.

    Args:
        budget: the bytes for everything on the device: `"6GiB"`, `"90% of the card"`, or an integer; of each rank's
            device, if there are several. `"60%"` of the loop's peak is for `door="checkpoint"` alone.
        door: which of memfit's doors holds it. `auto`: `memfit.compile`, or else, with several processes, for a
            model that the compiler breaks into several graphs, and with `torch_compile=True`, `memfit.checkpoint`.
            `compile`, `checkpoint`, `eager`: that one; `eager` is on from the beginning of a training to its end. Of
            several processes `compile` holds those of DDP, and leaves other models to `checkpoint`.
        log_to: where what steps take is written every `logging_steps`, such as a SummaryWriter, `wandb` or `mlflow`:
            see `memfit.integrations.metrics`.
        options: of the door: those of `memfit.options.CompileOptions`, such as `planner` and `kernels`, for
            `memfit.compile`; `blocks`, `host_budget`, `budget_is`, `chunk_loss` for `memfit.checkpoint`; `host_budget`,
            `host_dir`, `chunk_loss` for `memfit.eager`.

    Raises:
        InvalidOptionError, InvalidBudgetError: when the Trainer is made; other errors as the door.
        UnsupportedStepError: TrainingArguments that ask for what the door does not hold.
    """

    def __init__(self, budget: str | int, *, door: str = "auto", log_to: Any = None, **options: Any) -> None:
        self._held = HeldModel(budget, door, options, _WHERE)
        self._metrics = None if log_to is None else Metrics(self, log_to)
        self._compiler: dict[str, Any] = {}  # arguments of `compile`, by the Trainer's
        self._compiles_blocks = False

    def on_init_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:  # noqa: ARG002
        """Let the model's calls run planned."""
        self._hold(args, given["model"], is_training=False)

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:  # noqa: ARG002
        """Follow the optimizer of this training; a `model_init` has made another model by now."""
        self._hold(args, given["model"], is_training=True)
        self._held.follow(given["optimizer"])

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:  # noqa: ARG002
        """Write what the step took, as often as the Trainer logs."""
        if self._metrics is not None and state.is_world_process_zero and control.should_log:
            self._metrics(state.global_step)

    def on_prediction_step(self, args: Any, state: Any, control: Any, **given: Any) -> None:  # noqa: ARG002
        """Refuse an evaluation that runs unplanned."""
        if self._held.holds_evaluations and self._held.ran == 0:
            raise UnsupportedStepError(
                f"{_WHERE}: the evaluation does not call the Trainer's model, or the callback was added after the "
                "Trainer was made; give it to the Trainer as callbacks=[MemfitCallback(...)]"
            )

    def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:  # noqa: ARG002
        """Stop following the optimizer."""
        self._held.end_training()

    def _hold(self, args: Any, model: Any, *, is_training: bool) -> None:
        if args.n_gpu > 1:
            raise UnsupportedStepError(
                f"{_WHERE}: the Trainer runs on {args.n_gpu} devices by DataParallel, in one process; start it with "
                "torchrun, or show it one device, for example by CUDA_VISIBLE_DEVICES=0"
            )
        is_sharded = args.deepspeed or args.fsdp
        over_ranks = DDP if args.world_size > 1 else ""
        over_ranks = "the Trainer runs by FSDP or DeepSpeed" if is_sharded else over_ranks
        why = "the Trainer compiles the model (torch_compile=True)" if args.torch_compile else ""
        if why:
            self._held.require_allowed(why)
            self._compile(model)
        self._held.hold(model, why_not_compile=why, over_ranks=over_ranks, is_training=is_training)

    def _compile(self, model: torch.nn.Module) -> None:
        """Compile the model that the Trainer gives to its callbacks: the one inside of Accelerate's wrapper."""
        plugin = AcceleratorState().dynamo_plugin
        if plugin.backend != DynamoBackend.NO:
            self._compiler, self._compiles_blocks = plugin.to_kwargs(), plugin.use_regional_compilation
            plugin.backend = DynamoBackend.NO
        parts = [block for _, block in find_blocks(model)] if self._compiles_blocks else [model]
        for part in parts:
            if not is_compiled(part):
                part.compile(**self._compiler)


class MemfitTrainer(transformers.Trainer):
    """A Trainer whose steps run inside a budget: a Trainer with a MemfitCallback, which is its attribute `memfit`.

    Args:
        budget: the bytes for everything on the device: `"6GiB"`, or an integer.
        memfit_options: a dictionary of what `MemfitCallback` takes beside it, such as `{"door": "checkpoint"}`.
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
