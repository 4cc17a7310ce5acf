"""Planner `dqn`: a deep Q-network learns, over the simulator, which storages to offload and which to recompute.

The graph of rows, the rule of copies, the environment, the network and its training have files of their own beside this
one. Each states what was decided where the paper is silent. torch is imported when the planner runs.
"""

from __future__ import annotations

import importlib.util
import math
import random
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from memfit.errors import InvalidOptionError
from memfit.papers.dqn.environment import Environment, Outcome
from memfit.papers.options import refuse
from memfit.plan import Problem, Progress, Result
from memfit.planners.engine.bounds.bounds import Proofs, least_budget_bound
from memfit.planners.engine.results import Ending, make_result

if TYPE_CHECKING:
    from memfit.papers.dqn.training import Agent

_REPORT_SECONDS = 1.0  # between two reports of progress within a long episode


@dataclass(frozen=True, slots=True, kw_only=True)
class DqnPlanner:
    """Offload storages and recompute others as a deep Q-network chooses, trained on this step by a simulator.

    Each episode makes a plan; the answer is the fastest that fits, not that of the last episode. The first actions are
    random (Algorithm 1, line 7), so that the first plan that fits is a random one. Anytime; deterministic for a seed if
    `episodes` is given, which then replaces the time limit. Not guaranteed: that a plan is found where there is one.

    As long as no plan fits, the limit of an episode is not the budget: after an episode that fails, it is halfway from
    the last limit to the last one that was reached (at first the unplanned peak), after one that succeeds halfway to
    the budget, or to the proved least if the budget is below it. This also gives the leanest plan. With `draw_budgets`
    each episode has a limit of its own, drawn evenly between the budget and the unplanned peak.

    A step that fits unplanned is not planned, and nothing is learned from it. Without a host budget, or on a device
    without a link, storages are only recomputed. Training ends early if a plan takes no longer than the unplanned step.

    Source: "GPU memory management for deep neural networks using deep Q-network" (2020), section 4.
    """

    name: ClassVar[str] = "dqn"
    source: ClassVar[str] = "GPU memory management using deep Q-network 2020, section 4"

    episodes: int | None = field(
        default=None, metadata={"help": "episodes l in all, in place of the time limit: the same plan for a seed"}
    )
    hidden: int = field(default=32, metadata={"help": "p, the length of a node's state; a network from a file has its"})
    learning_rate: float = field(default=1e-3, metadata={"help": "of the steps of gradient descent"})
    gamma: float = field(default=0.9, metadata={"help": "decay of later rewards, from 0 to 1"})
    batch: int = field(default=8, metadata={"help": "transitions in each step of gradient descent"})
    replay: int = field(default=10_000, metadata={"help": "transitions that are remembered, the latest ones"})
    threads: int = field(
        default=1, metadata={"help": "of torch while it trains; they are part of what a seed determines"}
    )
    draw_budgets: bool = field(
        default=False, metadata={"help": "train for all budgets from this one up to the unplanned peak, one an episode"}
    )
    start_from: str = field(
        default="", metadata={"help": "FILE.safetensors of a trained network, perhaps of another graph"}
    )
    save_to: str = field(default="", metadata={"help": "FILE.safetensors to write the trained network to"})

    def __post_init__(self) -> None:
        for option in ("episodes", "hidden", "batch", "replay", "threads"):
            value = getattr(self, option)
            if value is not None and value < 1:
                refuse(self, option, "a whole number of 1 or more")
        if not (math.isfinite(self.learning_rate) and self.learning_rate > 0):
            refuse(self, "learning_rate", "a number above 0")
        if not 0 <= self.gamma <= 1:
            refuse(self, "gamma", "a number from 0 to 1")
        if self.uses_files and importlib.util.find_spec("safetensors") is None:
            raise InvalidOptionError(
                f"planner {self.name!r}: options start_from and save_to need the package safetensors; install it "
                f"(pip install 'memfit[dqn]'), or leave them out"
            )
        if self.start_from and not Path(self.start_from).is_file():
            refuse(self, "start_from", "a file that save_to wrote")
        if self.save_to and (Path(self.save_to).is_dir() or not Path(self.save_to).parent.is_dir()):
            refuse(self, "save_to", "a file in a folder that exists")

    @property
    def uses_files(self) -> bool:
        """Whether it reads or writes files, so that a kept plan does not replace it."""
        return bool(self.start_from or self.save_to)

    def plan(self, problem: Problem) -> Result:
        """Return the fastest plan of all episodes, or that of the least peak as the leanest.

        Args:
            problem: what to plan.

        Raises:
            InvalidOptionError: a pin that cannot be honoured.
            InvalidFileError: `start_from` holds no such network, or `save_to` cannot be written.
        """
        return _Training(self, problem).result()


