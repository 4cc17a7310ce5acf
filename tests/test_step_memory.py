"""What serves a step's requests, on streams that are not here."""

from __future__ import annotations

from dataclasses import dataclass, field
from threading import Thread

import pytest
import torch

from memfit.memory.step_memory import Served, StepMemory
from memfit.simulate.reserved import DEFAULT
from memfit.torch_private import cuda


@dataclass(slots=True, eq=False)
class Stream:
    """A stream of the device, and those that it waited for."""

    waited_for: list[Stream] = field(default_factory=list["Stream"])

    @property
    def cuda_stream(self) -> int:
        return id(self)

    def wait_stream(self, other: Stream) -> None:
        self.waited_for.append(other)


@pytest.mark.parametrize("has_graphs", [False, True])
def test_a_call_on_another_stream_waits_and_what_is_kept_for_the_last_one_is_freed(
    has_graphs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other, freed = Stream(), Stream(), []
    on = [one]
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: on[-1])
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _device: 1000 - 100 * len(freed))
    segments = [
        {"device": 1, "stream": stream, "total_size": 50, "allocated_size": 20} for stream in (one.cuda_stream, 0)
    ]
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: segments)
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "native")
    monkeypatch.setattr(cuda, "has_captured_graphs", lambda _device: has_graphs)
    monkeypatch.setattr(cuda, "release_cublas_workspaces", lambda: freed.append("workspaces"))
    monkeypatch.setattr(cuda, "empty_cache", lambda device: freed.append(device))
    device = torch.device("cuda", 1)
    memory = StepMemory(None, None, Served(by=DEFAULT), device)
    with memory.call("a signature"):
        assert not memory.follow_stream() and not freed, "the first call, and the same stream"
    on.append(other)
    assert memory.follow_stream() is not has_graphs, "a graph has the addresses of workspaces"
    assert len(other.waited_for) == 1 and other.waited_for[0] is one and not one.waited_for
    assert freed == ([device] if has_graphs else ["workspaces", device])
    with memory.call("a signature"):
        assert len(other.waited_for) == 1
    on.append(one)
    with memory.call("a signature"):
        assert len(one.waited_for) == 1 and one.waited_for[0] is other
    freed.clear()
    thread = Thread(target=memory.follow_stream)
    thread.start()
    thread.join()
    assert freed == ([device] if has_graphs else ["workspaces", device]), "each thread has workspaces of its own"


def test_a_call_on_a_cpu_has_no_stream() -> None:
    assert not StepMemory(None, None, Served(by=DEFAULT), torch.device("cpu")).follow_stream()
