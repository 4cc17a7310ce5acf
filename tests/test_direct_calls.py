"""Direct calls: the functions that stand for operators' overloads, and what keeps a wrong one from being used."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import memfit
from memfit.binding import Value
from memfit.kernels.direct_calls import DirectCalls, are_same_arguments
from memfit.torch_private.tensors import bare_overload

aten = torch.ops.aten


def value(*shape: int, dtype: torch.dtype = torch.float32, storage: int = 0, conjugated: bool = False) -> Value:
    stride = tuple(torch.empty(shape, device="meta").stride())
    return Value(storage=storage, dtype=dtype, shape=shape, stride=stride, conjugated=conjugated)


A, B, NUMBER = value(4, 4), value(4, 4, storage=1), value(storage=2)


@pytest.mark.parametrize(
    ("target", "args", "kwargs", "expected"),
    [
        (aten.mul.Tensor, (A, B), {}, torch.mul),
        (aten.mul.Tensor, (A, NUMBER), {}, torch.mul),
        (aten.mul.Tensor, (A, 2.0), {}, torch.mul),
        (aten.add.out, (A, B), {"out": A}, torch.add),
        (aten.add_.Tensor, (A, B), {"alpha": 2}, torch.Tensor.add_),
        (aten.sum.dim_IntList, (A, [0], True), {}, torch.sum),
        (aten.cat.default, ([A, B], 1), {}, torch.cat),
        (aten.gelu.default, (A,), {"approximate": "tanh"}, torch.nn.functional.gelu),
    ],
)
def test_a_function_with_code_of_its_own_stands_for_an_overload(
    target: Any, args: Any, kwargs: Any, expected: Any
) -> None:
    assert DirectCalls().find(target, args, kwargs) is expected


@pytest.mark.parametrize(
    ("target", "args"),
    [
        (aten.tanh_backward.default, (A, B)),  # torch has no other function for it
        (aten.empty.memory_format, ([4],)),  # what no tensor says of its device, torch may have a default for
        (aten.mul.Tensor, (value(4, dtype=torch.complex64, conjugated=True), A)),
        (aten.pow.Tensor_Tensor, (A, "no tensor")),
    ],
)
def test_a_call_that_no_function_was_seen_to_make_is_the_overloads(target: Any, args: Any) -> None:
    assert DirectCalls().find(target, args, {}) == bare_overload(target)


@pytest.mark.parametrize("other", [torch.add, torch.mm, torch.is_tensor, torch.Tensor.mul_, lambda a, b: a * b])
def test_a_function_that_calls_something_else_is_not_used(other: Any) -> None:
    assert DirectCalls([SimpleNamespace(mul=other)]).find(aten.mul.Tensor, (A, B), {}) == bare_overload(aten.mul.Tensor)


@pytest.mark.parametrize("start", [0, -1])
def test_the_same_operator_with_other_arguments_is_not_used(start: int) -> None:
    """`narrow` calls `slice` with the end in the place of the length, and with the start counted from the left."""
    found = DirectCalls([SimpleNamespace(slice=torch.narrow)]).find(aten.slice.Tensor, (A, 0, start, 1), {})
    assert found == (torch.narrow if start == 0 else bare_overload(aten.slice.Tensor))


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ([A, 1], [A, 1], True),
        (1, 1.0, False),
        (1, True, False),
        (0.0, -0.0, False),
        ((1, 2), [1, 2], False),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}, True),
        ({"a": 1}, {"a": 1, "b": 2}, False),
        (torch.float32, torch.float64, False),
    ],
)
def test_arguments_are_compared_with_their_types(one: Any, other: Any, same: bool) -> None:
    assert are_same_arguments(one, other) == same


def test_two_equal_tensors_are_two_arguments() -> None:
    one, other = torch.ones(2), torch.ones(2)
    assert are_same_arguments([one], [one]) and not are_same_arguments([one], [other])


def test_what_is_no_operator_is_called_itself() -> None:
    def target(x: torch.Tensor) -> torch.Tensor:
        return x

    assert DirectCalls().find(target, (A,), {}) is target


def test_a_view_is_made_once_and_deleted_with_its_storage() -> None:
    cell = torch.nn.LSTMCell(8, 8)

    def loss(model: torch.nn.LSTMCell, rows: torch.Tensor) -> torch.Tensor:
        state: Any = None
        for row in rows:
            state = model(row, state)
        return state[0].sum()

    step = memfit.fit(cell, loss, torch.randn(5, 2, 8), budget="1GiB", planner="none", verify=True)
    made = [line for line in step.source.splitlines() if ":= as_strided" in line]
    assert made
    for name in (
        word for line in made for word in line.replace("(", " ").split() if word[:1] == "v" and word[1:].isdigit()
    ):
        uses = [line for line in step.source.splitlines() if f" {name} " in line.replace(",", " ").replace("(", " ")]
        assert sum(":=" in line and f"({name} :=" in line for line in uses) == 1, uses
    weight = [line for line in made if "(8, 32), (1, 8), 0)" in line]
    assert len(weight) == 2, "the transposed weights of five steps, one view each"
    gates = [line for line in step.source.splitlines() if "sigmoid__" in line and "; " in line]
    assert len(gates) == 5, "writes to the gates' quarters stand in the line of the addition that makes them"
