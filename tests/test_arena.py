"""The arena: same bits, everything served in steady state, and safe whatever a step does."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import memfit
from memfit.errors import InvalidDeviceError, InvalidOptionError, MemfitError
from memfit.memory.arena.arena import Arena
from memfit.memory.arena.library import ArenaUnavailableError
from memfit.system.recorder import allocated_bytes, record

FLOATS_PER_KIB = 256


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def kib(count: float) -> torch.Tensor:
    return torch.empty(int(count * FLOATS_PER_KIB))


def lies_in(arena: Arena, tensor: torch.Tensor) -> bool:
    assert arena._handle is not None
    return arena._library.owns(arena._handle, tensor.data_ptr())


def ends_of(tensor: torch.Tensor) -> tuple[float, float]:
    return tensor[0].item(), tensor[-1].item()  # no comparison, which would request memory


def conv_net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Conv2d(32, 48, 3, stride=2, groups=4),
        nn.ReLU(),
        nn.Dropout(0.2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(48, 10),
    )


def trainer(model: nn.Module, *, momentum: float = 0.0) -> Callable[..., torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)

    def step(images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def batches(count: int, *, size: int = 8) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(2)
    return [
        (torch.randn(size, 3, 24, 24, generator=generator), torch.randint(0, 10, (size,), generator=generator))
        for _ in range(count)
    ]


def train(wrap: Callable[[Callable[..., torch.Tensor]], Callable[..., torch.Tensor]]) -> list[torch.Tensor]:
    model = conv_net()
    step = wrap(trainer(model, momentum=0.9))
    torch.manual_seed(3)
    losses = [step(*batch) for batch in batches(6)]
    return [*losses, *(p.detach() for p in model.parameters()), *model.buffers(), *(p.grad for p in model.parameters())]  # type: ignore[list-item]


def test_same_bits_as_without() -> None:
    arenas: list[Arena] = []

    def in_arena(step: Callable[..., torch.Tensor]) -> Arena:
        arenas.append(memfit.arena(step))
        return arenas[0]

    expected, found = train(lambda step: step), train(in_arena)
    assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))
    assert arenas[0].served > 150


def test_steady_state_serves_everything() -> None:
    with memfit.arena(trainer(conv_net())) as arena:
        for batch in batches(6):
            arena(*batch)
        assert arena.last_step.served > 40
        assert (arena.not_served, arena.last_step.kept, arena.last_step.recorded) == (0, 0, 0)
        assert arena.reoptimizations == 0
        assert arena.counts.recorded == arena.last_step.served + arena.last_step.outliving


def test_height_is_the_peak_of_live_bytes() -> None:
    model = conv_net()
    with memfit.arena(trainer(model)) as arena:
        for batch in batches(3):
            arena(*batch)
        assert arena.height_bytes == arena.lower_bound_bytes
        assert arena.peak_bytes <= arena.height_bytes <= 1.005 * arena.peak_bytes
        (plan,) = arena.plans.values()
        assert plan.apart_bytes > 2 * arena.height_bytes
        gradients = sum(p.nbytes for p in model.parameters())
        assert gradients <= plan.recording.outliving_bytes <= gradients + 1024


def test_the_peak_is_the_recorders() -> None:
    def step() -> None:
        first, second = kib(3), kib(4)
        del first
        third = kib(2)
        del second, third

    with record("cpu") as usage:
        step()
    with memfit.arena(step) as arena:
        arena()
        assert arena.peak_bytes == usage.peak_bytes == 7 * 1024


def test_a_first_step_that_makes_more_is_replanned_once() -> None:
    with memfit.arena(trainer(conv_net(), momentum=0.9)) as arena:
        for batch in batches(6):
            arena(*batch)
        assert arena.reoptimizations == 1  # the first step made the momentum
        assert arena.last_step.not_served == 0


def test_what_outlives_the_step_is_not_in_the_arena() -> None:
    with memfit.arena() as arena:
        for _ in range(3):
            with arena.step():
                temporary, kept = kib(8), kib(1)
                inside, outside = lies_in(arena, temporary), lies_in(arena, kept)
                del temporary
        assert (inside, outside) == (True, False)
        assert arena.height_bytes == 8 * 1024
        assert (arena.last_step.served, arena.last_step.outliving) == (1, 1)


def test_a_tensor_kept_past_its_step_is_never_overwritten() -> None:
    kept: list[torch.Tensor] = []
    with memfit.arena() as arena:
        for number in range(12):
            with arena.step():
                tensors = [torch.full((FLOATS_PER_KIB * 2,), float(number * 10 + i)) for i in range(4)]
                if number in (2, 3, 7):
                    kept.append(tensors[number % 4])
                del tensors
        assert arena.counts.kept > 0
        assert arena.counts.occupied > 0
        assert [tensor[0].item() for tensor in kept] == [22.0, 33.0, 73.0]
        assert all((tensor == tensor[0]).all() for tensor in kept)
    assert all((tensor == tensor[0]).all() for tensor in kept)  # closed: the memory stays while they live


def test_a_tensor_kept_past_its_planned_end_within_the_step() -> None:
    with memfit.arena() as arena:
        for late in (False, False, True, False):
            with arena.step():
                first = torch.full((512,), 1.0)
                if not late:
                    del first
                second = torch.full((512,), 2.0)
                if late:
                    assert ends_of(first) == (1.0, 1.0)
                    del first
                assert ends_of(second) == (2.0, 2.0)
                del second
        assert arena.counts.occupied == 1
        assert arena.reoptimizations == 1  # from here on both have addresses of their own
        assert arena.last_step.served == 2
        assert arena.height_bytes == 2 * 512 * 4


def test_a_larger_request_makes_a_new_layout() -> None:
    with memfit.arena() as arena:
        for size in (4, 4, 6, 6, 5, 4):
            with arena.step():
                small, tensor = kib(1), kib(size)
                del small, tensor
        assert arena.reoptimizations == 1  # smaller ones than planned need none
        assert arena.counts.unexpected == 1
        assert arena.height_bytes == 7 * 1024
        assert arena.last_step.served == 2


def test_a_request_that_grows_into_its_alignment_is_served() -> None:
    with memfit.arena() as arena:
        for size in (1, 16):
            with arena.step():
                torch.empty(size)
        assert (arena.reoptimizations, arena.last_step.served, arena.height_bytes) == (0, 1, 64)


def test_a_longer_sequence_makes_a_new_layout_and_a_shorter_one_needs_none() -> None:
    def run(count: int) -> None:
        held = [kib(1) for _ in range(count)]
        del held

    with memfit.arena() as arena:
        for count, served in ((3, 0), (3, 3), (5, 3), (5, 5), (2, 2), (2, 2)):
            with arena.step():
                run(count)
            assert arena.last_step.served == served
        assert arena.reoptimizations == 1
        assert arena.height_bytes == 5 * 1024


def resident_mib() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / (1 << 20)


def test_an_arena_that_moves_lets_go_of_all_but_what_is_kept() -> None:
    def run(count: int) -> torch.Tensor:
        return [torch.full((4 << 20,), float(i)) for i in range(count)][1]

    kept: list[torch.Tensor] = []
    with memfit.arena() as arena:
        for _ in range(2):
            with arena.step():
                [torch.full((4 << 20,), 0.0) for _ in range(3)]
        with arena.step():
            kept.append(run(3))
        assert lies_in(arena, kept[0])
        before = resident_mib()
        arena._resize(0)
        assert resident_mib() < before - 28  # 32 of its 48 MiB go at once, 16 are the kept tensor's
        with arena.step():
            run(5)
        with arena.step():
            run(5)
        assert not lies_in(arena, kept[0])
        assert arena.last_step.not_served == 0
        assert (kept[0] == 1.0).all()


def test_keys_keep_plans_apart() -> None:
    def run(count: int) -> None:
        held = [kib(1) for _ in range(count)]
        del held

    with memfit.arena(run) as arena:
        for count in (3, 5, 3, 5, 3):
            with arena.step(key=count):
                run(count)
        assert (arena.reoptimizations, arena.not_served, arena.last_step.served) == (0, 0, 3)
        assert sorted(arena.plans) == [3, 5]
        assert arena.height_bytes == 5 * 1024


def test_calls_with_other_shapes_have_their_own_plan() -> None:
    with memfit.arena(trainer(conv_net())) as arena:
        for size in (8, 4, 8, 4, 8):
            arena(*batches(1, size=size)[0])
        assert len(arena.plans) == 2
        assert (arena.reoptimizations, arena.not_served) == (0, 0)


def test_recording_another_key_lets_the_memory_go_first() -> None:
    with memfit.arena() as arena:
        with arena.step(key="large"):
            kib(4096)
        with record("cpu") as usage, arena.step(key="other"):
            kib(1)
        assert usage.end_bytes == usage.start_bytes
        with arena.step(key="large"):
            kib(4096)
        assert arena.last_step.served == 1


def test_memory_that_is_vacated_is_there_again_in_the_next_step() -> None:
    with memfit.arena() as arena:
        for _ in range(2):
            with arena.step():
                kib(8)
        arena.vacate()
        assert (arena.held_bytes, arena.height_bytes) == (0, 8 * 1024)
        with arena.step():
            kept = kib(8)
            with pytest.raises(MemfitError, match="leave the step first"):
                arena.vacate()
        assert arena.last_step.served == 1
        arena.vacate()
        assert arena.held_bytes == 8 * 1024, "a tensor lies in it"
        del kept


def test_an_exception_in_the_middle_of_a_step() -> None:
    def run(fail: bool) -> torch.Tensor:
        first = torch.full((1024,), 1.0)
        second = first * 2
        if fail:
            raise ValueError("in the middle")
        return (first + second).sum()

    with memfit.arena() as arena:
        with pytest.raises(ValueError, match="in the middle") as caught, arena.step():
            run(True)
        assert arena.plans == {}  # half a step is no recording
        for _ in range(2):
            with arena.step():
                run(False)
        with pytest.raises(ValueError, match="in the middle") as caught, arena.step():
            run(True)
        held = caught.traceback[-1].frame.f_locals  # the traceback keeps the tensors alive
        assert lies_in(arena, held["first"])
        for _ in range(2):
            with arena.step():
                run(False)
        assert (held["first"] == 1.0).all()
        assert (held["second"] == 2.0).all()
        assert arena.last_step.occupied > 0
        del held, caught
        gc.collect()
        with arena.step():
            run(False)
        assert arena.last_step.not_served == 0
        assert arena.reoptimizations == 0


def test_other_threads_get_ordinary_memory() -> None:
    start, done = threading.Event(), threading.Event()
    theirs: list[torch.Tensor] = []

    def other() -> None:
        start.wait()
        theirs.extend(torch.full((FLOATS_PER_KIB,), float(i)) for i in range(50))
        done.set()

    thread = threading.Thread(target=other)
    thread.start()
    with memfit.arena() as arena:
        for number in range(3):
            with arena.step():
                mine = kib(2)
                if number == 2:
                    start.set()
                    done.wait()
                after = kib(3)
                assert not any(lies_in(arena, tensor) for tensor in theirs)
                del mine, after
        thread.join()
        assert arena.last_step.served == 2
        assert arena.last_step.other_threads >= 50
        assert all((tensor == i).all() for i, tensor in enumerate(theirs))


def test_frees_by_another_thread() -> None:
    with memfit.arena() as arena:
        for _ in range(4):
            with arena.step():
                box = [kib(2)]
                thread = threading.Thread(target=box.clear)
                thread.start()
                thread.join()
                again = kib(2)
                del again
        assert arena.last_step.served == 2
        assert arena.height_bytes == 2 * 1024


def test_many_threads_free_and_allocate_while_steps_run() -> None:
    stop, errors = threading.Event(), list[str]()

    def churn(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        held: list[tuple[torch.Tensor, float]] = []
        while not stop.is_set():
            value = float(torch.rand((), generator=generator))
            held.append((torch.full((300,), value), value))
            if len(held) > 20:
                tensor, expected = held.pop(0)
                if not (tensor == tensor[0]).all() or abs(tensor[0].item() - expected) > 1e-6:
                    errors.append(f"thread {seed} lost {expected}")

    threads = [threading.Thread(target=churn, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    try:
        with memfit.arena(trainer(conv_net())) as arena:
            for batch in batches(10):
                arena(*batch)
            assert arena.not_served == 0
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert errors == []


def test_interrupt_and_resume() -> None:
    with memfit.arena() as arena:
        for count in (1, 5, 9, 2):
            with arena.step():
                before = kib(2)
                arena.interrupt()
                cold = [kib(1) for _ in range(count)]
                assert not any(lies_in(arena, tensor) for tensor in cold)
                arena.resume()
                with arena.interrupted():
                    kib(count)
                after = kib(3)
                del before, cold, after
        assert (arena.reoptimizations, arena.not_served) == (0, 0)
        assert arena.last_step.served == 2
        assert arena.height_bytes == 5 * 1024


def test_interruptions_out_of_place_are_refused() -> None:
    with memfit.arena() as arena:
        with pytest.raises(MemfitError, match="needs a running step"):
            arena.interrupt()
        with arena.step(), pytest.raises(MemfitError, match="without interrupt"):
            arena.resume()
        with pytest.raises(MemfitError, match="ended interrupted"), arena.step():
            arena.interrupt()
        with pytest.raises(KeyError), arena.step():
            arena.interrupt()
            raise KeyError
        for _ in range(2):
            with arena.step():
                kib(1)
        assert arena.last_step.served == 1


def test_nested_steps_are_refused() -> None:
    with memfit.arena() as outer, memfit.arena() as inner:
        for _ in range(2):
            with outer.step():
                kib(1)
                with pytest.raises(ArenaUnavailableError, match="cannot be nested"), inner.step():
                    pass
                with pytest.raises(ArenaUnavailableError, match="cannot be nested"), outer.step():
                    pass
                with pytest.raises(MemfitError, match="while its step runs"):
                    outer.close()
        assert outer.last_step.served == 1


def test_two_arenas_in_turns() -> None:
    with memfit.arena() as one, memfit.arena() as other:
        for _ in range(3):
            with one.step():
                first = torch.full((100,), 1.0)
                with_one = lies_in(one, first)
                del first
            with other.step():
                kib(5)
        assert with_one
        assert (one.height_bytes, other.height_bytes) == (448, 5 * 1024)


def test_inference() -> None:
    model = conv_net().eval()
    images = batches(1)[0][0]
    with torch.inference_mode():
        expected = model(images)
        with memfit.arena(model) as arena:
            outputs = [arena(images) for _ in range(4)]
            assert all(torch.equal(output, expected) for output in outputs)
            assert not any(lies_in(arena, output) for output in outputs)
            assert (arena.not_served, arena.last_step.outliving) == (0, 1)
            assert arena.height_bytes <= 1.005 * arena.peak_bytes


def test_the_recorder_counts_what_it_should() -> None:
    allocated_bytes("cpu")
    with memfit.arena() as arena:
        with record("cpu") as recording, arena.step():
            kib(64)
        assert recording.peak_bytes == 64 * 1024
        before = allocated_bytes("cpu")
        with record("cpu") as usage, arena.step():
            kib(64)
            kept = kib(2)
        assert usage.peak_bytes == 2 * 1024  # the arena was counted when it was made
        with record("cpu"):
            assert allocated_bytes("cpu") == before + 2 * 1024 + 2 * 1024 - 2 * 1024
        del kept
    assert allocated_bytes("cpu") <= before


def test_growing_a_storage_of_the_arena() -> None:
    with memfit.arena() as arena:
        for _ in range(3):
            with arena.step():
                grown = torch.full((FLOATS_PER_KIB,), 7.0)
                grown.resize_(3 * FLOATS_PER_KIB)
                assert ends_of(grown[:FLOATS_PER_KIB]) == (7.0, 7.0)
                del grown
        assert arena.last_step.served == 2


def test_closing() -> None:
    arena = memfit.arena()
    with arena.step():
        kib(1)
    arena.close()
    arena.close()
    assert arena.height_bytes == 1024
    with pytest.raises(MemfitError, match="was closed"), arena.step():
        pass
    with pytest.raises(MemfitError, match="made without a step"):
        memfit.arena()()


def test_what_cannot_be_asked_for() -> None:
    with pytest.raises(InvalidDeviceError, match="no arena on device 'meta'"):
        memfit.arena(device="meta")
    with pytest.raises(InvalidOptionError, match="no packer is called 'magic'"):
        memfit.arena(packer="magic")
    with pytest.raises(InvalidOptionError, match="time_limit_seconds is 0"):
        memfit.arena(time_limit_seconds=0)


def test_without_a_compiler_one_message_and_all_else_works(tmp_path: Path) -> None:
    code = """
