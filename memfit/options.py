"""Options: how plans are searched and steps are run, with one help text for each.

Doors take them as keyword arguments; the command line and the docs have their texts from here, and defaults are those
of `Settings`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypedDict, get_type_hints

from memfit.errors import InvalidBudgetError, InvalidOptionError
from memfit.plan import Progress
from memfit.planning import Settings
from memfit.system.budget import parse_host_budget, parse_rate
from memfit.system.lines import did_you_mean
from memfit.system.spill_file import parse_host_dir

NVLINK, INFINIBAND = "nvlink", "ib"
"""Links of `ClusterOptions`."""


class SearchOptions(TypedDict, total=False):
    """How plans are searched, and what they may use."""

    planner: Annotated[str, "one of `memfit planners`"]
    options: Annotated[Mapping[str, object] | None, "of the planner, and `mirror`: see `memfit.mirror`"]
    time_limit_seconds: Annotated[float, "how long each search of a plan may take"]
    seed: Annotated[int, "the same seed and the same limits give the same plan"]
    host_budget: Annotated[
        str | int,
        "the bytes that storages may be offloaded to, as text or an integer: host memory for a step on a GPU, which is "
        "pinned, so that no other program can use it meanwhile; a file for a step on a CPU. The default 0 offloads "
        "nothing. A given `plan` has a host budget of its own; it is refused if it needs more than this one",
    ]
    host_dir: Annotated[
        Path | str | None,
        "a directory on the disk that a CPU offloads to; by default the system's temporary one. The file has no name "
        "there, and disappears with the process",
    ]
    budget_is: Annotated[
        str,
        "`firm`: a step that took more than the budget is an error where three corrections of its plan have not "
        "helped, or no plan fits what it took; `soft`: it is a warning",
    ]


class FunctionOptions(SearchOptions, total=False):
    """Options of `memfit.fit_function`."""

    hard: Annotated[
        bool,
        "on a GPU, cap the process at the budget while a step runs, so that an allocation beyond it fails. Steps run "
        "first until two in a row keep the budget, and leave no trace",
    ]
    on_stage: Annotated[
        Callable[[str], None] | None, "called with the name of each stage when it begins; by default it is logged"
    ]
    progress: Annotated[
        Callable[[Progress], None] | None,
        "called by the planner while it searches; by default logged every ten seconds",
    ]


class FitOptions(FunctionOptions, total=False):
    """Options of `memfit.fit`."""

    arena: Annotated[
        bool | None,
        "serve the requests of each call from one block of memory, in which the plan gives each storage and each "
        "workspace its address before the step runs; see `memfit.arena`. None, the default, does so on CUDA where an "
        "arena is possible. Where it is not, torch's allocator gets expandable segments, unless its settings say "
        "otherwise, and the plan is made for the bytes that it then takes; `step.memory` says what serves the step, "
        "and why. True is refused where an arena is not possible",
    ]
    carry_over: Annotated[
        bool,
        "plan a batch of a new size from the plans of earlier sizes, where one fits; False searches a plan for each "
        "size. Only for planners that search",
    ]
    search_behind: Annotated[bool, "improve such plans on a thread while steps run, and run the better ones"]
    cuda_graph: Annotated[
        bool,
        "on a GPU, capture the step as a CUDA graph once its plan is proved, and replay it from then on: the host then "
        "launches one graph in place of each kernel. Refused in one line where a graph would not give the step's "
        "results (see 'CUDA graphs' in the docs on the arena). Before the graph is used, two replays are compared with "
        "two planned steps, bit by bit",
    ]


class CompileOptions(SearchOptions, total=False):
    """Options of `memfit.compile`, and beside `budget` of `torch.compile(backend="memfit")`; None is a default."""

    reserve: Annotated[
        str | int | None,
        "bytes that are allocated later: the state that the optimizer's first step makes, if no optimizer is given. By "
        "default that of the optimizers in the process that have the parameters; for others Adam's sizes are assumed, "
        "and a warning says so",
    ]
    kernels: Annotated[
        str, "`eager`: those that eager calls, to the bit; `inductor`: generated, as `torch.compile` does"
    ]
    backward_autocast: Annotated[
        bool,
        "whether the loop calls `backward` inside `torch.autocast`, which torch advises against; without it, such a "
        "backward is refused",
    ]


class ClusterOptions(TypedDict, total=False):
    """How ranks that are not there share a model, for `memfit.across`, `memfit.frontier` and the commands."""

    shard: Annotated[
        bool,
        "shard the model over the ranks, as `fully_shard` does: each repeated block, and the rest. Without it each "
        "rank has all of it, as with DistributedDataParallel, unless the step's own code shards it",
    ]
    replicas: Annotated[
        int, "divide the ranks into this many replicas of the model, each of which is sharded within itself (HSDP)"
    ]
    link: Annotated[
        str | None,
        "what joins the ranks: `nvlink`, nodes of 8 with a link of InfiniBand for each rank; `ib`, InfiniBand alone; "
        "or the rate that each rank sends at, such as `25GB/s`. By default `nvlink` where the device has it, else `ib`",
    ]


class RanksOptions(ClusterOptions, total=False):
    """The same, and how many ranks: for `memfit.frontier` and the commands."""

    ranks: Annotated[
        Sequence[int] | int | None,
        "plan the step of one of this many ranks, which need not exist, and allocate nothing for it; several "
        "numbers, such as 8,64, give a table. The batch is that of one rank",
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Ranks that train one model together, each on batches of its own.

        >>> Cluster(ranks=64, shard=True, replicas=4).shards
        16

    Args:
        ranks: in all.
        shard, replicas, link: see `ClusterOptions`.

    Raises:
        InvalidOptionError: numbers that do not fit together, or a link that cannot be read.
    """

    ranks: int
    shard: bool = False
    replicas: int = 1
    link: str | None = None

    def __post_init__(self) -> None:
        for name, number in (("ranks", self.ranks), ("replicas", self.replicas)):
            if not isinstance(number, int) or number < 1:  # pyright: ignore[reportUnnecessaryIsInstance]
                raise InvalidOptionError(f"{name} is {number!r}, expected a whole number from 1 on")
        if self.replicas > 1 and not self.shard:
            raise InvalidOptionError(
                f"replicas is {self.replicas}, but the model is not sharded, so that each of the {self.ranks} ranks "
                "has all of it: give shard (--shard) as well, or leave replicas out"
            )
        if self.ranks % self.replicas or self.ranks == self.replicas > 1:
            raise InvalidOptionError(
                f"replicas is {self.replicas}, expected a divisor of the {self.ranks} ranks that leaves at least 2 of "
                "them to each replica"
            )
        if self.link not in (None, NVLINK, INFINIBAND):
            try:
                parse_rate(str(self.link))
            except InvalidBudgetError as error:
                raise InvalidOptionError(
                    f"link is {self.link!r}, expected {NVLINK!r}, {INFINIBAND!r}, or a rate such as 25GB/s"
                ) from error

    @property
    def shards(self) -> int:
        """The ranks that a model is sharded over."""
        return self.ranks // self.replicas if self.shard else 1


