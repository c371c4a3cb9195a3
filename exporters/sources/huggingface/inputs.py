"""Inputs of a task, from the model's ``forward`` and its configuration: text, image, audio, series.

Names are those of ``transformers``; ranges and sizes are the configuration's.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from modelport.exporters.model_spec import AttentionMask
from modelport.exporters.models.causal_lm import DEFAULT_MAX_POSITIONS
from modelport.exporters.sources.huggingface.folder import PREPROCESSOR, Folder, read_json
from modelport.exporters.sources.huggingface.tasks import Part
from modelport.gateway.errors import IntegrityError, Unsupported, UsageError
from modelport.gateway.types import Axis, Datatype, TensorSpec

TOKENIZER_CONFIG = "tokenizer_config.json"

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
#: The largest side and the longest waveform that a file may ask for; a flag may ask for more.
MOST_SIDE, MOST_SIDE_OF_FLAG = 1 << 11, 1 << 14
MOST_SAMPLES = 1 << 22

#: Names of the number of features that a sound has at a time.
FEATURES = ("feature_projection_input_dim", "input_feat_per_channel")

HYPER_PARAMETERS = frozenset({"max_positions", "image_size"})


@dataclass(frozen=True, slots=True)
class TaskInputs:
    """Inputs in the order of ``forward``'s arguments, their axes and masks.

    Attributes:
        pairs: texts and images are batches of their own; then ``max_batch_size`` is 0.
        limited: the axis whose bounds the model itself may narrow: its maximum may be the number
            of position embeddings.
        waveforms: inputs that are sound.
    """

    specs: tuple[TensorSpec, ...]
    axes: Mapping[str, Axis] = field(default_factory=dict)
    masks: tuple[AttentionMask, ...] = ()
    pairs: bool = False
    limited: str | None = None
    waveforms: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _ModelFacts:
    """The facts that inputs depend on."""

    folder: Folder
    config: Any
    arguments: Mapping[str, inspect.Parameter]
    kwargs: Mapping[str, Any]
    padding: str
    sequence: str = "sequence"

    @property
    def text(self) -> Any:
        return self.config.get_text_config()

    def positions(self) -> int:
        """The longest sequence to serve: the model's own, ``max_positions``, or the default."""
        limit = _attribute(self.text, "max_position_embeddings")
        longest = limit if isinstance(limit, int) and limit > 0 else None
        default = min(longest or 1 << 30, self._tokenizer_length(), DEFAULT_MAX_POSITIONS)
        wanted = self.kwargs.get("max_positions", default)
        if type(wanted) is not int or not 1 <= wanted <= (longest or 1 << 30):
            raise UsageError(
                f"--model-kwargs: max_positions is {wanted!r}; '{self.folder.path}' takes "
                f"{f'1 to {longest}' if longest else 'a positive number'}"
            )
        return wanted

    def _tokenizer_length(self) -> int:
        """The length to which the tokenizer cuts; a huge number stands for none."""
        path = self.folder.path / TOKENIZER_CONFIG
        length = read_json(path).get("model_max_length") if path.is_file() else None
        return length if type(length) is int and length > 0 else 1 << 30


