"""Inputs of a task, from the model's ``forward`` and its configuration: text, image, audio, series.

Names are those of ``transformers``; ranges and sizes are the configuration's.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from modelport.exporters.model_spec import AttentionMask
from modelport.exporters.sources.huggingface.audio_inputs import audio, series
from modelport.exporters.sources.huggingface.folder import Folder, read_json
from modelport.exporters.sources.huggingface.model_facts import (
    TOKENIZER_CONFIG,
    ModelFacts,
    TaskInputs,
    attribute,
    tokens,
)
from modelport.exporters.sources.huggingface.tasks import ExportTask, Part
from modelport.gateway.errors import Unsupported, UsageError
from modelport.gateway.types import Axis, Datatype, TensorSpec

#: Number of Unicode code points, which are the ids of a model without a vocabulary (CANINE).
CODE_POINTS = 0x110000

#: Sides of an image for a model that neither its configuration nor its preprocessor bounds. Below
#: 64 the last stage of a network with strides of 32 has one place, a constant to exporters.
SIDES = (64, 512)
#: The side for a model that takes no sides but multiples of its strides.
SIDE = 224
#: Arguments that say how images were cut into patches; their values, not only their shapes, decide
#: on sizes within the model.
PATCHES = ("spatial_shapes", "image_grid_thw", "image_position_ids")
#: The largest side that a file may ask for; a flag may ask for more.
MOST_SIDE, MOST_SIDE_OF_FLAG = 1 << 11, 1 << 14
#: The most frames of a video.
MOST_FRAMES = 1 << 10

HYPER_PARAMETERS = frozenset({"max_positions", "image_size"})


def inputs_for(
    folder: Folder, model: Any, task: ExportTask, kwargs: Mapping[str, Any]
) -> Iterator[TaskInputs]:
    """The inputs of ``model`` for ``task``; several if only running it tells which are right.

    Raises:
        UsageError: a hyper-parameter is wrong.
        Unsupported: the model takes an input that this module does not know.
    """
    unknown = sorted(set(kwargs) - HYPER_PARAMETERS)
    if unknown:
        raise UsageError(
            f"--model-kwargs: a Hugging Face folder has no {', '.join(unknown)}, only "
            f"{' and '.join(sorted(HYPER_PARAMETERS))}; the rest is in config.json"
        )
    config, part = model.config, task.part
    seq2seq = part in (Part.ENCODER, Part.DECODER) or (
        part is Part.WHOLE and "decoder_input_ids" in _arguments(model.forward)
    )
    facts = ModelFacts(
        folder,
        config,
        _arguments(_callable(model, part)),
        kwargs,
        _padding_side(folder, model),
        "encoder_sequence" if seq2seq else "sequence",
    )
    if part is Part.DECODER:
        yield _decoder(facts)
        return
    taken, texts = facts.arguments, TaskInputs(())
    if "input_ids" in taken:
        texts = _text(facts)
    cut = next((name for name in PATCHES if name in taken), None)
    if "pixel_values" in taken and not cut:
        for image in _images(facts):
            yield _paired(texts, image) if texts.specs else image
    if "decoder_input_ids" in taken and texts.specs and not task.generates:
        yield _text(replace(facts, sequence="sequence"), decodes=False)
    if texts.specs:  # a language model that puts images into its text also takes text alone
        yield texts
    if cut and "pixel_values" in taken:
        raise Unsupported(
            f"'{facts.folder.path}' takes {cut}, whose values decide on sizes within the model, "
            "which no graph keeps open; write a factory that fixes them, and give it with --model, "
            "--input and the weights"
        )
    if texts.specs or "pixel_values" in taken:
        return
    if "input_values" in taken or "input_features" in taken:
        yield from audio(facts)
    elif "past_values" in taken:
        yield series(facts)
    else:
        raise Unsupported(
            f"'{folder.path}' takes {', '.join(taken)}, which no task declares; write a factory, "
            "and give it with --model, --input and the weights"
        )


def _callable(model: Any, part: Part) -> Any:
    if part is Part.TEXT:
        return model.get_text_features
    if part is Part.IMAGE:
        return model.get_image_features
    return model.get_encoder().forward if part is Part.ENCODER else model.forward


def _arguments(function: Any) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(function).parameters


def _padding_side(folder: Folder, model: Any) -> str:
    """The tokenizer's side, ``left`` for language models that only decode, or else ``right``."""
    path = folder.path / TOKENIZER_CONFIG
    side = read_json(path).get("padding_side") if path.is_file() else None
    if side in ("left", "right"):
        return str(side)
    decodes = type(model).__name__.endswith("ForCausalLM") or type(model).__name__.endswith(
        "LMHeadModel"
    )
    return "left" if decodes else "right"


# -- text -----------------------------------------------------------------------------------------


