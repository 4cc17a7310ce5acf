"""The arena on CUDA: its C++ side over a faked CUDA runtime, and over the real one where there is a GPU."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fake_device import build_fakes

import memfit
from memfit.errors import InvalidDeviceError

ON_THE_FAKE = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"


def run(code: str, *arguments: str) -> str:
    """Run code over the fakes in the folder of the first argument; they come before a runtime of torch's own."""
    command = [sys.executable, "-c", code, *arguments]
    preloaded = {"LD_PRELOAD": f"{arguments[0]}/runtime.so"} if arguments and torch.version.cuda else {}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | preloaded)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture(scope="module")
def fakes(tmp_path_factory: pytest.TempPathFactory) -> str:
    if shutil.which("c++") is None:
        pytest.skip("no C++ compiler: the faked CUDA runtime cannot be built")
    folder = tmp_path_factory.mktemp("fake")
    build_fakes(folder)
    return str(folder)


CALLS = r"""
import threading
from fake_device import start
fake = start(sys.argv[1])
from memfit.runtime.arena.arena import Arena

arena = Arena(device="cuda")
box = []
for number in range(4):
    with arena.step():
        first = fake.malloc(1000)
        other = fake.malloc(700, stream=64)  # another stream: ordinary
        thread = threading.Thread(target=lambda: box.append(fake.malloc(2000)))  # backward's thread, same stream
        thread.start()
        thread.join()
        second = box.pop()
        before = fake.number("waits").value
        if number == 3:
            fake.record_stream(first, 64)
            fake.record_stream(first, 64)
            fake.record_stream(second, 0)
        inside = [arena._library.owns(arena._handle, p) for p in (first, second, other)]
        fake.free(first)
        fake.free(second)
        assert fake.number("waits").value - before == (number == 3)
        third = fake.malloc(3000)
        fake.free(third)
        fake.free(other, stream=0)  # what torch may say of an address that another stream had before
    print(number, inside, arena.last_step.served, arena.last_step.other_threads, arena.height_bytes)
assert arena.held_bytes == arena.height_bytes == fake.usage()[0]
fake.stream[0] = 64
try:
    with arena.step():
        pass
except Exception as error:
    print(error)
fake.stream[0] = 0
with arena.step():
    kept = fake.malloc(1000)
arena.close()
frees = fake.number("frees").value
fake.free(kept)
assert fake.number("frees").value == frees + 1, "the memory goes with the last tensor in it"
assert fake.number("mallocs").value == fake.number("frees").value
assert fake.number("misplaced_frees").value == 0, "each block is freed on its own stream"
other = Arena(device="cuda")
fake.number("capacity_bytes").value = 0
assert fake.library.memfit_arena_resize(other._handle, 4096) == 1
assert fake.number("last_error").value == 0, "or torch's next kernel would be blamed"
"""


def test_the_calls_over_a_faked_runtime(fakes: str) -> None:
    *steps, refused = run(ON_THE_FAKE + CALLS, fakes).splitlines()
    assert steps[0] == "0 [False, False, False] 0 1 3072"
    assert steps[1:] == [f"{number} [True, True, False] 3 1 3072" for number in (1, 2, 3)]
    assert "another CUDA stream than the arena's first step" in refused


