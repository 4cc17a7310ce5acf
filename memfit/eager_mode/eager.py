"""`memfit.eager`: a budget of bytes around an unchanged training loop."""

from __future__ import annotations

import gc
import threading
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from memfit.capture.placement import step_device
from memfit.capture.step_check import require_module
from memfit.capture.under_modes import gradients_that_differ
from memfit.chunked_loss.heads import ChunkedHead
from memfit.cost.calibration import card_of
from memfit.eager_mode.contents import Contents
from memfit.eager_mode.mode import BudgetMode
from memfit.eager_mode.needs import Needs
from memfit.eager_mode.passes import Ran, Way
from memfit.errors import BY_CHECKPOINT, InvalidBudgetError, InvalidOptionError, UnsupportedStepError
from memfit.memory.footprint import footprint
from memfit.memory.hard_cap import tell_of_card
from memfit.memory.host.room import Host
from memfit.memory.uncounted import Uncounted
from memfit.step.divided_updates import DividedUpdates
from memfit.step.hooks import Hook, remove_all
from memfit.step.turns import turn_on
from memfit.step.uncopied import Uncopied
from memfit.system.budget import format_bytes, is_share, on_card, parse_budget, parse_host_budget
from memfit.system.cpu_limit import CpuLimit
from memfit.system.recorder import Record, allocated_bytes, record
from memfit.system.spill_file import parse_host_dir, require_host_budget
from memfit.torch_private.autograd import changing_hooks
from memfit.torch_private.cuda import prepare_allocator
from memfit.torch_private.sharding import (
    is_sharded,
    modules_that_gather,
    parameters_that_are_gathered,
    restored_by_copies,
)
from memfit.torch_private.tensors import tensors_reached


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What eager mode did so far.

    Attributes:
        budget_bytes, peak_bytes: allowed, and the most that was live at once.
        passes: backward passes.
        calm, by_policy: of the passes, those in which memory was plentiful and nothing was noted, and those in which it
            was decided call by call what had to go.
        calls: of operators that the mode has seen, views not counted: on a CPU it is off in most backward passes and
            updates.
        let_go, made_again: how often contents were freed, and how many calls were recomputed.
        to_host_bytes, to_device_bytes: copied to the host, and back.
        again_seconds: for calls that were recomputed, and copies to the host and back.
        freed_within_bytes: freed while a call ran, before it took memory that did not fit; 0 on a GPU.
        bounded, exceeded: first calls of their kind, whose needs were bounded from above, and how many took more; 0 on
            a CPU, where the allocator asks for room.
    """

    budget_bytes: int
    peak_bytes: int
    passes: int
    calls: int
    let_go: int
    made_again: int
    to_host_bytes: int
    to_device_bytes: int
    again_seconds: float
    freed_within_bytes: int
    bounded: int
    exceeded: int
    calm: Ran
    by_policy: Ran

    def __str__(self) -> str:
        ways = {"calm": self.calm, "by policy": self.by_policy}
        how = ", ".join(f"{ran.passes:,} {way} (+{ran.overhead:.1%})" for way, ran in ways.items() if ran.passes)
        copied = (
            f", {format_bytes(self.to_host_bytes)} copied to the host and {format_bytes(self.to_device_bytes)} back,"
            if self.to_host_bytes
            else ""
        )
        bounded = (
            f"; {self.bounded:,} calls were bounded before they were known, {self.exceeded:,} of them too low"
            if self.bounded
            else ""
        )
        return (
            f"{self.passes:,} passes: {how}; peak {format_bytes(self.peak_bytes)} of "
            f"{format_bytes(self.budget_bytes)}; {self.made_again:,} of {self.calls:,} calls recomputed{copied} in "
            f"{self.again_seconds:.3f} s; {format_bytes(self.freed_within_bytes)} freed while calls ran{bounded}"
        )


class Eager(Uncopied):
    """The `with` block of `eager`."""

    def __init__(
        self,
        model: torch.nn.Module,
        budget_bytes: int,
        host_budget_bytes: int,
        host_dir: Path | None,
        head: ChunkedHead | None,
    ) -> None:
        self.device, self.budget_bytes, self._model = step_device(model, ()), budget_bytes, model
        self._host_budget_bytes, self._host_dir = host_budget_bytes, host_dir
        self._mode: BudgetMode | None = None
        self._ended: Report | None = None
        self._window: Record | None = None
        self._limit: CpuLimit | None = None
        self._head, self._hooks = head, list[Any]()

    def __enter__(self) -> Eager:
        if self._window is not None:
            raise InvalidOptionError("the block was entered before; call memfit.eager again")
        if hook := changing_hooks():
            raise UnsupportedStepError(
                f"memfit.eager's block was entered inside hooks of saved tensors ({hook}), which may change what "
                "backward reads, and which its own take the place of: enter them inside of the block"
            )
        self._thread = threading.current_thread()
        with ExitStack() as entered:
            entered.enter_context(turn_on(self.device).of(self, "memfit.eager's block"))
            self._begin()
            self._turn = entered.pop_all()
        return self

    def _begin(self) -> None:
        gradients_that_differ()  # which is found out outside of any mode
        host = Host(self.device, self._host_budget_bytes, self._host_dir) if self._host_budget_bytes else None
        may_grow = prepare_allocator(self.device)
        gc.collect()
        before_bytes = bytes_of_tensors(self.device)
        offset_bytes = before_bytes - allocated_bytes(self.device)
        self._freezes = gc.get_freeze_count() == 0
        if self._freezes:  # or what is remembered of calls would have all older objects looked through again and again
            gc.freeze()
        self._above_bytes, self._most_bytes = 0, 0
        self._before_bytes = before_bytes
        self._window = record(self.device).begin()
        needs = Needs(self.device)
        live_bytes = partial(_live, self.device, offset_bytes)
        model_bytes = partial(_model_bytes, self._model, self.device)
        gathering = modules_that_gather(self._model)
        may_be_off = self.device.type == "cpu" and not gathering  # whose hooks write to parameters in backward
        self._mode = BudgetMode(
            self.budget_bytes,
            live_bytes,
            model_bytes,
            needs,
            host,
            may_grow=may_grow,
            model=self._model if may_be_off else None,
            restores=restored_by_copies(self._model),
        )
        self._mode.__enter__()
        self._hooks = [] if self._head is None else self._head.hooked(Hook)
        self._hooks.append(DividedUpdates(self.device, lambda: self.budget_bytes - live_bytes()))
        contents = self._mode.contents
        for module in gathering:  # which let go of their parameters after each pass
            self._hooks.append(module.register_forward_hook(Hook(partial(_keep_results, contents))))
        if self.device.type == "cuda":
            self._hooks.append(self._model.register_forward_pre_hook(Hook(self._mode.follow_stream)))
        else:
            self._limit = CpuLimit(contents.budget_bytes - offset_bytes, contents.make_room_within)
            self._limit.__enter__()

    def _end_record(self) -> None:
        """Add the figures of the open record; both counts are in bytes above those on the device before the block."""
        assert self._window is not None
        usage = self._window.close()
        self._most_bytes = max(self._most_bytes, self._above_bytes + usage.peak_bytes)
        self._above_bytes += usage.end_bytes - usage.start_bytes

    def __exit__(self, *raised: Any) -> None:
        assert self._mode is not None
        if threading.current_thread() is not self._thread:
            raise UnsupportedStepError(
                f"memfit.eager's block is left in thread {threading.current_thread().name!r}, and was entered in "
                f"thread {self._thread.name!r}, where it is still on: leave it there"
            )
        if self._limit is not None:
            self._limit.__exit__(*raised)
            self._limit = None  # which refers to what autograd still holds
        remove_all(self._hooks)
        try:
            self._mode.__exit__(*raised)  # refuses what was called last, if no later call could
        finally:
            self._turn.close()
            if self._freezes:
                gc.unfreeze()
            self._end_record()
            refusal = self._mode.contents.refusal
            self._ended, self._mode = self._report(), None  # what autograd still holds has the mode that it needs
        if refusal is not None and isinstance(raised[1], torch.OutOfMemoryError):
            raise refusal from None

    def report(self) -> Report:
        """Return what was done so far. In another thread than the block's, the peak is that of the last report."""
        if self._ended is not None:
            return self._ended
        if self._mode is None:
            raise InvalidOptionError("nothing has run yet; enter the block first")
        if threading.current_thread() is self._thread:  # whose bytes are counted
            self._end_record()
            self._window = record(self.device).begin()
        return self._report()

    def _report(self) -> Report:
        assert self._mode is not None
        contents, needs, passes = self._mode.contents, self._mode.needs, self._mode.passes
        releasing = contents.releasing
        ran = passes.with_present() if self._mode.is_in_pass else passes.ran
        return Report(
            budget_bytes=self.budget_bytes,
            peak_bytes=self._before_bytes + self._most_bytes,
            passes=sum(each.passes for each in ran.values()),
            calls=contents.calls,
            let_go=releasing.freed,
            made_again=contents.made_again,
            to_host_bytes=releasing.to_host_bytes,
            to_device_bytes=releasing.to_device_bytes,
            again_seconds=passes.again_seconds,
            freed_within_bytes=contents.freed_within_bytes,
            bounded=needs.bounded,
            exceeded=needs.exceeded,
            calm=ran[Way.CALM],
            by_policy=ran[Way.POLICY],
        )


