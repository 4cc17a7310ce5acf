"""A plan's schedule carried out by Inductor's kernels: the budget, the gradients, the masks, and one plan a budget."""

from __future__ import annotations

import copy
import gc
import operator
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from occupied import bytes_now
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import memfit
from memfit.dynamo.inductor_step import InductorStep
from memfit.dynamo.model import PlannedCalls
from memfit.errors import InvalidOptionError, NoPlanError, UnsupportedStepError
from memfit.graph import Graph, Op, Phase, Role, Storage
from memfit.kernels import inductor
from memfit.kernels.chains import with_chains
from memfit.kernels.joint_graphs import leave_out_overwritten
from memfit.kernels.node_halves import node_halves, rejoined
from memfit.memory.host import store
from memfit.memory.host.store import Lease
from memfit.schedule import Schedule
from memfit.system.recorder import record

pytestmark = [
    pytest.mark.filterwarnings("ignore:<class 'torch.autograd.function.Function'> should not be instantiated"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script"),  # torch's own modules, which Inductor imports
]
OPTIONS = {"iterations": 3_000}


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch.compiler.reset()
    Trained.others_bytes = bytes_now(torch.device("cpu"))
    yield
    torch.compiler.reset()


def dense() -> tuple[nn.Module, torch.Tensor]:
    layers = [nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Dropout(0.1)) for _ in range(6)]
    return nn.Sequential(*layers, nn.Linear(64, 8), nn.Dropout(0.1)), torch.randn(2048, 64)


def conv(count: int = 3) -> tuple[nn.Module, torch.Tensor]:
    layers: list[nn.Module] = []
    for channels in (3, *(8 for _ in range(count - 1))):
        layers += [nn.Conv2d(channels, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.2)]
    return nn.Sequential(*layers), torch.randn(8, 3, 32, 32)


def long_conv() -> tuple[nn.Module, torch.Tensor]:
    """One in which copies leave a budget whatever ops were measured to take, and so whichever are chosen."""
    return conv(6)


def language() -> tuple[nn.Module, torch.Tensor]:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        n_layer=2, n_head=2, n_embd=32, vocab_size=50, n_positions=64, use_cache=False, attn_implementation="eager"
    )

    class Logits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = transformers.GPT2LMHeadModel(config)

        def forward(self, words: torch.Tensor) -> torch.Tensor:
            return self.inner(words).logits

    return Logits(), torch.randint(0, 50, (8, 64))


class Trained:
    """A model and its gradients, buffers and peak after steps from the same state and the same seed.

    Attributes:
        others_bytes: what other tests of the process have left, which counts towards all budgets.
    """

    others_bytes = 0

    def __init__(self, made: Any, *, budget: int | None = None, steps: int = 3, dtype: Any = None, **more: Any) -> None:
        torch.manual_seed(0)
        self.model, inputs = made()
        given = copy.deepcopy(self.model)
        call: Any = torch.compile(given)
        if budget is not None:
            options = {"budget": budget + self.others_bytes, "reserve": 0, "kernels": "inductor", "options": OPTIONS}
            options |= more
            call = torch.compile(given, backend="memfit", options=options)
        self.resident_bytes = sum(t.nbytes for t in (*given.parameters(), *given.buffers(), inputs))
        for _ in range(steps):
            given.zero_grad()
            torch.manual_seed(1)
            with record("cpu") as usage:
                with torch.autocast("cpu", torch.bfloat16, enabled=dtype is not None):
                    outputs = call(inputs)
                outputs.float().square().mean().backward()
            self.masks, self.total = outputs == 0, outputs.detach().float().square().sum()
            del outputs  # it would count towards the budget of the next step
        self.peak_bytes = self.resident_bytes + usage.peak_bytes
        self.gradients = [p.grad for p in given.parameters()]
        self.buffers = list(given.buffers())

    def of_activations(self, share: float) -> int:
        """Return the budget that leaves this share of what is above the residents."""
        return self.resident_bytes + int(share * (self.peak_bytes - self.resident_bytes))


