"""Every rule of the checker, broken once on purpose: the message says where, what, expected, found, and the remedy."""

from __future__ import annotations

import re

import numpy as np
import pytest
from small_step import KEEP_EVERYTHING, small_step

from memfit.checker import check
from memfit.errors import InvalidScheduleError
from memfit.graph import Boundary, Graph, Op, Phase, Role, Storage
from memfit.schedule import Schedule

# What is done to KEEP_EVERYTHING: (position, how many instructions go, what comes in their place, the message).
CASES = {
    "an op is never computed": (
        9,
        1,
        "",
        "the end: op 8 'sgd' was never computed, expected every op at least once; add Compute(8)",
    ),
    "what mutates is computed twice": (
        5,
        0,
        "compute 4",
        "instruction 5 Compute(add_) computes op 4 again, which was computed at 4; expected exactly once, "
        "for it mutates: keep or offload what it gives",
    ),
    "what is not recomputable is computed twice": (
        9,
        0,
        "compute 7",
        "instruction 9 Compute(reduce) computes op 7 again, which was computed at 8; expected exactly "
        "once, for it is not recomputable: keep or offload what it gives",
    ),
    "mutated storage order": (
        3,
        1,
        "compute 4",
        "instruction 3 Compute(add_) computes op 4 for the first time before op 3 'noise', which touches "
        "storage 5 'dropout' as well; expected their original order: compute op 3 first",
    ),
    "reads a mutated storage too early": (
        3,
        2,
        "compute 5",
        "instruction 3 Compute(mean) computes op 5 for the first time before op 4 'add_', which touches "
        "storage 5 'dropout' as well; expected their original order: compute op 4 first",
    ),
    "generator order": (
        2,
        1,
        "compute 3",
        "instruction 2 Compute(noise) computes op 3 for the first time before op 2 'dropout', which draws "
        "from generator 'cpu' as well; expected their original order: compute op 2 first",
    ),
    "a read was never computed": (
        1,
        1,
        "compute 2",
        "instruction 1 Compute(dropout) reads storage 3 'relu', which was never computed; compute op 1 'relu' first",
    ),
    "a read was dropped": (
        1,
        0,
        "drop 2",
        "instruction 2 Compute(relu) reads storage 2 'conv', which was dropped at 1; compute op 0 'conv' first",
    ),
    "a read is on the host": (
        1,
        0,
        "offload 2; wait 2; drop 2",
        "instruction 4 Compute(relu) reads storage 2 'conv', which was dropped at 3; prefetch it first",
    ),
    "a read was reused": (
        2,
        0,
        "compute 0; drop 3; compute 1 in_place_of 2; compute 1",
        "instruction 5 Compute(relu) reads storage 2 'conv', which was reused by op 1 'relu' at 4; "
        "compute op 0 'conv' first",
    ),
    "reads an arrival that was dropped": (
        6,
        2,
        "boundary 0; drop 8; compute 6",
        "instruction 8 Compute(backward) reads storage 8 'tangent', which was dropped at 7; it arrives "
        "only once: do not drop it, or offload it before",
    ),
    "reads a version that a mutation ended": (
        5,
        0,
        "compute 3",
        "instruction 5 Compute(noise) reads storage 5 'dropout' at version 0, which is on the device at "
        "version 1; compute op 2 'dropout' again after dropping it",
    ),
    "a resident was mutated": (
        10,
        0,
        "compute 0",
        "instruction 10 Compute(conv) reads storage 1 'weight' at version 0, which is on the device at "
        "version 1; compute it before that mutation",
    ),
    "reads a version that was lost": (
        5,
        1,
        "drop 5; compute 2; compute 5",
        "instruction 7 Compute(mean) reads storage 5 'dropout' at version 1, which is on the device at "
        "version 0; it comes only from op 4 'add_', once: keep it, or offload it before",
    ),
    "reuses what its kernel may not write over": (
        2,
        1,
        "compute 2 in_place_of 3",
        "instruction 2 Compute(dropout) reuses storage 3 'relu', which its kernel may not write over: "
        "its `reuses` allow nothing; leave in_place_of out",
    ),
    "reuses for a write that is there": (
        2,
        0,
        "compute 1 in_place_of 2",
        "instruction 2 Compute(relu) reuses storage 2 'conv' for storage 3 'relu', which is on the "
        "device already; expected a write that needs memory: leave in_place_of out, or drop 3 first",
    ),
    "reuses storage 99": (
        1,
        1,
        "compute 1 in_place_of 99",
        "instruction 1 Compute(relu) reuses storage 99, expected a number below 11",
    ),
    "reuses during offload": (
        1,
        1,
        "offload 2; compute 1 in_place_of 2",
        "instruction 2 Compute(relu) reuses storage 2 'conv', whose offload at 1 is under way; wait for it first",
    ),
    "mutates during offload": (
        4,
        0,
        "offload 5",
        "instruction 5 Compute(add_) mutates storage 5 'dropout', whose offload at 4 is under way; wait for it first",
    ),
    "drops nothing": (
        2,
        0,
        "drop 6",
        "instruction 2 Drop(noise) drops storage 6 'noise', which was never computed; remove this drop",
    ),
    "drops twice": (
        2,
        0,
        "drop 2; drop 2",
        "instruction 3 Drop(conv) drops storage 2 'conv', which was dropped at 2; remove this drop",
    ),
    "drops a resident": (
        2,
        0,
        "drop 1",
        "instruction 2 Drop(weight) drops storage 1 'weight', which is resident; expected a storage that an op writes",
    ),
    "drops the user's": (
        7,
        0,
        "drop 7",
        "instruction 7 Drop(loss) drops storage 7 'loss', which is the user's since the boundary at 6; "
        "expected it to stay to the end",
    ),
    "drops during offload": (
        2,
        0,
        "offload 2; drop 2",
        "instruction 3 Drop(conv) drops storage 2 'conv', whose offload at 2 is under way; wait for it first",
    ),
    "drops during prefetch": (
        2,
        0,
        "offload 2; wait 2; drop 2; prefetch 2; drop 2",
        "instruction 6 Drop(conv) drops storage 2 'conv', whose prefetch at 5 no op has read; remove the prefetch",
    ),
    "offloads nothing": (
        2,
        0,
        "offload 6",
        "instruction 2 Offload(noise) offloads storage 6 'noise', which was never computed; compute op 3 'noise' first",
    ),
    "offloads resident": (
        2,
        0,
        "offload 0",
        "instruction 2 Offload(x) offloads storage 0 'x', which is resident; expected a storage that an op writes",
    ),
    "offloads twice": (
        2,
        0,
        "offload 2; offload 2",
        "instruction 3 Offload(conv) offloads storage 2 'conv', whose offload at 2 is under way; remove one of the two",
    ),
    "offloads what host holds": (
        2,
        0,
        "offload 2; wait 2; offload 2",
        "instruction 4 Offload(conv) offloads storage 2 'conv' at version 0, which the host holds "
        "already; remove this offload",
    ),
    "waits for nothing": (
        2,
        0,
        "wait 2",
        "instruction 2 Wait(conv) waits for storage 2 'conv', but no offload of it is under way; remove this wait",
    ),
    "waits twice": (
        2,
        0,
        "offload 2; wait 2; wait 2",
        "instruction 4 Wait(conv) waits for storage 2 'conv', but no offload of it is under way; remove this wait",
    ),
    "prefetches nothing": (
        2,
        0,
        "prefetch 2",
        "instruction 2 Prefetch(conv) prefetches storage 2 'conv', of which the host holds no copy; offload it first",
    ),
    "prefetches during offload": (
        2,
        0,
        "offload 2; prefetch 2",
        "instruction 3 Prefetch(conv) prefetches storage 2 'conv', whose offload at 2 is under way; wait for it first",
    ),
    "prefetches what is there": (
        2,
        0,
        "offload 2; wait 2; prefetch 2",
        "instruction 4 Prefetch(conv) prefetches storage 2 'conv', which is on the device; remove this "
        "prefetch, or drop the storage first",
    ),
    "prefetches stale": (
        4,
        1,
        "offload 5; wait 5; compute 4; drop 5; prefetch 5",
        "instruction 8 Prefetch(dropout) prefetches storage 5 'dropout', whose host copy is stale since "
        "the mutation at 6; offload it again after the mutation",
    ),
    "drops host nothing": (
        2,
        0,
        "drop_host 2",
        "instruction 2 DropHost(conv) drops the host copy of storage 2 'conv', of which the host holds no "
        "copy; offload it first",
    ),
    "drops host during offload": (
        2,
        0,
        "offload 2; drop_host 2",
        "instruction 3 DropHost(conv) drops the host copy of storage 2 'conv', whose offload at 2 is "
        "under way; wait for it first",
    ),
    "drops host during prefetch": (
        2,
        0,
        "offload 2; wait 2; drop 2; prefetch 2; drop_host 2",
        "instruction 6 DropHost(conv) drops the host copy of storage 2 'conv', whose prefetch at 5 is "
        "under way until an op reads it; move this after that op",
    ),
    "boundary never": (
        6,
        4,
        "",
        "the end: op 6 'backward' was never computed, expected every op at least once; add Compute(6)",
    ),
    "boundary twice": (
        7,
        0,
        "boundary 0",
        "instruction 7 CrossBoundary(0) stands out of order, expected no other boundary: each exactly once, in order",
    ),
    "boundary too early": (
        5,
        1,
        "boundary 0; compute 5",
        "instruction 5 CrossBoundary(0) stands before op 6, but op 5 'mean' has not been computed; compute it first",
    ),
    "op before boundary": (
        6,
        0,
        "compute 7",
        "instruction 6 Compute(reduce) computes op 7 before boundary 0, which stands before op 6; put boundary 0 first",
    ),
    "departure missing": (
        6,
        0,
        "drop 7",
        "instruction 7 CrossBoundary(0) hands out storage 7 'loss', which was dropped at 6; compute op 5 'mean' first",
    ),
    "loses what is required at the end": (
        7,
        4,
        "compute 6; compute 7; drop 9; compute 8",
        "the end: storage 9 'gradient' is required at the end but was dropped at 9; compute op 6 'backward' again",
    ),
    "unknown op": (
        0,
        0,
        "compute 9",
        "instruction 0 Compute(9) names what is not in graph 'small step', expected a number below 9; was "
        "the schedule made for another graph?",
    ),
    "unknown storage": (
        0,
        0,
        "drop 11",
        "instruction 0 Drop(11) names what is not in graph 'small step', expected a number below 11; was "
        "the schedule made for another graph?",
    ),
    "unknown boundary": (
        6,
        1,
        "boundary 1",
        "instruction 6 CrossBoundary(1) names what is not in graph 'small step', expected a number below 1; "
        "was the schedule made for another graph?",
    ),
    "prefetches over an earlier version": (
        5,
        1,
        "offload 5; wait 5; drop 5; compute 2; compute 5",
        "instruction 9 Compute(mean) reads storage 5 'dropout' at version 1, which is on the device at "
        "version 0; prefetch it again after dropping it",
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_a_broken_rule_is_named(case: tuple[int, int, str, str]) -> None:
    position, removed, edit, message = case
    lines = list(KEEP_EVERYTHING)
    lines[position : position + removed] = edit.split("; ") if edit else []
    with pytest.raises(InvalidScheduleError, match=f"^{re.escape(message)}$"):
        check(small_step(), Schedule.parse(lines))


LEGAL = {
    "keep everything": "; ".join(KEEP_EVERYTHING),
    "an op is recomputed later": "compute 0; compute 1; compute 2; compute 3; compute 4; compute 5; "
    "boundary 0; compute 6; compute 7; compute 0; compute 8",
    "everything at once": "compute 0; compute 1 in_place_of 2; offload 3; compute 2; compute 3; wait 3; drop 3; "
    "offload 5; wait 5; compute 4; drop_host 5; offload 5; compute 5; wait 5; drop 5; boundary 0 bytes_outside 7; "
    "prefetch 3; prefetch 5; compute 6; drop_host 3; compute 7; compute 8",
    "a second copy of a mutated storage goes": "compute 0; compute 1; compute 2; compute 3; compute 4; drop 4; "
    "compute 2; compute 5; boundary 0; compute 6; compute 7; compute 8",
    "a prefetch is still under way at the end": "compute 0; compute 1; compute 2; compute 3; compute 4; compute 5; "
    "boundary 0; compute 6; compute 7; offload 9; wait 9; drop 9; prefetch 9; compute 8",
    "what the user has may be copied": "compute 0; compute 1; compute 2; compute 3; compute 4; compute 5; "
    "offload 7; boundary 0; compute 6; compute 7; compute 8",
}


@pytest.mark.parametrize("text", LEGAL.values(), ids=LEGAL.keys())
def test_legal_schedules_pass(text: str) -> None:
    check(small_step(), Schedule.parse(text.split("; ")))


def test_reuses_neither_residents_nor_the_users_nor_what_it_mutates() -> None:
    storages = [
        Storage(id=0, name="weight", bytes=8, role=Role.PARAMETER),
        *(Storage(id=i, name=f"s{i}", bytes=8, role=Role.ACTIVATION) for i in (1, 2, 3, 4)),
    ]
    ops = [
        Op(id=0, name="a", phase=Phase.FORWARD, reads=(0,), writes=(1,), seconds=1, reuses=((0, 1),)),
        Op(id=1, name="b", phase=Phase.FORWARD, reads=(1,), writes=(2,), seconds=1, reuses=((1, 2),)),
        Op(id=2, name="c", phase=Phase.FORWARD, reads=(2,), writes=(3,), mutates=(2,), seconds=1, reuses=((2, 3),)),
        Op(id=3, name="d", phase=Phase.FORWARD, reads=(3,), writes=(4,), seconds=1, reuses=((3, 4),)),
    ]
    boundary = Boundary(position=1, departures=(1,), arrivals=())
    graph = Graph.build(name="in place", storages=storages, ops=ops, boundaries=[boundary])
    for text, message in (
        ("compute 0 in_place_of 0", "reuses storage 0 'weight', which is resident"),
        ("compute 0; boundary 0; compute 1 in_place_of 1", "reuses storage 1 's1', which is the user's"),
        ("compute 0; boundary 0; compute 1; compute 2 in_place_of 2", "reuses storage 2 's2', which it mutates"),
    ):
        with pytest.raises(InvalidScheduleError, match=message):
            check(graph, Schedule.parse(text.split("; ")))
    check(graph, Schedule.parse(["compute 0", "boundary 0", "compute 1", "compute 2", "compute 3 in_place_of 3"]))


def test_what_arrives_may_go_and_not_come_back() -> None:
    storages = [Storage(id=i, name=f"s{i}", bytes=8, role=Role.ACTIVATION) for i in range(3)]
    ops = [
        Op(id=0, name="a", phase=Phase.FORWARD, reads=(), writes=(0,), seconds=1),
        Op(id=1, name="b", phase=Phase.BACKWARD, reads=(1,), writes=(2,), seconds=1),
    ]
    boundary = Boundary(position=1, departures=(), arrivals=(1,))
    graph = Graph.build(name="arrival", storages=storages, ops=ops, boundaries=[boundary])
    check(graph, Schedule.parse(["compute 0", "boundary 0", "compute 1", "drop 1"]))
    with pytest.raises(
        InvalidScheduleError, match="storage 1 's1', which has not arrived yet; it arrives at boundary 0"
    ):
        check(graph, Schedule.parse(["offload 1", "compute 0", "boundary 0", "compute 1"]))
    with pytest.raises(InvalidScheduleError, match="was dropped at 2; it arrives only once"):
        check(graph, Schedule.parse(["compute 0", "boundary 0", "drop 1", "compute 1"]))


def test_arrays_that_no_instruction_makes_are_refused() -> None:
    def schedule(code: int, operand: int, extra: int) -> Schedule:
        return Schedule(np.array([code], np.int8), np.array([operand], np.int32), np.array([extra], np.int64))

    graph = small_step()
    for wrong, message in (
        (schedule(7, 0, -1), "instruction 0 has code 7, expected 0 to 6"),
        (schedule(-1, 0, -1), "instruction 0 has code -1, expected 0 to 6"),
        (schedule(0, -1, -1), "instruction 0 Compute(-1) names what is not in graph"),
        (schedule(0, 0, -2), "reuses storage -2, expected a number below 11"),
    ):
        with pytest.raises(InvalidScheduleError, match=re.escape(message)):
            check(graph, wrong)


def test_negative_bytes_outside_are_refused() -> None:
    storages = [Storage(id=0, name="s", bytes=8, role=Role.INPUT)]
    boundary = Boundary(position=0, departures=(), arrivals=())
    graph = Graph.build(name="outside", storages=storages, ops=[], boundaries=[boundary])
    wrong = Schedule(np.array([6], np.int8), np.array([0], np.int32), np.array([-5], np.int64))
    with pytest.raises(InvalidScheduleError, match=r"0 CrossBoundary\(0\) has -5 bytes outside, expected 0 or"):
        check(graph, wrong)


def test_collectives_of_the_same_ranks_keep_their_order() -> None:
    storages = [Storage(id=number, name=f"bucket{number}", bytes=64, role=Role.PARAMETER) for number in range(2)]
    common = {"phase": Phase.BACKWARD, "reads": (), "writes": (), "seconds": 0.0}
    ops = [
        Op(id=0, name="first", mutates=(0,), group="all", **common),
        Op(id=1, name="second", mutates=(1,), group="all", **common),
        Op(id=2, name="other", mutates=(0,), **common),
    ]
    graph = Graph.build(name="sums", storages=storages, ops=ops)
    check(graph, Schedule.parse(["compute 0", "compute 2", "compute 1"]))
    with pytest.raises(
        InvalidScheduleError,
        match="computes op 1 for the first time before op 0 'first', which is a collective of 'all' as well",
    ):
        check(graph, Schedule.parse(["compute 1", "compute 0", "compute 2"]))
