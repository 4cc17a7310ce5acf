"""Targets of the command line: resolving their names to training steps and graphs.

A target is a built-in workload, `path/to/file.py:function`, or a graph file. A graph file imports no torch.
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import msgspec

from memfit.errors import InvalidOptionError, InvalidTargetError, MemfitError
from memfit.graph import Graph
from memfit.system.lines import did_you_mean
from memfit.system.script import when_imported
from memfit.workloads.registry import WORKLOADS, OptionValue

if TYPE_CHECKING:
    from memfit.capture.training_step import TrainingStep
    from memfit.step.distributed.across import AbsentRanks

GRAPH_ENDINGS = (".graph.json", ".graph.json.gz")
_REQUIRED_KINDS = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_EXPECTED = "expected memfit.TrainingStep(model=..., loss=..., batch=..., optimizer=...)"


def resolve(
    target: str, options: Mapping[str, OptionValue] | None = None, ranks: AbsentRanks | None = None
) -> TrainingStep | Graph:
    """Return the training step or the graph that `target` names.

        >>> from memfit.commands.targets import resolve
        >>> step = resolve("unet", {"size": "16", "width": "4", "batch": "1"})
        >>> type(step).__name__, step.batch[0].shape[-1]
        ('TrainingStep', 16)

    Args:
        target: a built-in workload, `path/to/file.py:function` (a function that can be called without arguments and
            returns a TrainingStep), or a graph file.
        options: of a built-in workload, or arguments of the function; a graph file has none.
        ranks: that are not there, one of which the step is made for; None is this process alone.

    Raises:
        InvalidTargetError: the target does not exist, or does not give a training step; names the user's line. A graph
            file, for one of many ranks.
        InvalidOptionError: an option that the target does not have.
        InvalidFileError, InvalidGraphError: a graph file that cannot be used.
        InvalidDeviceError: model and batch on different devices.
        UnsupportedStepError: a model under DDP or FSDP.
    """
    if target in WORKLOADS:
        from memfit.workloads.building import build_workload

        return _made(lambda: build_workload(target, options or {}), ranks)
    path, colon, function = target.rpartition(":")
    if colon and path.endswith(".py"):
        return _call(Path(path), function, options or {}, ranks)
    if options and target.endswith(GRAPH_ENDINGS):
        raise InvalidOptionError(f"target {target} is a graph file, which has no options; got {', '.join(options)}")
    if target.endswith(GRAPH_ENDINGS):
        graph = _load_graph(target)
        if ranks is None:
            return graph
        raise InvalidTargetError(
            f"{target} is a graph file, which was captured for one number of ranks; --ranks needs a workload or "
            "path/to/file.py:function"
        )
    raise InvalidTargetError(_explain(target))


def require_step(resolved: TrainingStep | Graph, refusal: str) -> TrainingStep:
    """Return the resolved target if it is a training step.

    Args:
        resolved: from `resolve`.
        refusal: the message for a graph.

    Raises:
        InvalidTargetError: the target is a graph file.
    """
    if isinstance(resolved, Graph):
        raise InvalidTargetError(refusal)
    return resolved


def _load_graph(target: str) -> Graph:
    if not Path(target).is_file():
        raise InvalidTargetError(f"{target}: there is no such graph file")
    return Graph.load(target)


def _explain(target: str) -> str:
    if target.endswith(".py"):
        return f"{target}: which function? write {target}:FUNCTION, one that returns a memfit.TrainingStep"
    if target.endswith((".json", ".json.gz")):
        return f"{target}: a graph file's name ends in .graph.json or .graph.json.gz"
    return (
        f"target {target!r} is none of: a built-in workload ({', '.join(WORKLOADS)}), "
        f"path/to/file.py:function, a graph file (*.graph.json){did_you_mean(target, WORKLOADS)}"
    )


def _call(path: Path, name: str, options: Mapping[str, OptionValue], ranks: AbsentRanks | None) -> TrainingStep:
    def make() -> TrainingStep:
        function = _function(_load_module(path), path, name)
        arguments = _arguments(function, f"{path}:{name}", options)
        with _own_arguments(path), _blame(path, f"{name}() raised"):
            return function(**arguments)

    made: Any = _made(make, ranks)
    from memfit.capture.step_check import check_step
    from memfit.capture.training_step import TrainingStep

    if not isinstance(made, TrainingStep):
        what = "nothing" if made is None else f"a {type(made).__name__}"
        raise InvalidTargetError(f"{path}:{name}() returned {what}, {_EXPECTED}")
    check_step(made, f"{path}:{name}()")
    return made


def _made(make: Callable[[], TrainingStep], ranks: AbsentRanks | None) -> TrainingStep:
    return make() if ranks is None else ranks.step(make)


def _load_module(path: Path) -> ModuleType:
    if not path.is_file():
        raise InvalidTargetError(f"{path}: there is no such file")
    path = path.resolve()
    module_name = f"memfit_target_{path.stem}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise InvalidTargetError(f"{path}: Python cannot load it as a module")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # dataclasses and pickle find a class's module by its name
    folder = str(path.parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)  # as `python file.py` does: the file may import its neighbours, now or when called
    with _own_arguments(path), _refusing_updates(path), _blame(path, "importing it raised"):
        spec.loader.exec_module(module)
    return module


@contextmanager
def _own_arguments(path: Path) -> Generator[None]:
    """Let the user's code see no arguments of memfit's, inside the block."""
    kept, sys.argv = sys.argv, [str(path)]
    try:
        yield
    finally:
        sys.argv = kept


@contextmanager
def _refusing_updates(path: Path) -> Generator[None]:
    """Refuse a file that trains when it is imported, at its first update, by its line."""
    hooks: list[Any] = []

    def refuse(*_: Any) -> None:
        lines = [frame.lineno for frame in traceback.extract_stack() if Path(frame.filename).resolve() == path]
        raise InvalidTargetError(
            f"{path}{f':{lines[-1]}' if lines else ''}: importing it trains: an optimizer steps there. Put what trains "
            f"behind `if __name__ == '__main__':`, or run the file as it is: memfit run --budget BUDGET {path.name}"
        )

    def watch() -> None:
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        hooks.append(register_optimizer_step_pre_hook(refuse))

    forget = when_imported("torch", watch)
    try:
        yield
    finally:
        forget()
        for hook in hooks:
            hook.remove()


def _function(module: ModuleType, path: Path, name: str) -> Callable[[], Any]:
    own = [
        key
        for key, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__ and not key.startswith("_")
    ]
    if not hasattr(module, name):
        raise InvalidTargetError(
            f"{path} has no function {name!r}; it has {', '.join(own) or 'no functions of its own'}"
        )
    function = getattr(module, name)
    if not callable(function):
        raise InvalidTargetError(f"{path}:{name} is a {type(function).__name__}, expected a function without arguments")
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError) as error:
        raise InvalidTargetError(f"{path}:{name} cannot be called: {error}; expected a plain function") from error
    needed = [
        p.name for p in parameters if p.default is p.empty and (p.kind in _REQUIRED_KINDS or p.kind is p.KEYWORD_ONLY)
    ]
    if needed:
        raise InvalidTargetError(
            f"{path}:{name} needs arguments ({', '.join(needed)}), expected a function that is called without any"
        )
    return function


def _arguments(function: Callable[..., Any], where: str, options: Mapping[str, OptionValue]) -> dict[str, Any]:
    """Return options as arguments of a function, each of the type of the parameter's default."""
    parameters = inspect.signature(function).parameters
    own = {n: p.default for n, p in parameters.items() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
    kinds: dict[str, Any] = {name: type(default) for name, default in own.items()}
    arguments: dict[str, Any] = {}
    for option, value in options.items():
        if option not in own:
            raise InvalidOptionError(
                f"target {where} has no parameter {option!r}{did_you_mean(option, own)}; it has "
                f"{', '.join(own) or 'none'}"
            )
        try:
            arguments[option] = value if own[option] is None else msgspec.convert(value, kinds[option], strict=False)
        except msgspec.ValidationError as error:
            raise InvalidOptionError(f"target {where}: parameter {option}={value!r}: {error}") from error
    return arguments


@contextmanager
def _blame(path: Path, what: str) -> Generator[None]:
    """Convert an error in the user's file to an InvalidTargetError that names the line in this file.

    The user's code may raise anything, SystemExit included. memfit's own errors and Ctrl-C are not converted.
    """
    try:
        yield
    except (MemfitError, KeyboardInterrupt):
        raise
    except BaseException as raised:
        line = _line_in(path, raised)
        where = path if line is None else f"{path}:{line}"
        message = " ".join(str(raised).split())
        raise InvalidTargetError(f"{where}: {what} {type(raised).__name__}: {message}") from raised


def _line_in(path: Path, raised: BaseException) -> int | None:
    """Return the innermost line of the user's file in the traceback, or the line of a syntax error in it."""
    if isinstance(raised, SyntaxError) and raised.filename and Path(raised.filename) == path.resolve():
        return raised.lineno
    lines = [
        frame.lineno
        for frame in traceback.extract_tb(raised.__traceback__)
        if Path(frame.filename).resolve() == path.resolve()
    ]
    return lines[-1] if lines else None