def assert_close(mine: Sequence[Any], theirs: Sequence[Any], tolerance: float = 1e-4) -> None:
    for left, right in zip(mine, theirs, strict=True):
        torch.testing.assert_close(left, right, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("made", "share"), [(dense, 0.6), pytest.param(conv, 0.92, marks=pytest.mark.slow)])
def test_a_budget_holds_with_the_gradients_and_masks_of_inductor(made: Any, share: float) -> None:
    plain = Trained(made)
    budget = plain.of_activations(share)
    torch.compiler.reset()
    planned = Trained(made, budget=budget)
    assert planned.peak_bytes <= budget < plain.peak_bytes
    assert torch.equal(planned.masks, plain.masks) and planned.masks.any()
    assert_close([planned.total, *planned.gradients], [plain.total, *plain.gradients])
    assert_close(planned.buffers, plain.buffers)


ONLY_COPIES: dict[str, Any] = {
    "planner": "offload",
    "host_budget": "64MiB",
    "options": {"rematerialize": False, "iterations": 20_000},
}


@pytest.mark.slow
@pytest.mark.parametrize("made", [dense, long_conv])
def test_copies_to_the_host_stand_in_inductors_code(
    made: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is computed anew, so that the bits are those of Inductor, and the lean code alone would not fit."""
    left: list[int] = []
    offload = Lease.offload

    def counted(lease: Lease, source: torch.Tensor, offset: int) -> Any:
        left.append(source.nbytes)
        return offload(lease, source, offset)

    monkeypatch.setattr(Lease, "offload", counted)
    plain = Trained(made)
    budget = plain.of_activations(0.6 if made is dense else 0.75)
    torch.compiler.reset()
    caplog.set_level("INFO", "memfit")
    planned = Trained(made, budget=budget, **ONLY_COPIES)
    assert planned.peak_bytes <= budget < plain.peak_bytes
    assert left
    assert torch.equal(planned.masks, plain.masks)
    assert_close([planned.total, *planned.gradients], [plain.total, *plain.gradients])
    assert_close(planned.buffers, plain.buffers)
    gc.collect()
    assert not store._left  # the last backward pass is over


@pytest.mark.slow
@pytest.mark.parametrize(("share", "whose"), [(1.0, "own"), (0.9, "lean")])
def test_halves_of_inductors_own_are_used_where_they_fit(
    share: float, whose: str, caplog: pytest.LogCaptureFixture
) -> None:
    plain = Trained(dense)
    budget = plain.of_activations(share)
    torch.compiler.reset()
    caplog.set_level("INFO", "memfit")
    planned = Trained(dense, budget=budget)
    assert planned.peak_bytes <= budget
    assert f"Inductor's {whose} code takes" in caplog.text and "code planned for" not in caplog.text
    assert_close(planned.gradients, plain.gradients, 1e-6 if whose == "lean" else 0.0)


def test_rejoined_halves_have_what_is_computed_anew_twice() -> None:
    def function(primals: Any, tangents: Any) -> Any:
        return torch.exp(torch.tanh(primals)), tangents * torch.tanh(primals)

    joint = make_fx(function, tracing_mode="fake")(torch.randn(3, 2), torch.randn(3, 2))
    for node, name in zip(joint.graph.find_nodes(op="placeholder"), ("primals_1", "tangents_1"), strict=True):
        node.target = node.name = name
    first, again = joint.graph.find_nodes(op="call_function", target=torch.ops.aten.tanh.default)
    again.meta["val"] = first.meta["val"]  # as in halves that a partitioner has made
    schedule = Schedule.parse("compute 0\ncompute 1\nboundary 0\ncompute 2\ncompute 3")
    sources = [[node] for node in joint.graph.nodes if node.op == "call_function"]
    whole = rejoined(joint, node_halves(joint, sources, schedule, 1), 1)
    values = torch.randn(3, 2), torch.randn(3, 2)
    assert all(map(torch.equal, whole(*values), function(*values)))
    results = [node.meta["val"] for node in whole.graph.find_nodes(op="call_function", target=first.target)]
    assert len(results) == 2 and results[0] is not results[1]


@pytest.mark.slow
def test_a_language_model_under_autocast_keeps_its_budget() -> None:
    plain = Trained(language, dtype=torch.bfloat16)
    budget = plain.of_activations(0.85)
    torch.compiler.reset()
    planned = Trained(language, budget=budget, dtype=torch.bfloat16)
    assert planned.peak_bytes <= budget < plain.peak_bytes
    assert_close(planned.gradients, plain.gradients, 2e-2)


@pytest.mark.slow
def test_calls_without_gradients_draw_as_inductors() -> None:
    """In training mode: a teacher, entropies for a log. Later masks depend on what they draw."""
    found: list[list[torch.Tensor]] = []
    for budget in (None, "256MiB"):
        torch.compiler.reset()
        torch.manual_seed(0)
        model: Any = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Dropout(0.5), nn.Linear(16, 4))
        call = torch.compile(model)
        if budget is not None:
            call = memfit.compile(model, budget=budget, reserve=0, kernels="inductor", options=OPTIONS)
        torch.manual_seed(1)
        inputs = torch.randn(64, 16)
        results: list[torch.Tensor] = []
        for _ in range(2):
            with torch.no_grad():
                results.append(call(inputs))
            results.append(call(inputs).square().mean())
            results[-1].backward()
        found.append([each.detach() for each in results])
    assert all(map(torch.equal, *found))


@pytest.mark.slow
def test_a_larger_batch_that_fits_only_with_less_kept() -> None:
    """Its graph has a size that Dynamo no longer fixes: a number, which torch's partitioner knows no bytes of."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Dropout(0.1)) for _ in range(4)])
    small, large = torch.randn(700, 64), torch.randn(1024, 64)
    gc.collect()
    with record("cpu") as usage:
        copy.deepcopy(model)(large).square().mean().backward()
    beside_bytes = sum(each.nbytes for each in (*model.parameters(), small, large))
    budget = Trained.others_bytes + beside_bytes + int(0.7 * usage.peak_bytes)
    call = memfit.compile(model, budget=budget, reserve=0, kernels="inductor", options=OPTIONS)
    for inputs in (small, large, large):
        model.zero_grad()
        call(inputs).square().mean().backward()
    account = model._compiled_call_impl.account
    assert 0 < account.most_bytes <= budget


@pytest.mark.slow
def test_two_budgets_in_one_process_are_two_plans() -> None:
    plain = Trained(dense)
    peaks: list[int] = []
    for share in (0.9, 0.6):
        torch.compiler.reset()
        budget = plain.of_activations(share)
        planned = Trained(dense, budget=budget)
        assert planned.peak_bytes <= budget
        peaks.append(planned.peak_bytes)
    assert peaks[1] < peaks[0]


@pytest.mark.slow
def test_outputs_that_a_loop_begins_to_keep_are_within_the_budget() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Dropout(0.1)) for _ in range(4)])
    inputs = torch.randn(2048, 64)
    resident_bytes = sum(each.nbytes for each in (*model.parameters(), inputs))
    budget = resident_bytes + 8 * inputs.nbytes
    options = {"budget": budget + Trained.others_bytes, "reserve": 0, "kernels": "inductor", "options": OPTIONS}
    call: Any = torch.compile(model, backend="memfit", options=options)
    kept, peaks = None, list[int]()
    for step in range(6):
        kept = None
        model.zero_grad()
        with record("cpu") as usage:
            outputs = call(inputs)
            kept = outputs if step >= 3 else None
            loss = outputs.sum()
            del outputs
            loss.backward()
        peaks.append(resident_bytes + usage.peak_bytes)
    assert max(peaks) <= budget
    assert kept is not None and peaks[3] > peaks[2]


