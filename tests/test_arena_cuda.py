"""The arena on CUDA: its C++ side over a faked CUDA runtime, and over the real one where there is a GPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import memfit
from memfit.errors import InvalidDeviceError, UnsupportedStepError

# The runtime's functions that the arena calls, over malloc, with a log of what streams were made to wait for.
FAKE_RUNTIME = r"""
#include <cstdlib>
#include <cstdint>
extern "C" {
int64_t mallocs = 0, frees = 0, waits = 0, records = 0, synchronizations = 0, full = 0, last_error = 0;
int cudaMallocAsync(void** p, size_t n, void*) {
  if (full) return last_error = 2;
  ++mallocs;
  return posix_memalign(p, 512, n);
}
int cudaGetLastError() { const int error = last_error; last_error = 0; return error; }
int cudaFreeAsync(void* p, void*) { ++frees; free(p); return 0; }
int cudaSetDevice(int) { return 0; }
int cudaGetDevice(int* d) { *d = 0; return 0; }
int cudaEventCreateWithFlags(void** e, unsigned) { *e = malloc(1); return 0; }
int cudaEventRecord(void*, void*) { ++records; return 0; }
int cudaEventDestroy(void* e) { free(e); return 0; }
int cudaStreamWaitEvent(void*, void*, unsigned) { ++waits; return 0; }
int cudaDeviceSynchronize() { ++synchronizations; return 0; }
int cudaDeviceGetDefaultMemPool(void** p, int) { *p = nullptr; return 0; }
int cudaMemPoolSetAttribute(void*, int, void*) { return 0; }
}
"""

WITH_FAKE_RUNTIME = r"""
import ctypes, sys, threading
fake = ctypes.CDLL(sys.argv[1], mode=ctypes.RTLD_GLOBAL)
import torch
from memfit.runtime import arena as rooms
from memfit.runtime.arena_cuda import CudaArenaLibrary
from memfit.runtime.arena_library import load_arena_library

raw = load_arena_library("cuda").library
raw.memfit_arena_cuda_malloc.restype = ctypes.c_void_p
raw.memfit_arena_cuda_malloc.argtypes = [ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]
raw.memfit_arena_cuda_free.argtypes = [ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]
raw.memfit_arena_cuda_record_stream.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
raw.memfit_arena_cuda_free.restype = raw.memfit_arena_cuda_record_stream.restype = None
assert raw.memfit_arena_cuda_prepare(0) == 0
library = CudaArenaLibrary(raw, 0)
rooms._library_for = lambda device: library
STREAM = 0
torch.cuda.current_stream = lambda index: type("S", (), {"cuda_stream": STREAM})

def allocate(size, stream=0):
    return raw.memfit_arena_cuda_malloc(size, 0, stream)

def free(pointer, stream=0):
    raw.memfit_arena_cuda_free(pointer, 0, 0, stream)

def count(name):
    return ctypes.c_int64.in_dll(fake, name).value

arena = rooms.Arena(device="cuda")
box = []
for number in range(4):
    with arena.step():
        first = allocate(1000)
        other = allocate(700, stream=64)  # another stream: ordinary
        thread = threading.Thread(target=lambda: box.append(allocate(2000)))  # backward's thread, same stream
        thread.start()
        thread.join()
        second = box.pop()
        before = count("waits")
        if number == 3:
            raw.memfit_arena_cuda_record_stream(first, 64)
            raw.memfit_arena_cuda_record_stream(first, 64)
            raw.memfit_arena_cuda_record_stream(second, 0)
        inside = [library.owns(arena._handle, p) for p in (first, second, other)]
        free(first)
        free(second)
        assert count("waits") - before == (number == 3), count("waits") - before
        third = allocate(3000)
        free(third)
        free(other, 64)
    print(number, inside, arena.last_step.served, arena.last_step.other_threads, arena.height_bytes)
STREAM = 64
try:
    with arena.step():
        pass
except Exception as error:
    print(error)
STREAM = 0
with arena.step():
    kept = allocate(1000)
arena.close()
frees = count("frees")
free(kept)
assert count("frees") == frees + 1, "the memory goes with the last tensor in it"
assert count("mallocs") == count("frees"), (count("mallocs"), count("frees"))
other = rooms.Arena(device="cuda")
ctypes.c_int64.in_dll(fake, "full").value = 1
assert raw.memfit_arena_resize(other._handle, 4096) == 1
assert count("last_error") == 0, "or torch's next kernel would be blamed"
"""


@pytest.fixture(scope="module")
def fake_runtime(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fake")
    (folder / "fake.cpp").write_text(FAKE_RUNTIME)
    subprocess.run(["c++", "-shared", "-fPIC", "fake.cpp", "-o", "libfake.so"], cwd=folder, check=True)
    return folder / "libfake.so"


def test_the_calls_over_a_faked_runtime(fake_runtime: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITH_FAKE_RUNTIME, str(fake_runtime)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    *steps, refused = done.stdout.strip().splitlines()
    assert steps[0] == "0 [False, False, False] 0 1 3072"
    assert steps[1:] == [f"{number} [True, True, False] 3 1 3072" for number in (1, 2, 3)]
    assert "another CUDA stream than the arena's first step" in refused


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_device_it_says_so() -> None:
    for device in ("cuda", "cuda:0"):
        with pytest.raises(InvalidDeviceError, match=f"no arena on device '{device}'"):
            memfit.arena(device=device)


ON_A_DEVICE = r"""
import torch, memfit
arena = memfit.arena(device="cuda")
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 16)).cuda()
batch = torch.randn(64, 256, device="cuda")
losses = []
for number in range(8):
    model.zero_grad()
    with arena.step() if number % 2 else torch.enable_grad():
        loss = model(batch).square().mean()
        loss.backward()
        loss = loss.detach()
    losses.append((loss.item(), model[0].weight.grad.sum().item()))
assert len(set(losses)) == 1, losses
assert arena.last_step.not_served == 0 and arena.served > 0, arena
assert arena.height_bytes % 512 == 0
print("fine")
"""


@pytest.mark.gpu
def test_on_a_device() -> None:
    done = subprocess.run([sys.executable, "-c", ON_A_DEVICE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "fine"


@pytest.mark.gpu
def test_it_has_to_come_first() -> None:
    code = "import torch, memfit; torch.zeros(1, device='cuda'); memfit.arena(device='cuda')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "before anything is put on the device" in done.stderr


@pytest.mark.gpu
def test_planned_steps_on_a_device_have_no_arena() -> None:
    model = torch.nn.Linear(8, 1).cuda()
    with pytest.raises(UnsupportedStepError, match="planned steps on a CPU"):
        memfit.fit(model, lambda m, b: m(b).sum(), torch.randn(4, 8, device="cuda"), budget="1GiB", arena=True)
