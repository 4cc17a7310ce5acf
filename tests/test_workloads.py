"""The built-in workloads: what they compute, their options, and the checkpoints that a person would place in them."""

from __future__ import annotations

import builtins
import sys
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from memfit import TrainingStep
from memfit.errors import InvalidDeviceError, InvalidOptionError, InvalidTargetError
from memfit.system.recorder import record
from memfit.workloads import WORKLOADS, build
from memfit.workloads.building import checkpoints_placed
from memfit.workloads.lstm import UnrolledLSTM
from memfit.workloads.stochastic_depth import StochasticDepthResNet
from memfit.workloads.unet import UNet

SMALL: dict[str, dict[str, Any]] = {
    "resnet50": {"batch": 2, "size": 64, "classes": 4, "depth": 18},
    "vgg16": {"batch": 2, "size": 32, "classes": 4, "depth": 11},
    "densenet121": {"batch": 2, "size": 64, "classes": 4},
    "inceptionv3": {"batch": 2, "size": 107, "classes": 4},
    "unet": {"batch": 2, "size": 32, "width": 4, "levels": 3},
    "dcgan": {"batch": 2, "size": 16, "width": 4},
    "c3d": {"batch": 2, "frames": 16, "size": 16, "width": 2, "feedforward": 8, "classes": 4},
    "gpt2": {"batch": 2, "tokens": 8, "layers": 2, "width": 32, "head_width": 8, "vocabulary": 50},
    "lstm": {"batch": 2, "steps": 9, "width": 8},
    "char_lstm": {"batch": 2, "steps": 9, "width": 8},
    "stochastic_depth": {"batch": 2, "size": 8, "classes": 4, "depth": 20},
    "encoder": {"batch": 2, "tokens": 8, "layers": 2, "width": 16, "head_width": 8, "feedforward": 32},
}
ITERATIONS = ("kmeans", "power_iteration")  # which train nothing: see test_functions.py
# Peak MiB allocated in zero_grad + forward + loss + backward at the default options, with one thread.
EAGER_PEAKS = {
    "resnet50": 677.5,
    "unet": 358.6,
    "lstm": 65.6,
    "encoder": 444.1,
}


def _gradients(step: TrainingStep, seed: int = 7) -> dict[str, torch.Tensor]:
    """Run forward, loss and backward; return the loss and the gradients by name."""
    step.model.zero_grad(set_to_none=True)
    torch.manual_seed(seed)
    loss = step.compute_loss(step.model, step.batch)
    loss.backward()
    found = {"loss": loss.detach()}
    for name, parameter in step.model.named_parameters():
        assert parameter.grad is not None, f"{name} has no gradient"
        found[name] = parameter.grad.clone()
    return found


def _tensors(step: TrainingStep) -> list[torch.Tensor]:
    batch = step.batch.values() if isinstance(step.batch, dict) else step.batch
    return [*step.model.state_dict().values(), *batch]


def test_all_are_there() -> None:
    assert sorted(WORKLOADS) == sorted([*SMALL, *ITERATIONS])
    for name, workload in WORKLOADS.items():
        assert workload.name == name
        assert workload.description
        assert workload.source


@pytest.mark.parametrize("name", SMALL)
def test_a_step_trains(name: str) -> None:
    step = build(name, optimizer="sgd", **SMALL[name])
    gradients = _gradients(step)
    assert all(torch.isfinite(tensor).all() for tensor in gradients.values())
    assert sum(float(tensor.abs().sum()) for tensor in gradients.values()) > 0
    before = {key: tensor.clone() for key, tensor in step.model.state_dict().items()}
    assert step.optimizer is not None
    step.optimizer.step()
    assert any(not torch.equal(tensor, before[key]) for key, tensor in step.model.state_dict().items())


@pytest.mark.parametrize("name", ["resnet50", "unet", "gpt2", "lstm", "encoder"])
def test_the_seed_decides_and_the_callers_generator_stays(name: str) -> None:
    torch.manual_seed(5)
    state = torch.get_rng_state()
    first = build(name, **SMALL[name])
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(6)
    assert all(map(torch.equal, _tensors(first), _tensors(build(name, **SMALL[name]))))
    other = build(name, seed=1, **SMALL[name])
    assert not all(map(torch.equal, _tensors(first), _tensors(other)))


@pytest.mark.parametrize("name", SMALL)
def test_checkpoints_leave_the_gradients_and_the_original_alone(name: str) -> None:
    step = build(name, optimizer="adamw", **SMALL[name])
    buffers = {key: buffer.clone() for key, buffer in step.model.named_buffers()}
    expected = _gradients(step)
    for granularity in ("block", "stage"):
        for key, buffer in step.model.named_buffers():
            buffer.copy_(buffers[key])
        with checkpoints_placed(step, granularity):
            assert any("checkpoint" in str(vars(module).get("forward")) for module in step.model.modules())
            got = _gradients(step)
        assert not any("forward" in vars(module) for module in step.model.modules())
        assert list(got) == list(expected)
        for key, tensor in expected.items():
            assert torch.equal(got[key], tensor), key


