"""`compile`: a model whose calls run inside a budget, in whatever loop trains it; a call that is not planned raises."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from memfit.capture.step_check import check_initialized, check_not_distributed
from memfit.errors import InvalidTargetError, UnsupportedStepError
from memfit.plan import Plan
from memfit.planning import DEFAULT_PLANNER, DEFAULT_TIME_LIMIT_SECONDS, FIRM
from memfit.runtime.compile.account import Account
from memfit.runtime.compile.backend import PlannedGraph
from memfit.runtime.compile.settings import EAGER, INDUCTOR, GraphSettings, read_options
from memfit.runtime.turns import Turn
from memfit.torch_private.dynamo import compiled_calls, graph_breaks, is_compilers
from memfit.torch_private.modules import eager_call, is_compiled, own_call, set_call

_log = logging.getLogger("memfit")
_MANY_GRAPHS = 64  # of one model; Dynamo itself takes eight of a function for a sign of such a number


def compile(
    model: torch.nn.Module,
    *,
    budget: str | int,
    optimizer: torch.optim.Optimizer | None = None,
    reserve: str | int | None = None,
    planner: str = DEFAULT_PLANNER,
    options: Mapping[str, object] | None = None,
    time_limit_seconds: float = DEFAULT_TIME_LIMIT_SECONDS,
    seed: int = 0,
    host_budget: str | int = 0,
    host_dir: Path | str | None = None,
    budget_is: str = FIRM,
    kernels: str = EAGER,
    backward_autocast: bool = False,
) -> torch.nn.Module:
    """Let all calls of `model` run inside `budget`, in a loop that stays as it is; return the model itself.

        >>> import torch, memfit
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.ReLU(), torch.nn.Linear(64, 2))
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> model = memfit.compile(model, budget="1MiB", optimizer=optimizer)
        >>> loss = torch.nn.functional.cross_entropy(model(torch.randn(32, 8)), torch.randint(0, 2, (32,)))
        >>> loss.backward()
        >>> optimizer.step()

    Args:
        model: is changed in place, like `model.compile(...)`: its parameters, its class and its `state_dict` stay.
        budget: the bytes for everything on the device during a step: `"6GiB"`, or an integer.
        optimizer: counts the state that its first step will make, and holds its updates to the budget.
        reserve: bytes that will be taken later, if no optimizer is given; by default the bytes of Adam's state.
        planner: as in `memfit.fit`, and so are all that follow.
        options: of the planner.
        time_limit_seconds: for each search of a plan.
        seed: the same seed gives the same plan.
        host_budget: the bytes that storages may be offloaded to.
        host_dir: a directory on the disk that a CPU offloads to.
        budget_is: `"firm"` or `"soft"`: whether what takes more than the budget raises or is a warning.
        kernels: `"eager"`: those that eager calls, to the bit; `"inductor"`: generated, as `torch.compile` does.
        backward_autocast: whether the loop calls `backward` inside `torch.autocast`, which torch advises against.

    Raises:
        InvalidTargetError: no module, or one that is compiled already.
        InvalidOptionError, InvalidBudgetError: a value that cannot be read.
        UnsupportedStepError: a model under DDP, FSDP or DataParallel, or an optimizer that evaluates the loss itself.

    Guarantees: a call with gradients runs planned graphs, or raises UnsupportedStepError. A call without gradients runs
    as ever (with Inductor's kernels as `torch.compile` runs it), and raises OverBudgetError if it takes more than the
    budget. An update that takes more raises
    InfeasibleBudgetError. If forward, loss and backward take more than was planned, a warning says so, and they
    are planned again for less; after three times it raises BudgetNotHeldError. A soft budget only warns.
    """
    given = {
        "budget": budget,
        "reserve": reserve,
        "planner": planner,
        "options": options,
        "time_limit_seconds": time_limit_seconds,
        "seed": seed,
        "host_budget": host_budget,
        "host_dir": host_dir,
        "budget_is": budget_is,
        "kernels": kernels,
        "backward_autocast": backward_autocast,
    }
    calls = compile_in_place(model, given, "memfit.compile")
    if optimizer is not None:
        calls.account.follow(optimizer)
    return model


def compile_in_place(
    model: torch.nn.Module,
    options: Mapping[str, Any],
    where: str,
    *,
    otherwise: Callable[[str], Callable[..., Any]] | None = None,
) -> PlannedCalls:
    """Let all calls of a model run planned; return what runs them.

    Args:
        model: the model.
        options: of the backend; None stands for a default.
        where: begins the message of an error.
        otherwise: as for `PlannedCalls`.

    Raises:
        MemfitError: as `compile`.
    """
    calls = PlannedCalls(None, model, options, where, otherwise=otherwise)
    set_call(model, calls)
    return calls


def compile_anew(
    model: torch.nn.Module,
    options: Mapping[str, Any],
    where: str,
    *,
    otherwise: Callable[[str], Callable[..., Any]] | None = None,
) -> PlannedCalls:
    """As `compile_in_place`; a model that memfit planned before, for a run that is over or was broken off, is released.

    Args:
        model, options, where, otherwise: as there.

    Raises:
        MemfitError: as `compile`.
    """
    if isinstance(own_call(model), PlannedCalls):
        release(model)
    return compile_in_place(model, options, where, otherwise=otherwise)


def release(model: torch.nn.Module) -> None:
    """Let the calls of a compiled model, and the updates of its optimizers, run as ever again."""
    calls = own_call(model)
    if isinstance(calls, PlannedCalls):
        calls.let_go()
    set_call(model, None)


class PlannedCalls:
    """Runs the calls of a function within a budget.

    Args:
        function: captured at its first call; None stands for the calls of the model.
        model: whose parameters it trains.
        options: of the backend, where None stands for a default, or read before.
        where: begins the message of an error.
        otherwise: is told why a call with gradients cannot run as one planned graph, before anything of it has run, and
            returns what runs it; without it such a call runs in several graphs, or is refused.

    Raises:
        MemfitError: as `compile`.
    """

    def __init__(
        self,
        function: Callable[..., Any] | None,
        model: torch.nn.Module,
        options: GraphSettings | Mapping[str, Any],
        where: str,
        *,
        otherwise: Callable[[str], Callable[..., Any]] | None = None,
    ) -> None:
        if not isinstance(model, torch.nn.Module):
            raise InvalidTargetError(f"{where}: model is a {type(model).__name__}, expected a torch.nn.Module")
        if is_compiled(model):
            raise InvalidTargetError(f"{where}: the model is compiled already; give the module as it was before")
        check_not_distributed(model, where)
        check_initialized(model, where)
        self.graphs: list[PlannedGraph] = []
        self._where = where
        self._model = model
        if not isinstance(options, GraphSettings):
            options = read_options({name: value for name, value in options.items() if value is not None})
        self._settings = options
        self._function = eager_call(model) if function is None else function
        self._otherwise = otherwise
        self._compiled = compiled_calls(model, self._function, self._planned_graph, whole=otherwise is not None)
        self._account: Account | None = None
        self._turn = Turn()

    @property
    def account(self) -> Account:
        """What measures the steps; made when it is first needed, on the device that the model is on then."""
        if self._account is None:
            device = next((p.device for p in self._model.parameters()), torch.device("cpu"))
            self._account = Account(int(self._settings.settings.budget), device, self._settings.settings.budget_is)
        return self._account

    def let_go(self) -> None:
        """Follow no optimizer any more."""
        if self._account is not None:
            self._account.follow()

    @property
    def plans(self) -> list[Plan]:
        """The plans in use, one for each graph and tuple of sizes."""
        return [plan for graph in self.graphs for plan in graph.plans]

    @torch.compiler.disable
    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Run one call.

        Raises:
            UnsupportedStepError: no graph was captured, or another thread is in a call.
            OverBudgetError: a call without gradients took more than the budget.
            NoPlanError: no plan fits.
        """
        account = self.account
        if not torch.is_grad_enabled():  # Inductor's random numbers are others than eager's
            run = self._captured if self._settings.kernels == INDUCTOR else self._function
            return account.evaluate(lambda: run(*arguments, **named))
        with self._turn.of(self, f"the compiled {type(self._model).__name__}", may_nest=True):
            return self._call(account, arguments, named)

    def _call(self, account: Account, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        account.begin()
        ran, breaks = account.ran, graph_breaks()
        try:
            returned = self._captured(*arguments, **named)
        except UnsupportedStepError as error:
            if self._otherwise is None or account.ran > ran:
                raise
            return self._otherwise(str(error).removeprefix(f"{self._where}: "))(*arguments, **named)
        if account.ran == ran:
            reasons = [why for why, count in graph_breaks().items() if count > breaks.get(why, 0)]
            why = (
                f"PyTorch's compiler left it at a graph break ({'; '.join(reasons)})"
                if reasons
                else "PyTorch's compiler may not enter it (DDP, FSDP, torch.compiler.disable, TORCH_COMPILE_DISABLE)"
            )
            if self._otherwise is not None:
                self._otherwise(why)
                return returned
            raise UnsupportedStepError(
                f"{self._where}: a call of {type(self._model).__name__} ran no planned graph, so its budget was not "
                f"enforced: {why}; give the bare module inside of it, or memfit.fit the whole step"
            )
        return returned

    def _captured(self, *arguments: Any, **named: Any) -> Any:
        try:
            return self._compiled(*arguments, **named)
        except RuntimeError as error:
            if not is_compilers(error):
                raise
            raise UnsupportedStepError(
                f"{self._where}: PyTorch's compiler cannot take in {type(self._model).__name__}: "
                f"{' '.join(str(error).split())[:400]}"
            ) from error

    def _planned_graph(self, module: torch.fx.GraphModule, _inputs: Any) -> PlannedGraph:
        settings = replace(self._settings, account=self.account)
        graph = PlannedGraph(module, lambda: settings)
        self.graphs.append(graph)
        if len(self.graphs) == _MANY_GRAPHS:
            _log.warning(
                "memfit: %d graphs of %s are compiled by now, and each takes seconds and memory: an integer that the "
                "model reads, such as a counter in an attribute, may differ in each call; make it a tensor or a float",
                _MANY_GRAPHS,
                type(self._model).__name__,
            )
        return graph
