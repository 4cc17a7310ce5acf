"""The choices for one call of a block: the bytes that each keeps, and the seconds that it recomputes. Torch-free.

A choice is one of: nothing is checkpointed; the whole block is; some of its modules are, each by itself, which needs no
dispatch mode; the whole block is, and storages of it are kept, which needs one; the block is and, when it is computed
again, modules inside of it are, so that its backward pass needs less at once.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from memfit.checkpointing.seen import NEVER, CallSeen, SpanSeen, StorageSeen
from memfit.errors import InvalidOptionError

NONE, FULL = "none", "full"
Rule = str | tuple[tuple[str, int], ...]
"""Of one module: `none`, `full`, or the (name, number) of the operators whose results are kept."""

_MOST_MODULES = 9  # of a block, of which all combinations are tried
_MOST_PREFIXES = 12  # sets of storages of a block


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """Seconds of what is no kernel.

    Attributes:
        checkpoint: a checkpoint around a module costs, in both passes together.
        saved: each tensor that is saved inside of one.
        mode: a dispatch mode costs each operator, in both passes together.
    """

    checkpoint: float = 120e-6
    saved: float = 15e-6
    mode: float = 16e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What is done with a block.

    Attributes:
        seconds: for what is recomputed, modes and hooks included.
        held_bytes: from its forward pass to its backward pass, beyond what a checkpoint of the whole block holds.
        more_bytes: that are live in its own backward pass beyond what they are under a checkpoint of the whole block;
            negative if less.
        forward_bytes: that are live in its own forward pass beyond what they are under a checkpoint of the whole block.
        rules: name of a module -> what is done with it.
        has_mode: whether a dispatch mode is on.
    """

    seconds: float
    held_bytes: int
    more_bytes: int
    forward_bytes: int = 0
    rules: Mapping[str, Rule] = field(default_factory=dict[str, Rule])
    has_mode: bool = False


def choices_of(call: CallSeen, prices: Prices, *, leaner: bool) -> list[Choice]:
    """Return the choices for a call that are not dominated by others, the leanest first.

    Args:
        call: as it was seen.
        prices: of what is no kernel.
        leaner: whether to add choices whose backward pass needs less than that of a checkpoint of the whole block.
    """
    full = full_choice(call, prices)
    found = [full, none_choice(call)]
    modules = _useful_modules(call)
    for count in range(1, len(modules) + 1):
        for spans in itertools.combinations(modules, count):
            if all(one.last <= other.first for one, other in itertools.pairwise(sorted(spans, key=_first))):
                found.append(_by_modules(call, spans, prices))
                if leaner:
                    found.append(_nested(call, spans, full, prices))
    if not call.differentiates:  # whose backward passes may order their operators otherwise the second time
        found += _by_storages(call, prices)
    return _undominated(found)


def _first(span: SpanSeen) -> int:
    return span.first


def _seconds(call: CallSeen, first: int, last: int, prices: Prices) -> float:
    """Return the seconds of recomputing what a checkpoint around these moments does."""
    saves = sum(first <= moment < last for moment in call.saves)
    return sum(op.seconds for op in call.recomputed(first, last)) + prices.checkpoint + prices.saved * saves


def full_choice(call: CallSeen, prices: Prices) -> Choice:
    """Return the choice of a checkpoint of the whole block."""
    return Choice(seconds=_seconds(call, -1, NEVER, prices), held_bytes=0, more_bytes=0, rules={call.block: FULL})


def none_choice(call: CallSeen) -> Choice:
    """Return the choice of no checkpoint."""
    kept = {number: storage.saved_bytes for number, storage in enumerate(call.storages) if not storage.is_output}
    return Choice(
        seconds=0.0,
        held_bytes=sum(kept.values()),
        more_bytes=0,
        forward_bytes=_forward_bytes(call, kept),
        rules={call.block: NONE},
    )


def _forward_bytes(call: CallSeen, kept: Mapping[int, int]) -> int:
    """Return the bytes that a forward pass which keeps (bytes of) storages takes beyond one that drops them as seen.

    What autograd saves was live in part when the most was, so that it is less than what is held in the end. Memory
    that operators take for themselves is assumed to be as much at all moments.
    """
    if call.is_kept:
        return 0
    live = seen_most = kept_most = 0
    kept_bytes = 0  # of those that were dropped
    made: dict[int, list[StorageSeen]] = {}
    dropped: dict[int, list[tuple[int, StorageSeen]]] = {}
    for number, storage in enumerate(call.storages):
        made.setdefault(storage.made, []).append(storage)
        dropped.setdefault(storage.dropped, []).append((number, storage))
    for op in range(len(call.ops)):
        live += sum(storage.size_bytes for storage in made.get(op, ()))
        for number, storage in dropped.get(op, ()):
            live -= storage.size_bytes
            kept_bytes += kept.get(number, 0)
        seen_most, kept_most = max(seen_most, live), max(kept_most, live + kept_bytes)
    return kept_most - seen_most


