"""What the cells of the ablation say of each part: its gain at each point, the spread over seeds, and a verdict."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

Cell = Mapping[str, Any]
Cells = Mapping[tuple[str, str, int], Cell]

FULL = ""  # in the place of a part that is switched off: the full search
LEAST_GAIN = 0.001  # of the unplanned step's seconds, or of the lower bound of a layout's height
LEAST_SHARE = 0.1  # of the gap between the found value and the proved bound
LEAST_SEEDS, MANY_SEEDS = 3, 6
LEAST_ERRORS = 3  # standard errors; of some twenty gains by chance, hardly one is larger
LEAST_SECONDS, LEAST_SLOWDOWN = 0.1, 1.5  # by which a proof takes longer
ROUNDING = 1e-9  # differences below it are those of sums in another order
NEEDED, NEEDLESS, DOUBTFUL, UNTOUCHED = "needed", "needless", "doubtful", "no effect seen"
TIMES = ("plan_seconds", "processor_seconds", "pack_seconds", "same")  # of a cell: not what it found


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """What a part gains at one point; shares of the unplanned seconds, or of the lower bound of the height.

    `gain` is the mean over seeds of the result without the part less the result with it, None where either has no
    plan; `error` is its standard error; `spread` is the range of the results with it; of packings, whose seconds vary,
    also of those without it.
    Where neither has a plan, both are of the least budget found, as a share of it.
    `lost` counts seeds with a plan, or a proof, only with the part; `won` those without it only. `closed` is the share
    of the gap to the proved bound that the part closes. `slower` is how many times longer a proof takes without it.
    `differs` is false where every seed found exactly the same with the part and without.
    """

    point: str
    seeds: int
    gain: float | None
    spread: float
    error: float = 0.0
    lost: int = 0
    won: int = 0
    closed: float = 0.0
    slower: float = 1.0
    differs: bool = True

    @property
    def counts(self) -> bool:
        """Whether the part gains something here, beyond chance."""
        is_gained = self.gain is not None and self.gain >= LEAST_GAIN and self.gain > self.spread
        return is_gained or self.lost > self.won + 1 or self.closed >= LEAST_SHARE or self.slower >= LEAST_SLOWDOWN

    @property
    def is_likely(self) -> bool:
        """Whether the part gains something here that many seeds tell from chance."""
        return (
            self.seeds >= MANY_SEEDS
            and self.gain is not None
            and self.gain >= max(LEAST_GAIN, LEAST_ERRORS * self.error)
        )

    @property
    def might_count(self) -> bool:
        """Whether the part may gain something here, though no more than seeds differ by."""
        return (self.gain is not None and self.gain >= LEAST_GAIN) or self.lost > self.won


def plan_gain(point: str, full: Sequence[Cell], less: Sequence[Cell]) -> Gain:
    """Return what a part gains at a point of the searches; the cells of the same seeds, with it and without."""
    pairs = [
        (more["overhead"], fewer["overhead"])
        for more, fewer in zip(full, less, strict=True)
        if more["overhead"] is not None and fewer["overhead"] is not None
    ]
    found = [cell["overhead"] for cell in full if cell["overhead"] is not None]
    closed = 0.0
    if found:
        closed = _closed(min(found), full[0]["bound"], less[0]["bound"])
    elif not any(cell["overhead"] is not None for cell in less):
        least_bytes = min(cell["found_bytes"] for cell in full)
        found = [cell["found_bytes"] / least_bytes for cell in full]
        pairs = [(more, cell["found_bytes"] / least_bytes) for more, cell in zip(found, less, strict=True)]
    least_found = min(cell["found_bytes"] for cell in [*full, *less])
    closed = max(closed, _closed(least_found, full[0]["bound_bytes"], less[0]["bound_bytes"]))
    return Gain(
        point=point,
        seeds=len(full),
        gain=statistics.mean(fewer - more for more, fewer in pairs) if pairs else None,
        spread=_range(found),
        lost=sum(m["overhead"] is not None and f["overhead"] is None for m, f in zip(full, less, strict=True)),
        won=sum(m["overhead"] is None and f["overhead"] is not None for m, f in zip(full, less, strict=True)),
        closed=closed,
    )


def _range(values: Iterable[float]) -> float:
    """Return how far values are apart."""
    known = list(values)
    return max(known) - min(known) if known else 0.0


def _closed(found: float, bound: float, bound_without: float) -> float:
    """Return the share of the gap between plans and bounds that the part closes."""
    gap = found - bound_without
    return (bound - bound_without) / gap if gap > ROUNDING and bound - bound_without > ROUNDING else 0.0


def pack_gains(point: str, full: Sequence[Cell], less: Sequence[Cell]) -> list[Gain]:
    """Return what a part gains at a trace: early, and in the end."""
    return [_pack_gain(f"{point}, early", full, less, "early_ratio"), _pack_gain(point, full, less, "ratio")]


def _pack_gain(point: str, full: Sequence[Cell], less: Sequence[Cell], key: str) -> Gain:
    is_last = key == "ratio"
    proofs = [
        (more["pack_seconds"], fewer["pack_seconds"])
        for more, fewer in zip(full, less, strict=True)
        if more["proven"] and fewer["proven"]
    ]
    slower = 1.0
    if is_last and len(proofs) == len(full):
        seconds, without_seconds = (statistics.median(times) for times in zip(*proofs, strict=True))
        if without_seconds - max(more for more, _ in proofs) >= LEAST_SECONDS:
            slower = without_seconds / seconds
    gains = [fewer[key] - more[key] for more, fewer in zip(full, less, strict=True)]
    return Gain(
        point=point,
        seeds=len(full),
        gain=statistics.mean(gains),
        error=statistics.stdev(gains) / len(gains) ** 0.5,
        spread=max(_range(cell[key] for cell in full), _range(cell[key] for cell in less)),
        lost=sum(m["proven"] and not f["proven"] for m, f in zip(full, less, strict=True)) if is_last else 0,
        won=sum(f["proven"] and not m["proven"] for m, f in zip(full, less, strict=True)) if is_last else 0,
        slower=slower,
    )


def answer_of(cell: Cell) -> dict[str, Any]:
    """Return what a cell found, without seconds."""
    return {name: value for name, value in cell.items() if name not in TIMES}


def gains_of(cells: Cells, with_part: Mapping[str, str], without_part: Mapping[str, str]) -> list[Gain]:
    """Return what is gained at each point that has cells of both for `LEAST_SEEDS` seeds, over all seeds of both.

    Args:
        cells: by point, by what is switched off there, and by seed.
        with_part: what is switched off where the part is on, by point.
        without_part: what is switched off where it is not, by point; points that it does not concern are left out.
    """
    gains: list[Gain] = []
    for point, without in without_part.items():
        seeds = sorted(seed for name, each, seed in cells if name == point and each == without)
        pairs = [(cells.get((point, with_part[point], seed)), cells[point, without, seed]) for seed in seeds]
        measured = [(more, fewer) for more, fewer in pairs if more is not None]
        if len(measured) >= LEAST_SEEDS:
            full, less = zip(*measured, strict=True)
            differs = any(answer_of(more) != answer_of(fewer) for more, fewer in measured)
            found = pack_gains(point, full, less) if "ratio" in full[0] else [plan_gain(point, full, less)]
            gains += [replace(gain, differs=differs) for gain in found]
    return gains


def summarize(gains: Sequence[Gain]) -> dict[str, Any]:
    """Return a row of the table: the mean and the largest gain, the spread there, and the verdict."""
    measured = [gain for gain in gains if gain.gain is not None]
    largest = max(measured, key=lambda gain: gain.gain or 0.0, default=None)
    mean = statistics.mean(gain.gain or 0.0 for gain in measured) if measured else 0.0
    counting = [gain.point for gain in gains if gain.counts]
    verdict = NEEDED if counting else DOUBTFUL if any(gain.might_count for gain in gains) else NEEDLESS
    if not any(gain.differs for gain in gains):
        verdict = UNTOUCHED
    likely = max((gain for gain in measured if gain.is_likely), key=lambda gain: gain.gain or 0.0, default=None)
    return {
        "points": len(gains),
        "seeds": max((gain.seeds for gain in gains), default=0),
        "mean_gain": mean,
        "likely": {"at": likely.point, "gain": likely.gain, "error": likely.error} if likely else None,
        "largest_gain": largest.gain if largest else 0.0,
        "spread_there": largest.spread if largest else 0.0,
        "largest_at": largest.point if largest else "",
        "points_that_count": counting,
        "differs": sum(gain.differs for gain in gains),
        "helps": sum(gain.gain is not None and gain.gain >= LEAST_GAIN for gain in gains),
        "hurts": sum(gain.gain is not None and gain.gain <= -LEAST_GAIN for gain in gains),
        "lost": sum(gain.lost for gain in gains),
        "won": sum(gain.won for gain in gains),
        "closed": max((gain.closed for gain in gains), default=0.0),
        "slower": max((gain.slower for gain in gains), default=1.0),
        "verdict": verdict,
    }
