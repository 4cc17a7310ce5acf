"""Registry of the built-in workloads: description, source and options of each. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from memfit.errors import InvalidOptionError, InvalidTargetError
from memfit.system.lines import did_you_mean

OptionValue = int | float | str | bool

_KINDS: dict[type, str] = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
_TRUE, _FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One option of a workload.

    Attributes:
        name: of the option.
        default: its value if it is not given; a value given as text is read as the default's type.
        what: description for the command line.
        choices: the allowed values; empty allows all.
        least: the lowest allowed number, or None.
    """

    name: str
    default: OptionValue
    what: str
    choices: tuple[OptionValue, ...] = ()
    least: float | None = None

    def read(self, given: OptionValue, workload: str) -> OptionValue:
        """Return `given` as this option's type.

        Args:
            given: the value, or its text.
            workload: names the workload in errors.

        Raises:
            InvalidOptionError: not of that type, not one of the choices, or below the least value.
        """
        value = _as_type_of(self.default, given)
        expected = None
        if value is None:
            expected = _KINDS[type(self.default)]
        elif self.choices and value not in self.choices:
            expected = f"one of {', '.join(map(str, self.choices))}"
        elif self.least is not None and not isinstance(value, str) and value < self.least:
            expected = f"{self.least:g} or more"
        if value is None or expected is not None:
            raise InvalidOptionError(f"workload {workload}: option {self.name} is {given!r}, expected {expected}")
        return value


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A built-in training step.

    Attributes:
        name: of the workload.
        description, source: of its model.
        module: the module under `memfit.workloads` with `make(name, options) -> Parts` and
            `places(model, granularity)`, the modules for hand-placed `torch.utils.checkpoint`.
        options: those that the command line and `build` accept.
        requires: the package of its model, or None.
    """

    name: str
    description: str
    source: str
    module: str
    options: tuple[Option, ...]
    requires: str | None = None

    def read_options(self, given: Mapping[str, OptionValue]) -> dict[str, OptionValue]:
        """Return the values of all options: those in `given`, read and checked, and the defaults of the others.

        Raises:
            InvalidOptionError: an option that does not exist, or a value that it cannot take.
        """
        known = {option.name: option for option in self.options}
        for name in given:
            if name not in known:
                listed = f"{', '.join(known)}{did_you_mean(name, known)}"
                raise InvalidOptionError(f"workload {self.name} has no option {name!r}; it has {listed}")
        return {
            name: option.read(given[name], self.name) if name in given else option.default
            for name, option in known.items()
        }


def find(name: str) -> Workload:
    """Return the workload called `name`.

    Raises:
        InvalidTargetError: no workload has that name; lists all of them.
    """
    if name not in WORKLOADS:
        raise InvalidTargetError(
            f"no workload is called {name!r}; there are {', '.join(WORKLOADS)}{did_you_mean(name, WORKLOADS)}"
        )
    return WORKLOADS[name]


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


_KNOWN = {
    option.name: option
    for option in (
        Option(name="batch", default=1, what="samples in a batch", least=1),
        Option(name="size", default=1, what="height and width of the images, in pixels", least=1),
        Option(name="classes", default=2, what="number of classes", least=2),
        Option(name="depth", default=1, what="layers with weights"),
        Option(name="channels_last", default=False, what="store images with channels innermost"),
        Option(name="levels", default=2, what="resolutions", least=2),
        Option(name="tokens", default=1, what="tokens in a sample", least=1),
        Option(name="frames", default=1, what="images in a clip", least=1),
        Option(name="steps", default=1, what="time steps", least=1),
        Option(name="layers", default=1, what="layers", least=1),
        Option(name="width", default=1, what="features of a token, or of the first level", least=1),
        Option(name="head_width", default=64, what="features of an attention head; divides the width", least=1),
        Option(name="feedforward", default=1, what="features inside the feed-forward part", least=1),
        Option(name="vocabulary", default=2, what="different tokens", least=2),
        Option(name="dropout", default=0.1, what="dropout probability", least=0.0),
        Option(name="draw", default=0, what="seed of the blocks that are skipped; 0 skips none", least=0),
        Option(name="points", default=1, what="points in the data", least=1),
        Option(name="features", default=1, what="numbers in a point", least=1),
        Option(name="centres", default=1, what="clusters to find", least=1),
        Option(name="vectors", default=1, what="eigenvectors to find", least=1),
    )
}
_COMMON = (
    Option(
        name="optimizer", default="none", what="optimizer of the parameters", choices=("none", "sgd", "adam", "adamw")
    ),
    Option(name="autocast", default="none", what="dtype of torch.autocast", choices=("none", "bf16", "fp16")),
    Option(name="device", default="cpu", what="device of model and batch, as torch names it"),
    Option(name="seed", default=0, what="seed of the parameters and of the batch", least=0),
)


def _options(*, depths: tuple[int, ...] = (), trains: bool = True, **defaults: OptionValue) -> tuple[Option, ...]:
    """Return the options of a workload, those that all share last; `depths` are the choices of option `depth`."""
    choices = {"depth": depths}
    own = (replace(_KNOWN[name], default=value, choices=choices.get(name, ())) for name, value in defaults.items())
    return (*own, *(option for option in _COMMON if trains or option.name in ("device", "seed")))


WORKLOADS: dict[str, Workload] = {
    workload.name: workload
    for workload in (
        Workload(
            name="resnet50",
            description="ResNet on images: bottleneck blocks, batch normalization",
            source="He et al. 2015, arXiv:1512.03385; model from pytorchcv",
            module="images",
            options=_options(
                depths=(18, 34, 50, 101, 152), batch=8, size=224, classes=1000, depth=50, channels_last=False
            ),
            requires="pytorchcv",
        ),
        Workload(
            name="vgg16",
            description="VGG on images: a straight line of convolutions, 528 MiB of parameters, dropout 0.5",
            source="Simonyan and Zisserman 2014, arXiv:1409.1556; model from pytorchcv",
            module="images",
            options=_options(depths=(11, 13, 16, 19), batch=4, size=224, classes=1000, depth=16, channels_last=False),
            requires="pytorchcv",
        ),
        Workload(
            name="densenet121",
            description="DenseNet on images: every unit reads all before it in its stage",
            source="Huang et al. 2016, arXiv:1608.06993; model from pytorchcv",
            module="images",
            options=_options(
                depths=(121, 161, 169, 201), batch=4, size=224, classes=1000, depth=121, channels_last=False
            ),
            requires="pytorchcv",
        ),
        Workload(
            name="inceptionv3",
            description="Inception v3 on images: parallel branches, dropout 0.5",
            source="Szegedy et al. 2015, arXiv:1512.00567; model from pytorchcv",
            module="images",
            options=_options(batch=4, size=299, classes=1000, channels_last=False),
            requires="pytorchcv",
        ),
        Workload(
            name="unet",
            description="U-Net for segmentation: long skip connections between equal resolutions",
            source="Ronneberger et al. 2015, arXiv:1505.04597; with padding and batch normalization",
            module="unet",
            options=_options(batch=2, size=256, width=32, levels=5, classes=2, channels_last=False),
        ),
        Workload(
            name="dcgan",
            description="GAN on images: generator and discriminator trained in one step",
            source="Radford et al. 2015, arXiv:1511.06434",
            module="dcgan",
            options=_options(batch=16, size=64, width=128),
        ),
        Workload(
            name="c3d",
            description="C3D on clips of video: three-dimensional convolutions, dropout 0.5",
            source="Tran et al. 2014, arXiv:1412.0767; a video network that Feng and Huang 2018 name",
            module="video",
            options=_options(batch=2, frames=16, size=112, width=64, feedforward=4096, classes=101),
        ),
        Workload(
            name="gpt2",
            description="GPT-2 language model from a config, random weights",
            source="Radford et al. 2019; transformers' GPT2LMHeadModel",
            module="gpt2",
            options=_options(batch=4, tokens=256, layers=12, width=384, head_width=64, vocabulary=50257, dropout=0.1),
            requires="transformers",
        ),
        Workload(
            name="lstm",
            description="LSTM cells unrolled over time, a class for every step",
            source="the recurrent workload of Chen et al. 2016, arXiv:1604.06174, section 5; torch.nn.LSTMCell",
            module="lstm",
            options=_options(batch=32, steps=128, layers=2, width=256, classes=10),
        ),
        Workload(
            name="char_lstm",
            description="LSTM of one fused kernel, which predicts the next character of a text",
            source="Karpathy 2015, char-rnn, as dqn2020 has it; torch.nn.LSTM, on a text made here",
            module="char_lstm",
            options=_options(batch=32, steps=128, layers=2, width=512),
        ),
        Workload(
            name="encoder",
            description="Transformer encoder with dropout",
            source="Vaswani et al. 2017, arXiv:1706.03762; torch.nn.TransformerEncoder",
            module="encoder",
            options=_options(batch=4, tokens=256, layers=6, width=512, head_width=64, feedforward=2048, dropout=0.1),
        ),
        Workload(
            name="stochastic_depth",
            description="ResNet on small images, of which blocks are skipped at random",
            source="Huang et al. 2016, arXiv:1603.09382, as dqn2020 has it; ResNet-110 of He et al. 2015, section 4.2",
            module="stochastic_depth",
            options=_options(depths=(20, 32, 44, 56, 110), batch=32, size=32, classes=10, depth=110, draw=0),
        ),
        Workload(
            name="kmeans",
            description="Lloyd's iteration of k-means, all distances at once; no backward pass",
            source="Lloyd 1982, as dqn2020 has it; on points made here",
            module="iterations",
            options=_options(points=200_000, features=16, centres=64, trains=False),
        ),
        Workload(
            name="power_iteration",
            description="Subspace iteration on a Gaussian kernel of all pairs of points; no backward pass",
            source="Golub and Van Loan 2013, section 7.3; on points made here",
            module="iterations",
            options=_options(points=8192, features=16, vectors=8, trains=False),
        ),
    )
}
"""Every built-in workload by name, in the order that `memfit workloads` lists them."""
