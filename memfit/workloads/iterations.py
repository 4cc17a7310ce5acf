"""Workloads kmeans and power_iteration: iterations of a state that train nothing."""

from __future__ import annotations

import torch
from torch import Tensor

from memfit.errors import InvalidOptionError
from memfit.workloads.parts import Iteration, Options

_SPREAD = 4.0  # of the centres of the points, in standard deviations of a cluster


def lloyd(centres: Tensor, points: Tensor) -> Tensor:
    """Return the means of the points that are nearest to each centre; a centre without points stays where it is.

    Args:
        centres: (centres, features).
        points: (points, features).
    """
    squared = (points * points).sum(1, keepdim=True) - 2 * (points @ centres.T) + (centres * centres).sum(1)
    nearest = squared.argmin(1)
    sums = torch.zeros_like(centres).index_add_(0, nearest, points)
    ones = torch.ones(len(points), dtype=points.dtype, device=points.device)
    counts = torch.zeros_like(centres[:, 0]).index_add_(0, nearest, ones).unsqueeze(1)
    return torch.where(counts > 0, sums / counts.clamp(min=1), centres)


def subspace(vectors: Tensor, points: Tensor) -> Tensor:
    """Return an orthonormal basis of the image of `vectors` under the Gaussian kernel of all pairs of points.

    Args:
        vectors: (points, vectors).
        points: (points, features).
    """
    norms = (points * points).sum(1)
    squared = norms.unsqueeze(1) - 2 * (points @ points.T) + norms
    image = torch.exp(squared / (-2 * points.shape[1])) @ vectors
    return torch.linalg.qr(image)[0]


def make(name: str, options: Options) -> Iteration:
    """Return the iteration, with points around random centres, and a first state drawn from them."""
    count, features = options["points"], options["features"]
    clusters: int = options["centres" if name == "kmeans" else "vectors"]
    if clusters > count:
        raise InvalidOptionError(f"workload {name}: {clusters} of {count} points are asked for; give more points")
    middles = _SPREAD * torch.randn(clusters, features)
    points = middles[torch.randint(clusters, (count,))] + torch.randn(count, features)
    if name == "kmeans":
        return Iteration(function=lloyd, state=points[torch.randperm(count)[:clusters]].clone(), batch=points)
    return Iteration(function=subspace, state=torch.randn(count, clusters), batch=points)
