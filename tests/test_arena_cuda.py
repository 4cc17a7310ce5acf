"""The arena on CUDA: over a stand-in of torch's CUDA library, and over the real one where there is a GPU."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fake_device import build_fakes

import memfit
from memfit.errors import InvalidDeviceError
from memfit.memory.arena.forwarding import UnreadableHeaderError, forwarding_methods

ON_THE_FAKE = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"


def run(code: str, *arguments: str) -> str:
    """Run code in a process of its own; the folder of the fakes is its first argument."""
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture(scope="module")
def fakes(tmp_path_factory: pytest.TempPathFactory) -> str:
    if torch.version.cuda:
        pytest.skip("this torch has a CUDA library of its own; benchmarks/cuda_arena.py is for it")
    if shutil.which("c++") is None:
        pytest.skip("no C++ compiler: the stand-in of torch's CUDA library cannot be built")
    folder = tmp_path_factory.mktemp("fake")
    build_fakes(folder)
    return str(folder)


CALLS = r"""
import threading
from fake_device import start
fake = start(sys.argv[1])
from memfit.memory.arena.arena import Arena

arena = Arena(device="cuda")
box = []
for number in range(4):
    assert not fake.is_in_front()
    with arena.step():
        assert fake.is_in_front()
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
        inside = [bool(arena._library.owns(arena._handle, p)) for p in (first, second, other)]
        fake.free(first)
        fake.free(second)
        assert fake.number("waits").value - before == (number == 3)
        third = fake.malloc(3000)
        fake.free(third)
        fake.free(other)
    print(number, inside, arena.last_step.served, arena.last_step.other_threads, arena.height_bytes)
assert arena.held_bytes == arena.height_bytes == fake.usage()[0]
with arena.step():
    kept = fake.malloc(1000)
assert fake.is_in_front(), "the allocator below would not heed the streams that use a block of the arena"
fake.record_stream(kept, 64)
later = fake.malloc(1000)
assert not arena._library.owns(arena._handle, later)
fake.free(later)
arena.close()
frees, waits = fake.number("frees").value, fake.number("waits").value
fake.free(kept)
assert fake.number("waits").value == waits + 1
assert fake.number("frees").value == frees + 1, "the memory goes with the last tensor in it"
assert not fake.is_in_front()
assert fake.number("mallocs").value == fake.number("frees").value
assert fake.number("misplaced_frees").value == 0, "all that torch's allocator gave goes back to it, and nothing else"
other = Arena(device="cuda")
fake.number("capacity_bytes").value = 0
assert fake.library.memfit_arena_resize(other._handle, 4096) == 1
"""


@pytest.mark.slow
def test_the_calls_over_a_stand_in(fakes: str) -> None:
    steps = run(ON_THE_FAKE + CALLS, fakes).splitlines()
    assert steps[0] == "0 [False, False, False] 0 1 3072"
    assert steps[1:] == [f"{number} [True, True, False] 3 1 3072" for number in (1, 2, 3)]


STREAMS = r"""
from contextlib import contextmanager
from fake_device import start
fake = start(sys.argv[1])
from memfit.memory.arena.arena import Arena

arena = Arena(device="cuda")

@contextmanager
def waits(*pairs):
    # who waits for whom in the block, at most once
    before = fake.number("waits").value
    yield
    assert fake.number("waits").value - before == len(pairs), (fake.number("waits").value - before, pairs)
    if pairs:
        assert (fake.number("waiting").value, fake.number("waited_for").value) == pairs[0]

@contextmanager
def step_on(stream):
    fake.on(stream)
    with arena.step():
        yield
    fake.on(0)

def request(stream, size):
    pointer = fake.malloc(size, stream=stream)
    fake.on(stream)
    return pointer

def owns(pointer):
    return bool(arena._library.owns(arena._handle, pointer))

for before, stream in ((0, 0), (0, 0), (0, 128), (128, 128)):
    with waits(*[(stream, before)][: stream != before]), step_on(stream):
        first, second = request(stream, 1000), request(stream, 2000)
        fake.free(first)
        fake.free(second)
