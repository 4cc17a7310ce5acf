"""More models of transformers: sound, series, detection, routing, scans, and attention that is not dense."""

from __future__ import annotations

from typing import Any

import torch
from _models_kit import BATCHES, DECODER, ENCODER_DECODER, IMAGE, LANGUAGE, NARROW, TOKENS, Make, hugging, labels
from _models_transformers import T5, WAVE
from torch import Tensor, nn
from torch.nn import functional

PYRAMID = {"depths": [1, 1, 1, 1], "hidden_sizes": [8, 16, 24, 32]}
SERIES = {
    "prediction_length": 8,
    "context_length": 16,
    "lags_sequence": [1, 2, 3],
    "num_time_features": 1,
    "d_model": 16,
}
LAYERS = {
    "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2,
    "encoder_ffn_dim": 32, "decoder_ffn_dim": 32,
}  # fmt: skip


def _series(rows: int) -> dict[str, Tensor]:
    return {
        "past_values": torch.randn(rows, 19), "past_time_features": torch.rand(rows, 19, 1),
        "past_observed_mask": torch.ones(rows, 19), "future_values": torch.randn(rows, 8),
        "future_time_features": torch.rand(rows, 8, 1),
    }  # fmt: skip


def _decisions(rows: int) -> dict[str, Tensor]:
    return {
        "states": torch.randn(rows, 16, 6), "actions": torch.randn(rows, 16, 3), "rewards": torch.randn(rows, 16, 1),
        "returns_to_go": torch.randn(rows, 16, 1), "timesteps": torch.arange(16).repeat(rows, 1),
        "attention_mask": torch.ones(rows, 16, dtype=torch.long),
    }  # fmt: skip