@pytest.mark.parametrize("name", ["resnet50", "unet", "lstm", "encoder", "gpt2"])
def test_checkpoints_of_every_block_need_less(name: str) -> None:
    options = SMALL[name] | {"batch": 8} | ({"steps": 64, "width": 64} if name == "lstm" else {})
    step = build(name, **options)
    peaks: list[int] = []
    for placed in (nullcontext(), checkpoints_placed(step)):
        step.model.zero_grad(set_to_none=True)
        _gradients(step)
        step.model.zero_grad(set_to_none=True)
        with placed, record("cpu") as usage:
            step.compute_loss(step.model, step.batch).backward()
        peaks.append(usage.peak_bytes)
    assert peaks[1] < peaks[0]


def test_checkpoints_go_into_built_in_steps_only() -> None:
    step = build("lstm", **SMALL["lstm"])
    with (
        pytest.raises(InvalidOptionError, match="granularity is 'layer', expected one of block, stage"),
        checkpoints_placed(step, "layer"),
    ):
        pass
    bare = TrainingStep(model=step.model, loss=step.loss, batch=step.batch, name="mine")
    with pytest.raises(InvalidTargetError, match="'mine' is not a built-in workload"), checkpoints_placed(bare):
        pass


@pytest.mark.parametrize("name", ["resnet50", "gpt2", "encoder"])
def test_autocast_computes_in_the_dtype_that_is_asked_for(name: str) -> None:
    seen: set[torch.dtype] = set()
    step = build(name, autocast="bf16", **SMALL[name])
    for module in step.model.modules():
        if isinstance(module, torch.nn.Linear | torch.nn.Conv2d):
            module.register_forward_hook(lambda _module, _inputs, output: seen.add(output.dtype))
    assert torch.isfinite(step.compute_loss(step.model, step.batch))
    assert torch.bfloat16 in seen
    assert all(parameter.dtype == torch.float32 for parameter in step.model.parameters())


@pytest.mark.parametrize("name", ["resnet50", "vgg16", "densenet121", "inceptionv3", "unet"])
def test_channels_last(name: str) -> None:
    step = build(name, channels_last=True, **SMALL[name])
    assert step.batch[0].is_contiguous(memory_format=torch.channels_last)
    kernels = [m.weight for m in step.model.modules() if isinstance(m, torch.nn.Conv2d)]
    assert all(kernel.is_contiguous(memory_format=torch.channels_last) for kernel in kernels)


@pytest.mark.parametrize(
    ("name", "kind"),
    [("none", type(None)), ("sgd", torch.optim.SGD), ("adam", torch.optim.Adam), ("adamw", torch.optim.AdamW)],
)
def test_optimizers(name: str, kind: type) -> None:
    assert type(build("lstm", optimizer=name, **SMALL["lstm"]).optimizer) is kind


def test_options_shape_the_model_and_the_batch() -> None:
    assert build("resnet50", depth=18, size=96, batch=3, classes=7).batch[0].shape == (3, 3, 96, 96)
    assert len(build("gpt2", **(SMALL["gpt2"] | {"layers": 3})).model.transformer.h) == 3  # type: ignore[union-attr]
    step = build("unet", size=16, width=2, levels=2, classes=5, batch=1)
    assert step.model(step.batch[0]).shape == (1, 5, 16, 16)


def test_options_as_text_are_the_same_step() -> None:
    as_text = {key: str(value) for key, value in SMALL["unet"].items()}
    texts = build("unet", channels_last="true", **as_text)
    assert all(map(torch.equal, _tensors(texts), _tensors(build("unet", channels_last=True, **SMALL["unet"]))))


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("unet", {"bach": 2}, r"workload unet has no option 'bach'; it has batch, .*; did you mean 'batch'\?"),
        ("unet", {"batch": "two"}, "option batch is 'two', expected a whole number"),
        ("unet", {"batch": 1.5}, "option batch is 1.5, expected a whole number"),
        ("unet", {"batch": True}, "option batch is True, expected a whole number"),
        ("unet", {"batch": 0}, "option batch is 0, expected 1 or more"),
        ("unet", {"batch": "-3"}, "option batch is '-3', expected 1 or more"),
        ("unet", {"channels_last": "maybe"}, "option channels_last is 'maybe', expected true or false"),
        ("unet", {"optimizer": "lion"}, "option optimizer is 'lion', expected one of none, sgd, adam, adamw"),
        ("unet", {"autocast": 16}, "option autocast is 16, expected text"),
        ("unet", {"size": 100}, "size is 100, expected a multiple of 16 for 5 levels"),
        ("dcgan", {"size": 48}, "size is 48, expected a power of two, at least 8"),
        ("dcgan", {"size": 4}, "size is 4, expected a power of two, at least 8"),
        ("c3d", {"frames": 8}, "8 frames of size 112, expected a multiple of 16 frames, and size 16 or more"),
        ("resnet50", {"depth": 51}, "option depth is 51, expected one of 18, 34, 50, 101, 152"),
        ("vgg16", {"size": 16}, "size 16 is too small for the network"),
        ("inceptionv3", {"size": 40}, "size 40 is too small for the network"),
        ("gpt2", {"width": 100}, "width 100 is not a multiple of head_width 64"),
        ("encoder", {"width": 100}, "width 100 is not a multiple of head_width 64"),
        ("encoder", {"dropout": -0.1}, "option dropout is -0.1, expected 0 or more"),
    ],
)
def test_bad_options(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidOptionError, match=message):
        build(name, **options)


