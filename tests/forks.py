"""Code that runs in a process of its own, as a reader's would, without waiting for the imports of torch and memfit.

Run as a script, this reads tasks from standard input, runs each in a fork of itself, and answers on standard output.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from types import ModuleType


class Forks:
    """A process that has imported torch and memfit.

    Args:
        most_seconds: of one piece of code, which then is ended by a signal.
    """

    def __init__(self, most_seconds: int) -> None:
        self._most_seconds = most_seconds
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def run(self, code: str, folder: Path) -> tuple[int, str]:
        """Run code in a folder, in a process of its own; return its exit status and what it wrote."""
        assert self._process.stdin is not None and self._process.stdout is not None
        print(json.dumps([code, str(folder), self._most_seconds]), file=self._process.stdin, flush=True)
        status, output = json.loads(self._process.stdout.readline())
        return status, output

    def close(self) -> None:
        self._process.communicate()


def _answer_tasks() -> None:
    import memfit.doors.compile
    import memfit.doors.fit  # noqa: F401

    sys.path[0] = ""  # as of `python -c`
    for line in sys.stdin:
        code, folder, most_seconds = json.loads(line)
        with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as output:
            child = os.fork()
            if child == 0:
                _run(code, folder, most_seconds, output.fileno())
            _, status = os.waitpid(child, 0)
            output.seek(0)
            print(json.dumps([os.waitstatus_to_exitcode(status), output.read()]), flush=True)


def _run(code: str, folder: str, most_seconds: int, output: int) -> None:
    """Run code as `__main__`, and end this process."""
    signal.alarm(most_seconds)
    os.chdir(folder)
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    main = sys.modules["__main__"] = ModuleType("__main__")
    status = 1
    try:
        exec(compile(code, "<string>", "exec"), vars(main))
        status = 0
    except BaseException:  # noqa: BLE001 - whatever it raises is told to the test
        traceback.print_exc()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    _answer_tasks()
