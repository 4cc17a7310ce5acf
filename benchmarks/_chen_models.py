"""The networks of Chen 2016, section 5: ResNet of any depth, an LSTM of any length, and its graph by repetition."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import torch
from torch import Tensor, nn
from torch.nn import functional

from memfit import TrainingStep
from memfit.capture import capture
from memfit.graph import Graph, Op, Storage

_STAGES = (3, 4, 6, 3)  # units of the four stages of ResNet-50; deeper ones grow in this proportion
_LEARNING_RATE = 0.1
_FAR_PERIODS = 2  # an op that reads further back than this reads something at the head
_EDGE_PERIODS = 4  # periods at both ends of a graph that are taken as they stand, the others are repetitions


class Unit(nn.Module):
    """A bottleneck of three bn-relu-conv (He et al. 2016, "Identity mappings in deep residual networks")."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.bn1, self.conv1 = nn.BatchNorm2d(inputs), nn.Conv2d(inputs, width, 1, bias=False)
        self.bn2, self.conv2 = nn.BatchNorm2d(width), nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.bn3, self.conv3 = nn.BatchNorm2d(width), nn.Conv2d(width, outputs, 1, bias=False)
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False) if inputs != outputs or stride != 1 else None

    def forward(self, images: Tensor) -> Tensor:
        first = functional.relu(self.bn1(images))
        features = self.conv1(first)
        features = self.conv2(functional.relu(self.bn2(features)))
        features = self.conv3(functional.relu(self.bn3(features)))
        return features + (images if self.shortcut is None else self.shortcut(first))


class ResNet(nn.Module):
    """A residual network of so many layers; conv-bn-relu counts as one."""

    def __init__(self, layers: int, width: int = 64, classes: int = 1000) -> None:
        super().__init__()
        self.stem, self.bn = nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width)
        units: list[nn.Module] = []
        inputs = width
        for stage, count in enumerate(units_of(layers)):
            for number in range(count):
                units.append(Unit(inputs, width << stage, 2 if stage and not number else 1))
                inputs = 4 * (width << stage)
        self.units = nn.Sequential(*units)
        self.last_bn, self.head = nn.BatchNorm2d(inputs), nn.Linear(inputs, classes)

    def forward(self, images: Tensor) -> Tensor:
        features = functional.max_pool2d(functional.relu(self.bn(self.stem(images))), 3, 2, 1)
        features = functional.relu(self.last_bn(self.units(features)))
        return self.head(features.mean((2, 3)))


def units_of(layers: int) -> list[int]:
    """Return the units of each stage: a third of the layers, less stem and head, in ResNet-50's proportion."""
    units = (layers - 2) // 3
    ends = [round(units * sum(_STAGES[: stage + 1]) / sum(_STAGES)) for stage in range(len(_STAGES))]
    return [end - start for start, end in zip([0, *ends], ends, strict=False)]


def resnet_step(layers: int, batch: int, size: int, *, width: int = 64, device: str = "meta") -> TrainingStep:
    """Return the step with plain SGD, so that each weight gradient is used up at once."""
    with torch.device(device):
        model = ResNet(layers, width)
        images, labels = torch.randn(batch, 3, size, size), torch.randint(1000, (batch,))
    optimizer = torch.optim.SGD(model.parameters(), lr=_LEARNING_RATE)
    return TrainingStep(
        model=model, loss=functional.cross_entropy, batch=(images, labels), optimizer=optimizer, name=f"resnet{layers}"
    )


class LSTM(nn.Module):
    """Cells in layers, unrolled; the loss of every step is added up on the way."""

    def __init__(self, layers: int, hidden: int, inputs: int, classes: int) -> None:
        super().__init__()
        self.hidden = hidden
        self.cells = nn.ModuleList(nn.LSTMCell(hidden if layer else inputs, hidden) for layer in range(layers))
        self.head = nn.Linear(hidden, classes)

    def forward(self, series: Tensor, labels: Tensor) -> Tensor:
        nothing = series.new_zeros(series.shape[1], self.hidden)
        states: list[tuple[Tensor, Tensor]] = [(nothing, nothing)] * len(self.cells)
        total = series.new_zeros(())
        for moment, label in zip(series.unbind(), labels.unbind(), strict=True):
            for layer, cell in enumerate(self.cells):
                states[layer] = cell(moment, states[layer])
                moment = states[layer][0]
            total = total + functional.cross_entropy(self.head(moment), label)
        return total


