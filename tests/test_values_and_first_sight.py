"""Values of tensors that become Python's, and Python state that grows with what comes: `fit` does as eager does."""

from __future__ import annotations

import copy
import dataclasses
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import memfit

_WIDTH = 8
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation")
SCALES = [torch.linspace(1, 2, 4)]


def batches(names: Sequence[str] = ("",) * 4) -> list[tuple[torch.Tensor, torch.Tensor, str]]:
    generator = torch.Generator().manual_seed(1)
    made = [torch.randn(2, 8, _WIDTH, generator=generator) for _ in names]
    return [(pair[0], pair[1], name) for pair, name in zip(made, names, strict=True)]


def loss_of(model: nn.Module, batch: Any) -> torch.Tensor:
    return functional.mse_loss(model(batch[0], batch[2]), batch[1])


def trained(
    model: Any, steps: Sequence[Any], change: Callable[[Any], Any], state: Callable[[Any], Any], *, planned: bool
) -> list[Any]:
    """Return losses and states of a training loop, and how often the step was captured."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    made = None
    if planned:
        made = memfit.fit(model, loss_of, steps[0], optimizer=optimizer, budget="1MiB", time_limit_seconds=0.2)
    found: list[Any] = []
    for number, batch in enumerate(steps):
        if number == len(steps) // 2:
            change(model)
        if made is not None:
            loss = made(batch)
        else:
            loss = loss_of(model, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append((loss.item(), copy.deepcopy(state(model))))
    return found


@dataclasses.dataclass
class Options:
    table: torch.Tensor


class Reading(nn.Module):
    """Reads numbers of tensors that are neither its parameters nor its buffers."""

    def __init__(self, read: Callable[[Any], Any]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(_WIDTH, _WIDTH), nn.Linear(_WIDTH, _WIDTH)
        self.read = read
        self.table = torch.linspace(1, 2, 4)
        self.tables = [torch.linspace(1, 2, 4)]
        self.of = {"table": torch.linspace(1, 2, 4)}
        self.options = Options(torch.linspace(1, 2, 4))
        self.space = SimpleNamespace(table=torch.linspace(1, 2, 4))
        self.one = torch.tensor(1.0)

    def forward(self, values: torch.Tensor, _: str) -> torch.Tensor:
        return self.last(torch.tanh(self.first(values)) * self.read(self))


class ReadsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        ctx.table = table
        return tensor.sin()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0] * ctx.table.tolist()[3], None


def in_a_hook(model: Any) -> torch.Tensor:
    bias = model.first.bias * 1.0
    bias.register_hook(lambda gradient: gradient * model.table.tolist()[2])
    return bias


def in_a_derivative(model: Any) -> torch.Tensor:
    made: Any = ReadsInBackward.apply(model.first.bias, model.table)
    return torch.autograd.grad(made.sum(), model.first.bias, create_graph=True)[0]


READS: dict[str, Callable[[Any], Any]] = {
    "tolist": lambda model: model.table.tolist()[3],
    "tolist of one in a list": lambda model: model.tables[0].tolist()[3],
    "tolist of one in a dictionary": lambda model: model.of["table"].tolist()[1],
    "tolist of a dataclass's": lambda model: model.options.table.tolist()[3],
    "tolist of a namespace's": lambda model: model.space.table.tolist()[3],
    "tolist of a global's": lambda _: SCALES[0].tolist()[2],
    "tolist in backward": lambda model: ReadsInBackward.apply(model.first.bias, model.table),
    "tolist in a hook": in_a_hook,
    "tolist in a derivative": in_a_derivative,
    "format of a vector": lambda model: float(f"{model.table}".split(",")[1]),
    "tolist of its data": lambda model: model.table.data.tolist()[3],
    "numpy": lambda model: float(model.table.numpy()[3]),
    "asarray": lambda model: float(np.asarray(model.table)[2]),
    "array": lambda model: float(np.array(model.table).max()),
    "dlpack": lambda model: float(np.from_dlpack(model.table)[1]),
    "a numpy function": lambda model: float(np.dot(model.table.numpy(), model.table.numpy())),
    "from_numpy": lambda model: torch.from_numpy(np.sqrt(model.table.numpy())).sum(),
    "tensor of a list": lambda model: torch.tensor([model.one, model.one]).sum(),
    "as_tensor of a list": lambda model: torch.as_tensor([model.one, 2.0]).sum(),
    "asarray of a named list": lambda model: torch.asarray(obj=[model.one, 2.0]).sum(),
    "asarray of a list": lambda model: torch.asarray([model.one, 2.0]).sum(),
    "new_tensor of a list": lambda model: model.table.new_tensor([model.one, 2.0]).sum(),
    "FloatTensor": lambda model: torch.FloatTensor([model.one, 2.0]).sum(),
    "deepcopy": lambda model: copy.deepcopy(model.table)[3],
    "repr": lambda model: float(repr(model.one)[7:-1]),
    "format": lambda model: float(f"{model.one:.2f}"),
    "item": lambda model: model.one.item(),
    "float": lambda model: float(model.one),
    "index": lambda model: [0.5, 1.0, 3.0, 4.0][model.one.long()],
    "a branch": lambda model: 2 if model.one > 1.5 else 3,
    "any": lambda model: 2 if (model.table > 3).any() else 3,
    "max of Python's": lambda model: max(model.table),
    "a key": lambda model: {1.0: 2.0, 2.0: 4.0, 4.0: 3.0}[model.one.tolist()],
    "iteration": lambda model: sum(float(value) for value in model.table),
    "equal": lambda model: 2 if torch.equal(model.one, torch.tensor(1.0)) else 3,
}


def doubled(model: Any) -> None:
    for tensor in (model.table, *model.tables, *model.of.values(), model.options.table, model.space.table, model.one):
        tensor.mul_(2)
    SCALES[0].mul_(2)


def replaced(model: Any) -> None:
    model.table, model.one = model.table * 2, model.one * 2
    model.tables[0] = model.tables[0] * 2
    model.of["table"] = model.of["table"] * 2
    model.options.table, model.space.table = model.options.table * 2, model.space.table * 2
    SCALES[0] = SCALES[0] * 2


def written_by_numpy(model: Any) -> None:
    for tensor in (model.table, *model.tables, *model.of.values(), model.options.table, model.space.table, model.one):
        tensor.numpy()[...] *= 2
    SCALES[0].numpy()[...] *= 2


@pytest.mark.parametrize(
    "change", [doubled, *(pytest.param(change, marks=pytest.mark.slow) for change in (replaced, written_by_numpy))]
)
@pytest.mark.parametrize("name", READS)
def test_a_value_that_is_read_is_guarded(name: str, change: Callable[[Any], None]) -> None:
    ways = []
    for planned in (False, True):
        torch.manual_seed(0)
        SCALES[0] = torch.linspace(1, 2, 4)
        ways.append(trained(Reading(READS[name]), batches(), change, lambda _: None, planned=planned))
    assert ways[0] == ways[1]
    assert ways[0][1][0] != ways[0][2][0]


def written(model: Any) -> float:
    value = model.table.tolist()[3]
    model.table.mul_(1.1)
    return value


def written_before(model: Any) -> float:
    model.table.mul_(1.1)
    return model.table.tolist()[3]


def written_as_array(model: Any) -> float:
    array = model.table.numpy()
    array *= 1.1
    return float(array[3])


@pytest.mark.parametrize("read", [written, written_before, written_as_array])
def test_a_step_that_writes_what_it_reads_is_no_graph(read: Callable[[Any], float]) -> None:
    ways = []
    for planned in (False, True):
        torch.manual_seed(0)
        model = Reading(read)
        ways.append(trained(model, batches(), lambda _: None, lambda m: m.table.tolist(), planned=planned))
    assert ways[0] == ways[1]


class Naming(nn.Module):
    """Numbers names as they come."""

    def __init__(self, number: Callable[[Any, str], int]) -> None:
        super().__init__()
        self.first, self.weights, self.number = nn.Linear(_WIDTH, _WIDTH), nn.Embedding(8, _WIDTH), number
        self.ids: Any = {}
        self.names: list[str] = []
        self.seen: set[str] = set()
        self.ordered: OrderedDict[str, int] = OrderedDict()
        self.counting: defaultdict[str, int] = defaultdict(lambda: len(self.counting))
        self.space = SimpleNamespace(ids={})
        self.last = ""
        self.sizes: tuple[int, ...] = ()
        self.greatest = 0

    def forward(self, values: torch.Tensor, name: str) -> torch.Tensor:
        return self.first(values) + self.weights.weight[self.number(self, name)]

    def state(self) -> Any:
        return self.ids, self.names, self.seen, dict(self.space.ids), self.ordered, self.last, self.sizes, self.greatest


def by_list(model: Any, name: str) -> int:
    if name not in model.names:
        model.names.append(name)
    return model.names.index(name)


def by_set(model: Any, name: str) -> int:
    model.seen.add(name)
    return len(model.seen)


def by_length(model: Any, name: str) -> int:
    if name not in model.ids:
        model.ids[name] = True
    return len(model.ids)


def by_first(model: Any, name: str) -> int:
    if not model.last:
        model.last = name
    return 1 if model.last == name else 2


def by_lazy_dictionary(model: Any, name: str) -> int:
    if not hasattr(model, "lazy"):
        model.lazy = {}
    return model.lazy.setdefault(name, len(model.lazy))


def by_lazy_count(model: Any, name: str) -> int:
    if model.ids is None or not model.ids:
        model.ids = {}
    model.ids.setdefault(name, 0)
    return len(model.ids)


def by_tuple(model: Any, name: str) -> int:
    if ord(name) not in model.sizes:
        model.sizes = (*model.sizes, ord(name))
    return model.sizes.index(ord(name))


def by_greatest(model: Any, name: str) -> int:
    model.greatest = max(model.greatest, ord(name) - ord("a"))
    return model.greatest


def by_exists(model: Any, name: str) -> int:
    try:
        return model.ids[name]
    except KeyError:
        model.ids[name] = len(model.ids) + 1
        return model.ids[name]


NUMBERS: dict[str, Callable[[Any, str], int]] = {
    "setdefault": lambda model, name: model.ids.setdefault(name, len(model.ids)),
    "setdefault of an ordered dictionary": lambda model, name: model.ordered.setdefault(name, len(model.ordered)),
    "setdefault of another object's": lambda model, name: model.space.ids.setdefault(name, len(model.space.ids)),
    "a default dictionary": lambda model, name: model.counting[name],
    "a list": by_list,
    "a set's length": by_set,
    "a dictionary's length": by_length,
    "the first name": by_first,
    "a dictionary made lazily": by_lazy_dictionary,
    "a dictionary made anew while empty": by_lazy_count,
    "a tuple": by_tuple,
    "the greatest so far": by_greatest,
    "an exception": by_exists,
}


@pytest.mark.parametrize("number", NUMBERS)
def test_what_is_numbered_as_it_comes(number: str) -> None:
    ways = []
    for planned in (False, True):
        torch.manual_seed(0)
        model = Naming(NUMBERS[number])
        ways.append(trained(model, batches("abacbcab"), lambda _: None, Naming.state, planned=planned))
    assert ways[0] == ways[1]


def test_what_a_step_sets_and_does_not_read_is_set() -> None:
    class Noting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(_WIDTH, _WIDTH)

        def forward(self, values: torch.Tensor, name: str) -> torch.Tensor:
            self.latest, self.shape = name, tuple(values.shape)
            return self.layer(values)

    ways = []
    for planned in (False, True):
        torch.manual_seed(0)
        ways.append(trained(Noting(), batches("abab"), lambda _: None, lambda m: (m.latest, m.shape), planned=planned))
    assert ways[0] == ways[1]


def test_what_grows_in_backward() -> None:
    class Growing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, tensor: torch.Tensor, sizes: list[int]) -> torch.Tensor:
            ctx.sizes = sizes
            return tensor.sin()

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
            ctx.sizes.append(len(gradients[0]))
            return gradients[0] * len(ctx.sizes), None

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.sizes = nn.Linear(_WIDTH, _WIDTH), list[int]()

        def forward(self, values: torch.Tensor, _: str) -> torch.Tensor:
            grown: Any = Growing.apply(self.layer(values), self.sizes)
            return grown

    ways = []
    for planned in (False, True):
        torch.manual_seed(0)
        ways.append(trained(Model(), batches(), lambda _: None, lambda model: model.sizes, planned=planned))
    assert ways[0] == ways[1]
