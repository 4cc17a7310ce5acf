"""Small models of many architectures with random weights, each with a loss and a batch: what `models.py` tries."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

Loss = Callable[[nn.Module, Any], Tensor]
TOKENS, LENGTH, BATCH = 96, 32, 4
NARROW = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
LANGUAGE = {**NARROW, "vocab_size": TOKENS, "max_position_embeddings": 64}
DECODER = {**LANGUAGE, "use_cache": False, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
ENCODER_DECODER = {
    "vocab_size": TOKENS, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_position_embeddings": 64,
    "use_cache": False, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1,
    "forced_eos_token_id": None,
}  # fmt: skip
IMAGE = {**NARROW, "image_size": 32, "patch_size": 8}


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """A model, its loss and a batch."""

    model: nn.Module
    loss: Loss
    batch: Any


def _hugging(name: str, config: str, kind: str, **settings: Any) -> Callable[[], Tried]:
    """Return a maker of a model of transformers: its class, its configuration's class, and the kind of its batch."""

    def make() -> Tried:
        library = importlib.import_module("transformers")
        model = getattr(library, name)(getattr(library, config)(**settings))
        return Tried(model=model.train(), loss=_BATCHES[kind][1], batch=_BATCHES[kind][0]())

    return make


def _classic(module: str, name: str, **settings: Any) -> Callable[[], Tried]:
    """Return a maker of a model of pytorchcv."""

    def make() -> Tried:
        model = getattr(importlib.import_module(f"pytorchcv.models.{module}"), name)(num_classes=10, **settings)
        return Tried(model=model.train(), loss=_cross_entropy, batch=(torch.randn(2, 3, 224, 224), _labels()[:2]))

    return make


def _ids() -> Tensor:
    return torch.randint(3, TOKENS, (BATCH, LENGTH))


def _labels(classes: int = 10) -> Tensor:
    return torch.randint(0, classes, (BATCH,))


def _masked_ids() -> dict[str, Tensor]:
    ids, mask = _ids(), torch.ones(BATCH, LENGTH, dtype=torch.long)
    mask[1:, LENGTH - 5 :] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids}


def _images(**more: Tensor) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(BATCH, 3, 32, 32), **more}


def _own_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(**batch).loss


def _logits_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    labels = batch["labels"]
    logits = model(**{name: value for name, value in batch.items() if name != "labels"}).logits
    return functional.cross_entropy(logits.float().flatten(0, -2), labels.flatten())


def _states_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(**batch).last_hidden_state.float().square().mean()


def _cross_entropy(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1])


