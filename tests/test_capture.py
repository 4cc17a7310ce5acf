"""Capture: what a graph says of a real step, and that the step's meaning survives in it."""

from __future__ import annotations

import resource
from collections import Counter
from dataclasses import replace

import pytest
import torch
from steps import MODELS, ConvNet, conv_batch, cross_entropy, make_pair
from torch import nn

from memfit import TrainingStep, check
from memfit.binding import Origin
from memfit.capture import capture
from memfit.capture.batch_norms import BATCH_NORMS
from memfit.capture.functionalize import corrected, functional_variant
from memfit.device import GENERIC
from memfit.errors import CaptureError, InvalidDeviceError, InvalidOptionError, UnsupportedStepError
from memfit.graph import Phase, Role
from memfit.plan import Problem
from memfit.planners.engine.results import unplanned_schedule
from memfit.torch_private.tensors import FakeTensorMode


def make_sgd(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", MODELS)
def test_residents_are_parameters_buffers_and_batch_each_once(name: str) -> None:
    step, _ = make_pair(name)
    graph = capture(step).graph
    tensors = [*step.model.parameters(), *step.model.buffers(), *step.batch]
    if name == "unusual":
        tensors.append(step.model.scale)  # a tensor that is neither, closed over
    assert graph.resident_bytes == sum(tensor.nbytes for tensor in tensors)


def test_the_unplanned_schedule_of_a_captured_step_is_legal_and_computes_each_op_once() -> None:
    graph = capture(make_pair("conv", make_sgd)[0]).graph
    schedule = unplanned_schedule(Problem(graph=graph, device=GENERIC, budget_bytes=0))
    check(graph, schedule)
    assert schedule.codes.tolist().count(0) == len(graph.ops)


def test_phases_modules_and_roles_are_those_of_the_model() -> None:
    graph = capture(make_pair("conv", make_sgd)[0]).graph
    modules = {op.module for op in graph.ops if op.target == "aten.convolution.default"}
    assert modules == {"stem.0", "branch.0"}
    backward = {op.module for op in graph.ops if op.target == "aten.convolution_backward.default"}
    assert backward == modules
    assert {op.phase for op in graph.ops} == set(Phase)
    roles = {storage.name: storage.role for storage in graph.storages}
    assert roles["stem.0.weight"] is Role.PARAMETER
    assert roles["optimizer:stem.0.weight.momentum_buffer"] is Role.STATE
    assert roles["batch_0"] is Role.INPUT


def test_each_parameter_is_updated_as_soon_as_its_gradient_is_complete() -> None:
    graph = capture(make_pair("conv", make_sgd)[0]).graph
    updates = [op.id for op in graph.ops if op.phase is Phase.UPDATE]
    last_backward = max(op.id for op in graph.ops if op.phase is Phase.BACKWARD)
    assert len(updates) == 10
    assert sum(update < last_backward for update in updates) >= 8
    head = next(op for op in graph.ops if op.phase is Phase.UPDATE and op.module == "head")
    assert head.id < next(op.id for op in graph.ops if op.target == "aten.convolution_backward.default")


def test_clipping_makes_one_update_that_reads_every_gradient() -> None:
    step, _ = make_pair("conv", make_sgd, clip_norm=0.5)
    graph = capture(step).graph
    (update,) = [op for op in graph.ops if op.phase is Phase.UPDATE]
    assert len(update.reads) == 10
    assert update.id == len(graph.ops) - 1


def test_in_place_relu_is_a_relu_that_can_be_computed_again() -> None:
    graph = capture(make_pair("conv")[0]).graph
    targets = Counter(op.target for op in graph.ops)
    assert targets["aten.relu.default"] == 2
    assert all(op.recomputable and not op.mutates for op in graph.ops if op.target == "aten.relu.default")


def test_batch_normalization_updates_its_statistics_once_and_can_be_computed_again() -> None:
    graph = capture(make_pair("conv")[0]).graph
    norms = [op for op in graph.ops if op.target == "aten.native_batch_norm.default"]
    buffers = {s.id for s in graph.storages if s.name.endswith(("running_mean", "running_var"))}
    assert len(norms) == 2
    assert all(not op.mutates and not buffers & set(op.reads) and len(op.writes) == 5 for op in norms)
    copies = [op for op in graph.ops if op.target == "aten.copy_.default"]
    assert {storage for op in copies for storage in op.mutates} == buffers


def test_a_write_to_a_part_of_a_fresh_tensor_is_one_op_that_can_be_computed_again() -> None:
    graph = capture(make_pair("unusual")[0]).graph
    assert not any(graph.storages[s].role is Role.ACTIVATION for op in graph.ops for s in op.mutates)
    assert [op.target.partition("#")[0] for op in graph.ops if "+" in op.target] == ["zeros_like.default+copy_.default"]


def test_the_gates_of_an_unrolled_lstm_can_be_computed_again() -> None:
    graph = capture(make_pair("recurrent")[0]).graph
    gates = [op for op in graph.ops if "+sigmoid_" in op.target]
    assert len(gates) == 9
    assert all(op.recomputable and not op.mutates for op in gates)


def test_a_write_after_a_read_stays_a_mutation() -> None:
    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 3)

        def forward(self, values: torch.Tensor) -> torch.Tensor:
            outputs = self.linear(values)
            total = outputs.sum(1, keepdim=True)
            changed = outputs.detach()
            changed[:, 0] = 1.0
            return outputs + total

    step = TrainingStep(model=Late(), loss=cross_entropy, batch=(torch.randn(3, 4), torch.tensor([0, 1, 1])))
    graph = capture(step).graph
    assert [op.target for op in graph.ops if op.mutates and not op.computed_once] == []
    assert any(graph.storages[s].role is Role.ACTIVATION for op in graph.ops for s in op.mutates)