def eager(
    model: torch.nn.Module,
    *,
    budget: str | int,
    host_budget: str | int = 0,
    host_dir: Path | str | None = None,
    chunk_loss: bool | str = False,
) -> Eager:
    """Keep a training loop within a budget, without changing it: `with memfit.eager(model, budget="6GiB") as steps:`.

        >>> import torch, memfit
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.ReLU(), torch.nn.Linear(64, 2))
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> with memfit.eager(model, budget="1MiB") as steps:
        ...     for _ in range(3):
        ...         model(torch.randn(32, 8)).sum().backward()
        ...         optimizer.step()
        ...         optimizer.zero_grad()
        >>> steps.report().passes
        3

    Inside the block, what autograd saves is freed when the next call would not fit, and recomputed where backward
    reads it, with the same bits. With a host budget it is copied to the host and back instead, where that takes less
    time. Any Python may run between the calls. What code itself holds (a variable, a list of hidden states) is never
    freed, so that whatever reads it finds it. The block is for the thread that enters it: what other threads call is
    not seen.

    Args:
        model: that is trained; its device is the one that has the budget.
        budget: the bytes that all tensors on the device may take together, as text (`6GiB`, `90% of the card`) or as an
            integer.
        host_budget: the bytes that copies on the host may take together, as text or as an integer: pinned host memory
            for a model on a GPU, a file without a name for one on a CPU, taken when the block is entered. With 0, the
            default, nothing is copied.
        host_dir: a directory on the disk that has that file; by default the system's temporary one.
        chunk_loss: compute the logits of the model's head, and what the loss makes of them, some rows at a time, so
            that they are never whole: True finds the head, or name it. Last bits differ.

    Raises:
        InvalidTargetError: no module.
        InvalidBudgetError: no positive size; a percentage has no meaning here.
        InvalidOptionError: `host_dir` is no path, or is given without a host budget.
        HostMemoryError: at the block's entry, where the host or the disk has no room for the host budget; in the
            block, where a copy fails.
        OverBudgetError: in the block, where a call does not fit and nothing is left to free.
        UnsupportedStepError: a model under tensor parallelism; at the block's entry, where another thread runs a
            planned step, or is in a block, on the device, or inside hooks of saved tensors that may change values; in
            the block, where another thread runs backward of what the block saved.
    """
    require_module(model, "memfit.eager")
    if is_share(budget):
        raise InvalidBudgetError(
            f"budget {budget!r} is a share of a step's peak, and eager mode knows no step before it runs: give bytes, "
            "or '90% of the card'"
        )
    device = step_device(model, ())
    budget = on_card(budget, lambda: card_of(device))
    tell_of_card(device, parse_budget(budget, 0), "memfit.eager")
    host_budget_bytes, directory = parse_host_budget(host_budget), parse_host_dir(host_dir)
    require_host_budget(directory, host_budget_bytes)
    _refuse_divided(model)
    head = ChunkedHead(model, chunk_loss) if chunk_loss else None
    return Eager(model, parse_budget(budget, 0), host_budget_bytes, directory, head)


