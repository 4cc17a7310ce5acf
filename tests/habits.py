"""Habits of training loops, as users write them: each a model, its loop, and what the loop does beside it.

`habit_runs.py` takes them through the doors of memfit.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.nn import functional
from torch.nn.utils import parametrize, prune

WIDTH, ROWS, CLASSES, LAYERS = 96, 640, 10, 5


class Mlp(nn.Module):
    """A residual block; classes of it change `mix`."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm, self.first, self.last = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def mix(self, hidden: Tensor) -> Tensor:
        return functional.gelu(hidden)

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs + self.last(self.mix(self.first(self.norm(inputs))))


class Net(nn.Module):
    """Blocks between an embedding and a head."""

    def __init__(self, block: Callable[[], nn.Module] = Mlp, layers: int = LAYERS, classes: int = CLASSES) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(layers))
        self.head = nn.Linear(WIDTH, classes)

    def features(self, inputs: Tensor) -> Tensor:
        hidden = self.stem(inputs)
        for block in self.blocks:
            hidden = block(hidden)
        return hidden

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.features(inputs))


def batch(number: int, rows: int = ROWS) -> Any:
    """Return inputs and labels, the same for a number."""
    generator = torch.Generator().manual_seed(number)
    inputs = torch.randn(rows, WIDTH, generator=generator)
    return inputs, torch.randint(0, CLASSES, (rows,), generator=generator)


def entropy(call: Any, given: Any) -> Tensor:
    """Return the cross entropy of a call."""
    return functional.cross_entropy(call(given[0]), given[1])


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Return AdamW of what trains."""
    return torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-3)


Change = Callable[[Any, int], object]


@dataclass(kw_only=True)
class Habit:
    """A model and its loop.

    Attributes:
        model: in training.
        optimizer: of it.
        loss: of what is called in the model's place, and a batch.
        batch: by the number of the step.
        before, after: are given the habit and the number of a step.
        own: a step of the habit's own, given the habit, what is called, and the number; then `fit` has no part in it.
        beside: anything else that the loop holds.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    loss: Callable[[Any, Any], Tensor] = entropy
    batch: Callable[[int], Any] = batch
    before: Change | None = None
    after: Change | None = None
    own: Callable[[Any, Any, int], Tensor] | None = None
    beside: Any = field(default_factory=SimpleNamespace)

    def step(self, call: Any, number: int) -> Tensor:
        """Train one step as a bare loop does."""
        if self.own is not None:
            return self.own(self, call, number)
        loss = self.loss(call, self.batch(number))
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


def habit(model: nn.Module | None = None, **options: Any) -> Habit:
    """Return a habit with a plain model and AdamW, unless it is given others."""
    model = Net() if model is None else model
    options.setdefault("optimizer", adamw(model))
    return Habit(model=model, **options)


# Optimizers and their steps


def sam(own: Habit, call: Any, number: int) -> Tensor:
    """Sharpness-aware minimization: the gradient is taken a little uphill."""
    given = own.batch(number)
    loss = own.loss(call, given)
    loss.backward()
    moved: list[tuple[Tensor, Tensor]] = []
    with torch.no_grad():
        norm = torch.stack([each.grad.norm() for each in own.model.parameters() if each.grad is not None]).norm()
        for each in own.model.parameters():
            if each.grad is not None:
                moved.append((each, each.grad * (0.05 / (norm + 1e-12))))
                each.add_(moved[-1][1])
    own.optimizer.zero_grad()
    own.loss(call, given).backward()
    with torch.no_grad():
        for each, step in moved:
            each.sub_(step)
    own.optimizer.step()
    own.optimizer.zero_grad()
    return loss.detach()