def test_an_unknown_workload_lists_those_that_there_are() -> None:
    with pytest.raises(
        InvalidTargetError, match=r"no workload is called 'resnet'; there are resnet50, .*encoder, .*; did you"
    ):
        build("resnet")


@pytest.mark.parametrize("device", ["cuda:99", "gpu", "mps"])
def test_a_device_that_is_not_here(device: str) -> None:
    with pytest.raises(InvalidDeviceError, match=f"'{device}' is not"):
        build("lstm", device=device)


@pytest.mark.parametrize(
    ("name", "package", "install"),
    [("gpt2", "transformers", "transformers"), ("resnet50", "pytorchcv", "--no-deps pytorchcv requests")],
)
def test_a_missing_package_says_how_to_install_it(
    name: str, package: str, install: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    really_import = builtins.__import__

    def without(wanted: str, *args: Any, **kwargs: Any) -> Any:
        if wanted.split(".")[0] == package:
            raise ModuleNotFoundError(f"No module named {package!r}", name=package)
        return really_import(wanted, *args, **kwargs)

    monkeypatch.delitem(sys.modules, f"memfit.workloads.{WORKLOADS[name].module}", raising=False)
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(InvalidTargetError, match=f"workload {name} needs .* run `pip install {install}`"):
        build(name, **SMALL[name])


def test_building_for_meta_takes_no_memory() -> None:
    step = build("resnet50", depth=18, device="meta")
    assert all(tensor.is_meta for tensor in _tensors(step))


def test_the_unrolled_lstm_is_torchs_lstm() -> None:
    torch.manual_seed(0)
    unrolled = UnrolledLSTM(layers=2, width=8, classes=3)
    whole = torch.nn.LSTM(8, 8, num_layers=2, batch_first=True)
    for layer, cell in enumerate(unrolled.segment.step.cells):
        for key in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"):
            getattr(whole, f"{key}_l{layer}").data.copy_(getattr(cell, key))
    inputs = torch.randn(2, 11, 8)
    expected = unrolled.head(whole(inputs)[0]).transpose(1, 2)
    torch.testing.assert_close(unrolled(inputs), expected)


def test_the_unet_joins_equal_resolutions() -> None:
    network = UNet(width=4, levels=3, classes=2)
    seen: list[tuple[int, int]] = []
    for up in network.ups:
        up.register_forward_hook(lambda _up, inputs, output: seen.append((inputs[1].shape[-1], output.shape[-1])))
    network(torch.zeros(1, 3, 16, 16))
    assert seen == [(8, 8), (16, 16)]


@pytest.mark.slow
@pytest.mark.parametrize("name", EAGER_PEAKS)
def test_the_eager_peak_at_default_sizes(name: str) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # convolutions take more workspace with more threads
    try:
        step = build(name)
        with record("cpu") as usage:
            step.compute_loss(step.model, step.batch).backward()
    finally:
        torch.set_num_threads(threads)
    assert usage.peak_bytes / 2**20 == pytest.approx(EAGER_PEAKS[name], rel=0.01)


def test_blocks_are_skipped_as_drawn() -> None:
    options = SMALL["stochastic_depth"] | {"depth": 56}
    whole, first, again = (build("stochastic_depth", draw=draw, **options) for draw in (0, 1, 1))

    def trained(step: TrainingStep) -> set[str]:
        step.compute_loss(step.model, step.batch).backward()
        return {name for name, parameter in step.model.named_parameters() if parameter.grad is not None}

    assert trained(first) == trained(again) < trained(whole) == {name for name, _ in whole.model.named_parameters()}
    model = first.model
    assert isinstance(model, StochasticDepthResNet)
    model.draw = None
    torch.manual_seed(0)
    losses = {float(first.compute_loss(model, first.batch).detach()) for _ in range(4)}
    assert len(losses) == 4
