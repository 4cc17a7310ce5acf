"""The share of one graph in what the budget leaves, where calls of this graph or of others follow in the same step."""

from __future__ import annotations

from memfit.dynamo.account import Account


class Share:
    """Divides what is left among the calls of a step that await their backward halves.

    Args:
        account: of the model.
        ends_in_break: whether the user's code goes on in eager after the graph, so that other graphs may follow.
        is_part: whether other code of the model comes before it, or after.
    """

    def __init__(self, account: Account, *, ends_in_break: bool, is_part: bool = False) -> None:
        self._account = account
        self._ends_in_break, self._is_part = ends_in_break, is_part
        self._is_followed: bool | None = None  # by another graph in its step; None before its first backward half
        self._ran_after_forward = 0
        self._step = self._calls = 0
        self._most_calls = 1  # of the graph in a step

    @property
    def is_repeated(self) -> bool:
        """Whether the graph was called in the present step before."""
        return self._calls > 0 and self._step == self._account.steps

    @property
    def is_too_small(self) -> bool:
        """Whether something was left for graphs that do not come."""
        return self._ends_in_break and self._is_followed is False and self._most_calls == 1

    @property
    def is_of_several(self) -> bool:
        """Whether the step has, or may have, other calls: what they keep depends on the budget as well."""
        is_followed = self._is_followed or self._most_calls > 1 or self.is_repeated
        return self._is_part or is_followed or self._account.is_amid_calls

    def of(self, left_bytes: int, own_bytes: int) -> int:
        """Return the bytes of `left_bytes` that the graph's plan may take.

        Before a step has shown which calls follow, a graph that ends in a break, or is called again, leaves half.

        Args:
            left_bytes: for the plan, with `own_bytes`.
            own_bytes: of the graph's inputs, which are there in any case.
        """
        parts = 1 if self._is_followed is False or not self._ends_in_break else 2
        parts = 2 if self.is_repeated else max(parts, self._most_calls)
        spare_bytes = max(0, left_bytes - own_bytes)
        return left_bytes - spare_bytes + spare_bytes // parts

    def end_forward(self) -> None:
        """Count a call, at the end of its forward half."""
        self._calls = self._calls + 1 if self.is_repeated else 1
        self._step = self._account.steps
        self._most_calls = max(self._most_calls, self._calls)
        self._ran_after_forward = self._account.ran

    def begin_backward(self) -> None:
        """See whether other graphs have run since the forward half."""
        self._is_followed = bool(self._is_followed) or self._account.ran > self._ran_after_forward