class Lookahead(torch.optim.Optimizer):
    """Slow weights that follow the fast ones every second step."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner, self.calls = inner, 0
        super().__init__(inner.param_groups, {})
        self.param_groups = inner.param_groups
        self.slow = [each.detach().clone() for group in self.param_groups for each in group["params"]]

    def step(self, closure: Any = None) -> Any:
        """Update."""
        self.inner.step(closure)
        self.calls += 1
        if self.calls % 2 == 0:
            with torch.no_grad():
                for slow, fast in zip(
                    self.slow, (p for group in self.param_groups for p in group["params"]), strict=True
                ):
                    slow.lerp_(fast, 0.5)
                    fast.copy_(slow)


class Muon(torch.optim.Optimizer):
    """Momentum whose matrices are made orthogonal by Newton and Schulz."""

    def __init__(self, parameters: Any, lr: float = 0.02) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": 0.9})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # noqa: ARG002
        """Update."""
        for group in self.param_groups:
            for each in group["params"]:
                if each.grad is None:
                    continue
                held = self.state[each].setdefault("momentum", torch.zeros_like(each))
                held.mul_(group["momentum"]).add_(each.grad)
                update = held
                if each.ndim == 2:
                    update = held / (held.norm() + 1e-7)
                    for _ in range(3):
                        product = update @ update.mT
                        update = 1.5 * update - 0.5 * product @ update
                each.add_(update, alpha=-group["lr"])


def clip_by_value(own: Habit, call: Any, number: int) -> Tensor:
    """Accumulate over two micro-batches, and clip each gradient."""
    total = torch.zeros(())
    for part in range(2):
        loss = own.loss(call, own.batch(2 * number + part)) / 2
        loss.backward()
        total += loss.detach()
    torch.nn.utils.clip_grad_value_(own.model.parameters(), 0.01)
    own.optimizer.step()
    own.optimizer.zero_grad(set_to_none=False)
    return total


def by_grad(own: Habit, call: Any, number: int) -> Tensor:
    """Take gradients by torch.autograd.grad, center them, and set them."""
    parameters = list(own.model.parameters())
    loss = own.loss(call, own.batch(number))
    for each, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
        each.grad = gradient - gradient.mean() if gradient.ndim > 1 else gradient
    own.optimizer.step()
    own.optimizer.zero_grad()
    return loss.detach()


def of_inputs(own: Habit, call: Any, number: int) -> Tensor:
    """Let backward reach some parameters only."""
    loss = own.loss(call, own.batch(number))
    loss.backward(inputs=[*own.model.head.parameters(), *own.model.blocks[-1].parameters()])  # pyright: ignore
    own.optimizer.step()
    own.optimizer.zero_grad()
    return loss.detach()


def skips_bad(own: Habit, call: Any, number: int) -> Tensor:
    """Skip a batch whose loss is not finite."""
    inputs, labels = own.batch(number)
    loss = own.loss(call, (inputs * torch.inf if number == 2 else inputs, labels))
    if torch.isfinite(loss):
        loss.backward()
        own.optimizer.step()
    own.optimizer.zero_grad()
    return loss.detach().nan_to_num()


def scaled_half(own: Habit, call: Any, number: int) -> Tensor:
    """Autocast to bfloat16, with a scaler that is off, as one code for all devices has it."""
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    with torch.autocast("cpu", torch.bfloat16):
        loss = own.loss(call, own.batch(number))
    scaler.scale(loss).backward()
    scaler.unscale_(own.optimizer)
    torch.nn.utils.clip_grad_norm_(own.model.parameters(), 1.0)
    scaler.step(own.optimizer)
    scaler.update()
    own.optimizer.zero_grad()
    return loss.detach()


def two_losses(own: Habit, call: Any, number: int) -> Tensor:
    """Project one task's gradient off another's that conflicts with it (PCGrad)."""
    inputs, labels = own.batch(number)
    outputs = call(inputs)
    losses = functional.cross_entropy(outputs, labels), outputs.square().mean()
    parameters = list(own.model.parameters())
    grads = [torch.autograd.grad(each, parameters, retain_graph=True) for each in losses]
    dot = sum((one * other).sum() for one, other in zip(*grads, strict=True))
    size = sum(other.square().sum() for other in grads[1])
    for each, one, other in zip(parameters, *grads, strict=True):
        each.grad = one - torch.clamp(dot / size, max=0.0) * other + other
    own.optimizer.step()
    own.optimizer.zero_grad()
    return losses[0].detach()


# Losses and models


def rdrop(call: Any, given: Any) -> Tensor:
    """Two passes with other dropout, drawn towards each other."""
    one, other = (functional.log_softmax(call(given[0]), -1) for _ in range(2))
    apart = functional.kl_div(one, other, log_target=True, reduction="batchmean")
    return functional.nll_loss(one, given[1]) + apart


class Dropping(Mlp):
    """With dropout."""

    def mix(self, hidden: Tensor) -> Tensor:
        return functional.dropout(functional.gelu(hidden), 0.2, self.training)


class Uncertain(Net):
    """Two tasks, weighted by what is learned of their noise."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterDict(
            {"labels": nn.Parameter(torch.zeros(())), "size": nn.Parameter(torch.zeros(()))}
        )
        self.size = nn.Linear(WIDTH, 1)

    def forward(self, inputs: Tensor, labels: Tensor | None = None) -> Tensor:
        hidden = self.features(inputs)
        losses = {
            "labels": functional.cross_entropy(self.head(hidden), labels),
            "size": (self.size(hidden)[:, 0] - inputs.norm(dim=1)).square().mean(),
        }
        return sum(torch.exp(-self.weights[name]) * loss + self.weights[name] for name, loss in losses.items())  # type: ignore


