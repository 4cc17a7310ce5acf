"""Comparison bit by bit, over every dtype, lazy view and layout that a step's state can have."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from steps import make_pair

from memfit.memory.bits import same_bits, same_value
from memfit.memory.place import Place
from memfit.memory.snapshot import StepState

pytestmark = pytest.mark.filterwarnings(
    "ignore:ComplexHalf support is experimental",
    "ignore:Sparse .* tensor support is in beta",
    "ignore:The PyTorch API of nested tensors",
    "ignore:.*quantize.*deprecated",
)

COMPLEX = (torch.complex32, torch.complex64, torch.complex128)
DTYPES = sorted({kind for kind in vars(torch).values() if isinstance(kind, torch.dtype)}, key=str)
QUANTIZED = {torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4}
PLAIN = [kind for kind in DTYPES if kind not in QUANTIZED]


def from_bytes(dtype: torch.dtype, *flipped: int) -> torch.Tensor:
    """Four values of `dtype`, all of whose bits are zero but the top bits of some bytes."""
    raw = torch.zeros(4 * dtype.itemsize, dtype=torch.uint8)
    raw[list(flipped)] = 1 if dtype == torch.bool else 0x80
    return raw.view(dtype)


@pytest.mark.parametrize("dtype", PLAIN, ids=str)
def test_one_bit_differs(dtype: torch.dtype) -> None:
    """The top bit of any byte: the sign of a floating-point zero, of a complex number's real or imaginary part."""
    same = from_bytes(dtype)
    assert same_bits(same, from_bytes(dtype))
    for byte in range(4 * dtype.itemsize):
        assert not same_bits(same, from_bytes(dtype, byte))
        assert same_bits(from_bytes(dtype, byte), from_bytes(dtype, byte))


@pytest.mark.parametrize("dtype", PLAIN, ids=str)
def test_strides_do_not_count_and_shapes_do(dtype: torch.dtype) -> None:
    square = from_bytes(dtype, 1).view(2, 2)
    assert same_bits(square.t(), square.t())
    assert not same_bits(square, square.view(4))
    assert not same_bits(square[:0], square)


@pytest.mark.parametrize("dtype", COMPLEX, ids=str)
def test_a_complex_zero_has_two_signs(dtype: torch.dtype) -> None:
    zeros = [
        torch.view_as_complex(torch.tensor([real, imaginary], dtype=dtype.to_real()))
        for real in (0.0, -0.0)
        for imaginary in (0.0, -0.0)
    ]
    assert [[same_bits(one, other) for other in zeros] for one in zeros] == [
        [row == column for column in range(4)] for row in range(4)
    ]


@pytest.mark.parametrize("dtype", COMPLEX, ids=str)
def test_lazy_views_are_the_values_that_they_stand_for(dtype: torch.dtype) -> None:
    values = torch.tensor([1 + 2j, -0.0 - 0j, complex("nan+nanj")], dtype=torch.complex64).to(dtype)
    assert values.conj().is_conj()
    assert same_bits(values.conj(), values.conj().resolve_conj())
    assert values.conj().imag.is_neg()
    assert same_bits(values.conj().imag, values.conj().imag.resolve_neg())
    assert not same_bits(values.conj(), values)
    assert not same_bits(values.conj().imag, values.imag)


def test_nans_are_the_same_by_their_bits() -> None:
    quiet, other = (torch.tensor([bits], dtype=torch.int32).view(torch.float32) for bits in (0x7FC00000, 0x7FC00001))
    assert same_bits(quiet, quiet.clone())
    assert not same_bits(quiet, other)


LAYOUTS = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


def diagonal(layout: torch.layout, *values: float) -> torch.Tensor:
    """A sparse matrix with these values on its diagonal, zeros among them."""
    shape, places, data = (len(values), len(values)), torch.arange(len(values)), torch.tensor(values)
    if layout == torch.sparse_coo:
        return torch.sparse_coo_tensor(
            torch.stack([places, places]), data, shape, is_coalesced=True, check_invariants=True
        )
    if layout in (torch.sparse_bsr, torch.sparse_bsc):
        data = data.view(-1, 1, 1)
    return torch.sparse_compressed_tensor(
        torch.arange(len(values) + 1), places, data, shape, layout=layout, check_invariants=True
    )


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # of torch 2.11
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_sparse_tensors(layout: torch.layout) -> None:
    assert same_bits(diagonal(layout, 1.0, 0.0), diagonal(layout, 1.0, 0.0))
    assert not same_bits(diagonal(layout, 1.0, 0.0), diagonal(layout, 1.0, -0.0))
    assert not same_bits(diagonal(layout, 1.0, 0.0), diagonal(layout, 1.0, 0.0).to_dense())
    assert not same_bits(
        diagonal(layout, 1.0, 0.0), diagonal(layout, 1.0, 0.0).to_dense().to_sparse(layout=torch.sparse_coo)
    )


