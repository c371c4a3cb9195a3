"""Hugging Face models, read from folders with ``config.json`` and weights.

    ViTForImageClassification   read by this module, into ``modelport.exporters.models.vit``
    causal language models      built by ``transformers``, LoRA adapters merged by ``peft``

No code in a folder is run, and nothing is fetched from a network.
"""

from __future__ import annotations

from dataclasses import replace

from modelport.exporters import model_spec
from modelport.exporters.loaded_model import Source
from modelport.exporters.models.vit import VisionTransformer
from modelport.exporters.sources import (
    SourceRequest,
    checkpoint,
    huggingface_causal_lm,
    huggingface_vit,
)
from modelport.exporters.sources.checkpoint import Checkpoint
from modelport.exporters.sources.huggingface_folder import (
    CONFIG,
    PREPROCESSOR,
    Folder,
    open_model,
    read_json,
)
from modelport.exporters.sources.pytorch import source
from modelport.gateway.cli.errors import UsageError


def load(request: SourceRequest) -> Source:
    """Load the model in the folder ``request.checkpoint``; its ``config.json`` names the type.

    Raises:
        UsageError: the folder lacks something, or does not fit ``request.model``.
        Unsupported: models of this type cannot be exported, or a library is missing.
        IntegrityError: a file is damaged, or wants to run code.
    """
    folder = open_model(request.checkpoint)
    is_vit = folder.config.get("model_type") == "vit"
    model = request.model or ("vit" if is_vit else "causal-lm")
    if request.inputs or request.output_names or request.masks:
        raise UsageError(
            f"'{folder.path}' declares its own signature; leave --input, --output-name and --mask"
        )
    if model == "causal-lm":
        return huggingface_causal_lm.load(folder, request)
    if model != "vit":
        raise UsageError(
            f"--model '{model}' is not read from a Hugging Face folder such as '{folder.path}'; "
            "use vit or causal-lm, or give a checkpoint file"
        )
    if request.lora is not None:
        raise UsageError("--lora is for --model causal-lm; leave it, or merge the adapters first")
    return _load_vit(folder, request)


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
    module, found, kwargs = model_spec.build(
        "vit", read.shapes, {**declared, **request.model_kwargs}
    )
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
