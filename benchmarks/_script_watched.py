"""A script, as it is or under `memfit run`, in a process whose most bytes are recorded from outside of both.

python benchmarks/_script_watched.py PEAK_FILE plain SCRIPT ARGUMENTS...
python benchmarks/_script_watched.py PEAK_FILE auto:12345678 SCRIPT ARGUMENTS...
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from memfit.commands.run import main as run_script
from memfit.system.recorder import record
from memfit.system.script import Script

if __name__ == "__main__":
    peak_file, how, *words = sys.argv[1:]
    recorded = record("cpu")
    usage = recorded.__enter__()
    began = time.perf_counter()
    try:
        if how == "plain":
            Script.of_file(words[0], words[1:]).run()
        else:
            door, _, budget = how.partition(":")
            sys.exit(run_script(["--budget", budget, "--door", door, words[0], "--", *words[1:]]))
    finally:
        seconds = time.perf_counter() - began
        recorded.__exit__(None, None, None)
        answer = {"peak_bytes": usage.peak_bytes, "seconds": round(seconds, 2)}
        Path(f"{peak_file}.{os.environ.get('RANK', '0')}").write_text(json.dumps(answer))
