"""Each claim of the five papers: the script or test that shows it, run again, and what its result says.

Without a row, the rows are listed. With one, its command runs here and stores its results for this machine, as it
always does; then the row is printed with our figure beside the paper's. `git diff benchmarks/results` shows what has
changed since the stored run.

    make evidence                          # list the rows
    make evidence ROW=chen-figure-5        # run one of them; minutes, for some of them hours
    python benchmarks/evidence.py feng-table-1-time --stored      # tell what is stored, and run nothing
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
from pathlib import Path

from _claims import CLAIMS, Claim, claim_named, found_of
from _record import machine_name
from tables import results_of

from memfit.errors import InvalidOptionError

ROOT = Path(__file__).parents[1]


def words_of(claim: Claim) -> list[str]:
    """Return the command line of a claim, from the root of the repository; empty where nothing shows it."""
    if not claim.command:
        return []
    return [sys.executable, *(("-m", "pytest", "-q", "-n", "0") if claim.is_test else ()), *claim.command]


def told(claim: Claim, machine: str) -> list[str]:
    """Return the lines of a claim, by what is stored for a machine."""
    try:
        text, verdict = found_of(claim, lambda script: results_of(script, machine))
    except (KeyError, ValueError):
        text, verdict = f"nothing is stored for {machine}", "unknown"
    return [
        f"{claim.paper}. {claim.claim}",
        f"  in             {claim.module}",
        f"  held against   {claim.against}",
        f"  reproduced as  {text}",
        f"  verdict        {verdict}",
    ]


def main() -> int:
    """List the rows, or run one; return the exit status of its command, 2 for an unknown row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("row", nargs="?", metavar="ROW", help="a row of the last table of docs/papers.md")
    parser.add_argument("--stored", action="store_true", help="tell what is stored, and run nothing")
    parser.add_argument("--machine", default=machine_name(), help="with --stored: folder of benchmarks/results to read")
    options = parser.parse_args()
    if options.row is None:
        for claim in CLAIMS:
            print(f"{claim.row:32} {claim.paper:14} {' '.join(claim.command) or '-'}")
        return 0
    try:
        claim = claim_named(options.row)
    except InvalidOptionError as error:
        print(f"evidence: {error}", file=sys.stderr)
        return 2
    machine = options.machine
    if not options.stored and claim.command:
        print(f"$ {shlex.join(['python', *words_of(claim)[1:]])}", flush=True)
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        status = subprocess.run(
            words_of(claim), cwd=ROOT, env=os.environ | {"PYTHONPATH": path}, check=False
        ).returncode
        machine = machine_name()
        if status:
            print(f"evidence: what shows {claim.row!r} ended with status {status}: no verdict", file=sys.stderr)
            return status
    print("\n".join(told(claim, machine)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
