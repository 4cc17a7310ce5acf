"""While a command works: progress on standard error that goes away in the end, and a Ctrl-C that is remembered."""

from __future__ import annotations

import signal
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from memfit import plan
from memfit.budget import format_bytes
from memfit.errors import MemfitError
from memfit.report.words import change_text


class CommandInterrupted(MemfitError):  # noqa: N818 - nothing went wrong
    """Ctrl-C ended a command; the message says what is kept."""

    exit_status = 130


class Work:
    """What a command is doing, shown on a terminal, and whether Ctrl-C was pressed meanwhile.

    A planner that is interrupted still answers, so that only this can tell an interrupted search from a finished one.

    Attributes:
        interrupted: whether Ctrl-C was pressed.
        kept: the file that holds the best plan so far, once a command has written it.
    """

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._task = progress.add_task("", total=None, detail="", visible=False)
        self._expected_seconds: float | None = None
        self.interrupted = False
        self.kept: Path | None = None

    def stage(self, title: str, *, expected_seconds: float | None = None) -> None:
        """Say what is done from now on, and how long it may take where that is known."""
        self._expected_seconds = expected_seconds
        self._progress.reset(self._task, description=title, total=None, detail="", visible=True)

    def done(self, done: float, total: float) -> None:
        """Say how much of the present stage is done."""
        self._progress.update(self._task, completed=min(done, total), total=total)

    def on_search(self, progress: plan.Progress) -> None:
        """Show how the search for a plan goes; this is Problem's `progress`."""
        detail = progress.message
        if progress.best_overhead is not None and progress.best_peak_bytes is not None:
            best = f"best {change_text(progress.best_overhead)} at {format_bytes(progress.best_peak_bytes)}"
            detail = f"{best}, bound {progress.bound_overhead:+.2%}, gap {progress.gap:.2%}  {detail}"
        self._progress.update(self._task, detail=detail)
        if self._expected_seconds is not None:
            self.done(progress.elapsed_seconds, self._expected_seconds)

    def keep(self, found: plan.Plan, path: Path | None) -> None:
        """Save the best plan so far where the user wants it saved."""
        if path is not None:
            found.save(path)
            self.kept = path

    def stop_if_interrupted(self) -> None:
        """Raise CommandInterrupted where Ctrl-C was pressed."""
        if self.interrupted:
            raise CommandInterrupted(
                f"interrupted; the best plan so far is in {self.kept}"
                if self.kept
                else "interrupted; nothing was written (--save PLAN keeps the best plan so far)"
            )


@contextmanager
def working() -> Generator[Work]:
    """Show the work, and turn what a Ctrl-C breaks off into CommandInterrupted; the handler before is put back."""
    console = Console(stderr=True)
    progress = Progress(
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=24),
        TimeElapsedColumn(),
        TextColumn("{task.fields[detail]}", style="dim", markup=False),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    work = Work(progress)

    def on_interrupt(_signal: int, _frame: FrameType | None) -> None:
        work.interrupted = True
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGINT, on_interrupt)
    try:
        with progress:
            yield work
    except (KeyboardInterrupt, MemfitError):
        work.stop_if_interrupted()  # an interrupted planner answers that its time is up: say what really happened
        raise
    finally:
        signal.signal(signal.SIGINT, previous)
