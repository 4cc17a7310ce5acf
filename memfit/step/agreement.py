"""Agreement between ranks: what one of them decides, or fails at, all of them learn.

Every exchange has the same form, so that a rank that fails at one place answers those that wait at another one. All of
it runs over a gloo group of its own, on the CPU, with the timeout of the step's group.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from itertools import zip_longest
from typing import Any, TypeVar, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from memfit.capture.across import Across
from memfit.errors import MemfitError, RankError, WrongFakesError
from memfit.torch_private.ranks import group_timeout

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Failure:
    """An error of a rank, as it is sent to the others: errors of memfit keep their class and their attributes."""

    kind: type[MemfitError]
    message: str
    carried: dict[str, Any]

    @staticmethod
    def of(error: Exception) -> _Failure:
        if isinstance(error, MemfitError):
            kind = cast("type[MemfitError]", error.__reduce__()[0])  # another rank does not have classes made here
            return _Failure(kind=kind, message=str(error), carried=dict(vars(error)))
        return _Failure(kind=RankError, message=f"{type(error).__name__}: {error}", carried={})

    def to_error(self, rank: int) -> MemfitError:
        error = self.kind.__new__(self.kind)
        error.args = (f"rank {rank}: {self.message}",)
        vars(error).update(self.carried)
        return error


class Agreement:
    """The ranks of a process group, as they talk about what they do.

    Args:
        group: the ranks; each of them makes its Agreement at the same time.

    Attributes:
        rank: of this process.
        size: how many ranks there are.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self._told: BaseException | None = None  # an error that the other ranks know of, or can no longer be told of
        ranks = dist.get_process_group_ranks(group)
        with self._answering("meeting"):
            # Its own group: gloo whatever the step's backend is, and no message of the step's comes in between.
            self._group: Any = dist.new_group(
                ranks, timeout=group_timeout(group), backend="gloo", use_local_synchronization=True
            )
        _end_all_at_exit()

    def end(self) -> None:
        """Let the group and its threads go; nothing can be agreed on any more.

        A thread of gloo drops the tensors of an exchange after it has said that it is complete, and needs Python's lock
        for that: where the interpreter has begun to end by then, the process is aborted. So the group ends before it.
        """
        group, self._group = self._group, None
        if group is not None and dist.is_initialized():
            with suppress(ValueError):  # the caller has destroyed it, with all others
                dist.destroy_process_group(group)

    def together(self, what: str, make: Callable[[], T]) -> T:
        """Run `make` on each rank, and return what it returned here, once it has returned everywhere.

        Args:
            what: is done, for messages.
            make: may raise.

        Raises:
            Exception: what `make` raised here.
            MemfitError: what it raised on another rank, which the message names.
        """
        try:
            made = make()
        except Exception as error:
            if error is not self._told:
                self._exchange(what, _Failure.of(error))
                self._told = error
            raise
        self._raise_others(self._exchange(what, None))
        return made

    def from_first(self, what: str, make: Callable[[], bytes]) -> bytes:
        """Return on all ranks what `make` returns on rank 0, where alone it is run.

        Args:
            what: is done, for messages.
            make: may raise.

        Raises:
            Exception: as `together`.
        """
        made = [self.together(what, make if self.rank == 0 else bytes)]
        with self._answering(what):
            dist.broadcast_object_list(made, group=self._group, group_src=0)
        return made[0]

    def all(self, what: str, mine: T) -> list[T]:
        """Return what each rank gives, by rank.

        Args:
            what: is done, for messages.
            mine: a small object.

        Raises:
            RankError: a rank does not answer.
            MemfitError: what another rank raised instead.
        """
        self._raise_others(answers := self._exchange(what, mine))
        return answers

    def to_first(self, what: str, mine: T) -> list[T]:
        """Return on rank 0 what each rank gives, by rank; on others nothing.

        Args:
            what: is done, for messages.
            mine: an object of any size. No rank fails before it is here: call `together` before.
        """
        gathered: list[Any] = [None] * self.size if self.rank == 0 else []
        with self._answering(what):
            dist.gather_object(mine, gathered if self.rank == 0 else None, group=self._group, group_dst=0)
        return gathered

    def numbers(self, what: str, *mine: int) -> list[tuple[int, ...]]:
        """Return the whole numbers that each rank gives, by rank: the fastest way to talk, once in each step.

        Args:
            what: is done, for messages.
            mine: as many on each rank.
        """
        given = torch.tensor(mine, dtype=torch.int64)
        everyone = [torch.empty_like(given) for _ in range(self.size)]
        with self._answering(what):
            dist.all_gather(everyone, given, group=self._group)
        return [tuple(row.tolist()) for row in everyone]

    def require_equal(self, what: str, digest: str, lines: Callable[[], list[str]], remedy: str) -> None:
        """Raise the same error on all ranks if they are not equal.

        Args:
            what: is compared: a plural noun.
            digest: equal on ranks that are equal.
            lines: returns what it is made from, in words.
            remedy: ends the message.

        Raises:
            RankError: names the first rank that differs from rank 0, and the first line.
        """
        if len(set(self.all(f"comparing {what}", digest))) == 1:
            return
        first = self.from_first(f"comparing {what}", lambda: "\n".join(lines()).encode()).decode().split("\n")
        mine = lines()
        pairs = zip_longest(first, mine, fillvalue="nothing more")
        texts = self.all(
            f"comparing {what}", next((f"{one}, rank {self.rank} {other}" for one, other in pairs if one != other), "")
        )
        rank, text = next((rank, text) for rank, text in enumerate(texts) if text)
        raise RankError(f"{what} of rank {rank} differ from those of rank 0: rank 0 has {text}; {remedy}")

    def slowest(self, seconds: float) -> float:
        """Return the most of the seconds that the ranks give."""
        return max(self.all("measuring collectives", seconds))

    def _exchange(self, what: str, mine: Any) -> list[Any]:
        answers: list[Any] = [None] * self.size
        with self._answering(what):
            dist.all_gather_object(answers, mine, group=self._group)
        return answers

    @contextmanager
    def _answering(self, what: str) -> Iterator[None]:
        """Let an error of torch's be one of memfit's."""
        try:
            yield
        except (RuntimeError, ValueError) as error:
            self._told = told = lost(what, error)
            raise told from None

    def _raise_others(self, answers: list[Any]) -> None:
        """Raise the error of the first rank that failed, on a rank that did not."""
        failed = [(rank, answer) for rank, answer in enumerate(answers) if isinstance(answer, _Failure)]
        if not failed:
            return
        rank, first = failed[0]
        self._told = error = first.to_error(rank)
        if isinstance(error, WrongFakesError):  # all ranks capture again, with what each of them has seen
            wrong = [failure.carried["corrections"] for _, failure in failed if failure.kind is WrongFakesError]
            error.corrections = {key: seen for corrections in wrong for key, seen in corrections.items()}
        raise error


