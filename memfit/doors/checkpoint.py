"""`memfit.checkpoint`: a budget of bytes for any training loop, held by torch's own checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from memfit.checkpointing.blocks import find_blocks, find_rest
from memfit.checkpointing.loop import Loop
from memfit.checkpointing.policy import read_policy, to_plain
from memfit.checkpointing.reporting import Report, SizeReport
from memfit.errors import InvalidDeviceError, InvalidOptionError
from memfit.memory.contract import FIRM, SOFT, Contract
from memfit.torch_private.modules import uncompiled

_PAGE_BYTES = {"cuda": 2 << 20}  # c10/cuda/CUDACachingAllocator.cpp, kSmallBuffer and the step of larger segments


class Checkpointed:
    """What `memfit.checkpoint` returns: the handle of a budgeted loop, and a `with` block that closes it."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop

    def __enter__(self) -> Checkpointed:
        return self

    def __exit__(self, *raised: object) -> None:
        self._loop.close(is_judged=raised[0] is None)

    def report(self) -> Report:
        """Return what was taken, window by window, and what is kept for each size.

        A step ends where the next one begins, so that the last one is left out; `end_step` ends it.
        """
        loop = self._loop
        contract = loop.contract
        return Report(
            budget_bytes=contract.budget_bytes if contract is not None and contract.is_resolved else None,
            blocks=tuple(loop.blocks),
            windows=tuple(loop.history.latest),
            count=loop.history.count,
            lean=loop.history.lean,
            over=loop.history.over,
            most_bytes=loop.history.most_bytes,
            sizes=tuple(
                SizeReport(
                    numel=shape.numel,
                    kind=shape.kind,
                    plans=shape.standing.plans,
                    planned=shape.planned,
                    most_bytes=shape.standing.worst_bytes,
                )
                for shape in loop.shapes.values()
                if shape.planned is not None
            ),
        )

    def expect_no_optimizer(self) -> None:
        """Plan from the second step on, although no optimizer will step; otherwise its state is waited for."""
        self._loop.expect_no_optimizer()

    def policy(self) -> dict[str, dict[str, Any]]:
        """Return the present policy as plain data: batch size -> block -> `none`, `full`, or the operators kept."""
        shapes = [shape for shape in self._loop.shapes.values() if shape.planned is not None]
        return to_plain({(s.numel, s.kind): s.planned.rules for s in shapes if s.planned is not None})

    def end_step(self) -> None:
        """End the present step here, and not at the next call of the model: after the last one, before a report.

        Raises:
            BudgetNotHeldError: it took too much.
        """
        self._loop.end()

    def freeze(self) -> None:
        """Keep the policy of the largest batch from now on, and measure no more: the model can then be compiled."""
        self._loop.freeze()

    def close(self) -> None:
        """End the budget, and leave the model as it was before."""
        self._loop.close()


def checkpoint(
    model: torch.nn.Module,
    budget: str | int | None = None,
    *,
    policy: Mapping[str, Any] | str | Path | None = None,
    blocks: Sequence[str] | None = None,
    budget_is: str = FIRM,
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

    The loop stays as it is. In the first steps all blocks are computed again in the backward pass, and it is noted what
    they do; from the second step after the optimizer's first one a plan says what is kept. What steps take is measured
    and corrects the plan. Results, gradients, buffers and random streams are those of the loop without it.

    Args:
        model: any module; before or after DDP, `fully_shard`, and the wrappers of Trainer, Accelerate and Lightning.
        budget: of all that is on the model's device, as text (`20GiB`) or in bytes; a percentage is of the peak that is
            predicted for the loop without checkpoints.
        policy: from `policy()`, or a JSON file with it, in the place of plans.
        blocks: names of modules, or patterns of them such as `encoder.layers.*`, in the place of those that are found.
        budget_is: `firm`: a step that took more than the budget, although all was computed again, is an error at the
            next call of the model; `soft`: it is a warning.

    Raises:
        InvalidBudgetError: no size.
        InvalidOptionError: neither budget nor policy, or blocks that the model does not have.
        InvalidFileError: a policy that cannot be read.
        UnsupportedStepError: no blocks were found; at the first call of the model, a block cannot be computed again.
        BudgetNotHeldError: at a call of the model, where the last step took too much.
    """
    if budget is None and policy is None:
        raise InvalidOptionError("give a budget, such as memfit.checkpoint(model, '20GiB'), or a policy")
    if budget_is not in (FIRM, SOFT):
        raise InvalidOptionError(f"budget_is={budget_is!r}: expected {FIRM!r} or {SOFT!r}")
    device = _device_of(model)
    page_bytes = _PAGE_BYTES.get(device.type, 0)
    contract = None if budget is None else Contract(budget, page_bytes=page_bytes, is_firm=budget_is == FIRM)
    given = None if policy is None else read_policy(policy)
    inner = uncompiled(model)
    found = find_blocks(inner, blocks)
    is_sharded = any(base.__name__ == "FSDPModule" for module in model.modules() for base in type(module).__mro__)
    rest = find_rest(inner, found) if blocks is None else []
    return Checkpointed(Loop(model, found, rest, contract, device, may_chain=not is_sharded, given=given))


def _device_of(model: torch.nn.Module) -> torch.device:
    devices = {tensor.device: name for name, tensor in [*model.named_buffers(), *model.named_parameters()]}
    if len(devices) != 1:
        where = ", ".join(f"{name} on {device}" for device, name in devices.items()) or "no parameters"
        raise InvalidDeviceError(f"memfit.checkpoint: {where}; expected a model on one device, which has the budget")
    return next(iter(devices))
