"""Workloads on images, with networks of pytorchcv: resnet50, vgg16, densenet121, inceptionv3.

The modules of the networks are imported one by one: pytorchcv's model_provider imports all models, and torchvision.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from pytorchcv.models.densenet import densenet121, densenet161, densenet169, densenet201
from pytorchcv.models.inceptionv3 import inceptionv3
from pytorchcv.models.resnet import resnet18, resnet34, resnet50, resnet101, resnet152
from pytorchcv.models.vgg import vgg11, vgg13, vgg16, vgg19
from torch.func import functional_call

from memfit.errors import InvalidOptionError
from memfit.workloads.parts import Options, Parts, cross_entropy

_MAKERS: dict[str, dict[int, Callable[..., Any]]] = {
    "resnet50": {18: resnet18, 34: resnet34, 50: resnet50, 101: resnet101, 152: resnet152},
    "vgg16": {11: vgg11, 13: vgg13, 16: vgg16, 19: vgg19},
    "densenet121": {121: densenet121, 161: densenet161, 169: densenet169, 201: densenet201},
    "inceptionv3": {48: inceptionv3},
}
_INCEPTION_DEPTH = 48  # inceptionv3 has no option of its own for it


def make(name: str, options: Options) -> Parts:
    """Return the network `name`, cross entropy, and a batch of noise with random labels."""
    batch, classes, size = (options[key] for key in ("batch", "classes", "size"))
    model = _MAKERS[name][options.get("depth", _INCEPTION_DEPTH)](num_classes=classes)
    if size != model.in_size[0]:
        _resize(model, name, size)
    images = torch.randn(batch, 3, size, size)
    labels = torch.randint(classes, (batch,))
    return Parts(model=model, loss=cross_entropy(options), batch=(images, labels))


def places(model: Any, granularity: str) -> list[torch.nn.Module]:
    """Return the first block and the stages of the network, or all their units (VGG's are single convolutions)."""
    parts = [module for name, module in model.features.named_children() if name.startswith(("init", "stage"))]
    if granularity == "stage":
        return parts
    units: list[torch.nn.Module] = []
    for part in parts:
        inner = [module for name, module in part.named_children() if name.startswith(("unit", "trans"))]
        units += inner or [part]
    return units


def _resize(model: Any, name: str, size: int) -> None:
    """Replace the layers between features and classifier, which pytorchcv makes for one image size only."""
    features = model.features
    if name != "vgg16":
        features = torch.nn.Sequential(*list(model.features.children())[:-1])  # without the final pooling
    weights = {key: tensor.to("meta") for key, tensor in features.state_dict().items()}
    try:
        seen = functional_call(features, weights, (torch.empty(2, 3, size, size, device="meta"),))
    except (RuntimeError, ValueError) as error:
        raise InvalidOptionError(f"workload {name}: size {size} is too small for the network") from error
    if name == "vgg16":
        first = model.output.fc1
        first.fc = torch.nn.Linear(seen[0].numel(), first.fc.out_features)
    else:
        model.features.final_pool = torch.nn.AvgPool2d(kernel_size=tuple(seen.shape[2:]), stride=1)
