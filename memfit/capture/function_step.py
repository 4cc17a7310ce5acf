"""FunctionStep: a call of an iterative function, `state = function(state, batch)`, in the place of a training step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from memfit.capture.placement import require_dense
from memfit.capture.training_step import TrainingStep
from memfit.errors import CaptureError, InvalidTargetError
from memfit.torch_private.tensors import tree_flatten


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionStep(TrainingStep):
    """One iteration of a function that is no training: no parameters, no backward pass, no update.

    Its `loss` is the function, and its `batch` the pair (state, batch). `FunctionStep.of` makes one.
    """

    has_backward: ClassVar[bool] = False

    @staticmethod
    def of(function: Callable[[Any, Any], Any], state: Any, batch: Any = None, *, name: str = "") -> FunctionStep:
        """Return the step of `state = function(state, batch)`.

        >>> import torch
        >>> step = FunctionStep.of(lambda x, matrix: matrix @ x, torch.ones(2), 2 * torch.eye(2))
        >>> step.run_eager(step.batch)
        tensor([2., 2.])

        Args:
            function: of a state and a batch; it returns the next state, nested as the one given, of tensors of the
                same shapes and dtypes.
            state: tensors in nested tuples, lists and dicts.
            batch: handed to each call: the data, say.
            name: shown in reports; the function's name where it is empty.

        Raises:
            InvalidTargetError: no function, or a state that holds something else than tensors.
            UnsupportedStepError: sparse, nested or quantized tensors.
        """
        if not callable(function):
            raise InvalidTargetError(f"function is a {type(function).__name__}, expected a function(state, batch)")
        leaves = tree_flatten(state)[0]
        for number, leaf in enumerate(leaves):
            if not isinstance(leaf, torch.Tensor):
                raise InvalidTargetError(
                    f"leaf {number} of the state is a {type(leaf).__name__}, expected a tensor: the planned function "
                    "runs no Python, so that a number would never change; torch.tensor(value) makes it a tensor"
                )
        if not leaves:
            raise InvalidTargetError("the state holds no tensor")
        require_dense(state, "state")
        require_dense(batch, "batch")
        own = name or getattr(function, "__name__", "") or type(function).__name__
        return FunctionStep(model=torch.nn.Module(), loss=function, batch=(state, batch), name=own)

    def compute_loss(self, model: torch.nn.Module, batch: Any) -> Any:  # noqa: ARG002 (as TrainingStep)
        """Return the next state.

        Args:
            model: not used.
            batch: the pair (state, batch).
        """
        return self.loss(*batch)

    def run_eager(self, batch: Any, *, model: torch.nn.Module | None = None) -> Any:  # noqa: ARG002 (as TrainingStep)
        """Return the next state, computed without autograd.

        Args:
            batch: the pair (state, batch).
            model: not used.
        """
        with torch.no_grad():
            return self.loss(*batch)


def require_state_like(before: Any, after: Any) -> None:
    """Refuse a function whose result cannot be the state of its next call.

    Args:
        before: the state that it was given.
        after: what it returned.

    Raises:
        CaptureError: says which leaf differs, and how.
    """
    given, structure = tree_flatten(before)
    returned, other = tree_flatten(after)
    if structure != other:
        raise CaptureError(f"the function returned a state nested as {other}, expected as it was given: {structure}")
    for number, (mine, theirs) in enumerate(zip(given, returned, strict=True)):
        found = _described(theirs)
        if found != _described(mine):
            raise CaptureError(
                f"the function returned {found} for leaf {number} of the state, expected {_described(mine)} as given"
            )


def _described(leaf: Any) -> str:
    if not isinstance(leaf, torch.Tensor):
        return f"a {type(leaf).__name__}"
    return f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)} on {leaf.device}"
