"""The recorder against sizes computed by hand, against torch's profiler, and without a compiler."""

from __future__ import annotations

import gc
import hashlib
import os
import re
import subprocess
import sys
import threading
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from memfit.errors import InvalidDeviceError, MemfitError
from memfit.system import instruments, native, recorder
from memfit.system.cpu_limit import CpuLimit
from memfit.system.native import NativeLibraryError
from memfit.system.recorder import Usage, allocated_bytes, record, records_at_once, watch
from memfit.workloads import build

KIB = 1024
ONE_KIB_FLOATS = KIB // 4


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def conv_net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, stride=2, groups=4),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, 10),
    )


def test_peak_and_ends_are_the_sizes_asked_for():
    first = torch.empty(3 * ONE_KIB_FLOATS)
    with record("cpu") as usage:
        second = torch.empty(10 * ONE_KIB_FLOATS)
        del second
        third = torch.empty(4 * ONE_KIB_FLOATS)
    assert usage.peak_bytes == 10 * KIB
    assert usage.end_bytes - usage.start_bytes == 4 * KIB
    assert usage.source == "cpu allocator"
    assert usage.reserved_bytes is None
    del first, third


def test_peak_is_relative_to_what_was_live():
    held = torch.empty(8 * ONE_KIB_FLOATS)
    with record("cpu") as usage:
        del held
        smaller = torch.empty(5 * ONE_KIB_FLOATS)
    assert usage.peak_bytes == 0
    assert usage.end_bytes == usage.start_bytes - 3 * KIB
    del smaller


def test_allocated_bytes_follows_each_tensor():
    before = allocated_bytes("cpu")
    held = torch.empty(7 * ONE_KIB_FLOATS)
    assert allocated_bytes("cpu") == before + 7 * KIB
    del held
    assert allocated_bytes("cpu") == before


def test_views_cost_nothing_and_hold_their_base():
    with record("cpu") as usage:
        base = torch.empty(16 * ONE_KIB_FLOATS)
        row = base.view(16, ONE_KIB_FLOATS)[3]
        del base
    assert usage.peak_bytes == 16 * KIB
    assert usage.end_bytes - usage.start_bytes == 16 * KIB
    before = allocated_bytes("cpu")
    del row
    assert allocated_bytes("cpu") == before - 16 * KIB


def test_growing_a_storage_holds_both_copies():
    grown = torch.empty(ONE_KIB_FLOATS)
    with record("cpu") as usage:
        grown.untyped_storage().resize_(6 * KIB)
    assert usage.peak_bytes == 6 * KIB
    assert usage.end_bytes - usage.start_bytes == 5 * KIB


def test_nested_records_each_have_their_own_peak():
    with record("cpu") as outer:
        early = torch.empty(9 * ONE_KIB_FLOATS)
        del early
        held = torch.empty(2 * ONE_KIB_FLOATS)
        with record("cpu") as inner:
            torch.empty(3 * ONE_KIB_FLOATS)
        with record("cpu") as second:
            torch.empty(4 * ONE_KIB_FLOATS)
    assert (inner.peak_bytes, second.peak_bytes, outer.peak_bytes) == (3 * KIB, 4 * KIB, 9 * KIB)
    assert inner.start_bytes == outer.start_bytes + 2 * KIB
    del held


def test_records_that_overlap_without_nesting():
    first, second = record("cpu"), record("cpu")
    usage_first = first.__enter__()
    torch.empty(ONE_KIB_FLOATS)
    usage_second = second.__enter__()
    torch.empty(5 * ONE_KIB_FLOATS)
    first.__exit__(None, None, None)
    torch.empty(8 * ONE_KIB_FLOATS)
    second.__exit__(None, None, None)
    assert (usage_first.peak_bytes, usage_second.peak_bytes) == (5 * KIB, 8 * KIB)


def test_record_closes_on_an_exception():
    with pytest.raises(RuntimeError, match="in the middle"), record("cpu") as usage:
        torch.empty(2 * ONE_KIB_FLOATS)
        raise RuntimeError("in the middle")
    assert usage.peak_bytes == 2 * KIB
    for _ in range(70):  # more than there are windows: each was given back
        with pytest.raises(KeyError), record("cpu"):
            raise KeyError
    with record("cpu") as usage:
        torch.empty(3 * ONE_KIB_FLOATS)
    assert usage.peak_bytes == 3 * KIB