def _acted(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return functional.mse_loss(model(**batch).action_preds, batch["actions"])


def _spoken(rows: int) -> dict[str, Tensor]:
    return {
        "input_features": torch.randn(rows, 64, 16), "attention_mask": torch.ones(rows, 64, dtype=torch.long),
        "labels": torch.randint(3, TOKENS, (rows, 8)),
    }  # fmt: skip


def _sentence_pairs(rows: int) -> dict[str, Tensor]:
    ids = torch.randint(3, TOKENS, (rows, 32))
    mask = torch.ones_like(ids)
    mask[1:, 24:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": labels(rows, 2)}


BATCHES.update({
    "probable series": (_series, BATCHES["tokens"][1]),
    "decisions": (_decisions, _acted),
    "spoken": (_spoken, BATCHES["tokens"][1]),
    "masked sentence": (_sentence_pairs, BATCHES["tokens"][1]),
})  # fmt: skip


def _language(name: str, config: str, kind: str = "tokens", **settings: Any) -> Make:
    return hugging(name, config, kind, **{**LANGUAGE, **settings})


MORE: dict[str, Make] = {
    "albert": _language("AlbertForMaskedLM", "AlbertConfig", "masked", embedding_size=16),
    "distilbert": hugging(
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
    "convbert": _language("ConvBertForMaskedLM", "ConvBertConfig", "masked", embedding_size=32),
    "mobilebert": _language(
        "MobileBertForMaskedLM",
        "MobileBertConfig",
        "masked",
        embedding_size=16,
        intra_bottleneck_size=16,
        true_hidden_size=16,
    ),
    "longformer": _language(
        "LongformerForSequenceClassification", "LongformerConfig", "masked sentence", attention_window=8
    ),
    "xlnet": hugging(
        "XLNetForSequenceClassification",
        "XLNetConfig",
        "masked sentence",
        vocab_size=TOKENS,
        d_model=32,
        n_layer=2,
        n_head=4,
        d_inner=64,
    ),
    "funnel": hugging(
        "FunnelForMaskedLM",
        "FunnelConfig",
        "masked",
        vocab_size=TOKENS,
        block_sizes=[1, 1],
        d_model=32,
        n_head=4,
        d_head=8,
        d_inner=64,
    ),
    "squeezebert": _language("SqueezeBertForMaskedLM", "SqueezeBertConfig", "masked", embedding_size=32),
    "esm": _language(
        "EsmForMaskedLM",
        "EsmConfig",
        "masked",
        max_position_embeddings=66,
        pad_token_id=1,
        mask_token_id=2,
        position_embedding_type="rotary",
    ),
    "mbart": hugging("MBartForConditionalGeneration", "MBartConfig", "translation", **ENCODER_DECODER),
    "switch transformer": hugging(
        "SwitchTransformersForConditionalGeneration",
        "SwitchTransformersConfig",
        "translation",
        **T5,
        num_experts=4,
        num_sparse_encoder_layers=1,
        num_sparse_decoder_layers=1,
    ),
    "olmoe": hugging("OlmoeForCausalLM", "OlmoeConfig", "tokens", **DECODER, num_experts=4, num_experts_per_tok=2),
    "deepseek v3": hugging(
        "DeepseekV3ForCausalLM",
        "DeepseekV3Config",
        "tokens",
        **DECODER,
        moe_intermediate_size=16,
        n_routed_experts=4,
        n_shared_experts=1,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
    ),
    "mamba2": hugging(
        "Mamba2ForCausalLM",
        "Mamba2Config",
        "tokens",
        vocab_size=TOKENS,
        hidden_size=32,
        num_hidden_layers=2,
        state_size=8,
        num_heads=8,
        head_dim=8,
        n_groups=2,
        chunk_size=16,
        use_cache=False,
    ),
    "recurrent gemma": _language(
        "RecurrentGemmaForCausalLM", "RecurrentGemmaConfig", use_cache=False, lru_width=32, attention_window_size=16
    ),
    "audio spectrogram transformer": hugging(
        "ASTForAudioClassification",
        "ASTConfig",
        "spectrum",
        **NARROW,
        max_length=64,
        num_mel_bins=32,
    ),
    "wavlm": hugging("WavLMForCTC", "WavLMConfig", "wave", **WAVE, num_buckets=16),
    "sew": hugging("SEWForCTC", "SEWConfig", "wave", **WAVE),
    "speech to text": hugging(
        "Speech2TextForConditionalGeneration",
        "Speech2TextConfig",
        "spoken",
        **{key: value for key, value in ENCODER_DECODER.items() if key != "max_position_embeddings"},
        input_feat_per_channel=16,
        max_source_positions=64,
        max_target_positions=64,
        conv_channels=32,
    ),
    "time series transformer": hugging(
        "TimeSeriesTransformerForPrediction",
        "TimeSeriesTransformerConfig",
        "probable series",
        **SERIES,
        **LAYERS,
    ),
    "autoformer": hugging(
        "AutoformerForPrediction", "AutoformerConfig", "probable series", **SERIES, **LAYERS, moving_average=5
    ),
    "informer": hugging("InformerForPrediction", "InformerConfig", "probable series", **SERIES, **LAYERS),
    "patchtsmixer": hugging(
        "PatchTSMixerForPrediction",
        "PatchTSMixerConfig",
        "series",
        context_length=32,
        prediction_length=8,
        patch_length=8,
        patch_stride=8,
        num_input_channels=3,
        d_model=16,
        num_layers=2,
    ),
    "decision transformer": hugging(
        "DecisionTransformerModel",
        "DecisionTransformerConfig",
        "decisions",
        use_cache=False,
        state_dim=6,
        act_dim=3,
        hidden_size=32,
        n_layer=2,
        n_head=4,
        max_ep_len=32,
    ),
    "mobilevit": hugging(
        "MobileViTForImageClassification",
        "MobileViTConfig",
        "class",
        image_size=32,
        hidden_sizes=[16, 24, 32],
        neck_hidden_sizes=[8, 8, 8, 16, 16, 16, 32],
    ),
    "swin v2": hugging(
        "Swinv2ForImageClassification",
        "Swinv2Config",
        "class",
        image_size=32,
        patch_size=2,
        embed_dim=16,
        depths=[2, 2],
        num_heads=[2, 4],
        window_size=4,
    ),
    "pvt v2": hugging(
        "PvtV2ForImageClassification",
        "PvtV2Config",
        "class",
        image_size=32,
        **PYRAMID,
        num_attention_heads=[1, 2, 2, 4],
        mlp_ratios=[2, 2, 2, 2],
    ),
    "poolformer": hugging("PoolFormerForImageClassification", "PoolFormerConfig", "class", **PYRAMID),
    "focalnet": hugging(
        "FocalNetForImageClassification", "FocalNetConfig", "class", image_size=32, embed_dim=8, depths=[1, 1, 1, 1]
    ),
    "timesformer": hugging("TimesformerForVideoClassification", "TimesformerConfig", "video", **IMAGE, num_frames=4),
    "siglip": hugging(
        "SiglipModel",
        "SiglipConfig",
        "pairs",
        text_config={**LANGUAGE, "projection_size": 32},
        vision_config=IMAGE,
    ),
}
"""Makers of models, by name."""
