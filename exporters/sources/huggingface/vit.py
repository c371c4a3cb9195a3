"""``ViTForImageClassification`` of ``transformers`` 4 and 5, mapped to ``timm``'s names.

Pure functions. Key styles: ``vit.encoder.layer.N.attention.attention.query``
(version 4, and ``save_pretrained`` of version 5) and ``vit.layers.N.attention.q_proj``
(version 5's modules); the map between them is ``transformers.conversion_mapping``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from modelport.gateway.errors import IntegrityError, Unsupported

ARCHITECTURE = "ViTForImageClassification"

#: Weights that classification by the class token never uses.
UNUSED = frozenset(
    {"vit.embeddings.mask_token", "vit.pooler.dense.weight", "vit.pooler.dense.bias"}
)

_STEM = {
    "vit.embeddings.cls_token": "cls_token",
    "vit.embeddings.position_embeddings": "pos_embed",
    "vit.embeddings.patch_embeddings.projection": "patch_embed.proj",
    "vit.layernorm": "norm",
    "classifier": "head",
}
_BLOCK = re.compile(r"vit\.(?:encoder\.layer|layers)\.(\d+)\.(.+)")
_IN_BLOCK = {
    "layernorm_before": "norm1",
    "layernorm_after": "norm2",
    "attention.output.dense": "attn.proj",
    "attention.o_proj": "attn.proj",
    "intermediate.dense": "mlp.fc1",
    "mlp.fc1": "mlp.fc1",
    "output.dense": "mlp.fc2",
    "mlp.fc2": "mlp.fc2",
}
#: The parts of ``timm``'s joint projection, in its order.
_JOINT = {
    "attention.attention.query": 0,
    "attention.attention.key": 1,
    "attention.attention.value": 2,
    "attention.q_proj": 0,
    "attention.k_proj": 1,
    "attention.v_proj": 2,
}
_JOINT_NAME = "attn.qkv"

#: modelport's hyper-parameter, ``ViTConfig``'s, and its default.
_KWARGS = (
    ("image_size", "image_size", 224),
    ("patch_size", "patch_size", 16),
    ("in_channels", "num_channels", 3),
    ("dim", "hidden_size", 768),
    ("depth", "num_hidden_layers", 12),
    ("num_heads", "num_attention_heads", 12),
    ("mlp_dim", "intermediate_size", 3072),
    ("layer_norm_eps", "layer_norm_eps", 1e-12),
)


def kwargs(config: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Hyper-parameters from ``config.json``, without the number of classes.

    Raises:
        Unsupported: another model, or a kind of ViT that is not supported.
        IntegrityError: a value is invalid.
    """
    named = config.get("architectures")
    architectures = named if isinstance(named, list) else []
    if config.get("model_type") != "vit" or ARCHITECTURE not in architectures:
        raise Unsupported(
            f"'{folder}' holds a {', '.join(map(str, architectures)) or config.get('model_type')}; "
            f"--model vit reads {ARCHITECTURE}"
        )
    activation = config.get("hidden_act", "gelu")
    if activation != "gelu":
        raise Unsupported(
            f"'{folder}' uses the activation '{activation}'; --model vit has gelu, and "
            "--task image-classification exports it"
        )
    epsilon = config.get("layer_norm_eps", 0)
    if not isinstance(epsilon, int | float) or not 0 <= epsilon < 1:
        raise IntegrityError(f"'{folder}': layer_norm_eps is {epsilon!r}; copy the folder again")
    found = {ours: config.get(theirs, default) for ours, theirs, default in _KWARGS}
    for key in ("image_size", "patch_size"):
        sides = found[key] if isinstance(found[key], list) else [found[key]]
        if len(set(map(str, sides))) != 1:
            raise Unsupported(
                f"'{folder}' has a {key} of {sides}; --model vit takes squares, and "
                "--task image-classification exports it"
            )
        found[key] = sides[0]
    return found


def rename(state: Mapping[str, Tensor], qkv_bias: bool = True) -> dict[str, Tensor]:
    """Rename ``state`` to ``timm``'s names: join query, key and value, drop unused weights.

    A key of neither style keeps its name, so that strict loading reports it.

    Args:
        qkv_bias: False for a model trained without biases; they become zeros.

    Raises:
        IntegrityError: two keys stand for one weight, or parts do not fit together.
    """
    renamed: dict[str, Tensor] = {}
    joint: dict[str, dict[int, Tensor]] = {}
    for key, value in state.items():
        if key in UNUSED:
            continue
        name, part = _name(key, qkv_bias)
        parts = joint.setdefault(name, {}) if part is not None else renamed
        place: Any = name if part is None else part
        if place in parts:
            raise IntegrityError(f"the weights hold '{name}' twice, in two key styles; keep one")
        parts[place] = value
    for name, pieces in joint.items():
        if sorted(pieces) == [0, 1, 2]:
            renamed[name] = _join(name, [pieces[i] for i in range(3)])
    if not qkv_bias:
        for name in [name for name in renamed if name.endswith(f"{_JOINT_NAME}.weight")]:
            renamed[name.removesuffix("weight") + "bias"] = torch.zeros(renamed[name].shape[0])
    return renamed