class Reversal(torch.autograd.Function):
    """Hands gradients on with the other sign."""

    @staticmethod
    def forward(context: Any, values: Tensor, share: float) -> Tensor:
        context.share = share
        return values.view_as(values)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> Any:
        return -context.share * gradients[0], None


class Adversarial(Net):
    """Domains that the features must not tell (DANN); how much grows with the steps."""

    def __init__(self) -> None:
        super().__init__()
        self.domain, self.share = nn.Linear(WIDTH, 2), 0.0

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.features(inputs)
        return self.head(hidden), self.domain(Reversal.apply(hidden, self.share))  # pyright: ignore


def domains(call: Any, given: Any) -> Tensor:
    """Return the loss of labels and of domains."""
    labels, domain = call(given[0])
    return functional.cross_entropy(labels, given[1]) + functional.cross_entropy(domain, given[1] % 2)


class Codebook(Net):
    """Features that are replaced by the nearest code, with gradients straight through; usage is counted in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Embedding(32, WIDTH)
        self.register_buffer("used", torch.zeros(32))

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.features(inputs)
        nearest = torch.cdist(hidden, self.codes.weight).argmin(1)
        chosen = self.codes(nearest)
        self.used.mul_(0.9).add_(torch.bincount(nearest, minlength=32), alpha=0.1)
        lost = functional.mse_loss(chosen, hidden.detach()) + 0.25 * functional.mse_loss(hidden, chosen.detach())
        return self.head(hidden + (chosen - hidden).detach()), lost


def with_commitment(call: Any, given: Any) -> Tensor:
    """Return the loss of labels and codes."""
    outputs, lost = call(given[0])
    return functional.cross_entropy(outputs, given[1]) + lost


class Queue(Net):
    """A queue of keys beside the model (MoCo), written where a buffer points to."""

    def __init__(self) -> None:
        super().__init__(classes=32)
        self.register_buffer("queue", functional.normalize(torch.randn(32, 4 * ROWS), dim=0))
        self.register_buffer("place", torch.zeros(1, dtype=torch.long))

    def forward(self, inputs: Tensor) -> Tensor:
        query = functional.normalize(self.head(self.features(inputs)), dim=1)
        with torch.no_grad():
            keys = functional.normalize(self.head(self.features(inputs + 0.1)), dim=1)
        logits = torch.cat([(query * keys).sum(1, keepdim=True), query @ self.queue.clone().detach()], 1)
        at = int(self.place)
        self.queue[:, at : at + len(keys)] = keys.T
        self.place[0] = (at + len(keys)) % self.queue.shape[1]
        return functional.cross_entropy(logits / 0.07, torch.zeros(len(logits), dtype=torch.long))


class Clip(nn.Module):
    """Two towers with a temperature that the loop clamps in place."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.text = Net(layers=2, classes=32), Net(layers=2, classes=32)
        self.scale = nn.Parameter(torch.tensor(4.0))

    def forward(self, images: Tensor, texts: Tensor) -> Tensor:
        one, other = (functional.normalize(each, dim=-1) for each in (self.image(images), self.text(texts)))
        return self.scale.exp() * one @ other.T


