"""The choices for all calls of a pass: equal calls have equal ones, and calls of one block the same. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from memfit.checkpointing.choices import FULL, NONE, Choice, Prices, choices_of, full_choice, none_choice
from memfit.checkpointing.seen import CallSeen, LeanPass

_DUMMY = Choice(seconds=0.0, held_bytes=0, more_bytes=0)


def choices_by_call(lean: LeanPass, prices: Prices, *, leaner: bool, is_shared: bool = False) -> list[list[Choice]]:
    """Return the choices of each call; a block that is called several times has them at its first call.

    Args:
        lean: the pass that was recorded.
        prices: bytes and seconds of things that are no kernels.
        leaner: whether to add choices whose backward pass needs less than a checkpoint of the whole block.
        is_shared: whether all ranks follow one policy; otherwise blocks with collectives are recomputed as a whole.
    """
    calls = lean.calls
    of: dict[str, list[CallSeen]] = {}
    for call in calls:
        of.setdefault(call.block, []).append(call)
    known: dict[object, list[Choice]] = {}
    found: list[list[Choice]] = []
    seen: set[str] = set()
    for call in calls:
        if call.block in seen:
            found.append([_DUMMY])
        elif any(each.must_stay for each in of[call.block]):
            found.append([_of_all(of[call.block], NONE, prices)])
        elif not is_shared and any(each.has_collectives for each in of[call.block]):  # of which all ranks call as many
            found.append([_of_all(of[call.block], FULL, prices)])
        elif len(of[call.block]) > 1:
            at_once = lean.at_once[call.block] or len(of[call.block])
            alike = _like(known, call, prices, leaner=leaner)
            found.append(_repeated(of[call.block], at_once, alike, prices))
        else:
            found.append(_like(known, call, prices, leaner=leaner))
        seen.add(call.block)
    return found


def _like(known: dict[object, list[Choice]], call: CallSeen, prices: Prices, *, leaner: bool) -> list[Choice]:
    """Return the choices of a call, made from those of a call of the same form if there was one."""
    form = call.form
    if form not in known:
        known[form] = [_renamed(c, call.block, "") for c in choices_of(call, prices, leaner=leaner)]
    return [_renamed(choice, "", call.block) for choice in known[form]]


def _renamed(choice: Choice, before: str, after: str) -> Choice:
    rules = {after + name.removeprefix(before): rule for name, rule in choice.rules.items()}
    return replace(choice, rules=rules)


def _of_all(calls: Sequence[CallSeen], rule: str, prices: Prices) -> Choice:
    """Return the choice of keeping all calls of a block, or of computing all of them again."""
    each = [full_choice(call, prices) if rule == FULL else none_choice(call) for call in calls]
    return Choice(
        seconds=sum(choice.seconds for choice in each),
        held_bytes=sum(choice.held_bytes for choice in each),
        more_bytes=0,
        rules={calls[0].block: rule},
    )


def _repeated(calls: Sequence[CallSeen], at_once: int, alike: Sequence[Choice], prices: Prices) -> list[Choice]:
    """Return the choices of a block that is called several times: at its first call each counts for all of them.

    Args:
        calls: of the block.
        at_once: of them are live.
        alike: the choices of the first one; all calls have them if they are of one form.
        prices: of what is no kernel.
    """
    if all(call.form == calls[0].form for call in calls):
        return [
            replace(
                choice,
                seconds=choice.seconds * len(calls),
                held_bytes=choice.held_bytes * at_once + max(0, choice.more_bytes),
            )
            for choice in alike
        ]
    return [_of_all(calls, rule, prices) for rule in (FULL, NONE)]


def chains_of(calls: Sequence[CallSeen]) -> list[int]:
    """Return for each call how many in a row, up to it, got what the one before returned, each of another block."""
    repeated = {call.block for call in calls if sum(other.block == call.block for other in calls) > 1}
    lengths: list[int] = []
    for number, call in enumerate(calls):
        may_follow = all(each.runs_without_saving for each in calls[max(0, number - 1) : number + 1])
        follows = call.follows and call.block not in repeated and not call.has_collectives and may_follow
        lengths.append(lengths[-1] + 1 if lengths and follows else 0)
    return lengths