def _name(key: str, qkv_bias: bool) -> tuple[str, int | None]:
    """``timm``'s name of a weight, and the part of it that ``key`` is, or None for the whole."""
    if key in _STEM:
        return _STEM[key], None
    stem, _, kind = key.rpartition(".")
    if stem in _STEM:
        return f"{_STEM[stem]}.{kind}", None
    match = _BLOCK.fullmatch(stem)
    if match is None:
        return key, None
    number, place = match.groups()
    if place in _JOINT and (qkv_bias or kind != "bias"):
        return f"blocks.{number}.{_JOINT_NAME}.{kind}", _JOINT[place]
    if place in _IN_BLOCK:
        return f"blocks.{number}.{_IN_BLOCK[place]}.{kind}", None
    return key, None


def _join(name: str, parts: Sequence[Tensor]) -> Tensor:
    try:
        return torch.cat(list(parts))
    except RuntimeError as error:
        shapes = ", ".join(str(list(part.shape)) for part in parts)
        raise IntegrityError(
            f"query, key and value of '{name}' do not fit together: {shapes}; copy the folder again"
        ) from error


def labels(config: Mapping[str, Any], num_classes: int, folder: Path) -> tuple[str, ...]:
    """Class names from ``id2label``; empty if they are placeholders.

    Raises:
        IntegrityError: they are not one for each class.
    """
    named = config.get("id2label")
    if named is None:
        return ()
    numbers = [str(i) for i in range(num_classes)]
    if not isinstance(named, dict) or sorted(named) != sorted(numbers):
        raise IntegrityError(
            f"'{folder}': id2label of config.json does not name classes 0 to {num_classes - 1}, "
            "which the weights have; copy the folder again"
        )
    found = tuple(" ".join(str(named[number]).split()) for number in numbers)
    return () if found == tuple(f"LABEL_{number}" for number in numbers) else found


#: Pillow's filters, in the order of their numbers in ``resample``.
_INTERPOLATIONS = ("nearest", "lanczos", "bilinear", "bicubic", "box", "hamming")


def _geometry(processor: Mapping[str, Any], path: Path) -> dict[str, str]:
    """Parameters for resizing an image to the model's size: whole, or cropped."""
    if not processor.get("do_resize", True):
        return {}
    found = {}
    resample = processor.get("resample", 2)
    if type(resample) is not int or not 0 <= resample < len(_INTERPOLATIONS):
        raise IntegrityError(f"'{path}': resample is {resample!r}; copy the folder again")
    if resample != 2:
        found["image.interpolation"] = _INTERPOLATIONS[resample]
    size, crop = processor.get("size"), processor.get("crop_size")
    if processor.get("do_center_crop", False):
        found["image.resize"] = _sides(size, path, "size")
        found["image.size"] = _sides(crop, path, "crop_size")
    return found


def _sides(size: Any, path: Path, name: str) -> str:
    """``"256"`` for the shorter side, ``"256,320"`` for height and width."""
    sides: list[Any] = [size] if isinstance(size, int) else []
    if isinstance(size, dict):
        keys = ("shortest_edge",) if "shortest_edge" in size else ("height", "width")
        sides = [size.get(key) for key in keys]
    if not sides or not all(type(side) is int and side > 0 for side in sides):
        raise IntegrityError(f"'{path}': {name} is {size!r}, not a side; copy the folder again")
    return ",".join(map(str, sides))


def image_parameters(processor: Mapping[str, Any], channels: int, path: Path) -> dict[str, str]:
    """``preprocessor_config.json`` as parameters of ``config.pbtxt``.

    ``image.mean`` and ``image.std`` apply to pixels as fractions of full scale, one number per
    channel, joined by commas; a ``rescale_factor`` other than 1/255 is taken into account.
    ``image.resize`` and ``image.size`` describe a centre crop.

    Raises:
        IntegrityError: they are not numbers, one for each channel, or a deviation is not positive.
    """
    rescale = processor.get("rescale_factor", 1 / 255) if processor.get("do_rescale", True) else 1
    normalize = processor.get("do_normalize", True)
    found = {"image.layout": "CHW", **_geometry(processor, path)}
    for name, neutral, usual in (("mean", 0, 0.5), ("std", 1, 0.5)):
        value = processor.get(f"image_{name}", usual) if normalize else neutral
        values = value if isinstance(value, list) else [value]
        try:
            scaled = [float(v) / (float(rescale) * 255) for v in values]
            if len(scaled) not in (1, channels) or not all(map(math.isfinite, scaled)):
                raise ValueError(f"not {channels} numbers")
            if name == "std" and min(scaled) <= 0:
                raise ValueError("not positive")
        except (TypeError, ValueError, ZeroDivisionError) as error:
            raise IntegrityError(f"'{path}': image_{name} is {value}: {error}") from error
        found[f"image.{name}"] = ",".join(f"{v:.8g}" for v in scaled)
    return found
