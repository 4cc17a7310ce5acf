"""How the graphs of one compiled model are planned: what a user gives the backend as options."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from memfit.cost.calibration import card_of
from memfit.errors import InvalidOptionError
from memfit.graph import Graph
from memfit.memory.hard_cap import tell_of_card
from memfit.options import CompileOptions, require_options, settings_from
from memfit.papers.planners.mirror import read_mirrors
from memfit.planners.none import KeepEverything
from memfit.planners.registry import MIRROR_OPTION
from memfit.planning import Settings
from memfit.system.budget import is_share, on_card, parse_budget

_log = logging.getLogger("memfit")
EAGER, INDUCTOR = "eager", "inductor"
_KERNELS = (EAGER, INDUCTOR)


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphSettings:
    """How the graphs of one model are planned.

    Attributes:
        settings: with a budget in bytes.
        reserve_bytes: bytes that something else will take later; None stands for the state that optimizers make.
        kernels: whose kernels run.
        backward_autocast: whether `backward` is called inside forward's autocast.
    """

    settings: Settings
    reserve_bytes: int | None
    kernels: str = EAGER
    backward_autocast: bool = False


def read_options(
    options: Mapping[str, Any], where: str = "backend memfit", device: torch.device | None = None
) -> GraphSettings:
    """Return options as settings.

    Args:
        options: `budget`, and those of `CompileOptions`.
        where: begins the message of an error.
        device: whose memory `90% of the card` is a share of; None stands for the current CUDA device if there is one,
            else for the CPU.

    Raises:
        InvalidOptionError, InvalidBudgetError: options that cannot be read.
    """
    given = {name: value for name, value in options.items() if name != "budget"}
    require_options(given, CompileOptions, where)
    if "budget" not in options:
        raise InvalidOptionError(f'{where} needs a budget: options={{"budget": "6GiB"}}')
    budget = on_card(options["budget"], lambda: card_of(device))
    if is_share(budget):
        raise InvalidOptionError(
            f"budget {budget!r}: the peak is not known before loss and optimizer are; give bytes or '90% of the card', "
            "or use memfit.checkpoint or memfit.fit, which take a share of the peak"
        )
    settings = settings_from(parse_budget(budget, 0), given)
    if device is not None:
        tell_of_card(device, parse_budget(budget, 0), where)
    reserve = options.get("reserve")
    return GraphSettings(
        settings=settings,
        reserve_bytes=None if reserve is None else _size(reserve),
        kernels=read_kernels(options.get("kernels", EAGER)),
        backward_autocast=_yes_or_no(options, "backward_autocast"),
    )


def read_kernels(name: object) -> str:
    """Return the name of kernels, as the user gave it.

    Raises:
        InvalidOptionError: there are no such kernels.
    """
    if name not in _KERNELS:
        raise InvalidOptionError(f"kernels is {name!r}, expected one of {', '.join(map(repr, _KERNELS))}")
    return str(name)


def _yes_or_no(options: Mapping[str, Any], name: str) -> bool:
    value = options.get(name, False)
    if not isinstance(value, bool):
        raise InvalidOptionError(f"{name} is {value!r}, expected True or False")
    return value


def _size(given: str | int) -> int:
    return 0 if given in (0, "0") else parse_budget(given, 0)


def settings_of(options: GraphSettings, graph: Graph) -> Settings:
    """Return the settings for one graph of a model: mirror marks that name nothing in it are left out.

    A mark may belong to another graph of the same model, so that it is no error here, but a warning.

    Args:
        options: of the model.
        graph: one of its graphs.
    """
    settings = options.settings
    if MIRROR_OPTION not in settings.options:
        return settings
    marks = read_mirrors(settings.options[MIRROR_OPTION])
    here = tuple(mark for mark in marks if mark.marked(graph))
    for mark in marks:
        if mark not in here:
            _log.warning("memfit: the mirror mark %r names nothing in the %s", mark.where, graph.name)
    return replace(settings, options={**settings.options, MIRROR_OPTION: here})


def as_it_is(graph: Graph, bytes_outside: int) -> Settings:
    """Return settings by which a graph is left as it is: within all storages together, twice."""
    other_bytes = max((op.workspace_bytes or 0 for op in graph.ops), default=0) + bytes_outside
    budget_bytes = 2 * sum(storage.bytes for storage in graph.storages) + other_bytes
    return Settings(budget=budget_bytes, planner=KeepEverything.name)