@pytest.mark.slow
def test_other_sizes_and_evaluation() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4))
    eager = copy.deepcopy(model)
    memfit.compile(model, budget="256MiB", reserve=0, kernels="inductor", options=OPTIONS)
    for rows in (8, 5, 8):
        inputs = torch.randn(rows, 16)
        model.zero_grad()
        eager.zero_grad()
        for each in (model, eager):
            each(inputs).square().mean().backward()
        assert_close([p.grad for p in model.parameters()], [p.grad for p in eager.parameters()])
    with torch.no_grad():
        assert_close([model(inputs)], [eager(inputs)])
    calls = model._compiled_call_impl
    assert isinstance(calls, PlannedCalls)
    assert len(calls.plans) == 3 and calls.account.ran >= 4  # eight rows as a constant, then any number of them


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kernels": "triton"}, "kernels is 'triton', expected one of 'eager', 'inductor'"),
        ({"kernels": "inductor", "host_dir": "/var/tmp"}, "host_dir"),
    ],
)
def test_options_that_do_not_combine_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidOptionError, match=words):
        memfit.compile(nn.Linear(2, 2), budget="1MiB", **options)


@pytest.mark.slow
def test_a_whole_step_keeps_its_budget_and_trains_as_eager_does() -> None:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(6)])
    batch = torch.randn(2048, 32), torch.randint(0, 32, (2048,))
    eager = memfit.TrainingStep(model=copy.deepcopy(model), loss=loss, batch=batch, clip_norm=1.0)
    eager = replace(eager, optimizer=torch.optim.AdamW(eager.model.parameters()))
    gc.collect()
    with record("cpu") as usage:
        losses = [eager.run_eager(batch) for _ in range(3)]
    budget = Trained.others_bytes + int(0.7 * usage.peak_bytes)
    optimizer = torch.optim.AdamW(model.parameters())
    step = memfit.fit(
        model, loss, batch, optimizer=optimizer, clip_norm=1.0, budget=budget, kernels="inductor", options=OPTIONS
    )
    assert_close([step(batch) for _ in range(3)], losses)
    assert_close(list(model.parameters()), list(eager.model.parameters()))
    assert isinstance(step, InductorStep) and 0 < step.most_bytes <= budget
    assert step.plan.overhead > 0
    most_bytes, before = step.most_bytes, copy.deepcopy(list(model.parameters()))
    measured = step.measure(repeats=2)  # beside copies of the state, and eager steps that no graph runs in
    assert measured.peak_bytes < (measured.baseline_peak_bytes or 0) and measured.turns == 2
    assert step.most_bytes == most_bytes and all(map(torch.equal, model.parameters(), before))
    assert_close([step(batch)], [eager.run_eager(batch)])
    with pytest.raises(InvalidOptionError, match="round differently"):
        step.verify()


