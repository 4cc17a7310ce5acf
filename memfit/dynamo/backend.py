"""The torch.compile backend: `torch.compile(model, backend="memfit", options={"budget": "6GiB"})`.

Each graph of Dynamo is planned at its concrete sizes when it first runs, within the bytes that the budget leaves beside
everything else on the device. After its first whole step it is planned once more: only then are the bytes known that
user code holds between the halves and beside the graph (the loss, the optimizer's state, other graphs' activations).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any, ClassVar, TypeVar

import torch
import torch.fx

from memfit.capture.numbers import numbers_read, with_numbers_as_tensors
from memfit.dynamo.account import Account
from memfit.dynamo.compiled_graph import CompiledGraph
from memfit.dynamo.gradient_sums import used_often, watch_sums
from memfit.dynamo.inputs import (
    Signatures,
    device_of,
    refuse_changing_hooks,
    refuse_foreign,
    refuse_other_hooks,
)
from memfit.dynamo.parts import Levels, Sharing, are_of_part, sharing_of
from memfit.dynamo.ready_order import in_order
from memfit.dynamo.settings import EAGER, GraphSettings, read_options
from memfit.errors import BY_CHECKPOINT, InvalidOptionError, MemfitError, NotOneGraphError, UnsupportedStepError
from memfit.memory.contract import Warnings
from memfit.plan import Plan
from memfit.step.turns import turn_on
from memfit.torch_private.ambient import put_back_after_an_error
from memfit.torch_private.aot import as_aot_takes_it, hand_over_absent
from memfit.torch_private.autocast import any_autocast, autocast_nesting
from memfit.torch_private.dynamo import ends_in_break, is_between_breaks, times_compiled
from memfit.torch_private.modules import hooks_on_all_modules
from memfit.torch_private.ranks import ddp_sorts_buckets
from memfit.torch_private.tensors import (
    DATA_DEPENDENT_ERRORS,
    failing_fakes_unlogged,
)

_log = logging.getLogger("memfit")
_Compiled = TypeVar("_Compiled", bound=CompiledGraph)
_MANY_TIMES = 64  # Dynamo takes eight for a sign of an integer that differs in each call, and goes on in eager
_MANY_SIZES = 12
_OF_SIZES = (
    "batches of {} sizes were traced and planned by now, each by itself, in {:.0f} s: pad batches to a few sizes, or "
    "let memfit.checkpoint hold the loop, whose plans serve all sizes within 15%, or memfit.fit, which carries plans on"
)
_BY_INDUCTOR = (
    "a block that was compiled with kernels='inductor' is called again in the same step, where each call would be "
    "planned and compiled by itself, and not all within one budget: compile the blocks with PyTorch's own backend "
    "(block.compile()), and let memfit.checkpoint(model, budget) hold them; or leave out kernels='inductor'"
)


def memfit_backend(
    module: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    options: dict[str, Any] | None = None,
    mode: str | None = None,
) -> PlannedGraph:
    """Plan the graphs of a compiled model within `options["budget"]`.

    Options:
        budget: bytes for everything on the device during the step: `"6GiB"`, or an integer. Required.
        host_budget, host_dir, planner, options, time_limit_seconds, seed, budget_is: as in `memfit.fit`.
        reserve: bytes that something else will take later: the optimizer state that the first step creates. By default
            the bytes of Adam's state, and a warning says so; 0 for plain SGD.
        kernels: `"eager"`, whose bits the step then has, or `"inductor"`, which generates code.

    Args:
        module: one graph of Dynamo's.
        example_inputs: not read; the sizes of the first call count.
        options: as above.
        mode: of `torch.compile`, which is Inductor's own; refused.

    Raises:
        InvalidOptionError, InvalidBudgetError: options that cannot be read.
        InfeasibleBudgetError, TimeLimitError: no plan was found for the bytes that the budget leaves.
        UnsupportedStepError: tensor parallelism; blocks with Inductor's kernels that do not fit as they are; backward
            with retain_graph=True, before anything is released; a forward pass that runs again before its backward,
            and a host budget that has no room for it.
    """
    # Options are read when the graph is first called: an error raised here would reach the user wrapped by Dynamo.
    del example_inputs
    if times_compiled() == _MANY_TIMES:
        _log.warning(
            "memfit: a function was compiled %d times by now, and each takes seconds and memory: an integer that "
            "it reads, such as a counter in an attribute, may differ in each call; make it a tensor or a float",
            _MANY_TIMES,
        )
    return PlannedGraph(module, lambda: _read(options or {}, mode))


def _read(options: dict[str, Any], mode: str | None) -> GraphSettings:
    if mode is not None:
        raise InvalidOptionError(
            f"torch.compile: mode={mode!r} is of PyTorch's own backend; memfit's takes "
            """options={"budget": ...}, with "kernels": "inductor" for generated code"""
        )
    return read_options(options)


def _parameters_in(inputs: Sequence[Any]) -> set[int | None]:
    return {id(each) for each in inputs if isinstance(each, torch.nn.Parameter)}


class PlannedGraph:
    """One graph of Dynamo's, with a compiled pair of halves for each tuple of concrete sizes.

    Args:
        module: the graph.
        read: returns the settings; called once, at the first call.
        account: measures the steps; None measures them from call to call of the graph, which sees what eager code
            beside it saves for backward.

    Attributes:
        calls: of the class: of all graphs so far.
        trained: of the class: parameters, by `id`, with which graphs were called where gradients are recorded; None for
            what was computed of some. None if all models are checked that were compiled with the backend.
        ends_in_break: whether the user's code goes on in eager after it, so that other graphs may follow.
        is_part: whether other code of the model comes before it, or after.
        warnings: of the graph, each given once.
        sharing: of the budget with other parts of a model; None if it is planned by itself.
        compiled: by what it depends on of its inputs.
    """

    calls: ClassVar[int] = 0
    trained: ClassVar[set[int | None] | None] = None

    def __init__(
        self, module: torch.fx.GraphModule, read: Callable[[], GraphSettings], account: Account | None = None
    ) -> None:
        self.ends_in_break = ends_in_break(module)
        self.module = with_numbers_as_tensors(as_aot_takes_it(module))
        self.is_part = is_between_breaks(module)
        self._may_be_part = account is None and not self.is_part
        self._is_alone = False  # is a part whose kernels are not planned with other parts
        self.sharing: Sharing | None = None
        self._levels: dict[Any, Levels] = {}
        self.compiled: dict[Any, CompiledGraph] = {}
        self.warnings = Warnings()
        self.awaiting = 0  # backward passes of calls so far
        self._planning_seconds = 0.0
        self._used_often = used_often(self.module)
        self._given_account = account
        self._device = torch.device("cpu")  # of the latest call
        self._read = read
        self._hooks, self._signatures = hooks_on_all_modules(), Signatures()

    def __call__(self, *inputs: Any) -> Any:
        PlannedGraph.calls += 1
        if PlannedGraph.trained is not None and torch.is_grad_enabled():
            PlannedGraph.trained |= _parameters_in(inputs)
        refuse_other_hooks(self._hooks)
        refuse_changing_hooks()
        device = device_of(inputs)
        with turn_on(device).of(self, "the forward pass of a graph that memfit's backend compiled"):
            self._device = device
            if self._given_account is None and torch.is_grad_enabled():
                self._look_whether_part(inputs)
                self.account.begin()
            return self._call(inputs)

    @cached_property
    def account(self) -> Account:
        """What measures the steps; unless it was given, it is made at the first call, on its device."""
        given = int(self.options.settings.budget), self._device, self.options.settings.budget_is
        return self._given_account or Account(*given)

    def _look_whether_part(self, inputs: Sequence[Any]) -> None:
        """See at the first call with gradients whether the graph is a part of a model, which shares the budget."""
        if self._may_be_part and are_of_part(inputs):
            self.is_part = True
            self._is_alone = self.options.kernels != EAGER
        if self._may_be_part and self.is_part and not self._is_alone:
            settings = self.options.settings
            self.sharing = sharing_of(int(settings.budget), self._device, settings.budget_is)
            self.account = self.sharing.account
        self._may_be_part = False

    def _call(self, inputs: tuple[Any, ...]) -> Any:
        key = (self._signatures.of(inputs), torch.is_grad_enabled(), autocast_nesting() > 0)
        compiled = self.compiled.get(key)
        if compiled is None:
            refuse_foreign(inputs, self.module)
        if self.sharing is not None and torch.is_grad_enabled():
            levels = self._levels.setdefault(key, Levels(self))
            compiled = self.compiled[key] = self.sharing.part(levels, inputs)
        elif compiled is None or compiled.should_plan_again():
            if self._is_alone and compiled is not None and compiled.share.is_repeated:
                raise UnsupportedStepError(_BY_INDUCTOR)
            began = time.monotonic()
            with self.account.compiling():
                compiled = self.compiled[key] = self.compile(partial(CompiledGraph, self, inputs, compiled))
            self._planning_seconds += time.monotonic() - began
            if len(self.compiled) == _MANY_SIZES:
                self.warnings.warn(_OF_SIZES.format(_MANY_SIZES, self._planning_seconds), "sizes", most=1)
        if compiled.plan is not None:
            if PlannedGraph.trained is not None and not _parameters_in(inputs):
                PlannedGraph.trained |= {None}
            self.awaiting += 1
        returned = self._run(compiled, inputs)
        for node in {leaf.grad_fn for leaf in returned if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None}:
            node.register_prehook(compiled.check_gradients)
            if self.options.kernels == EAGER:
                is_cast = self.awaiting > 1 and any_autocast() and torch.is_autocast_cache_enabled()
                watch_sums(node, inputs if is_cast else [inputs[at] for at in self._used_often], self.warnings)
            hand_over_absent(node)
        return returned

    def _run(self, compiled: CompiledGraph, inputs: Sequence[Any]) -> Any:
        """Run a compiled graph; one without a backward half has no plan, and is held to the budget by measurement."""
        if compiled.plan is None:
            return self.account.evaluate(lambda: compiled.function(*inputs))
        self.account.count(compiled.room_bytes, is_least=compiled.is_least)
        return compiled.function(*(in_order(inputs, compiled.ready) if ddp_sorts_buckets() else inputs))

    def compile(self, make: Callable[[], _Compiled]) -> _Compiled:
        """Return the compiled graph that `make` makes.

        Raises:
            NotOneGraphError: it depends on the value of a number or of a tensor, or PyTorch has no graph of its halves.
        """
        try:
            with put_back_after_an_error(), failing_fakes_unlogged():
                return make()
        except DATA_DEPENDENT_ERRORS as error:
            raise NotOneGraphError(
                "the model computes with a number that changes from call to call (or under dynamic=True might), such "
                "as an attribute or what `item` gave, other than by +, -, * and / with a tensor of floats: pass it as "
                "a tensor, or memfit.fit the step (it reads "
                f"{numbers_read(self.module) or 'a number from a tensor'})"
            ) from error
        except (MemfitError, torch.OutOfMemoryError, MemoryError):
            raise
        except Exception as error:
            text = " ".join(f"{type(error).__name__}: {error}".split())[:400]
            raise NotOneGraphError(
                f"PyTorch cannot make the two halves of a graph of the model ({text}): {BY_CHECKPOINT}"
            ) from error

    @cached_property
    def options(self) -> GraphSettings:
        """How the graph is planned."""
        return self._read()

    @property
    def plans(self) -> list[Plan]:
        """The plans in use, one for each tuple of sizes."""
        parts = [part for levels in self._levels.values() for part in levels.parts]
        compiled = [*parts, *(each for each in self.compiled.values() if each not in parts)]
        return [each.plan for each in compiled if each.plan is not None]
