"""Mapping of TorchServe's settings to a Triton configuration, with a report of what has none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from modelport.exporters.migration.archive import TorchServeArchive
from modelport.exporters.migration.handlers import default_handler, handler_file
from modelport.exporters.migration.report import MigrationReport, MigrationState
from modelport.exporters.migration.torchserve_settings import Serving
from modelport.gateway.repository.config import ModelConfig
from modelport.gateway.types import ModelSignature

LABELS = "labels.txt"
INDEX_TO_NAME = "index_to_name.json"
MAX_LABELS = 1_000_000

#: TorchServe's delay if a batch size is given without one.
DEFAULT_DELAY_MILLISECONDS = 100

#: Preprocessing in ``ts/torch_handler/image_classifier.py``.
IMAGE_PARAMETERS: Mapping[str, str] = {
    "image.layout": "CHW",
    "image.resize": "256",
    "image.size": "224",
    "image.mean": "0.485,0.456,0.406",
    "image.std": "0.229,0.224,0.225",
}
SIZES = ("image.resize", "image.size")
#: That handler answers five labels with probabilities, computed from scores.
CLASSES, LOGITS = "classification.", "logits"

IMAGE_HANDLERS = ("image_classifier", "image_segmenter")
#: The fate of what TorchServe's own handlers do around the model.
AROUND: Mapping[str, tuple[MigrationState, str]] = {
    "image_classifier": (MigrationState.CARRIED, "an image is answered with its top five labels"),
    "image_segmenter": (
        MigrationState.PERSON,
        "it takes the top class of each pixel after the model; clients must do that",
    ),
    "base_handler": (
        MigrationState.CARRIED,
        "lists of numbers are answered with lists of numbers, as in its JSON envelope",
    ),
    "text_classifier": (
        MigrationState.PERSON,
        "it tokenizes text before the model and maps scores to labels after it; clients must send "
        "tokens, or the model must do that itself",
    ),
    "object_detector": (
        MigrationState.PERSON,
        "it drops boxes of low score after the model; clients must do that",
    ),
}


def add_serving(config: ModelConfig, serving: Serving, report: MigrationReport) -> None:
    """Add batching and instances to ``config``, and every setting to the report."""
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
                MigrationState.CARRIED,
                f"preferred_batch_size {largest}, max_queue_delay_microseconds {delay * 1000}",
            )
        elif serving.batch_size > 1:
            report.add(
                f"batchSize {serving.batch_size}",
                MigrationState.NOTED,
                "the model accepts no larger batches",
            )
        else:
            report.add("batchSize 1", MigrationState.CARRIED, "no dynamic batching")
    if serving.min_workers is not None:
        count = max(1, serving.min_workers)
        del config.instance_group[1:]
        group = config.instance_group[0] if config.instance_group else config.instance_group.add()
        group.count = count
        report.add(
            f"minWorkers {serving.min_workers}",
            MigrationState.CARRIED,
            f"count {count} of instance_group",
        )
    if serving.max_workers not in (None, serving.min_workers):
        report.add(
            f"maxWorkers {serving.max_workers}",
            MigrationState.NOTED,
            "the number of instances is fixed",
        )
    if serving.response_timeout is not None:
        report.add(
            f"responseTimeout {serving.response_timeout} s",
            MigrationState.NOTED,
            "each request has its own deadline; a slow request does not restart the version",
        )
    for name in serving.others:
        report.add(
            f"setting '{name}'", MigrationState.NOTED, "it has no counterpart in the gateway"
        )


def labels(archive: TorchServeArchive, report: MigrationReport) -> list[str]:
    """The labels by index in ``index_to_name.json``; None if there are none that are usable.

    The two accepted forms are those of ``load_label_mapping`` in ``ts/utils/util.py``.
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
        report.add(
            INDEX_TO_NAME,
            MigrationState.PERSON,
            f"it does not map indices to names: write {LABELS}",
        )
        return []
    return [found.get(index, str(index)) for index in range(max(found) + 1)]


