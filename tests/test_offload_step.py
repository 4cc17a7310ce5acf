"""Steps that offload, run on a CPU with its disk: the same bits, and never more memory than was predicted."""

from __future__ import annotations

import copy
import gc
import os
import re
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from devices import linked
from planned_steps import small_step

import memfit
from memfit.checkpointing.step import CheckpointedStep
from memfit.cost.link import link_rates
from memfit.doors.step import fit_step
from memfit.errors import (
    HostMemoryError,
    InvalidBudgetError,
    InvalidOptionError,
    PlanMismatchError,
    TimeLimitError,
    UnsupportedStepError,
)
from memfit.memory.host import store as host_store
from memfit.memory.host.layout import host_layout
from memfit.plan import Plan, Problem
from memfit.planners.offload import OffloadPlanner
from memfit.planning import Settings
from memfit.schedule import Code, Schedule
from memfit.step.planned_step import PlannedStep
from memfit.system import spill_file
from memfit.system.spill_file import SpillFile

SHARED_MEMORY = Path("/dev/shm")

LINKED = linked(2e9, 2e9, alignment_bytes=64)


def offloading_plan(step: PlannedStep, share: float) -> Plan:
    """A plan with all that fits on the host, at `share` of the way from the unplanned peak down to what is least."""
    graph = step.captured.graph
    graph = msgspec.structs.replace(graph, ops=[msgspec.structs.replace(op, seconds=1e-3) for op in graph.ops])
    most, least = step.plan.unplanned.peak_bytes, step.plan.bounds.least_budget_bound_bytes
    task = Problem(
        graph=graph,
        device=LINKED,
        budget_bytes=int(most - share * (most - least)),
        host_budget_bytes=1 << 40,
    )
    plan = OffloadPlanner(iterations=20_000, rematerialize=False).plan(task).plan
    assert plan is not None
    return plan


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cnn", "unet", "transformer", "lstm"])
def test_a_plan_that_offloads_gives_the_same_bits(name: str) -> None:
    first = fit_step(small_step(name), Settings(budget="100%", planner="none"))
    assert isinstance(first, PlannedStep)
    plan = offloading_plan(first, 0.3)
    assert (plan.schedule.codes == Code.PREFETCH).sum() > 0
    step = small_step(name)
    planned = fit_step(step, Settings(budget=plan.budget_bytes, device=LINKED), plan=plan)
    assert isinstance(planned, PlannedStep)
    planned.verify()
    measured = planned.measure(repeats=1)
    assert measured.peak_bytes <= plan.predicted.peak_bytes
    assert ".prefetch()" in planned.source and ".arrived()" in planned.source


DYNAMO = pytest.mark.filterwarnings(  # Dynamo's own warning while it traces
    "ignore:The .grad attribute of a Tensor that is not a leaf",
    "ignore:<class 'torch.autograd.function.Function'> should",
)
ONLY_OFFLOADING: dict[str, Any] = {"planner": "offload", "options": {"rematerialize": False, "iterations": 20_000}}


def tanh_layers(*, width: int = 128) -> torch.nn.Sequential:
    torch.manual_seed(0)
    layers: list[torch.nn.Module] = []
    for _ in range(8):
        layers += [torch.nn.Linear(width, width), torch.nn.Tanh(), torch.nn.Dropout(0.1)]
    return torch.nn.Sequential(*layers, torch.nn.Linear(width, 4))


def open_files() -> int:
    """Return how many files are open whose name is gone, as that of a spill file is."""
    links = [path for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    return sum(str(link.readlink()).endswith("(deleted)") for link in links)


def loss(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])


def make_batch(rows: int = 2048, width: int = 128) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    return torch.randn(rows, width), torch.randint(0, 4, (rows,))


def planned_step(**options: Any) -> Any:
    model = tanh_layers()
    options = {"budget": "60%", "host_budget": "64MiB", **ONLY_OFFLOADING, **options}
    optimizer = torch.optim.AdamW(model.parameters())
    return memfit.fit(model, loss, make_batch(), optimizer=optimizer, **options)


def test_fit_on_a_cpu_offloads_to_a_disk_and_back_with_eagers_bits(tmp_path: Path) -> None:
    step = planned_step(host_dir=tmp_path)
    plan = step.plan
    assert plan.predicted.host_peak_bytes > 0
    assert list(tmp_path.iterdir()) == []  # the file has no name
    step.verify()
    measured = step.measure(repeats=1)
    assert measured.peak_bytes <= plan.predicted.peak_bytes <= 0.6 * measured.baseline_peak_bytes + 4096
    assert host_layout(plan.graph, plan.schedule, 4096).height_bytes <= plan.host_budget_bytes


