"""Lightning's Trainer inside a budget: `Trainer(callbacks=[MemfitCallback(budget="6GiB")])`."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

from memfit.errors import InvalidTargetError, UnsupportedStepError
from memfit.plan import Plan
from memfit.runtime.compile.model import PlannedCalls, compile_anew, release

# The core alone, or the whole framework, whose core has another name.
_is_core = "pytorch_lightning" in sys.modules or find_spec("lightning") is None
lightning: Any = import_module("pytorch_lightning" if _is_core else "lightning.pytorch")

_WHERE = "memfit.integrations.lightning"


class MemfitCallback(lightning.Callback):
    """Runs a module of a LightningModule inside a budget, in training and in evaluation.

        >>> from memfit.integrations.lightning import MemfitCallback
        >>> callback = MemfitCallback(budget="6GiB", module="net")

    Automatic and manual optimization, accumulation, clipping, precision, checkpoints and loggers stay Lightning's.

    Args:
        budget: the bytes for everything on the device: `"6GiB"`, or an integer.
        module: the name of the module that `training_step` calls, such as `"net"` for `self.net(inputs)`; by default
            the LightningModule itself, for a `training_step` that calls `self(inputs)`.
        options: `planner`, `options`, `time_limit_seconds`, `seed`, `host_budget`, `host_dir` as in `memfit.compile`.

    Raises:
        InvalidTargetError: there is no such module.
        UnsupportedStepError: several devices; a training step that did not call the module.
        MemfitError: as `memfit.compile`.
    """

    def __init__(self, budget: str | int, *, module: str = "", **options: Any) -> None:
        self._options = {"budget": budget, **options}
        self._name = module
        self._module: torch.nn.Module | None = None
        self._calls: PlannedCalls | None = None
        self._ran = 0

    @property
    def plans(self) -> list[Plan]:
        """The plans in use, one for each graph and tuple of sizes."""
        return [] if self._calls is None else self._calls.plans

    @property
    def most_bytes(self) -> int:
        """The most bytes on the device in any step that was measured: forward, loss, backward and update."""
        return 0 if self._calls is None else self._calls.account.most_bytes

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:  # noqa: ARG002
        """Let the module's calls run planned."""
        if trainer.world_size > 1:
            raise UnsupportedStepError(
                f"{_WHERE}: the Trainer runs {trainer.world_size} processes, and memfit does not plan across ranks "
                "yet; give Trainer(devices=1)"
            )
        modules = dict(pl_module.named_modules())
        if self._name not in modules:
            raise InvalidTargetError(
                f"{_WHERE}: {type(pl_module).__name__} has no module {self._name!r}; it has "
                f"{', '.join(name for name in modules if name and '.' not in name)}"
            )
        module = modules[self._name]
        if module is not self._module:
            # manual optimization runs backward in `training_step`, which is inside autocast
            manual = {"backward_autocast": not pl_module.automatic_optimization}
            self._calls = compile_anew(module, {**manual, **self._options}, _WHERE)
            self._module = module

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002
        """Follow the optimizers."""
        assert self._calls is not None
        self._calls.account.follow(*trainer.optimizers)

    def _begin_batch(self, *_given: Any) -> None:
        """Note which calls ran before the batch."""
        assert self._calls is not None
        self._ran = self._calls.account.ran

    def _end_batch(self, *_given: Any) -> None:
        """Refuse a step that called no planned module."""
        assert self._calls is not None
        if self._calls.account.ran == self._ran:
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

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:  # noqa: ARG002
        """Leave the module as it was: the Trainer tears nothing down then."""
        self.teardown(trainer, pl_module, "fit")

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:  # noqa: ARG002
        """Leave the module as it was."""
        if self._module is not None:
            release(self._module)
        self._module = None
