"""Random ops that are recomputed inside a CUDA graph: each draws from a state of Philox that the graph knows.

A graph holds no offsets. It reads them from the device, where a replay writes the present one of each generator that is
registered with it. The generator's own state cannot be set back during a capture. An op that is recomputed
therefore draws from a copy of the generator, and the copy is set before each replay to where the generator will be
when the op draws first: as far from the start of the step as it was in a step that ran as planned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from memfit.capture import generators
from memfit.capture.generators import STATE_BYTES
from memfit.errors import UnsupportedStepError


class PhiloxStates:
    """The states of a step's random ops that are recomputed, in the order in which they are.

    Args:
        device: of the step.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._offsets: list[int] = []  # from the generator's at the start of the step
        self._copies: list[torch.Generator] = []

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Run a planned step, and note where its ops draw again."""
        start = 0 if self._device.type != "cuda" else self._generator.get_offset()

        def note(state: torch.Tensor, device: str, target: Callable[..., Any], args: Any, kwargs: Any) -> Any:
            at = torch.device(device)
            if (at.type, at.index or 0) != (self._device.type, self._device.index or 0) or at.type != "cuda":
                raise UnsupportedStepError(
                    f"cuda_graph=True: the step draws random numbers on {device} again, expected {self._device}; leave "
                    "it out"
                )
            self._offsets.append(int(state.view(torch.int64)[1]) - start)
            return generators.replay_now(state, device, target, args, kwargs)

        with generators.replayed_by(note):
            yield

    def register(self, graph: Any) -> None:
        """Make the copies, and let a graph that is to be captured know them."""
        self._copies = [self._generator.clone_state() for _ in self._offsets]
        for copy in self._copies:
            graph.register_generator_state(copy)

    @contextmanager
    def captured(self) -> Iterator[None]:
        """Capture the step."""
        copies = iter(self._copies)

        def draw(
            _state: torch.Tensor, _device: str, target: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]
        ) -> Any:
            own = self._generator.graphsafe_get_state()
            self._generator.graphsafe_set_state(next(copies))
            try:
                return target(*args, **kwargs)
            finally:
                self._generator.graphsafe_set_state(own)

        with generators.replayed_by(draw, saved=lambda: torch.zeros(STATE_BYTES["cuda"], dtype=torch.uint8)):
            yield

    def set_for_replay(self) -> None:
        """Set the copies to where the generator will be when their ops draw first."""
        if self._copies:
            seed, offset = self._generator.initial_seed(), self._generator.get_offset()
            for copy, further in zip(self._copies, self._offsets, strict=True):
                copy.manual_seed(seed)
                copy.set_offset(offset + further)

    @property
    def _generator(self) -> torch.Generator:
        return torch.cuda.default_generators[self._device.index or 0]