def inputs_for(
    folder: Folder, model: Any, part: Part, kwargs: Mapping[str, Any]
) -> Iterator[TaskInputs]:
    """The inputs of ``part`` of ``model``; several if only running it tells which are right.

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
    config = model.config
    seq2seq = part in (Part.ENCODER, Part.DECODER) or (
        part is Part.WHOLE and "decoder_input_ids" in _arguments(model.forward)
    )
    facts = _ModelFacts(
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
    if "pixel_values" in taken:
        for image in _images(facts):
            yield _paired(texts, image) if texts.specs else image
        return
    if "input_ids" in taken:
        yield texts
    elif "input_values" in taken or "input_features" in taken:
        yield _audio(facts)
    elif "past_values" in taken:
        yield _series(facts)
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


def _attribute(config: Any, name: str) -> Any:
    """An entry of a configuration, or None."""
    return getattr(config, name, None)


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


def _text(facts: _ModelFacts) -> TaskInputs:
    config, axis = facts.text, facts.sequence
    specs = [_tokens("input_ids", axis, _attribute(config, "vocab_size") or CODE_POINTS)]
    masks: tuple[AttentionMask, ...] = ()
    # SigLIP was trained without: its texts are padded to one length.
    if "attention_mask" in facts.arguments and "siglip" not in str(facts.config.model_type):
        specs.append(_tokens("attention_mask", axis, 2))
        masks = (AttentionMask("attention_mask", facts.padding),)
    kinds = _attribute(config, "type_vocab_size") or 0
    if "token_type_ids" in facts.arguments and kinds > 1:
        specs.append(_tokens("token_type_ids", axis, kinds))
    axes = {axis: Axis(axis, 1, facts.positions())}
    if "decoder_input_ids" in facts.arguments:
        axes["decoder_sequence"] = Axis("decoder_sequence", 1, facts.positions())
        specs.append(_tokens("decoder_input_ids", "decoder_sequence", config.vocab_size))
    return TaskInputs(tuple(specs), axes, masks, limited=axis)


def _tokens(name: str, axis: str, size: int) -> TensorSpec:
    return TensorSpec(name, Datatype.INT64, (axis,), 0, size - 1)


def _decoder(facts: _ModelFacts) -> TaskInputs:
    """The names are those of Optimum's ``decoder_model.onnx``."""
    config, axis = facts.text, facts.sequence
    width = _attribute(config, "hidden_size") or _attribute(config, "d_model")
    specs = (
        _tokens("encoder_attention_mask", axis, 2),
        _tokens("input_ids", "decoder_sequence", config.vocab_size),
        TensorSpec("encoder_hidden_states", Datatype.FP32, (axis, width)),
    )
    axes = {name: Axis(name, 1, facts.positions()) for name in (axis, "decoder_sequence")}
    masks = (AttentionMask("encoder_attention_mask", facts.padding),)
    return TaskInputs(specs, axes, masks, limited="decoder_sequence")


# -- images ---------------------------------------------------------------------------------------


def _images(facts: _ModelFacts) -> Iterator[TaskInputs]:
    """One size for each place that states one; dynamic sides if none does, or one size."""
    if cut := [name for name in PATCHES if name in facts.arguments]:
        raise Unsupported(
            f"'{facts.folder.path}' takes {cut[0]}, whose values decide on sizes within the model, "
            "which no graph keeps open; write a factory that fixes them, and give it with --model, "
            "--input and the weights"
        )
    config = _attribute(facts.config, "vision_config") or facts.config
    backbone = _attribute(config, "backbone_config")
    channels = _attribute(config, "num_channels") or _attribute(backbone, "num_channels") or 3
    stated = dict.fromkeys(_sizes(facts, config, backbone))
    for size in stated:
        yield TaskInputs((TensorSpec("pixel_values", Datatype.FP32, (channels, *size)),))
    if not stated:
        spec = TensorSpec("pixel_values", Datatype.FP32, (channels, "height", "width"))
        low, high = SIDES[0], _longest_side(facts) or SIDES[1]
        yield TaskInputs((spec,), {side: Axis(side, low, high) for side in ("height", "width")})
        yield TaskInputs((TensorSpec("pixel_values", Datatype.FP32, (channels, SIDE, SIDE)),))


def _longest_side(facts: _ModelFacts) -> int | None:
    """The side to which the preprocessor resizes the longer one at most."""
    size = _processor(facts).get("size")
    longest = size.get("longest_edge") if isinstance(size, dict) else None
    return longest if type(longest) is int and SIDES[0] < longest <= MOST_SIDE else None


def _processor(facts: _ModelFacts) -> Mapping[str, Any]:
    path = facts.folder.path / PREPROCESSOR
    return read_json(path) if path.is_file() else {}


