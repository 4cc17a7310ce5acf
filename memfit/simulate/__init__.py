"""The one simulator: exact bytes at every instruction of a schedule, and its time on three serial streams."""

from memfit.simulate.simulator import Timeline, arrays_of, simulate

__all__ = ["Timeline", "arrays_of", "simulate"]