def test_many_steps_leave_no_threads_files_or_memory() -> None:
    step = planned_step()
    batch = make_batch()
    step(batch)
    gc.collect()
    threads, files = threading.active_count(), open_files()
    for _ in range(30):
        step(batch)
    assert threading.active_count() == threads and open_files() == files
    del step
    gc.collect()
    assert open_files() == files - 1


def test_a_batch_of_another_size_uses_the_same_file() -> None:
    step = planned_step(budget="7MiB")
    gc.collect()  # steps of earlier tests close theirs
    files = open_files()
    step(make_batch(1500))
    step(make_batch())
    assert open_files() == files


@DYNAMO
def test_a_compiled_model_offloads_across_its_halves() -> None:
    torch.compiler.reset()
    model, eager = tanh_layers(), tanh_layers()
    options = {"budget": "10MiB", "host_budget": "64MiB", "reserve": 0, **ONLY_OFFLOADING}
    planned: Any = torch.compile(model, backend="memfit", options=options)
    batch = make_batch()
    for seed in range(3):
        gradients: list[list[Any]] = []
        for each in (planned, eager):
            torch.manual_seed(seed)
            loss(each, batch).backward()
            gradients.append([parameter.grad for parameter in each.parameters()])
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(*gradients, strict=True))
    left = host_store._left
    assert not left
    unused = loss(planned, batch)
    assert len(left) == 1
    del unused  # backward never runs: autograd drops what it saved, and the copies go with it
    gc.collect()
    assert not left


@DYNAMO
def test_two_forward_passes_before_a_backward_share_the_host_budget() -> None:
    """The second one is planned for what the first has left of it."""
    torch.compiler.reset()
    model = tanh_layers()
    options = {"budget": "15MiB", "host_budget": "9MiB", "reserve": 0, "budget_is": "soft", **ONLY_OFFLOADING}
    planned: Any = torch.compile(model, backend="memfit", options=options)
    inputs, _ = make_batch()
    gc.collect()

    def lent_bytes() -> int:
        return sum(each.lent_bytes for each in gc.get_objects() if type(each) is host_store.HostStore)

    first = planned(inputs)
    of_first = lent_bytes()
    second = planned(inputs)
    assert 0 < of_first < lent_bytes() <= 9 << 20
    (first + second).sum().backward()
    assert lent_bytes() == 0


def test_a_step_without_a_graph_has_a_host_budget() -> None:
    class Broken(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = tanh_layers()[:12], tanh_layers()[12:]

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            hidden = self.first(inputs)
            if hidden.mean().item() > 100:
                hidden = hidden * 2
            return self.second(hidden)

    model = Broken()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = make_batch()
    step = memfit.fit(
        model, loss, batch, optimizer=optimizer, budget="70%", host_budget="16MiB", verify=True, **ONLY_OFFLOADING
    )
    step(batch)
    assert isinstance(step, CheckpointedStep)
    assert step.settings.host_budget_bytes == 16 << 20
    assert step.measure(repeats=1).peak_bytes <= step.budget_bytes


def test_an_arena_serves_a_step_that_offloads() -> None:
    step = planned_step(arena=True)
    batch = make_batch()
    for _ in range(3):
        step(batch)
    step.verify()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: torch.randn(8, 8).t(), "another order of strides"),
        (lambda: torch.randn(16, 16)[3:7, 1:5], "a part of a larger storage"),
        (lambda: torch.randn(4, 4, dtype=torch.complex64).conj(), "conjugated"),
        (lambda: torch.randn(4, 4, dtype=torch.complex64).imag._neg_view(), "negated"),
        (lambda: torch.empty(0, 5), "empty"),
        (lambda: torch.randn(3).expand(5, 3), "expanded"),
        (lambda: torch.randn(1_000_003).bfloat16(), "larger than a buffer, of an odd size"),
    ],
)
def test_a_storage_comes_back_as_it_was(make: Callable[[], torch.Tensor], why: str) -> None:
    source = make()
    whole = bytes(source.untyped_storage())
    store = host_store.HostStore(torch.device("cpu"), 1 << 24)
    copy = store.reserve(1 << 23).begin().offload(source, 4096)
    copy.wait()
    back = copy.prefetch()
    copy.arrived()
    assert bytes(back.untyped_storage()) == whole, why
    assert (back.shape, back.stride(), back.storage_offset()) == (
        source.shape,
        source.stride(),
        source.storage_offset(),
    )
    assert torch.equal(back, source) and back.is_conj() == source.is_conj() and back.is_neg() == source.is_neg()