def test_more_records_than_windows_are_refused():
    opened: list[AbstractContextManager[Usage]] = []
    try:
        with pytest.raises(MemfitError, match="64 records are open"):
            for _ in range(65):  # fewer where something in this process holds a record already
                one = record("cpu")
                one.__enter__()
                opened.append(one)
        assert opened
    finally:
        for one in opened:
            one.__exit__(None, None, None)


def test_a_record_that_nobody_can_end_takes_no_window():
    for _ in range(100):
        record("cpu").__enter__()
    for _ in range(100):
        opened: list[object] = [record("cpu")]
        opened.append(opened)  # a cycle, which goes when there are no more windows
        opened[0].__enter__()  # type: ignore[attr-defined]
    with record("cpu") as usage:
        kept = torch.empty(ONE_KIB_FLOATS)
    assert usage.peak_bytes == kept.nbytes


def test_what_other_threads_of_python_allocate_is_theirs():
    threads_count, rounds = 4, 300
    ready, done = threading.Barrier(threads_count + 1), threading.Barrier(threads_count + 1)
    kept: list[torch.Tensor] = []
    usages: list[Usage] = []

    def allocate(kib: int) -> None:
        ready.wait()
        with record("cpu") as usage:
            for _ in range(rounds):
                torch.empty(kib * ONE_KIB_FLOATS)
            mine = torch.empty(2 * ONE_KIB_FLOATS)
        usages.append(usage)
        kept.append(mine)
        done.wait()

    before = allocated_bytes("cpu")
    threads = [threading.Thread(target=allocate, args=(3 + number,)) for number in range(threads_count)]
    for thread in threads:
        thread.start()
    with record("cpu") as usage:
        ready.wait()
        early = torch.empty(5 * ONE_KIB_FLOATS)
        del early
        late = torch.empty(ONE_KIB_FLOATS)
        done.wait()
        kept.pop()  # another thread's memory, freed by this one
    assert (usage.peak_bytes, usage.end_bytes - usage.start_bytes) == (5 * KIB, KIB)
    assert sorted(usage.peak_bytes for usage in usages) == [3 * KIB, 4 * KIB, 5 * KIB, 6 * KIB]
    assert {usage.end_bytes - usage.start_bytes for usage in usages} == {2 * KIB}
    for thread in threads:
        thread.join()
    kept.clear()
    del late
    assert allocated_bytes("cpu") == before


def test_threads_that_kernels_use_are_counted():
    torch.set_num_threads(2)
    image, convolution = torch.randn(8, 64, 32, 32), nn.Conv2d(64, 64, 3, padding=1)
    with torch.no_grad(), record("cpu") as usage:
        result = convolution(image)
    assert usage.peak_bytes >= result.untyped_storage().nbytes() == usage.end_bytes - usage.start_bytes


def test_scratch_memory_of_a_convolution_is_seen():
    convolution = nn.Conv2d(64, 128, 3, padding=1)
    image = torch.randn(2, 64, 56, 56)
    with torch.no_grad(), record("cpu") as usage:
        result = convolution(image)
    assert usage.end_bytes - usage.start_bytes == result.nbytes
    assert usage.peak_bytes > result.nbytes


def test_peak_equals_the_profilers_on_a_conv_net():
    torch.manual_seed(0)
    model, image = conv_net(), torch.randn(4, 3, 48, 48)

    def drop_gradients() -> None:
        model.zero_grad(set_to_none=True)  # outside: the profiler sees no free of what it saw nobody allocate
        gc.collect()

    drop_gradients()
    with record("cpu") as usage:
        model(image).logsumexp(1).sum().backward()
    drop_gradients()
    by_profiler = instruments.Profiler(source="torch.profiler")
    reference = recorder.Usage(source="torch.profiler")
    token = by_profiler.open(reference)
    model(image).logsumexp(1).sum().backward()
    by_profiler.close(reference, token)
    assert usage.peak_bytes == reference.peak_bytes
    assert usage.peak_bytes > 4 * 32 * 48 * 48 * 4  # more than the first activation