@pytest.mark.parametrize("options", [{"arena": True}, {"verify": True}, {"plan": "a.plan.json"}])
def test_a_whole_step_refuses_what_goes_with_eagers_kernels_only(options: dict[str, Any]) -> None:
    model, batch = nn.Linear(2, 2), torch.randn(3, 2)
    with pytest.raises(InvalidOptionError, match=f"{next(iter(options))} does not go with"):
        memfit.fit(model, lambda m, b: m(b).sum(), batch, budget="1MiB", kernels="inductor", **options)


def test_without_a_compiler_the_error_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def compile_without(*_: Any, **__: Any) -> Any:
        raise RuntimeError("No working C++ compiler found\nmore lines")

    monkeypatch.setattr(inductor, "compiled_by_inductor", compile_without)
    model = memfit.compile(nn.Linear(3, 2), budget="1MiB", reserve=0, kernels="inductor", options=OPTIONS)
    with pytest.raises(UnsupportedStepError, match=r"No working C\+\+ compiler found; .*kernels=\"eager\""):
        model(torch.randn(4, 3))


def test_a_budget_below_the_parameters_is_refused() -> None:
    model = memfit.compile(nn.Linear(300, 200), budget="1KiB", reserve=0, kernels="inductor", options=OPTIONS)
    with pytest.raises(NoPlanError, match="are beside this graph"):
        model(torch.randn(4, 300))