assert arena.last_step.served == 2 and arena.last_step.other_threads == 0, "requests on its stream are the step's"
with waits((0, 128)), step_on(0):
    first, kept = request(0, 1000), request(0, 2000)
    fake.free(first)
assert owns(kept)
with waits((128, 0)), step_on(128):
    first = request(128, 1000)
    fake.free(first)
with waits((128, 0)):  # which may have read it since
    fake.free(kept)
arena.close()

arena = Arena(device="cuda")
for stream in (0, 0, 128):
    with step_on(stream):
        first, kept = request(stream, 1000), request(stream, 2000)
        fake.free(first)
        if stream == 0:
            fake.free(kept)
        else:
            fake.record_stream(kept, 128)
            fake.record_stream(kept, 0)
assert owns(kept)
with waits((128, 0)):
    fake.free(kept)
with waits((0, 128)):  # the memory goes back to the pool of the stream that it was taken on
    arena.close()
assert fake.number("misplaced_frees").value == 0 and not fake.usage()[0]
"""


def test_a_step_on_another_stream_waits_for_the_last_one(fakes: str) -> None:
    run(ON_THE_FAKE + STREAMS, fakes)


AROUND = r"""
import ctypes
from fake_device import start
fake = start(sys.argv[1])
from memfit.memory.arena.arena import Arena

arena = Arena(device="cuda")
before = fake.malloc(4000)
kept = []
for _ in range(3):
    with arena.step():
        inside = fake.malloc(1000)
        raw = fake.torch.fake_raw_alloc(ctypes.c_int64(2000))  # a library's workspace
        fake.torch.fake_raw_delete(ctypes.c_void_p(raw))
        size = ctypes.c_int64()
        base = fake.torch.fake_base(ctypes.c_void_p(inside), ctypes.byref(size))
        fake.free(inside)
        kept.append(fake.malloc(600))  # outlives: ordinary, as torch's allocator gave it
        fake.record_stream(kept[-1], 64)
        if before:
            fake.free(before)  # of before the step: back to torch's allocator
            before = 0
assert arena.last_step.served == 2 and arena.last_step.outliving == 1, arena.last_step
assert size.value == arena.height_bytes, "a block of the arena lies in one allocation of torch's"
assert fake.number("records").value == 3, "streams of ordinary blocks are the allocator's below"
assert fake.is_in_front(), "the first of these blocks was recorded, and has a deleter of the arena"
fake.free(kept.pop(0))
assert not fake.is_in_front()
for block in kept:
    fake.free(block)
try:
    with arena.step():
        fake.malloc(1000)
        raise ValueError("in the middle of a step")
except ValueError as error:
    print(error)
with arena.step():
    fake.torch.fake_cover()  # an allocator that comes in front of the arena's stays there
fake.torch.fake_raw_delete(ctypes.c_void_p(fake.torch.fake_raw_alloc(ctypes.c_int64(64))))
try:
    with arena.step():
        pass
except memfit.MemfitError as error:
    print(error)
"""


def test_what_is_around_a_step_and_outlives_it(fakes: str) -> None:
    raised, refused = run(ON_THE_FAKE + "import memfit\n" + AROUND, fakes).splitlines()
    assert raised == "in the middle of a step"
    assert "another allocator was put in front of the arena's" in refused


COUNTS = r"""
from fake_device import start
fake = start(sys.argv[1])
from memfit.memory.arena.arena import Arena

MIB = 1 << 20
here, there = fake.malloc(1000), fake.malloc(3 * MIB, device=1)
assert fake.usage(0) == [1024, 1024, 2 * MIB, 2 * MIB], fake.usage(0)
assert fake.usage(1) == [3 * MIB, 3 * MIB, 4 * MIB, 4 * MIB], fake.usage(1)
fake.free(there)

arena = Arena(device="cuda:1")
for _ in range(3):
    with arena.step():
        blocks = [fake.malloc(MIB, device=1) for _ in range(5)]
        for block in blocks:
            fake.free(block)
        assert fake.malloc(0, device=1) is None
