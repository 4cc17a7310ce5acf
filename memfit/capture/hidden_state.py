"""Operators that keep state where no generator of torch has it: a plan cannot compute them a second time."""

from __future__ import annotations

from typing import Any

import torch

from memfit.errors import UnsupportedStepError

_aten = torch.ops.aten
_RECURRENT = (_aten._cudnn_rnn, _aten.miopen_rnn)


def refuse_hidden_state(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse a GPU's recurrent layers with dropout between them, whose random state their library keeps by itself.

    Args:
        func: an operator overload.
        args, kwargs: its arguments.

    Raises:
        UnsupportedStepError: says what to write instead.
    """
    if func.overloadpacket not in _RECURRENT:
        return
    given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
    if given["train"] and given["dropout"] > 0:
        raise UnsupportedStepError(
            f"a recurrent layer has dropout={given['dropout']:g}, and on a GPU its library keeps the random state of "
            "that to itself, so that a step cannot be run again with the same numbers: put torch.nn.Dropout between "
            "layers of num_layers=1, or set torch.backends.cudnn.enabled = False"
        )
