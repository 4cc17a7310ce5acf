"""Workload encoder: torch.nn.TransformerEncoder with dropout, on tokens given as vectors."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from memfit.workloads.parts import Options, Parts, SupervisedLoss, autocast_dtype, head_count


def make(name: str, options: Options) -> Parts:
    """Return an encoder, mean squared error, and a batch of noise with noise to predict."""
    shape = [options[key] for key in ("batch", "tokens", "width")]
    layer = nn.TransformerEncoderLayer(
        d_model=options["width"],
        nhead=head_count(name, options),
        dim_feedforward=options["feedforward"],
        dropout=options["dropout"],
        batch_first=True,
    )
    return Parts(
        model=nn.TransformerEncoder(layer, num_layers=options["layers"], enable_nested_tensor=False),
        loss=SupervisedLoss(criterion=_mean_square_error, autocast=autocast_dtype(options)),
        batch=(torch.randn(shape), torch.randn(shape)),
    )


def _mean_square_error(predicted: Tensor, wanted: Tensor) -> Tensor:
    return (predicted - wanted).square().mean()


def places(model: nn.Module, granularity: str) -> list[nn.Module]:
    """Return every layer, or all of them as one."""
    encoder = cast(nn.TransformerEncoder, model)
    return [encoder] if granularity == "stage" else list(encoder.layers)