COUNTS = r"""
from fake_device import start
fake = start(sys.argv[1])
from memfit.runtime.arena.arena import Arena

MIB = 1 << 20
here, there = fake.malloc(1000), fake.malloc(3 * MIB, device=1)
assert fake.usage(0) == [1024, 1024, 2 * MIB, 2 * MIB], fake.usage(0)
assert fake.usage(1) == [3 * MIB, 3 * MIB, 4 * MIB, 4 * MIB], fake.usage(1)
fake.free(there, device=0, stream=64)
assert fake.usage(1) == [0, 3 * MIB, 4 * MIB, 4 * MIB], fake.usage(1)
fake.library.memfit_arena_cuda_reset_peaks(1)
assert fake.usage(1) == [0, 0, 4 * MIB, 4 * MIB], "what nobody uses is still held"
fake.library.memfit_arena_cuda_empty_cache()
assert fake.usage(1)[2] == 0
fake.library.memfit_arena_cuda_reset_peaks(1)
assert fake.usage(1) == [0, 0, 0, 0]

arena = Arena(device="cuda:1")
for _ in range(3):
    with arena.step():
        blocks = [fake.malloc(MIB, device=1) for _ in range(5)]
        for block in blocks:
            fake.free(block, device=1)
        assert fake.malloc(0, device=1) is None
        fake.free(None, device=1)
assert arena.last_step.served == 5
live, peak, held, most_held = fake.usage(1)
assert (live, held) == (5 * MIB, 6 * MIB), "the arena and nothing else"
assert most_held == 6 * MIB, "before the arena was made, what the first step had taken was given back"
arena.close()
assert fake.usage(1)[0] == 0
fake.free(here)
assert fake.number("misplaced_frees").value == 0

fake.free(fake.malloc(7 * MIB, device=1), device=1)
synchronizations = fake.number("synchronizations").value
fake.number("refusals").value = 1
fake.free(fake.malloc(8 * MIB, device=1), device=1)
assert fake.number("synchronizations").value == synchronizations + 1, "asked again after what was unused was given back"
assert fake.number("last_error").value == 0
print("counted")
"""


def test_bytes_are_counted_for_each_device(fakes: str) -> None:
    assert run(ON_THE_FAKE + COUNTS, fakes) == "counted"


PLANNED = r"""
import torch
from fake_device import start_with_tensors
fake = start_with_tensors(sys.argv[1])
import memfit
from memfit.system.recorder import allocated_bytes, record
from memfit.runtime.measure import resident_bytes

CPU = torch.device("cpu")

def net():
    torch.manual_seed(4)
    layers = [layer for _ in range(6) for layer in (torch.nn.Linear(256, 256), torch.nn.Tanh())]
    return torch.nn.Sequential(*layers, torch.nn.Dropout(), torch.nn.Linear(256, 4))

def loss(model, batch):
    return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])

def batch_of(seed, size=2048):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, 256, generator=generator), torch.randint(0, 4, (size,), generator=generator)

def trained(arena):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    step = memfit.fit(model, loss, batch_of(0), optimizer=optimizer, budget="80%", options={"iterations": 30_000},
                      arena=arena, verify=True)
    torch.manual_seed(1)
    return step, [step(batch_of(seed)) for seed in range(4)] + [p.detach() for p in model.parameters()]

assert record(CPU)._instrument.source == "the arena's counters"
torch.empty(256 << 20, dtype=torch.uint8)  # the device holds it unused from here on: no step may be charged with it
(plain, expected), (step, found) = trained(False), trained(True)
assert all(torch.equal(one, other) for one, other in zip(expected, found))
assert step.arena.last_step.not_served == 0 and step.arena.last_step.served > 20, step.arena
assert step.arena.held_bytes > 4 << 20

batch = batch_of(9)
before = resident_bytes(step, batch) + step.held_bytes
with record(CPU) as usage:
    step(batch)
took = before + usage.taken_bytes
assert usage.reserved_bytes >= usage.start_bytes >= before
measured = step.measure()
asked = step.settings.budget
assert took <= asked, (took, asked, step.plan.budget_bytes)
assert measured.peak_bytes >= measured.resident_bytes + step.arena.height_bytes
assert measured.peak_bytes <= 1.02 * step.plan.predicted.peak_bytes
assert measured.baseline_peak_bytes > asked >= measured.peak_bytes
assert measured.reserved_bytes >= allocated_bytes(CPU)
assert measured.source == "the arena's counters"
assert all(correction.aim_bytes for correction in step.corrections)

fake.number("capacity_bytes").value = fake.usage()[2]
try:
    torch.empty(64 << 20, dtype=torch.uint8)
except RuntimeError as error:
    print(error)
"""


