"""Schedules: their objects, their text, and what is no schedule."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memfit.errors import InvalidScheduleError
from memfit.schedule import (
    Code,
    Compute,
    CrossBoundary,
    Drop,
    DropHost,
    Instruction,
    Offload,
    Prefetch,
    Schedule,
    Wait,
    format_instruction,
)

EACH = (
    Compute(op=3),
    Compute(op=4, in_place_of=0),
    Drop(storage=1),
    Offload(storage=2),
    Wait(storage=2),
    Prefetch(storage=2),
    DropHost(storage=2),
    CrossBoundary(boundary=0),
    CrossBoundary(boundary=1, bytes_outside=1 << 40),
)
TEXT = """\
compute 3
compute 4 in_place_of 0
drop 1
offload 2
wait 2
prefetch 2
drop_host 2
boundary 0
boundary 1 bytes_outside 1099511627776"""

_ids = st.integers(0, (1 << 31) - 1)
_instructions: st.SearchStrategy[Instruction] = st.one_of(
    st.builds(Compute, op=_ids, in_place_of=st.none() | _ids),
    st.builds(CrossBoundary, boundary=_ids, bytes_outside=st.integers(0, 1 << 60)),
    *(st.builds(kind, storage=_ids) for kind in (Drop, Offload, Wait, Prefetch, DropHost)),
)


def test_text_of_each_instruction() -> None:
    schedule = Schedule.of(EACH)
    assert schedule.text() == TEXT
    assert Schedule.parse(TEXT) == schedule
    assert tuple(schedule) == schedule.instructions == EACH
    assert [format_instruction(instruction) for instruction in EACH] == TEXT.splitlines()


@given(st.lists(_instructions, max_size=20))
def test_every_schedule_survives_its_text(instructions: list[Instruction]) -> None:
    schedule = Schedule.of(instructions)
    assert schedule.instructions == tuple(instructions)
    assert Schedule.parse(schedule.text()) == schedule
    assert Schedule.parse(f"{line} # a note, # {line}" for line in schedule.lines()) == schedule


def test_comments_empty_lines_and_spaces_are_ignored() -> None:
    text = "# a schedule\n\n  compute 0   # the first\n\tdrop  1\n   # nothing\ncompute 1  in_place_of   2"
    expected = Schedule.of([Compute(op=0), Drop(storage=1), Compute(op=1, in_place_of=2)])
    assert Schedule.parse(text) == expected
    assert Schedule.parse(text.splitlines()) == expected


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("comptue 0", "'comptue 0' is not an instruction, expected one of compute, drop, offload, wait, prefetch"),
        ("compute", "'compute' is not an instruction"),
        ("compute x", "'compute x' is not an instruction"),
        ("compute -1", "'compute -1' is not an instruction"),
        ("compute 1.5", "'compute 1.5' is not an instruction"),
        ("compute \u0661", "is not an instruction"),
        ("Compute 1", "'Compute 1' is not an instruction"),
        ("compute 1 2", "'compute 1 2' is not an instruction"),
        ("compute 1 in_place_of", "is not an instruction"),
        ("drop 1 in_place_of 2", "drop takes no in_place_of, expected one number"),
        ("compute 1 bytes_outside 2", "compute takes no bytes_outside, expected in_place_of"),
        ("boundary 1 in_place_of 2", "boundary takes no in_place_of, expected bytes_outside"),
        ("compute 2147483648", "has a number that is too large, expected at most 2147483647"),
        ("boundary 0 bytes_outside 4611686018427387904", "has a number that is too large"),
        ("compute " + "9" * 10_000, "is not an instruction"),
    ],
)
def test_a_line_that_is_no_instruction_is_named(line: str, message: str) -> None:
    with pytest.raises(InvalidScheduleError, match=f"^schedule line 3: .*{re.escape(message)}") as caught:
        Schedule.parse(f"compute 0\n\n{line}")
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    "instruction",
    [
        Compute(op=-1),
        Compute(op=1 << 31),
        Compute(op=0, in_place_of=-1),
        Drop(storage=-1),
        CrossBoundary(boundary=0, bytes_outside=-1),
        CrossBoundary(boundary=0, bytes_outside=1 << 62),
    ],
)
def test_numbers_out_of_range_are_refused(instruction: Instruction) -> None:
    with pytest.raises(InvalidScheduleError, match=r"^instruction 1: .* has a number out of range"):
        Schedule.of([Compute(op=0), instruction])


def test_a_schedule_does_not_change() -> None:
    schedule = Schedule.of(EACH)
    for array in (schedule.codes, schedule.operands, schedule.extras):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1


def test_equality_and_hash() -> None:
    same = Schedule.parse(TEXT)
    assert same == Schedule.of(EACH)
    assert hash(same) == hash(Schedule.of(EACH))
    assert same != Schedule.of(EACH[:-1])
    assert Schedule.of([Compute(op=1)]) != Schedule.of([Compute(op=1, in_place_of=0)])
    assert same != TEXT


def test_length_and_positions() -> None:
    schedule = Schedule.of(EACH)
    assert (len(schedule), repr(schedule)) == (9, "Schedule(9 instructions)")
    assert [schedule[i] for i in range(9)] == list(EACH)
    assert schedule[-1] == EACH[-1]
    with pytest.raises(IndexError):
        schedule[9]


def test_arrays_are_codes_operands_and_extras() -> None:
    schedule = Schedule.of(EACH)
    assert [Code(code) for code in schedule.codes.tolist()] == [Code.COMPUTE, *Code, Code.BOUNDARY]
    assert schedule.operands.tolist() == [3, 4, 1, 2, 2, 2, 2, 0, 1]
    assert schedule.extras.tolist() == [-1, 0, -1, -1, -1, -1, -1, 0, 1 << 40]
    assert (schedule.codes.dtype, schedule.operands.dtype, schedule.extras.dtype) == (np.int8, np.int32, np.int64)
