"""Export tasks, by the names of Hugging Face Optimum, and the classes of ``transformers`` for them.

The first architecture in ``config.json`` determines the default task: the first row whose classes
include it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from modelport.exporters.sources.huggingface.folder import Folder
from modelport.gateway.errors import Unsupported, UsageError, suggestion


class Part(Enum):
    """The part of an architecture that a task exports."""

    WHOLE = "whole"
    ENCODER = "encoder"
    DECODER = "decoder"
    TEXT = "text tower"
    IMAGE = "image tower"


@dataclass(frozen=True, slots=True)
class ExportTask:
    """One row of the table.

    Attributes:
        mappings: of model types to classes, in ``transformers.models.auto.modeling_auto``.
        classes: of model types that no mapping has.
        outputs: names in transformers' results; the artifact has those that a model returns.
        labelled: the last axis of ``logits`` is the classes of ``id2label``.
        decides: the largest along the last axis of the first output is the model's answer.
        generates: the texts of a decoder are an input of their own.
    """

    name: str
    mappings: tuple[str, ...]
    outputs: tuple[str, ...] = ("logits",)
    classes: Mapping[str, str] = field(default_factory=dict)
    labelled: bool = False
    decides: bool = False
    generates: bool = False
    part: Part = Part.WHOLE


#: Language models, which have a reader of their own.
CAUSAL = ("CAUSAL_LM",)
WITH_PAST = "text-generation-with-past"
#: The models without a head.
_BASE = ""
_SEQ2SEQ = ("SEQ_TO_SEQ_CAUSAL_LM",)
_DETECTION = ("logits", "pred_boxes")
_SEGMENTATION = (*_DETECTION, "pred_masks", "class_queries_logits", "masks_queries_logits")
_PAIRS = ("logits_per_image", "logits_per_text", "text_embeds", "image_embeds")
_FEATURES = ("text_embeds", "image_embeds", "last_hidden_state", "pooler_output")

TASKS: tuple[ExportTask, ...] = (
    ExportTask("text-classification", ("SEQUENCE_CLASSIFICATION",), labelled=True, decides=True),
    ExportTask("token-classification", ("TOKEN_CLASSIFICATION",), labelled=True, decides=True),
    ExportTask("question-answering", ("QUESTION_ANSWERING",), ("start_logits", "end_logits")),
    ExportTask("text-generation", CAUSAL, decides=True),
    ExportTask(WITH_PAST, CAUSAL, decides=True),
    ExportTask(
        "text2text-generation",
        _SEQ2SEQ,
        ("logits", "encoder_last_hidden_state"),
        decides=True,
        generates=True,
    ),
    ExportTask("text2text-generation-encoder", _SEQ2SEQ, ("last_hidden_state",), part=Part.ENCODER),
    ExportTask("text2text-generation-decoder", _SEQ2SEQ, decides=True, part=Part.DECODER),
    ExportTask("fill-mask", ("MASKED_LM",), decides=True),
    ExportTask("image-classification", ("IMAGE_CLASSIFICATION",), labelled=True, decides=True),
    ExportTask("video-classification", ("VIDEO_CLASSIFICATION",), labelled=True, decides=True),
    ExportTask(
        "image-segmentation",
        (
            "SEMANTIC_SEGMENTATION",
            "UNIVERSAL_SEGMENTATION",
            "INSTANCE_SEGMENTATION",
            "IMAGE_SEGMENTATION",
        ),
        _SEGMENTATION,
    ),
    ExportTask("object-detection", ("OBJECT_DETECTION",), _DETECTION, decides=True),
    ExportTask("depth-estimation", ("DEPTH_ESTIMATION",), ("predicted_depth",)),
    ExportTask("image-to-image", ("IMAGE_TO_IMAGE",), ("reconstruction",)),
    ExportTask("audio-classification", ("AUDIO_CLASSIFICATION",), labelled=True, decides=True),
    ExportTask("audio-frame-classification", ("AUDIO_FRAME_CLASSIFICATION",)),
    ExportTask("audio-xvector", ("AUDIO_XVECTOR",), ("logits", "embeddings")),
    ExportTask("automatic-speech-recognition", ("CTC",), decides=True),
    ExportTask(
        "automatic-speech-recognition",
        ("SPEECH_SEQ_2_SEQ",),
        ("last_hidden_state",),
        part=Part.ENCODER,
    ),
    ExportTask("zero-shot-image-classification", ("ZERO_SHOT_IMAGE_CLASSIFICATION",), _PAIRS),
    ExportTask(
        "time-series-forecasting",
        (),
        ("prediction_outputs",),
        {
            "patchtst": "PatchTSTForPrediction",
            "patchtsmixer": "PatchTSMixerForPrediction",
        },
    ),
    ExportTask(
        "time-series-classification", ("TIME_SERIES_CLASSIFICATION",), ("prediction_logits",)
    ),
    ExportTask("time-series-regression", ("TIME_SERIES_REGRESSION",), ("regression_outputs",)),
    ExportTask("feature-extraction", (_BASE, "TEXT_ENCODING"), _FEATURES),
    ExportTask("image-feature-extraction", (_BASE,), _FEATURES, part=Part.IMAGE),
)

#: Further names of Optimum and of transformers' pipelines.
ALIASES: Mapping[str, str] = {
    "semantic-segmentation": "image-segmentation",
    "sequence-classification": "text-classification",
    "summarization": "text2text-generation",
    "time-series": "time-series-forecasting",
    "translation": "text2text-generation",
}

#: Of folders with ``modules.json``, which ``sentence_transformers`` reads.
SENTENCE_SIMILARITY = "sentence-similarity"


@dataclass(frozen=True, slots=True)
class Choice:
    """A task, and the name of the class that does it for a folder."""

    task: ExportTask
    class_name: str


def names() -> tuple[str, ...]:
    """All names for ``--task``."""
    known = dict.fromkeys(task.name for task in TASKS)
    return (*known, SENTENCE_SIMILARITY, *ALIASES)


def check(name: str | None) -> None:
    """Raise ``UsageError`` if there is no task of this name."""
    if name is not None and name not in names():
        raise UsageError(
            f"--task '{name}' is not a task; use {', '.join(names())}; "
            f"{suggestion(name, names())}".removesuffix("; ")
        )


def choose(folder: Folder, wanted: str | None) -> Choice:
    """The task ``wanted``, or that of the folder's architecture, and the class for it.

    Raises:
        UsageError: the configuration determines no task, or the task does not fit the model.
        Unsupported: no task fits this type of model.
    """
    check(wanted)
    kind, architecture = str(folder.config.get("model_type")), architecture_of(folder)
    name = ALIASES.get(wanted or "", wanted)
    candidates = list(_candidates(kind, architecture))
    if not candidates:
        raise Unsupported(
            f"'{folder.path}' holds a {architecture or kind}, which no --task exports; write a "
            "factory, and give it with --model and the weights"
        )
    found = [c for c in candidates if name in (None, c.task.name)]
    own = [c for c in found if c.class_name == architecture]
    if own or (name and found):
        return (own or found)[0]
    fitting = fitting_names(folder)
    if name is None:
        holds = f"holds a {architecture}" if architecture else "names no architecture"
        raise UsageError(f"'{folder.path}' {holds}; add --task {' or '.join(fitting)}")
    raise UsageError(
        f"--task '{wanted}' does not fit '{folder.path}', which holds a {architecture or kind}; "
        f"use --task {' or '.join(fitting)}"
    )


def architecture_of(folder: Folder) -> str | None:
    """The name of the class that the folder was saved from."""
    named = folder.config.get("architectures")
    return str(named[0]) if isinstance(named, list) and named else None


def fitting_names(folder: Folder) -> list[str]:
    """The tasks for which the folder has weights, as its architecture says; all without one."""
    kind, architecture = str(folder.config.get("model_type")), architecture_of(folder)
    every = list(_candidates(kind, architecture))
    own = [
        c.task.name
        for c in every
        if c.class_name == architecture or c.task.mappings[:1] == (_BASE,)
    ]
    return list(dict.fromkeys(own if architecture else (c.task.name for c in every)))


def _candidates(kind: str, architecture: str | None) -> Iterator[Choice]:
    """Every task for models of this type with its class, in the order of the table."""
    import transformers
    from transformers.models.auto import modeling_auto

    for task in TASKS:
        if task.part is Part.IMAGE and not is_dual(kind):
            continue
        classes = [task.classes[kind]] if kind in task.classes else []
        for mapping in task.mappings:
            attribute = f"MODEL_FOR_{mapping}_MAPPING_NAMES" if mapping else "MODEL_MAPPING_NAMES"
            found: Any = getattr(modeling_auto, attribute, {}).get(kind)
            classes += [found] if isinstance(found, str) else list(found or ())
        if _BASE in task.mappings and _is_base(architecture, kind, transformers):
            classes.insert(0, str(architecture))
        for name in dict.fromkeys(classes):
            if name != architecture and architecture in classes:
                continue
            yield Choice(task, name)


def _is_base(architecture: str | None, kind: str, library: Any) -> bool:
    """Whether ``architecture`` is a model of this type without a head."""
    if architecture is None or not architecture.endswith(("Model", "WithProjection")):
        return False
    found = getattr(library, architecture, None)
    return getattr(getattr(found, "config_class", None), "model_type", None) == kind


def is_dual(kind: str) -> bool:
    """Whether models of this type have a tower for texts and one for images."""
    from transformers.models.auto import modeling_auto

    mapping = modeling_auto.MODEL_FOR_ZERO_SHOT_IMAGE_CLASSIFICATION_MAPPING_NAMES
    return kind in mapping
