"""Hugging Face models, read from folders with ``config.json`` and weights.

    ViTForImageClassification   read by this module, into ``modelport.exporters.models.vit``
    causal language models      built by ``transformers``, LoRA adapters merged by ``peft``
    every other architecture    built by ``transformers``, for the tasks of ``tasks.TASKS``
    sentence embeddings         the folders of ``sentence_transformers``

No code in a folder is run, and nothing is fetched from a network.
"""

from __future__ import annotations

from dataclasses import replace

from modelport.exporters import model_spec
from modelport.exporters.loaded_model import Source
from modelport.exporters.models.vit import VisionTransformer
from modelport.exporters.sources import SourceRequest, checkpoint, vision_models
from modelport.exporters.sources.checkpoint import Checkpoint
from modelport.exporters.sources.huggingface import (
    causal_lm,
    companions,
    pretrained,
    sentence,
    tasks,
    text_interface,
    transformer,
    vit,
)
from modelport.exporters.sources.huggingface.folder import (
    CONFIG,
    PREPROCESSOR,
    Folder,
    open_model,
    read_json,
)
from modelport.exporters.sources.pytorch import source
from modelport.gateway.errors import UsageError


def load(request: SourceRequest) -> Source:
    """Load the model in the folder ``request.checkpoint``; its ``config.json`` names the type.

    Its tokenizer and preprocessor files are the source's companions, and so is its text interface.

    Raises:
        UsageError: the folder lacks something, or does not fit ``request.model`` or its task.
        Unsupported: models of this type cannot be exported, or a library is missing.
        IntegrityError: a file is damaged, or wants to run code.
    """
    tasks.check(request.task)
    path = place = request.checkpoint
    embeds = request.model is None and request.task in sentence.OUTPUTS
    if embeds and sentence.is_sentence_model(path):
        _check_undeclared(request)
        found, place = sentence.load(path, request)
    else:
        found = _load(request)
    found = replace(found, companions=companions.read(place, path))
    return text_interface.describe(found, request.long_texts)


def _load(request: SourceRequest) -> Source:
    if request.model is None and request.task == tasks.SENTENCE_SIMILARITY:
        raise UsageError(
            f"--task {request.task} needs the pooling of a sentence_transformers folder "
            f"({sentence.MODULES}), which '{request.checkpoint}' lacks; use --task "
            "feature-extraction"
        )
    folder = open_model(request.checkpoint)
    if "architecture" in folder.config and "model_type" not in folder.config:
        if request.model is not None or request.task not in (None, "image-classification"):
            raise UsageError(
                f"'{folder.path}' holds an image model of timm; omit --model and --task, or give "
                "--model timm:NAME"
            )
        return vision_models.load(replace(request, model=f"timm:{folder.config['architecture']}"))
    _check_undeclared(request)
    if request.model not in (None, "vit", "causal-lm"):
        raise UsageError(
            f"--model '{request.model}' cannot be read from a Hugging Face folder such as "
            f"'{folder.path}'; use vit or causal-lm, or give a checkpoint file"
        )
    if request.model is not None and request.task is not None:
        raise UsageError(
            "--model and --task are mutually exclusive for a Hugging Face folder; give one"
        )
    if request.model == "vit" or (request.model is None and _is_plain_vit(folder, request)):
        if request.lora is not None:
            raise UsageError(
                "--lora is for --model causal-lm; omit it, or merge the adapters first"
            )
        return _load_vit(folder, request)
    if request.model == "causal-lm":
        return causal_lm.load(folder, request)
    pretrained.check_known(folder)
    choice = tasks.choose(folder, request.task)
    if choice.task.mappings == tasks.CAUSAL:
        found = causal_lm.load(folder, request, choice.task.name == tasks.WITH_PAST)
        name = transformer.model_name(folder.path, found.spec.name)
        return replace(found, spec=replace(found.spec, name=name))
    return transformer.load(folder, request, choice)


def _check_undeclared(request: SourceRequest) -> None:
    if request.inputs or request.output_names or request.masks:
        raise UsageError(
            f"'{request.checkpoint}' declares its own signature; omit --input, --output-name and "
            "--mask"
        )


def _is_plain_vit(folder: Folder, request: SourceRequest) -> bool:
    """Whether the folder is an image classifier that needs no library to be read."""
    kind, architecture = folder.config.get("model_type"), tasks.architecture_of(folder)
    return request.task is None and (kind, architecture) == ("vit", vit.ARCHITECTURE)


def _load_vit(folder: Folder, request: SourceRequest) -> Source:
    config = folder.config
    declared = vit.kwargs(config, folder.path)
    state = vit.rename(folder.state(), bool(config.get("qkv_bias", True)))
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
        parameters |= vit.image_parameters(read_json(path), kwargs["in_channels"], path)
    found = replace(found, parameters=parameters)
    labels = vit.labels(config, kwargs["num_classes"], folder.path)
    signature = found.signature(module, request.max_batch_size)
    return source(module, found, signature, (origin,), kwargs, labels)