def sum_of_losses(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return model(*batch)


@dataclass(frozen=True, slots=True, kw_only=True)
class LSTMSizes:
    """The paper's: 4 layers of 1024, batch 64, 50 inputs, softmax over 5000."""

    layers: int = 4
    hidden: int = 1024
    batch: int = 64
    inputs: int = 50
    classes: int = 5000


def lstm_step(steps: int, sizes: LSTMSizes, *, device: str = "meta") -> TrainingStep:
    """Return the unrolled LSTM with plain SGD."""
    with torch.device(device):
        model = LSTM(sizes.layers, sizes.hidden, sizes.inputs, sizes.classes)
        series = torch.randn(steps, sizes.batch, sizes.inputs)
        labels = torch.randint(sizes.classes, (steps, sizes.batch))
    optimizer = torch.optim.SGD(model.parameters(), lr=_LEARNING_RATE)
    return TrainingStep(
        model=model, loss=sum_of_losses, batch=(series, labels), optimizer=optimizer, name=f"lstm{steps}"
    )


@dataclass(frozen=True, slots=True)
class _Part:
    """Forward or backward ops of a capture, as ranges of op ids, and how many of them a time step has."""

    start: int
    end: int
    period: int

    def template(self, index: int, length: int) -> tuple[int, int]:
        """For op `index` of a part of `length` ops: the captured op that it repeats, and by how many periods."""
        edge, here = _EDGE_PERIODS * self.period, self.end - self.start
        if index < edge + self.period:
            return index, 0
        if index >= length - edge:
            return index - length + here, (length - here) // self.period
        within = edge + (index - edge) % self.period
        return within, (index - within) // self.period


def _renumbered(op: Op, number: int, moved: dict[int, int]) -> Op:
    """Return the op with another id and other storages, without a name."""
    return msgspec.structs.replace(
        op,
        id=number,
        name="",
        reads=tuple(moved[storage] for storage in op.reads),
        writes=tuple(moved[storage] for storage in op.writes),
        reuses=tuple((moved[read], moved[written]) for read, written in op.reuses),
    )


class RepeatedLSTM:
    """The graph of the unrolled LSTM for any number of steps, from the real capture of a few."""

    captured_steps = 2 * _EDGE_PERIODS + 4

    def __init__(self, sizes: LSTMSizes) -> None:
        one = capture(lstm_step(self.captured_steps, sizes)).graph
        more = capture(lstm_step(self.captured_steps + 1, sizes)).graph
        self.graph, self.more = one, more
        starts = [next(i for i, op in enumerate(graph.ops) if op.phase != "forward") for graph in (one, more)]
        ends = [len(graph.ops) for graph in (one, more)]
        self.forward = _Part(0, starts[0], starts[1] - starts[0])
        self.backward = _Part(starts[0], ends[0], ends[1] - starts[1] - ends[0] + starts[0])
        self.residents = [storage for storage in one.storages if storage.resident]

    def graph_of(self, steps: int) -> Graph:
        """Return the graph of `steps` time steps."""
        more = steps - self.captured_steps
        lengths = [part.end - part.start + more * part.period for part in (self.forward, self.backward)]
        ops: list[Op] = []
        storages = self._residents(more)
        first_write: list[int] = []  # op -> its first storage
        for part, length in zip((self.forward, self.backward), lengths, strict=True):
            for index in range(length):
                within, periods = part.template(index, length)
                op = self.graph.ops[part.start + within]
                first_write.append(len(storages))
                number = len(ops)
                moved = {s: self._moved(s, op, number, periods, more, first_write) for s in op.reads}
                for storage in op.writes:
                    moved[storage] = len(storages)
                    storages.append(msgspec.structs.replace(self.graph.storages[storage], id=len(storages), name=""))
                ops.append(_renumbered(op, number, moved))
        return Graph.build(name=f"lstm{steps}", storages=storages, ops=ops, device=self.graph.device)

    def _residents(self, more: int) -> list[Storage]:
        """What is there from the start; the batch grows by the step."""
        longer = [storage for storage in self.more.storages if storage.resident]
        return [
            msgspec.structs.replace(one, bytes=one.bytes + more * (other.bytes - one.bytes))
            for one, other in zip(self.residents, longer, strict=True)
        ]

    def _moved(self, storage: int, op: Op, number: int, periods: int, more: int, first_write: Sequence[int]) -> int:
        """Return the storage that op `number` reads where the captured `op` that it repeats reads `storage`.

        Both passes count from where they meet: a forward op is so many before the end of forward, and each period of
        backward lies one period of forward further back. An op that moved with its reader keeps its distance; one that
        is far before it in the same part stands at the head, where all periods read it; one where the two passes meet
        (the gradient of the loss itself) stays there.
        """
        writer = self.graph.writer_of.get(storage)
        if writer is None:
            return storage
        place = self.graph.ops[writer].writes.index(storage)
        part = self.forward if op.id < self.forward.end else self.backward
        longer = more * self.forward.period
        if writer >= part.start:
            is_far = op.id - writer > _FAR_PERIODS * part.period
            moved = writer + (longer if part is self.backward else 0) if is_far else number - (op.id - writer)
        elif self.forward.end - writer <= _FAR_PERIODS * self.forward.period:
            moved = writer + longer
        else:
            moved = writer + longer - periods * self.forward.period
        return first_write[moved] + place
