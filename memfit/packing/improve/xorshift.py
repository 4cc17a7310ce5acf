"""The random numbers of compiled searches: a generator whose state is one integer."""

from __future__ import annotations

from memfit.system.compiled import compiled

_SEED_FACTOR, _SEED_MASK = 0x9E3779B97F4A7C15, (1 << 62) - 1


def random_state(seed: int) -> int:
    """Return the first state for a seed; never 0."""
    return ((seed + 1) * _SEED_FACTOR & _SEED_MASK) | 1


@compiled
def next_random(state: int) -> int:
    """Return the next state of a 63-bit generator (xorshift, Marsaglia 2003); never 0 if `state` is not 0."""
    state ^= (state << 13) & 0x7FFFFFFFFFFFFFFF
    state ^= state >> 7
    state ^= (state << 17) & 0x7FFFFFFFFFFFFFFF
    return state
