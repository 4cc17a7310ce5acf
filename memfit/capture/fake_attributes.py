"""The Python attributes of a model's tensors on their fakes: the step reads them there, and may set them there."""

from __future__ import annotations

import torch

from memfit.capture.copies import MISSING, is_same, own_attributes


class FakeAttributes:
    """Gives a fake the attributes that its tensor has: numbers, tensors and all else as they are.

    Args:
        tensor: a parameter or a buffer.
        fake: that stands for it.
    """

    def __init__(self, tensor: torch.Tensor, fake: torch.Tensor) -> None:
        self._fakes = own_attributes(fake) or {}
        self._of_fake = set(self._fakes)
        own = own_attributes(tensor) or {}
        self._given = {name: value for name, value in own.items() if name not in self._of_fake}
        self._fakes.update(self._given)

    def move_to(self, tensor: torch.Tensor) -> None:
        """Set on the tensor what the step has set on the fake, where `Reads` finds it and resets it."""
        own = own_attributes(tensor)
        assert own is not None
        for name in {*self._given, *self._fakes} - self._of_fake:
            value = self._fakes.get(name, MISSING)
            if is_same(self._given.get(name, MISSING), value):
                continue
            if value is MISSING:
                own.pop(name, None)
            else:
                own[name] = value