@pytest.mark.slow
def test_resnet50_peak_is_the_published_figure():
    """677.5 MiB, parameters and inputs not counted."""
    torch.set_num_threads(2)
    step = build("resnet50")
    with record("cpu") as usage:
        step.compute_loss(step.model, step.batch).backward()
    assert usage.peak_bytes / 2**20 == pytest.approx(677.567, abs=0.2)


def test_memory_from_before_the_recorder_is_freed_uncounted():
    code = """
import torch
from memfit.system.recorder import allocated_bytes
early = [torch.empty(1024) for _ in range(100)]
counts = [allocated_bytes("cpu")]
late = torch.empty(256)
early.clear()
counts.append(allocated_bytes("cpu"))
del late
counts.append(allocated_bytes("cpu"))
print(counts)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[0, 1024, 0]"


def test_two_processes_build_at_once(tmp_path: Path):
    environment = {**os.environ, "MEMFIT_CACHE": str(tmp_path)}
    code = "import torch, memfit.system.recorder as r; print(r.allocated_bytes('cpu'))"
    running = [
        subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    assert [process.communicate(timeout=100)[0].strip() for process in running] == ["0", "0"]
    (built,) = (path.name for path in tmp_path.rglob("*") if path.is_file())
    assert re.fullmatch(r"recorder-[0-9a-f]{32}\.so", built)


@pytest.fixture
def without_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MEMFIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(instruments, "instruments", {})


@pytest.mark.usefixtures("without_compiler")
def test_without_a_compiler_the_profiler_records_and_says_so():
    held = torch.empty(2 * ONE_KIB_FLOATS)
    with record("cpu") as outer:
        early = torch.empty(9 * ONE_KIB_FLOATS)
        del early
        kept = torch.empty(ONE_KIB_FLOATS)
        with record("cpu") as inner:
            torch.empty(3 * ONE_KIB_FLOATS)
        late = torch.empty(6 * ONE_KIB_FLOATS)
        del kept
    assert outer.source.startswith("torch.profiler, because")
    assert "there is no C++ compiler (c++, g++ or clang++) on the PATH" in outer.source
    assert (inner.peak_bytes, outer.peak_bytes) == (3 * KIB, 9 * KIB)
    assert inner.start_bytes - outer.start_bytes == KIB
    assert outer.end_bytes - outer.start_bytes == 6 * KIB
    with pytest.raises(MemfitError, match="no C\\+\\+ compiler"):
        allocated_bytes("cpu")
    del held, late


def test_the_profiler_in_the_recorders_place_writes_no_lines(tmp_path: Path):
    """Nor is a variable left in the environment."""
    code = "import os, torch\nfrom memfit.system.recorder import record\n"
    code += "with record('cpu') as usage: torch.empty(256)\n"
    code += "assert usage.source.startswith('torch.profiler') and 'KINETO_LOG_LEVEL' not in os.environ"
    environment = {**os.environ, "MEMFIT_CACHE": str(tmp_path), "CXX": "no-such-compiler"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_failing_compiler_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MEMFIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", "false")
    with pytest.raises(NativeLibraryError, match="false failed"):
        instruments.load_library()
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]


@pytest.fixture
def _copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a compiler that copies the library which this process has built: the real one takes three seconds."""
    compiler = tmp_path / "copies"
    compiler.write_text(
        f"""#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\ncp "{instruments.LIBRARY.file()}" "$2"\n"""
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))