def contrastive(call: Any, given: Any) -> Tensor:
    """Return the symmetric loss of pairs."""
    logits = call(given[0], given[0].flip(1))
    ends = torch.arange(len(logits))
    return (functional.cross_entropy(logits, ends) + functional.cross_entropy(logits.T, ends)) / 2


def clamp_scale(own: Habit, _number: int) -> None:
    own.model.scale.data.clamp_(0, 4.01)  # pyright: ignore


class Watched(Net):
    """Features that hooks keep for a loss on them (perceptual losses, distillation of layers)."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[str, Tensor] = {}
        for name, block in self.blocks.named_children():
            block.register_forward_hook(partial(self._keep, name))

    def _keep(self, name: str, _module: nn.Module, _inputs: Any, outputs: Tensor) -> None:
        self.kept[name] = outputs


def of_features(model: Any, call: Any, given: Any) -> Tensor:
    """Return a loss that reads what hooks have kept."""
    loss = entropy(call, given)
    return loss + 0.01 * sum(each.square().mean() for each in model.kept.values())


def watched() -> Habit:
    model = Watched()
    return habit(model, loss=partial(of_features, model), after=lambda own, _number: own.model.kept.clear())


class Steered(Net):
    """A hook that adds a direction to what a block returns."""

    def __init__(self) -> None:
        super().__init__()
        direction = torch.randn(WIDTH)
        self.blocks[1].register_forward_hook(lambda _module, _inputs, outputs: outputs + 0.1 * direction)
        self.blocks[2].register_forward_pre_hook(lambda _module, inputs: (inputs[0] * 1.01,))
        self.blocks[3].register_full_backward_hook(lambda _module, grads, _outputs: tuple(each * 0.9 for each in grads))


class Low(nn.Module):
    """A change of low rank, as a parametrization."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.down = nn.Parameter(torch.randn(4, weight.shape[1]) / 9)
        self.up = nn.Parameter(torch.randn(weight.shape[0], 4) / 9)

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.up @ self.down


def parametrized() -> Habit:
    model = Net().requires_grad_(False)
    for block in model.blocks:
        parametrize.register_parametrization(block.first, "weight", Low(block.first.weight))  # pyright: ignore
    return habit(model)


def pruned() -> Habit:
    model = Net()
    for block in model.blocks:
        prune.l1_unstructured(block.first, "weight", amount=0.3)  # pyright: ignore
    return habit(model)


def spectral() -> Habit:
    """The older spectral_norm, whose hook brings a buffer up to date before each call."""
    model = Net()
    for block in model.blocks:
        torch.nn.utils.spectral_norm(block.first)  # pyright: ignore
    return habit(model)


class Frozen(Net):
    """Normalizations that `train()` leaves in evaluation, as detectors have them."""

    def __init__(self) -> None:
        super().__init__(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU(inplace=True)))

    def train(self, mode: bool = True) -> Frozen:
        super().train(mode)
        for module in self.modules():
            if isinstance(module, nn.BatchNorm1d):
                module.eval()
        return self