def test_every_random_op_reads_a_saved_generator_state() -> None:
    graph = capture(make_pair("unusual")[0]).graph
    random = [op for op in graph.ops if op.random and op.recomputable]
    assert random
    for op in random:
        states = [s for s in op.reads if graph.storages[s].bytes == 5056]
        assert len(states) == 1
        assert not graph.ops[graph.writer_of[states[0]]].recomputable


def test_gradients_that_are_there_are_added_to() -> None:
    step, _ = make_pair("conv")
    step.run_eager(step.batch)
    graph = capture(step).graph
    gradients = [s for s in graph.storages if s.name.endswith(".grad")]
    assert len(gradients) == 10
    assert all(s.resident for s in gradients)
    assert {s.id for s in gradients} <= {m for op in graph.ops for m in op.mutates}


def test_capturing_leaves_the_model_its_gradients_and_the_generator_alone() -> None:
    step, _ = make_pair("language")
    before = {name: tensor.clone() for name, tensor in step.model.state_dict().items()}
    generator = torch.get_rng_state()
    capture(step)
    assert torch.equal(generator, torch.get_rng_state())
    for name, tensor in step.model.state_dict().items():
        assert type(tensor) is torch.Tensor
        assert torch.equal(tensor, before[name])
    assert all(parameter.grad is None for parameter in step.model.parameters())


def test_same_step_same_fingerprint_other_batch_other_fingerprint() -> None:
    step, _ = make_pair("conv")
    assert capture(step).graph.fingerprint == capture(step).graph.fingerprint
    assert capture(step, conv_batch(4)).graph.fingerprint != capture(step).graph.fingerprint