class _Training:
    """One planning: the episodes so far, and the best of all schedules."""

    def __init__(self, options: DqnPlanner, problem: Problem) -> None:
        self.options, self.problem = options, problem
        self.started_seconds = self.reported_seconds = problem.clock()
        self.least_budget = least_budget_bound(problem)
        self.is_hopeless = problem.budget_bytes < self.least_budget[0]
        aim_bytes = max(problem.budget_bytes, self.least_budget[0])
        self.environment = Environment(replace(problem, budget_bytes=aim_bytes))
        self.best: Outcome | None = self.environment.outcome if self.environment.fits else None
        self.leanest = self.environment.outcome
        self.best_reward: float | None = None
        self.episode = self.steps = 0
        self.limit_bytes, self.reached_bytes = aim_bytes, self.environment.unplanned.peak_bytes
        self.random = random.Random(problem.seed)

    def result(self) -> Result:
        interrupted = False
        try:
            self._train()
        except KeyboardInterrupt:  # the best plan so far is returned, as interrupted
            interrupted = True
        ending = Ending(
            planner=DqnPlanner.name,
            started_seconds=self.started_seconds,
            schedule=(self.best or self.leanest).schedule,
            least_found_bytes=self.leanest.peak_bytes,
            tried_all=not self.environment.has_actions,
            interrupted=interrupted,
            proofs=Proofs(least_budget=self.least_budget),
            stats={"episodes": float(self.episode), "steps": float(self.steps)},
        )
        return make_result(self.problem, ending)

    def _train(self) -> None:
        """Run episodes until they, or the time, are used up; save the network in any case."""
        if not self.options.uses_files and self._is_over():
            return
        agent = self._agent()
        import torch

        threads = torch.get_num_threads()
        torch.set_num_threads(self.options.threads)
        try:
            self._report()
            while not self._is_over():
                self.episode += 1
                share = self._share()
                if self.options.draw_budgets:
                    peak_bytes = self.environment.unplanned.peak_bytes
                    self.limit_bytes = self.random.randrange(self.environment.problem.budget_bytes, peak_bytes)
                reward = agent.episode(share, self._on_step, self.limit_bytes)
                self._end_episode(reward)
                self._report()
        finally:
            torch.set_num_threads(threads)
            if self.options.save_to:
                agent.network.save(Path(self.options.save_to))

    def _end_episode(self, reward: float) -> None:
        """Remember the best reward of an episode within the budget, and set the limit of the next one."""
        fits, aim_bytes = self.environment.fits, self.environment.problem.budget_bytes
        if fits and (self.limit_bytes == aim_bytes or self.options.draw_budgets):
            self.best_reward = max(reward, -math.inf if self.best_reward is None else self.best_reward)
        if self.best is not None:
            self.limit_bytes = aim_bytes
        elif fits:
            self.reached_bytes, self.limit_bytes = self.limit_bytes, (aim_bytes + self.limit_bytes) // 2
        else:
            self.limit_bytes = (self.limit_bytes + self.reached_bytes) // 2

    def _agent(self) -> Agent:
        from memfit.papers.dqn.network import Network, RowTensors
        from memfit.papers.dqn.training import Agent, Learning

        options, environment, seed = self.options, self.environment, self.problem.seed
        rows = RowTensors.of(environment.rows, environment.actions)
        network = Network(options.hidden, rows, seed)
        if options.start_from:
            network.load(Path(options.start_from))
        learning = Learning(
            learning_rate=options.learning_rate, gamma=options.gamma, batch=options.batch, replay=options.replay
        )
        return Agent(environment, network, learning, seed)

    def _on_step(self) -> bool:
        """Remember the schedule of the decisions so far; return whether time is left."""
        self.steps += 1
        environment, outcome = self.environment, self.environment.outcome
        if outcome.host_peak_bytes <= self.problem.host_budget_bytes:
            if outcome.peak_bytes < self.leanest.peak_bytes:
                self.leanest = outcome
            fits = outcome.peak_bytes <= environment.problem.budget_bytes
            if fits and (self.best is None or outcome.seconds < self.best.seconds):
                self.best = outcome
                self._report()
        if self.problem.clock() - self.reported_seconds >= _REPORT_SECONDS:
            self._report()
        return self.options.episodes is not None or self._share() < 1.0

    def _is_over(self) -> bool:
        environment = self.environment
        if not environment.has_actions or self.episode >= (self.options.episodes or math.inf):
            return True
        if self.best is not None and self.best.seconds <= environment.unplanned.seconds:
            return True
        return self.options.episodes is None and self._share() >= 1.0

    def _share(self) -> float:
        """The share of the episodes, or of the time limit, that is used up."""
        if self.options.episodes is not None:
            return self.episode / self.options.episodes
        elapsed_seconds = self.problem.clock() - self.started_seconds
        return elapsed_seconds / max(self.problem.time_limit_seconds, 1e-9)

    def _report(self) -> None:
        self.reported_seconds = self.problem.clock()
        unplanned_seconds = max(self.environment.unplanned.seconds, 1e-12)
        best = None if self.is_hopeless else self.best
        reward = "none yet" if self.best_reward is None else f"{self.best_reward:.4f}"
        self.problem.progress(
            Progress(
                elapsed_seconds=self.problem.clock() - self.started_seconds,
                best_overhead=None if best is None else max(0.0, best.seconds / unplanned_seconds - 1.0),
                best_peak_bytes=None if best is None else best.peak_bytes,
                message=f"episode {self.episode:,}, best reward {reward}",
            )
        )
