"""Own loops in several ways, at shares of what the bare loop takes: peak, use of the budget, time and bits.

Each way of training has a process of its own: bare; `torch.utils.checkpoint` around every block, by hand;
`memfit.checkpoint` within 90%, 70%, 50% of the bare peak, within the peak of the checkpoints by hand, and at the least
that it was seen to take; `memfit.fit` within 70% and 50%; eager mode within 70%; torch's own
`activation_memory_budget` of 0.7, which is no number of bytes, with eager's kernels. All train from the same seed,
first until plans stay, then in turns of two steps. Seconds are of one thread's processor time, so that other processes
matter less; the ratio is the median over steps of a way's seconds to the bare loop's in the same step. Peaks are all
that torch takes, residents included: as a share of the bare loop's, and, from the fifth step on, of the budget. Bits
are those of all losses, and of parameters and buffers at the end. A way that refuses a loop, or breaks off, is a row
with its reason.

    python benchmarks/checkpoint.py                    # all models that are not stored yet: 50 minutes
    python benchmarks/checkpoint.py gpt2 --turns 5     # one model, nothing stored
    python benchmarks/checkpoint.py gpt2 --again       # one model, in the place of what is stored

Each model is stored in a file of its own, so that two runs, with other names, may go on beside each other.
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

from _loop_cases import MORE_OWN_LOOPS, OWN_LOOPS
from _loop_ways import Child, in_turns, show
from _record import result_path, store

SHARES = (0.9, 0.7, 0.5)
FIT_SHARES = (0.7, 0.5)
EAGER_SHARE = 0.7
LEAST_ROOM = 1.005
SETTLE = 14  # steps until plans stay
TURN = 2  # steps
TURNS = 12
SEARCH_SECONDS = 5.0
ANSWER_SECONDS = 400.0


def measure(name: str, turns: int) -> dict[str, Any]:
    """Return the rows of one model."""
    make = partial(
        Child, f"own loop: {name}", settle=SETTLE, search_seconds=SEARCH_SECONDS, timeout_seconds=ANSWER_SECONDS
    )
    children = {"bare": make("bare"), "by hand": make("by hand")}
    bare, hand = children.values()
    if bare.error:
        raise SystemExit(f"{name}: {bare.error}")
    bare_bytes = bare.settled["peak_bytes"]
    ways = {f"memfit.checkpoint {share:.0%}": ("checkpoint", int(bare_bytes * share)) for share in SHARES}
    if not hand.error:
        ways["memfit.checkpoint as by hand"] = "checkpoint", hand.settled["peak_bytes"]
    lean = make("checkpoint", 1).end()
    if "error" not in lean:
        ways["memfit.checkpoint least"] = "checkpoint", int(lean["peaks_bytes"][-1] * LEAST_ROOM)
    ways |= {f"memfit.fit {share:.0%}": ("fit", int(bare_bytes * share)) for share in FIT_SHARES}
    ways[f"memfit.eager {EAGER_SHARE:.0%}"] = "eager", int(bare_bytes * EAGER_SHARE)
    children |= {label: make(*way) for label, way in ways.items()}
    children["torch's budget 0.7"] = make("torch")
    budgets = {label: budget_bytes for label, (_, budget_bytes) in ways.items()}
    rows = in_turns(children, budgets, turns=turns, steps=TURN)
    return {"model": name, "bare_bytes": bare_bytes, "bare_seconds": sorted(bare.seconds)[turns], "rows": rows}


def main() -> None:
    """Measure, print, and store."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = ", ".join([*OWN_LOOPS, *MORE_OWN_LOOPS])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {known}; default: all but the last two")
    parser.add_argument("--turns", type=int, default=TURNS, help="others than %(default)s are not stored")
    parser.add_argument("--again", action="store_true", help="measure again what is stored already")
    options = parser.parse_args()
    is_stored = options.turns == TURNS
    for name in options.names or OWN_LOOPS:
        result = f"checkpoint/{name.replace(' ', '_')}"
        if is_stored and result_path(result).exists() and not options.again:
            continue
        found = measure(name, options.turns)
        show(f"{name}: bare {found['bare_bytes'] / 2**20:.1f} MiB, {found['bare_seconds'] * 1e3:.0f} ms", found["rows"])
        if is_stored:
            store(result, found | {"turns": TURNS, "steps_of_a_turn": TURN, "settle": SETTLE})


if __name__ == "__main__":
    main()
