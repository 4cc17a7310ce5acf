"""The graph of a resolved target with the seconds and the workspace of each op, and the device they are for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from memfit.commands.work import Work
from memfit.cost.device_profiles import card_of_profile
from memfit.device import GENERIC, Device
from memfit.graph import Graph
from memfit.plan import Plan
from memfit.planning import Settings, make_plan
from memfit.system.budget import Card

if TYPE_CHECKING:
    from memfit.capture.build import Captured
    from memfit.capture.training_step import TrainingStep
    from memfit.cost.observations import Corrections


class Costed(NamedTuple):
    """A graph with the seconds and the workspace of each op.

    Attributes:
        graph: of the target.
        device: what the seconds are for.
        step: the target, if it is a training step.
        captured: its capture.
        forms: makes the graphs of an iterative function with its chains of ops run on some rows at a time.
    """

    graph: Graph
    device: Device
    step: TrainingStep | None = None
    captured: Captured | None = None
    forms: Callable[[], Iterable[Graph]] | None = None

    def plan(self, settings: Settings) -> Plan:
        """Return a plan of the graph, or of the form of a function that gives the fastest one.

        Args:
            settings: for `make_plan`.

        Raises:
            MemfitError: as `make_plan`.
        """
        if self.forms is None:
            return make_plan(self.graph, self.device, settings)
        from memfit.step.chunked import plan_of_function  # torch: a graph file needs none

        return plan_of_function(self.graph, self.forms, self.device, settings)

    def with_shares(self, settings: Settings) -> Settings:
        """Return the settings with percentages of the step as the user wrote it, checkpoints and all, or of the device.

        Args:
            settings: the budget, and how a plan is searched.
        """
        settings = settings.on_card(self._card)
        if self.step is None or self.captured is None or not self.captured.checkpoints:
            return settings
        from memfit.step.eager_peak import with_eager_peak

        is_here = bool(self.captured.observed)
        return with_eager_peak(settings, self.step, self.captured, self.device, is_here=is_here)

    def _card(self) -> Card:
        if self.captured is None or not self.captured.observed:
            return card_of_profile(self.device)
        from memfit.cost.calibration import card_of

        return card_of(self.captured.binding.device)


def graph_with_costs(
    resolved: TrainingStep | Graph,
    device_profile: str | None,
    work: Work,
    *,
    costs: bool = True,
    settings: Settings | None = None,
) -> Costed:
    """Return the graph of a target with the seconds and the workspace of each op, and the device that they are for.

    Args:
        resolved: a training step, which is captured and measured here; or a graph, which has its own seconds.
        device_profile: plan for this device instead of the one here; the seconds of a training step then come from a
            roofline. For a graph it gives only link rates and alignment.
        work: shows the stages.
        costs: whether a training step is measured; without, no op runs, and its seconds and workspaces are left out.
        settings: say whether and where storages may be offloaded.

    Raises:
        InvalidDeviceError: no such device profile.
        CaptureError, UnsupportedStepError: the step cannot be captured.
    """
    from memfit.cost.device_profiles import load_device

    profile = load_device(device_profile) if device_profile else None
    if isinstance(resolved, Graph):
        return Costed(resolved, profile or GENERIC)
    from memfit.capture import capture, finish, with_real_results  # torch: a graph file needs none
    from memfit.cost.calibration import linked_device

    def finished(corrections: Corrections) -> Captured:
        captured = capture(resolved, corrections=corrections)
        work.stage("measuring each op")
        return finish(captured, progress=work.done)

    work.stage("capturing the step")
    captured = with_real_results(finished) if costs and profile is None else capture(resolved)
    graph = _with_seconds(captured, profile) if costs else captured.graph
    host = (settings.host_budget_bytes, settings.host_dir) if settings else (0, None)
    device = profile or linked_device(captured.binding.device, *host)
    if costs and resolved.across is not None:
        from memfit.cost.links import Link, with_links

        graph = with_links(graph, resolved.across.ring_of, Link.parse(resolved.across.absent_link, device))
    forms = None if resolved.has_backward else partial(_forms, captured, work, profile)
    return Costed(graph, device, resolved, captured, forms)


def _forms(captured: Captured, work: Work, profile: Device | None) -> Iterator[Graph]:
    """Yield the graphs of a function's other forms, with seconds.

    Args:
        captured: the function.
        work: shows the stage.
        profile: gives the seconds; without one, the chains are measured here.
    """
    from memfit.capture import finish
    from memfit.step.chunked import in_chunks

    work.stage("cutting chains of ops into chunks of rows")
    for form in in_chunks(captured, is_run=profile is None):
        yield _with_seconds(finish(form) if profile is None else form, profile)


def _with_seconds(captured: Captured, profile: Device | None) -> Graph:
    """Return the graph of a capture with the seconds that ops took here, or those of a profile's roofline."""
    if profile is None:
        from memfit.cost.measurement import measure

        return measure(captured.graph, captured.binding, captured.observed)
    from memfit.cost.rooflines import roofline

    return roofline(captured.graph, captured.binding, profile)
