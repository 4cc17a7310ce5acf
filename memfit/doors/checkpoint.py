"""`memfit.checkpoint`: a budget of bytes for any training loop, held by torch's own checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from memfit.capture.placement import step_device
from memfit.capture.step_check import refuse_first_fsdp
from memfit.checkpointing.blocks import find_all, together
from memfit.checkpointing.handle import Checkpointed
from memfit.checkpointing.loop import Loop
from memfit.checkpointing.policy import read_policy
from memfit.chunked_loss.heads import ChunkedHead
from memfit.cost.calibration import card_of
from memfit.errors import InvalidOptionError, UnsupportedStepError
from memfit.memory.contract import Contract, read_firm
from memfit.memory.hard_cap import tell_of_card
from memfit.step.hooks import Hook
from memfit.system.budget import on_card, parse_host_budget
from memfit.system.recorder import page_bytes
from memfit.torch_private.modules import is_compiled, uncompiled


def checkpoint(
    model: torch.nn.Module | Sequence[torch.nn.Module],
    budget: str | int | None = None,
    *,
    policy: Mapping[str, Any] | str | Path | None = None,
    blocks: Sequence[str] | None = None,
    host_budget: str | int | None = None,
    budget_is: str = "firm",
    chunk_loss: bool | str = False,
) -> Checkpointed:
    """Keep any training loop of a model within a budget of bytes, by torch's own checkpoints.

        >>> import torch
        >>> import memfit
        >>> from torch.nn import GELU, Linear, Sequential
        >>> model = Sequential(*[Sequential(Linear(8, 32), GELU(), Linear(32, 8)) for _ in range(3)])
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> handle = memfit.checkpoint(model, "6GiB")
        >>> for _ in range(3):
        ...     model(torch.randn(4, 8)).square().mean().backward()
        ...     optimizer.step()
        ...     optimizer.zero_grad()
        >>> handle.policy()
        {'32': {'0': 'none', '1': 'none', '2': 'none'}}
        >>> handle.close()

    The loop stays as it is. In the first steps all blocks are recomputed in the backward pass, and memfit records what
    they do. From the second step after the optimizer's first one a plan says what is kept. What steps take is measured,
    and corrects the plan. Results, gradients, buffers and random streams are those of the loop without it.

    Args:
        model: any module; before or after DDP, `fully_shard`, and the wrappers of Trainer, Accelerate and Lightning. A
            list of modules that one loop trains (an encoder and a decoder, both networks of a GAN) shares one plan.
        budget: of all that is on the model's device, as text (`20GiB`, `90% of the card`) or in bytes; a percentage
            alone is of the peak that is predicted for the loop without checkpoints.
        policy: from `policy()`, or a JSON file with it, in the place of plans.
        blocks: names of modules, or patterns of them such as `encoder.layers.*`, in the place of those that are found.
            Where none are found, steps are held to the budget as they are, and one above it is refused.
        host_budget: the bytes that inputs of blocks may take on the host, as text or in bytes: in pinned memory for a
            model on a GPU, in a file on a disk for one on a CPU. Copies run beside compute; they are made where they
            cost less time than recomputing what they free.
        budget_is: `firm`: a step that took more than the budget, although all was recomputed, is an error at the
            next call of the model; `soft`: it is a warning.
        chunk_loss: compute the logits of the model's head, and what the loss makes of them, some rows at a time, so
            that they are never whole: True finds the head, or name it. Last bits differ.

    Raises:
        InvalidTargetError: no module.
        InvalidDeviceError: a model on several devices.
        InvalidBudgetError: no size.
        HostMemoryError: the host, or the disk, has no room for the host budget.
        InvalidOptionError: neither budget nor policy, or blocks that the model does not have.
        InvalidFileError: a policy that cannot be read.
        UnsupportedStepError: a model under FSDP's first version; `chunk_loss` of a head whose weight is sharded; at the
            first call of the model, a block cannot be recomputed.
        BudgetNotHeldError: at a call of the model, where the last step took too much.
    """
    if budget is None and policy is None:
        raise InvalidOptionError("give a budget, such as memfit.checkpoint(model, '20GiB'), or a policy")
    model = model if isinstance(model, torch.nn.Module) else together(model, chunk_loss)
    refuse_first_fsdp(model.parameters(), "memfit.checkpoint")
    device, is_firm = step_device(model, (), "memfit.checkpoint"), read_firm(budget_is)
    budget = None if budget is None else on_card(budget, lambda: card_of(device))
    contract = None if budget is None else Contract(budget, page_bytes=page_bytes(device), is_firm=is_firm)
    if contract is not None and not contract.is_share:
        tell_of_card(device, contract.budget_bytes, "memfit.checkpoint")
    given = None if policy is None else read_policy(policy)
    head = ChunkedHead(uncompiled(model), chunk_loss) if chunk_loss else None
    if head is not None and is_compiled(model):
        raise UnsupportedStepError(
            "memfit.checkpoint: chunk_loss needs a model that is not compiled as a whole; compile its blocks by "
            "themselves, or leave chunk_loss out"
        )
    is_sharded = any(base.__name__ == "FSDPModule" for module in model.modules() for base in type(module).__mro__)
    loop = Loop(
        model,
        partial(find_all, uncompiled(model), blocks),
        contract,
        device,
        may_chain=not is_sharded,
        host_budget_bytes=parse_host_budget(host_budget),
        given=given,
        hooks=[] if head is None else head.hooked(Hook),
    )
    return Checkpointed(loop)
