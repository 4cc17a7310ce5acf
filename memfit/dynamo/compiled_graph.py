"""Compiled graph: a graph of Dynamo's at concrete sizes, planned, and lowered to a forward and a backward half."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.fx

from memfit.binding import Origin
from memfit.capture import with_real_results
from memfit.capture.corrected_fakes import corrected_fakes
from memfit.capture.eager_draws import with_eagers_draws
from memfit.capture.joint import JointCapture, capture_joint
from memfit.capture.placement import on_its_own
from memfit.capture.shared_casts import with_casts_shared
from memfit.cost.calibration import linked_device
from memfit.cost.observations import Corrections
from memfit.dynamo.inputs import (
    differ_in_strides,
    only_device_of,
    overlapping,
    refuse_casts_inside,
    refuse_other_autocast,
    refuse_retained_graph,
)
from memfit.dynamo.optimizers import have_state, state_to_come
from memfit.dynamo.outside import HEADROOM, Outside, of_whole_budget, planned_beside
from memfit.dynamo.ready_order import noting_order
from memfit.dynamo.settings import INDUCTOR, as_it_is, settings_of
from memfit.dynamo.share import Share
from memfit.dynamo.window import Mark, Marks, kept_by, storages_of
from memfit.errors import NoPlanError
from memfit.graph import Graph
from memfit.kernels.absent_gradients import beside_a_loss, leave_out
from memfit.kernels.halves import partitioned
from memfit.kernels.inductor import Compiled, Planning, compile_within
from memfit.memory.footprint import footprint
from memfit.plan import Plan
from memfit.planning import Settings, make_plan
from memfit.step.prepare import ANEW, AS_IT_IS, Prepared, prepare, with_costs
from memfit.step.turns import turn_on
from memfit.system.budget import format_bytes
from memfit.system.recorder import allocated_bytes
from memfit.torch_private.aot import boxed, trace_joint
from memfit.torch_private.autocast import any_autocast
from memfit.torch_private.tensors import (
    fake_mode_of,
    is_plain_dense,
    make_boxed_func,
    real_tensors,
    tensors_in,
)

if TYPE_CHECKING:
    from memfit.dynamo.backend import PlannedGraph

_Made = TypeVar("_Made")
_NUMBER_BYTES = 8  # an output of no more is the loss itself, from which user code computes nothing large
_WORTH_PLANNING_AGAIN = 0.01  # of the budget: a smaller change of the bytes outside is not worth a second search


class CompiledGraph:
    """A graph at concrete sizes: traced by AOTAutograd, planned, lowered to two halves.

    Args:
        graph: where it is from.
        inputs: of the graph, at these sizes.
        before: what was compiled for these sizes before, if anything.

    Attributes:
        is_least: whether no plan that was found takes less.
        share: of the budget, where other calls follow in the same step.
        is_late: whether it was planned between two calls of one step.
        ready: places of inputs, in the order in which eager has their gradients.
    """

    def __init__(self, graph: PlannedGraph, inputs: Sequence[Any], before: CompiledGraph | None) -> None:
        self.graph, self.before, self.asked_again = graph, before, False
        self.inputs = tensors_in(inputs)
        self.device = only_device_of(self.inputs)
        self.ready: list[int] = []
        self.prepared: Prepared | None = None
        self.plan: Plan | None = None
        self.room_bytes, self.is_least = 0, False  # the former: that the plan leaves of its budget
        self._leaves_out = before is not None and before._leaves_out  # gradients that no loss is likely to have
        self._least_bytes = 0  # of a plan, where the budget leaves less
        self._by_inductors: Compiled | None = None
        # Inductor's code that no plan divides
        self._unplanned: dict[float | None, Any] = {} if before is None or graph.awaiting else before._unplanned
        self.account = graph.account
        share = None if before is None else before.share
        share = share or Share(self.account, ends_in_break=graph.ends_in_break, is_part=graph.is_part)
        self.share, self.is_late = share, share.is_repeated
        self._host = self.account.host(graph.options.settings)
        self.budget_bytes = int(graph.options.settings.budget)
        self._headroom_bytes = int(HEADROOM * self.budget_bytes)
        self._bytes_at_start = self.account.live_bytes
        self.bytes_beside = max(0, self._bytes_at_start - sum(footprint(self.inputs, self.device).values()))
        self._parameters = frozenset(id(each) for each in self.inputs if isinstance(each, torch.nn.Parameter))
        self._own_bytes = self._bytes_at_start - self.bytes_beside
        self.bytes_reserved = self._reserved()
        self.bytes_exceeded = self._bytes_departing = 0  # the latter: of the graph's outputs
        self.outside = Outside(between_bytes=0, held_bytes=0)  # that the plan was made for
        self.outside_seen: Outside | None = None  # the most so far
        self._unshared_bytes = 0  # that the budget leaves
        self._is_outside_estimated = False
        self._marks = Marks()
        self._is_in_autocast = any_autocast()  # while AOTAutograd traces, it is off
        shared, own = overlapping(inputs), on_its_own
        examples = [own(each) if is_plain_dense(each) and n not in shared else each for n, each in enumerate(inputs)]
        self._written_by_others = {n for n, leaf in enumerate(inputs) if not isinstance(leaf, torch.nn.Parameter)}
        is_eager = graph.options.kernels != INDUCTOR
        module = noting_order(with_casts_shared(graph.module, inputs), self.ready) if is_eager else graph.module
        self.function = (self._by_eager if is_eager else self._by_inductor)(module, examples)
        self.inputs = []

    def _by_eager(self, module: torch.fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
        def traced(corrections: Corrections) -> Callable[..., Any]:
            with corrected_fakes(corrections):
                return trace_joint(
                    module,
                    examples,
                    partition=partial(self._partition, corrections),
                    forward_compiler=lambda _module, _inputs: boxed(
                        lambda given: self._run_half(self.halves.forward, given, False)
                    ),
                    backward_compiler=lambda _module, _inputs: boxed(
                        lambda given: self._run_half(self.halves.backward, given, True)
                    ),
                    inference_compiler=lambda module, _inputs: make_boxed_func(with_eagers_draws(module).forward),
                    backward_autocast=self.graph.options.backward_autocast,
                )

        return with_real_results(traced)

    def _by_inductor(self, module: torch.fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
        def plan(graph: Graph, budget_bytes: int | None) -> Plan:
            outside = self.outside.between_bytes if self.before is None else max(0, self.outside.held_bytes)
            settings = self.settings(graph).within(budget_bytes) if budget_bytes else as_it_is(graph, outside)
            linked = linked_device(self.device, settings.host_budget_bytes, settings.host_dir)
            return make_plan(graph, linked, settings, outside)

        planning = Planning(
            with_costs=lambda captured: with_costs(captured, self.graph.options.settings),
            left_bytes=self._left_bytes,
            between_bytes=lambda: self.outside.between_bytes,
            plan=plan,
            run=self._run_half,
            held_bytes=lambda: None if self.before is None else self.outside.held_bytes,
            headroom_bytes=self._headroom_bytes,
            decided=self._take_plan,
            host=self._host,
        )
        compiled = self._or_least(
            lambda: compile_within(module, examples, device=self.device, planning=planning, unplanned=self._unplanned)
        )
        if not isinstance(compiled, Compiled):
            return compiled
        self._take_plan(compiled)
        return compiled.function

    def _take_plan(self, compiled: Compiled) -> None:
        self.plan = compiled.plan
        self.room_bytes = max(compiled.left_bytes, self._unshared_bytes) - compiled.peak_bytes
        self._by_inductors = compiled

    def settings(self, graph: Graph) -> Settings:
        """Return how the graph is planned."""
        settings = settings_of(self.graph.options, graph)
        return replace(settings, host_budget_bytes=self._host.left_bytes)

    def should_plan_again(self) -> bool:
        """Return whether the plan has no room for what is outside of the graph now, as steps so far have shown it.

        Gradients that a micro-batch left, the optimizer's state, activations of other graphs. Once, after the first
        step, also whether much less is outside than was assumed.
        """
        is_repeated = self.share.is_repeated
        if self.plan is None or (self.outside_seen is None and not is_repeated) or not self.account.is_judging:
            return False
        account = self.account
        grown = self._grown_between() + account.live_bytes - self._bytes_at_start
        grown += account.optimizers.bytes_to_come() - self.bytes_reserved
        if account.excess_bytes != self.bytes_exceeded:
            return account.excess_bytes > self.bytes_exceeded or not self._is_unchanged
        if grown > self.room_bytes + self._headroom_bytes:
            return not (self.is_least and is_repeated)
        if self.asked_again or self._is_unchanged or is_repeated or not (self.before is None or self.is_late):
            return False
        self.asked_again = True
        is_small = self.is_late or self.share.is_too_small
        return is_small or -grown > _WORTH_PLANNING_AGAIN * self.budget_bytes

    @property
    def _is_unchanged(self) -> bool:
        """Whether no plan can be faster."""
        code = self._by_inductors
        return code.is_own if code is not None else self.plan is not None and self.plan.overhead <= 0

    def _grown_between(self) -> int:
        """Return by how much more the step takes than was planned for, with what was seen between the halves."""
        seen, code = self.outside_seen, self._by_inductors
        if seen is None or self.plan is None:
            return 0
        seen = self._with_outputs(seen)
        if code is None:
            return seen.peak_bytes(self.plan) - self.outside.peak_bytes(self.plan)
        return code.peak_with(seen.between_bytes, seen.held_bytes) - code.peak_bytes

    def _with_outputs(self, outside: Outside) -> Outside:
        """A loop that let the outputs go may keep them at any later step, so that these count in any case."""
        return replace(outside, held_bytes=max(outside.held_bytes, self._bytes_departing))

    def _partition(
        self,
        corrections: Corrections,
        joint: torch.fx.GraphModule,
        joint_inputs: Any,
        *,
        num_fwd_outputs: int,
        **_: Any,
    ) -> tuple[torch.fx.GraphModule, torch.fx.GraphModule]:
        refuse_casts_inside(joint, self.graph.module, self._is_in_autocast)
        with_eagers_draws(joint)
        mode = fake_mode_of(tensors_in(joint_inputs)[0])

        captured = partial(
            capture_joint,
            forward_outputs=num_fwd_outputs,
            name=f"graph of {len(joint_inputs[0])} inputs",
            device=self.device,
            corrections=corrections,
            written_by_others=self._written_by_others,
        )
        capture = None if self._leaves_out else self._planned(captured(joint), or_none=bool(beside_a_loss(joint)))
        if capture is None:
            self._leaves_out = True
            leave_out(joint, beside_a_loss(joint))
            capture = self._planned(captured(joint))
        assert self.prepared is not None and capture is not None
        residents = self.prepared.captured.binding.residents
        self._assumed = [resident.value for resident in residents if resident.origin is Origin.TANGENT]
        self.plan = self.prepared.plan
        self.room_bytes = max(self.plan.budget_bytes, self._unshared_bytes) - self.outside.peak_bytes(self.plan)
        self.halves = partitioned(capture, self.prepared.program, self.prepared.without, joint, mode)
        return self.halves.forward_module, self.halves.backward_module

    def _planned(self, capture: JointCapture, *, or_none: bool = False) -> JointCapture | None:
        """Plan a capture, and return it; None where no plan fits, if that is asked for."""
        with real_tensors(), suppress(NoPlanError) if or_none else nullcontext():
            self.prepared = self.prepare(capture)
            return capture
        return None

    def check_gradients(self, gradients: Sequence[Any]) -> None:
        """Check what a backward pass hands to the backward half, before anything is released.

        AOTAutograd copies a gradient of other strides than it had assumed, where eager's kernels see the strides.

        Args:
            gradients: of the graph's outputs; None for one that has none.

        Raises:
            UnsupportedStepError: the graph is to be retained, or autocast is on or off as it should not be.
        """
        refuse_retained_graph()
        if self.graph.options.kernels != INDUCTOR:
            refuse_other_autocast(self._is_in_autocast and self.graph.options.backward_autocast)
        if self.prepared is None:
            return
        given = [gradient for gradient in gradients if isinstance(gradient, torch.Tensor)]
        if len(given) == len(self._assumed) and any(map(differ_in_strides, given, self._assumed)):
            self.graph.warnings.warn(
                f"an output of the {self.prepared.captured.graph.name} gets a gradient of other strides than PyTorch's "
                "compiler assumed (from a loss of outputs.transpose(1, 2), or behind a graph break), and it is copied: "
                "kernels that choose by strides give other last bits than eager; memfit.checkpoint, memfit.eager and "
                "memfit.fit have eager's",
                "strides",
                most=1,
            )

    def prepare(self, capture: JointCapture) -> Prepared:
        """Plan within the bytes that the budget leaves beside the graph.

        Before the first step, the bytes that user code will hold between the halves are taken to be those of the
        graph's outputs.
        """
        graph, costs = capture.captured.graph, ANEW

        def within(left_bytes: int) -> Prepared:
            nonlocal capture, costs
            settings = self.settings(graph).within(left_bytes)
            prepared = prepare(
                capture.captured,
                settings,
                outputs=[capture.forward_outputs, capture.backward_outputs],
                bytes_outside=self.outside.beside(graph),
                planning=costs,
                store=self._host,
            )
            capture, costs = replace(capture, captured=prepared.captured), AS_IT_IS
            return prepared

        def within_left() -> Prepared:
            left_bytes = self._left_bytes(graph)
            return planned_beside(within, self.outside, left_bytes, is_least=self.is_least)

        return self._or_least(within_left)

    def _or_least(self, make: Callable[[], _Made]) -> _Made:
        """Return what `make` plans within the bytes that are left; where none fits, by the plan that takes the least.

        That is for where less may do: what is set aside was estimated, or calls of the same step have yet to give up
        their share. Whether it keeps the budget, the step shows.

        Raises:
            NoPlanError: it cannot keep the budget.
        """
        try:
            return make()
        except NoPlanError as error:
            found_bytes, left_bytes = error.least_budget_found_bytes, self._unshared_bytes + self.bytes_exceeded
            may_fit = self.account.losses.are_awaited or self._is_outside_estimated
            if found_bytes is None or (found_bytes > left_bytes and not may_fit):
                whole = self.budget_bytes, self.bytes_beside, self.bytes_reserved, self.bytes_exceeded
                assumed_bytes = self.outside.between_bytes if self.before is None else 0
                given: Any = {"is_alone": not self.share.is_of_several, "assumed_bytes": assumed_bytes}
                raise of_whole_budget(error, *whole, self.account.unused_share, **given) from error
            self._least_bytes, self.is_least = found_bytes, True
            return make()

    def _left_bytes(self, graph: Graph) -> int:
        """Return the bytes that the budget leaves for a graph, 1 or more, having counted what is outside of it."""
        departing = (graph.storages[storage].bytes for each in graph.boundaries for storage in each.departures)
        self._bytes_departing = sum(size for size in departing if size > _NUMBER_BYTES)
        seen = None if self.before is None else self.before.outside_seen  # the most so far
        estimated = self.account.outside.estimated(self._parameters, self._bytes_departing) if seen is None else None
        self._is_outside_estimated = estimated is not None or self._leaves_out
        copies = 0 if self._leaves_out else 1 if self.graph.options.kernels == INDUCTOR else 2
        assumed = Outside(between_bytes=copies * self._bytes_departing, held_bytes=copies * self._bytes_departing)
        self.outside = self._with_outputs(seen or estimated or assumed)
        self.bytes_exceeded = self.account.excess_bytes
        taken = self.bytes_beside + self.bytes_reserved + self.bytes_exceeded + self._headroom_bytes
        self._unshared_bytes = max(1, self.budget_bytes - taken)
        return max(self._least_bytes, self.share.of(self._unshared_bytes, self._own_bytes))

    def _reserved(self) -> int:
        """Return the bytes that something else will take later; unless told, 0 after a step, which has shown them."""
        if self.account.optimizers.followed:
            return self.account.optimizers.bytes_to_come()
        if self.before is not None:
            return 0
        trained = [t for t in self.inputs if isinstance(t, torch.nn.Parameter) and t.requires_grad]
        told = self.graph.options.reserve_bytes
        if told is not None:
            return min(told, state_to_come(trained, self.device)[0]) if have_state(trained) else told
        reserved, assumed = state_to_come(trained, self.device)
        if assumed:
            self.graph.warnings.warn(
                f"{format_bytes(assumed)} of the budget is set aside for the optimizer state of the first step, as "
                'Adam would take; options={"reserve": 0} if your optimizer has none',
                "reserve",
                most=1,
            )
        return reserved

    def _run_half(self, half: Callable[[list[Any]], list[Any]], arguments: list[Any], is_backward: bool) -> list[Any]:
        account = self.account
        if is_backward:
            self.graph.awaiting -= 1
            with turn_on(self.device).of(self, "the backward pass of a graph that memfit's backend compiled"):
                self._end_loss()
                with account.running(is_least=self.is_least):
                    return half(arguments)
        given = storages_of(arguments)
        with account.running(is_least=self.is_least):
            returned = half(arguments)
        self.share.end_forward()
        self._marks.add(account.begin_loss(kept_by(returned, given)))
        return returned

    def _end_loss(self) -> None:
        """Count what user code holds outside of the graph, before the backward half begins."""
        mark = self._marks.take() or Mark(after_forward_bytes=allocated_bytes(self.device))
        held = allocated_bytes(self.device) - mark.after_forward_bytes
        self.account.losses.end(mark)
        between = max(held, mark.most_bytes - mark.after_forward_bytes if mark.is_last else 0)
        seen, known = self.outside_seen, self.outside if self.outside_seen is None else self.outside_seen
        self.account.expect_end(max(0, between - known.between_bytes))
        self.outside_seen = Outside(
            between_bytes=max(between, 0 if seen is None else seen.between_bytes),
            held_bytes=held if seen is None else max(held, seen.held_bytes),
        )
        self.share.begin_backward()
        self.account.outside.note(self._parameters, self._bytes_departing, self.outside_seen)
