"""Hugging Face folders: ``config.json`` beside ``model.safetensors``, shards of it, or a ``.bin``.

    ViTForImageClassification   read by this module alone, into ``modelport.exporters.models.vit``
    causal language models      built by ``transformers``, LoRA adapters merged by ``peft``

No code that lies in a folder is ever run, and nothing is looked up on a network.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from modelport.exporters import checkpoint, spec
from modelport.exporters.checkpoint import Checkpoint
from modelport.exporters.models.vit import VisionTransformer
from modelport.exporters.source import Origin, Source, digest_of
from modelport.exporters.sources import SourceRequest, huggingface_vit
from modelport.exporters.sources.pytorch import source
from modelport.gateway.cli.errors import UsageError
from modelport.gateway.errors import IntegrityError, Unsupported

CONFIG = "config.json"
PREPROCESSOR = "preprocessor_config.json"
ADAPTER_CONFIG = "adapter_config.json"

#: In the order in which ``transformers`` and ``peft`` look for them.
MODEL_WEIGHTS = ("model.safetensors", "pytorch_model.bin")
ADAPTER_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
INDEX_SUFFIX = ".index.json"


@dataclass(frozen=True, slots=True)
class Folder:
    """What a model or its adapters are read from.

    Attributes:
        config: the content of its configuration file.
        weights: the files that hold the weights, shards in order of name.
        files: everything that decides what the model computes.
    """

    path: Path
    config: Mapping[str, Any]
    weights: tuple[Path, ...]
    files: tuple[Path, ...]

    @property
    def origin(self) -> Origin:
        """The folder's name, and one digest over the names and contents of ``files``."""
        return Origin(self.path.resolve().name, digest_of(self.path, self.files))

    def state(self) -> dict[str, Tensor]:
        """All weights by key.

        Raises:
            IntegrityError: a file is damaged, or wants to run code.
        """
        state: dict[str, Tensor] = {}
        for file in self.weights:
            state.update(checkpoint.read(file).state)
        return state


def load(request: SourceRequest) -> Source:
    """The model in the folder ``request.checkpoint``; its ``config.json`` says which it is.

    Raises:
        UsageError: the folder lacks something, or does not fit ``request.model``.
        Unsupported: there is no way to export such a model, or a library is missing.
        IntegrityError: a file is damaged, or wants to run code.
    """
    folder = open_model(request.checkpoint)
    is_vit = folder.config.get("model_type") == "vit"
    model = request.model or ("vit" if is_vit else "causal-lm")
    if request.inputs or request.output_names:
        raise UsageError(
            f"'{folder.path}' declares its own signature; leave --input and --output-name"
        )
    if model == "causal-lm":
        from modelport.exporters.sources import huggingface_causal_lm

        return huggingface_causal_lm.load(folder, request)
    if model != "vit":
        raise UsageError(
            f"--model '{model}' is not read from a Hugging Face folder such as '{folder.path}'; "
            "use vit or causal-lm, or give a checkpoint file"
        )
    if request.lora is not None:
        raise UsageError("--lora is for --model causal-lm; leave it, or merge the adapters first")
    return _load_vit(folder, request)


def open_model(path: Path) -> Folder:
    """The model folder at ``path``; errors as ``load``."""
    if (path / ADAPTER_CONFIG).exists():
        raise UsageError(
            f"'{path}' holds adapters; give the model they belong to as checkpoint, and "
            f"--lora '{path}'"
        )
    config = read_json(path / CONFIG)
    if config.get("quantization_config") is not None:
        raise Unsupported(
            f"'{path}' is quantized already; export the model it was made from, and use --quantize"
        )
    weights, indexes = _weights(path, MODEL_WEIGHTS)
    extra = [file for file in (path / PREPROCESSOR,) if file.is_file()]
    return Folder(path, config, weights, (path / CONFIG, *indexes, *weights, *extra))


def open_adapters(path: Path) -> Folder:
    """The adapter folder at ``path``, in PEFT's layout; errors as ``load``."""
    if not (path / ADAPTER_CONFIG).is_file():
        raise UsageError(
            f"--lora '{path}' holds no {ADAPTER_CONFIG}; give a folder that PEFT's "
            "save_pretrained() wrote"
        )
    weights, indexes = _weights(path, ADAPTER_WEIGHTS)
    config = read_json(path / ADAPTER_CONFIG)
    return Folder(path, config, weights, (path / ADAPTER_CONFIG, *indexes, *weights))


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in ``path``.

    Raises:
        IntegrityError: there is something else in it.
        UsageError: it cannot be read.
    """
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise UsageError(f"'{path}' cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise IntegrityError(f"'{path}' is not JSON ({error}); copy the folder again") from error
    if not isinstance(content, dict):
        raise IntegrityError(f"'{path}' holds no JSON object; copy the folder again")
    return content


def _weights(folder: Path, names: tuple[str, ...]) -> tuple[tuple[Path, ...], tuple[Path, ...]]:
    """The weight files of the first name that is there, and the index that lists them."""
    for name in names:
        index = folder / f"{name}{INDEX_SUFFIX}"
        if (folder / name).is_file():
            return (folder / name,), ()
        if index.is_file():
            return _shards(index, Path(name).suffix), (index,)
    raise UsageError(
        f"'{folder}' holds no weights ({' or '.join(names)}, whole or in shards); "
        "complete the folder"
    )


def _shards(index: Path, suffix: str) -> tuple[Path, ...]:
    listed = read_json(index).get("weight_map")
    names = list(listed.values()) if isinstance(listed, dict) else []
    if not names or not all(isinstance(n, str) and n and Path(n).name == n for n in names):
        raise IntegrityError(f"'{index}' lists no files of its own folder; copy the folder again")
    shards = tuple(index.with_name(name) for name in sorted(set(names)))
    for shard in shards:
        if shard.suffix != suffix or not shard.is_file():
            raise UsageError(
                f"'{index}' lists '{shard.name}', which is not there; complete the folder"
            )
    return shards


def _load_vit(folder: Folder, request: SourceRequest) -> Source:
    config = folder.config
    declared = huggingface_vit.kwargs(config, folder.path)
    state = huggingface_vit.rename(folder.state(), bool(config.get("qkv_bias", True)))
    origin = folder.origin
    read = Checkpoint(origin.name, origin.sha256, state, declared)
    infer = VisionTransformer.modelport_spec.infer_kwargs
    assert infer is not None
    for key, value in infer(read.shapes, declared).items():
        if declared.setdefault(key, value) != value:
            raise UsageError(
                f"'{folder.path / CONFIG}' and the weights disagree on {key}: {declared[key]} and "
                f"{value}; copy the folder again"
            )
    module, found, kwargs = spec.build("vit", read.shapes, {**declared, **request.model_kwargs})
    assert found is not None
    checkpoint.load_into(module, read)
    parameters = dict(found.parameters)
    if (folder.path / PREPROCESSOR).is_file():
        path = folder.path / PREPROCESSOR
        parameters |= huggingface_vit.image_parameters(read_json(path), kwargs["in_channels"], path)
    found = replace(found, parameters=parameters)
    labels = huggingface_vit.labels(config, kwargs["num_classes"], folder.path)
    signature = found.signature(module, request.max_batch_size)
    return source(module, found, signature, (origin,), kwargs, labels)
