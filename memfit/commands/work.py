"""Progress of a command: a bar on a terminal, removed at its end, else a line every ten seconds; and Ctrl-C."""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import NoReturn

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from memfit import plan
from memfit.commands.answer import DONE, INTERRUPTED
from memfit.errors import MemfitError
from memfit.planning import Settings
from memfit.progress import PROGRESS, SEARCHING, TOLD_SECONDS, search_text

_HEARD_SECONDS = 0.3  # after Ctrl-C, a planner that heard it reports no progress any more


_log = logging.getLogger(PROGRESS)


class CommandInterrupted(MemfitError):  # noqa: N818 - nothing went wrong
    """Ctrl-C ended a command; the message names the file of the best plan so far."""

    exit_status = INTERRUPTED


class Work:
    """The stage that a command is in, shown on a terminal and told as a line, and whether Ctrl-C was pressed.

    Attributes:
        interrupted: whether Ctrl-C was pressed; a planner returns its best plan so far then.
        kept: the file with the best plan so far, once a command has written it.
    """

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._task = progress.add_task("", total=None, detail="", visible=False)
        self._expected_seconds: float | None = None
        self._title, self._detail, self._share = "starting", "", 0.0
        self._began_seconds = time.monotonic()
        self.interrupted = False
        self._interrupted_seconds = 0.0  # when, by `time.monotonic`
        self.kept: Path | None = None

    @property
    def exit_status(self) -> int:
        """The exit status of a command that answers with what it has after Ctrl-C."""
        return INTERRUPTED if self.interrupted else DONE

    def interrupt(self) -> NoReturn:
        """Note that Ctrl-C was pressed, and raise KeyboardInterrupt."""
        self.interrupted, self._interrupted_seconds = True, time.monotonic()
        raise KeyboardInterrupt

    def _raise_again(self) -> None:
        """Raise KeyboardInterrupt if Python lost the first one, as it does in destructors and callbacks."""
        if self.interrupted and time.monotonic() - self._interrupted_seconds > _HEARD_SECONDS:
            raise KeyboardInterrupt

    def stage(self, title: str, *, expected_seconds: float | None = None) -> None:
        """Show the name of a new stage.

        Args:
            title: of the stage.
            expected_seconds: how long it may take, if that is known.
        """
        self._expected_seconds = expected_seconds
        self._title, self._detail, self._share, self._began_seconds = title, "", 0.0, time.monotonic()
        _log.debug("%s", title)
        self._progress.reset(self._task, description=title, total=None, detail="", visible=True)

    def done(self, done: float, total: float) -> None:
        """Show how much of the present stage is done.

        Args:
            done, total: of the work of this stage, in any unit; a total of 0 shows no share.
        """
        self._raise_again()
        self._share = min(done / total, 1.0) if total else 0.0
        self._progress.update(self._task, completed=min(done, total), total=total)

    def line(self) -> str:
        """Return the stage as one line: what is done of it, for how long, and how long it may still take.

        >>> with working() as work:
        ...     work.stage("measuring each op")
        ...     work.done(3, 4)
        ...     work.line()
        'measuring each op: 75%, 0 s, about 0 s left'
        """
        seconds = time.monotonic() - self._began_seconds
        parts = [f"{self._share:.0%}"] if self._share else []
        parts.append(f"{seconds:.0f} s")
        if 0 < self._share < 1:
            parts.append(f"about {seconds / self._share - seconds:.0f} s left")
        return f"{self._title}: {', '.join(parts)}{f'; {self._detail}' if self._detail else ''}"

    def follow(self, settings: Settings) -> Settings:
        """Return the settings with the stages and the progress of each search shown here."""

        def on_stage(title: str) -> None:
            self.stage(title, expected_seconds=settings.time_limit_seconds if title == SEARCHING else None)

        return replace(settings, on_stage=on_stage, progress=self.on_search)

    def on_search(self, progress: plan.Progress) -> None:
        """Show the progress of a search; this is the `progress` of a Problem."""
        self._raise_again()
        self._detail = search_text(progress)
        self._progress.update(self._task, detail=self._detail)
        if self._expected_seconds is not None:
            self.done(progress.elapsed_seconds, self._expected_seconds)

    def keep(self, found: plan.Plan, path: Path | None) -> None:
        """Save the best plan so far.

        Args:
            found: the plan.
            path: of the file, which `kept` names from then on; None saves nothing.
        """
        if path is not None:
            found.save(path)
            self.kept = path

    def stop_if_interrupted(self) -> None:
        """Raise CommandInterrupted if Ctrl-C was pressed."""
        if self.interrupted:
            raise CommandInterrupted(
                f"interrupted; the best plan so far is in {self.kept}"
                if self.kept
                else "interrupted; nothing was written (--save PLAN keeps the best plan so far)"
            )


@contextmanager
def working() -> Generator[Work]:
    """Show the work of a command, and turn Ctrl-C into CommandInterrupted; the signal handler is restored after it."""
    console = Console(stderr=True)
    progress = Progress(
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=24),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[detail]}", style="dim", markup=False),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    work = Work(progress)

    def on_interrupt(_signal: int, _frame: FrameType | None) -> None:
        work.interrupt()

    hears = threading.current_thread() is threading.main_thread()  # no other may set a handler
    previous = signal.signal(signal.SIGINT, on_interrupt) if hears else None
    try:
        with progress, nullcontext() if console.is_terminal else _telling(work):
            yield work
    except (KeyboardInterrupt, Exception):
        work.stop_if_interrupted()  # an error after Ctrl-C comes of it: no plan was found yet, or no compilation ended
        raise
    finally:
        if hears:
            signal.signal(signal.SIGINT, previous)


@contextmanager
def _telling(work: Work) -> Generator[None]:
    """Log the line of the work every ten seconds."""
    ended = threading.Event()

    def tell() -> None:
        while not ended.wait(TOLD_SECONDS):
            _log.info("%s", work.line())

    teller = threading.Thread(target=tell, daemon=True, name="memfit progress")
    teller.start()
    try:
        yield
    finally:
        ended.set()
        teller.join()
