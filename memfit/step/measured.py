"""The result of a measurement, for the runtime, the commands and the report alike; imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from memfit.simulate.overlap import Transfers


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What a machine measured of a step, and beside it of the baseline, which is eager PyTorch.

        >>> Measured(
        ...     peak_bytes=286 << 20, step_seconds=1.2, overhead_spread=(0.18, 0.23), baseline_peak_bytes=677 << 20,
        ...     baseline_step_seconds=1.0, machine="2 CPU cores",
        ... ).overhead_text
        '+20.0% (18.0 to 23.0)'

    Attributes:
        peak_bytes: of the planned step, residents included.
        step_seconds: of the planned step; the median of several.
        baseline_peak_bytes, baseline_step_seconds: the same of the step in eager PyTorch; None where the device has no
            room for it.
        overhead_spread: the lowest and the highest overhead that the turns of both allow (`memfit.step.overhead`);
            None without these.
        turns: how many steps of each were measured, one after the other.
        resident_bytes: parameters, buffers, optimizer state and batch.
        reserved_bytes: of the planned step: on CUDA the most that torch's allocator held, with what eager left there
            returned before; on a CPU, whose allocator keeps nothing for the step, the same as `peak_bytes`. None where
            that was not measured.
        source: names the instrument that counted the bytes.
        bitwise_equal: whether outputs, gradients and buffers were the same bits as the unplanned step's; None where
            that was not compared.
        machine: where this was measured, in words.
        note: further remarks, as sentences.
        transfers: the copies of the planned step with the median time, in seconds from its start; None for a step
            that offloads nothing, and on a GPU.
    """

    peak_bytes: int
    step_seconds: float
    baseline_peak_bytes: int | None
    baseline_step_seconds: float | None
    overhead_spread: tuple[float, float] | None = None
    turns: int = 0
    resident_bytes: int = 0
    reserved_bytes: int | None = None
    source: str = ""
    bitwise_equal: bool | None = None
    machine: str = ""
    note: str = ""
    transfers: Transfers | None = None

    @property
    def overhead(self) -> float | None:
        """Planned over baseline seconds, minus one; None without a baseline."""
        return None if self.baseline_step_seconds is None else self.step_seconds / self.baseline_step_seconds - 1.0

    @property
    def overhead_text(self) -> str:
        """The overhead with its spread, in percent; a dash without a baseline."""
        if self.overhead is None:
            return "–"
        low, high = self.overhead_spread or (self.overhead, self.overhead)
        spread = f" ({100 * low:.1f} to {100 * high:.1f})" if self.overhead_spread else ""
        return f"{self.overhead:+.1%}{spread}".replace("-0.0%", "+0.0%")