assert arena.last_step.served == 5
live, peak, held, most_held = fake.usage(1)
assert (live, held) == (5 * MIB, 6 * MIB), "the arena and nothing else"
assert most_held == 6 * MIB, "before the arena was made, what the first step had taken was given back"
arena.close()
assert fake.usage(1)[0] == 0
assert fake.number("contexts").value == 1 << 1, "the current device, which is another, got no context"
fake.free(here)
assert fake.number("misplaced_frees").value == 0

arena = Arena(device="cuda")
for _ in range(2):
    with arena.step():
        fake.free(fake.malloc(7 * MIB))
assert arena.height_bytes == 7 * MIB
fake.number("refusals").value = 1
try:
    arena._resize(8 * MIB)
except memfit.MemfitError as error:
    print(error)
"""


def test_an_arena_is_one_block_of_torchs_allocator(fakes: str) -> None:
    assert "no memory for an arena of 8388608 bytes" in run(ON_THE_FAKE + "import memfit\n" + COUNTS, fakes)


PLANNED = r"""
import torch
from fake_device import start_with_tensors
fake = start_with_tensors(sys.argv[1])
import memfit
from memfit.system.recorder import allocated_bytes, record
from memfit.step.measure import resident_bytes

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
                      arena=arena)
    torch.manual_seed(1)
    losses, served = [], []
    for seed in range(4):
        losses.append(step(batch_of(seed)))
        served.append((step.arena.last_step.not_served, step.arena.last_step.served > 20) if arena else None)
    step.verify()
    return step, served, losses + [p.detach() for p in model.parameters()]

assert record(CPU)._instrument.source == "the stand-in's counters"
torch.empty(256 << 20, dtype=torch.uint8)  # the device holds it unused from here on: no step may be charged with it
(plain, _, expected), (step, served, found) = trained(False), trained(True)
assert all(torch.equal(one, other) for one, other in zip(expected, found))
assert set(served) == {(0, True)}, "each step was served in full, and the first from the plan alone"
assert step.arena.last_step.served > 20, step.arena
assert step.arena.held_bytes > 4 << 20
assert not fake.is_in_front(), "optimizer's state and results are torch's, in the first step too"

batch = batch_of(9)
before = resident_bytes(step, batch) + step.held_bytes
fake.torch.fake_empty_cache()  # of what `verify` has left
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
assert all(correction.aim_bytes for correction in step.corrections)
assert str(step.memory) == "arena" and str(plain.memory) == "torch's allocator"

fake.number("capacity_bytes").value = fake.usage()[2]
try:
    torch.empty(64 << 20, dtype=torch.uint8)
except RuntimeError as error:
    print(error)
