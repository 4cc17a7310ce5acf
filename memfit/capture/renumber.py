"""Renumbering: the same ops and calls over storages that have other numbers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

from memfit.binding import Binding, Call, Resident, Value, map_values


class Renumbering:
    """Gives Values the new numbers of their storages; equal Values become one object.

    Args:
        number_of: the new number of each storage, by its old one.
    """

    def __init__(self, number_of: Mapping[int, int]) -> None:
        @cache  # most Values are those of several calls
        def renumbered(value: Value) -> Value:
            return replace(value, storage=number_of[value.storage])

        self._number_of, self._renumbered = number_of, renumbered

    def tree(self, tree: Any) -> Any:
        """Return nested tuples, lists and dicts with the Values in them renumbered."""
        return map_values(tree, self._renumbered)

    def call(self, call: Call, op: int) -> Call:
        """Return a call renumbered, as that of op `op`.

        Args:
            call: with the old numbers of storages.
            op: the new number of its op.
        """
        state = call.generator_state
        return replace(
            call,
            op=op,
            args=self.tree(call.args),
            kwargs=self.tree(call.kwargs),
            results=self.tree(call.results),
            generator_state=None if state is None else self._number_of[state],
            in_place_forms={
                self._number_of[read]: replace(form, extra=self.tree(form.extra))
                for read, form in call.in_place_forms.items()
            },
        )

    def binding(
        self, device: Any, calls: Iterable[Call], residents: Iterable[Resident], outputs: Mapping[str, Value]
    ) -> Binding:
        """Return the binding of calls in the order of their ops, all renumbered.

        Args:
            device: of the step.
            calls: in the new order of ops.
            residents: with the old numbers of storages.
            outputs: by name, with the old numbers of storages.
        """
        return Binding(
            device=device,
            calls=tuple(self.call(call, op) for op, call in enumerate(calls)),
            residents=tuple(replace(resident, value=self.tree(resident.value)) for resident in residents),
            outputs=self.tree(dict(outputs)),
        )
