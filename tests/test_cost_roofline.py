"""Rooflines: flops, bytes moved, and seconds on devices that are not here."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch

from memfit.binding import Call, Value
from memfit.capture import capture
from memfit.cost.device_profiles import load_device
from memfit.cost.rooflines import bytes_moved, dtype_of, flops_of, roofline, roofline_seconds
from memfit.device import GENERIC, Device
from memfit.errors import InvalidDeviceError
from memfit.graph import Op, Phase, Role, Storage
from memfit.workloads import build

aten = torch.ops.aten
DEVICE = Device(name="round", flops_per_second={"float32": 1e9}, memory_bytes_per_second=1e9, launch_seconds=1e-6)


def value(storage: int, *shape: int, dtype: torch.dtype = torch.float32) -> Value:
    stride = torch.empty(shape, device="meta").stride()
    return Value(storage=storage, dtype=dtype, shape=shape, stride=tuple(stride))


def call(target: Any, *args: Any, results: tuple[Value | None, ...]) -> Call:
    return Call(op=0, target=target, args=args, results=results)


def op(*, reads: tuple[int, ...] = (), mutates: tuple[int, ...] = ()) -> Op:
    return Op(id=0, name="it", phase=Phase.FORWARD, reads=reads, writes=(), mutates=mutates, seconds=0.0)


MM = call(aten.mm.default, value(0, 20, 30), value(1, 30, 40), results=(value(2, 20, 40),))
CONVOLUTION = call(
    aten.convolution.default,
    value(0, 2, 3, 16, 16),
    value(1, 8, 3, 5, 5),
    None,
    [1, 1],
    [2, 2],
    [1, 1],
    False,
    [0, 0],
    1,
    results=(value(2, 2, 8, 16, 16),),
)
CONVOLUTION_FLOPS = 2 * (2 * 8 * 16 * 16) * (3 * 5 * 5)


def backward(mask: list[bool]) -> Call:
    given = [value(3, 2, 8, 16, 16), value(0, 2, 3, 16, 16), value(1, 8, 3, 5, 5)]
    results = (value(4, 2, 3, 16, 16), value(5, 8, 3, 5, 5), value(6, 8))
    return call(
        aten.convolution_backward.default,
        *given,
        [8],
        [1, 1],
        [2, 2],
        [1, 1],
        False,
        [0, 0],
        1,
        mask,
        results=tuple(result if wanted else None for result, wanted in zip(results, mask, strict=True)),
    )


def attention(forward: Any, *, gradient: bool = False, heads: int = 4) -> Call:
    """Of four heads of queries, and so many of keys and values."""
    q, k = value(0, 2, 4, 8, 16), value(1, 2, heads, 8, 16)
    if not gradient:
        return call(forward.default, q, k, k, 0.0, False, results=(q, value(5, 2, 4, 8)))
    backward = getattr(aten, f"{forward.__name__}_backward").default
    return call(backward, q, q, k, k, q, value(5, 2, 4, 8), 0.0, False, results=(q, k, k))


ATTENTION = aten._scaled_dot_product_flash_attention_for_cpu


PRODUCT = 2 * (2 * 4) * 8 * 8 * 16  # one batched product of 8 x 16 by 16 x 8


@pytest.mark.parametrize(
    ("given", "flops"),
    [
        (MM, 2 * 20 * 30 * 40),
        (call(aten.addmm.default, value(3, 40), *MM.args, results=MM.results), 2 * 20 * 30 * 40),
        (call(aten.bmm.default, value(0, 7, 2, 3), value(1, 7, 3, 4), results=(value(2, 7, 2, 4),)), 7 * 2 * 2 * 3 * 4),
        (CONVOLUTION, CONVOLUTION_FLOPS),
        (backward([True, True, True]), 2 * CONVOLUTION_FLOPS),
        (backward([False, True, False]), CONVOLUTION_FLOPS),
        (attention(ATTENTION), 2 * PRODUCT),
        (attention(ATTENTION, gradient=True), 5 * PRODUCT),
        (attention(aten._scaled_dot_product_flash_attention, heads=1), 2 * PRODUCT),
        (attention(aten._scaled_dot_product_cudnn_attention, heads=2, gradient=True), 5 * PRODUCT),
        (call(aten.add.Tensor, value(0, 9), 1.0, results=(value(1, 9),)), 0),
    ],
    ids=lambda given: str(given.target) if isinstance(given, Call) else "",
)
def test_flops(given: Call, flops: int) -> None:
    assert flops_of(given) == flops


def test_bytes_moved_count_each_element_once() -> None:
    row = Value(storage=0, dtype=torch.float32, shape=(100, 8), stride=(0, 1))
    add = call(aten.add.Tensor, row, value(1, 100, 8), results=(value(2, 100, 8),))
    assert bytes_moved(add, op(reads=(0, 1)), ()) == 4 * (8 + 800 + 800)
    twice = call(aten.mul.Tensor, value(1, 800), value(1, 800), results=(value(2, 800),))
    assert bytes_moved(twice, op(reads=(1,)), ()) == 4 * (800 + 800)
    in_place = call(aten.add_.Tensor, value(1, 800), value(2, 800), results=(None,))
    assert bytes_moved(in_place, op(reads=(2,), mutates=(1,)), ()) == 4 * (800 + 800 + 800)


def test_what_must_not_be_run_moves_what_its_op_touches() -> None:
    class Update:
        measurable = False

    storages = tuple(Storage(id=n, name="", bytes=100 * 10**n, role=Role.STATE) for n in range(3))
    update = call(Update(), value(0, 25), results=())
    assert bytes_moved(update, op(reads=(0,), mutates=(1, 2)), storages) == 100 + 2 * 1000 + 2 * 10_000


def test_the_slowest_of_computation_traffic_and_launch_counts() -> None:
    compute_bound = roofline_seconds(MM, op(), (), msgspec.structs.replace(DEVICE, memory_bytes_per_second=1e15))
    assert compute_bound == pytest.approx(2 * 20 * 30 * 40 / 1e9)
    memory_bound = roofline_seconds(MM, op(), (), msgspec.structs.replace(DEVICE, flops_per_second={"float32": 1e15}))
    assert memory_bound == pytest.approx(4 * (600 + 1200 + 800) / 1e9)
    tiny = call(aten.add.Tensor, value(0, 1), 1.0, results=(value(1, 1),))
    assert roofline_seconds(tiny, op(), (), DEVICE) == DEVICE.launch_seconds


def test_the_dtype_is_that_of_the_first_floating_argument() -> None:
    half = value(1, 4, dtype=torch.bfloat16)
    assert dtype_of(call(aten.index.Tensor, value(0, 4, dtype=torch.long), half, results=(half,))) == torch.bfloat16
    assert dtype_of(call(aten.ones.default, [4], results=(half,))) == torch.bfloat16


def test_convolutions_run_in_tf32_where_torch_lets_them() -> None:
    rates = {"float32": 1e9, "tfloat32": 1e10}
    device = msgspec.structs.replace(DEVICE, flops_per_second=rates, memory_bytes_per_second=1e15)
    assert torch.backends.cudnn.conv.fp32_precision == "tf32"
    assert torch.backends.cuda.matmul.fp32_precision != "tf32"
    assert roofline_seconds(CONVOLUTION, op(), (), device) == pytest.approx(CONVOLUTION_FLOPS / 1e10)
    assert roofline_seconds(MM, op(), (), device) == pytest.approx(2 * 20 * 30 * 40 / 1e9)


def test_a_profile_without_the_rate_is_refused() -> None:
    with pytest.raises(InvalidDeviceError, match="profile 'generic' has no memory_bytes_per_second"):
        roofline_seconds(MM, op(), (), GENERIC)
    half = call(
        aten.mm.default,
        value(0, 2, 2, dtype=torch.bfloat16),
        value(1, 2, 2, dtype=torch.bfloat16),
        results=(value(2, 2, 2, dtype=torch.bfloat16),),
    )
    with pytest.raises(InvalidDeviceError, match="profile 't4' has no rate for bfloat16, which op 'it' computes in"):
        roofline_seconds(half, op(), (), load_device("t4"))


def test_a_real_step_on_a_device_that_is_not_here() -> None:
    captured = capture(build("unet", batch=2, size=64, width=16, optimizer="adamw"))
    seconds: dict[str, float] = {}
    for name in ("t4", "a100-40", "h100"):
        device = load_device(name)
        graph = roofline(captured.graph, captured.binding, device)
        assert all(op.seconds >= device.launch_seconds for op in graph.ops)
        assert [op.workspace_bytes for op in graph.ops] == [op.workspace_bytes for op in captured.graph.ops]
        assert graph.fingerprint == captured.graph.fingerprint
        seconds[name] = sum(op.seconds for op in graph.ops)
    assert seconds["t4"] > seconds["a100-40"] >= seconds["h100"]


def test_the_flops_of_a_step_are_those_that_torch_counts() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    step = build("unet", batch=2, size=32, width=4, levels=3)
    captured = capture(step)
    with FlopCounterMode(display=False) as counter:
        step.compute_loss(step.model, step.batch).backward()
    assert sum(flops_of(call) for call in captured.binding.calls) == counter.get_total_flops()
