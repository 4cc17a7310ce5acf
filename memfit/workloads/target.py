"""Targets: what a user names on the command line, turned into a training step or a graph.

A target is a built-in workload, `path/to/file.py:function`, or a graph file. Only the first two bring torch.
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING, Any

from memfit.errors import InvalidOptionError, InvalidTargetError, MemfitError
from memfit.graph import Graph
from memfit.workloads.registry import WORKLOADS, OptionValue

if TYPE_CHECKING:
    from memfit.capture.training_step import TrainingStep

_GRAPH_ENDINGS = (".graph.json", ".graph.json.gz")
_REQUIRED_KINDS = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_EXPECTED = "expected memfit.TrainingStep(model=..., loss=..., batch=..., optimizer=...)"


def resolve(target: str, options: Mapping[str, OptionValue] | None = None) -> TrainingStep | Graph:
    """Return the training step or the graph that `target` names.

        >>> from memfit.workloads.target import resolve
        >>> step = resolve("unet", {"size": "16", "width": "4", "batch": "1"})
        >>> type(step).__name__, step.batch[0].shape[-1]
        ('TrainingStep', 16)

    Args:
        target: a built-in workload, `path/to/file.py:function` (a function without arguments that returns a
            TrainingStep), or a graph file.
        options: of a built-in workload; no other target has any.

    Raises:
        InvalidTargetError: nothing of that name, or it does not give a training step; says which line of the user's.
        InvalidOptionError: an option that the target does not have.
        InvalidFileError, InvalidGraphError: a graph file that cannot be used.
        InvalidDeviceError: model and batch on different devices.
        UnsupportedStepError: a model under DDP or FSDP.
    """
    if target in WORKLOADS:
        from memfit.workloads.building import build_workload

        return build_workload(target, options or {})
    if options:
        raise InvalidOptionError(
            f"target {target} takes no options, got {', '.join(options)}; only built-in workloads have options"
        )
    if target.endswith(_GRAPH_ENDINGS):
        return _load_graph(target)
    path, colon, function = target.rpartition(":")
    if colon and path.endswith(".py"):
        return _call(Path(path), function)
    raise InvalidTargetError(_explain(target))


def _load_graph(target: str) -> Graph:
    if not Path(target).is_file():
        raise InvalidTargetError(f"{target}: there is no such graph file")
    return Graph.load(target)


def _explain(target: str) -> str:
    if target.endswith(".py"):
        return f"{target}: which function? write {target}:FUNCTION, one that returns a memfit.TrainingStep"
    if target.endswith((".json", ".json.gz")):
        return f"{target}: a graph file's name ends in .graph.json or .graph.json.gz"
    near = get_close_matches(target, WORKLOADS, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return (
        f"target {target!r} is none of: a built-in workload ({', '.join(WORKLOADS)}), "
        f"path/to/file.py:function, a graph file (*.graph.json){hint}"
    )


def _call(path: Path, name: str) -> TrainingStep:
    function = _function(_load_module(path), path, name)
    with _Blame(path, f"{name}() raised"):
        made = function()
    from memfit.capture.step_check import check_step
    from memfit.capture.training_step import TrainingStep

    if not isinstance(made, TrainingStep):
        what = "nothing" if made is None else f"a {type(made).__name__}"
        raise InvalidTargetError(f"{path}:{name}() returned {what}, {_EXPECTED}")
    check_step(made, f"{path}:{name}()")
    return made


def _load_module(path: Path) -> ModuleType:
    if not path.is_file():
        raise InvalidTargetError(f"{path}: there is no such file")
    path = path.resolve()
    module_name = f"memfit_target_{path.stem}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise InvalidTargetError(f"{path}: Python cannot load it as a module")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # dataclasses and pickle look a class's module up by name
    folder = str(path.parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)  # as `python file.py` does: the file may import its neighbours, now or when called
    with _Blame(path, "importing it raised"):
        spec.loader.exec_module(module)
    return module


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


class _Blame:
    """Turns whatever the user's file raises into one line that names the file's own line.

    The user's code may raise anything, SystemExit included; memfit's own errors and Ctrl-C pass.
    """

    def __init__(self, path: Path, what: str) -> None:
        self._path = path
        self._what = what

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, raised: BaseException | None, trace: TracebackType | None
    ) -> None:
        if raised is None or isinstance(raised, (MemfitError, KeyboardInterrupt)):
            return
        line = _line_in(self._path, raised, trace)
        where = self._path if line is None else f"{self._path}:{line}"
        message = " ".join(str(raised).split())
        raise InvalidTargetError(f"{where}: {self._what} {type(raised).__name__}: {message}") from raised


def _line_in(path: Path, raised: BaseException, trace: TracebackType | None) -> int | None:
    """The last line of the user's file that the error went through; a syntax error brings its own."""
    if isinstance(raised, SyntaxError) and raised.filename and Path(raised.filename) == path.resolve():
        return raised.lineno
    frames = traceback.extract_tb(trace)
    lines = [frame.lineno for frame in frames if Path(frame.filename).resolve() == path.resolve()]
    return lines[-1] if lines else None
