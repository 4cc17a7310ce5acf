"""Algorithm 1: episodes, epsilon, replay and fitted Q iteration (equations 4 and 5).

Where the paper is silent:
- Without a number of episodes l, the share of the time limit that has passed takes the place of episode / l.
- The steps of SGD are Adam's, with gradients clipped to norm 1: the sums over all rows make plain steps unstable.
- A batch is drawn with replacement; the oldest transitions leave a full replay.
- gamma, the learning rate, p and the size of a batch are options; their defaults were tried on ResNet-50.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from memfit.papers.dqn.environment import Environment, State
from memfit.papers.dqn.network import Network, RowTensors

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

_LARGEST_GRADIENT = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Transition:
    """One step as raw states. Node states are recomputed from them, so that gradients reach all parameters.

    Attributes:
        valid, next_valid: packed bits, one an action.
        row, next_row: under execution.
        action: that was taken.
        reward: of it.
        is_terminal: whether nothing follows.
    """

    valid: bytes
    row: int
    action: int
    reward: float
    next_valid: bytes
    next_row: int
    is_terminal: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Learning:
    """What training is set to; see the options of planner `dqn`."""

    learning_rate: float
    gamma: float
    batch: int
    replay: int


class Agent:
    """A network with its replay, for one environment."""

    def __init__(self, environment: Environment, network: Network, learning: Learning, seed: int) -> None:
        """Begin with an empty replay.

        Args:
            environment: to act in.
            network: is trained.
            learning: how.
            seed: of random actions and batches.
        """
        self.environment, self.network, self.learning = environment, network, learning
        self.rows = RowTensors.of(environment.rows, environment.actions)
        self.replay: deque[Transition] = deque(maxlen=learning.replay)
        self.optimizer = torch.optim.Adam(network.parameters(), lr=learning.learning_rate)
        self.random = np.random.default_rng(seed)

    def episode(self, share: float, on_step: Callable[[], bool], limit_bytes: int | None = None) -> float:
        """Act until the episode ends, learning at each step; return the sum of the rewards.

        Args:
            share: of all episodes that are done; an action is random if a random number exceeds it.
            on_step: called after each step; if it returns false, the episode ends there.
            limit_bytes: takes the place of the budget in this episode.
        """
        environment, total = self.environment, 0.0
        environment.reset(limit_bytes)
        while not environment.is_terminal:
            state = environment.state
            action = self.random_action(state) if self.random.random() > share else self.best_action(state)
            reward = environment.step(action)
            total += reward
            self.replay.append(_transition(state, action, reward, environment))
            self.learn()
            if not on_step():
                break
        return total

    def random_action(self, state: State) -> int:
        """Return a random valid action."""
        return int(self.random.choice(np.flatnonzero(state.valid)))

    def best_action(self, state: State) -> int:
        """Return the valid action of the largest Q value."""
        with torch.no_grad():
            values = self.network.q_values(self.rows, _floats(state.valid[:, None]), torch.tensor([state.row]))[:, 0]
        values[torch.from_numpy(~state.valid)] = -torch.inf
        return int(values.argmax())

    def learn(self) -> float:
        """Take one step over equation 4 on a batch of the replay; return its loss."""
        picked = self.random.integers(len(self.replay), size=self.learning.batch)
        loss = self.loss([self.replay[int(number)] for number in picked])
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.network.parameters(), _LARGEST_GRADIENT)
        self.optimizer.step()
        return float(loss.detach())

    def loss(self, batch: list[Transition]) -> Tensor:
        """Return the mean of equation 4 over a batch.

        Args:
            batch: transitions of the replay.
        """
        follows = self._unpacked([each.next_valid for each in batch])
        with torch.no_grad():  # y is constant
            after = self._values(follows, [each.next_row for each in batch])
            after[torch.from_numpy(~follows)] = -torch.inf
            best = after.max(dim=0).values
            best[torch.tensor([each.is_terminal for each in batch])] = 0.0
            y = self.learning.gamma * best + torch.tensor([each.reward for each in batch])
        values = self._values(self._unpacked([each.valid for each in batch]), [each.row for each in batch])
        chosen = values[torch.tensor([each.action for each in batch]), torch.arange(len(batch))]
        return (y - chosen).square().mean()

    def _values(self, valid: NDArray[np.bool_], executing: list[int]) -> Tensor:
        return self.network.q_values(self.rows, _floats(valid), torch.tensor(executing))

    def _unpacked(self, packed: list[bytes]) -> NDArray[np.bool_]:
        """Return bool[actions, states]."""
        bits = np.frombuffer(b"".join(packed), np.uint8).reshape(len(packed), -1)
        return np.unpackbits(bits, axis=1, count=len(self.environment.actions)).astype(np.bool_).T


def _transition(state: State, action: int, reward: float, environment: Environment) -> Transition:
    after = environment.state
    return Transition(
        valid=np.packbits(state.valid).tobytes(),
        row=state.row,
        action=action,
        reward=reward,
        next_valid=np.packbits(after.valid).tobytes(),
        next_row=after.row,
        is_terminal=environment.is_terminal,
    )


def _floats(valid: NDArray[np.bool_]) -> Tensor:
    return torch.from_numpy(valid.astype(np.float32))
