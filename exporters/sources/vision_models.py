"""Models of ``timm`` and ``torchvision`` by name: ``--model timm:NAME``, ``torchvision:NAME``.

The libraries build the architecture; the weights are a file's, or those of a folder that timm wrote
(``config.json`` with ``architecture``). Nothing is fetched from a network.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from modelport.exporters.loaded_model import Origin, Source
from modelport.exporters.model_spec import Decision, ModelSpec
from modelport.exporters.runtime import torchvision_operators
from modelport.exporters.runtime.output_capture import quiet
from modelport.exporters.sources import SourceRequest, checkpoint
from modelport.exporters.sources.checkpoint import Checkpoint
from modelport.exporters.sources.huggingface.folder import CONFIG, open_model, read_json
from modelport.exporters.sources.pytorch import source
from modelport.exporters.sources.torch_eager import (
    datatype_of,
    inference_mode,
    named_tensors,
    widen_weights,
)
from modelport.gateway.errors import IntegrityError, Unsupported, UsageError, first_line, suggestion
from modelport.gateway.extras import missing_extra
from modelport.gateway.types import Datatype, ModelSignature, TensorSpec

#: Both libraries' classes of ImageNet.
CLASSES = 1000
IMAGE, LOGITS, FEATURES = "pixel_values", "logits", "features"
UNNAMED = "output"  # of a module that returns one tensor
AUXILIARY = "aux_classifier."
IMAGE_SIZE = "image_size"
BATCH = 2


@dataclass(frozen=True, slots=True)
class VisionModel:
    """An architecture and its preprocessing.

    Attributes:
        build: the module, from its number of classes (None for none) and hyper-parameters.
        size: channels, height and width of an image.
        parameters: the entries ``image.*`` of ``config.pbtxt``.
        auxiliary: it may have a second classifier, which only training needs.
    """

    name: str
    build: Callable[..., nn.Module]
    size: tuple[int, int, int]
    parameters: Mapping[str, str]
    auxiliary: bool = False


def load(request: SourceRequest) -> Source:
    """Load the model that ``request.model`` names.

    Raises:
        UsageError: there is no such model, or the weights do not fit it.
        Unsupported: the library is not installed, or the model takes no images.
        IntegrityError: the weights are damaged or want to run code.
    """
    assert request.model is not None
    library, _, name = request.model.partition(":")
    if request.inputs or request.output_names or request.masks:
        raise UsageError(
            f"--model '{request.model}' declares its own signature; omit --input, --output-name "
            "and --mask"
        )
    torchvision_operators.declare()
    read, config = _read(request.checkpoint)
    found = (_timm if library == "timm" else _torchvision)(name, config)
    kwargs = dict(request.model_kwargs)
    found = _resized(found, kwargs.pop(IMAGE_SIZE, None))
    size = found.size
    module = _fitting(found, read, kwargs)
    checkpoint.load_into(module, read)
    widen_weights(module)
    signature = _signature(request, module, size)
    names = [output.name for output in signature.outputs]
    spec = ModelSpec(
        name=found.name.replace(":", "-"),
        signature=lambda *_: signature,
        atol=1e-4,
        decision=Decision(LOGITS) if LOGITS in names else None,
        parameters=found.parameters if size[0] in (1, 3) else {},
    )
    labels = _labels(config, signature)
    origin = Origin(read.filename, read.sha256)
    return source(module, spec, signature, (origin,), request.model_kwargs, labels)


def _read(path: Path) -> tuple[Checkpoint, Mapping[str, Any]]:
    """The weights, and the configuration of a folder that timm wrote."""
    if not path.is_dir():
        return checkpoint.read(path), {}
    folder = open_model(path)
    origin = folder.origin
    return Checkpoint(origin.name, origin.sha256, folder.state(), {}), read_json(path / CONFIG)


def _fitting(found: VisionModel, read: Checkpoint, kwargs: dict[str, Any]) -> nn.Module:
    """The module with as many classes as the weights have, unless ``num_classes`` says more."""
    if found.auxiliary and any(key.startswith(AUXILIARY) for key in read.state):
        kwargs = {"aux_loss": True, **kwargs}
    classes = kwargs.pop("num_classes", None)
    try:
        with quiet():
            if classes is not None:
                return found.build(classes, **kwargs)
            module = found.build(CLASSES, **kwargs)
            expected = {key: tuple(value.shape) for key, value in module.state_dict().items()}
            others = {
                read.shapes[key][0]
                for key, shape in expected.items()
                if key in read.shapes
                and shape[:1] == (CLASSES,)
                and read.shapes[key][:1] != (CLASSES,)
                and read.shapes[key][1:] == shape[1:]
            }
            heads = {key for key, shape in expected.items() if shape[:1] == (CLASSES,)}
            if len(others) == 1:
                return found.build(others.pop(), **kwargs)
            if heads and not heads & set(read.shapes):
                return found.build(0, **kwargs)
            return module
    except Exception as error:
        raise UsageError(
            f"--model '{found.name}' cannot be built with {kwargs or 'no arguments'}: "
            f"{first_line(error)}; correct --model-kwargs"
        ) from error


def _signature(
    request: SourceRequest, module: nn.Module, size: tuple[int, int, int]
) -> ModelSignature:
    """The outputs are found by running the module."""
    try:
        with quiet(), inference_mode(module):
            outputs = named_tensors(module(torch.zeros(BATCH, *size)))
    except Exception as error:
        raise Unsupported(
            f"--model '{request.model}' does not run on images of {list(size)} "
            f"({first_line(error)}); give their side with --model-kwargs "
            f"'{{\"{IMAGE_SIZE}\": N}}', or a factory with --input"
        ) from error
    image = TensorSpec(IMAGE, Datatype.FP32, size)
    specs = tuple(
        TensorSpec(
            (LOGITS if value.ndim == 2 else FEATURES) if name == UNNAMED else name,
            datatype_of(name, value),
            tuple(value.shape[1:]),
        )
        for name, value in outputs.items()
    )
    return ModelSignature((image,), specs, request.max_batch_size)


def _resized(found: VisionModel, wanted: Any) -> VisionModel:
    """``found`` at another size, to which whole images are resized."""
    sides = wanted if isinstance(wanted, list) else [wanted, wanted]
    if wanted is None:
        return found
    if len(sides) != 2 or not all(type(side) is int and 0 < side <= 1 << 14 for side in sides):
        raise UsageError(f"--model-kwargs: {IMAGE_SIZE} is {wanted!r}; give a side, or two")
    kept = {k: v for k, v in found.parameters.items() if k not in ("image.resize", "image.size")}
    return replace(found, size=(found.size[0], sides[0], sides[1]), parameters=kept)


def _labels(config: Mapping[str, Any], signature: ModelSignature) -> tuple[str, ...]:
    named = config.get("label_names")
    if not isinstance(named, list) or (len(named),) != signature.outputs[0].dims:
        return ()
    return tuple(" ".join(str(name).split()) for name in named)


def _check_known(model: str, name: str, known: list[str]) -> None:
    if name not in known:
        raise UsageError(
            f"--model '{model}' is not known to the library ({len(known)} models); "
            f"{suggestion(name, known)}".removesuffix("; ")
        )


def _timm(name: str, config: Mapping[str, Any]) -> VisionModel:
    try:
        with quiet():
            import timm
    except ImportError as error:
        raise missing_extra(error) from error
    name = name or str(config.get("architecture", ""))
    # A name with another prefix would be looked up elsewhere.
    _check_known(f"timm:{name}", name.partition(".")[0], timm.list_models())

    def build(classes: int, **kwargs: Any) -> nn.Module:
        module: nn.Module = timm.create_model(
            name.partition(".")[0], pretrained=False, num_classes=classes, **kwargs
        )
        return module

    given = config.get("pretrained_cfg")
    with quiet():
        cfg = dict(timm.get_pretrained_cfg(name, allow_unregistered=True).to_dict())
    cfg |= given if isinstance(given, dict) else {}
    size = cfg.get("input_size", (3, 224, 224))
    if not isinstance(size, list | tuple) or [type(side) for side in size] != [int] * 3:
        raise IntegrityError(f"input_size of {CONFIG} is {size!r}, not three sizes")
    return VisionModel(
        f"timm:{name}", build, (size[0], size[1], size[2]), _image(cfg, (size[1], size[2]))
    )


def _image(cfg: Mapping[str, Any], sides: tuple[int, int]) -> dict[str, str]:
    """timm's preprocessing for evaluation: resize the shorter side, crop the centre."""
    try:
        crop = float(cfg.get("crop_pct") or 1)
        mean, std = ([float(v) for v in cfg[name]] for name in ("mean", "std"))
        if not 0 < crop <= 1 or len(mean) != len(std) or min(std) <= 0:
            raise ValueError(crop)
    except (KeyError, TypeError, ValueError):
        return {}
    found = {
        "image.layout": "CHW",
        "image.mean": ",".join(f"{v:.8g}" for v in mean),
        "image.std": ",".join(f"{v:.8g}" for v in std),
        "image.interpolation": str(cfg.get("interpolation") or "bicubic"),
    }
    if cfg.get("crop_mode", "center") == "center":
        found["image.resize"] = str(math.floor(min(sides) / crop))
        found["image.size"] = f"{sides[0]},{sides[1]}"
    return found


