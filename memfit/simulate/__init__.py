"""The one simulator: exact bytes at every instruction of a schedule, and its time on serial streams."""

from memfit.simulate.arrays import arrays_of
from memfit.simulate.simulator import Timeline, on_compute, simulate

__all__ = ["Timeline", "arrays_of", "on_compute", "simulate"]
