"""Cost: what each op takes. Measured on this device, or by a roofline for one that is not here."""

from __future__ import annotations

from memfit.cost.calibration import calibrate, local_device
from memfit.cost.measurement import measure
from memfit.cost.rooflines import roofline

__all__ = ["calibrate", "local_device", "measure", "roofline"]