def _torchvision(name: str, _config: Mapping[str, Any]) -> VisionModel:
    try:
        with quiet():
            from torchvision import models
    except ImportError as error:
        raise missing_extra(error) from error
    known = [*models.list_models(models), *models.list_models(models.segmentation)]
    _check_known(f"torchvision:{name}", name, known)

    segments = name in models.list_models(models.segmentation)

    def build(classes: int, **kwargs: Any) -> nn.Module:
        # None of it may download: neither these weights nor a backbone's.
        if segments:
            kwargs = {"weights_backbone": None, **kwargs}
        module: nn.Module = models.get_model(name, weights=None, num_classes=classes, **kwargs)
        return module

    preset = models.get_model_weights(name).DEFAULT.transforms()
    side = getattr(preset, "crop_size", None) or preset.resize_size
    resize = preset.resize_size
    parameters = {
        "image.layout": "CHW",
        "image.mean": ",".join(f"{v:.8g}" for v in preset.mean),
        "image.std": ",".join(f"{v:.8g}" for v in preset.std),
        "image.interpolation": preset.interpolation.value,
    }
    if hasattr(preset, "crop_size"):
        parameters |= {"image.resize": str(resize[0]), "image.size": f"{side[0]},{side[0]}"}
    size = (3, side[0], side[0])
    return VisionModel(f"torchvision:{name}", build, size, parameters, segments)
