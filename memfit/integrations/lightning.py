"""Lightning's Trainer inside a budget: `Trainer(callbacks=[MemfitCallback(budget="6GiB")])`."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from memfit.errors import InvalidTargetError, UnsupportedStepError, naming_extra
from memfit.integrations.held import DDP, HeldModel, Reporting
from memfit.integrations.metrics import Metrics

# The core alone, or the whole framework, whose core has another name.
_is_core = "pytorch_lightning" in sys.modules or find_spec("lightning") is None
with naming_extra("lightning"):
    lightning: Any = import_module("pytorch_lightning" if _is_core else "lightning.pytorch")

_WHERE = "memfit.integrations.lightning"


class MemfitCallback(Reporting, lightning.Callback):
    """Runs a module of a LightningModule inside a budget, in training and in evaluation.

        >>> from memfit.integrations.lightning import MemfitCallback
        >>> callback = MemfitCallback(budget="6GiB", module="net")

    Automatic and manual optimization, accumulation, clipping, precision, checkpoints and loggers stay Lightning's.

    Args:
        budget: the bytes for everything on the device: `"6GiB"`, `"90% of the card"`, or an integer; of each rank's
            device, if there are several. `"60%"` of the loop's peak is for `door="checkpoint"` alone.
        module: the name of the module that `training_step` calls, such as `"net"` for `self.net(inputs)`; by default
            the LightningModule itself, for a `training_step` that calls `self(inputs)`.
        door: which of memfit's doors holds it. `auto`: `memfit.compile`, or else, with several processes, and for a
            module that the compiler breaks into several graphs, `memfit.checkpoint`. `compile`, `checkpoint`, `eager`:
            that one; the latter two are on from the beginning of a training to its end. Of several processes `compile`
            holds those of DDP, and leaves other models to `checkpoint`.
        log_to: where what steps take is written every `log_every_n_steps`, such as a logger of Lightning, `wandb` or
            `mlflow`: see `memfit.integrations.metrics`.
        options: of the door: those of `memfit.options.CompileOptions`, such as `planner` and `kernels`, for
            `memfit.compile`; `blocks`, `host_budget`, `budget_is`, `chunk_loss` for `memfit.checkpoint`; `host_budget`,
            `host_dir`, `chunk_loss` for `memfit.eager`.

    Raises:
        InvalidTargetError: there is no such module.
        UnsupportedStepError: a training step that did not call the module.
        MemfitError: as the door.
    """

    def __init__(
        self, budget: str | int, *, module: str = "", door: str = "auto", log_to: Any = None, **options: Any
    ) -> None:
        self._held = HeldModel(budget, door, options, _WHERE)
        self._metrics = None if log_to is None else Metrics(self, log_to)
        self._name = module
        self._ran = 0

    def _begin(self, trainer: Any, pl_module: Any) -> None:
        """Let the module's calls run planned: `configure_model` has made it by now."""
        self._hold(trainer, pl_module, is_training=False)

    on_fit_start = on_validation_start = on_test_start = on_predict_start = _begin

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Follow the optimizers."""
        self._hold(trainer, pl_module, is_training=True)
        self._held.follow(*trainer.optimizers)

    def _hold(self, trainer: Any, pl_module: Any, *, is_training: bool) -> None:
        modules = dict(pl_module.named_modules())
        if self._name not in modules:
            raise InvalidTargetError(
                f"{_WHERE}: {type(pl_module).__name__} has no module {self._name!r}; it has "
                f"{', '.join(name for name in modules if name and '.' not in name)}"
            )
        over_ranks = f"the Trainer runs {trainer.world_size} processes" if trainer.world_size > 1 else ""
        if over_ranks and type(trainer.strategy) is lightning.strategies.DDPStrategy:  # DeepSpeed's is derived from it
            over_ranks = DDP
        # manual optimization runs backward in `training_step`, which is inside autocast
        manual = not pl_module.automatic_optimization
        module = modules[self._name]
        self._held.hold(module, over_ranks=over_ranks, is_training=is_training, backward_autocast=manual)

    def _begin_batch(self, *_given: Any) -> None:
        """Note which calls ran before the batch."""
        self._ran = self._held.ran

    def _end_batch(self, *_given: Any) -> None:
        """Refuse a step that called no module that is held."""
        if self._held.model is not None and self._held.ran == self._ran:
            name = f"self.{self._name}(...)" if self._name else "self(...)"
            raise UnsupportedStepError(
                f"{_WHERE}: a step did not call {name}, so that its budget was not enforced; name the module that it "
                'calls: MemfitCallback(budget=..., module="net") for self.net(...)'
            )

    on_train_batch_start = on_validation_batch_start = on_test_batch_start = on_predict_batch_start = _begin_batch
    on_validation_batch_end = on_test_batch_end = on_predict_batch_end = _end_batch

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *given: Any) -> None:  # noqa: ARG002
        """As after any batch, but for one that `training_step` skipped by returning None: no backward pass follows."""
        if outputs or not pl_module.automatic_optimization:
            self._end_batch()
        step = trainer.global_step
        if self._metrics is not None and trainer.is_global_zero and step and step % trainer.log_every_n_steps == 0:
            self._metrics(step)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:  # noqa: ARG002
        """Leave the module as it was: the Trainer tears nothing down then."""
        self.teardown(trainer, pl_module, "fit")

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002
        """End the training."""
        self._held.end_training()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:  # noqa: ARG002
        """Leave the module as it was."""
        self._held.let_go()