def _keep_results(contents: Contents, _module: torch.nn.Module, _args: Any, output: Any) -> None:
    contents.keep(tensors_reached(output))


def _refuse_divided(model: torch.nn.Module) -> None:
    """Refuse tensor parallelism, whose operators on DTensors show no storage that could be freed."""
    gathered = parameters_that_are_gathered(model)
    for name, parameter in model.named_parameters():
        if is_sharded(parameter) and parameter not in gathered:
            raise UnsupportedStepError(
                f"memfit.eager: parameter {name!r} is a DTensor (tensor parallelism), whose operators cannot be "
                f"recomputed here: {BY_CHECKPOINT}"
            )


def bytes_of_tensors(device: torch.device) -> int:
    """Return the bytes that are live on a device, those of tensors that Python does not see included."""
    return Uncounted(device).live_bytes() + allocated_bytes(device)


def _model_bytes(model: torch.nn.Module, device: torch.device) -> int:
    """Return the bytes of parameters, buffers and gradients, those without a storage of their own left out."""
    given = [*model.parameters(), *model.buffers(), *(p.grad for p in model.parameters() if p.grad is not None)]
    return sum(footprint([tensor for tensor in given if not is_lazy(tensor)], device).values())


def _live(device: torch.device, offset_bytes: int) -> int:
    return offset_bytes + allocated_bytes(device)
