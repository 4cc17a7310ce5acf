"""The ranks of a planned step: one process alone, or several that train one model together."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, TypeVar

import torch

from memfit.capture import TrainingStep
from memfit.capture.across import Across
from memfit.errors import BY_CHECKPOINT, InvalidOptionError, RankError
from memfit.plan import Plan
from memfit.planning import Settings
from memfit.step.agreement import Agreement, agreement_of, lost
from memfit.step.distributed.planning import AcrossRanks
from memfit.step.prepare import Planning
from memfit.torch_private.ranks import is_lost
from memfit.torch_private.tensors import tree_flatten

T = TypeVar("T")

_NEW, _FAILED = -1, -2  # in the place of the number of the program that a rank is about to run


class Ranks:
    """The processes that a planned step runs on: here one alone."""

    def start(self, settings: Settings) -> Settings:
        """Begin with the same model everywhere; return the settings, without what the ranks cannot do."""
        return settings

    def key(self) -> Hashable:
        """Return what tells apart steps of one batch that need programs of their own."""
        return None

    def found(self, find: Callable[[], int | None], batch: Any) -> bool:  # noqa: ARG002
        """Return whether all ranks have found the same program.

        Args:
            find: called once; returns the number of this rank's program, None if it has to be made.
            batch: of the call, for messages.
        """
        return find() is not None

    def together(self, what: str, make: Callable[[], T]) -> T:  # noqa: ARG002
        """Return what `make` returns, once it has returned on all ranks.

        Args:
            what: is done, for messages.
            make: called once on each rank; what it raises is raised on all of them.
        """
        return make()

    def planning(self, own: Planning) -> Planning:
        """Return where costs and plan come from."""
        return own

    def require_same_plan(self, plan: Plan) -> None:
        """Raise RankError unless all ranks are about to run the same plan."""

    def running(self) -> AbstractContextManager[None]:
        """Run the ops of a step in the block."""
        return nullcontext()

    def most_bytes(self, measured_bytes: int) -> int:
        """Return the bytes that a step took on the rank where it took most."""
        return measured_bytes


class ManyRanks(Ranks):
    """Several processes: rank 0 plans, and all capture, plan, run and correct their steps at the same time.

    Args:
        step: trains across ranks.
        across: the ranks.
    """

    def __init__(self, step: TrainingStep, across: Across) -> None:
        self._step = step
        self._across = across
        self._agreement = agreement_of(across.group)

    def start(self, settings: Settings) -> Settings:
        """Compare models and settings; then give all ranks rank 0's parameters and buffers.

        Raises:
            RankError: names the rank that differs.
            InvalidOptionError: an arena is asked for.
        """
        if settings.arena:
            raise InvalidOptionError("arena=True is not supported with a process_group; leave one of them out")
        lines = [f"{name}: {setting!r}" for name, setting in _compared(settings).items()]
        require_same_model(self._agreement, self._step.model, lines, "model and settings")
        self._across.begin(self._step.model)
        # What is found behind the steps is found at another step on each rank.
        return replace(settings, search_behind=False)

    def key(self) -> Hashable:
        """Return whether the step reduces its gradients."""
        return self._across.reduces

    def found(self, find: Callable[[], int | None], batch: Any) -> bool:
        """Return whether all ranks have found the same program; if some have none, all make one.

        Raises:
            RankError: ranks have found different programs; names a rank and its batch.
            MemfitError: another rank failed.
        """
        failed: list[Exception] = []
        try:
            self._require_reduced()
            number = find()
            number = _NEW if number is None else number
        except Exception as error:  # noqa: BLE001 (it is sent to all ranks, which raise it)
            number = _FAILED
            failed.append(error)

        def tell() -> None:
            for error in failed:
                raise error

        numbers = [row[0] for row in self._agreement.numbers("beginning a step", number)]
        if _FAILED in numbers:
            self._agreement.together("beginning a step", tell)
        if len(set(numbers)) == 1:
            return numbers[0] != _NEW
        if _NEW in numbers:
            return False
        shapes = self._agreement.all("beginning a step", _shapes(batch))
        other = next(rank for rank, each in enumerate(numbers) if each != numbers[0])
        raise RankError(
            f"rank {other} calls the step with {shapes[other]}, rank 0 with {shapes[0]}, or in another state; "
            "all ranks must call it with batches of the same shapes, in the same mode; with others "
            f"{BY_CHECKPOINT}"
        )

    def _require_reduced(self) -> None:
        if self._step.optimizer is not None and not self._across.reduces:
            raise InvalidOptionError(
                "the step is called inside no_sync, but it updates the parameters in each call; make it without an "
                "optimizer, and step the optimizer after the last call"
            )

    def together(self, what: str, make: Callable[[], T]) -> T:
        """Return what `make` returns, once it has returned on all ranks.

        Raises:
            Exception: as `make`, here or on another rank.
        """
        return self._agreement.together(what, make)

    def planning(self, own: Planning) -> Planning:
        """Return the planning of all ranks together."""
        return AcrossRanks(own, self._agreement, self._across)

    def require_same_plan(self, plan: Plan) -> None:
        """Compare the plans' instructions."""
        lines = list(plan.schedule.lines())
        self._agreement.require_equal("plans", _digest(lines), lambda: lines, "give all ranks the same plan")

    @contextmanager
    def running(self) -> Iterator[None]:
        """Give all ranks rank 0's buffers; then run the ops of a step in the block.

        Raises:
            RankError: another rank is gone.
        """
        try:
            self._across.share_buffers(self._step.model)
            yield
        except RuntimeError as error:
            if not is_lost(error):
                raise
            raise lost("running a step", error) from None

    def most_bytes(self, measured_bytes: int) -> int:
        """Return the bytes that the step took on the rank where it took most."""
        return max(row[0] for row in self._agreement.numbers("measuring a step", measured_bytes))


def require_same_model(agreement: Agreement, model: torch.nn.Module, lines: list[str], what: str) -> None:
    """Raise RankError unless all ranks have the same model.

    Args:
        agreement: of the ranks.
        model: any.
        lines: of what else is compared.
        what: is compared.
    """
    lines = [
        *lines,
        *(f"parameter {name!r}, {_form(tensor)}" for name, tensor in model.named_parameters()),
        *(f"buffer {name!r}, {_form(tensor)}" for name, tensor in model.named_buffers()),
    ]
    remedy = "make the same model, and call memfit.fit with the same settings, on all ranks"
    agreement.require_equal(what, _digest(lines), lambda: lines, remedy)


def ranks_of(step: TrainingStep) -> Ranks:
    """Return the ranks that a step runs on; all of them call this at the same time."""
    return Ranks() if step.across is None else ManyRanks(step, step.across)


def _compared(settings: Settings) -> dict[str, Any]:
    names = ("budget", "planner", "options", "seed", "host_budget_bytes", "carry_over")
    return {name: getattr(settings, name) for name in names}


def _form(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}, requires_grad={tensor.requires_grad}"


def _shapes(batch: Any) -> str:
    leaves = (list(leaf.shape) if isinstance(leaf, torch.Tensor) else leaf for leaf in tree_flatten(batch)[0])
    return f"a batch of {', '.join(map(str, leaves))}"


def _digest(lines: list[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()
