"""Views of what memfit puts in the place of AOTAutograd's calls: they are of its memory, which nothing overwrites."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import memfit
from memfit.capture.trace import Trace
from memfit.errors import CaptureError
from memfit.graph import Phase, Role

transformers = pytest.importorskip("transformers")

Views = Callable[["Dropped", torch.Tensor], torch.Tensor]
WIDTH = 32


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


class Dropped(nn.Module):
    """A layer, dropout, and what is computed of views of its result and of itself."""

    def __init__(self, views: Views, probability: float) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(probability)
        self.views = views

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.views(self, self.dropout(self.first(inputs)))


def chunks(model: Dropped, hidden: torch.Tensor) -> torch.Tensor:
    left, right = hidden.chunk(2, -1)
    return model.second(hidden) + torch.cat([left * right.sigmoid(), right], -1)


def attention(model: Dropped, hidden: torch.Tensor) -> torch.Tensor:
    heads = hidden.view(*hidden.shape[:2], 4, -1).transpose(1, 2)
    mixed = nn.functional.scaled_dot_product_attention(heads, heads.sin(), heads)
    return hidden + model.second(mixed.transpose(1, 2).reshape(hidden.shape))


def turned(model: Dropped, hidden: torch.Tensor) -> torch.Tensor:
    """Pairs as complex numbers; their gradient conjugates a number, which is no tensor."""
    pairs = torch.view_as_complex(hidden.unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * 1j).flatten(-2) + model.second(hidden)


def twice(model: Dropped, hidden: torch.Tensor) -> torch.Tensor:
    again = model.dropout(model.second(hidden) + hidden)
    return again + model.second(again.flip(0)).relu()


def written(model: Dropped, hidden: torch.Tensor) -> torch.Tensor:
    half = hidden * 1.0
    half[:, ::2] += 1.0
    return model.second(half) + hidden


def part_written(model: Dropped, hidden: torch.Tensor) -> torch.Tensor:
    """Writes to a part of a part, as relative attention shifts its scores."""
    wide = nn.functional.pad(hidden, (3, 2))
    part = wide[..., 3 : 3 + WIDTH]
    part[..., ::2] *= 2.0
    part[..., 1] = hidden[..., 0]
    torch.diagonal(part[:8], dim1=0, dim2=1).add_(1.0)
    return model.second(part) + hidden


VIEWS: dict[str, Views] = {
    "residual": lambda model, hidden: hidden + model.second(hidden),
    "residual in place": lambda model, hidden: model.second(hidden).add_(hidden),
    "transposed": lambda model, hidden: hidden + model.second(hidden.transpose(0, 1)).transpose(0, 1),
    "flattened": lambda model, hidden: hidden.flatten() * model.second(hidden.flatten(0, 1)).flatten(),
    "part": lambda model, hidden: model.second(hidden[1:]) + hidden[1:],
    "row": lambda model, hidden: model.second(hidden[:, 0]) * hidden[:, 1],
    "expanded": lambda model, hidden: hidden[:1].expand_as(hidden) * model.second(hidden),
    "of squares": lambda model, hidden: model.second(hidden.unsqueeze(1)).squeeze(1).square() + hidden,
    "of matrices": lambda _, hidden: torch.bmm(hidden, hidden.mT) @ hidden + hidden,
    "no gradient": lambda model, hidden: model.second(hidden.detach()) + hidden,
    "pooled": lambda _, hidden: nn.functional.adaptive_avg_pool1d(hidden.mT, 1),
    "transposed gradient": lambda model, hidden: model.second((hidden.mT * 1.5).mT) * (hidden.mT * 0.5).mT,
    "part written": part_written,
    "chunks": chunks,
    "attention": attention,
    "turned": turned,
    "twice": twice,
    "written": written,
}


def check_eagers_gradients(model: nn.Module, call: Callable[[Any], torch.Tensor], **options: Any) -> None:
    eager = copy.deepcopy(model)
    memfit.compile(model, reserve=0, **options)
    results: list[torch.Tensor] = []
    for each in (model, eager):
        torch.manual_seed(2)
        results.append(call(each))
        results[-1].backward()
    assert torch.equal(*results)
    for (name, mine), theirs in zip(model.named_parameters(), eager.parameters(), strict=True):
        assert mine.grad is theirs.grad is None or torch.equal(mine.grad, theirs.grad), name


@pytest.mark.slow
@pytest.mark.parametrize("probability", [0.1, 0.5])
@pytest.mark.parametrize("views", VIEWS)
def test_views_of_dropouts_result_keep_it(views: str, probability: float) -> None:
    torch.manual_seed(0)
    inputs = torch.randn(16, 8, WIDTH)
    model = Dropped(VIEWS[views], probability)
    check_eagers_gradients(model, lambda each: each(inputs).square().mean(), budget="256MiB", planner="none")


def bert() -> Any:
    config = transformers.BertConfig(
        vocab_size=100, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
    )
    return transformers.BertForMaskedLM(config)


def bart() -> Any:
    config = transformers.BartConfig(
        vocab_size=100,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        max_position_embeddings=64,
        use_cache=False,
    )
    return transformers.BartForConditionalGeneration(config)


def funnel() -> Any:
    """Writes to views of parts, as it shifts scores."""
    config = transformers.FunnelConfig(
        vocab_size=100, block_sizes=[1, 1], d_model=32, n_head=4, d_head=8, d_inner=64, hidden_dropout=0.1
    )
    return transformers.FunnelForMaskedLM(config)


def swin() -> Any:
    """Its dropout's gradient has other strides than native_dropout's would have."""
    config = transformers.SwinConfig(
        image_size=32, patch_size=4, embed_dim=16, depths=[1, 1], num_heads=[2, 2], window_size=4
    )
    config.hidden_dropout_prob = 0.1
    return transformers.SwinForImageClassification(config)


@pytest.mark.slow
@pytest.mark.parametrize("make", [bert, bart, funnel, swin])
def test_transformers_have_eagers_gradients_with_dropout(make: Callable[[], Any]) -> None:
    torch.manual_seed(0)
    model = make()
    words = torch.randint(3, 100, (4, 24))
    batch: dict[str, Any] = {"input_ids": words, "labels": words}
    if make is swin:
        batch = {"pixel_values": torch.randn(2, 3, 32, 32), "labels": torch.tensor([0, 1])}
    check_eagers_gradients(model, lambda each: each(**batch).loss, budget="256MiB", planner="none")


@pytest.mark.parametrize("is_turned", [False, True])
def test_a_gradient_of_other_strides_than_its_output_is_told_of(
    is_turned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, 5))
    memfit.compile(model, budget="64MiB", planner="none", reserve=0)
    outputs, words = model(torch.randn(4, 6, WIDTH)), torch.arange(24).view(4, 6) % 5
    if is_turned:
        nn.functional.cross_entropy(outputs.transpose(1, 2), words).backward()
    else:
        nn.functional.cross_entropy(outputs.flatten(0, 1), words.flatten()).backward()
    said = [text for text in caplog.messages if "gradient of other strides" in text]
    assert len(said) == is_turned and all("memfit.checkpoint, memfit.eager and memfit.fit" in each for each in said)


def test_a_view_that_shares_no_memory_with_its_tensor_is_refused() -> None:
    trace = Trace(device=torch.device("cpu"), scope=lambda: (Phase.FORWARD, "layer"))
    with FakeTensorMode():
        whole, other = torch.empty(4, 4), torch.empty(16)
    trace.add_storage(whole, name="whole", role=Role.ACTIVATION)
    view = torch.ops.aten.view.default
    trace.add_call(view, (whole, [16]), {}, whole.view(16))
    with pytest.raises(CaptureError, match=r"layer calls aten\.view\.default, and the result shares no memory"):
        trace.add_call(view, (whole, [16]), {}, other)


EINSUMS = {
    "hn,hnl->hl": ((24, 8), (24, 8, 64)),
    "bhd,bhmd->bhm": ((4, 6, 16), (4, 6, 1, 16)),
    "bi,bij->bj": ((9, 16), (9, 16, 1)),
    "bij,bjk->bik": ((7, 1, 16), (7, 16, 24)),
    "abc,abd->acd": ((5, 1, 8), (5, 1, 12)),
    "nk,kmd->nmd": ((1, 16), (16, 3, 8)),
}


@pytest.mark.parametrize("door", ["fit", "backend"])
@pytest.mark.parametrize("expression", EINSUMS)
def test_products_over_dimensions_of_one_have_eagers_bits(expression: str, door: str) -> None:
    torch.manual_seed(0)
    left, right = (torch.randn(shape) for shape in EINSUMS[expression])

    class Product(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(left.clone())

        def forward(self, values: torch.Tensor) -> torch.Tensor:
            return torch.einsum(expression, self.weight, values)

    bare, twin = Product(), Product()
    bare(right).square().sum().backward()
    if door == "fit":
        memfit.fit(twin, lambda model, values: model(values).square().sum(), right, budget="1MiB")(right)
    else:
        options = {"budget": "1GiB", "reserve": 0}
        torch.compile(twin, backend="memfit", options=options)(right).square().sum().backward()
    assert bare.weight.grad is not None and twin.weight.grad is not None
    assert torch.equal(bare.weight.grad, twin.weight.grad)
