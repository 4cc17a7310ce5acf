"""The interpreter's end, with threads that hold what needs Python's lock."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

# Without a pause Python's lock is passed on only where somebody waits: gloo's thread is left with what it was lent.
_RANK = """
import os
import sys
import torch.distributed as dist
from memfit.step.agreement import agreement_of

dist.init_process_group("gloo", store=dist.FileStore(sys.argv[2], 2), rank=int(sys.argv[1]), world_size=2)
agreement = agreement_of(dist.group.WORLD)
sys.setswitchinterval(1000)
for number in range(200):
    assert agreement.numbers("counting", number) == [(number,), (number,)]
if sys.argv[3] == "forked":
    child = os.fork()
    if child == 0:
        sys.exit(0)
    os.waitpid(child, 0)
    assert agreement.numbers("after the child", 1) == [(1,), (1,)]
if sys.argv[3] == "destroyed":
    dist.destroy_process_group()
"""


@pytest.mark.slow
def test_ranks_end_while_gloos_threads_hold_tensors(tmp_path: Path) -> None:
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", _RANK, str(rank), str(tmp_path / f"store-{pair}"), end],
            stderr=subprocess.PIPE,
            text=True,
        )
        for pair, end in enumerate(["left", "left", "forked", "destroyed"])
        for rank in range(2)
    ]
    errors = [run.communicate(timeout=240)[1] for run in runs]
    assert [run.returncode for run in runs] == [0] * len(runs), "\n".join(errors)
