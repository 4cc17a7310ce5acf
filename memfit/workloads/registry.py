"""The built-in workloads by name: what each is, its options, where it comes from. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches

from memfit.errors import InvalidOptionError, InvalidTargetError

OptionValue = int | float | str | bool

_KINDS: dict[type, str] = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
_TRUE, _FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One option of a workload; a value given as text is read as the default's type."""

    name: str
    default: OptionValue
    what: str
    choices: tuple[OptionValue, ...] = ()
    least: float | None = None

    def read(self, given: OptionValue, workload: str) -> OptionValue:
        """Return `given` as this option's type.

        Raises:
            InvalidOptionError: not of that type, not one of the choices, or below the least value.
        """
        value = _as_type_of(self.default, given)
        if value is None:
            expected = _KINDS[type(self.default)]
            raise InvalidOptionError(f"workload {workload}: option {self.name} is {given!r}, expected {expected}")
        if self.choices and value not in self.choices:
            expected = ", ".join(map(str, self.choices))
            raise InvalidOptionError(
                f"workload {workload}: option {self.name} is {given!r}, expected one of {expected}"
            )
        if self.least is not None and not isinstance(value, str) and value < self.least:
            raise InvalidOptionError(
                f"workload {workload}: option {self.name} is {given!r}, expected {self.least:g} or more"
            )
        return value


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A training step that memfit brings along.

    `module` is the module under `memfit.workloads` that makes it: `make(name, options) -> Parts`, and
    `places(model, granularity)`, the modules where a person would put `torch.utils.checkpoint`.
    """

    name: str
    description: str
    source: str
    module: str
    options: tuple[Option, ...]
    requires: str | None = None

    def read_options(self, given: Mapping[str, OptionValue]) -> dict[str, OptionValue]:
        """Return every option of this workload, those in `given` read and checked, the others at their defaults.

        Raises:
            InvalidOptionError: an option that does not exist, or a value that it cannot take.
        """
        known = {option.name: option for option in self.options}
        for name in given:
            if name not in known:
                listed = f"{', '.join(known)}{_did_you_mean(name, known)}"
                raise InvalidOptionError(f"workload {self.name} has no option {name!r}; it has {listed}")
        return {
            name: option.read(given[name], self.name) if name in given else option.default
            for name, option in known.items()
        }


def find(name: str) -> Workload:
    """Return the workload called `name`.

    Raises:
        InvalidTargetError: there is none; lists those that there are.
    """
    if name not in WORKLOADS:
        raise InvalidTargetError(
            f"no workload is called {name!r}; there are {', '.join(WORKLOADS)}{_did_you_mean(name, WORKLOADS)}"
        )
    return WORKLOADS[name]


def _did_you_mean(name: str, known: Mapping[str, object]) -> str:
    near = get_close_matches(name, known, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def _as_type_of(default: OptionValue, given: OptionValue) -> OptionValue | None:
    if isinstance(default, bool):
        text = str(given).lower()
        return True if text in _TRUE else False if text in _FALSE else None
    if isinstance(default, str):
        return given if isinstance(given, str) else None
    if isinstance(given, bool) or (isinstance(default, int) and isinstance(given, float)):
        return None
    try:
        return type(default)(given)
    except ValueError:
        return None


def _batch(default: int) -> Option:
    return Option(name="batch", default=default, what="samples in a batch", least=1)


def _size(default: int) -> Option:
    return Option(name="size", default=default, what="height and width of the images, in pixels", least=1)


def _layers(default: int) -> Option:
    return Option(name="layers", default=default, what="layers", least=1)


def _width(default: int) -> Option:
    return Option(name="width", default=default, what="features of a token, or of the first level", least=1)


def _classes(default: int) -> Option:
    return Option(name="classes", default=default, what="classes to tell apart", least=2)


_COMMON = (
    Option(
        name="optimizer", default="none", what="who updates the parameters", choices=("none", "sgd", "adam", "adamw")
    ),
    Option(name="autocast", default="none", what="dtype of torch.autocast", choices=("none", "bf16", "fp16")),
    Option(name="device", default="cpu", what="where model and batch are, as torch names it"),
    Option(name="seed", default=0, what="seed of the parameters and of the batch", least=0),
)
_CHANNELS_LAST = Option(name="channels_last", default=False, what="store images with channels innermost")
_DROPOUT = Option(name="dropout", default=0.1, what="dropout probability", least=0.0)
_HEAD_WIDTH = Option(name="head_width", default=64, what="features of an attention head; divides the width", least=1)


def _depth(default: int, *choices: int) -> Option:
    return Option(name="depth", default=default, what="layers with weights", choices=choices)


def _tokens(default: int) -> Option:
    return Option(name="tokens", default=default, what="tokens in a sample", least=1)


WORKLOADS: dict[str, Workload] = {
    workload.name: workload
    for workload in (
        Workload(
            name="resnet50",
            description="ResNet on images: bottleneck blocks, batch normalization",
            source="He et al. 2015, arXiv:1512.03385; model from pytorchcv",
            module="images",
            options=(
                _batch(8),
                _size(224),
                _classes(1000),
                _depth(50, 18, 34, 50, 101, 152),
                _CHANNELS_LAST,
                *_COMMON,
            ),
            requires="pytorchcv",
        ),
        Workload(
            name="vgg16",
            description="VGG on images: a straight line of convolutions, 528 MiB of parameters, dropout 0.5",
            source="Simonyan and Zisserman 2014, arXiv:1409.1556; model from pytorchcv",
            module="images",
            options=(_batch(4), _size(224), _classes(1000), _depth(16, 11, 13, 16, 19), _CHANNELS_LAST, *_COMMON),
            requires="pytorchcv",
        ),
        Workload(
            name="densenet121",
            description="DenseNet on images: every unit reads all before it in its stage",
            source="Huang et al. 2016, arXiv:1608.06993; model from pytorchcv",
            module="images",
            options=(_batch(4), _size(224), _classes(1000), _depth(121, 121, 161, 169, 201), _CHANNELS_LAST, *_COMMON),
            requires="pytorchcv",
        ),
        Workload(
            name="inceptionv3",
            description="Inception v3 on images: parallel branches, dropout 0.5",
            source="Szegedy et al. 2015, arXiv:1512.00567; model from pytorchcv",
            module="images",
            options=(_batch(4), _size(299), _classes(1000), _CHANNELS_LAST, *_COMMON),
            requires="pytorchcv",
        ),
        Workload(
            name="unet",
            description="U-Net for segmentation: long skip connections between equal resolutions",
            source="Ronneberger et al. 2015, arXiv:1505.04597; with padding and batch normalization",
            module="unet",
            options=(
                _batch(2),
                _size(256),
                _width(32),
                Option(name="levels", default=5, what="resolutions", least=2),
                _classes(2),
                _CHANNELS_LAST,
                *_COMMON,
            ),
        ),
        Workload(
            name="gpt2",
            description="GPT-2 language model from a config, random weights",
            source="Radford et al. 2019; transformers' GPT2LMHeadModel",
            module="gpt2",
            options=(
                _batch(4),
                _tokens(256),
                _layers(12),
                _width(384),
                _HEAD_WIDTH,
                Option(name="vocabulary", default=50257, what="different tokens", least=2),
                _DROPOUT,
                *_COMMON,
            ),
            requires="transformers",
        ),
        Workload(
            name="lstm",
            description="LSTM cells unrolled over time, a class for every step",
            source="the recurrent workload of Chen et al. 2016, arXiv:1604.06174, section 5; torch.nn.LSTMCell",
            module="lstm",
            options=(
                _batch(32),
                Option(name="steps", default=128, what="time steps", least=1),
                _layers(2),
                _width(256),
                _classes(10),
                *_COMMON,
            ),
        ),
        Workload(
            name="encoder",
            description="Transformer encoder with dropout",
            source="Vaswani et al. 2017, arXiv:1706.03762; torch.nn.TransformerEncoder",
            module="encoder",
            options=(
                _batch(4),
                _tokens(256),
                _layers(6),
                _width(512),
                _HEAD_WIDTH,
                Option(name="feedforward", default=2048, what="features inside the feed-forward part", least=1),
                _DROPOUT,
                *_COMMON,
            ),
        ),
    )
}
"""Every built-in workload by name, in the order that `memfit workloads` lists them."""