"""


@pytest.mark.slow
def test_a_planned_step_on_a_device_whose_bytes_are_counted(fakes: str) -> None:
    assert run(ON_THE_FAKE + PLANNED, fakes).startswith("CUDA out of memory. Tried to allocate")


def test_each_virtual_method_is_forwarded(tmp_path: Path) -> None:
    include = Path(torch.__file__).parent / "include"
    written = forwarding_methods(include)
    for declaration in (
        "void* raw_alloc_with_stream(size_t a0, cudaStream_t a1)",
        "bool is_simple_data_ptr(const DataPtr& a0) const",
        "SnapshotInfo snapshot(MempoolId_t a0, bool a1)",
        "void recordStream(const DataPtr& a0, c10::Stream a1)",
        "void recordStream(const DataPtr& a0, CUDAStream a1)",
    ):
        assert f"{declaration} " in written
    shutil.copytree(include / "c10/core", tmp_path / "c10/core")
    (tmp_path / "c10/cuda").mkdir()
    header = (include / "c10/cuda/CUDACachingAllocator.h").read_text()
    added = header.replace(
        "virtual std::string name() = 0;", "virtual std::string name() = 0;\n  virtual int later(long, int n = 2) {}"
    )
    (tmp_path / "c10/cuda/CUDACachingAllocator.h").write_text(added)
    assert "int later(long a0, int a1)  override { return below()->later(" in forwarding_methods(tmp_path)
    unreadable = header.replace("virtual std::string name() = 0;", "virtual auto [[odd]] name() -> std::string = 0;")
    (tmp_path / "c10/cuda/CUDACachingAllocator.h").write_text(unreadable)
    with pytest.raises(UnreadableHeaderError, match=r"virtual methods of CUDAAllocator, \d+ of them read"):
        forwarding_methods(tmp_path)
    with pytest.raises(UnreadableHeaderError, match="is not here"):
        forwarding_methods(tmp_path / "elsewhere")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_device_it_says_so() -> None:
    for device in ("cuda", "cuda:0"):
        with pytest.raises(InvalidDeviceError, match=f"no arena on device '{device}'"):
            memfit.arena(device=device)


ON_A_DEVICE = r"""
import torch, memfit
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 16)).cuda()
batch = torch.randn(64, 256, device="cuda")
arena = memfit.arena(device="cuda")
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
assert torch.cuda.memory_allocated() >= arena.held_bytes
print("fine")
"""


@pytest.mark.gpu
def test_on_a_device() -> None:
    assert run(ON_A_DEVICE) == "fine"


PLANNED_ON_A_DEVICE = r"""
import torch, memfit
from memfit.system.recorder import record
from memfit.step.measure import resident_bytes

torch.backends.cudnn.benchmark = True
torch.manual_seed(0)
layers = [layer for _ in range(8) for layer in (torch.nn.Linear(1024, 1024), torch.nn.GELU(), torch.nn.Dropout(0.1))]
model = torch.nn.Sequential(*layers, torch.nn.Linear(1024, 16)).cuda()
batch = torch.randn(8192, 1024, device="cuda"), torch.randint(0, 16, (8192,), device="cuda")

def loss(model, batch):
    return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])

optimizer = torch.optim.AdamW(model.parameters())
step = memfit.fit(model, loss, batch, optimizer=optimizer, budget="70%", hard=True, verify=True)
assert str(step.memory) == "arena", step.memory
for _ in range(4):
    there_before = resident_bytes(step, batch) + step.held_bytes
    torch.cuda.empty_cache()
    with record("cuda") as usage:
        step(batch)
    assert step.arena.last_step.not_served == 0, step.arena
assert step.arena.last_step.served > 20, step.arena
asked = step.settings.budget
assert there_before + usage.taken_bytes <= asked, (there_before, usage, asked, step.corrections)
measured = step.measure()
assert measured.resident_bytes + step.held_bytes <= measured.peak_bytes <= asked < measured.baseline_peak_bytes
assert measured.source == "torch.cuda.max_memory_allocated" and measured.reserved_bytes > 0
assert torch.cuda.memory_stats()["num_ooms"] == 0
torch.cuda.empty_cache()
print("fine")
"""


@pytest.mark.gpu
@pytest.mark.arithmetic
def test_a_planned_step_on_a_device() -> None:
    assert run(PLANNED_ON_A_DEVICE) == "fine"


GRAPH_BESIDE_IT = r"""
import torch, memfit
x = torch.randn(1 << 20, device="cuda")
arena = memfit.arena(device="cuda")
def step():
    y = x.sin().cos()
    return (y * 2).sum()
for _ in range(3):
    with arena.step():
        eager = step()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    captured = step()
graph.replay()
assert captured.item() == eager.item()
used = torch.randn(1 << 20, device="cuda")
side = torch.cuda.Stream()
with arena.step():
    y = x.sin()
    with torch.cuda.stream(side):
        side.wait_stream(torch.cuda.default_stream())
        z = y.clone()
        y.record_stream(side)
    del y
    (x.cos() * 2).sum()
torch.cuda.synchronize()
assert torch.equal(z, x.sin())
print("fine")
"""


@pytest.mark.gpu
@pytest.mark.arithmetic
def test_graphs_and_streams_beside_it_on_a_device() -> None:
    assert run(GRAPH_BESIDE_IT) == "fine"
