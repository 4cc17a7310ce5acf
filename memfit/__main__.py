"""The program `memfit`, which `python -m memfit` runs too."""

import gc
import sys
from typing import NoReturn

from memfit.cli import main


def run() -> NoReturn:
    """Run the command of `sys.argv`, and exit with its status."""
    status = main()
    gc.freeze()  # the last collection of all ops of a long step takes a second, and frees what the exit frees anyway
    sys.exit(status)


if __name__ == "__main__":
    run()