class LooksAtValues(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        if values.sum().item() > 0:
            return self.linear(values)
        return self.linear(-values)


def test_a_model_that_looks_at_values_is_refused_with_its_line() -> None:
    step = TrainingStep(model=LooksAtValues(), loss=cross_entropy, batch=(torch.randn(3, 4), torch.tensor([0, 1, 1])))
    with pytest.raises(CaptureError, match=r"test_capture\.py:\d+: the step depends on the value of a tensor"):
        capture(step)


def test_a_model_that_raises_is_reported_with_its_line() -> None:
    step = TrainingStep(model=ConvNet(), loss=cross_entropy, batch=(torch.randn(2, 4), torch.tensor([0, 1])))
    with pytest.raises(CaptureError, match=r"steps\.py:\d+: .* in module 'stem.0' \(Conv2d\) RuntimeError"):
        capture(step)


def test_what_a_model_raises_can_be_caught_as_what_it_is() -> None:
    class Odd(nn.Linear):
        def forward(self, values: torch.Tensor) -> torch.Tensor:
            if len(values) % 2:
                raise KeyError("an odd number of rows")
            return super().forward(values)

    step = TrainingStep(model=Odd(4, 2), loss=cross_entropy, batch=(torch.randn(3, 4), torch.tensor([0, 1, 1])))
    with pytest.raises(KeyError) as caught:
        capture(step)
    assert isinstance(caught.value, CaptureError) and "the step raised KeyError" in str(caught.value)


def test_sparse_gradients_are_refused():
    model = torch.nn.EmbeddingBag(10, 4, sparse=True)
    step = TrainingStep(model=model, loss=lambda model, batch: model(batch).sum(), batch=torch.zeros(2, 3, dtype=int))
    with pytest.raises(CaptureError, match=r"shape \[10, 4\] has layout torch.sparse_coo.*sparse=False"):
        capture(step)


def test_a_loss_that_is_no_scalar_is_refused() -> None:
    step = TrainingStep(model=ConvNet(), loss=lambda model, batch: model(batch[0]), batch=conv_batch())
    with pytest.raises(CaptureError, match=r"loss returned a tensor of shape \(48, 5\), expected a scalar"):
        capture(step)


def test_a_batch_on_another_device_is_refused() -> None:
    step = TrainingStep(
        model=ConvNet(), loss=cross_entropy, batch=(torch.empty(2, 3, 8, 8, device="meta"), torch.tensor([0, 1]))
    )
    with pytest.raises(InvalidDeviceError, match=r"batch\[0\] is on meta and the model on cpu"):
        capture(step)


def test_a_model_across_ranks_is_refused() -> None:
    step = TrainingStep(model=nn.DataParallel(ConvNet()), loss=cross_entropy, batch=conv_batch())
    with pytest.raises(UnsupportedStepError, match="the model is wrapped in DataParallel"):
        capture(step)


def test_lbfgs_and_clipping_without_an_optimizer_are_refused() -> None:
    step, _ = make_pair("conv", torch.optim.LBFGS)
    with pytest.raises(UnsupportedStepError, match="LBFGS"):
        capture(step)
    with pytest.raises(InvalidOptionError, match="clip_norm needs an optimizer"):
        capture(make_pair("conv", clip_norm=1.0)[0])


def test_operators_that_mutate_without_saying_so_are_in_the_table() -> None:
    """Compare the observed writes of each batch normalization with its schema and with the table."""
    values, weight, bias = torch.randn(4, 3, 5, 5), torch.ones(3), torch.zeros(3)
    for packet in (torch.ops.aten.native_batch_norm, torch.ops.aten._native_batch_norm_legit):
        mean, variance = torch.zeros(3), torch.ones(3)
        packet(values, weight, bias, mean, variance, True, 0.1, 1e-5)
        assert mean.abs().sum() > 0
        assert (variance != 1).all()
        assert BATCH_NORMS[packet][:2] == (3, 4)


def test_a_functional_form_gives_the_same_metadata_or_there_is_none() -> None:
    whole = torch.randn(4, 3)
    variant = functional_variant(torch.ops.aten.relu_.default, (whole,), {}, whole)
    assert variant == (torch.ops.aten.relu.default, True)
    part = whole[:, 1:]
    assert functional_variant(torch.ops.aten.relu_.default, (part,), {}, part) is None


@pytest.mark.slow
def test_resnet152_at_batch_256_is_captured_in_little_memory() -> None:
    from pytorchcv.models.resnet import resnet152

    step = TrainingStep(
        model=resnet152(), loss=nn.CrossEntropyLoss(), batch=(torch.zeros(256, 3, 224, 224), torch.zeros(256).long())
    )
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    graph = capture(step).graph
    used_bytes = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib) << 10
    assert used_bytes < 2 << 30
    activations = sum(s.bytes for s in graph.storages if s.role is Role.ACTIVATION)
    assert activations > 40 << 30  # what could not be held here


def test_the_seeds_of_efficient_attention_are_on_the_host() -> None:
    """Its fake kernel says on the device."""
    func = torch.ops.aten._scaled_dot_product_efficient_attention.default
    with FakeTensorMode():
        block = torch.empty(1, 2, 8, 16, device="cuda")
        args = (block, block, block, None, True, 0.1)
        returned = func(*args)
        assert [tensor.device.type for tensor in returned] == ["cuda"] * 4, "the fake kernel has been mended"
        fixed = corrected(func, args, returned)
    assert [tensor.device.type for tensor in fixed] == ["cuda", "cuda", "cpu", "cpu"]
    assert [(tensor.shape, tensor.dtype) for tensor in fixed] == [(t.shape, t.dtype) for t in returned]


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.RAdam, torch.optim.Adagrad])
@pytest.mark.parametrize("steps", [0, 1, 7])
def test_updates_of_parameters_that_look_alike_cost_what_each_costs(kind: type[torch.optim.AdamW], steps: int) -> None:
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(3)))
    optimizer = kind(model.parameters())
    for number in range(steps):
        trained = model if number > 2 else model[:2]  # the last layer's step count differs
        trained(torch.randn(4, 16)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    step = TrainingStep(
        model=model, loss=lambda m, b: m(b).square().mean(), batch=torch.randn(4, 16), optimizer=optimizer
    )
    shared = capture(step)
    apart = kind([{"params": [parameter]} for parameter in model.parameters()])  # a group each, so that each is tried
    apart.state.update(optimizer.state)
    assert shared.graph == capture(replace(step, optimizer=apart)).graph
    states = [resident.value.storage for resident in shared.binding.residents if resident.origin is Origin.STATE]
    assert len(states) == len(set(states)) >= 6