def test_a_library_is_built_beside_other_work_once(_copied: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MEMFIT_CACHE", str(tmp_path / "cache"))
    library = replace(instruments.LIBRARY, folders=list)  # which this process has not begun to build
    assert library.build_beside()
    assert not library.build_beside()
    file = library.file()  # waits for it
    assert list((tmp_path / "cache").rglob("*.so")) == [file]
    assert not replace(library, folders=list).build_beside(), "the cache has it"


@pytest.fixture
def built(_copied: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a library that was built into a cache of its own; its users run in processes of their own."""
    monkeypatch.setenv("MEMFIT_CACHE", str(tmp_path / "cache"))
    return instruments.LIBRARY.file()


def count_in_a_process() -> tuple[int, str]:
    """Return what a new process counts for a tensor of 1 KiB, and its warnings."""
    code = "import logging, torch, memfit.system.recorder as r; logging.basicConfig(); "
    code += "before = r.allocated_bytes('cpu'); held = torch.empty(256); print(r.allocated_bytes('cpu') - before)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stderr
    return int(done.stdout), done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("kept_bytes", [0, 100, 4096, -1])
def test_a_library_that_was_cut_is_built_again(built: Path, kept_bytes: int):
    whole = built.read_bytes()
    built.write_bytes(whole[:kept_bytes])
    assert count_in_a_process() == (KIB, "")
    assert built.read_bytes() == whole


@pytest.mark.parametrize("opened", ["file", "folder"])
def test_a_library_that_others_can_write_to_is_not_opened(built: Path, opened: str):
    planted = b"no library at all"
    place = built.with_name(f"recorder-{hashlib.sha256(planted).hexdigest()[:32]}.so")
    place.write_bytes(planted)
    if opened == "file":
        place.chmod(0o666)
        built.unlink()
    else:
        built.parent.chmod(0o777)
    assert instruments.LIBRARY.file() == built  # built again, in a folder that is private again
    assert built.parent.stat().st_mode & 0o777 == 0o700


def test_a_library_of_another_user_is_not_opened(built: Path, monkeypatch: pytest.MonkeyPatch):
    if os.geteuid() == 0:  # who is trusted: let them be of a user who is not
        for path in (built, built.parent):
            os.chown(path, 12345, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: built.stat().st_uid + 1)
    apart = instruments.LIBRARY.file()
    assert not apart.is_relative_to(built.parent)
    assert apart.name == built.name


@pytest.mark.usefixtures("_copied")
@pytest.mark.parametrize("where", ["file/cache", "/proc/memfit"])
def test_a_cache_that_cannot_be_written_costs_a_build(where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MEMFIT_CACHE", str(tmp_path / where))
    counted, warned = count_in_a_process()
    assert counted == KIB
    assert "recorder is not kept" in warned
    assert "MEMFIT_CACHE names another folder" in warned


def test_a_full_disk_leaves_the_profiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    compiler = tmp_path / "full"
    compiler.write_text("#!/bin/sh\necho 'as: recorder.o: No space left on device' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("MEMFIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(instruments, "instruments", {})
    native.built_apart.cache_clear()
    with record("cpu") as usage:
        held = torch.empty(ONE_KIB_FLOATS)
    assert usage.peak_bytes == held.untyped_storage().nbytes() == KIB
    assert "no folder has room for recorder: No space left on device" in usage.source


@pytest.mark.parametrize("device", ["meta", "cuda:99"])
def test_a_device_that_cannot_be_recorded_is_refused(device: str):
    with pytest.raises(InvalidDeviceError, match=f"'{device}' cannot be recorded"):
        record(device)


def test_an_allocator_without_statistics_is_refused(monkeypatch: pytest.MonkeyPatch):
    def none(_device: torch.device) -> int:
        raise RuntimeError("CUDAPluggableAllocator does not yet support getDeviceStats")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "caching_allocator_alloc", lambda *_: 1)
    monkeypatch.setattr(torch.cuda, "caching_allocator_delete", lambda _pointer: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", none)
    monkeypatch.setattr(instruments, "instruments", {})
    with pytest.raises(InvalidDeviceError, match="counts none of the bytes"):
        record(torch.device("cuda", 0))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_cuda_records_nest():
    with record("cuda") as outer:
        early = torch.empty(9 << 20, dtype=torch.uint8, device="cuda")
        del early
        kept = torch.empty(1 << 20, dtype=torch.uint8, device="cuda")
        with record("cuda") as inner:
            torch.empty(3 << 20, dtype=torch.uint8, device="cuda")
    assert (inner.peak_bytes, outer.peak_bytes) == (3 << 20, 9 << 20)
    assert outer.end_bytes - outer.start_bytes == 1 << 20
    assert outer.reserved_bytes is not None and outer.reserved_bytes >= 9 << 20
    del kept


def test_unused_memory_is_returned_by_the_instrument_that_counts_it(monkeypatch: pytest.MonkeyPatch):
    returned: list[str] = []

    class Pool(instruments.Instrument):
        source = "a pool"

        def open(self, usage: recorder.Usage) -> int:
            return usage.start_bytes

        def close(self, usage: recorder.Usage, token: int) -> None:
            usage.end_bytes = token

        def live_bytes(self) -> int:
            return 0

        def empty_cache(self) -> None:
            returned.append("all")

    device = torch.device("cuda", 7)
    monkeypatch.setitem(instruments.instruments, device, Pool())
    recorder.empty_cache(device)
    assert returned == ["all"]


def test_cuda_is_watched_without_setting_its_peak_back(monkeypatch: pytest.MonkeyPatch):
    """Torch's statistics are stood in for; a peak below an earlier one of the process cannot be seen in them."""
    device = torch.device("cuda", 7)
    bytes_now = {"current": 100, "peak": 900}
    monkeypatch.setattr(
        torch.cuda, "memory_stats_as_nested_dict", lambda _device: {"allocated_bytes": {"all": bytes_now.copy()}}
    )
    monkeypatch.setitem(instruments.instruments, device, instruments.CudaStatistics(source="test", device=device))
    assert records_at_once(device)
    with watch(device) as usage:
        bytes_now |= {"current": 150, "peak": 1000}
    assert (usage.peak_bytes, usage.end_bytes - usage.start_bytes) == (900, 50)
    with watch(device) as usage:
        bytes_now["current"] = 120
    assert (usage.peak_bytes, usage.taken_bytes) == (0, 0)


def _sums_of_a_transformation():
    return torch.func.vmap(lambda row: torch.outer(row, row).sum(0))(torch.ones(8, 64))


@pytest.mark.parametrize(
    "take",
    [
        lambda: torch.full((8 * ONE_KIB_FLOATS,), 2.0),
        lambda: torch.ones(64, 64) @ torch.ones(64, 64),
        lambda: torch.ops.aten.sin(torch.ones(8 * ONE_KIB_FLOATS)),
        lambda: torch.tensor([1.0] * 8 * ONE_KIB_FLOATS),
        _sums_of_a_transformation,
    ],
)
def test_room_is_asked_for_before_memory_is_taken(take: Any):
    asked: list[int] = []
    expected, held = take(), [torch.empty(8 * ONE_KIB_FLOATS)]

    def make_room(need_bytes: int) -> None:
        asked.append(need_bytes)
        held.clear()
        torch.ones(64 * KIB).sum()  # is not asked for

    with record("cpu") as usage, CpuLimit(allocated_bytes("cpu") + 6 * KIB, make_room):
        assert torch.equal(take(), expected)
    assert asked and max(asked) >= 8 * KIB
    assert usage.peak_bytes > 0


def test_memory_that_is_refused_is_not_taken():
    with record("cpu") as usage:
        with CpuLimit(allocated_bytes("cpu") + KIB, lambda need_bytes: f"no {need_bytes} bytes are left"):
            with pytest.raises(torch.OutOfMemoryError, match="no 8192 bytes are left"):
                torch.ops.aten.exp(torch.empty(8 * ONE_KIB_FLOATS))
            small = torch.empty(ONE_KIB_FLOATS)
        large = torch.empty(8 * ONE_KIB_FLOATS)
    assert usage.peak_bytes == small.nbytes + large.nbytes


def test_the_innermost_limit_of_a_thread_counts():
    asked: list[str] = []
    elsewhere: list[torch.Tensor] = []
    with CpuLimit(allocated_bytes("cpu"), lambda _: asked.append("outer")):
        with CpuLimit(allocated_bytes("cpu") + KIB, lambda _: asked.append("inner")):
            torch.empty(ONE_KIB_FLOATS)
            torch.empty(2 * ONE_KIB_FLOATS)
        torch.empty(ONE_KIB_FLOATS)
        thread = threading.Thread(target=lambda: elsewhere.append(torch.empty(8 * ONE_KIB_FLOATS)))
        thread.start()
        thread.join()
    torch.empty(ONE_KIB_FLOATS)
    assert asked == ["inner", "outer"]


def test_a_worker_that_is_forked_has_no_limit():
    program = """
import os, torch
from memfit.system.cpu_limit import CpuLimit
from memfit.system.recorder import allocated_bytes
with CpuLimit(allocated_bytes("cpu"), lambda _: "no"):
    child = os.fork()
    if child == 0:
        torch.empty(1024)
        os._exit(0)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=True)
    assert ran.stdout.strip() == "0"