def _useful_modules(call: CallSeen) -> list[SpanSeen]:
    """Return the modules whose checkpoint frees bytes, those that free the most if there are many."""
    freed: dict[str, int] = {}
    for span in call.spans:
        kept = sum(call.storages[n].size_bytes - call.storages[n].saved_bytes for n in span.given)
        freed[span.name] = freed.get(span.name, 0) + _saved_inside(call, span) - kept
    repeated = {span.name for span in call.spans if sum(other.name == span.name for other in call.spans) > 1}
    useful = [span for span in call.spans if freed[span.name] > 0 and span.name not in repeated]
    return sorted(useful, key=lambda span: -freed[span.name])[:_MOST_MODULES]


def _holds(span: SpanSeen, moment: int) -> bool:
    return span.first <= moment < span.last


def _saved_inside(call: CallSeen, span: SpanSeen) -> int:
    """Return the bytes of storages that are saved inside of a span alone, and were not given to it."""
    return sum(
        storage.saved_bytes
        for number, storage in enumerate(call.storages)
        if storage.saves
        and not storage.is_output
        and number not in span.given
        and all(_holds(span, moment) for moment in storage.saves)
    )


def _held(call: CallSeen, spans: Sequence[SpanSeen]) -> tuple[dict[int, int], int]:
    """Return what is held of each storage if these modules are checkpointed, and the bytes that nothing saves of it."""
    given = frozenset[int]().union(*(span.given for span in spans))
    held, unsaved = dict[int, int](), 0
    for number, storage in enumerate(call.storages):
        if storage.is_output:
            continue
        if number in given:
            held[number] = storage.size_bytes
            unsaved += storage.size_bytes - storage.saved_bytes
        elif any(not any(_holds(span, moment) for span in spans) for moment in storage.saves):
            held[number] = storage.saved_bytes
    return held, unsaved


def _by_modules(call: CallSeen, spans: Sequence[SpanSeen], prices: Prices) -> Choice:
    held, unsaved = _held(call, spans)
    return Choice(
        seconds=sum(_seconds(call, span.first, span.last, prices) for span in spans),
        held_bytes=sum(held.values()),
        more_bytes=unsaved,
        forward_bytes=_forward_bytes(call, held),
        rules={call.block: NONE} | {span.name: FULL for span in spans},
    )


def _nested(call: CallSeen, spans: Sequence[SpanSeen], full: Choice, prices: Prices) -> Choice:
    """The whole block is recomputed, and these modules once more, one after the other."""
    held = sum(_held(call, spans)[0].values())
    at_once = max(_saved_inside(call, span) for span in spans)
    everything = none_choice(call).held_bytes
    return Choice(
        seconds=full.seconds + sum(_seconds(call, span.first, span.last, prices) for span in spans),
        held_bytes=0,
        more_bytes=min(0, held + at_once - everything),
        rules={call.block: FULL} | {span.name: FULL for span in spans},
    )


def choice_of_rules(call: CallSeen, rules: Mapping[str, Rule], prices: Prices) -> Choice:
    """Return the choice that given rules make for a call.

    Args:
        call: as it was seen.
        rules: name of a module -> rule; a block without one is recomputed.
        prices: of what is no kernel.

    Raises:
        InvalidOptionError: results that cannot be kept without others, or that the block does not have.
    """
    rule = NONE if call.must_stay else rules.get(call.block, FULL)
    if not isinstance(rule, str):
        return _kept_choice(call, rule, prices)
    spans = [span for span in call.spans if rules.get(span.name) == FULL]
    full = full_choice(call, prices)
    if rule == NONE:
        return _by_modules(call, spans, prices) if spans else none_choice(call)
    return _nested(call, spans, full, prices) if spans else full


def _kept_choice(call: CallSeen, rule: tuple[tuple[str, int], ...], prices: Prices) -> Choice:
    numbers = {(op.name, op.nth): number for number, op in enumerate(call.ops)}
    missing = [key for key in rule if key not in numbers]
    if missing:
        raise InvalidOptionError(
            f"policy: block {call.block!r} has no operator {missing[0][0]}#{missing[0][1]}; make the policy anew with "
            "memfit.checkpoint(model, budget)"
        )
    wanted, held, more, spared = {numbers[key] for key in rule}, 0, 0, 0.0
    for seconds, size, unsaved, bundle in _bundles(call):
        if wanted.issuperset(bundle):
            wanted -= set(bundle)
            held, more, spared = held + size, more + unsaved, spared + seconds
    if wanted:
        op = call.ops[min(wanted)]
        raise InvalidOptionError(
            f"policy: block {call.block!r} keeps {op.name}#{op.nth}, which cannot be kept without others: all writes "
            "to a tensor, and all draws of random numbers, are kept together or not at all"
        )
    return _keeping(call, [numbers[key] for key in rule], spared, held, more, prices)


