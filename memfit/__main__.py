"""The program `memfit`, which `python -m memfit` runs too."""

import gc
import sys
from typing import NoReturn

_INTERRUPTED = 130


def run() -> NoReturn:
    """Run the command of `sys.argv`, and exit with its status."""
    if sys.argv[1:2] == ["run"]:
        from memfit.commands.run import main as run_script  # nothing else: the script's own imports come first

        status = run_script(sys.argv[2:])
    else:
        try:
            from memfit.cli import main
        except KeyboardInterrupt:  # Ctrl-C in the first second
            sys.stderr.write("memfit: error: interrupted\n")
            sys.exit(_INTERRUPTED)
        status = main()
        if "triton" not in sys.modules:  # which tells at the exit what was not freed before
            gc.freeze()  # the last collection of all ops of a long step takes a second, and the exit frees them anyway
    sys.exit(status)


if __name__ == "__main__":
    run()