def _square(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return functional.mse_loss(model(batch[0]), batch[1])


_BATCHES: dict[str, tuple[Callable[[], dict[str, Tensor]], Loss]] = {
    "tokens": (lambda: {"input_ids": (ids := _ids()), "labels": ids}, _own_loss),
    "masked": (_masked_ids, _own_loss),
    "translation": (lambda: {"input_ids": _ids(), "labels": _ids()}, _own_loss),
    "class": (lambda: _images(labels=_labels(2)), _own_loss),
    "image": (_images, _own_loss),
    "states": (_images, _states_loss),
    "speech": (
        lambda: {"input_features": torch.randn(BATCH, 16, 64), "labels": _ids()[:, :8]},
        _own_loss,
    ),
    "wave": (lambda: {"input_values": torch.randn(2, 1600), "labels": torch.randint(1, 20, (2, 3))}, _own_loss),
    "pairs": (
        lambda: {"input_ids": _ids(), "pixel_values": torch.randn(BATCH, 3, 32, 32), "return_loss": torch.tensor(1)},
        lambda model, batch: (
            model(input_ids=batch["input_ids"], pixel_values=batch["pixel_values"], return_loss=True).loss
        ),
    ),
    "segments": (lambda: _images(labels=torch.randint(0, 2, (BATCH, 32, 32))), _own_loss),
    "series": (
        lambda: {"past_values": torch.randn(BATCH, 32, 3), "future_values": torch.randn(BATCH, 8, 3)},
        _own_loss,
    ),
    "video": (
        lambda: {"pixel_values": torch.randn(2, 4, 3, 32, 32), "labels": torch.randint(0, 2, (2,))},
        _own_loss,
    ),
}
"""Makers of batches and losses of transformers' models, by kind."""

SMALL_CLIP = {"text_config": LANGUAGE | {"eos_token_id": 2}, "vision_config": IMAGE, "projection_dim": 16}
GPT = {"vocab_size": TOKENS, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "use_cache": False}
T5 = {
    "vocab_size": TOKENS, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "use_cache": False,
    "decoder_start_token_id": 0,
}  # fmt: skip
WAVE = {
    **NARROW, "vocab_size": 24, "conv_dim": (16, 16), "conv_kernel": (10, 3), "conv_stride": (5, 2),
    "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4,
    "mask_time_prob": 0.0, "layerdrop": 0.0,
}  # fmt: skip


class Graphs(nn.Module):
    """A graph network: messages along edges, added up at nodes."""

    def __init__(self) -> None:
        super().__init__()
        self.messages = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))
        self.out = nn.Linear(32, 10)

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Return logits of nodes `[64, 32]` with edges `[2, 256]`."""
        nodes, (sources, targets) = batch
        for layer in self.messages:
            nodes = nodes + torch.zeros_like(nodes).index_add_(0, targets, layer(nodes[sources]).relu())
        return self.out(nodes)


class Autoencoder(nn.Module):
    """A variational autoencoder."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 16))
        self.decode = nn.Sequential(nn.Linear(8, 128), nn.ReLU(), nn.Linear(128, 64))

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the loss of inputs `[batch, 64]`."""
        mean, log_variance = self.encode(inputs).chunk(2, 1)
        code = mean + torch.randn_like(mean) * (log_variance / 2).exp()
        divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum(1).mean()
        return functional.mse_loss(self.decode(code), inputs) + 0.1 * divergence


class Spectral(nn.Module):
    """A Fourier neural operator in one dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(16, 16, 9, dtype=torch.cfloat) / 16 for _ in range(2))
        self.lift, self.out = nn.Conv1d(1, 16, 1), nn.Conv1d(16, 1, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        """Map functions `[batch, 1, 64]` to functions."""
        values = self.lift(inputs)
        for weight in self.weights:
            modes = torch.einsum("bix,iox->box", torch.fft.rfft(values)[..., :9], weight)
            values = functional.gelu(values + torch.fft.irfft(modes, n=inputs.shape[-1]))
        return self.out(values)


class Mixer(nn.Module):
    """An MLP-Mixer over 16 patches."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 32, 8, 8)
        self.tokens = nn.ModuleList(nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(2))
        self.channels = nn.ModuleList(nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(2))
        self.out = nn.Linear(32, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits of images `[batch, 3, 32, 32]`."""
        values = self.patches(images).flatten(2)
        for tokens, channels in zip(self.tokens, self.channels, strict=True):
            values = values + tokens(values)
            values = values + channels(values.transpose(1, 2)).transpose(1, 2)
        return self.out(values.mean(2))


class Waves(nn.Module):
    """A WaveNet: gated dilated convolutions with skips."""

    def __init__(self) -> None:
        super().__init__()
        self.lift = nn.Conv1d(1, 16, 1)
        self.gates = nn.ModuleList(nn.Conv1d(16, 32, 2, dilation=1 << depth) for depth in range(4))
        self.out = nn.Conv1d(16, 1, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        """Map signals `[batch, 1, time]` to signals."""
        values, skips = self.lift(inputs), torch.zeros(())
        for depth, gate in enumerate(self.gates):
            left, right = gate(functional.pad(values, (1 << depth, 0))).chunk(2, 1)
            values = values + left.tanh() * right.sigmoid()
            skips = skips + values
        return self.out(skips.relu())


class Factors(nn.Module):
    """A recommender: embeddings of categories, their products, and a tower."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(50, 8, mode="sum") for _ in range(4))
        self.tower = nn.Sequential(nn.Linear(8 * 4 + 6, 32), nn.ReLU(), nn.Linear(32, 10))

    def forward(self, ids: Tensor) -> Tensor:
        """Return logits of categories `[batch, 4, 3]`."""
        vectors = torch.stack([table(ids[:, number]) for number, table in enumerate(self.tables)], 1)
        products = torch.bmm(vectors, vectors.transpose(1, 2))
        rows, columns = torch.triu_indices(4, 4, 1)
        return self.tower(torch.cat([vectors.flatten(1), products[:, rows, columns]], 1))


def _decoder() -> Tried:
    layer = nn.TransformerDecoderLayer(32, 4, 64, batch_first=True)
    model = nn.TransformerDecoder(layer, 2)
    mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return model(batch[0], batch[1], tgt_mask=mask).square().mean()

    return Tried(model=model, loss=loss, batch=(torch.randn(BATCH, LENGTH, 32), torch.randn(BATCH, 8, 32)))


def _recurrent(kind: type[nn.RNNBase]) -> Callable[[], Tried]:
    def make() -> Tried:
        model = nn.ModuleDict(
            {"embed": nn.Embedding(TOKENS, 32), "inner": kind(32, 32, 2), "out": nn.Linear(32, TOKENS)}
        )

        def loss(model: Any, ids: Tensor) -> Tensor:
            states, _ = model["inner"](model["embed"](ids))
            return functional.cross_entropy(model["out"](states[:-1]).flatten(0, 1), ids[1:].flatten())

        return Tried(model=model, loss=loss, batch=torch.randint(0, TOKENS, (LENGTH, BATCH)))

    return make


def _physics() -> Tried:
    model = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))

    def loss(model: nn.Module, points: Tensor) -> Tensor:
        inputs = points.detach().requires_grad_()
        values = model(inputs)
        (slopes,) = torch.autograd.grad(values.sum(), inputs, create_graph=True)
        (curvatures,) = torch.autograd.grad(slopes.sum(), inputs, create_graph=True)
        return (curvatures + values).square().mean()

    return Tried(model=model, loss=loss, batch=torch.rand(64, 1))


def _plain(make: Callable[[], nn.Module], loss: Loss, batch: Callable[[], Any]) -> Callable[[], Tried]:
    return lambda: Tried(model=make(), loss=loss, batch=batch())


MODELS: dict[str, Callable[[], Tried]] = {
    "llama, grouped queries": _hugging("LlamaForCausalLM", "LlamaConfig", "tokens", **DECODER, num_key_value_heads=2),
    "mistral": _hugging(
        "MistralForCausalLM", "MistralConfig", "tokens", **DECODER, num_key_value_heads=2, sliding_window=8
    ),
    "qwen2": _hugging("Qwen2ForCausalLM", "Qwen2Config", "masked", **DECODER, num_key_value_heads=2),
    "qwen3": _hugging("Qwen3ForCausalLM", "Qwen3Config", "tokens", **DECODER, num_key_value_heads=2, head_dim=8),
    "qwen2 mixture": _hugging(
        "Qwen2MoeForCausalLM",
        "Qwen2MoeConfig",
        "tokens",
        **DECODER,
        num_key_value_heads=2,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
    ),
    "mixtral": _hugging(
        "MixtralForCausalLM", "MixtralConfig", "tokens", **DECODER, num_key_value_heads=2, num_local_experts=4
    ),
    "gemma": _hugging("GemmaForCausalLM", "GemmaConfig", "tokens", **DECODER, num_key_value_heads=1, head_dim=8),
    "gemma2": _hugging("Gemma2ForCausalLM", "Gemma2Config", "tokens", **DECODER, num_key_value_heads=2, head_dim=8),
    "phi": _hugging("PhiForCausalLM", "PhiConfig", "tokens", **DECODER),
    "phi3": _hugging("Phi3ForCausalLM", "Phi3Config", "masked", **DECODER, num_key_value_heads=2),
    "granite": _hugging("GraniteForCausalLM", "GraniteConfig", "tokens", **DECODER, num_key_value_heads=2),
    "olmo": _hugging("OlmoForCausalLM", "OlmoConfig", "tokens", **DECODER),
    "stablelm": _hugging("StableLmForCausalLM", "StableLmConfig", "tokens", **DECODER, num_key_value_heads=2),
    "gpt2": _hugging("GPT2LMHeadModel", "GPT2Config", "tokens", **GPT),
    "gpt-j": _hugging("GPTJForCausalLM", "GPTJConfig", "tokens", **GPT, rotary_dim=4),
    "gpt-neo": _hugging(
        "GPTNeoForCausalLM",
        "GPTNeoConfig",
        "tokens",
        vocab_size=TOKENS,
        hidden_size=32,
        num_layers=2,
        num_heads=4,
        attention_types=[[["global", "local"], 1]],
        max_position_embeddings=64,
        window_size=8,
        use_cache=False,
    ),
    "gpt-neox": _hugging("GPTNeoXForCausalLM", "GPTNeoXConfig", "tokens", **DECODER),
    "opt": _hugging(
        "OPTForCausalLM",
        "OPTConfig",
        "tokens",
        vocab_size=TOKENS,
        hidden_size=32,
        num_hidden_layers=2,
        ffn_dim=64,
        num_attention_heads=4,
        max_position_embeddings=64,
        word_embed_proj_dim=32,
        use_cache=False,
    ),
    "bloom": _hugging(
        "BloomForCausalLM",
        "BloomConfig",
        "tokens",
        vocab_size=TOKENS,
        hidden_size=32,
        n_layer=2,
        n_head=4,
        use_cache=False,
    ),
    "falcon": _hugging("FalconForCausalLM", "FalconConfig", "tokens", **DECODER),
    "mamba": _hugging(
        "MambaForCausalLM",
        "MambaConfig",
        "tokens",
        vocab_size=TOKENS,
        hidden_size=32,
        num_hidden_layers=2,
        state_size=4,
        use_cache=False,
    ),
    "bert": _hugging("BertForMaskedLM", "BertConfig", "masked", **LANGUAGE),
    "roberta": _hugging("RobertaForMaskedLM", "RobertaConfig", "masked", **LANGUAGE | {"max_position_embeddings": 66}),
    "electra": _hugging("ElectraForMaskedLM", "ElectraConfig", "masked", **LANGUAGE, embedding_size=32),
    "albert": _hugging("AlbertForMaskedLM", "AlbertConfig", "masked", **LANGUAGE, embedding_size=16),
    "distilbert": _hugging(
        "DistilBertForMaskedLM",
        "DistilBertConfig",
        "masked",
        vocab_size=TOKENS,
        dim=32,
        n_layers=2,
        n_heads=4,
        hidden_dim=64,
        max_position_embeddings=64,
    ),
    "deberta-v2": _hugging(
        "DebertaV2ForMaskedLM",
        "DebertaV2Config",
        "masked",
        **LANGUAGE,
        relative_attention=True,
        pos_att_type=["p2c", "c2p"],
    ),
    "mpnet": _hugging("MPNetForMaskedLM", "MPNetConfig", "masked", **LANGUAGE | {"max_position_embeddings": 66}),
    "fnet": _hugging(
        "FNetForMaskedLM",
        "FNetConfig",
        "tokens",
        **{key: value for key, value in LANGUAGE.items() if key != "num_attention_heads"},
    ),
    "t5": _hugging("T5ForConditionalGeneration", "T5Config", "translation", **T5),
    "bart": _hugging("BartForConditionalGeneration", "BartConfig", "translation", **ENCODER_DECODER),
    "pegasus": _hugging("PegasusForConditionalGeneration", "PegasusConfig", "translation", **ENCODER_DECODER),
    "whisper": _hugging(
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        "speech",
        **{key: value for key, value in ENCODER_DECODER.items() if key != "max_position_embeddings"},
        num_mel_bins=16,
        max_source_positions=32,
        max_target_positions=64,
    ),
    "wav2vec2": _hugging("Wav2Vec2ForCTC", "Wav2Vec2Config", "wave", **WAVE),
    "hubert": _hugging("HubertForCTC", "HubertConfig", "wave", **WAVE),
    "vit": _hugging("ViTForImageClassification", "ViTConfig", "class", **IMAGE),
    "deit": _hugging("DeiTForImageClassification", "DeiTConfig", "class", **IMAGE),
    "beit": _hugging("BeitForImageClassification", "BeitConfig", "class", **IMAGE),
    "vit mae": _hugging(
        "ViTMAEForPreTraining",
        "ViTMAEConfig",
        "image",
        **IMAGE,
        decoder_hidden_size=32,
        decoder_num_hidden_layers=1,
        decoder_num_attention_heads=4,
        decoder_intermediate_size=64,
    ),
    "dinov2": _hugging(
        "Dinov2Model",
        "Dinov2Config",
        "states",
        **{key: value for key, value in IMAGE.items() if key != "intermediate_size"},
    ),
    "swin": _hugging(
        "SwinForImageClassification",
        "SwinConfig",
        "class",
        image_size=32,
        patch_size=2,
        embed_dim=16,
        depths=[2, 2],
        num_heads=[2, 4],
        window_size=4,
    ),
    "convnext": _hugging(
        "ConvNextForImageClassification",
        "ConvNextConfig",
        "class",
        hidden_sizes=[8, 16, 24, 32],
        depths=[1, 1, 2, 1],
        image_size=32,
    ),
    "regnet": _hugging(
        "RegNetForImageClassification",
        "RegNetConfig",
        "class",
        embedding_size=8,
        hidden_sizes=[8, 16, 24, 32],
        depths=[1, 1, 1, 1],
        groups_width=4,
    ),
    "segformer": _hugging(
        "SegformerForSemanticSegmentation",
        "SegformerConfig",
        "segments",
        depths=[1, 1, 1, 1],
        hidden_sizes=[8, 16, 24, 32],
        num_attention_heads=[1, 2, 2, 4],
        decoder_hidden_size=16,
    ),
    "clip": _hugging("CLIPModel", "CLIPConfig", "pairs", **SMALL_CLIP),
    "patchtst": _hugging(
        "PatchTSTForPrediction",
        "PatchTSTConfig",
        "series",
        num_input_channels=3,
        context_length=32,
        prediction_length=8,
        patch_length=8,
        patch_stride=8,
        d_model=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        ffn_dim=32,
        loss="mse",
    ),
    "videomae": _hugging(
        "VideoMAEForVideoClassification", "VideoMAEConfig", "video", **IMAGE, num_frames=4, tubelet_size=2
    ),
    "resnet": _classic("resnet", "resnet18"),
    "pre-activation resnet": _classic("preresnet", "preresnet18"),
    "mobilenet v2": _classic("mobilenetv2", "mobilenetv2_wd4"),
    "shufflenet v2": _classic("shufflenetv2", "shufflenetv2_wd2"),
    "densenet": _classic("densenet", "densenet121"),
    "squeezenet": _classic("squeezenet", "squeezenet_v1_0"),
    "senet": _classic("seresnet", "seresnet18"),
    "efficientnet": _classic("efficientnet", "efficientnet_b0"),
    "transformer decoder": _decoder,
    "lstm": _recurrent(nn.LSTM),
    "gru": _recurrent(nn.GRU),
    "graph network": _plain(
        Graphs,
        lambda model, batch: functional.cross_entropy(model(batch[:2]), batch[2]),
        lambda: (torch.randn(64, 32), torch.randint(0, 64, (2, 256)), torch.randint(0, 10, (64,))),
    ),
    "variational autoencoder": _plain(Autoencoder, lambda model, batch: model(batch), lambda: torch.rand(32, 64)),
    "fourier operator": _plain(Spectral, _square, lambda: (torch.randn(BATCH, 1, 64), torch.randn(BATCH, 1, 64))),
    "mlp-mixer": _plain(Mixer, _cross_entropy, lambda: (torch.randn(BATCH, 3, 32, 32), _labels())),
    "wavenet": _plain(Waves, _square, lambda: (torch.randn(BATCH, 1, 64), torch.randn(BATCH, 1, 64))),
    "recommender": _plain(Factors, _cross_entropy, lambda: (torch.randint(0, 50, (BATCH, 4, 3)), _labels())),
    "physics-informed": _physics,
}
"""Makers of models, by name."""