def test_programs_of_one_device_keep_one_host_budget() -> None:
    store = host_store.HostStore(torch.device("cpu"), 9 << 20)
    first, second = store.reserve(5 << 20), store.reserve(6 << 20)
    assert store.held_bytes == 6 << 20  # the slab of the first was given back
    lease = first.begin()
    assert store.lent_bytes == 6 << 20 and store.left_bytes == 3 << 20
    with pytest.raises(UnsupportedStepError, match="raise it to 12 MiB, or call backward first"):
        second.begin()
    third = store.reserve(3 << 20)
    assert store.held_bytes == 9 << 20
    del lease
    store.reserve(7 << 20)  # of a batch of another shape, say
    assert store.held_bytes == 7 << 20
    leases = third.begin(), second.begin()
    assert [lease.slab.size_bytes for lease in leases] == [3 << 20, 6 << 20]


def test_a_full_disk_is_an_error_before_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(spill_file.os, "posix_fallocate", full)
    with pytest.raises(HostMemoryError, match=r"has no room for .*No space left on device; free some"):
        planned_step()


def test_a_directory_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    with pytest.raises(HostMemoryError, match=r"host_dir .*nowhere.* cannot be used: No such file"):
        planned_step(host_dir=tmp_path / "nowhere")


def test_file_systems_in_memory_are_found_among_the_mounts(tmp_path: Path) -> None:
    directory, mounts = tmp_path / "a disk", tmp_path / "mounts"
    mounts.write_text("/dev/vda / ext4 rw 0 0\ntmpfs {} tmpfs rw 0 0\n".format(str(directory).replace(" ", "\\040")))
    assert spill_file.is_in_memory(directory / "below", mounts)
    assert not spill_file.is_in_memory(tmp_path, mounts)
    assert not spill_file.is_in_memory(directory, tmp_path / "missing")


@pytest.mark.skipif(not spill_file.is_in_memory(SHARED_MEMORY), reason="/dev/shm is not in memory here")
def test_a_directory_in_memory_is_refused() -> None:
    with pytest.raises(HostMemoryError, match=r"host_dir '/dev/shm' is in memory, so .* frees nothing"):
        planned_step(host_dir=SHARED_MEMORY)


def test_a_host_dir_is_refused_for_what_is_on_a_gpu(tmp_path: Path) -> None:
    with pytest.raises(InvalidOptionError, match="host copies of 'cuda:0' are in pinned memory"):
        link_rates(torch.device("cuda:0"), tmp_path)


def test_a_file_system_that_cannot_preallocate_has_its_room_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    def unable(*_: int) -> None:
        raise OSError(22, "Invalid argument")  # as ext2 with direct I/O

    monkeypatch.setattr(spill_file.os, "posix_fallocate", unable)
    file = SpillFile((5 << 20) + 1)
    status = os.fstat(file._file)
    assert status.st_size == file.size_bytes == (5 << 20) + 4096 and status.st_blocks * 512 >= status.st_size


