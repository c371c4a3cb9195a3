"""Inputs of models of sound and of time series."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

from modelport.exporters.model_spec import AttentionMask
from modelport.exporters.sources.huggingface.model_facts import (
    ModelFacts,
    TaskInputs,
    attribute,
    tokens,
)
from modelport.gateway.errors import IntegrityError, Unsupported
from modelport.gateway.types import Axis, Datatype, TensorSpec

#: The longest waveform that a file may ask for.
MOST_SAMPLES = 1 << 22
#: Samples of a waveform whose length no configuration bounds: 1/16 s and 2 s at 16 kHz.
WAVEFORM = (1 << 10, 1 << 15)

#: Names of the number of features that a sound has at a time.
FEATURES = (
    "feature_projection_input_dim",
    "input_feat_per_channel",
    "num_mel_bins",
    "feature_size",
    "input_feature_size",
)
#: Names of nested configurations of sound.
NESTED = ("audio_config", "encoder_config")


def audio(facts: ModelFacts) -> Iterator[TaskInputs]:
    """Waveforms or features of sound; several if only running the model tells which are right.

    Raises:
        Unsupported: the configuration does not state the shape of the features.
    """
    config = facts.config
    bins = attribute(config, "num_mel_bins")
    if "input_features" in facts.arguments:
        yield from _features(facts, bins)
        return
    if bins and (longest := attribute(config, "max_length")):
        yield TaskInputs((TensorSpec("input_values", Datatype.FP32, (longest, bins)),))
        return
    kernels, strides = attribute(config, "conv_kernel"), attribute(config, "conv_stride")
    axis = Axis(facts.sequence, *WAVEFORM)
    if kernels and strides:
        shortest, longest = (
            _waveform(frames, kernels, strides) for frames in (1, facts.positions())
        )
        axis = Axis(facts.sequence, shortest, longest)
    masked = facts.folder.preprocessor().get("return_attention_mask") is True
    # Codecs take the channel, too.
    for dims in ((axis.name,), (attribute(config, "audio_channels") or 1, axis.name)):
        spec = TensorSpec("input_values", Datatype.FP32, dims)
        yield replace(_over_time(facts, spec, axis, masked), waveforms=(spec.name,))


def _features(facts: ModelFacts, bins: int | None) -> Iterator[TaskInputs]:
    """Features of sound: all that a window has, ``[bins, frames]``, or ``[frames, features]``."""
    config = facts.config
    frames = attribute(config, "max_source_positions")
    if bins and frames:
        yield TaskInputs((TensorSpec("input_features", Datatype.FP32, (bins, 2 * frames)),))
        return
    nested = [attribute(config, name) for name in NESTED]
    found = (attribute(place, name) for place in (config, *nested) for name in FEATURES)
    width = next(filter(None, found), None)
    if not width:
        raise Unsupported(
            f"'{facts.folder.path}' takes input_features of a shape that its config.json does "
            "not state; write a factory, and give it with --model, --input and the weights"
        )
    axis = Axis(facts.sequence, 1, facts.positions())
    masked = facts.folder.preprocessor().get("return_attention_mask", True)
    layouts = ((axis.name, width), (width, axis.name))
    # Some models take a mask of the frames that are left after their convolutions.
    for along_input, dims in itertools.product(dict.fromkeys((masked, False)), layouts):
        spec = TensorSpec("input_features", Datatype.FP32, dims)
        yield _over_time(facts, spec, axis, along_input)


def _over_time(facts: ModelFacts, spec: TensorSpec, axis: Axis, masked: bool) -> TaskInputs:
    """``spec`` along ``axis``, and the mask of its positions if the preprocessor makes one."""
    specs, axes = (spec,), {axis.name: axis}
    if not (masked and "attention_mask" in facts.arguments):
        return TaskInputs(specs, axes, limited=axis.name)
    mask = tokens("attention_mask", axis.name, 2)
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


def series(facts: ModelFacts) -> TaskInputs:
    """The past values of a time series."""
    config = facts.config
    length = attribute(config, "context_length")
    channels = attribute(config, "num_input_channels")
    if not (length and channels):
        raise Unsupported(
            f"'{facts.folder.path}' takes past_values of a shape that its config.json does not "
            "state; write a factory, and give it with --model, --input and the weights"
        )
    return TaskInputs((TensorSpec("past_values", Datatype.FP32, (length, channels)),))
