"""A schedule: the instructions that carry out a graph, one after the other, and their text form.

    >>> from memfit.schedule import Compute, Drop, Schedule
    >>> schedule = Schedule.of([Compute(op=0), Compute(op=1, in_place_of=3), Drop(storage=4)])
    >>> print(schedule.text())
    compute 0
    compute 1 in_place_of 3
    drop 4
    >>> Schedule.parse(schedule.text()) == schedule
    True

`memfit.checker` states the meaning of the instructions, and replays them.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable, Iterator
from functools import cached_property

import msgspec
import numpy as np
from numpy.typing import NDArray

from memfit.errors import InvalidScheduleError


class Code(enum.IntEnum):
    """The kinds of instructions, as they stand in `Schedule.codes`."""

    COMPUTE = 0
    DROP = 1
    OFFLOAD = 2
    WAIT = 3
    PREFETCH = 4
    DROP_HOST = 5
    BOUNDARY = 6


class Compute(msgspec.Struct, frozen=True, kw_only=True):
    """Run an op; it allocates its writes; one of them reuses the memory of `in_place_of`, if given, which is freed."""

    op: int
    in_place_of: int | None = None


class Drop(msgspec.Struct, frozen=True, kw_only=True):
    """Free the device's copy of a storage."""

    storage: int


class Offload(msgspec.Struct, frozen=True, kw_only=True):
    """Start the copy device -> host; the storage stays readable."""

    storage: int


class Wait(msgspec.Struct, frozen=True, kw_only=True):
    """Make compute wait for the storage's copy to the host; only after it may the storage be dropped."""

    storage: int


class Prefetch(msgspec.Struct, frozen=True, kw_only=True):
    """Allocate the storage on the device and start the copy host -> device; the first read waits for it."""

    storage: int


class DropHost(msgspec.Struct, frozen=True, kw_only=True):
    """Free the host's copy of a storage."""

    storage: int


class CrossBoundary(msgspec.Struct, frozen=True, kw_only=True):
    """Hand control to the user at boundary number `boundary`; user code may hold `bytes_outside` to the step's end."""

    boundary: int
    bytes_outside: int = 0


Instruction = Compute | Drop | Offload | Wait | Prefetch | DropHost | CrossBoundary

_OPERAND = {
    Compute: (Code.COMPUTE, "op"),
    Drop: (Code.DROP, "storage"),
    Offload: (Code.OFFLOAD, "storage"),
    Wait: (Code.WAIT, "storage"),
    Prefetch: (Code.PREFETCH, "storage"),
    DropHost: (Code.DROP_HOST, "storage"),
    CrossBoundary: (Code.BOUNDARY, "boundary"),
}
_KIND = {code: kind for kind, (code, _) in _OPERAND.items()}
_NO_EXTRA = -1  # in `extras`: a Compute that reuses nothing in place
_LINE = re.compile(
    r"(?P<name>[a-z_]+) +(?P<operand>[0-9]{1,19})"
    r"(?: +(?P<extra_name>in_place_of|bytes_outside) +(?P<extra>[0-9]{1,19}))?\s*(?:#.*)?"
)
_MOST_OPERAND, _MOST_EXTRA = (1 << 31) - 1, (1 << 62) - 1  # limits of `operands` and `extras`, with room for sums


