"""While a command works: progress on standard error that goes away in the end, and a Ctrl-C that is remembered."""

from __future__ import annotations

import signal
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
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


@dataclass(slots=True)
class Interruption:
    """Whether Ctrl-C was pressed: a planner that is interrupted still answers, so nobody else can tell.

    `kept` is the file that holds the best plan so far, once a command has written it.
    """

    happened: bool = False
    kept: Path | None = None

    def error(self) -> CommandInterrupted:
        """Return what to raise for it."""
        return CommandInterrupted(
            f"interrupted; the plan is in {self.kept}" if self.kept else "interrupted before there was a plan to keep"
        )


@contextmanager
def interruptible() -> Generator[Interruption]:
    """Remember a Ctrl-C, and turn what it breaks off into CommandInterrupted."""
    interruption = Interruption()

    def on_interrupt(_signal: int, _frame: FrameType | None) -> None:
        interruption.happened = True
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield interruption
    except KeyboardInterrupt as interrupt:
        raise interruption.error() from interrupt
    except MemfitError as error:
        if interruption.happened:  # an interrupted planner answers that its time is up
            raise interruption.error() from error
        raise
    finally:
        signal.signal(signal.SIGINT, previous)


class Stages:
    """The stages of a command, shown one at a time while they run, on a terminal only."""

    def __init__(self) -> None:
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            TimeElapsedColumn(),
            TextColumn("{task.fields[detail]}", style="dim", markup=False),
            console=Console(stderr=True),
            transient=True,
        )

    @contextmanager
    def stage(self, title: str) -> Generator[Callable[[float, float, str], None]]:
        """Show `title` while the block runs; the yielded function takes what is done, of how much, and a detail."""
        with self._progress:
            task = self._progress.add_task(title, total=None, detail="")

            def update(done: float, total: float, detail: str = "") -> None:
                self._progress.update(task, completed=min(done, total), total=total, detail=detail)

            try:
                yield update
            finally:
                self._progress.remove_task(task)

    @contextmanager
    def planning(self, title: str, time_limit_seconds: float) -> Generator[Callable[[plan.Progress], None]]:
        """Show the seconds of the time limit and the best plan so far; the yielded function is Problem's `progress`."""
        with self.stage(title) as update:

            def on_progress(progress: plan.Progress) -> None:
                detail = progress.message
                if progress.best_overhead is not None and progress.best_peak_bytes is not None:
                    best = f"best {change_text(progress.best_overhead)} at {format_bytes(progress.best_peak_bytes)}"
                    detail = f"{best} {detail}"
                update(progress.elapsed_seconds, time_limit_seconds, detail)

            yield on_progress
