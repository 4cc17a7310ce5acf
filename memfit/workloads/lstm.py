"""Workload lstm: LSTM cells, stacked in layers and unrolled over time; every time step is classified."""

from __future__ import annotations

import math
from typing import cast

import torch
from torch import Tensor, nn

from memfit.workloads.parts import Options, Parts, cross_entropy

States = tuple[tuple[Tensor, Tensor], ...]


class Step(nn.Module):
    """One time step: each layer's cell reads the layer below."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.cells = nn.ModuleList(nn.LSTMCell(width, width) for _ in range(layers))

    def forward(self, inputs: Tensor, states: States) -> States:
        """Return the new states.

        Args:
            inputs: (batch, width), of the lowest layer.
            states: hidden and cell state of each layer from the lowest on, (batch, width) each.
        """
        now: list[tuple[Tensor, Tensor]] = []
        for cell, state in zip(self.cells, states, strict=True):
            now.append(cell(inputs, state))
            inputs = now[-1][0]
        return tuple(now)


class Segment(nn.Module):
    """Some time steps in a row; returns the top layer's output of each, and the last states."""

    def __init__(self, step: Step) -> None:
        super().__init__()
        self.step = step

    def forward(self, inputs: Tensor, states: States) -> tuple[list[Tensor], States]:
        """Return the top layer's outputs, (batch, width) each, and the last states.

        Args:
            inputs: (steps, batch, width).
            states: before the first of these steps, as for `Step`.
        """
        outputs: list[Tensor] = []
        for moment in inputs.unbind():
            states = self.step(moment, states)
            outputs.append(states[-1][0])
        return outputs, states


class UnrolledLSTM(nn.Module):
    """(batch, steps, width) -> (batch, classes, steps), in segments of sqrt(steps) (Chen et al. 2016, section 4.1)."""

    def __init__(self, *, layers: int, width: int, classes: int) -> None:
        super().__init__()
        self.segment = Segment(Step(layers, width))
        self.head = nn.Linear(width, classes)
        self.layers = layers

    def forward(self, inputs: Tensor) -> Tensor:
        nothing = inputs.new_zeros(inputs.shape[0], inputs.shape[2])
        states: States = ((nothing, nothing),) * self.layers
        outputs: list[Tensor] = []
        for part in inputs.transpose(0, 1).split(math.isqrt(inputs.shape[1])):
            seen, states = self.segment(part, states)
            outputs += seen
        return self.head(torch.stack(outputs, dim=1)).transpose(1, 2)


def make(_name: str, options: Options) -> Parts:
    """Return an unrolled LSTM, cross entropy over time steps, and a batch of noise with random labels."""
    batch, steps, layers, width, classes = (options[key] for key in ("batch", "steps", "layers", "width", "classes"))
    return Parts(
        model=UnrolledLSTM(layers=layers, width=width, classes=classes),
        loss=cross_entropy(options),
        batch=(torch.randn(batch, steps, width), torch.randint(classes, (batch, steps))),
    )


def places(model: nn.Module, granularity: str) -> list[nn.Module]:
    """Return the segments of time steps, or the time step."""
    segment = cast(UnrolledLSTM, model).segment
    return [segment] if granularity == "stage" else [segment.step]