class Recurrent(nn.Module):
    """Truncated backpropagation: the state goes from step to step, detached."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRU(WIDTH, WIDTH, num_layers=2, batch_first=True), nn.Linear(WIDTH, CLASSES)

    def forward(self, inputs: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        outputs, state = self.cell(inputs.view(16, -1, WIDTH), state)
        return self.head(outputs).flatten(0, 1), state


def truncated(own: Habit, call: Any, number: int) -> Tensor:
    inputs, labels = own.batch(number)
    outputs, state = call(inputs, getattr(own.beside, "state", None))
    own.beside.state = state.detach()
    loss = functional.cross_entropy(outputs, labels)
    loss.backward()
    own.optimizer.step()
    own.optimizer.zero_grad()
    return loss.detach()


class Growing(Net):
    """A network that gets another layer in the midst of training."""


def grow(own: Habit, number: int) -> None:
    if number == 2:
        torch.manual_seed(7)
        block = Mlp()
        own.model.blocks.append(block)  # pyright: ignore
        own.optimizer.add_param_group({"params": list(block.parameters()), "lr": 5e-4})


def distilled() -> Habit:
    """A teacher that is the mean of the student, updated after each step."""
    model = Net(Dropping)
    teacher = copy.deepcopy(model).eval().requires_grad_(False)

    def loss(call: Any, given: Any) -> Tensor:
        with torch.no_grad():
            targets = teacher(given[0]).softmax(-1)
        return functional.cross_entropy(call(given[0]), targets)

    def follow(own: Habit, _number: int) -> None:
        with torch.no_grad():
            for mean, mine in zip(teacher.parameters(), own.model.parameters(), strict=True):
                mean.lerp_(mine, 0.1)

    return habit(model, loss=loss, after=follow, beside=teacher)


def averaged() -> Habit:
    """Stochastic weight averaging from the second step on, with a schedule of the learning rate per batch."""
    model = Net()
    optimizer = adamw(model)
    mean = torch.optim.swa_utils.AveragedModel(model)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=20)

    def after(own: Habit, number: int) -> None:
        schedule.step()
        if number > 1:
            mean.update_parameters(own.model)

    return habit(model, optimizer=optimizer, after=after, beside=mean)


def anneal(own: Habit, number: int) -> None:
    own.model.share = 2 / (1 + np.exp(-number)) - 1  # pyright: ignore


class Variational(Net):
    """Draws with the reparametrization trick, a free-bits floor, and a weight that a counter raises."""

    def __init__(self) -> None:
        super().__init__(classes=2 * WIDTH)
        self.back, self.share = nn.Linear(WIDTH, WIDTH), 0.0

    def forward(self, inputs: Tensor) -> Tensor:
        mean, spread = super().forward(inputs).chunk(2, -1)
        drawn = torch.distributions.Normal(mean, functional.softplus(spread) + 1e-4).rsample()
        divergence = (0.5 * (mean.square() + spread.exp() - 1 - spread)).sum(0).clamp(min=0.5).mean()
        return functional.mse_loss(self.back(drawn), inputs) + self.share * divergence


class Penalized(Net):
    """A critic with a penalty on its gradient between two kinds of inputs."""

    def __init__(self) -> None:
        super().__init__(classes=1)


def penalty(call: Any, given: Any) -> Tensor:
    """Return the loss of a critic, double backward within."""
    real, fake = given[0], given[0].flip(0) * 0.5
    between = (real * 0.3 + fake * 0.7).requires_grad_()
    (gradient,) = torch.autograd.grad(call(between).sum(), between, create_graph=True)
    return call(fake).mean() - call(real).mean() + 10 * (gradient.norm(2, dim=1) - 1).square().mean()


class Hard(Mlp):
    """Hard gates, drawn by Gumbel's trick."""

    def mix(self, hidden: Tensor) -> Tensor:
        gates = functional.gumbel_softmax(hidden.view(len(hidden), -1, 2), tau=0.7, hard=True, dim=-1)
        return functional.gelu(hidden) * gates.flatten(1)


class Paths(Mlp):
    """Rows of the batch skip a block at random, scaled (timm's DropPath)."""

    def forward(self, inputs: Tensor) -> Tensor:
        kept = inputs.new_empty((len(inputs), 1)).bernoulli_(0.8).div_(0.8)
        return inputs + kept * (super().forward(inputs) - inputs)


