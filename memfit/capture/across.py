"""How the gradients of a step are averaged over the ranks that train one model together."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager

import torch
import torch.distributed as dist

from memfit.errors import BY_CHECKPOINT, UnsupportedStepError


def refuse_asked(whose: str, asked: Mapping[str, bool], otherwise: str = "") -> None:
    """Refuse what a wrapper of the model was asked for, and a planned step does not carry out.

    Args:
        whose: begins the clause that what was asked for ends.
        asked: what can be asked for -> whether it was.
        otherwise: what else can be done, as the end of the sentence.

    Raises:
        UnsupportedStepError: something was asked for.
    """
    named = [what for what, is_asked in asked.items() if is_asked]
    if named:
        raise UnsupportedStepError(
            f"memfit.fit: {whose} {' and '.join(named)}, which a planned step does not carry out: {BY_CHECKPOINT}; or "
            f"leave that out{otherwise}"
        )


class Across(ABC):
    """The ranks of a step: see `memfit.capture.data_parallel` and `memfit.capture.fully_sharded`.

    Args:
        group: of the ranks.

    Attributes:
        group: of the ranks.
        rank: of this process in the group.
        size: how many ranks there are.
        absent_link: what would join the ranks, where none is there, as text: see `memfit.cost.links`.
    """

    absent_link: str | None = None

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)

    @property
    def shards(self) -> int:
        """Over how many ranks the model is sharded: 1 if each has all of it."""
        return 1

    @property
    @abstractmethod
    def reduces(self) -> bool:
        """Whether steps reduce their gradients now."""

    @abstractmethod
    def no_sync(self) -> AbstractContextManager[None]:
        """Return a block in which steps add to this rank's gradients only.

        Raises:
            UnsupportedStepError: the ranks cannot do that.
        """

    def ring_of(self, kind: str) -> Sequence[int]:  # noqa: ARG002 (one group by default)
        """Return the ranks, by their numbers, that a kind of collectives runs between.

        Args:
            kind: as `memfit.cost.collectives.kinds_of` names it.
        """
        return dist.get_process_group_ranks(self.group)

    @property
    def kept_bytes(self) -> int:
        """The bytes that a wrapper of the model keeps on the device, and that no step uses."""
        return 0

    def settle(self) -> None:  # noqa: B027 (nothing to do by default)
        """Bring the model to what a step finds, whatever has run since the last one."""

    def begin(self, model: torch.nn.Module) -> None:  # noqa: B027
        """Give all ranks the same model, where each has all of it.

        Args:
            model: the bare model.
        """

    def share_buffers(self, model: torch.nn.Module) -> None:  # noqa: B027
        """Give all ranks rank 0's buffers before a forward pass, where the ranks do that.

        Args:
            model: the bare model.
        """

    def average(self, parameters: Mapping[str, torch.nn.Parameter]) -> None:  # noqa: B027
        """Average the gradients in `.grad` over all ranks after an eager backward pass, where that is left to do.

        Args:
            parameters: the model's, by name.
        """
