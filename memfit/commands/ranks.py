"""The options of ranks that are not there, and the step of one of them."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rich.text import Text

from memfit.commands import options
from memfit.commands.answer import Answer, columns_table
from memfit.commands.graph_with_costs import Costed
from memfit.errors import InvalidOptionError, NoPlanError
from memfit.options import Cluster, RanksOptions, require_options
from memfit.report.live import Run, play
from memfit.report.ranks import COLUMNS, RankFigures, rank_figures
from memfit.schedule import Schedule
from memfit.system.budget import format_bytes

if TYPE_CHECKING:
    from memfit.capture.training_step import TrainingStep
    from memfit.step.distributed.across import AbsentRanks


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """The options of a command that say between how many ranks a step runs, and how they share its model.

    >>> [cluster.shards for cluster in Ranks(ranks="8,64", shard=True, replicas=4).clusters()]
    [2, 16]
    """

    ranks: options.RanksText = None
    shard: options.Shard = False
    replicas: options.Replicas = 1
    link: options.LinkText = None

    def clusters(self) -> list[Cluster]:
        """Return the clusters that are asked for, none without --ranks.

        Raises:
            InvalidOptionError: numbers that cannot be read, or do not fit together.
        """
        if self.ranks is None:
            for option, is_given in (("shard", self.shard), ("replicas", self.replicas != 1), ("link", self.link)):
                if is_given:
                    raise InvalidOptionError(f"--{option} is for steps across ranks: give --ranks N as well")
            return []
        texts = [text.strip() for text in self.ranks.split(",")]
        if not all(text.isdecimal() and len(text) < 10 for text in texts) or len(set(texts)) < len(texts):
            raise InvalidOptionError(
                f"--ranks {self.ranks!r}: expected a whole number of ranks, or several with commas between, each once"
            )
        return [Cluster(ranks=int(text), shard=self.shard, replicas=self.replicas, link=self.link) for text in texts]


def clusters_from(given: RanksOptions) -> list[Cluster]:
    """Return the clusters that options in Python ask for, none without `ranks`.

    Raises:
        InvalidOptionError: an option that does not exist, or numbers that do not fit together.
    """
    require_options(given, RanksOptions, "memfit.frontier")
    ranks, shared = given.get("ranks"), {name: value for name, value in given.items() if name != "ranks"}
    if ranks is None:
        if shared:
            raise InvalidOptionError(f"{next(iter(shared))} is for steps across ranks: give ranks as well")
        return []
    counts = [ranks] if isinstance(ranks, int) else list(ranks)
    if not counts:
        raise InvalidOptionError("ranks is empty: expected a whole number of ranks, or several")
    return [Cluster(ranks=count, **shared) for count in counts]  # pyright: ignore[reportArgumentType]


@dataclass(frozen=True, slots=True)
class There:
    """Where a target is made: in this process alone, or on one of many ranks that are not there."""

    cluster: Cluster | None = None
    ranks: AbsentRanks | None = None

    def made(self, make: Callable[[], TrainingStep]) -> TrainingStep:
        """Return the step that a function makes."""
        return make() if self.ranks is None else self.ranks.step(make)

    def figures(self, costed: Costed, schedule: Schedule) -> RankFigures:
        """Return the figures of one rank's step, simulated.

        Args:
            costed: the step of that rank, and the device to simulate.
            schedule: legal on its graph.
        """
        return self.figures_of(play(costed.graph, schedule, costed.device), costed.step)

    def figures_of(self, run: Run, step: TrainingStep | None, *, has_seconds: bool = True) -> RankFigures:
        """Return the figures of a simulated schedule of one rank's step.

        Args:
            run: the schedule, played.
            step: None if only its graph is known.
            has_seconds: whether the graph has the seconds of its ops.
        """
        assert self.cluster is not None
        across = None if step is None else step.across
        shards = 1 if across is None else across.shards
        return rank_figures(self.cluster, run, shards=shards, has_seconds=has_seconds)


@contextmanager
def on_ranks(cluster: Cluster | None) -> Generator[There]:
    """Let this process be one of a cluster's ranks inside the block; without a cluster it stays alone."""
    if cluster is None:
        yield There()
        return
    from memfit.step.distributed.across import on_cluster  # imports torch

    with on_cluster(cluster) as ranks:
        yield There(cluster, ranks)


def one_of(clusters: Sequence[Cluster]) -> Cluster | None:
    """Return the only cluster that is asked for, or None."""
    return clusters[0] if clusters else None


def require_alone(given: Mapping[str, object]) -> None:
    """Refuse options that are about one plan, where several numbers of ranks give a table.

    Args:
        given: option -> its value; what is not given is false.

    Raises:
        InvalidOptionError: names the first one that is given.
    """
    for option, value in given.items():
        if value:
            raise InvalidOptionError(f"{option} is about one plan, and --ranks names several: give one number of ranks")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRow:
    """One number of ranks: the figures of one of them, or why there are none.

    Attributes:
        cluster: the ranks.
        device: the name of what the figures are for.
        figures: None where no plan fits.
        error: then the reason.
        more: further columns: title -> text, and what JSON has for it.
    """

    cluster: Cluster
    device: str
    figures: RankFigures | None
    error: NoPlanError | None = None
    more: Mapping[str, tuple[str, Any]] = field(default_factory=dict[str, tuple[str, Any]])

    def keys(self) -> dict[str, Any]:
        """The row as JSON."""
        keys: dict[str, Any] = {"ranks": self.cluster.ranks} if self.figures is None else self.figures.keys()
        if self.error is not None:
            keys["least_budget_bound_bytes"] = self.error.least_budget_bound_bytes
            keys["least_budget_found_bytes"] = self.error.least_budget_found_bytes
        return keys | {name: value for name, (_, value) in self.more.items()}

    def cells(self) -> tuple[str, ...]:
        """The row as texts."""
        if self.figures is None:
            assert self.error is not None
            least = format_bytes(self.error.least_budget_bound_bytes)
            return f"{self.cluster.ranks:,}", f"no plan; at least {least}", *("" for _ in COLUMNS[2:])
        return (*self.figures.cells(), *(text for text, _ in self.more.values()))


def ranks_answer(target: str, rows: Sequence[RankRow], head: str, exit_status: int) -> Answer:
    """Return the answer of a command for several numbers of ranks.

    Args:
        target: as the user wrote it.
        rows: one for each of them.
        head: the first line.
        exit_status: of the process.

    Raises:
        NoPlanError: there is a plan for none of them.
    """
    errors = [row.error for row in rows if row.error is not None]
    if errors and len(errors) == len(rows):
        raise errors[-1]
    titles = next((tuple(row.more) for row in rows if row.figures is not None), ())
    table = columns_table((*COLUMNS, *(title.replace("_", " ") for title in titles)), [row.cells() for row in rows])
    keys = {"rows": [row.keys() for row in rows]}
    return Answer(target=target, device=rows[0].device, keys=keys, parts=(Text(head), table), exit_status=exit_status)