class Masked(nn.Module):
    """A transformer's layers of torch's own, with padding of each sentence."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        rows = inputs.view(-1, 16, WIDTH)
        padding = torch.arange(16)[None] >= 5 + torch.arange(len(rows))[:, None] % 12
        return self.head(self.layers(rows, src_key_padding_mask=padding)).flatten(0, 1)


class Graph(Net):
    """Means over the neighbours of nodes, by index_add_ and counts."""

    def forward(self, inputs: Tensor) -> Tensor:
        hidden, nodes = self.stem(inputs), len(inputs)
        generator = torch.Generator().manual_seed(nodes)
        ends, starts = torch.randint(0, nodes, (2, 4 * nodes), generator=generator)
        counts = torch.zeros(nodes, 1).index_add_(0, ends, torch.ones(len(ends), 1)).clamp_(min=1)
        for block in self.blocks:
            hidden = block(torch.zeros_like(hidden).index_add_(0, ends, hidden[starts]) / counts)
        return self.head(hidden)


class Detector(Net):
    """Targets are a list with another count of boxes for each picture."""

    def forward(self, inputs: Tensor, targets: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        outputs, losses = super().forward(inputs), []
        for row, target in zip(outputs.view(len(targets), -1, CLASSES), targets, strict=True):
            places = target["places"]
            losses.append(functional.cross_entropy(row[places], target["labels"], reduction="sum"))
        return {"classes": torch.stack(losses).sum() / len(targets), "size": outputs.square().mean()}


def targets(number: int) -> Any:
    """Return inputs and a list of targets of other sizes."""
    generator = torch.Generator().manual_seed(number)
    counts = [int(torch.randint(1, 9, (), generator=generator)) for _ in range(ROWS // 16)]
    found = [
        {"places": torch.randperm(16, generator=generator)[:count], "labels": torch.arange(count) % CLASSES}
        for count in counts
    ]
    return torch.randn(ROWS, WIDTH, generator=generator), found


def resize(number: int) -> Any:
    """Return a batch whose length changes from step to step (multi-scale training)."""
    return batch(number, ROWS - 16 * (number % 3))


def mixed(number: int) -> Any:
    """Return a batch that is mixed up by a Beta draw of NumPy's."""
    inputs, labels = batch(number)
    share = float(np.random.default_rng(number).beta(0.4, 0.4))
    return share * inputs + (1 - share) * inputs.flip(0), labels, labels.flip(0), share


def mixup(call: Any, given: Any) -> Tensor:
    """Return the loss of a mixed batch."""
    outputs, share = call(given[0]), given[3]
    return share * functional.cross_entropy(outputs, given[1]) + (1 - share) * functional.cross_entropy(
        outputs, given[2]
    )


