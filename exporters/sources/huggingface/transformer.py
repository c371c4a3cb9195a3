"""Folders of any architecture of ``transformers``, for the tasks of Optimum."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from modelport.exporters.loaded_model import Origin, Source
from modelport.exporters.model_spec import AttentionMask, Decision, ModelSpec
from modelport.exporters.sources import SourceRequest
from modelport.exporters.sources.huggingface import audio, last_token, pretrained, tasks, vit
from modelport.exporters.sources.huggingface.folder import PREPROCESSOR, Folder, read_json
from modelport.exporters.sources.huggingface.inputs import inputs_for
from modelport.exporters.sources.huggingface.model_facts import TaskInputs
from modelport.exporters.sources.huggingface.pretrained import Pretrained
from modelport.exporters.sources.huggingface.task_model import SignatureFinder, TaskModel
from modelport.exporters.sources.huggingface.tasks import Choice, ExportTask, Part
from modelport.exporters.sources.pytorch import check_batch, source
from modelport.gateway.errors import IntegrityError, ModelportError, Unsupported, UsageError
from modelport.gateway.types import ModelSignature, TensorSpec

Maker = Callable[[Any, Part, Sequence[str], Sequence[str]], TaskModel]

#: Optimum's tolerance for hidden states, whose values are larger than probabilities.
ATOL = 1e-4


def load(
    folder: Folder,
    request: SourceRequest,
    choice: Choice,
    make: Maker = TaskModel,
    origin: Origin | None = None,
) -> Source:
    """Load the model in ``folder`` for the chosen task.

    Args:
        make: wraps the model, with the part to run, its inputs and its outputs.
        origin: None is the folder's own.

    Raises:
        UsageError: weights, hyper-parameters and configuration do not fit together.
        Unsupported: ``transformers`` cannot build or run the model.
        IntegrityError: a file is damaged, wants to run code, or brings its own.
    """
    if request.lora is not None:
        raise UsageError("--lora is for --task text-generation; omit it, or merge the adapters")
    if "auto_map" in folder.config:
        raise IntegrityError(
            f"'{folder.path}' brings code of its own (auto_map in config.json), which is not run; "
            f"remove auto_map if transformers' {choice.class_name} computes the same"
        )
    import transformers

    config = pretrained.configuration(folder)
    found = pretrained.load(folder, config, getattr(transformers, choice.class_name))
    _check_unexpected(folder, found)
    task = _part_of(choice.task, found.model)
    module, inputs, signature = _signature(folder, found, task, request, make)
    module.task = task.name
    if not inputs.pairs:
        check_batch(replace(signature, max_batch_size=1), request)
    labels = _labels(folder, task, signature)
    spec = ModelSpec(
        name=model_name(folder.path, str(folder.config.get("model_type"))),
        signature=lambda *_: signature,
        atol=ATOL,
        decision=_decision(task, config, signature),
        parameters=_image_parameters(folder, signature) | audio.parameters(folder, signature),
        masks=_masks(inputs.masks, signature),
        waveforms=inputs.waveforms,
    )
    loaded = source(
        module, spec, signature, (origin or folder.origin,), request.model_kwargs, labels
    )
    return replace(loaded, notices=_left_out(found.model, task, inputs))


def model_name(path: Path, otherwise: str) -> str:
    """The folder's name as a model's name."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", path.resolve().name).lstrip("._-")[:128] or otherwise


def _part_of(task: ExportTask, model: Any) -> ExportTask:
    """Features of a model with several parts are those of its text tower, or its encoder."""
    if task.name not in ("feature-extraction", tasks.SENTENCE_SIMILARITY):
        return task
    if hasattr(model, "get_text_features") and hasattr(model, "get_image_features"):
        return replace(task, part=Part.TEXT)
    if getattr(model.config, "is_encoder_decoder", False) and (
        "EncoderModel" not in type(model).__name__
    ):
        return replace(task, part=Part.ENCODER)
    return task


def _left_out(model: Any, task: ExportTask, inputs: TaskInputs) -> tuple[str, ...]:
    """The notice that a model of texts and images takes texts alone."""
    names = {spec.name for spec in inputs.specs}
    if task.part is not Part.WHOLE or "pixel_values" in names or "input_ids" not in names:
        return ()
    if "pixel_values" not in inspect.signature(model.forward).parameters:
        return ()
    return ("images are left out: the artifact takes texts alone",)


