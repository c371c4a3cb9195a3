"""Tiny models of ``transformers`` with random weights, by family, and what their folders export."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from modelport.exporters.runtime import torchvision_operators
from modelport.exporters.runtime.output_capture import quiet
from modelport.exporters.sources import SourceRequest
from modelport.exporters.sources.reader_selection import load
from modelport.gateway.errors import ModelportError

#: Named classes, so that they are labels.
LABELS = {"id2label": {0: "a", 1: "b", 2: "c"}, "label2id": {"a": 0, "b": 1, "c": 2}}
_SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
_TEXT = {**_SIZES, "vocab_size": 61, "intermediate_size": 48, "max_position_embeddings": 24}
_ENDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_CAUSAL = {**_TEXT, **_ENDS, "num_key_value_heads": 2}
_IMAGE = {**_SIZES, "intermediate_size": 48, "image_size": 32, "patch_size": 8}
_DEBERTA = {
    **{**_TEXT, "type_vocab_size": 0, "position_biased_input": False},
    **{"relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
}
_SEQ2SEQ = {
    **{"vocab_size": 61, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2},
    **{"encoder_attention_heads": 4, "decoder_attention_heads": 4},
    **{"encoder_ffn_dim": 48, "decoder_ffn_dim": 48},
}
_AUDIO = {
    **{**_SIZES, "vocab_size": 20, "intermediate_size": 48, "classifier_proj_size": 16},
    **{"conv_dim": (16, 16, 16), "conv_stride": (5, 2, 2), "conv_kernel": (10, 3, 2)},
    **{"num_feat_extract_layers": 3, "num_conv_pos_embeddings": 16},
    **{"num_conv_pos_embedding_groups": 2},
}
_CLIP_TEXT = {**_TEXT, "pad_token_id": 1, "bos_token_id": 59, "eos_token_id": 60}
_PAIR = {"text_config": _CLIP_TEXT, "vision_config": _IMAGE}
_STAGES = {"hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1]}

#: Inputs by kind.
TEXT, MASKED, TYPED = (
    ("input_ids",),
    ("input_ids", "attention_mask"),
    (
        "input_ids",
        "attention_mask",
        "token_type_ids",
    ),
)
IMAGE = ("pixel_values",)


@dataclass(frozen=True, slots=True)
class Family:
    """One architecture, its configuration, and the signature of one task.

    Attributes:
        task: None is the architecture's own.
        outputs: dims by name, without the batch.
    """

    architecture: str
    config: Mapping[str, Any]
    inputs: tuple[str, ...]
    outputs: Mapping[str, tuple[int | str, ...]]
    task: str | None = None
    labels: tuple[str, ...] = field(default=())


def _classifier(architecture: str, config: Mapping[str, Any], inputs: tuple[str, ...]) -> Family:
    kept = {**config, **LABELS}
    return Family(architecture, kept, inputs, {"logits": (3,)}, labels=("a", "b", "c"))


def _tagger(architecture: str, config: Mapping[str, Any], inputs: tuple[str, ...]) -> Family:
    kept = {**config, **LABELS}
    return Family(architecture, kept, inputs, {"logits": ("sequence", 3)}, labels=("a", "b", "c"))


def _causal(architecture: str, **config: Any) -> Family:
    outputs = {"logits": ("sequence", 61)}
    return Family(architecture, {**_CAUSAL, **config}, MASKED, outputs)


_HIDDEN = {"last_hidden_state": ("sequence", 32), "pooler_output": (32,)}
_LOGITS = {"logits_per_image": ("image_batch", "text_batch")}
_PAIRED = {
    **{**_LOGITS, "logits_per_text": ("text_batch", "image_batch")},
    **{"text_embeds": ("text_batch", 32), "image_embeds": ("image_batch", 32)},
}
_TRANSLATED = {
    "logits": ("decoder_sequence", 61),
    "encoder_last_hidden_state": ("encoder_sequence", 32),
}
_T5 = {"vocab_size": 61, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
_MARKED = {"pad_token_id": 1, "type_vocab_size": 1}
_DETR_BACKBONE = {
    **{"model_type": "resnet", "embedding_size": 8, "out_features": ["stage4"]},
    **_STAGES,
}

FAMILIES: Mapping[str, Family] = {
    "bert": _classifier("BertForSequenceClassification", _TEXT, TYPED),
    "bert-features": Family("BertModel", _TEXT, TYPED, _HIDDEN),
    "bert-mask": Family("BertForMaskedLM", _TEXT, TYPED, {"logits": ("sequence", 61)}),
    "bert-answers": Family(
        "BertForQuestionAnswering",
        _TEXT,
        TYPED,
        {"start_logits": ("sequence",), "end_logits": ("sequence",)},
    ),
    "roberta": _classifier("RobertaForSequenceClassification", {**_TEXT, **_MARKED}, MASKED),
    "xlm-roberta": _tagger("XLMRobertaForTokenClassification", {**_TEXT, **_MARKED}, MASKED),
    "distilbert": _tagger(
        "DistilBertForTokenClassification",
        {
            **{"vocab_size": 61, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48},
            "max_position_embeddings": 24,
        },
        MASKED,
    ),
    "albert": _classifier(
        "AlbertForSequenceClassification", {**_TEXT, "embedding_size": 16}, TYPED
    ),
    "electra": _classifier(
        "ElectraForSequenceClassification", {**_TEXT, "embedding_size": 16}, TYPED
    ),
    "deberta": _tagger("DebertaForTokenClassification", _DEBERTA, MASKED),
    "deberta-v2": _classifier(
        "DebertaV2ForSequenceClassification",
        {**_DEBERTA, "position_buckets": 8, "share_att_key": True, "norm_rel_ebd": "layer_norm"},
        MASKED,
    ),
    "mpnet": Family("MPNetModel", _TEXT, MASKED, _HIDDEN),
    "modernbert": Family(
        "ModernBertForMaskedLM",
        {
            **{**_TEXT, **_ENDS, "cls_token_id": 1, "sep_token_id": 2},
            **{"local_attention": 8, "global_attn_every_n_layers": 2},
        },
        MASKED,
        {"logits": ("sequence", 61)},
    ),
    "t5": Family(
        "T5ForConditionalGeneration",
        {**_T5, "decoder_start_token_id": 0},
        ("input_ids", "attention_mask", "decoder_input_ids"),
        _TRANSLATED,
    ),
    "t5-encoder": Family(
        "T5ForConditionalGeneration",
        {**_T5, "decoder_start_token_id": 0},
        MASKED,
        {"last_hidden_state": ("encoder_sequence", 32)},
        "text2text-generation-encoder",
    ),
    "bart": Family(
        "BartForConditionalGeneration",
        {**_SEQ2SEQ, "max_position_embeddings": 24},
        ("input_ids", "attention_mask", "decoder_input_ids"),
        _TRANSLATED,
    ),
    "bart-decoder": Family(
        "BartForConditionalGeneration",
        {**_SEQ2SEQ, "max_position_embeddings": 24},
        ("encoder_attention_mask", "input_ids", "encoder_hidden_states"),
        {"logits": ("decoder_sequence", 61)},
        "text2text-generation-decoder",
    ),
    "gpt2": Family(
        "GPT2LMHeadModel",
        {
            **{"vocab_size": 61, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 24},
            **{"bos_token_id": 0, "eos_token_id": 0},
        },
        MASKED,
        {"logits": ("sequence", 61)},
    ),
    "llama": _causal("LlamaForCausalLM"),
    "qwen2": _causal("Qwen2ForCausalLM"),
    "qwen3": _causal("Qwen3ForCausalLM", head_dim=8),
    "mistral": _causal("MistralForCausalLM", sliding_window=8),
    "phi": _causal("PhiForCausalLM"),
    "phi3": _causal("Phi3ForCausalLM"),
    "gemma": _causal("GemmaForCausalLM", head_dim=8),
    "gemma2": _causal("Gemma2ForCausalLM", head_dim=8, sliding_window=8),
    "gemma3": _causal("Gemma3ForCausalLM", head_dim=8, sliding_window=8),
    "vit": Family(
        "ViTForImageClassification",
        {**_IMAGE, **LABELS},
        IMAGE,
        {"logits": (3,)},
        "image-classification",
        ("a", "b", "c"),
    ),
    "deit": _classifier("DeiTForImageClassification", _IMAGE, IMAGE),
    "beit": _classifier("BeitForImageClassification", _IMAGE, IMAGE),
    "dinov2": Family(
        "Dinov2Model", _IMAGE, IMAGE, {"last_hidden_state": (17, 32), "pooler_output": (32,)}
    ),
    "swin": _classifier(
        "SwinForImageClassification",
        {
            **{"image_size": 32, "patch_size": 4, "embed_dim": 16, "depths": [1, 1]},
            **{"num_heads": [2, 4], "window_size": 4},
        },
        IMAGE,
    ),
    "convnext": _classifier("ConvNextForImageClassification", {**_STAGES, "image_size": 32}, IMAGE),
    "segformer": Family(
        "SegformerForSemanticSegmentation",
        {
            **{**_STAGES, "num_attention_heads": [1, 2, 2, 4], "decoder_hidden_size": 16},
            **LABELS,
        },
        IMAGE,
        {"logits": (3, -1, -1)},
    ),
    "glpn": Family(
        "GLPNForDepthEstimation",
        {**_STAGES, "num_attention_heads": [1, 2, 2, 4], "decoder_hidden_size": 16},
        IMAGE,
        {"predicted_depth": (224, 224)},
    ),
    "detr": Family(
        "DetrForObjectDetection",
        {
            **{**_SEQ2SEQ, "num_queries": 7, "backbone_config": _DETR_BACKBONE},
            **{"use_timm_backbone": False, "backbone": None, "use_pretrained_backbone": False},
            **LABELS,
        },
        IMAGE,
        {"logits": (7, 4), "pred_boxes": (7, 4)},
    ),
    "clip": Family(
        "CLIPModel",
        {**_PAIR, "projection_dim": 32},
        ("input_ids", "pixel_values", "attention_mask"),
        _PAIRED,
    ),
    "clip-text": Family(
        "CLIPModel", {**_PAIR, "projection_dim": 32}, MASKED, {"text_embeds": (32,)},
        "feature-extraction",
    ),
    "siglip": Family("SiglipModel", _PAIR, ("input_ids", "pixel_values"), _PAIRED),
    "siglip-image": Family(
        "SiglipModel", _PAIR, IMAGE, {"image_embeds": (32,)}, "image-feature-extraction"
    ),
    "whisper": Family(
        "WhisperForConditionalGeneration",
        {
            **{**_SEQ2SEQ, **_ENDS, "num_mel_bins": 8, "max_source_positions": 20},
            **{"max_target_positions": 20, "decoder_start_token_id": 1},
        },
        ("input_features",),
        {"last_hidden_state": (20, 32)},
    ),
    "wav2vec2": Family("Wav2Vec2ForCTC", _AUDIO, ("input_values",), {"logits": (-1, 20)}),
    "hubert": _classifier("HubertForSequenceClassification", _AUDIO, ("input_values",)),
    "sew": Family(
        "SEWForCTC", {**_AUDIO, "squeeze_factor": 2}, ("input_values",), {"logits": (-1, 20)}
    ),
    "wav2vec2-bert": Family(
        "Wav2Vec2BertForCTC",
        {**_SIZES, "vocab_size": 20, "intermediate_size": 48, "feature_projection_input_dim": 6},
        ("input_features", "attention_mask"),
        {"logits": ("sequence", 20)},
    ),
    "parakeet": Family(
        "ParakeetForCTC",
        {
            "vocab_size": 20, "pad_token_id": 19,
            "encoder_config": {
                **{**_SIZES, "intermediate_size": 48, "num_mel_bins": 16},
                "subsampling_conv_channels": 8,
            },
        },
        ("input_features", "attention_mask"),
        {"logits": (-1, 20)},
    ),
    "videomae": Family(
        "VideoMAEForVideoClassification",
        {**_IMAGE, **LABELS, "num_frames": 4},
        IMAGE,
        {"logits": (3,)},
        labels=("a", "b", "c"),
    ),
    "llava": Family(
        "LlavaModel",
        {"text_config": {"model_type": "llama", **_CAUSAL}, "vision_config": {
            "model_type": "clip_vision_model", **_IMAGE}, "image_token_id": 60},
        MASKED,
        {"last_hidden_state": ("sequence", 32)},
    ),
    "bart-classifier": Family(
        "BartForSequenceClassification",
        {**_SEQ2SEQ, "max_position_embeddings": 24, **LABELS},
        MASKED,
        {"logits": (3,)},
        "text-classification",
        ("a", "b", "c"),
    ),
    "aimv2-text": Family("Aimv2TextModel", {**_TEXT, "eos_token_id": 60}, MASKED, _HIDDEN),
    "mgp-str": Family(
        "MgpstrForSceneTextRecognition",
        {
            **{"image_size": [8, 16], "patch_size": 4, "hidden_size": 32, "mlp_ratio": 2.0},
            **{"num_hidden_layers": 1, "num_attention_heads": 2, "max_token_length": 5},
            **{"num_character_labels": 7, "num_bpe_labels": 8, "num_wordpiece_labels": 9},
        },
        IMAGE,
        {"logits_0": (5, 7), "logits_1": (5, 8), "logits_2": (5, 9)},
        "feature-extraction",
    ),
    "voxtral-encoder": Family(
        "VoxtralRealtimeEncoder",
        {**_SIZES, "intermediate_size": 48, "num_mel_bins": 12, "head_dim": 8},
        ("input_features",),
        {"last_hidden_state": (-1, 32)},
    ),
    "patchtst": Family(
        "PatchTSTForPrediction",
        {
            **{"num_input_channels": 3, "context_length": 32, "patch_length": 8},
            **{"patch_stride": 8, "d_model": 16, "num_attention_heads": 2},
            **{"num_hidden_layers": 2, "ffn_dim": 24, "prediction_length": 6},
        },
        ("past_values",),
        {"prediction_outputs": (6, 3)},
    ),
}  # fmt: skip


def write(name: str, place: Path) -> Path:
    """Write the folder of a family with random weights, all different, and return it."""
    torchvision_operators.declare()
    with quiet():
        import transformers

        family = FAMILIES[name]
        factory = getattr(transformers, family.architecture)
        torch.manual_seed(0)
        model = factory(factory.config_class(**family.config)).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn(parameter.shape) * 0.05)
        model.save_pretrained(place / name)
    return place / name


def refusal(folder: Path, **request: Any) -> ModelportError:
    """The error that reading ``folder`` ends with."""
    with pytest.raises(ModelportError) as caught:
        load(SourceRequest(folder, **request))
    assert "\n" not in str(caught.value)
    return caught.value
