"""A script as Python runs it: its own `__main__`, arguments, search path, traceback and exit status."""

from __future__ import annotations

import builtins
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, ModuleType, TracebackType
from typing import Any

from memfit.errors import InvalidTargetError


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """A program that is ready to run: `Script.of_file("train.py", ["--lr", "3e-4"]).run()`.

    Attributes:
        code: of it.
        main: the module that it runs in.
        arguments: `sys.argv`.
        folder: the first entry of `sys.path`.
    """

    code: CodeType
    main: ModuleType
    arguments: tuple[str, ...]
    folder: str

    @classmethod
    def of_file(cls, name: str, arguments: Sequence[str]) -> Script:
        """Return what `python name arguments` runs.

        Args:
            name: path of the file.
            arguments: of the script.

        Raises:
            InvalidTargetError: no such file, or no Python.
        """
        path = Path(name).absolute()
        if not path.is_file():
            raise InvalidTargetError(f"{name}: there is no such script; `memfit run -m NAME` runs a module")
        try:
            code = compile(path.read_bytes(), str(path), "exec", dont_inherit=True)
        except (SyntaxError, ValueError, OSError) as error:
            where = f":{error.lineno}" if isinstance(error, SyntaxError) else ""
            raise InvalidTargetError(f"{name}{where}: {type(error).__name__}: {error}") from error
        main = _main(__file__=str(path), __cached__=None)
        vars(main)["__loader__"] = importlib.machinery.SourceFileLoader("__main__", str(path))
        return cls(code=code, main=main, arguments=(name, *arguments), folder=str(path.resolve().parent))

    @classmethod
    def of_module(cls, name: str, arguments: Sequence[str]) -> Script:
        """Return what `python -m name arguments` runs.

        Args:
            name: dotted name of a module, or of a package with a `__main__`.
            arguments: of the script.

        Raises:
            InvalidTargetError: no such module, or one that is no Python.
        """
        folder = str(Path.cwd())
        _go_to(folder)
        try:
            spec = importlib.util.find_spec(name)
            if spec is not None and spec.submodule_search_locations is not None:
                name = f"{name}.__main__"
                spec = importlib.util.find_spec(name)
            code = spec.loader.get_code(name) if spec is not None else None  # pyright: ignore
        except (ImportError, AttributeError, ValueError, SyntaxError) as error:
            raise InvalidTargetError(f"module {name}: {type(error).__name__}: {error}") from error
        if spec is None or not isinstance(code, CodeType):
            raise InvalidTargetError(f"there is no module {name!r} that can be run; a file is run without -m")
        main = _main(__file__=spec.origin, __cached__=spec.cached, __spec__=spec, __package__=spec.parent)
        vars(main)["__loader__"] = spec.loader
        return cls(code=code, main=main, arguments=(str(spec.origin), *arguments), folder=folder)

    def run(self) -> None:
        """Run it in this process, in the place of the present `__main__`, and for good.

        Whatever it raises is raised here; what Python prints of that at the end of the process begins with the script.
        """
        sys.modules["__main__"] = self.main
        sys.argv[:] = self.arguments
        _go_to(self.folder)
        try:
            exec(self.code, vars(self.main))
        except SystemExit:
            raise
        except BaseException:
            sys.excepthook = _WithoutOurs(sys.excepthook, self.code)
            raise


class _WithoutOurs:
    """A hook for exceptions that nobody catches: it leaves out what was called before the script.

    Args:
        hook: the script's own, or Python's.
        code: of the script.
    """

    def __init__(self, hook: Callable[..., Any], code: CodeType) -> None:
        self._hook, self._code = hook, code

    def __call__(self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        """Show an exception from the script's own line on."""
        own = traceback
        while own is not None and own.tb_frame.f_code is not self._code:
            own = own.tb_next
        own = own or traceback
        self._hook(kind, error.with_traceback(own), own)


def when_imported(name: str, call: Callable[[], None]) -> Callable[[], None]:
    """Call `call` once a module was imported: at once if that was so before.

    What a script sets before its own import (threads, devices) is then read as without memfit.

    Args:
        name: of a package at the top.
        call: is called once.

    Returns:
        What ends the wait.
    """
    watch = _Watch(name, call)
    if name in sys.modules:
        call()
    else:
        sys.meta_path.insert(0, watch)
    return watch.end


class _Watch(importlib.abc.MetaPathFinder):
    def __init__(self, name: str, call: Callable[[], None]) -> None:
        self._name, self._call = name, call

    def end(self) -> None:
        """Watch no more."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:  # noqa: ARG002
        if fullname != self._name:
            return None
        self.end()
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Then(spec.loader, self._call)
        return spec


class _Then(importlib.abc.Loader):
    """A loader that calls something behind the real one, and leaves no trace in the module."""

    def __init__(self, loader: Any, call: Callable[[], None]) -> None:
        self._loader, self._call = loader, call

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._call()


def _main(**given: Any) -> ModuleType:
    main = ModuleType("__main__")
    vars(main).update(__builtins__=builtins, **given)
    return main


def _go_to(folder: str) -> None:
    """Put a folder in the place of the one that Python put first for memfit itself."""
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = folder