def _text(facts: ModelFacts, decodes: bool = True) -> TaskInputs:
    """Token ids and what belongs to them; ``decodes`` False: the decoder's follow from them."""
    config, axis = facts.text, facts.sequence
    specs = [tokens("input_ids", axis, attribute(config, "vocab_size") or CODE_POINTS)]
    masks: tuple[AttentionMask, ...] = ()
    # SigLIP was trained without: its texts are padded to one length.
    if "attention_mask" in facts.arguments and "siglip" not in str(facts.config.model_type):
        specs.append(tokens("attention_mask", axis, 2))
        masks = (AttentionMask("attention_mask", facts.padding),)
    kinds = attribute(config, "type_vocab_size") or 0
    if "token_type_ids" in facts.arguments and kinds > 1:
        specs.append(tokens("token_type_ids", axis, kinds))
    axes = {axis: Axis(axis, 1, facts.positions())}
    if decodes and "decoder_input_ids" in facts.arguments:
        axes["decoder_sequence"] = Axis("decoder_sequence", 1, facts.positions())
        specs.append(tokens("decoder_input_ids", "decoder_sequence", config.vocab_size))
    return TaskInputs(tuple(specs), axes, masks, limited=axis)


def _decoder(facts: ModelFacts) -> TaskInputs:
    """The names are those of Optimum's ``decoder_model.onnx``."""
    config, axis = facts.text, facts.sequence
    width = attribute(config, "hidden_size") or attribute(config, "d_model")
    specs = (
        tokens("encoder_attention_mask", axis, 2),
        tokens("input_ids", "decoder_sequence", config.vocab_size),
        TensorSpec("encoder_hidden_states", Datatype.FP32, (axis, width)),
    )
    axes = {name: Axis(name, 1, facts.positions()) for name in (axis, "decoder_sequence")}
    masks = (AttentionMask("encoder_attention_mask", facts.padding),)
    return TaskInputs(specs, axes, masks, limited="decoder_sequence")


# -- images ---------------------------------------------------------------------------------------


def _images(facts: ModelFacts) -> Iterator[TaskInputs]:
    """One size for each place that states one; dynamic sides if none does, or one size."""
    config = attribute(facts.config, "vision_config") or facts.config
    backbone = attribute(config, "backbone_config")
    channels = attribute(config, "num_channels") or attribute(backbone, "num_channels") or 3
    stated = dict.fromkeys(_sizes(facts, config, backbone))
    frames = attribute(config, "num_frames")
    for size in stated:
        if type(frames) is int and 0 < frames <= MOST_FRAMES:
            video = (frames, channels, *size)
            yield TaskInputs((TensorSpec("pixel_values", Datatype.FP32, video),))
        yield TaskInputs((TensorSpec("pixel_values", Datatype.FP32, (channels, *size)),))
    if not stated:
        spec = TensorSpec("pixel_values", Datatype.FP32, (channels, "height", "width"))
        low, high = SIDES[0], _longest_side(facts) or SIDES[1]
        yield TaskInputs((spec,), {side: Axis(side, low, high) for side in ("height", "width")})
        yield TaskInputs((TensorSpec("pixel_values", Datatype.FP32, (channels, SIDE, SIDE)),))


def _longest_side(facts: ModelFacts) -> int | None:
    """The side to which the preprocessor resizes the longer one at most."""
    size = facts.folder.preprocessor().get("size")
    longest = size.get("longest_edge") if isinstance(size, dict) else None
    return longest if type(longest) is int and SIDES[0] < longest <= MOST_SIDE else None


def _sizes(facts: ModelFacts, config: Any, backbone: Any) -> Iterator[tuple[int, int]]:
    """Height and width: of ``--model-kwargs``, the preprocessor, the configuration."""
    if "image_size" in facts.kwargs:
        size = _sides(facts.kwargs["image_size"], MOST_SIDE_OF_FLAG)
        if size is None:
            raise UsageError(
                f"--model-kwargs: image_size is {facts.kwargs['image_size']!r}; give a side, or "
                "[height, width]"
            )
        yield size
        return
    processor = facts.folder.preprocessor()
    stated = [
        processor.get("crop_size") if processor.get("do_center_crop", False) else None,
        processor.get("size") if processor.get("do_resize", True) else None,
        attribute(config, "image_size"),
        attribute(backbone, "image_size"),
    ]
    yield from (size for size in map(_sides, stated) if size is not None)


def _sides(value: Any, most: int = MOST_SIDE) -> tuple[int, int] | None:
    """Height and width of a size as configurations write it; None if it is something else."""
    if isinstance(value, Mapping):
        value = [value.get("height"), value.get("width")]
    sides = list(value) if isinstance(value, list | tuple) else [value, value]
    if len(sides) != 2 or not all(type(side) is int and 0 < side <= most for side in sides):
        return None
    return sides[0], sides[1]


def _paired(texts: TaskInputs, images: TaskInputs) -> TaskInputs:
    """Texts and images as two batches, each an axis."""
    specs = [
        *(_leading("text_batch", spec) for spec in texts.specs),
        *(_leading("image_batch", spec) for spec in images.specs),
    ]
    names = [spec.name for spec in specs]
    # transformers' order: input_ids, pixel_values, attention_mask
    specs.sort(key=lambda spec: (names.index(spec.name) > 0, spec.name != "pixel_values"))
    return TaskInputs(
        tuple(specs),
        {**texts.axes, **images.axes},
        texts.masks,
        pairs=True,
        limited=texts.limited,
    )


def _leading(axis: str, spec: TensorSpec) -> TensorSpec:
    return TensorSpec(spec.name, spec.datatype, (axis, *spec.dims), spec.minimum, spec.maximum)