def _sizes(facts: _ModelFacts, config: Any, backbone: Any) -> Iterator[tuple[int, int]]:
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
    processor = _processor(facts)
    stated = [
        processor.get("crop_size") if processor.get("do_center_crop", False) else None,
        processor.get("size") if processor.get("do_resize", True) else None,
        _attribute(config, "image_size"),
        _attribute(backbone, "image_size"),
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


# -- audio and series -----------------------------------------------------------------------------


def _audio(facts: _ModelFacts) -> TaskInputs:
    config = facts.config
    bins = _attribute(config, "num_mel_bins")
    if "input_features" in facts.arguments:
        return _features(facts, bins)
    if bins and (longest := _attribute(config, "max_length")):
        return TaskInputs((TensorSpec("input_values", Datatype.FP32, (longest, bins)),))
    kernels, strides = _attribute(config, "conv_kernel"), _attribute(config, "conv_stride")
    if not (kernels and strides):
        raise Unsupported(
            f"'{facts.folder.path}' takes input_values of a length that its config.json does not "
            "bound; write a factory, and give it with --model, --input and the weights"
        )
    axis = Axis(
        facts.sequence,
        _waveform(1, kernels, strides),
        _waveform(facts.positions(), kernels, strides),
    )
    spec = TensorSpec("input_values", Datatype.FP32, (axis.name,))
    found = _over_time(facts, spec, axis, _processor(facts).get("return_attention_mask") is True)
    return replace(found, waveforms=(spec.name,))


def _features(facts: _ModelFacts, bins: int | None) -> TaskInputs:
    """Features of sound: all that a window has, ``[bins, frames]``, or ``[frames, features]``."""
    config = facts.config
    frames = _attribute(config, "max_source_positions")
    if bins and frames:
        return TaskInputs((TensorSpec("input_features", Datatype.FP32, (bins, 2 * frames)),))
    width = next(filter(None, (_attribute(config, name) for name in FEATURES)), None)
    if not width:
        raise Unsupported(
            f"'{facts.folder.path}' takes input_features of a shape that its config.json does "
            "not state; write a factory, and give it with --model, --input and the weights"
        )
    axis = Axis(facts.sequence, 1, facts.positions())
    spec = TensorSpec("input_features", Datatype.FP32, (axis.name, width))
    return _over_time(facts, spec, axis, _processor(facts).get("return_attention_mask", True))


def _over_time(facts: _ModelFacts, spec: TensorSpec, axis: Axis, masked: bool) -> TaskInputs:
    """``spec`` along ``axis``, and the mask of its positions if the preprocessor makes one."""
    specs, axes = (spec,), {axis.name: axis}
    if not (masked and "attention_mask" in facts.arguments):
        return TaskInputs(specs, axes, limited=axis.name)
    mask = _tokens("attention_mask", axis.name, 2)
    masks = (AttentionMask(mask.name),)
    return TaskInputs((*specs, mask), axes, masks, limited=axis.name)


def _waveform(frames: int, kernels: list[int], strides: list[int]) -> int:
    """The samples from which convolutions without padding make ``frames``.

    Raises:
        IntegrityError: the configuration states no such convolutions.
    """
    length = frames
    try:
        for kernel, stride in zip(reversed(kernels), reversed(strides), strict=True):
            length = (length - 1) * stride + kernel
            if not 0 < length <= MOST_SAMPLES:
                raise ValueError(length)
    except (TypeError, ValueError) as error:
        raise IntegrityError(
            f"conv_kernel and conv_stride of config.json are {kernels!r} and {strides!r}, which "
            "make no frames of audio; copy the folder again"
        ) from error
    return length


def _series(facts: _ModelFacts) -> TaskInputs:
    config = facts.config
    length = _attribute(config, "context_length")
    channels = _attribute(config, "num_input_channels")
    if not (length and channels):
        raise Unsupported(
            f"'{facts.folder.path}' takes past_values of a shape that its config.json does not "
            "state; write a factory, and give it with --model, --input and the weights"
        )
    return TaskInputs((TensorSpec("past_values", Datatype.FP32, (length, channels)),))