class Wrapped(nn.Module):
    """Hands all attributes on, as adapters' base models do."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("base"), name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.base(*args, **kwargs)


def unfreeze(own: Habit, number: int) -> None:
    """Let one more block train from each second step on."""
    if number % 2 == 0:
        own.model.blocks[-1 - number // 2].requires_grad_(True)  # pyright: ignore


def gradual() -> Habit:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for block in model.blocks[:-1]:
        block.requires_grad_(False)
    return habit(model, optimizer=optimizer, before=unfreeze)


def evaluates(own: Habit, number: int) -> None:
    if number % 2 == 1:
        own.model.eval()
        with torch.inference_mode():
            own.model(own.batch(100)[0])
        own.model.train()


def saves(own: Habit, number: int) -> None:
    """Load what was saved, into the model and its optimizer, in the midst of training."""
    if number == 2:
        kept = copy.deepcopy((own.model.state_dict(), own.optimizer.state_dict()))
        own.model.load_state_dict(kept[0])
        own.optimizer.load_state_dict(kept[1])


class Ensemble(nn.Module):
    """Models that are stacked, and called as one by vmap."""

    def __init__(self) -> None:
        super().__init__()
        models = [Net(layers=2) for _ in range(3)]
        stacked, _ = torch.func.stack_module_state(models)  # pyright: ignore
        self.held = nn.ParameterDict({name.replace(".", "/"): value for name, value in stacked.items()})
        object.__setattr__(self, "base", copy.deepcopy(models[0]).to("meta"))

    def forward(self, inputs: Tensor) -> Tensor:
        named = {name.replace("/", "."): value for name, value in self.held.items()}

        def one(parameters: Any) -> Tensor:
            return torch.func.functional_call(self.base, parameters, (inputs,))  # pyright: ignore

        return torch.func.vmap(one)(named).mean(0)


class Reversible(torch.autograd.Function):
    """Two halves whose inputs are recomputed from the outputs, in a backward of its own."""

    @staticmethod
    def forward(context: Any, inputs: Tensor, one: nn.Module, other: nn.Module, *_parameters: Tensor) -> Tensor:
        first, second = inputs.chunk(2, -1)
        with torch.no_grad():
            left = first + one(second)
            right = second + other(left)
        context.parts = one, other
        context.save_for_backward(left, right)
        return torch.cat([left, right], -1)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> Any:
        (one, other), (left, right) = context.parts, context.saved_tensors
        of_left, of_right = gradients[0].chunk(2, -1)
        parameters = [*one.parameters(), *other.parameters()]
        with torch.enable_grad():
            left = left.detach().requires_grad_()
            made = other(left)
        given = torch.autograd.grad(made, [left, *other.parameters()], of_right)
        second = (right - made).detach().requires_grad_()
        of_left = of_left + given[0]
        with torch.enable_grad():
            made_one = one(second)
        taken = torch.autograd.grad(made_one, [second, *one.parameters()], of_left)
        assert len(parameters) == len(taken) + len(given) - 2
        return torch.cat([of_left, of_right + taken[0]], -1), None, None, *taken[1:], *given[1:]


class Halves(nn.Module):
    """A reversible block."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = (
            nn.Sequential(nn.Linear(WIDTH // 2, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH // 2)) for _ in range(2)
        )

    def forward(self, inputs: Tensor) -> Tensor:
        return Reversible.apply(inputs, self.one, self.other, *self.one.parameters(), *self.other.parameters())  # type: ignore


class Tied(Net):
    """The head is the stem's weight, and a mean of past logits is kept in the module as a plain tensor."""

    def __init__(self) -> None:
        super().__init__(classes=WIDTH)
        self.head.weight = self.stem.weight
        self.center = torch.zeros(WIDTH)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs = super().forward(inputs)
        self.center = 0.9 * self.center + 0.1 * outputs.detach().mean(0)
        return outputs - self.center


def hooked_parameters() -> Habit:
    """Gradients are centered by hooks of the parameters."""
    model = Net()
    for each in model.parameters():
        if each.ndim > 1:
            each.register_hook(lambda gradient: gradient - gradient.mean(1, keepdim=True))
    return habit(model)


def in_doubles() -> Habit:
    model = Net(layers=3).double()
    return habit(model, batch=lambda number: (batch(number)[0].double(), batch(number)[1]))


def steps_of_gan(own: Habit, call: Any, number: int) -> Tensor:
    """The generator is the model, the critic is beside it; each is updated in turn, with one forward pass between."""
    inputs, _ = own.batch(number)
    critic, of_critic = own.beside
    made = call(inputs)
    judged = critic(inputs[:, :CLASSES]).mean() - critic(made.detach()).mean()
    (-judged).backward()
    of_critic.step()
    of_critic.zero_grad()
    loss = -critic(made).mean()
    loss.backward()
    own.optimizer.step()
    own.optimizer.zero_grad()
    critic.zero_grad()
    return loss.detach()


def gan() -> Habit:
    critic = nn.Sequential(nn.Linear(CLASSES, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))
    return habit(own=steps_of_gan, beside=(critic, torch.optim.RMSprop(critic.parameters(), 1e-4)))


class Methods(Net):
    """Called by methods and parts."""

    def loss_of(self, inputs: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(self.forward(inputs), labels)


def by_method(own: Habit, call: Any, number: int) -> Tensor:
    """Train by a method of the model, and by its parts, in turn."""
    inputs, labels = own.batch(number)
    loss = (
        call.loss_of(inputs, labels)
        if number % 2
        else functional.cross_entropy(call.head(call.features(inputs)), labels)
    )
    loss.backward()
    own.optimizer.step()
    own.optimizer.zero_grad()
    return loss.detach()


class Normalized(Net):
    """Normalizes a weight in its forward pass, by `.data`."""

    def forward(self, inputs: Tensor) -> Tensor:
        with torch.no_grad():
            self.head.weight.data = functional.normalize(self.head.weight.data, dim=1)
        return functional.linear(self.features(inputs), functional.normalize(self.head.weight, dim=1))


class Records(Net):
    """Blocks change a record that goes through them."""

    def features(self, inputs: Tensor) -> Tensor:
        record = SimpleNamespace(hidden=self.stem(inputs))
        for block in self.blocks:
            record = block(record)
        return record.hidden


class Changing(Mlp):
    """Writes its result where its input was."""

    def forward(self, inputs: Any) -> Any:
        inputs.hidden = super().forward(inputs.hidden)
        return inputs


def make_states(own: Habit, number: int) -> None:
    """Let PyTorch's checkpoints fill in a state before there is one: by an update at a rate of 0."""
    if number == 0:
        set_optimizer_state_dict(own.model, own.optimizer, get_optimizer_state_dict(own.model, own.optimizer))


def resume(own: Habit, number: int) -> None:
    """Load the state of model and optimizer from a file's contents, in the middle."""
    if number == 2:
        states = copy.deepcopy((own.model.state_dict(), own.optimizer.state_dict()))
        own.model.load_state_dict(states[0])
        own.optimizer.load_state_dict(states[1])


def warmed(own: Habit, number: int) -> None:
    """Warm the rate up, from 0 on."""
    for group in own.optimizer.param_groups:
        group["lr"] = 1e-3 * number / 2


def in_sequence() -> Habit:
    layers = [layer for _ in range(6) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU())]
    return habit(nn.Sequential(*layers, nn.Linear(WIDTH, CLASSES)), before=replace_layer)


def replace_layer(own: Habit, number: int) -> None:
    if number == 3:
        own.model[2] = nn.Linear(WIDTH, WIDTH)  # pyright: ignore
        own.optimizer.add_param_group({"params": list(own.model[2].parameters())})  # pyright: ignore


HABITS: dict[str, Callable[[], Habit]] = {
    "sharpness-aware": lambda: habit(own=sam),
    "lookahead": lambda: (lambda net: habit(net, optimizer=Lookahead(adamw(net))))(Net()),
    "muon": lambda: (lambda net: habit(net, optimizer=Muon(net.parameters())))(Net()),
    "clipped by value, zeros kept": lambda: habit(own=clip_by_value),
    "autograd.grad": lambda: habit(own=by_grad),
    "backward of inputs": lambda: habit(own=of_inputs),
    "bad batch skipped": lambda: habit(own=skips_bad),
    "scaler that is off": lambda: habit(own=scaled_half),
    "conflicting gradients": lambda: habit(own=two_losses),
    "r-drop": lambda: habit(Net(Dropping), loss=rdrop),
    "learned weights of tasks": lambda: habit(Uncertain(), loss=lambda call, given: call(*given)),
    "gradient reversal": lambda: habit(Adversarial(), loss=domains, before=anneal),
    "codebook": lambda: habit(Codebook(), loss=with_commitment),
    "queue of keys": lambda: habit(Queue(), loss=lambda call, given: call(given[0])),
    "temperature clamped": lambda: habit(Clip(), loss=contrastive, after=clamp_scale),
    "hooks keep features": watched,
    "hooks change outputs": lambda: habit(Steered()),
    "low rank by parametrization": parametrized,
    "pruned": pruned,
    "spectral norm, older": spectral,
    "normalizations frozen": lambda: habit(Frozen()),
    "state from step to step": lambda: habit(Recurrent(), own=truncated),
    "a layer more": lambda: habit(Growing(), before=grow),
    "mean teacher": distilled,
    "weights averaged": averaged,
    "annealed": lambda: habit(Variational(), loss=lambda call, given: call(given[0]), before=anneal),
    "gradient penalty": lambda: habit(Penalized(), loss=penalty),
    "hard gates": lambda: habit(Net(Hard)),
    "paths dropped": lambda: habit(Net(Paths)),
    "padded sentences": lambda: habit(Masked()),
    "neighbours": lambda: habit(Graph()),
    "lists of targets": lambda: habit(Detector(), loss=lambda call, given: sum(call(*given).values()), batch=targets),
    "lengths that change": lambda: habit(batch=resize),
    "mixup": lambda: habit(loss=mixup, batch=mixed),
    "attributes handed on": lambda: habit(Wrapped(Net())),
    "unfrozen one by one": gradual,
    "evaluated between": lambda: habit(after=evaluates),
    "loaded in the midst": lambda: habit(after=saves),
    "stacked by vmap": lambda: habit(Ensemble()),
    "reversible": lambda: habit(Net(Halves)),
    "tied, and a plain tensor kept": lambda: habit(Tied()),
    "gradients centered by hooks": hooked_parameters,
    "doubles": in_doubles,
    "two networks in turn": gan,
    "methods and parts": lambda: habit(Methods(), own=by_method),
    "weights normalized by .data": lambda: habit(Normalized()),
    "a record through the blocks": lambda: habit(Records(Changing)),
    "a layer of a sequence replaced": in_sequence,
    "states made before the first step": lambda: habit(before=make_states),
    "resumed in the middle": lambda: habit(before=resume),
    "a rate that begins at 0": lambda: habit(before=warmed),
}