def test_quantized_tensors() -> None:
    values = torch.tensor([1.0, 2.0])
    one, scaled, moved = (
        torch.quantize_per_tensor(values * scale, scale, zero, torch.qint8) for scale, zero in ((1, 0), (2, 0), (1, 5))
    )
    assert torch.equal(one.int_repr(), scaled.int_repr())
    assert same_bits(one, torch.quantize_per_tensor(values, 1, 0, torch.qint8))
    assert not same_bits(one, scaled) and not same_bits(one, moved)
    channels = [
        torch.quantize_per_channel(torch.eye(2), torch.tensor([1.0, scale]), torch.zeros(2), 0, torch.qint8)
        for scale in (1.0, 1.0, 0.5)
    ]
    assert same_bits(channels[0], channels[1])
    assert not same_bits(channels[0], channels[2]) and not same_bits(channels[0], one)


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
def test_nested_tensors(layout: torch.layout) -> None:
    def nested(last: float) -> torch.Tensor:
        return torch.nested.nested_tensor([torch.tensor([1.0]), torch.tensor([2.0, last])], layout=layout)

    same = nested(0.0)
    assert same_bits(same, same.clone())
    assert not same_bits(same, nested(-0.0))


class Pair(torch.Tensor):
    """A wrapper subclass that holds a tensor and a scale."""

    inner: torch.Tensor
    scale: float

    @staticmethod
    def __new__(cls, inner: torch.Tensor, scale: float) -> Pair:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner: torch.Tensor, scale: float) -> None:
        self.inner, self.scale = inner, scale

    def __tensor_flatten__(self) -> tuple[list[str], float]:
        return ["inner"], self.scale

    @classmethod
    def __torch_dispatch__(cls, function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert function is torch.ops.aten.detach.default, f"{function}: comparing reads the parts only"
        return cls(args[0].inner, args[0].scale)


def test_wrapper_subclasses_are_compared_part_by_part() -> None:
    one = Pair(torch.zeros(3), 1.0)
    assert same_bits(one, Pair(torch.zeros(3), 1.0))
    assert not same_bits(one, Pair(-torch.zeros(3), 1.0))
    assert not same_bits(one, Pair(torch.zeros(3), 2.0))
    assert not same_bits(one, torch.zeros(3))


def test_a_parameter_is_compared_with_a_plain_tensor() -> None:
    assert same_bits(torch.nn.Parameter(torch.ones(2)), torch.ones(2))


@pytest.mark.parametrize(
    ("left", "right", "same"),
    [
        (0.0, -0.0, False),
        (float("nan"), float("nan"), True),
        (1, 1.0, False),
        (0j, -0j, False),
        (None, None, True),
        ([torch.zeros(2), 1], [torch.zeros(2), 1], True),
        ([torch.zeros(2)], [-torch.zeros(2)], False),
        ([torch.zeros(2)], [torch.zeros(2), torch.zeros(2)], False),
        ({"a": torch.zeros(2)}, {"a": torch.zeros(2)}, True),
        ({"a": 0.0}, {"b": 0.0}, False),
        ((0.0,), (-0.0,), False),
    ],
)
def test_values_and_containers(left: Any, right: Any, same: bool) -> None:
    assert same_value(left, right) is same


def test_an_optimizers_state_is_compared_in_both_directions() -> None:
    step, _ = make_pair("conv", lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9))
    before = StepState.take(step)
    step.run_eager(step.batch)
    for one, other in ((before, StepState.take(step)), (StepState.take(step), before)):
        found = replace(one, optimizer=other.optimizer)
        assert (one.first_difference(found) or "").startswith("optimizer state")


def test_an_optimizer_that_keeps_lists_of_tensors_is_compared() -> None:
    """LBFGS keeps its past directions in lists."""
    step, _ = make_pair("unusual", lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    assert step.optimizer is not None
    weight = step.model.get_parameter("first.weight")
    step.optimizer.state[weight] = {"old_dirs": [torch.zeros(2)], "t": 0.0}
    before = StepState.take(step)
    assert before.first_difference(StepState.take(step)) is None
    step.optimizer.state[weight]["old_dirs"][0].neg_()
    assert before.first_difference(StepState.take(step)) == "optimizer state 'old_dirs' of parameter 0"


@pytest.mark.parametrize("lazy", [torch.Tensor.conj, lambda tensor: tensor.conj().imag, lambda tensor: tensor[1:].mT])
def test_a_tensor_over_a_copy_of_its_storage_has_its_bits(lazy: Any) -> None:
    tensor = lazy(torch.randn(4, 3, dtype=torch.complex64))
    assert same_bits(Place.of(tensor).on(tensor.untyped_storage().clone()), tensor)
