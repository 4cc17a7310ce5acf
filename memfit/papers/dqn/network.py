"""The network: node states, graph state and Q values (equations 1 to 3), for a batch of agent states at once.

Two identities make it fast, and change nothing but the order of sums:

- ReLU(W4 w) = ReLU(W4) w for a lag w >= 0, so that the edges' term of equation 1 is W3 ReLU(W4) times the sum of a
  row's lags, which never changes.
- Sums over neighbours are made storage by storage (see `memfit.papers.dqn.rows.Neighbours`). The relation is
  symmetric, so that the same sums carry gradients back.

In x_v only the validity changes from state to state, so that a batch of states is one bool for each action and state.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from memfit.errors import InvalidFileError
from memfit.papers.dqn.rows import FEATURES, VALID, Rows
from memfit.system.files import read_bytes, write_atomically

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

ROUNDS = 4  # T of section 4.4.1
_SMALLER = 10.0  # the last parameters begin smaller by it: Q values begin near 0, as the rewards of most actions are


@dataclass(frozen=True, slots=True, kw_only=True)
class RowTensors:
    """The graph of rows as tensors: x_v without validity, N(v), and the rows of the actions."""

    features: Tensor
    storage: Tensor
    storage_count: int
    follows: Tensor
    lags: Tensor
    actions: Tensor

    @staticmethod
    def of(rows: Rows, actions: NDArray[np.int64]) -> RowTensors:
        """Return the tensors of a graph.

        Args:
            rows: the graph.
            actions: the row of each action.
        """
        near = rows.neighbours
        return RowTensors(
            features=torch.from_numpy(rows.features.copy()),
            storage=torch.from_numpy(near.storage.copy()),
            storage_count=near.count,
            follows=torch.from_numpy(near.follows[:-1].copy())[:, None],
            lags=torch.from_numpy(near.lags.copy())[:, None],
            actions=torch.from_numpy(actions.copy()),
        )


class _NeighbourSum(torch.autograd.Function):
    """The sum over N(v) of float32[rows, columns]; its own gradient, for u is in N(v) where v is in N(u)."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, graph: RowTensors) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the sums."""
        ctx.graph = graph
        return _summed(states, graph)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the gradient of the states."""
        return _summed(gradient, ctx.graph), None


def _summed(states: Tensor, graph: RowTensors) -> Tensor:
    totals = states.new_zeros(graph.storage_count, states.shape[1]).index_add_(0, graph.storage, states)
    sums = totals.index_select(0, graph.storage)
    sums[:-1].addcmul_(states[1:], graph.follows)
    sums[1:].addcmul_(states[:-1], graph.follows)
    return sums


class Network(torch.nn.Module):
    """The parameters W1 to W8; p is `hidden`."""

    def __init__(self, hidden: int, rows: RowTensors, seed: int) -> None:
        """Draw the parameters, scaled by what they are multiplied with, so that all states begin near 1.

        Args:
            hidden: p.
            rows: a graph, for the scales of sums over neighbours and over all rows.
            seed: of the parameters.
        """
        super().__init__()
        draw = torch.Generator().manual_seed(seed % (1 << 63))
        count = max(1, len(rows.features))
        neighbours = 3.0 + float(torch.bincount(rows.storage).double().square().sum()) / count if count > 1 else 3.0
        shapes = {
            "W1": (hidden, FEATURES, 1.0),
            "W2": (hidden, hidden, neighbours),
            "W3": (hidden, hidden, 1.0),
            "W4": (hidden, 1, 1.0),
            "W5": (hidden, hidden, float(count)),
            "W6": (hidden, hidden, 1.0),
            "W7": (1, 3 * hidden, _SMALLER),
            "W8": (hidden, hidden, 1.0),
        }
        for name, (outputs, inputs, summed) in shapes.items():
            weights = torch.randn(outputs, inputs, generator=draw) / (inputs**0.5 * summed)
            self.register_parameter(name, torch.nn.Parameter(weights))

    def __getitem__(self, number: int) -> Tensor:
        return self.get_parameter(f"W{number}")

    def node_states(self, rows: RowTensors, valid: Tensor) -> Tensor:
        """Return S^T, float32[rows, states, p] (equation 1).

        Args:
            rows: the graph.
            valid: float32[actions, states].
        """
        count, states, hidden = len(rows.features), valid.shape[1], self[1].shape[0]
        of_rows = rows.features @ self[1].T + rows.lags @ (self[3] @ torch.relu(self[4])).T
        is_valid = valid.new_zeros(count, states).index_copy(0, rows.actions, valid)
        constant = of_rows[:, None, :] + is_valid[:, :, None] * self[1][:, VALID]
        state = torch.relu(constant)  # S^0 is zero
        for _ in range(ROUNDS - 1):
            sums: Tensor = _NeighbourSum.apply(state.view(count, states * hidden), rows)  # pyright: ignore
            state = torch.relu(constant + sums.view(count, states, hidden) @ self[2].T)
        return state

    def q_values(self, rows: RowTensors, valid: Tensor, executing: Tensor) -> Tensor:
        """Return Q of every action in every state, float32[actions, states] (equations 2 and 3), valid or not.

        ReLU works entry by entry and W7 is linear, so that the two parts of equation 3 are added.

        Args:
            rows: the graph.
            valid: float32[actions, states].
            executing: int64[states], the row under execution.
        """
        states, hidden = self.node_states(rows, valid), self[1].shape[0]
        current = states[executing, torch.arange(len(executing))]
        graph = torch.cat([states.sum(0) @ self[5].T, current @ self[6].T], dim=1)
        of_action = torch.relu(states.index_select(0, rows.actions) @ self[8].T) @ self[7][0, 2 * hidden :]
        return of_action + torch.relu(graph) @ self[7][0, : 2 * hidden]

    def save(self, path: Path) -> None:
        """Write the parameters as safetensors, atomically."""
        from safetensors.torch import save

        write_atomically(path, save({name: value.detach() for name, value in self.named_parameters()}))

    def load(self, path: Path) -> Network:
        """Take the parameters of a file, with its p; return self.

        Raises:
            InvalidFileError: unreadable, or not the parameters of this network.
        """
        from safetensors import SafetensorError
        from safetensors.torch import load

        try:
            found = load(read_bytes(path))
        except SafetensorError as error:
            raise InvalidFileError(f"{path}: is no safetensors file: {error}; give one that save_to wrote") from error
        names = [name for name, _ in self.named_parameters()]
        hidden = found["W1"].shape[0] if "W1" in found and found["W1"].ndim else 0
        expected = {
            name: tuple(hidden if size == self[1].shape[0] else size for size in self.get_parameter(name).shape)
            for name in names
        }
        expected |= {"W1": (hidden, FEATURES), "W4": (hidden, 1), "W7": (1, 3 * hidden)}
        if {name: tuple(value.shape) for name, value in found.items()} != expected or hidden == 0:
            raise InvalidFileError(f"{path}: does not hold the parameters {', '.join(names)} of planner dqn's network")
        for name in names:
            self.register_parameter(name, torch.nn.Parameter(found[name].float()))
        return self