import torch, memfit
from memfit.errors import MemfitError
try:
    memfit.arena()
except MemfitError as error:
    print(error)
model = torch.nn.Linear(4, 4)
step = memfit.fit(model, lambda m, b: m(b).sum(), torch.randn(2, 4), budget="1MiB")
step(torch.randn(2, 4))
try:
    memfit.fit(model, lambda m, b: m(b).sum(), torch.randn(2, 4), budget="1MiB", arena=True)
except MemfitError as error:
    print(error)
"""
    environment = {**os.environ, "PATH": str(tmp_path), "MEMFIT_CACHE": str(tmp_path / "cache")}
    environment.pop("CXX", None)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.strip().splitlines()
    assert first == second
    assert "there is no C++ compiler" in first


def test_a_fork_in_the_middle_of_a_step() -> None:
    with memfit.arena() as arena:
        with arena.step():
            kib(1)
        with arena.step():
            child = os.fork()
            if child == 0:  # its step never ends; its memory is ordinary, and it can run steps of its own
                fine = not lies_in(arena, kib(1))
                with memfit.arena() as own:
                    for _ in range(2):
                        with own.step():
                            kib(2)
                os._exit(0 if fine and own.served == 1 else 1)
            assert os.waitpid(child, 0)[1] == 0
            kib(1)
        assert arena.last_step.served == 1


def test_a_recorder_that_is_installed_in_the_middle_of_a_step() -> None:
    """It stands in front of the arena from then on, so it counts all that is requested."""
    code = """
