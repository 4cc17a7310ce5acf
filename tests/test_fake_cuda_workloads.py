"""Each workload's planned step on a CUDA device that is not here, with an arena, copies to the host and corrections.

Freed memory is overwritten, and copies are made as late as their streams allow (`fake_streams`).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import fake_streams
import pytest
import torch
from fake_device import build_fakes
from fake_streams import COMPUTE, CopyStream

from memfit.memory.host.slab import PinnedSlab
from memfit.memory.host.store import HostCopy

GROUPS: tuple[dict[str, dict[str, Any]], ...] = (
    {
        "lstm": {"batch": 16, "steps": 9, "width": 64},
        "gpt2": {"batch": 2, "tokens": 32, "layers": 2, "width": 64, "head_width": 16, "vocabulary": 50},
        "encoder": {"batch": 8, "tokens": 16, "layers": 2, "width": 64, "head_width": 16, "feedforward": 128},
    },
    {
        "vgg16": {"batch": 2, "size": 32, "classes": 4, "depth": 11},
        "unet": {"batch": 2, "size": 32, "width": 4, "levels": 3},
        "resnet50": {"batch": 4, "size": 32, "classes": 4, "depth": 18},
    },
    {
        "inceptionv3": {"batch": 2, "size": 107, "classes": 4},
        "densenet121": {"batch": 2, "size": 32, "classes": 4},
    },
)


@pytest.fixture(scope="module")
def fakes(tmp_path_factory: pytest.TempPathFactory) -> str:
    if torch.version.cuda:
        pytest.skip("this torch has a CUDA library of its own; benchmarks/cuda_arena.py is for it")
    if shutil.which("c++") is None:
        pytest.skip("no C++ compiler: the stand-in of torch's CUDA library cannot be built")
    folder = tmp_path_factory.mktemp("fake")
    build_fakes(folder)
    return str(folder)


@pytest.mark.parametrize(
    "workloads",
    [
        pytest.param(group, id=" ".join(group), marks=[pytest.mark.slow] if "densenet121" in group else [])
        for group in GROUPS
    ],
)
def test_planned_steps_have_eagers_bits(fakes: str, workloads: dict[str, dict[str, Any]]) -> None:
    script = Path(__file__).with_name("fake_workloads.py")
    environment = os.environ | {"PYTHONPATH": str(script.parents[1])}
    command = [sys.executable, str(script), fakes, json.dumps(workloads)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [each["workload"] for each in found] == list(workloads)
    for each in found:
        assert each["not_served"] == 0 < each["served"], each
        assert each["corrections"] > 0, each
    assert sum(max(each["offloaded_bytes"]) > 0 for each in found) >= len(found) / 2
    assert found[-1]["late_copies"] > 0


def test_the_streams_find_copies_that_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fake itself: a copy is made when it is waited for, from what is at its address by then."""
    cuda: Any = torch.cuda
    for name in ("Stream", "stream", "device", "cudart", "current_stream"):
        monkeypatch.setattr(cuda, name, getattr(cuda, name))
    from memfit.memory.host import slab as slabs
    from memfit.memory.host import store

    monkeypatch.setattr(store, "make_slab", store.make_slab)
    monkeypatch.setattr(slabs, "alignment_bytes", slabs.alignment_bytes)

    fake_streams.install()
    slabs.copy_streams.cache_clear()
    try:
        slab = PinnedSlab(1 << 16, torch.device("cpu"))
        source = torch.full((1024,), 7.0)
        copied = HostCopy(slab, source, 0)
        COMPUTE.wait_event(copied._sent._done)
        source.fill_(1.0)  # freed and used again, after compute has waited
        copied.wait()
        back = copied.prefetch()
        copied.arrived()
        assert bool((back == 7.0).all())
        copied = HostCopy(slab, source, 0)
        source.fill_(2.0)  # too early
        copied.wait()
        back = copied.prefetch()
        assert not bool((back == 2.0).all()), "not there yet"
        copied.arrived()
        assert bool((back == 2.0).all()), "what was there when the copy was made at last"
        assert sum(isinstance(stream, CopyStream) for stream in fake_streams.made) >= 2
    finally:
        slabs.copy_streams.cache_clear()


def test_freed_memory_is_overwritten(fakes: str) -> None:
    code = (
        "import sys, torch; from fake_device import start_with_tensors; start_with_tensors(sys.argv[1])\n"
        "kept, freed = torch.ones(64), torch.ones(4096)\n"
        "address = freed.data_ptr(); del freed\n"
        "again = torch.empty(4096)\n"
        "print(again.data_ptr() == address, bool((again == 1).any()), bool((kept == 1).all()))"
    )
    environment = os.environ | {"PYTHONPATH": f"{Path(__file__).parents[1]}{os.pathsep}{Path(__file__).parent}"}
    done = subprocess.run(
        [sys.executable, "-c", code, fakes], capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[1:] == ["False", "True"]
