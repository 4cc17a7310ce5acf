"""Planned steps are bound to their model and optimizer, so that a copy of one would train the original."""

from __future__ import annotations

from typing import Any

from memfit.errors import UnsupportedStepError


class Uncopied:
    """Base of objects that `copy` and `pickle` refuse by name."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UnsupportedStepError(
            f"a {type(self).__name__} cannot be copied or pickled: it runs compiled code over the tensors of its model "
            "and optimizer, and a copy would train those; copy or save model, optimizer and plan (step.plan.save), and "
            "call memfit.fit with them"
        )