@pytest.mark.slow
def test_a_planned_step_on_a_device_whose_bytes_are_counted(fakes: str) -> None:
    assert run(ON_THE_FAKE + PLANNED, fakes).startswith(f"CUDA out of memory: {64 << 20} bytes")


BECOMES_THE_ALLOCATOR = r"""
import ctypes
import torch
ctypes.CDLL(sys.argv[1] + "/runtime.so", mode=ctypes.RTLD_GLOBAL)
calls = []

class Allocator:
    def __init__(self, path, malloc, free):
        assert hasattr(ctypes.CDLL(path), malloc) and hasattr(ctypes.CDLL(path), free)
    def allocator(self):
        return self
    def set_record_stream_fn(self, address):
        calls.append("record_stream" if address else "nothing")
    def set_reset_fn(self, address):
        calls.append("empty_cache" if address else "nothing")

def change(_allocator):
    calls.append("change")
    if "uses CUDA" in sys.argv:
        raise RuntimeError("Can't swap an already initialized allocator")

def begins_to_use_cuda():
    calls.append("current_device")
    return 1

torch.cuda.is_available, torch.cuda.device_count = (lambda: True), (lambda: 2)
torch.cuda.current_device = begins_to_use_cuda
torch.cuda.memory.CUDAPluggableAllocator, torch.cuda.memory.change_current_allocator = Allocator, change
import memfit
from memfit.system.recorder import allocated_bytes
try:
    arena = memfit.arena(device="cuda")
    again = memfit.arena(device="cuda:0")
except memfit.MemfitError as error:
    print(error)
else:
    print(*calls, arena._library.index, again._library.index, allocated_bytes("cuda:0"), allocated_bytes("cuda:1"))
"""


def test_it_becomes_torchs_allocator_before_torch_uses_cuda(fakes: str) -> None:
    done = run(ON_THE_FAKE + BECOMES_THE_ALLOCATOR, fakes)
    assert done == "record_stream empty_cache change current_device 1 0 0 0"
    refused = run(ON_THE_FAKE + BECOMES_THE_ALLOCATOR, fakes, "uses CUDA")
    assert "call memfit.arena(device='cuda') at the beginning of the program" in refused


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
    assert run(ON_A_DEVICE) == "fine"


@pytest.mark.gpu
def test_it_has_to_come_first() -> None:
    code = "import torch, memfit; torch.zeros(1, device='cuda'); memfit.arena(device='cuda')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "before anything is put on the device" in done.stderr


PLANNED_ON_A_DEVICE = r"""
import torch, memfit
from memfit.system.recorder import record
from memfit.runtime.measure import resident_bytes

memfit.arena(device="cuda")  # before anything is put on the device
torch.manual_seed(0)
layers = [layer for _ in range(8) for layer in (torch.nn.Linear(1024, 1024), torch.nn.GELU(), torch.nn.Dropout(0.1))]
model = torch.nn.Sequential(*layers, torch.nn.Linear(1024, 16)).cuda()
batch = torch.randn(8192, 1024, device="cuda"), torch.randint(0, 16, (8192,), device="cuda")

def loss(model, batch):
    return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])

optimizer = torch.optim.AdamW(model.parameters())
step = memfit.fit(model, loss, batch, optimizer=optimizer, budget="70%", arena=True, verify=True)
for _ in range(4):
    there_before = resident_bytes(step, batch) + step.held_bytes
    torch.cuda.empty_cache()
    with record("cuda") as usage:
        step(batch)
assert step.arena.last_step.not_served == 0 and step.arena.last_step.served > 20, step.arena
asked = step.settings.budget
assert there_before + usage.taken_bytes <= asked, (there_before, usage, asked, step.corrections)
measured = step.measure()
assert measured.resident_bytes + step.held_bytes <= measured.peak_bytes <= asked < measured.baseline_peak_bytes
assert measured.source == "the arena's counters" and measured.reserved_bytes > 0
torch.cuda.empty_cache()
print("fine")
"""


@pytest.mark.gpu
def test_a_planned_step_on_a_device() -> None:
    assert run(PLANNED_ON_A_DEVICE) == "fine"