def lost(what: str, error: Exception) -> RankError:
    """Return an error of torch's as one that says that another rank did not answer, and what it was asked."""
    reason = str(error).strip().splitlines()[0]
    return RankError(f"{what}: another rank is gone, or does not answer: {reason}")


_known: WeakKeyDictionary[dist.ProcessGroup, Agreement] = WeakKeyDictionary()


def agreement_of(group: dist.ProcessGroup) -> Agreement:
    """Return the agreement of a group's ranks, which all of them make together at its first use."""
    if group not in _known:
        _known[group] = Agreement(group)
    return _known[group]


@cache
def _end_all_at_exit() -> None:
    atexit.register(_end_all, os.getpid())  # after a thread that still trains


def _end_all(process: int) -> None:
    if os.getpid() != process:  # gloo's threads and connections are the parent's, of which this one was forked
        return
    for agreement in tuple(_known.values()):
        agreement.end()


def agreed_difference(across: Across | None, difference: str | None) -> str | None:
    """Return the difference that the first rank has which has one, so that all ranks go on alike.

    Args:
        across: the ranks of a step; None for a step of this process alone.
        difference: that was found here, or None.
    """
    if across is None:
        return difference
    found = agreement_of(across.group).all("comparing steps", difference)
    return next((f"{text} on rank {rank}" for rank, text in enumerate(found) if text is not None), None)