# -- weights --------------------------------------------------------------------------------------


def _check_unexpected(folder: Folder, found: Pretrained) -> None:
    """Refuse weights of modules that the model has; those of other heads are left out."""
    modules = dict(found.model.named_modules())
    prefix = f"{found.model.base_model_prefix}."

    def contradicts(key: str) -> bool:
        for name in (key, key.removeprefix(prefix), prefix + key):
            owner = name.rpartition(".")[0]
            if owner in modules and owner:
                return True
            match = re.match(r"(.*?)\.\d++\.", name)
            if match and isinstance(modules.get(match[1]), torch.nn.ModuleList):
                return True
        return False

    pretrained.refuse_misfit(folder, unexpected=[k for k in found.unexpected if contradicts(k)])


def _signature(
    folder: Folder, found: Pretrained, task: ExportTask, request: SourceRequest, make: Maker
) -> tuple[TaskModel, TaskInputs, ModelSignature]:
    """The module, its inputs and its signature, at the first inputs that the model accepts.

    Missing weights are NaN while the model runs, so that each output tells if it needs them.
    """
    state = found.model.state_dict()
    missing = [state[key] for key in found.missing if key in state]
    for tensor in missing:
        if tensor.is_floating_point():
            tensor.fill_(torch.nan)
    reason: Exception | None = None
    avoided = getattr(found.model.config.get_text_config(), "pad_token_id", None)
    model = last_token.by_place(found.model) if task.labelled else found.model
    for inputs in inputs_for(folder, found.model, task, request.model_kwargs):
        names = [spec.name for spec in inputs.specs]
        module = make(model, task.part, names, task.outputs)
        finder = SignatureFinder(
            module, inputs, request.max_batch_size, -1 if avoided is None else avoided
        )
        try:
            signature, damaged = finder.find()
            if pretrained.attends_otherwise(found.model, finder.sample):
                signature, damaged = finder.find()
        except ModelportError:
            raise
        except Exception as error:
            reason = error
            continue
        if damaged:
            pretrained.refuse_misfit(
                folder,
                missing=found.missing,
                remedy="complete the folder, or use --task "
                + " or ".join(n for n in tasks.fitting_names(folder) if n != task.name),
            )
        for tensor in missing:
            tensor.nan_to_num_()
        return module, inputs, signature
    assert reason is not None
    raise Unsupported(
        f"'{folder.path}' cannot run as {type(found.model).__name__} for {task.name} "
        f"({pretrained.reason(reason)}); use another --task, or a factory with --model"
    )


# -- the specification ----------------------------------------------------------------------------


def _masks(masks: Sequence[AttentionMask], signature: ModelSignature) -> tuple[AttentionMask, ...]:
    """The masks with the outputs that have positions along theirs."""
    axes = {spec.name: spec.dims[-1] for spec in signature.inputs}
    return tuple(
        replace(
            mask,
            outputs=tuple(o.name for o in signature.outputs if axes[mask.input] in o.dims),
        )
        for mask in masks
    )


def _decision(task: ExportTask, config: Any, signature: ModelSignature) -> Decision | None:
    output = signature.outputs[0]
    classes = output.dims[-1]
    kind = getattr(config, "problem_type", None)
    if not task.decides or kind == "regression" or classes == 1:
        return None
    if kind == "multi_label_classification":
        return Decision(output.name, threshold=0.0)
    return Decision(output.name)


def _labels(folder: Folder, task: ExportTask, signature: ModelSignature) -> tuple[str, ...]:
    """Class names from ``id2label``; empty where the task has no classes, or placeholders."""
    output: TensorSpec = signature.outputs[0]
    count = output.dims[-1] if output.dims else None
    if not task.labelled or not isinstance(count, int):
        return ()
    return vit.labels(folder.config, count, folder.path)


def _image_parameters(folder: Folder, signature: ModelSignature) -> dict[str, str]:
    """``preprocessor_config.json`` as image parameters, for an image of one size."""
    path = folder.path / PREPROCESSOR
    images = [s for s in signature.inputs if s.name == "pixel_values" and len(s.dims) == 3]
    if not images or not path.is_file() or not all(isinstance(d, int) for d in images[0].dims):
        return {}
    return vit.image_parameters(read_json(path), int(images[0].dims[0]), path)