def test_a_budget_below_what_the_code_takes_is_refused_with_the_bytes_that_were_reached() -> None:
    layers = (nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(3))
    budget = Trained.others_bytes + 2_000_000
    model = memfit.compile(nn.Sequential(*layers), budget=budget, reserve=0, kernels="inductor", options=OPTIONS)
    told = r"a budget of \d+ bytes was reached.* the code that Inductor generates takes .* nothing proves that it must"
    with pytest.raises(NoPlanError, match=told):
        model(torch.randn(512, 64))


def step_of_three() -> Graph:
    sizes = (("x", 8, Role.INPUT), ("a", 8, Role.ACTIVATION), ("b", 8, Role.ACTIVATION), ("y", 4, Role.OUTPUT))
    return Graph.build(
        name="three",
        storages=[Storage(id=n, name=name, bytes=size, role=role) for n, (name, size, role) in enumerate(sizes)],
        ops=[
            Op(id=0, name="add", phase=Phase.FORWARD, reads=(0,), writes=(1,), seconds=1.0, workspace_bytes=2),
            Op(id=1, name="tanh", phase=Phase.FORWARD, reads=(1,), writes=(2,), seconds=1.0),
            Op(id=2, name="mm", phase=Phase.FORWARD, reads=(2,), writes=(3,), seconds=5.0),
        ],
    )


def test_a_chain_is_one_op_without_the_memory_between() -> None:
    graph, members, _ = with_chains(step_of_three(), [True, True, False])
    assert members == ((0, 1), (2,))
    assert [storage.name for storage in graph.storages] == ["x", "b", "y"]
    chain, last = graph.ops
    assert (chain.reads, chain.writes, chain.workspace_bytes) == ((0,), (1,), 2)
    assert chain.seconds == 1.0  # 16 of 32 bytes
    assert (last.reads, last.writes, last.seconds) == ((1,), (2,), 5.0)


def test_what_another_op_reads_stays() -> None:
    graph, members, _ = with_chains(step_of_three(), [True, False, False])
    assert members == ((0,), (1,), (2,))
    assert graph.ops[1].reads == (1,)


def test_a_schedule_becomes_halves_that_compute_a_node_as_often_as_it_says() -> None:
    def function(primals: Any, tangents: Any) -> Any:
        hidden = torch.tanh(primals)
        turned = hidden.t()
        return torch.exp(turned), tangents * turned

    joint = make_fx(function)(torch.randn(3, 2), torch.randn(2, 3))
    placeholders = joint.graph.find_nodes(op="placeholder")
    for node, name in zip(placeholders, ("primals_1", "tangents_1"), strict=True):
        node.target = node.name = name
    made = [n for n in joint.graph.nodes if n.op == "call_function" and n.target != torch.ops.aten.t.default]
    sources = [[node] for node in made]
    schedule = Schedule.parse("compute 0\ncompute 1\ndrop 1\nboundary 0\ncompute 0\ncompute 2")
    forward, backward = node_halves(joint, sources, schedule, 1)
    values, tangents = torch.randn(3, 2), torch.randn(2, 3)
    output, saved = forward(values)
    assert saved is values
    (gradient,) = backward(values, tangents)
    assert torch.equal(output, torch.exp(torch.tanh(values).t()))
    assert torch.equal(gradient, tangents * torch.tanh(values).t())
    kept = Schedule.parse("compute 0\ncompute 1\nboundary 0\ncompute 2")
    forward, backward = node_halves(joint, sources, kept, 1)
    assert [n.target for n in backward.graph.nodes if n.op == "call_function"] == [
        torch.ops.aten.t.default,
        torch.ops.aten.mul.Tensor,
    ]
    assert operator.length_hint(forward(values)) == 2


def test_a_copy_does_not_read_what_it_overwrites() -> None:
    def function(written: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        return torch.ops.aten.copy.default(written, source) * 2

    given = torch.zeros(3, 2, dtype=torch.float64), torch.randn(2)
    joint = make_fx(function, tracing_mode="fake")(*given)
    leave_out_overwritten(joint)
    assert not joint.graph.find_nodes(op="placeholder")[0].users
    assert torch.equal(joint(*given), function(*given))