def help_texts(record: type) -> dict[str, str]:
    """Return the help text of each option of a record, by its name.

    >>> help_texts(FitOptions)["planner"]
    'one of `memfit planners`'
    """
    hints = get_type_hints(record, include_extras=True)
    return {name: hint.__metadata__[0] for name, hint in hints.items()}


def require_options(given: Mapping[str, Any], record: type, where: str) -> None:
    """Raise InvalidOptionError if an option is given that a record does not have.

    Args:
        given: option -> value.
        record: one of this file.
        where: begins the message.
    """
    known = help_texts(record)
    for name in given:
        if name not in known:
            meant = did_you_mean(name, known)
            raise InvalidOptionError(f"{where}: option {name!r} does not exist{meant}; there are {', '.join(known)}")


def settings_from(budget: str | int, given: Mapping[str, Any]) -> Settings:
    """Return the settings that options of a record ask for; None is the default of each.

        >>> settings_from("6GiB", {"seed": 3, "host_budget": "1GiB"}).host_budget_bytes
        1073741824

    Args:
        budget: as text or in bytes.
        given: option -> value; those that say nothing of plans are left out.

    Raises:
        InvalidOptionError, InvalidBudgetError: a value that cannot be read.
    """
    chosen = {name: value for name, value in given.items() if value is not None and name in _OF_SETTINGS}
    return Settings(
        budget=budget,
        host_budget_bytes=parse_host_budget(given.get("host_budget")),
        host_dir=parse_host_dir(given.get("host_dir")),
        stops_on_interrupt=True,
        **chosen,
    )


_OF_SETTINGS = set(help_texts(FitOptions)) - {"host_budget", "host_dir"}