class Schedule:
    """An immutable list of instructions, held as three parallel arrays so that a simulation of it takes microseconds.

    Attributes:
        codes: int8[n], each a `Code`.
        operands: int32[n], the op, storage or boundary of each instruction.
        extras: int64[n], for a Compute the storage whose memory it reuses or -1, for a CrossBoundary its bytes outside.
    """

    __slots__ = ("__dict__", "codes", "extras", "operands")

    codes: NDArray[np.int8]
    operands: NDArray[np.int32]
    extras: NDArray[np.int64]

    def __init__(self, codes: NDArray[np.int8], operands: NDArray[np.int32], extras: NDArray[np.int64]) -> None:
        self.codes = np.ascontiguousarray(codes, np.int8)
        self.operands = np.ascontiguousarray(operands, np.int32)
        self.extras = np.ascontiguousarray(extras, np.int64)
        assert len(self.codes) == len(self.operands) == len(self.extras)
        for array in (self.codes, self.operands, self.extras):
            array.setflags(write=False)

    @staticmethod
    def of(instructions: Iterable[Instruction]) -> Schedule:
        """Return the schedule of these instructions.

        Raises:
            InvalidScheduleError: a number is negative or too large to be an id.
        """
        rows = [_row(number, instruction) for number, instruction in enumerate(instructions)]
        columns = tuple(zip(*rows, strict=True)) if rows else ((), (), ())
        return Schedule(np.array(columns[0], np.int8), np.array(columns[1], np.int32), np.array(columns[2], np.int64))

    @cached_property
    def instructions(self) -> tuple[Instruction, ...]:
        """The instructions as objects."""
        return tuple(self)

    def __iter__(self) -> Iterator[Instruction]:
        rows = zip(self.codes.tolist(), self.operands.tolist(), self.extras.tolist(), strict=True)
        return (_instruction(*row) for row in rows)

    def __getitem__(self, position: int) -> Instruction:
        return _instruction(int(self.codes[position]), int(self.operands[position]), int(self.extras[position]))

    def __len__(self) -> int:
        return len(self.codes)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Schedule) and all(
            np.array_equal(getattr(self, column), getattr(other, column)) for column in ("codes", "operands", "extras")
        )

    def __hash__(self) -> int:
        return hash((self.codes.tobytes(), self.operands.tobytes(), self.extras.tobytes()))

    def __repr__(self) -> str:
        return f"Schedule({len(self)} instructions)"

    def lines(self) -> list[str]:
        """Return the text of each instruction."""
        return [format_instruction(instruction) for instruction in self]

    def text(self) -> str:
        """Return the whole schedule as text, one instruction a line."""
        return "\n".join(self.lines())

    @staticmethod
    def parse(text: str | Iterable[str]) -> Schedule:
        """Parse the text form; empty lines and comments after `#` are ignored.

        Raises:
            InvalidScheduleError: a line is not an instruction; names the line's number, from 1.
        """
        lines = text.splitlines() if isinstance(text, str) else text
        return Schedule.of(
            _parse_line(line, number)
            for number, line in enumerate(lines, start=1)
            if line.strip() and not line.lstrip().startswith("#")
        )


def format_instruction(instruction: Instruction) -> str:
    """Return the text form of one instruction: `compute 3`, `drop 7`, `boundary 0 bytes_outside 64`."""
    code, field = _OPERAND[type(instruction)]
    line = f"{code.name.lower()} {getattr(instruction, field)}"
    if isinstance(instruction, Compute) and instruction.in_place_of is not None:
        return f"{line} in_place_of {instruction.in_place_of}"
    if isinstance(instruction, CrossBoundary) and instruction.bytes_outside:
        return f"{line} bytes_outside {instruction.bytes_outside}"
    return line


def _instruction(code: int, operand: int, extra: int) -> Instruction:
    """Return the instruction of one entry of `codes`, `operands` and `extras`."""
    if code == Code.COMPUTE:
        return Compute(op=operand, in_place_of=None if extra == _NO_EXTRA else extra)
    if code == Code.BOUNDARY:
        return CrossBoundary(boundary=operand, bytes_outside=extra)
    return _KIND[Code(code)](storage=operand)  # pyright: ignore[reportCallIssue]


def _row(number: int, instruction: Instruction) -> tuple[int, int, int]:
    code, field = _OPERAND[type(instruction)]
    operand, extra = getattr(instruction, field), None
    if isinstance(instruction, Compute):
        extra = instruction.in_place_of
    elif isinstance(instruction, CrossBoundary):
        extra = instruction.bytes_outside
    if not 0 <= operand <= _MOST_OPERAND or not 0 <= (extra or 0) <= _MOST_EXTRA:
        raise InvalidScheduleError(
            f"instruction {number}: {instruction} has a number out of range, expected 0 to {_MOST_OPERAND} "
            f"(bytes: to {_MOST_EXTRA})"
        )
    return code, operand, _NO_EXTRA if extra is None else extra


def _parse_line(line: str, number: int) -> Instruction:
    match = _LINE.fullmatch(line.strip())
    if match is None or match["name"].upper() not in Code.__members__:
        raise InvalidScheduleError(
            f"schedule line {number}: {line.strip()[:80]!r} is not an instruction, "
            f"expected one of {', '.join(code.name.lower() for code in Code)} and a number"
        )
    code, operand = Code[match["name"].upper()], int(match["operand"])
    expected_extra = {Code.COMPUTE: "in_place_of", Code.BOUNDARY: "bytes_outside"}.get(code)
    if match["extra_name"] not in (None, expected_extra):
        raise InvalidScheduleError(
            f"schedule line {number}: {code.name.lower()} takes no {match['extra_name']}, "
            f"expected {expected_extra or 'one number'}"
        )
    extra = int(match["extra"] or (_NO_EXTRA if code == Code.COMPUTE else 0))
    if operand > _MOST_OPERAND or extra > _MOST_EXTRA:
        raise InvalidScheduleError(
            f"schedule line {number}: {line.strip()[:80]!r} has a number that is too large, "
            f"expected at most {_MOST_OPERAND} (bytes: {_MOST_EXTRA})"
        )
    return _instruction(code, operand, extra)
