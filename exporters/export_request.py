"""The request of an export, and how the options of ``modelport export`` make it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from modelport.exporters.arguments import check_bounds, check_plain, path_of, place_of
from modelport.exporters.artifact_destination import Destination
from modelport.exporters.formats.base import ExportTarget
from modelport.exporters.optimization.options import OptimizationOptions
from modelport.exporters.options import ExportOptions
from modelport.exporters.proof.proof import Checks
from modelport.exporters.publishing import contract
from modelport.exporters.sources import SourceRequest
from modelport.exporters.sources.reader_selection import SAVED_MODEL
from modelport.gateway.errors import UsageError


@dataclass(frozen=True, slots=True)
class ExportRequest:
    """The options of one export.

    Attributes:
        formats: names of ``formats.registry.FORMATS``, or ``all``.
        optimization: how converted graphs are optimised and quantised.
        data: held-out inputs, see ``evaluation``.
        image, labels: see ``image_metadata.describe``.
        sign_key: a private key to sign the certificates with.
        artifact: an ONNX file to prove instead of converting the source.
    """

    source: SourceRequest
    formats: tuple[str, ...]
    target: ExportTarget
    checks: Checks
    destination: Destination
    optimization: OptimizationOptions
    data: Path | None = None
    image: Mapping[str, str] = field(default_factory=dict)
    labels: Path | None = None
    sign_key: Path | None = None
    artifact: Path | None = None


#: Options that are numbers.
_NUMBERS = (
    *("max_batch_size", "samples", "seed", "atol", "rtol", "max_drop", "min_agreement"),
    "max_relative_error",
)


def request_of(checkpoint: Path, given: ExportOptions, artifact: Path | None) -> ExportRequest:
    """The request that the complete options make.

    Raises:
        InvalidArgument: an option is wrong; the message names it.
    """
    kwargs = dict(given["model_kwargs"] or {})
    values: Mapping[str, Any] = {**given}
    check_bounds(**{name: values[name] for name in _NUMBERS})
    check_plain(kwargs, "--model-kwargs")
    if given["custom_objects"] is not None and (given["model"] or checkpoint.suffix != ".keras"):
        raise UsageError("--custom-objects is for a .keras file, without --model; omit it")
    if given["signature"] is not None and not (checkpoint / SAVED_MODEL).is_file():
        raise UsageError(f"--signature is for a SavedModel, not '{checkpoint}'; omit it")
    formats = given["format"]
    return ExportRequest(
        source=SourceRequest(
            checkpoint=checkpoint,
            model=given["model"] or given["custom_objects"],
            model_kwargs=kwargs,
            max_batch_size=given["max_batch_size"],
            lora=path_of(given["lora"]),
            inputs=tuple(given["input"]),
            output_names=tuple(given["output_name"]),
            masks=tuple(given["mask"]),
            task=given["task"] or given["signature"],
            long_texts=given["long_texts"],
        ),
        formats=(formats,) if isinstance(formats, str) else tuple(formats),
        target=ExportTarget(given["dtype"], given["quantize"], given["opset"]),
        checks=Checks(
            samples=given["samples"],
            seed=given["seed"],
            atol=given["atol"],
            rtol=given["rtol"],
            agreement=given["min_agreement"],
            relative_error=given["max_relative_error"],
            max_drop=given["max_drop"],
        ),
        destination=Destination(
            repository=place_of(given["repository"]),
            name=given["name"],
            name_template=given["name_template"],
            version=contract.parse_version(str(given["model_version"])),
            output=path_of(given["output"]),
        ),
        optimization=OptimizationOptions(
            level=given["optimize"],
            calibrate=tuple(map(Path, given["calibrate"])),
            calibration_method=given["calibration_method"],
            per_channel=given["per_channel"],
            block_size=given["block_size"],
        ),
        data=path_of(given["data"]),
        image=dict(given["image"] or {}),
        labels=path_of(given["labels"]),
        sign_key=path_of(given["sign_key"]),
        artifact=artifact,
    )
