"""What a loop changes between forward and backward does not reach blocks that are recomputed, or is refused."""

from __future__ import annotations

import contextvars
import copy
import gc
import re
import weakref
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from checkpoint_models import Mlp, Net, rows, train
from torch.func import functional_call
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import memfit
from memfit.errors import BudgetNotHeldError, MemfitError, UnsupportedStepError
from memfit.memory.contract import WindowKind
from memfit.system.recorder import allocated_bytes, record

Step = Callable[[int], Iterable[torch.Tensor]]


@pytest.fixture(autouse=True, scope="module")
def _recorder() -> None:
    with record("cpu"):
        pass


@dataclass
class Loop:
    """A loop that a test made anew: its models, a step, and what else is compared at the end."""

    models: list[torch.nn.Module]
    step: Step
    extra: Iterable[torch.Tensor] = field(default_factory=list[torch.Tensor])


def adam(*models: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([each for model in models for each in model.parameters()], lr=1e-3)


def update(optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> torch.Tensor:
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def run(
    make: Callable[[], Loop], budget: int | None, steps: int = 9, *, is_in_one_call: bool = False
) -> tuple[list[torch.Tensor], list[int]]:
    gc.collect()
    torch.manual_seed(0)
    loop = make()
    models = [loop.models] if is_in_one_call else loop.models
    handles = [] if budget is None else [memfit.checkpoint(each, budget) for each in models]
    found: list[torch.Tensor] = []
    peaks: list[int] = []
    torch.manual_seed(7)
    try:
        for number in range(steps):
            with record("cpu") as usage:
                found += [each.detach().clone() for each in loop.step(number)]
            peaks.append(usage.start_bytes + usage.peak_bytes)
        for handle in handles:
            handle.end_step()
    finally:
        for handle in handles:
            handle.close()
    states = [value.clone() for model in loop.models for value in model.state_dict().values()]
    return [*found, *states, *(each.clone() for each in loop.extra), torch.get_rng_state()], peaks


def check_same(make: Callable[[], Loop], share: float = 0.7) -> None:
    bare, peaks = run(make, None)
    budget = int(share * max(peaks[2:]))
    held, taken = run(make, budget)
    assert len(bare) == len(held)
    assert all(map(torch.equal, bare, held))
    assert max(taken[2:]) <= budget


def net(
    kind: Callable[[], torch.nn.Module] = lambda: Mlp(64), count: int = 5, outputs: int = 4, inputs: int = 8
) -> Net:
    return Net([kind() for _ in range(count)], torch.nn.Linear(inputs, 64), torch.nn.Linear(64, outputs))


# -- attributes, flags and tables that the loop sets


class Adapted(Mlp):
    def __init__(self) -> None:
        super().__init__(64)
        self.adapters = torch.nn.ModuleDict({name: torch.nn.Linear(64, 64) for name in "ab"})
        self.active, self.scale = "a", 1.0
        self.register_buffer("temperature", torch.ones(()))
        self.register_buffer("mask", torch.ones(64, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        more = self.adapters[self.active](x) + self.mask.mean(0)
        return super().forward(x * self.scale / self.temperature.exp()) + more.tanh()


def between(
    set_before: Callable[[Any, int], None], set_after: Callable[[Any, int], None], kind: Any = Adapted
) -> Callable[[], Loop]:
    """Return a loop whose blocks are set before their forward pass, and otherwise before backward."""

    def make() -> Loop:
        model = net(kind)
        optimizer = adam(model)

        def step(number: int) -> list[torch.Tensor]:
            x, y = rows(number)
            for layer in model.layers:
                set_before(layer, number)
            loss = functional.cross_entropy(model(x), y)
            for layer in model.layers:
                set_after(layer, number)
            return [update(optimizer, loss)]

        return Loop([model], step)

    return make


def switch(layer: Any, number: int, names: str = "ab") -> None:
    layer.active = names[number % 2]


def swap_adapters(layer: Any, _number: int) -> None:
    table = layer.adapters
    table["a"], table["b"] = table["b"], table["a"]


def new_mask(layer: Any, number: int) -> None:
    layer.mask = torch.rand(64, 64, generator=torch.Generator().manual_seed(number))


@pytest.mark.parametrize(
    ("set_before", "set_after"),
    [
        (switch, lambda layer, number: switch(layer, number, "ba")),
        (
            lambda layer, _: setattr(layer, "scale", 1.0),
            lambda layer, number: setattr(layer, "scale", 1 / (2 + number)),
        ),
        (lambda layer, _: layer.temperature.fill_(0.1), lambda layer, _: layer.temperature.fill_(0.5)),
        (lambda layer, _: layer.mask.fill_(0.1), lambda layer, _: layer.mask.fill_(0.5)),
        (new_mask, lambda layer, number: new_mask(layer, number + 100)),
        (swap_adapters, swap_adapters),
        (lambda layer, _: layer.train(), lambda layer, _: layer.eval()),
        (lambda layer, _: setattr(layer.drop, "p", 0.3), lambda layer, _: setattr(layer.drop, "p", 0.0)),
        (lambda layer, _: layer.b.requires_grad_(False), lambda layer, _: layer.b.requires_grad_(True)),
        (lambda layer, _: layer.b.requires_grad_(True), lambda layer, _: layer.b.requires_grad_(False)),
    ],
    ids=["adapter", "scale", "small buffer", "buffer", "new buffer", "modules", "eval", "rate", "unfrozen", "frozen"],
)
def test_what_the_loop_sets_before_backward_does_not_reach_the_second_forward_pass(
    set_before: Any, set_after: Any
) -> None:
    check_same(between(set_before, set_after))


def test_a_large_buffer_that_is_written_late_is_refused_by_name() -> None:
    def set_after(layer: Any, number: int) -> None:
        if number == 5:
            layer.mask.mul_(0.5)

    make = between(lambda _layer, _number: None, set_after)
    _, peaks = run(make, None)
    with pytest.raises(UnsupportedStepError, match=r"'mask' of a module in block 'layers..' was written to"):
        run(make, int(0.7 * max(peaks)))


def test_other_memory_of_a_parameter_is_refused_by_name() -> None:
    def set_after(layer: Any, _number: int) -> None:
        layer.a.weight.data = layer.a.weight.data * 0.5

    make = between(lambda _layer, _number: None, set_after)
    _, peaks = run(make, None)
    with pytest.raises(
        UnsupportedStepError, match=r"'weight' of a module in block 'layers..' was written to, or was given"
    ):
        run(make, int(0.7 * max(peaks)))


class Hooked(Mlp):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


def test_hooks_that_are_removed_before_backward_run_in_the_second_forward_pass() -> None:
    def make() -> Loop:
        model = net(lambda: Hooked(64))
        optimizer = adam(model)

        def step(number: int) -> list[torch.Tensor]:
            x, y = rows(number)
            hooks = [each.a.register_forward_hook(lambda _m, _a, output: output * 0.5) for each in model.layers]
            loss = functional.cross_entropy(model(x), y)
            for hook in hooks:
                hook.remove()
            return [update(optimizer, loss)]

        return Loop([model], step)

    check_same(make)


# -- what is around the forward pass alone

_CONTEXT = contextvars.ContextVar("_CONTEXT", default=1.0)
_SETTINGS = {"factor": 1.0}


class Fewer(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        returned = func(*args, **(kwargs or {}))
        return returned * 0.9 if func is functional.gelu else returned


class Less(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        returned = func(*args, **(kwargs or {}))
        return returned * 0.9 if func is torch.ops.aten.gelu.default else returned


class Factor:
    """Sets a value of the file for a while."""

    def __enter__(self) -> None:
        _SETTINGS["factor"] = 0.25
        self.token = _CONTEXT.set(0.5)

    def __exit__(self, *_raised: object) -> None:
        _SETTINGS["factor"] = 1.0
        _CONTEXT.reset(self.token)


class Lossy(torch.autograd.graph.saved_tensors_hooks):
    """Keeps what autograd saves in half the bytes."""

    def __init__(self) -> None:
        super().__init__(lambda x: (x.dtype, x.bfloat16() if x.is_floating_point() else x), lambda p: p[1].to(p[0]))


class Attends(Mlp):
    def __init__(self) -> None:
        super().__init__(64)
        self.qkv = torch.nn.Linear(64, 192)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).view(8, 64, 3, 4, 16).permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(512, 64)
        return super().forward(x + y * _CONTEXT.get() * _SETTINGS["factor"])


class Deterministic:
    def __enter__(self) -> None:
        torch.use_deterministic_algorithms(True, warn_only=True)

    def __exit__(self, *_raised: object) -> None:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    ("around", "share"),
    [
        (Fewer, 0.6),
        (Less, 0.6),
        (Factor, 0.6),
        (Lossy, 1.4),  # what is recomputed is not in half the bytes
        (Deterministic, 0.6),
        (lambda: sdpa_kernel(SDPBackend.MATH), 0.6),
        (lambda: torch.device("cpu"), 0.6),
    ],
    ids=["function mode", "dispatch mode", "globals", "saved tensors", "deterministic", "attention", "device"],
)
def test_what_is_around_the_forward_pass_alone_is_around_the_second_one(
    around: Callable[[], Any], share: float
) -> None:
    def make() -> Loop:
        model = net(Attends)
        optimizer = adam(model)

        def step(number: int) -> list[torch.Tensor]:
            x, y = rows(number)
            with around():
                out = model(x)
            return [update(optimizer, functional.cross_entropy(out, y))]

        return Loop([model], step)

    check_same(make, share)


def test_other_weights_for_one_call() -> None:
    def make() -> Loop:
        model = net()
        optimizer = adam(model)

        def step(number: int) -> list[torch.Tensor]:
            x, y = rows(number)
            fast = {name: each * 1.1 for name, each in model.named_parameters()}
            return [update(optimizer, functional.cross_entropy(functional_call(model, fast, (x,)), y))]

        return Loop([model], step)

    check_same(make)


class Masked(Mlp):
    def forward(self, x: torch.Tensor, *, mask: torch.Tensor) -> torch.Tensor:
        return super().forward(x.masked_fill(mask > 0.5, 0.0))


class MaskedNet(Net):
    def forward(self, x: torch.Tensor, mask: Any = None) -> torch.Tensor:
        x = self.before(x)
        for layer in self.layers:
            x = layer(x, mask=mask)
        return self.after(x)


def test_a_given_tensor_that_is_written_before_backward_is_refused_by_name() -> None:
    model = MaskedNet([Masked(64) for _ in range(5)], torch.nn.Linear(8, 64), torch.nn.Linear(64, 4))
    mask = torch.zeros(512, 64)
    with memfit.checkpoint(model, "64MiB"):
        loss = model(rows(0)[0], mask).square().mean()
        mask.fill_(1.0)
        with pytest.raises(UnsupportedStepError, match=r"given to it was written to after block 'layers..' began"):
            loss.backward()


# -- blocks that change later, and are given what they change


class Calibrates(Mlp):
    def __init__(self) -> None:
        super().__init__(64)
        self.calls, self.log = 0, dict[str, list[float]]()
        self.register_buffer("level", torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls % 4 == 0:
            self.level.mul_(0.9).add_(x.detach().abs().mean() * 0.01)
            self.log.setdefault("levels", []).append(float(self.level))
        return super().forward(x * self.level * (1 + 0.1 * len(self.log.get("levels", ()))))


def test_blocks_that_change_in_some_steps_only() -> None:
    def make() -> Loop:
        model = net(Calibrates)
        optimizer = adam(model)
        return Loop([model], lambda n: [update(optimizer, functional.cross_entropy(model(rows(n)[0]), rows(n)[1]))])

    check_same(make)


class Remembers(Mlp):
    def __init__(self) -> None:
        super().__init__(64)
        self.memory, self.pair, self.named = (
            [torch.zeros(512, 64)],
            (torch.zeros(512, 64),),
            {"a": torch.zeros(512, 64)},
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x + 0.1 * self.memory[-1] + 0.1 * self.pair[0] + 0.1 * self.named["a"])
        self.memory, self.pair, self.named = [y.detach(), y.detach() * 2], (y.detach() * 3,), {"a": y.detach() * 4}
        return y


@pytest.mark.parametrize("budget", [9 << 20, 1 << 30])
def test_containers_that_blocks_replace_are_not_held(budget: int) -> None:
    def left(budget: int | None) -> int:
        gc.collect()
        before_bytes = allocated_bytes(torch.device("cpu"))
        model = net(Remembers)
        optimizer = adam(model)
        with nullcontext() if budget is None else memfit.checkpoint(model, budget, budget_is="soft"):
            for number in range(6):
                update(optimizer, functional.cross_entropy(model(rows(number)[0]), rows(number)[1]))
            gc.collect()
            return allocated_bytes(torch.device("cpu")) - before_bytes

    assert left(budget) == left(None)


# -- what has no version, shares memory, or is read where it is only written to elsewhere


class Quantizes(Mlp):
    """Keeps an average through `.data`, whose writes are not counted."""

    def __init__(self) -> None:
        super().__init__(64)
        self.register_buffer("average", torch.zeros(64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x - self.average)
        self.average.data.lerp_(x.detach().mean(0), 0.1)
        return y


class Renormalizes(Mlp):
    """Reads running statistics after a batch normalization has brought them up to date."""

    def __init__(self) -> None:
        super().__init__(64)
        self.norm = torch.nn.BatchNorm1d(64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.norm(x) + self.norm.running_mean)


class SharesBuffers(Mlp):
    """Writes to a buffer, and reads it through another name and through a view."""

    def __init__(self) -> None:
        super().__init__(64)
        self.register_buffer("level", torch.ones(64))
        self.register_buffer("same", self.level)
        self.register_buffer("part", self.level[:32])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.level.mul_(0.9)
        return super().forward(x * self.same) + torch.cat([self.part, self.part])


class Beside(Mlp):
    """Calls a module that is not registered, whose buffer it replaces."""

    def __init__(self) -> None:
        super().__init__(64)
        self.hidden = [torch.nn.Linear(64, 64)]
        self.hidden[0].register_buffer("level", torch.ones(64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.hidden[0].level = self.hidden[0].level * 0.5 + 1
        return super().forward(self.hidden[0](x) * self.hidden[0].level)


class DrawsAnew(Mlp):
    """Draws from a generator that is new in each step."""

    def __init__(self) -> None:
        super().__init__(64)
        self.steps = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x + torch.rand(64, generator=self.generator) * 0.1)


def set_generator(layer: Any, number: int) -> None:
    layer.generator = torch.Generator().manual_seed(number)


def new_hook(layer: Any, number: int) -> None:
    seen = [float(number)]

    def hook(_module: Any, _args: Any, output: torch.Tensor) -> torch.Tensor:
        seen.append(seen[-1] * 0.5)
        return output * (1 + seen[-1])

    layer.handle = layer.a.register_forward_hook(hook)


def nothing(_layer: Any, _number: int) -> None:
    """Set nothing."""


@pytest.mark.parametrize(
    ("kind", "set_before", "set_after"),
    [
        (Quantizes, nothing, nothing),
        (Renormalizes, nothing, nothing),
        (SharesBuffers, nothing, nothing),
        (Beside, nothing, nothing),
        (DrawsAnew, set_generator, nothing),
        (Adapted, new_hook, lambda layer, _: layer.handle.remove()),
        (Adapted, nothing, lambda layer, number: layer.temperature.data.fill_(0.1 * number)),
    ],
)
def test_what_version_counters_do_not_show(kind: Any, set_before: Any, set_after: Any) -> None:
    check_same(between(set_before, set_after, kind), 0.8)


def test_arguments_by_names_that_checkpoints_have_reach_the_block() -> None:
    class Named(Mlp):
        def forward(self, x: torch.Tensor, *, early_stop: float = 0.0, debug: bool = False) -> torch.Tensor:
            return super().forward(x * early_stop) if debug else x

    class NamedNet(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.before(x)
            for layer in self.layers:
                x = layer(x, early_stop=0.5, debug=True)
            return self.after(x)

    def make() -> Loop:
        model = NamedNet([Named(64) for _ in range(5)], torch.nn.Linear(8, 64), torch.nn.Linear(64, 4))
        optimizer = adam(model)
        return Loop([model], lambda n: [update(optimizer, functional.cross_entropy(model(rows(n)[0]), rows(n)[1]))])

    check_same(make)


def test_a_handle_that_is_never_closed_does_not_keep_the_model() -> None:
    gc.collect()
    before_bytes = allocated_bytes(torch.device("cpu"))
    model = net()
    handle = memfit.checkpoint(model, "64MiB")
    update(adam(model), functional.cross_entropy(model(rows(0)[0]), rows(0)[1]))
    del model, handle
    gc.collect()
    assert allocated_bytes(torch.device("cpu")) == before_bytes


# -- budgets of loops whose steps differ


def test_layers_that_are_unfrozen_one_by_one_have_plans_of_their_own() -> None:
    def make() -> Loop:
        model = net()
        optimizer = adam(model)
        model.requires_grad_(False)
        model.after.requires_grad_(True)

        def step(number: int) -> list[torch.Tensor]:
            model.layers[max(0, 4 - number)].requires_grad_(True)
            return [update(optimizer, functional.cross_entropy(model(rows(number)[0]), rows(number)[1]))]

        return Loop([model], step)

    check_same(make)


def test_two_handles_hold_a_budget_together() -> None:
    def make() -> Loop:
        maker, judge = net(outputs=8, count=4), net(outputs=1, count=4)
        of_maker, of_judge = adam(maker), adam(judge)

        def step(number: int) -> list[torch.Tensor]:
            real, noise = rows(number)[0], rows(number + 50)[0]
            made = maker(noise)
            judged = functional.softplus(-judge(real)).mean() + functional.softplus(judge(made.detach())).mean()
            first = update(of_judge, judged)
            second = update(of_maker, functional.softplus(-judge(made)).mean())
            of_judge.zero_grad()
            return [first, second]

        return Loop([maker, judge], step)

    check_same(make, 0.75)


def test_updates_of_another_model_are_not_missed_calls(caplog: pytest.LogCaptureFixture) -> None:
    model, other = net(), net()
    x, y = rows(0)
    with memfit.checkpoint(model, "1GiB"):
        update(adam(other), functional.cross_entropy(other(x), y))
        assert not caplog.text
        for _ in range(3):  # of copies alone, which are not under the budget
            client = copy.deepcopy(model)
            update(adam(client), functional.cross_entropy(client(x), y))
        assert caplog.text.count("no call of the model was seen") == 1


def test_blocks_that_are_replaced_and_added_are_steered() -> None:
    def make() -> Loop:
        model = net()
        optimizers = [adam(model)]

        def step(number: int) -> list[torch.Tensor]:
            if number == 4:
                model.layers[2] = Mlp(64, 0.1)
                model.layers.append(copy.deepcopy(model.layers[0]))
                optimizers[0] = adam(model)
            x, y = rows(number)
            return [update(optimizers[0], functional.cross_entropy(model(x), y))]

        return Loop([model], step)

    check_same(make, 0.8)


def test_a_layer_that_is_replaced_with_its_gradient_takes_no_memory_and_changes_no_kind_of_step() -> None:
    model = net()
    with memfit.checkpoint(model, "1GiB") as handle:
        optimizer = adam(model)
        for number in range(4):
            if number == 2:
                gone = weakref.ref(model.after.weight)
                model.after = torch.nn.Linear(64, 4)
                optimizer = adam(model)
            optimizer.zero_grad()
            x, y = rows(number)
            functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    assert gone() is None
    assert {each.kind for each in handle.report().sizes} == {WindowKind.FIRST}


def test_lazy_parameters_are_made_by_the_first_call() -> None:
    def make() -> Loop:
        blocks = [
            torch.nn.Sequential(torch.nn.LazyLinear(256), torch.nn.GELU(), torch.nn.Linear(256, 64)) for _ in "1234"
        ]
        model = Net([*blocks], torch.nn.Linear(8, 64), torch.nn.LazyLinear(4))
        optimizers: list[torch.optim.Optimizer] = []

        def step(number: int) -> list[torch.Tensor]:
            loss = functional.cross_entropy(model(rows(number)[0]), rows(number)[1])
            if not optimizers:
                optimizers.append(adam(model))
            return [update(optimizers[0], loss)]

        return Loop([model], step)

    check_same(make, 0.7)


def test_errors_of_the_first_forward_pass_are_the_users() -> None:
    class Fails(Mlp):
        def forward(self, _x: torch.Tensor) -> torch.Tensor:
            raise ValueError("mine")

    model = net(lambda: Fails(64))
    with memfit.checkpoint(model, "64MiB"), pytest.raises(ValueError, match="mine") as caught:
        model(rows(0)[0])
    assert not isinstance(caught.value, MemfitError)


# -- derivatives inside of blocks; transformations of torch.func allow no hooks of saved tensors


class Transformed(Mlp):
    def __init__(self, transform: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        super().__init__(64)
        self.transform = transform

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        forward = super().forward
        more: torch.Tensor = self.transform(lambda row: forward(row).tanh().sum())(x)
        return forward(x) + 0.1 * more.mean()


TRANSFORMS: dict[str, tuple[Callable[..., Any], float]] = {
    "grad": (torch.func.grad, 0.9),
    "vjp": (lambda f: lambda x: torch.func.vjp(f, x)[1](torch.ones(()))[0], 0.9),
    "jacrev of each row": (lambda f: torch.func.vmap(torch.func.jacrev(f)), 0.9),
    "hvp": (lambda f: lambda x: torch.autograd.functional.hvp(f, x, x, create_graph=True)[1], 0.97),
    "hessian of rows": (lambda f: lambda x: torch.func.vmap(torch.func.hessian(f))(x[:2]), 0.7),
}


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@pytest.mark.parametrize("name", TRANSFORMS)
def test_blocks_may_differentiate(name: str) -> None:
    transform, share = TRANSFORMS[name]

    def make() -> Loop:
        model = net(lambda: Transformed(transform))
        optimizer = adam(model)

        def step(number: int) -> list[torch.Tensor]:
            x, y = rows(number)
            return [update(optimizer, functional.cross_entropy(model(x), y))]

        return Loop([model], step)

    check_same(make, share)


class Aside(Mlp):
    """What it saves is kept where PyTorch does not see it, so that a checkpoint around it recomputes nothing."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved.detach().numpy().copy(), torch.from_numpy):
            return super().forward(x)


def test_a_pass_that_recomputes_no_block_is_planned_from_and_judged() -> None:
    def make() -> Net:
        torch.manual_seed(0)
        return Net([Aside(64) for _ in range(4)], torch.nn.Linear(8, 64), torch.nn.Linear(64, 4))

    with record("cpu"):  # from here on all is counted
        pass
    gc.collect()
    peak = max(train(make(), rows).peaks)
    model = make()
    gc.collect()
    few = int(0.8 * peak)
    with pytest.raises(BudgetNotHeldError, match="it keeps as little as can be"), memfit.checkpoint(model, few):
        train(model, rows)
    model = make()
    gc.collect()
    with memfit.checkpoint(model, int(1.05 * peak)) as handle:
        got = train(model, rows)
        assert handle.report().windows[-1].plan > 0
    assert got.same_bits(train(make(), rows))


def by_hand(model: Any, batch: Any) -> torch.Tensor:
    """Take gradients by autograd, and update without an optimizer."""
    loss = functional.cross_entropy(model(batch[0]), batch[1])
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    with torch.no_grad():
        for each, gradient in zip(model.parameters(), gradients, strict=True):
            each -= 0.1 * gradient
    return loss.detach()


def by_transform(model: Any, batch: Any) -> torch.Tensor:
    """Do the same by a transformation of torch.func."""

    def loss_of(parameters: Any) -> torch.Tensor:
        return functional.cross_entropy(functional_call(model, parameters, (batch[0],)), batch[1])

    parameters = {name: each.detach() for name, each in model.named_parameters()}
    gradients, loss = torch.func.grad_and_value(loss_of)(parameters)
    with torch.no_grad():
        for name, each in model.named_parameters():
            each -= 0.1 * gradients[name]
    return loss.detach()


def in_two(model: Any, batch: Any) -> torch.Tensor:
    """Do the same by two backward passes, as a pipeline's schedule that computes gradients of parameters later."""
    inputs = batch[0].requires_grad_()
    loss = functional.cross_entropy(model(inputs), batch[1])
    torch.autograd.grad(loss, inputs, retain_graph=True)
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    with torch.no_grad():
        for each, gradient in zip(model.parameters(), gradients, strict=True):
            each -= 0.1 * gradient
    return loss.detach()


@pytest.mark.parametrize(("step", "share"), [(by_hand, 0.3), (by_transform, 0.7), (in_two, 0.5)])
def test_loops_without_an_optimizer_are_judged(step: Any, share: float) -> None:
    def make() -> Loop:
        model = net()
        return Loop([model], lambda number: [step(model, rows(number))])

    _, peaks = run(make, None, 3)
    with pytest.raises(BudgetNotHeldError) as caught:
        run(make, int(share * max(peaks)), 5)
    text = str(caught.value)
    assert ("memfit.fit_function" in text) is (step is by_transform)
    assert ("memfit.eager" in text) is (step is not by_transform)
    assert ("Raise the budget to" in text) is (step is by_hand)
    assert ("recomputes blocks twice and holds both" in text) is (step is in_two)


def test_sizes_that_are_new_in_each_step_are_refused_where_none_can_hold() -> None:
    def make() -> Loop:
        model = net()
        optimizer = adam(model)

        def step(number: int) -> list[torch.Tensor]:
            count = int(2000 * 1.2**number)
            return [update(optimizer, functional.cross_entropy(model(torch.randn(count, 8)), torch.arange(count) % 4))]

        return Loop([model], step)

    _, peaks = run(make, None, 7)
    with pytest.raises(BudgetNotHeldError, match=r"it keeps as little as can be.*try eager mode"):
        run(make, int(0.2 * peaks[0]), 7)
    held, taken = run(make, int(0.7 * peaks[-1]), 7)
    assert all(map(torch.equal, held, run(make, None, 7)[0])) and max(taken) <= 0.7 * peaks[-1]


class Dropping(Net):
    """A model that leaves out every third layer in turn, as LayerDrop does, and may checkpoint the others by hand."""

    calls, is_by_hand = 0, False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, self.calls = self.before(x), self.calls + 1
        for number, layer in enumerate(self.layers):
            if (number + self.calls) % 3:
                x = checkpoint(layer, x, use_reentrant=False) if self.is_by_hand else layer(x)
        return self.after(x)


@pytest.mark.parametrize("first", [0, 1, 2])
def test_steps_that_call_other_layers_are_within_what_checkpoints_of_all_take(first: int) -> None:
    def make(is_by_hand: bool = False) -> Loop:
        model = Dropping([Mlp(64) for _ in range(5)], torch.nn.Linear(8, 64), torch.nn.Linear(64, 4))
        model.calls, model.is_by_hand = first, is_by_hand
        optimizer = adam(model)

        def step(number: int) -> list[torch.Tensor]:
            inputs, labels = rows(number, 400)
            return [update(optimizer, functional.cross_entropy(model(inputs), labels))]

        return Loop([model], step)

    bare, _ = run(make, None)
    budget = int(1.02 * max(run(lambda: make(is_by_hand=True), None)[1]))
    held, taken = run(make, budget)
    assert all(map(torch.equal, held, bare)) and max(taken) <= budget


def test_a_loop_of_torch_func_goes_through_the_door_that_is_named() -> None:
    model = net()

    def step(state: Any, batch: Any) -> Any:
        def loss_of(parameters: Any) -> torch.Tensor:
            return functional.cross_entropy(functional_call(model, parameters, (batch[0],)), batch[1])

        gradients, loss = torch.func.grad_and_value(loss_of)(state[0])
        return {name: each - 0.1 * gradients[name] for name, each in state[0].items()}, loss.detach()

    first = {name: each.detach() for name, each in model.named_parameters()}, torch.zeros(())
    gc.collect()
    with record("cpu") as usage:
        step(first, rows(0))
    budget = int(0.7 * (usage.start_bytes + usage.peak_bytes))
    with memfit.eager(model, budget=budget), pytest.raises(MemfitError, match=r"memfit\.fit_function"):
        step(first, rows(0))
    planned = memfit.fit_function(step, first, rows(0), budget=budget, time_limit_seconds=1)
    ours = theirs = first
    for number in range(3):
        ours, theirs = planned(ours, rows(number)), step(theirs, rows(number))
        assert torch.equal(ours[1], theirs[1])
        assert all(torch.equal(ours[0][name], theirs[0][name]) for name in ours[0])


def deep() -> torch.nn.Module:
    layers = [
        torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64)) for _ in "123456"
    ]
    return torch.nn.Sequential(*layers)


def encoder_and_decoder() -> Loop:
    encoder, decoder = deep(), deep()
    optimizer = adam(encoder, decoder)

    def step(_number: int) -> Iterable[torch.Tensor]:
        data = torch.randn(1024, 64)
        yield update(optimizer, (decoder(encoder(data).tanh()) - data).square().mean())

    return Loop([encoder, decoder], step)


def both_networks_of_a_gan() -> Loop:
    generator, critic = deep(), deep()
    made_by, judged_by = adam(generator), adam(critic)

    def step(_number: int) -> Iterable[torch.Tensor]:
        made = generator(torch.randn(1024, 64))
        judged = functional.softplus(-critic(torch.randn(1024, 64))) + functional.softplus(critic(made.detach()))
        yield update(judged_by, judged.mean())
        yield update(made_by, functional.softplus(-critic(made)).mean())
        judged_by.zero_grad()

    return Loop([generator, critic], step)


class Stack(torch.nn.Module):
    """Two of these in a list are two models, and no two blocks."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(Mlp(64, 0.1) for _ in range(5))
        self.head = torch.nn.Linear(64, outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def actor_and_critic() -> Loop:
    actor, critic = Stack(4), Stack(1)
    critic.blocks[0] = actor.blocks[0]
    acts, judges = adam(actor), adam(critic)

    def step(_number: int) -> Iterable[torch.Tensor]:
        seen, returns = torch.randn(1024, 64), torch.randn(1024, 1)
        with torch.no_grad():
            expected = critic(seen)
        yield update(acts, -(actor(seen).log_softmax(1)[:, :1] * (returns - expected)).mean())
        for _ in range(2):
            yield update(judges, (critic(seen) - returns).square().mean())

    return Loop([actor, critic], step)


def teacher_and_student() -> Loop:
    teacher, student = Stack(8).requires_grad_(requires_grad=False).eval(), Stack(8)
    optimizer = adam(student)

    def step(_number: int) -> Iterable[torch.Tensor]:
        seen = torch.randn(1024, 64)
        with torch.no_grad():
            expected = teacher(seen)
        yield update(optimizer, (student(seen) - expected).square().mean())

    return Loop([teacher, student], step)


@pytest.mark.parametrize("share", [0.7, 0.9])
@pytest.mark.parametrize("make", [encoder_and_decoder, both_networks_of_a_gan, actor_and_critic, teacher_and_student])
def test_models_of_one_loop_share_a_plan_in_one_call(make: Callable[[], Loop], share: float) -> None:
    before_bytes = allocated_bytes("cpu")
    expected, peaks = run(make, None)
    budget = before_bytes + int(share * (max(peaks) - before_bytes))
    found, peaks = run(make, budget, is_in_one_call=True)
    assert all(map(torch.equal, found, expected))
    assert max(peaks) <= budget


def test_a_refusal_beside_another_handle_names_the_call_that_holds_both() -> None:
    before_bytes = allocated_bytes("cpu")
    _, peaks = run(encoder_and_decoder, None)
    budget = before_bytes + int(0.7 * (max(peaks) - before_bytes))
    with pytest.raises(BudgetNotHeldError, match=r"memfit.checkpoint\(\[first, second\], budget\)"):
        run(encoder_and_decoder, budget)
    run(encoder_and_decoder, budget, is_in_one_call=True)


def critic_of_a_policy() -> Loop:
    """The critic alone is held, whose second window ends with the first update of what the policy has."""
    layers = [layer for _ in range(2) for layer in (torch.nn.Linear(64, 64), torch.nn.LayerNorm(64), torch.nn.ReLU())]
    critic, policy = torch.nn.Sequential(*layers, torch.nn.Linear(64, 1)), torch.nn.Parameter(torch.zeros(1024, 64))
    judges, acts = adam(critic), torch.optim.AdamW([policy], lr=1e-3)

    def step(_number: int) -> Iterable[torch.Tensor]:
        yield update(judges, (critic(torch.randn(512, 64)) - 1).square().mean())
        critic.requires_grad_(requires_grad=False)
        yield update(acts, -critic(torch.randn(1024, 64) + policy).mean())
        critic.requires_grad_(requires_grad=True)

    return Loop([critic], step)


def ascent_and_descent() -> Loop:
    """SAM: of the two windows of a step the second one begins with what the weights were moved by, as large as they."""
    model = Stack(4)
    optimizer = adam(model)

    def step(_number: int) -> Iterable[torch.Tensor]:
        seen = torch.randn(512, 64)
        loss = model(seen).square().mean()
        loss.backward()
        moved = [0.05 * each.grad.sign() for each in model.parameters() if each.grad is not None]
        optimizer.zero_grad()
        with torch.no_grad():
            torch._foreach_add_([*model.parameters()], moved)
        model(seen).square().mean().backward()
        with torch.no_grad():
            torch._foreach_sub_([*model.parameters()], moved)
        optimizer.step()
        optimizer.zero_grad()
        yield loss.detach()

    return Loop([model], step)


@pytest.mark.parametrize("make", [critic_of_a_policy, ascent_and_descent])
def test_a_named_budget_has_room_for_what_windows_of_the_same_shape_begin_with(make: Callable[[], Loop]) -> None:
    """Such as states that other optimizers made after the window that it is named by."""
    with pytest.raises(BudgetNotHeldError) as refusal:
        run(make, allocated_bytes("cpu") + (1 << 20))
    named = re.search(r"Raise the budget to (\d+) bytes", str(refusal.value))
    assert named is not None
    del refusal  # whose frames hold the models
    budget = int(named[1]) + (1 << 12)  # for the losses that are kept here
    _, peaks = run(make, budget)
    assert max(peaks) <= budget


def leaking() -> Loop:
    model, kept = deep(), list[torch.Tensor]()
    optimizer = adam(model)

    def step(_number: int) -> Iterable[torch.Tensor]:
        outputs = model(torch.randn(512, 64))
        kept.append(outputs)  # whose storage, and what autograd knows of it, no step frees
        yield update(optimizer, outputs.square().mean())

    return Loop([model], step)


def test_a_loop_that_keeps_tensors_of_each_step_is_told_so_and_no_budget_is_named() -> None:
    _, peaks = run(leaking, None, 2)
    with pytest.raises(BudgetNotHeldError, match="the loop keeps tensors of each") as refusal:
        run(leaking, max(peaks) + (1 << 18), 60)
    assert "Raise the budget" not in str(refusal.value)


@pytest.mark.parametrize(
    ("models", "error"), [([], "the list of models is empty"), ([torch.nn.Linear(2, 2), 3], "model is a int")]
)
def test_a_list_of_models_holds_modules(models: list[Any], error: str) -> None:
    with pytest.raises(MemfitError, match=error):
        memfit.checkpoint(models, "1GiB")


def test_several_models_have_no_chunked_loss() -> None:
    with pytest.raises(UnsupportedStepError, match="chunk_loss"):
        memfit.checkpoint([deep(), deep()], "1GiB", chunk_loss=True)


class Chain(torch.nn.ModuleList):
    """A list that is called is a model."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self:
            x = block(x)
        return x


def test_a_list_with_a_forward_of_its_own_is_one_model() -> None:
    model = Chain(Mlp(64) for _ in range(6))
    handle = memfit.checkpoint(model, "75%")
    optimizer = adam(model)
    for _ in range(5):
        update(optimizer, model(torch.randn(512, 64)).square().mean())
    handle.end_step()
    report = handle.report()
    handle.close()
    assert report.blocks == tuple("012345")
    assert (handle.calls, report.over) == (5, 0)
