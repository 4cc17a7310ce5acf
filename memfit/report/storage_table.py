"""The table of storages as the page takes it: columns, with the texts that many storages share kept once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from memfit.graph import Role
from memfit.report.explanation import Explanation
from memfit.report.fates import Fate, Kind
from memfit.report.live import LiveRange
from memfit.report.price_words import again_text, keep_text, offload_text
from memfit.report.prices import Change
from memfit.report.words import printable, seconds_text

_STAYS_SHOWN = 2


def storage_columns(explanation: Explanation, strings: dict[str, int]) -> dict[str, list[Any]]:
    """Return the storages as columns; `strings` gathers the texts that many of them share.

    Prices in seconds are None where there is none: of keeping what is kept, say.
    """
    plan, of_storage = explanation.plan, explanation.fates
    graph = plan.graph
    writers = [graph.writer_of.get(storage.id) for storage in graph.storages]
    modules = ["" if writer is None else printable(graph.ops[writer].module) for writer in writers]
    roles, kinds = list(Role), list(Kind)
    seconds = plan.predicted.seconds
    prices = [explanation.prices.get(storage.id) for storage in graph.storages]
    return {
        "name": [printable(storage.name) for storage in graph.storages],
        "module": [strings.setdefault(module, len(strings)) for module in modules],
        "role": [roles.index(storage.role) for storage in graph.storages],
        "bytes": [storage.bytes for storage in graph.storages],
        "fate": [strings.setdefault(fate.text, len(strings)) for fate in of_storage],
        "kind": [kinds.index(fate.kind) for fate in of_storage],
        "held": [round(fate.held_seconds / seconds, 4) if seconds else None for fate in of_storage],
        "live": [_live_text(explanation, stays) for stays in explanation.stays],
        "keep_seconds": [
            _seconds(price and price.keep) if fate.rematerialized or fate.offloaded else None
            for price, fate in zip(prices, of_storage, strict=True)
        ],
        "again_seconds": [_seconds(price and price.again) for price in prices],
        "offload_seconds": [_seconds(price and price.offload) for price in prices],
        "why": [printable(fate.why) for fate in of_storage],
        "prices": [
            [strings.setdefault(text, len(strings)) for text in _price_texts(explanation, fate)] for fate in of_storage
        ],
    }


def _seconds(change: Change | None) -> float | None:
    return None if change is None else round(change.seconds, 9)


def _price_texts(explanation: Explanation, fate: Fate) -> list[str]:
    plan, price = explanation.plan, explanation.prices.get(fate.storage)
    if price is None:
        return []
    return [
        f"Keep: {keep_text(plan, fate, price)}.",
        f"Compute again: {again_text(plan, fate, price)}.",
        f"Offload: {offload_text(plan, fate, price)}.",
    ]


def _live_text(explanation: Explanation, stays: Sequence[LiveRange]) -> str:
    """Say from when to when a storage is on the device: in time, or in instructions where there are no times."""
    run = explanation.run
    clock, timed = run.clock_seconds, run.timeline.makespan_seconds > 0
    spans = [
        f"{seconds_text(float(clock[stay.first]))} – {seconds_text(float(clock[stay.last]))}"
        if timed
        else f"{stay.first} – {stay.last}"
        for stay in stays
    ]
    shown = spans if len(spans) <= _STAYS_SHOWN + 1 else [*spans[:_STAYS_SHOWN], f"{len(spans) - _STAYS_SHOWN} more"]
    return ", ".join(shown)