def _keeping(
    call: CallSeen, numbers: Sequence[int], spared_seconds: float, held_bytes: int, more_bytes: int, prices: Prices
) -> Choice:
    """Return the choice of a checkpoint of the whole block that keeps the results of operators."""
    storages = {call.ops[number].storage for number in numbers}
    sizes = {storage: call.storages[storage].size_bytes for storage in storages if storage is not None}
    return Choice(
        seconds=full_choice(call, prices).seconds + prices.mode * len(call.ops) - spared_seconds,
        held_bytes=held_bytes,
        more_bytes=more_bytes,
        forward_bytes=_forward_bytes(call, sizes),
        rules={call.block: tuple((call.ops[number].name, call.ops[number].nth) for number in numbers)},
        has_mode=True,
    )


def _by_storages(call: CallSeen, prices: Prices) -> list[Choice]:
    """The block is checkpointed, and storages are kept, those first that spare the most seconds a byte."""
    bundles = _bundles(call)
    stop = max(call.saves, default=-1)
    again = [op for op in call.ops if op.moment < stop]
    everything = sum(op.seconds for op in again)
    found: list[Choice] = []
    kept: list[int] = []
    spared, held, more = 0.0, 0, 0
    ratios = sorted(bundles, key=lambda bundle: (-bundle[0] / (bundle[1] + 64), bundle[3][0]))
    for count, (seconds, size, unsaved, numbers) in enumerate(ratios, start=1):
        spared, held, more = spared + seconds, held + size, more + unsaved
        kept += numbers
        if spared <= prices.mode * len(call.ops) or spared > everything:
            continue
        if count % max(1, len(ratios) // _MOST_PREFIXES) and count < len(ratios):
            continue
        found.append(_keeping(call, sorted(kept), spared, held, more, prices))
    return found


def _bundles(call: CallSeen) -> list[tuple[float, int, int, list[int]]]:
    """Return (seconds spared, bytes held, bytes of them that nothing saves, operators) of what can be kept together.

    All operators of a storage are kept or none: a write in place is of the storage's maker. So are all draws: a kept
    one does not advance the generator. A storage that is read before its last write would come back too new.
    """
    stop = max(call.saves, default=-1)
    of: dict[int, list[int]] = {}
    for number, op in enumerate(call.ops):
        if op.storage is not None:
            of.setdefault(op.storage, []).append(number)
    drawing = {op.storage for op in call.ops if op.draws and op.storage is not None}
    if any(op.draws and op.storage is None for op in call.ops):
        drawing = set[int | None]()  # a draw that cannot be kept: no draw is
        of = {s: numbers for s, numbers in of.items() if not any(call.ops[n].draws for n in numbers)}
    bundles = [[storage] for storage in of if storage not in drawing]
    if drawing:
        bundles.append([storage for storage in of if storage in drawing])
    found: list[tuple[float, int, int, list[int]]] = []
    for storages in bundles:
        if any(call.storages[s].first_read < call.storages[s].last_write for s in storages):
            continue
        numbers = sorted(number for s in storages for number in of[s])
        seconds = sum(call.ops[number].seconds for number in numbers if call.ops[number].moment < stop)
        own = [call.storages[s] for s in storages if not call.storages[s].is_output]
        size = sum(storage.size_bytes for storage in own)
        unsaved = sum(storage.size_bytes - storage.saved_bytes for storage in own)
        if seconds > 0:
            found.append((seconds, size, unsaved, numbers))
    return found


def _undominated(found: Sequence[Choice]) -> list[Choice]:
    """Return the choices that no other one beats or equals in seconds and in all bytes."""
    kept: list[Choice] = []
    for choice in sorted(found, key=lambda c: (c.seconds, c.held_bytes, c.more_bytes, c.forward_bytes)):
        if not any(
            c.held_bytes <= choice.held_bytes
            and c.more_bytes <= choice.more_bytes
            and c.forward_bytes <= choice.forward_bytes
            for c in kept
        ):
            kept.append(choice)
    return sorted(kept, key=lambda c: (c.held_bytes, c.seconds))