def test_a_file_system_without_direct_io_works(monkeypatch: pytest.MonkeyPatch) -> None:
    real_open = os.open

    def open_buffered(path: Any, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return real_open(path, flags, mode)

    monkeypatch.setattr(spill_file.os, "open", open_buffered)
    assert not SpillFile(4096).is_direct
    step = planned_step()
    step.verify()


def test_a_copy_that_fails_says_so_and_the_next_step_works(monkeypatch: pytest.MonkeyPatch) -> None:
    step = planned_step()
    batch = make_batch()
    expected = copy.deepcopy(step.step.model.state_dict())

    def broken(*_: Any) -> int:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(spill_file.os, "pwritev", broken)
        with pytest.raises(HostMemoryError, match=r"could not be copied to the file .*: Input/output") as raised:
            step(batch)
    assert raised.value.__notes__ == ["memfit: no parameter had been updated when the step failed; it can be run again"]
    for name, tensor in step.step.model.state_dict().items():  # it failed in the forward pass
        assert torch.equal(tensor, expected[name]), name
    step.verify()
    step(batch)


def test_ctrl_c_during_a_copy_leaves_the_next_step_working(monkeypatch: pytest.MonkeyPatch) -> None:
    step = planned_step()
    real = host_store.HostCopy.arrived

    def interrupted(_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(host_store.HostCopy, "arrived", interrupted)
        with pytest.raises(KeyboardInterrupt) as raised:
            step(make_batch())
    (note,) = raised.value.__notes__
    assert re.search(r"of 18 parameters had been updated .*, so the step is lost", note)
    assert host_store.HostCopy.arrived is real
    step.verify()


def test_the_places_of_host_copies_do_not_overlap_in_time() -> None:
    step = planned_step()
    schedule: Schedule = step.plan.schedule
    layout = host_layout(step.plan.graph, schedule, 4096)
    held: dict[int, tuple[int, int]] = {}
    for position, instruction in enumerate(schedule):
        code, storage = schedule.codes[position], int(schedule.operands[position])
        if code == Code.OFFLOAD:
            place = (layout.offsets[position], layout.offsets[position] + step.plan.graph.storages[storage].bytes)
            assert all(place[1] <= start or end <= place[0] for start, end in held.values()), instruction
            assert place[0] % 4096 == 0 and place[1] <= layout.height_bytes
            held[storage] = place
        elif code == Code.DROP_HOST:
            del held[storage]


def test_a_forked_process_has_a_file_of_its_own() -> None:
    step = planned_step()
    batch = make_batch()
    step(batch)
    store = step._store
    (file,) = [os.fstat(slab._file._file).st_ino for slab in store._free]
    process = os.fork()
    if process == 0:
        try:
            step(batch)
            os._exit(int(any(os.fstat(slab._file._file).st_ino == file for slab in store._free)))
        finally:
            os._exit(2)
    _, status = os.waitpid(process, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    step.verify()


def test_a_step_that_failed_gives_its_slab_back_while_the_error_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    need = planned_step().plan.predicted.host_peak_bytes
    step = planned_step(host_budget=need * 3 // 2)  # room for one slab

    def broken(*_: Any) -> int:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(spill_file.os, "pwritev", broken)
        with pytest.raises(HostMemoryError) as kept:
            step(make_batch())
    step(make_batch())
    assert kept.value.__notes__


def test_ctrl_c_while_a_copy_is_started_leaves_its_memory_until_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    file = SpillFile(1 << 20)
    executor = spill_file._reader(os.getpid())
    go_on, memory = threading.Event(), torch.zeros(1 << 20, dtype=torch.uint8)
    gone = weakref.ref(memory)
    executor.submit(go_on.wait)
    real = executor.submit

    def interrupted(*arguments: Any) -> Any:
        real(*arguments)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(executor, "submit", interrupted)
        with pytest.raises(KeyboardInterrupt):
            file.read(memory.data_ptr(), 1 << 20, 0, memory)
    del memory
    assert gone() is not None
    go_on.set()
    file.settle()
    assert gone() is None


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"host_budget": "50%"}, InvalidBudgetError, "host budget '50%' is a share; expected a size such as 64GiB"),
        ({"host_budget": "much"}, InvalidBudgetError, "'much'"),
        ({"host_dir": ""}, InvalidOptionError, "host_dir is '', expected the path of a directory"),
        ({"host_dir": "a\0b"}, InvalidOptionError, "expected the path of a directory"),
        ({"host_dir": 3}, InvalidOptionError, "host_dir is 3, expected the path of a directory"),
        ({"host_budget": "8KiB"}, TimeLimitError, r"raise the time limit or the budget or the host budget of 8 KiB"),
    ],
)
def test_a_host_budget_that_cannot_be_used_is_named(
    options: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        planned_step(**options)


def test_no_host_budget_is_zero_in_all_spellings() -> None:
    for nothing in (0, "0", None):
        step = planned_step(host_budget=nothing, budget="100%")
        assert step.settings.host_budget_bytes == 0


def test_a_given_plan_needs_no_more_than_a_given_host_budget() -> None:
    plan = planned_step().plan
    assert planned_step(plan=plan).plan.offloaded_bytes == plan.offloaded_bytes
    with pytest.raises(PlanMismatchError, match=r"more than the host budget of 64 KiB; plan again"):
        planned_step(plan=plan, host_budget="64KiB")


def test_a_host_dir_without_a_host_budget_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidOptionError, match="host_budget is 0, so that nothing goes there"):
        planned_step(host_dir=tmp_path, host_budget=0)