def _label(name: Any) -> str:
    if isinstance(name, list):
        name = name[-1]
    if not isinstance(name, str):
        raise TypeError("a label is a string")
    return " ".join(name.split())


def add_labels(config: ModelConfig, count: int, report: MigrationReport) -> bool:
    """Name the label file at its output; return whether there is one."""
    if len(config.output) != 1:
        report.add(
            INDEX_TO_NAME,
            MigrationState.PERSON,
            f"the model has {len(config.output)} outputs: write {LABELS} and name it at the "
            "right one as label_filename",
        )
        return False
    config.output[0].label_filename = LABELS
    report.add(INDEX_TO_NAME, MigrationState.CARRIED, f"{count} labels in {LABELS}")
    return True


def add_handler(
    config: ModelConfig,
    signature: ModelSignature,
    archive: TorchServeArchive,
    report: MigrationReport,
    obstacle: str,
) -> None:
    """Report the handler's work around the model; set parameters for what the gateway does too.

    Args:
        obstacle: the reason why the archive's own handler is not carried over.
    """
    handler = default_handler(archive)
    if handler in IMAGE_HANDLERS:
        _add_preprocessing(config, signature, report)
    if handler == "image_classifier" and len(config.output) == 1:
        config.parameters[CLASSES + config.output[0].name].string_value = LOGITS
    if handler:
        unknown = (MigrationState.PERSON, "its pre- and postprocessing is not carried over")
        report.add(f"handler '{handler}'", *AROUND.get(handler, unknown))
    else:
        _add_own_handler(archive, report, obstacle)
    _add_files(archive, report, carried=not handler and not obstacle)


def _add_own_handler(archive: TorchServeArchive, report: MigrationReport, obstacle: str) -> None:
    what = f"handler '{archive.manifest.handler}'"
    if not obstacle:
        detail = "a Python model around the archive's model; serve it with --allow-python"
        report.add(what, MigrationState.CARRIED, detail)
        return
    file = handler_file(archive)
    code = next((code for code in report.code if code.file == file), None)
    methods = ", ".join(code.methods if code is not None else ())
    defined = f"; it defines {methods}" if methods else ""
    report.add(what, MigrationState.PERSON, f"not carried over: {obstacle}{defined}")


def _add_preprocessing(
    config: ModelConfig, signature: ModelSignature, report: MigrationReport
) -> None:
    sides = signature.inputs[0].wire_dims[1:] if len(signature.inputs) == 1 else ()
    fits = sides in ((224, 224), (-1, -1))
    for key, value in IMAGE_PARAMETERS.items():
        if fits or key not in SIZES:
            config.parameters[key].string_value = value
    if fits:
        report.add(
            "preprocess",
            MigrationState.CARRIED,
            "JPEG and PNG as before, by the parameters image.*",
        )
    else:
        report.add(
            "preprocess",
            MigrationState.PERSON,
            f"the handler makes images of 224 x 224, but the input is {list(sides)}: images are "
            f"resized to that unless {' and '.join(SIZES)} are set",
        )


def _add_files(archive: TorchServeArchive, report: MigrationReport, carried: bool) -> None:
    manifest = archive.manifest
    if manifest.requirements_file:
        needed = "the gateway's environment needs them" if carried else "not needed"
        report.add(
            manifest.requirements_file,
            MigrationState.PERSON if carried else MigrationState.NOTED,
            f"packages for the handler; {needed}",
        )
    used = {manifest.serialized_file, manifest.requirements_file, manifest.config_file}
    rest = sorted(
        file
        for file in archive.files
        if file not in used and file != INDEX_TO_NAME and not file.endswith(".py")
    )
    if rest:
        more = f" and {len(rest) - 5} more" if len(rest) > 5 else ""
        report.add(
            f"{', '.join(rest[:5])}{more}",
            MigrationState.CARRIED if carried else MigrationState.NOTED,
            f"files of the handler; {'copied' if carried else 'not carried over'}",
        )
