"""The doors of memfit beside each other in own loops: which of them holds a budget, with whose bits, in what time.

Models whose graphs are broken, by lines that look at a tensor's value or by data that choose what runs; models whose
steps are one graph; and the loops of `eager_mode.py`, of which hardly two steps are alike. Each is trained bare, by
`memfit.checkpoint`, by `memfit.fit` (which hands over to it where there is no graph), by `memfit.compile` in the
loop, and in eager mode, within 70% of what the bare loop takes at most; the loops of `eager_mode.py` within 60%, too.
Each way has a process of its own, trains from the same seed, first until plans stay, then in turns of two steps.
Seconds are of the processor, of the loop's own thread; ratios are to the bare loop's seconds in the same step. A
budget is soft, so that a step that takes more does not end the loop. A way that refuses a loop, or breaks off, is a
row with its reason.

    python benchmarks/doors.py                     # all that is not stored yet, stored one by one: 50 minutes
    python benchmarks/doors.py hubert "loop: *"    # some, by names or patterns
    python benchmarks/doors.py --half 1            # every second one; --half 2, beside it, the others
    python benchmarks/doors.py gpt2 --turns 2      # nothing stored

Each is stored in a file of its own, so that two runs may go on beside each other.
"""

from __future__ import annotations

import argparse
import re
from fnmatch import fnmatch
from functools import partial
from typing import Any

from _loop_cases import BROKEN, VARYING, WHOLE
from _loop_ways import Child, in_turns, show
from _record import result_path, store

KINDS = {
    **dict.fromkeys(BROKEN, "broken"),
    **dict.fromkeys(WHOLE, "whole"),
    **{f"loop: {name}": "varying" for name in VARYING},
}
DOORS = ("checkpoint", "fit", "compile", "eager")
SHARES = {"broken": (0.7,), "whole": (0.7,), "varying": (0.7, 0.6)}
SETTLE = 12  # steps until plans stay
TURN = 2  # steps
TURNS = 8
SEARCH_SECONDS = 2.0
ANSWER_SECONDS = 120.0


def measure(name: str, share: float, turns: int) -> dict[str, Any]:
    """Return the rows of one case within one share of its bare peak."""
    make = partial(Child, name, search_seconds=SEARCH_SECONDS, timeout_seconds=ANSWER_SECONDS)
    bare_bytes = most_bytes(make("bare", settle=SETTLE + turns * TURN))
    budget_bytes = int(bare_bytes * share)
    children = {"bare": make("bare", settle=SETTLE)}
    children |= {door: make(door, budget_bytes, settle=SETTLE) for door in DOORS}
    rows = in_turns(children, dict.fromkeys(DOORS, budget_bytes), turns=turns, steps=TURN)
    seconds = sorted(children["bare"].seconds)[turns]
    return {"bare_bytes": bare_bytes, "bare_seconds": seconds, "share": share, "rows": rows}


def result_name(name: str) -> str:
    """Return the name of the file of one case; files are listed by it, broken graphs first."""
    return f"doors/{KINDS[name]}_{re.sub('[^a-z0-9]+', '_', name)}"


def most_bytes(bare: Child) -> int:
    """Return the most that a step of the bare loop takes: of all steps, since data may choose what runs."""
    end = bare.end()
    if "error" in end:
        raise SystemExit(f"bare: {end['error']}")
    return max(end["peaks_bytes"])


def main() -> None:
    """Measure, print, and store."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="or patterns of: " + ", ".join(KINDS))
    parser.add_argument("--half", type=int, choices=(1, 2), help="every second case, from the first or the second on")
    parser.add_argument("--turns", type=int, default=TURNS, help="others than %(default)s are not stored")
    parser.add_argument("--again", action="store_true", help="measure again what is stored already")
    options = parser.parse_args()
    is_stored = options.turns == TURNS
    names = [name for name in KINDS if not options.names or any(fnmatch(name, each) for each in options.names)]
    for name in names[(options.half or 1) - 1 :: 2 if options.half else 1]:
        kind = KINDS[name]
        result = result_name(name)
        if is_stored and result_path(result).exists() and not options.again:
            continue
        found = [measure(name, share, options.turns) for share in SHARES[kind]]
        for each in found:
            title = f"{name} ({kind}): bare {each['bare_bytes'] / 2**20:.1f} MiB, {each['bare_seconds'] * 1e3:.0f} ms"
            show(title, each["rows"])
        if is_stored:
            store(result, {"case": name, "kind": kind, "turns": TURNS, "budgets": found})


if __name__ == "__main__":
    main()
