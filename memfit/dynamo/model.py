"""The calls of a model, planned: each runs as one graph inside a budget, or somebody else runs it, or it raises."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch

from memfit.capture.step_check import check_initialized, check_not_distributed, require_module
from memfit.dynamo.account import Account
from memfit.dynamo.backend import PlannedGraph
from memfit.dynamo.settings import INDUCTOR, GraphSettings, read_options
from memfit.errors import BY_CHECKPOINT, CaptureError, InvalidTargetError, NotOneGraphError, UnsupportedStepError
from memfit.plan import Plan
from memfit.step.turns import Turn
from memfit.torch_private.ambient import dispatch_keys_kept
from memfit.torch_private.dynamo import compiled_calls, is_compilers
from memfit.torch_private.modules import Structure, eager_call, is_compiled, own_call, set_call

_log = logging.getLogger("memfit")
_MANY_GRAPHS = 64  # of one model; Dynamo itself takes eight of a function for a sign of such a number


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


def release(model: torch.nn.Module) -> None:
    """Let the calls of a model that memfit compiled, and the updates of its optimizers, run unplanned again."""
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
        otherwise: called with the reason why a call with gradients cannot run as one planned graph, before any of it
            has run; returns the function that runs it instead. Without it such a call is refused.

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
        require_module(model, where)
        if is_compiled(model):
            raise InvalidTargetError(f"{where}: the model is compiled already; give the module as it was before")
        check_not_distributed(model, where)
        check_initialized(model, where)
        self.graphs: list[PlannedGraph] = []
        self._where = where
        self._model, self._structure = model, Structure(model)
        if not isinstance(options, GraphSettings):
            given = {name: value for name, value in options.items() if value is not None}
            options = read_options(given, where, next((each.device for each in model.parameters()), None))
        self._settings = options
        self._function = eager_call(model) if function is None else function
        self._otherwise = otherwise
        self._compiled = compiled_calls(model, self._function, _weakly(weakref.WeakMethod(self._planned_graph)))
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
            self._account.optimizers.follow()

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
            try:
                return account.evaluate(lambda: run(*arguments, **named))
            except NotOneGraphError as error:  # it breaks into several graphs
                let_go_of_frames(error)
            return account.evaluate(lambda: self._function(*arguments, **named))
        with self._turn.of(self, f"the compiled {type(self._model).__name__}", may_nest=True):
            return self._call(account, arguments, named)

    def _call(self, account: Account, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        account.begin()
        ran, why = account.ran, ""
        try:
            returned = self._captured(*arguments, **named)
        except (NotOneGraphError, CaptureError) as error:
            if account.ran > ran:
                raise
            why, returned = str(error).removesuffix(f": {BY_CHECKPOINT}"), None
            if self._otherwise is None:
                raise NotOneGraphError(f"{why}; memfit.checkpoint holds the budget of such a model") from error
            why = why.removeprefix(f"{self._where}: ")
            let_go_of_frames(error)
        if why and self._otherwise is not None:
            return self._otherwise(why)(*arguments, **named)
        if account.ran == ran:
            why = "PyTorch's compiler may not enter it (torch.compiler.disable, TORCH_COMPILE_DISABLE)"
            if self._otherwise is not None:
                self._otherwise(why)
                return returned
            raise UnsupportedStepError(
                f"{self._where}: a call of {type(self._model).__name__} ran no planned graph, so its budget was not "
                f"enforced: {why}; memfit.checkpoint holds the budget of such a model"
            )
        return returned

    def _captured(self, *arguments: Any, **named: Any) -> Any:
        self._structure.refresh()
        tables = self._structure.parameters
        before = [*map(dict, tables)]
        try:
            returned = self._compiled(*arguments, **named)
            lost = [name for table, was in zip(tables, before, strict=True) for name in was.keys() - table]
            if lost:
                for table, was in zip(tables, before, strict=True):
                    table.update({name: was[name] for name in was.keys() - table})
                raise UnsupportedStepError(
                    f"{self._where}: forward takes parameter {lost[0]!r} out of its module, and PyTorch's compiler "
                    "loses it there, with its gradient; memfit.checkpoint and memfit.eager run such a model as it is"
                )
            return returned
        except Exception as error:
            if not is_compilers(error):
                raise
            text = " ".join(str(error).split()).partition(" Hint:")[0][:400]
            raise NotOneGraphError(
                f"{self._where}: PyTorch's compiler cannot take in {type(self._model).__name__}: {text}"
            ) from error

    def _planned_graph(self, module: torch.fx.GraphModule) -> PlannedGraph:
        settings = self._settings  # Dynamo keeps a graph until the code goes that calls it: it must not keep this
        graph = PlannedGraph(module, lambda: settings, self.account)
        self.graphs.append(graph)
        if len(self.graphs) == _MANY_GRAPHS:
            _log.warning(
                "memfit: %d graphs of %s are compiled by now, and each takes seconds and memory: an integer that the "
                "model reads, such as a counter in an attribute, may differ in each call; make it a tensor or a float",
                _MANY_GRAPHS,
                type(self._model).__name__,
            )
        return graph


def let_go_of_frames(error: BaseException | None) -> None:
    """Take the tracebacks off an error that was dealt with, and off those that led to it.

    PyTorch's compiler keeps its errors in cycles: until Python's collector runs, their frames would keep what the
    user's functions around the call held when they returned, such as the graph of a loss.
    """
    if error is not None and error.__traceback__ is not None:
        with dispatch_keys_kept():
            error.__traceback__ = None
        let_go_of_frames(error.__cause__)
        let_go_of_frames(error.__context__)


def _weakly(planned: weakref.WeakMethod[Callable[[torch.fx.GraphModule], PlannedGraph]]) -> Callable[..., Any]:
    """Return a backend that keeps no calls alive, as Dynamo keeps every backend for good."""

    def backend(module: torch.fx.GraphModule, _inputs: Any) -> PlannedGraph:
        method = planned()
        assert method is not None, "whoever runs the compiled code has it"
        return method(module)

    return backend
