"""From what TorchServe was told to Triton's words, and what has none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from modelport.exporters.migration.archive import Archive
from modelport.exporters.migration.handlers import Code, default_handler, handler_file
from modelport.exporters.migration.report import Report, State
from modelport.exporters.migration.settings import Serving
from modelport.gateway.repository.config import ModelConfig
from modelport.gateway.types import ModelSignature

LABELS = "labels.txt"
INDEX_TO_NAME = "index_to_name.json"
MAX_LABELS = 1_000_000

#: TorchServe's, where a batch size is given and no delay.
DEFAULT_DELAY_MILLISECONDS = 100

#: What ``ts/torch_handler/image_classifier.py`` does to a picture.
IMAGE_PARAMETERS: Mapping[str, str] = {
    "image.layout": "CHW",
    "image.resize": "256",
    "image.size": "224",
    "image.mean": "0.485,0.456,0.406",
    "image.std": "0.229,0.224,0.225",
}
SIZES = ("image.resize", "image.size")
#: Five labels with their probabilities, as that handler answers, of scores as it takes them.
CLASSES, LOGITS = "classification.", "logits"

PICTURES = ("image_classifier", "image_segmenter")
#: What becomes of what TorchServe's own handlers do around the model.
AROUND: Mapping[str, tuple[State, str]] = {
    "image_classifier": (State.CARRIED, "a picture is answered with its five best labels"),
    "image_segmenter": (
        State.PERSON,
        "it takes the best class of each pixel after the model: clients do that now",
    ),
    "base_handler": (
        State.CARRIED,
        "lists of numbers are answered with lists of numbers, as by its JSON envelope",
    ),
    "text_classifier": (
        State.PERSON,
        "it turns text into tokens before the model and scores into labels after it: clients send "
        "tokens, or the model does that itself",
    ),
    "object_detector": (
        State.PERSON,
        "it leaves out boxes of low score after the model: clients do that now",
    ),
}


def add_serving(config: ModelConfig, serving: Serving, report: Report) -> None:
    """Batching and instances into ``config``; every setting into the report."""
    if serving.batch_size is not None:
        largest = min(serving.batch_size, config.max_batch_size)
        if largest > 1:
            milliseconds = serving.max_batch_delay
            delay = DEFAULT_DELAY_MILLISECONDS if milliseconds is None else milliseconds
            config.dynamic_batching.ClearField("preferred_batch_size")
            config.dynamic_batching.preferred_batch_size.append(largest)
            config.dynamic_batching.max_queue_delay_microseconds = delay * 1000
            report.add(
                f"batchSize {serving.batch_size}, maxBatchDelay {delay}",
                State.CARRIED,
                f"preferred_batch_size {largest}, max_queue_delay_microseconds {delay * 1000}",
            )
        elif serving.batch_size > 1:
            report.add(
                f"batchSize {serving.batch_size}", State.NOTED, "the model takes no larger batches"
            )
        else:
            report.add("batchSize 1", State.CARRIED, "no dynamic batching")
    if serving.min_workers is not None:
        count = max(1, serving.min_workers)
        del config.instance_group[1:]
        group = config.instance_group[0] if config.instance_group else config.instance_group.add()
        group.count = count
        report.add(
            f"minWorkers {serving.min_workers}", State.CARRIED, f"count {count} of instance_group"
        )
    if serving.max_workers not in (None, serving.min_workers):
        report.add(
            f"maxWorkers {serving.max_workers}", State.NOTED, "instances do not grow under load"
        )
    if serving.response_timeout is not None:
        report.add(
            f"responseTimeout {serving.response_timeout} s",
            State.NOTED,
            "each request brings its own deadline; no version is restarted for a slow one",
        )
    for name in serving.others:
        report.add(f"setting '{name}'", State.NOTED, "it has no counterpart here")


def labels(archive: Archive, report: Report) -> list[str]:
    """The labels by index in ``index_to_name.json``; none where there are none that can be used.

    Its two forms are those of ``load_label_mapping`` in ``ts/utils/util.py``.
    """
    if INDEX_TO_NAME not in archive.files:
        return []
    document = archive.json(INDEX_TO_NAME)
    named = document.get("object_type_names") if isinstance(document, dict) else None
    if isinstance(named, list):
        document = dict(enumerate(named))
    try:
        found = {int(index): _label(name) for index, name in document.items()}
    except (ValueError, TypeError, AttributeError, LookupError):
        found = {}
    if not found or min(found) < 0 or max(found) >= min(MAX_LABELS, 10 * len(found) + 10):
        report.add(INDEX_TO_NAME, State.PERSON, f"it does not map indices to names: write {LABELS}")
        return []
    return [found.get(index, str(index)) for index in range(max(found) + 1)]


def _label(name: Any) -> str:
    if isinstance(name, list):
        name = name[-1]
    if not isinstance(name, str):
        raise TypeError("a label is a string")
    return " ".join(name.split())


def add_labels(config: ModelConfig, count: int, report: Report) -> bool:
    """Name the label file at the output that it belongs to; whether there is one."""
    if len(config.output) != 1:
        report.add(
            INDEX_TO_NAME,
            State.PERSON,
            f"the model has {len(config.output)} outputs: write {LABELS} and name it at the "
            "right one as label_filename",
        )
        return False
    config.output[0].label_filename = LABELS
    report.add(INDEX_TO_NAME, State.CARRIED, f"{count} labels in {LABELS}")
    return True


def add_handler(
    config: ModelConfig, signature: ModelSignature, archive: Archive, report: Report
) -> None:
    """What the handler did around the model: parameters where the gateway does it too."""
    handler = default_handler(archive)
    if handler in PICTURES:
        _add_picture(config, signature, report)
    if handler == "image_classifier" and len(config.output) == 1:
        config.parameters[CLASSES + config.output[0].name].string_value = LOGITS
    if handler:
        unknown = (State.PERSON, "what it does around the model is not done")
        report.add(f"handler '{handler}'", *AROUND.get(handler, unknown))
    else:
        _add_own_handler(archive, report)
    _add_files(archive, report)


def _add_picture(config: ModelConfig, signature: ModelSignature, report: Report) -> None:
    sides = signature.inputs[0].wire_dims[1:] if len(signature.inputs) == 1 else ()
    fits = sides in ((224, 224), (-1, -1))
    for key, value in IMAGE_PARAMETERS.items():
        if fits or key not in SIZES:
            config.parameters[key].string_value = value
    if fits:
        report.add("preprocess", State.CARRIED, "JPEG and PNG as before: parameters image.*")
    else:
        report.add(
            "preprocess",
            State.PERSON,
            f"the handler makes pictures of 224 x 224, the input is {list(sides)}: pictures are "
            f"resized to that; set {' and '.join(SIZES)} if they should not be",
        )


def _add_own_handler(archive: Archive, report: Report) -> None:
    file = handler_file(archive)
    code = next((code for code in report.code if code.file == file), None)
    report.add(
        f"handler '{archive.manifest.handler}'", State.PERSON, f"not carried over: {_advice(code)}"
    )


def _advice(code: Code | None) -> str:
    if code is None:
        return "it is not in the archive"
    if code.problem:
        return code.problem
    methods = ", ".join(code.methods) or "no method that TorchServe calls by name"
    around = {"preprocess", "postprocess", "handle"} & set(code.methods)
    if around:
        return (
            f"it defines {methods}; do the work around the model in the client, or put it into the "
            "model and export that"
        )
    return f"it defines {methods}; check that the model alone gives what it gave"


def _add_files(archive: Archive, report: Report) -> None:
    manifest = archive.manifest
    if manifest.requirements_file:
        report.add(manifest.requirements_file, State.NOTED, "packages for the handler: not needed")
    used = {manifest.serialized_file, manifest.requirements_file, manifest.config_file}
    rest = sorted(
        file
        for file in archive.files
        if file not in used and file != INDEX_TO_NAME and not file.endswith(".py")
    )
    if rest:
        more = f" and {len(rest) - 5} more" if len(rest) > 5 else ""
        report.add(f"{', '.join(rest[:5])}{more}", State.NOTED, "files of the handler: left behind")
