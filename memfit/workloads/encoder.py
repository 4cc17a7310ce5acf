"""torch.nn.TransformerEncoder with dropout, on tokens that are vectors already."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from memfit.errors import InvalidOptionError
from memfit.workloads.parts import AUTOCAST_DTYPES, Options, Parts, SupervisedLoss


def make(name: str, options: Options) -> Parts:
    """Return an encoder, mean squared error, and a batch of noise with noise to predict."""
    batch, tokens, width, head_width = (int(options[key]) for key in ("batch", "tokens", "width", "head_width"))
    if width % head_width:
        raise InvalidOptionError(f"workload {name}: width {width} is not a multiple of head_width {head_width}")
    layer = nn.TransformerEncoderLayer(
        d_model=width,
        nhead=width // head_width,
        dim_feedforward=int(options["feedforward"]),
        dropout=float(options["dropout"]),
        batch_first=True,
    )
    return Parts(
        model=nn.TransformerEncoder(layer, num_layers=int(options["layers"]), enable_nested_tensor=False),
        loss=SupervisedLoss(criterion=_mean_square_error, autocast=AUTOCAST_DTYPES[str(options["autocast"])]),
        batch=(torch.randn(batch, tokens, width), torch.randn(batch, tokens, width)),
    )


def _mean_square_error(predicted: Tensor, wanted: Tensor) -> Tensor:
    return (predicted - wanted).square().mean()


def places(model: nn.Module, granularity: str) -> list[nn.Module]:
    """Return every layer, or all of them as one."""
    encoder = cast(nn.TransformerEncoder, model)
    return [encoder] if granularity == "stage" else list(encoder.layers)
