"""Architectures of ``transformers``: tiny configurations with random weights, as folders."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SEED = 0

#: The sizes that a configuration gets where it has an integer of the name.
SIZES: Mapping[str, int] = {
    **dict.fromkeys(("hidden_size", "d_model", "dim", "n_embd"), 32),
    "embedding_size": 16,
    **dict.fromkeys(("num_hidden_layers", "n_layers", "n_layer", "num_layers"), 2),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "num_decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_heads", "n_head", "num_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("intermediate_size", "d_ff", "hidden_dim", "ffn_dim"), 64),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 64),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 64),
    "vocab_size": 99,
    "image_size": 32,
    "patch_size": 8,
    "num_key_value_heads": 2,
    **dict.fromkeys(("head_dim", "d_kv"), 8),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 8),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 16),
    "rotary_dim": 4,
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk"), 2),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 32),
    **dict.fromkeys(("n_group", "topk_group"), 1),
}

#: The task that a class ``AutoModelForX`` stands for, by X.
TASKS: Mapping[str, str] = {
    "": "feature-extraction",
    "SequenceClassification": "text-classification",
    "TokenClassification": "token-classification",
    "MaskedLM": "fill-mask",
    "QuestionAnswering": "question-answering",
    "CausalLM": "text-generation",
    "Seq2SeqLM": "text2text-generation",
    "ImageClassification": "image-classification",
    "SemanticSegmentation": "image-segmentation",
    "ObjectDetection": "object-detection",
    "DepthEstimation": "depth-estimation",
    "ZeroShotImageClassification": "zero-shot-image-classification",
    "AudioClassification": "audio-classification",
    "CTC": "automatic-speech-recognition",
}

#: What an exporter meets in the models of a task.
KINDS: Mapping[str, str] = {
    "feature-extraction": "hidden states",
    "text-classification": "encoder of text",
    "token-classification": "encoder of text",
    "fill-mask": "encoder of text",
    "question-answering": "encoder of text",
    "text-generation": "decoder",
    "text2text-generation": "encoder and decoder",
    "image-classification": "image",
    "image-segmentation": "places in an image",
    "object-detection": "places in an image",
    "depth-estimation": "places in an image",
    "zero-shot-image-classification": "image and text",
    "audio-classification": "sound",
    "automatic-speech-recognition": "sound",
}


@dataclass(frozen=True, slots=True)
class TransformersModel:
    """One model type of ``transformers`` with a head.

    Attributes:
        head: the X of ``AutoModelForX``; empty: ``AutoModel``.
        sizes: settings of the configuration besides ``SIZES``; a mapping is one of a nested
            configuration.
    """

    model_type: str
    head: str = ""
    sizes: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.model_type}:{TASKS[self.head]}"

    @property
    def kind(self) -> str:
        return KINDS[TASKS[self.head]]

    def build(self) -> Any:
        """Build the model with random weights."""
        import transformers

        default = transformers.AutoConfig.for_model(self.model_type)
        return self._class.from_config(_configuration(default, self.sizes)).eval()

    def write(self, folder: Path) -> list[str]:
        """Write ``config.json`` and the weights; the folder alone is the argument."""
        import torch

        torch.manual_seed(SEED)
        model = self.build()
        perturb(model)
        model.save_pretrained(folder)
        return [str(folder), "--task", TASKS[self.head]]

    def original(self, folder: Path) -> Callable[[Mapping[str, Any]], Any]:
        """Load the folder as its users do: of two towers, or of an encoder with a decoder, a model
        without a head gives the features of the first."""
        model = self._class.from_pretrained(folder, local_files_only=True).eval()

        def run(inputs: Mapping[str, Any]) -> Any:
            if self.head or "pixel_values" in inputs:
                return model(**inputs)
            if hasattr(model, "get_text_features") and hasattr(model, "get_image_features"):
                return {"text_embeds": model.get_text_features(**inputs).pooler_output}
            encodes = getattr(model.config, "is_encoder_decoder", False)
            return (model.get_encoder() if encodes else model)(**inputs)

        return run

    @property
    def _class(self) -> Any:
        import transformers

        return getattr(transformers, f"AutoModelFor{self.head}" if self.head else "AutoModel")


def _configuration(default: Any, sizes: Mapping[str, Any]) -> Any:
    """A configuration of the default's class: small, with ``sizes`` on top.

    It is built anew, because many settings are derived from others by the constructor.
    """
    written = default.to_dict()
    settings: dict[str, Any] = {
        name: size for name, size in SIZES.items() if type(written.get(name)) is int
    }
    most = SIZES["vocab_size"]
    for name, value in written.items():
        if name.endswith("_token_id") and type(value) is int and value >= most:
            settings[name] = value % most
    for name in getattr(default, "sub_configs", {}):
        nested = getattr(default, name, None)
        if nested is not None and name not in sizes:
            settings[name] = _configuration(nested, {})
    for name, value in sizes.items():
        nested = getattr(default, name, None)
        known = isinstance(value, Mapping) and "model_type" not in value
        if known and hasattr(nested, "to_diff_dict"):
            value = _configuration(nested, value)
        settings[name] = value
    return type(default)(**settings)


def perturb(model: Any) -> None:
    """Make layers differ that are initialised alike, such as norms: an order mixed up shows."""
    import torch

    generator = torch.Generator().manual_seed(SEED)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter += 0.02 * torch.randn(parameter.shape, generator=generator)


_PAD: Mapping[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_FOUR_STAGES: Mapping[str, Any] = {"hidden_sizes": [8, 16, 16, 32], "depths": [1, 1, 1, 1]}
_FOUR_ATTENTIONS: Mapping[str, Any] = {**_FOUR_STAGES, "num_attention_heads": [1, 2, 2, 4]}
_TWO_STAGES: Mapping[str, Any] = {
    "embedding_size": 8,
    "hidden_sizes": [8, 16],
    "depths": [1, 1],
}
_WINDOWS: Mapping[str, Any] = {
    "embed_dim": 16,
    "depths": [2, 2],
    "num_heads": [2, 2],
    "window_size": 4,
    "patch_size": 2,
}
_WAVES: Mapping[str, Any] = {
    "conv_dim": [16, 16, 16],
    "conv_stride": [5, 2, 2],
    "conv_kernel": [10, 3, 3],
    "num_feat_extract_layers": 3,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 2,
}
_EXPERTS: Mapping[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}


def _nested(model_type: str, **settings: Any) -> Mapping[str, Any]:
    """A nested configuration of another model type, as ``config.json`` has it."""
    return {"model_type": model_type, **settings}


_Row = TransformersModel

MODELS: tuple[TransformersModel, ...] = (
    # Text encoders
    _Row("bert"),
    _Row("bert", "SequenceClassification"),
    _Row("bert", "QuestionAnswering"),
    _Row("roberta", "SequenceClassification"),
    _Row("distilbert", "SequenceClassification"),
    _Row("albert", "SequenceClassification"),
    _Row("electra", "TokenClassification"),
    _Row("deberta", "SequenceClassification"),
    _Row("deberta-v2", "SequenceClassification", {"vocab_size": 99}),
    _Row("mpnet", "MaskedLM"),
    _Row(
        "modernbert",
        "SequenceClassification",
        {"pad_token_id": 0, "cls_token_id": 1, "sep_token_id": 2},
    ),
    _Row("xlm-roberta", "TokenClassification"),
    _Row("camembert", "MaskedLM"),
    _Row("xlnet", "SequenceClassification"),
    _Row(
        "funnel",
        "SequenceClassification",
        {"block_sizes": [1, 1], "d_head": 8, "d_inner": 64, "num_decoder_layers": 1},
    ),
    _Row("squeezebert", "SequenceClassification", {"embedding_size": 32}),
    _Row("mobilebert", "SequenceClassification"),
    _Row("convbert", "SequenceClassification"),
    _Row("layoutlm", "TokenClassification"),
    _Row("roformer", "SequenceClassification"),
    _Row("rembert", "SequenceClassification"),
    _Row("nystromformer", "SequenceClassification"),
    _Row("fnet", "SequenceClassification"),
    _Row("ernie", "SequenceClassification"),
    _Row("ibert", "SequenceClassification"),
    _Row("megatron-bert", "SequenceClassification"),
    _Row("big_bird", "SequenceClassification"),
    _Row("data2vec-text", "SequenceClassification"),
    _Row("esm", "MaskedLM", {"vocab_size": 33, "pad_token_id": 1, "mask_token_id": 32}),
    _Row("canine", "SequenceClassification"),
    _Row("xmod", "SequenceClassification", {"default_language": "en_XX"}),
    _Row("yoso", "SequenceClassification"),
    _Row(
        "roc_bert",
        "SequenceClassification",
        {"pronunciation_vocab_size": 50, "shape_vocab_size": 50},
    ),
    # Encoders with decoders
    _Row("t5", "Seq2SeqLM"),
    _Row("bart", "Seq2SeqLM"),
    _Row("mbart", "Seq2SeqLM"),
    _Row("pegasus", "Seq2SeqLM"),
    _Row("marian", "Seq2SeqLM", {**_PAD, "decoder_start_token_id": 0}),
    _Row("m2m_100", "Seq2SeqLM"),
    _Row("blenderbot", "Seq2SeqLM"),
    _Row("mt5", "Seq2SeqLM"),
    _Row("umt5", "Seq2SeqLM"),
    # Decoders
    _Row("gpt2", "CausalLM"),
    _Row("llama", "CausalLM"),
    _Row("qwen2", "CausalLM"),
    _Row("qwen3", "CausalLM"),
    _Row("mistral", "CausalLM"),
    _Row("phi", "CausalLM"),
    _Row("phi3", "CausalLM", _PAD),
    _Row("gemma", "CausalLM"),
    _Row("gemma2", "CausalLM"),
    _Row("gemma3_text", "CausalLM"),
    _Row("gptj", "CausalLM", {"rotary_dim": 4}),
    _Row("gpt_neox", "CausalLM"),
    _Row("opt", "CausalLM"),
    _Row("bloom", "CausalLM"),
    _Row("falcon", "CausalLM"),
    _Row("stablelm", "CausalLM"),
    _Row("olmo", "CausalLM"),
    _Row("olmo2", "CausalLM"),
    _Row("cohere", "CausalLM"),
    _Row("granite", "CausalLM"),
    _Row("starcoder2", "CausalLM"),
    _Row("smollm3", "CausalLM", _PAD),
    _Row("glm", "CausalLM", _PAD),
    _Row("helium", "CausalLM"),
    _Row("mamba", "CausalLM"),
    _Row("mixtral", "CausalLM", {"num_local_experts": 4}),
    _Row("qwen2_moe", "CausalLM", _EXPERTS),
    # Images
    _Row("vit", "ImageClassification"),
    _Row("deit", "ImageClassification", {"architectures": ["DeiTForImageClassification"]}),
    _Row("beit", "ImageClassification"),
    _Row("dinov2"),
    _Row("dinov2", "ImageClassification"),
    _Row("dinov2_with_registers", "ImageClassification"),
    _Row("swin", "ImageClassification", _WINDOWS),
    _Row("swinv2", "ImageClassification", {**_WINDOWS, "pretrained_window_sizes": [0, 0]}),
    _Row("convnext", "ImageClassification", {**_FOUR_STAGES, "patch_size": 4}),
    _Row("convnextv2", "ImageClassification", {**_FOUR_STAGES, "patch_size": 4}),
    _Row("resnet", "ImageClassification", {**_TWO_STAGES, "layer_type": "basic"}),
    _Row("regnet", "ImageClassification", {**_TWO_STAGES, "groups_width": 4}),
    _Row("mobilenet_v1", "ImageClassification", {"depth_multiplier": 0.25}),
    _Row("mobilenet_v2", "ImageClassification", {"depth_multiplier": 0.25}),
    _Row(
        "mobilevit",
        "ImageClassification",
        {
            "hidden_sizes": [16, 16, 24],
            "neck_hidden_sizes": [8, 8, 16, 16, 16, 16, 32],
            "patch_size": 2,
        },
    ),
    _Row(
        "efficientnet",
        "ImageClassification",
        {"width_coefficient": 0.25, "depth_coefficient": 0.3, "hidden_dim": 320},
    ),
    _Row(
        "levit",
        "ImageClassification",
        {
            "architectures": ["LevitForImageClassification"],
            "hidden_sizes": [16, 24, 32],
            "num_attention_heads": [2, 2, 2],
            "depths": [1, 1, 1],
            "key_dim": [8, 8, 8],
            "patch_size": 16,
            "image_size": 64,
        },
    ),
    _Row("pvt", "ImageClassification", _FOUR_ATTENTIONS),
    _Row("pvt_v2", "ImageClassification", _FOUR_ATTENTIONS),
    _Row("poolformer", "ImageClassification", _FOUR_STAGES),
    _Row(
        "cvt",
        "ImageClassification",
        {"embed_dim": [8, 16, 24], "num_heads": [1, 2, 3], "depth": [1, 2, 3]},
    ),
    _Row(
        "focalnet",
        "ImageClassification",
        {
            "embed_dim": 16,
            "depths": [1, 1],
            "focal_levels": [1, 1],
            "focal_windows": [3, 3],
            "patch_size": 4,
            "hidden_sizes": [16, 32],
        },
    ),
    _Row(
        "bit",
        "ImageClassification",
        {"embedding_size": 32, "hidden_sizes": [32, 64], "depths": [1, 1], "num_groups": 8},
    ),
    _Row("data2vec-vision", "ImageClassification"),
    _Row("vit_msn", "ImageClassification"),
    _Row("swiftformer", "ImageClassification", {"depths": [1] * 4, "embed_dims": [8, 16, 16, 32]}),
    _Row("segformer", "SemanticSegmentation", {**_FOUR_ATTENTIONS, "decoder_hidden_size": 16}),
    _Row(
        "dpt",
        "DepthEstimation",
        {
            "neck_hidden_sizes": [8, 8, 16, 16],
            "fusion_hidden_size": 16,
            "backbone_out_indices": [0, 1, 2, 3],
            "num_hidden_layers": 4,
        },
    ),
    _Row("glpn", "DepthEstimation", {**_FOUR_ATTENTIONS, "decoder_hidden_size": 16}),
    _Row(
        "detr",
        "ObjectDetection",
        {
            "use_timm_backbone": False,
            "use_pretrained_backbone": False,
            "backbone": None,
            "backbone_config": _nested(
                "resnet", **_TWO_STAGES, layer_type="basic", out_features=["stage2"]
            ),
            "num_queries": 5,
        },
    ),
    _Row("yolos", "ObjectDetection", {"image_size": [32, 32], "num_detection_tokens": 5}),
    # Text and images
    _Row("clip", "ZeroShotImageClassification"),
    _Row("siglip", "ZeroShotImageClassification"),
    _Row("siglip2", "ZeroShotImageClassification"),
    _Row("chinese_clip", "ZeroShotImageClassification"),
    _Row("altclip", "ZeroShotImageClassification"),
    # Audio
    _Row(
        "whisper",
        "AudioClassification",
        {**_PAD, "max_source_positions": 50, "num_mel_bins": 16, "max_target_positions": 32},
    ),
    _Row("wav2vec2", "CTC", _WAVES),
    _Row("hubert", "CTC", _WAVES),
    _Row("wavlm", "AudioClassification", _WAVES),
    _Row("unispeech", "CTC", _WAVES),
    _Row("data2vec-audio", "CTC", {**_WAVES, "num_conv_pos_embeddings": 2}),
    _Row("sew", "CTC", _WAVES),
    _Row("audio-spectrogram-transformer", "AudioClassification"),
    _Row("wav2vec2-bert", "CTC", {"vocab_size": 99, "feature_projection_input_dim": 16}),
    # Series
    _Row("patchtst"),
    _Row("patchtsmixer"),
)
