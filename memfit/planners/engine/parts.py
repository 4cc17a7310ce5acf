"""The parts of the searches that can be switched off, one at a time, to measure what each gains."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from memfit.system.registered import made_without

WITHOUT_HELP = "parts of the search to switch off, comma-separated, to measure what they gain"
"""The help of the option `without` of the planners that search."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Which parts of a search are switched on: by default all of them."""

    # Where the search begins.
    full_stages: bool = True  # keeps what an integer program of the stages above the budget keeps
    block_dynamic_program: bool = True  # joins families of retention block by block
    waiting_gradients: bool = True  # adds families in which gradients with a single reader wait for it
    nested_segments: bool = True  # adds families with segments within segments
    segments: bool = True  # keeps what crosses Chen's segments of several sizes
    recursive_checkpoints: bool = True  # checkpoints recursively where no other start fits the budget
    peak_reducing_order: bool = True  # moves ops within their dependences to lower the peak; else the original order
    # Moves of the annealing; toggles get the share of a move that is switched off.
    exchange: bool = True  # drops one storage and keeps others in its place, or the reverse
    shift: bool = True  # moves a checkpoint by one op
    run: bool = True  # keeps or drops storages that are written one after the other
    evict_at_peak: bool = True  # drops a storage that is held, but not used, at the peak
    forget_sources: bool = True  # drops a storage, and what is recomputed for it is not held either; or the reverse
    drop_for_each_reader: bool = True  # recomputes a dropped storage anew for each of its readers
    hold_from_later_stage: bool = True  # drops over a random part of an interval
    # How later runs start, and how each run proceeds.
    descents: bool = True  # lowers the peak itself as long as nothing fits
    penalty_oscillation: bool = True  # adapts the price of bytes so that the search stays near the budget
    leanest: bool = True  # remembers the state of the least peak of runs in which nothing fits
    # Bounds.
    boundary_candidates: bool = True  # asks the recompute bound at ops near the forward/backward boundary
    last_large_op: bool = True  # raises the least budget by what is held beside the last large op
    exact_per_op: bool = True  # solves the per-op recompute bound exactly at one op
    cpsat_proof: bool = True  # proves optimality in one order of ops, up to 64 ops

    @staticmethod
    def without(names: str) -> Parts:
        """Return all parts but those of a comma-separated list.

            >>> Parts.without("exchange, shift").exchange
            False

        Raises:
            InvalidOptionError: a name that is no part's; the message lists those that exist.
        """
        known = [field.name for field in dataclasses.fields(Parts)]
        return made_without(Parts, names, owner="the search", known=known)


ALL_PARTS = Parts()
"""A search with nothing switched off."""
