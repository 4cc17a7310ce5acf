"""Bayesian optimization: a small Gaussian process with expected improvement, for functions that are dear to compute.

Source: Jones, Schonlau and Welch 1998, "Efficient Global Optimization of Expensive Black-Box Functions".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

Point = NDArray[np.float64]

_LENGTH = 0.3  # of the squared exponential kernel, over the unit cube
_NOISE = 1e-6  # added to the kernel's diagonal, so that equal points leave it invertible
_CANDIDATES = 512  # random points of which the one of the most expected improvement is tried


def minimize(value: Callable[[Point], float], first: Sequence[Point], evaluations: int, seed: int) -> Point:
    """Return the point of the unit cube with the least value found.

    >>> float(minimize(lambda point: float((point[0] - 0.3) ** 2), [np.zeros(1), np.ones(1)], 12, 0)[0].round(1))
    0.3

    Args:
        value: of a point; finite.
        first: points to begin with, at least one.
        evaluations: how many points to try in all.
        seed: of the random points.
    """
    random = np.random.default_rng(seed)
    points = list(first)[: max(1, evaluations)]
    values = [value(point) for point in points]
    while len(points) < evaluations:
        candidates = random.random((_CANDIDATES, len(first[0])))
        points.append(candidates[int(np.argmax(_improvement(np.array(points), np.array(values), candidates)))])
        values.append(value(points[-1]))
    return points[int(np.argmin(values))]


def _improvement(points: Point, values: Point, candidates: Point) -> Point:
    """Return float64[candidates]: the expected improvement on the least value, under a Gaussian process."""
    scale = float(values.std()) or 1.0
    scaled = (values - values.mean()) / scale
    factor = np.linalg.cholesky(_kernel(points, points) + _NOISE * np.eye(len(points)))
    across = np.asarray(np.linalg.solve(factor, _kernel(points, candidates)), np.float64)
    mean = across.T @ np.asarray(np.linalg.solve(factor, scaled), np.float64)
    deviation = np.sqrt(np.maximum(1.0 - (across**2).sum(axis=0), 1e-12))
    gain = scaled.min() - mean
    ratio = gain / deviation
    below = 0.5 * (1.0 + np.array([math.erf(each / math.sqrt(2.0)) for each in ratio]))
    density = np.exp(-0.5 * ratio**2) / math.sqrt(2.0 * math.pi)
    return gain * below + deviation * density


def _kernel(first: Point, second: Point) -> Point:
    distance = ((first[:, None, :] - second[None, :, :]) ** 2).sum(axis=2)
    return np.exp(-0.5 * distance / _LENGTH**2)