import torch, memfit
from memfit.system.recorder import allocated_bytes, record
arena = memfit.arena()
for number in range(4):
    with arena.step():
        first = torch.empty(1024)
        if number == 1:
            allocated_bytes("cpu")
        second = torch.empty(512)
        del first, second
    print(arena.last_step.served)
with record("cpu") as usage, arena.step():
    first = torch.empty(1024)
    with record("cpu") as inner:
        second = torch.empty(512)
    del first, second
print(usage.peak_bytes, inner.peak_bytes, arena.last_step.served, arena.not_served)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["0", "2", "2", "2", "6144", "2048", "2", "0"]


def test_numbers_among_the_arguments_do_not_matter_but_shapes_do() -> None:
    with memfit.arena(lambda tensor, number, *, flag: (tensor + number * flag).sum()) as arena:
        for number in range(5):
            arena(kib(1), number, flag=number % 2 == 0)
        arena(kib(2), 0, flag=True)
        assert len(arena.plans) == 2
        assert arena.not_served == 0


def test_sequences_of_changing_length_settle_without_keys() -> None:
    weight = torch.randn(16, 16, generator=torch.Generator().manual_seed(0), requires_grad=True)

    def step(words: int) -> None:
        states = [torch.zeros(8, 16)]
        for _ in range(words):
            mixed = torch.stack(states).softmax(0).sum(0)
            states.append(torch.tanh(mixed @ weight))
        states[-1].sum().backward()
        weight.grad = None

    lengths = [3 + 7 * number % 11 for number in range(44)]
    with memfit.arena(time_limit_seconds=0.5) as arena:
        seen: list[tuple[int, int, int]] = []
        for words in lengths:
            with arena.step():
                step(words)
            seen.append((arena.last_step.served, arena.last_step.not_served, arena.reoptimizations))
        assert seen[-1][2] == seen[22][2] <= 22, "all lengths were there twice by then"
        assert sum(each[1] for each in seen[22:]) <= 0.05 * sum(each[0] + each[1] for each in seen[22:])
        assert arena.height_bytes < 1 << 20
