"""Export, verify and convert: the functions behind the commands of these names.

PyTorch, TensorFlow and the runtimes are imported when a function is called.
"""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from modelport.exporters.arguments import check_bounds, path_of, place_of
from modelport.exporters.options import ConvertOptions, ExportOptions, VerifyOptions
from modelport.gateway.cli.declared_options import complete
from modelport.gateway.errors import UsageError
from modelport.gateway.extras import naming_extras
from modelport.gateway.repository.storage.location import Location

if TYPE_CHECKING:
    from modelport.exporters.export_pipeline import ExportResult as ExportResult
    from modelport.exporters.keras_conversion.report import ConversionReport
    from modelport.exporters.proof.verify import Checked, Proven


@dataclass(frozen=True, slots=True)
class Verification:
    """A version that passed verification.

    Attributes:
        checked: the files, the certificate and the signature.
        proven: the proof, run again; None where only the files were checked.
    """

    checked: Checked
    proven: Proven | None


def __getattr__(name: str) -> Any:
    if name == "ExportResult":  # its module imports NumPy's users: torch-free, but not cheap
        from modelport.exporters.export_pipeline import ExportResult

        return ExportResult
    raise AttributeError(f"module 'modelport.exporters.api' has no attribute '{name}'")


@naming_extras()
def export(checkpoint: Path | str, **options: Unpack[ExportOptions]) -> list[ExportResult]:
    """Export a checkpoint, prove each artifact equal to it, and publish it.

    All formats are proven before any is published.

    Args:
        checkpoint: a ``.pt``, ``.pth`` or ``.safetensors`` file, a Hugging Face folder, a Keras
            file, a SavedModel, or a file of XGBoost, LightGBM, CatBoost or skops.
        options: those of ``modelport export``, which error messages name; ``format`` is ``onnx`` by
            default. ``image`` is a mapping of ``mean``, ``std`` and so on, and ``progress`` is
            called as the work advances.

    Returns:
        One result for each format: name, version, path, size in bytes, proof.

    Raises:
        InvalidArgument: an argument is wrong or does not fit the checkpoint.
        AlreadyExists: the version is published already.
        ParityError: an artifact does not compute what the checkpoint computes.
        Unsupported: no route leads to this format, or a library is not installed.
        IntegrityError: the checkpoint is damaged or wants to run code.
    """
    return _export(Path(checkpoint), options)


def _export(
    checkpoint: Path, options: ExportOptions, artifact: Path | None = None
) -> list[ExportResult]:
    from modelport.exporters import export_pipeline, export_request

    options.setdefault("format", "onnx")
    given = complete("export", ExportOptions, options)
    request = export_request.request_of(checkpoint, given, artifact)
    return export_pipeline.export(request, given["progress"] or _silent)


@naming_extras()
def certify(
    artifact: Path | str, against: Path | str, **options: Unpack[ExportOptions]
) -> list[ExportResult]:
    """Prove an ONNX file from elsewhere, and publish it with a certificate.

    Args:
        artifact: the ONNX file; its weights may lie beside it.
        against: the checkpoint it was exported from, or an ``.npz`` file with each input and
            output by name, one row per sample.
        options: of ``export``, but for those of the conversion.

    Returns:
        One result, as of ``export``.

    Raises:
        InvalidArgument, AlreadyExists, ParityError, Unsupported: as ``export``.
        IntegrityError: the file is damaged, or does more than compute.
    """
    from modelport.exporters import inspection
    from modelport.gateway.repository.artifact_checks import onnx_guard

    artifact, against = Path(artifact), Path(against)
    if artifact.suffix.lower() != ".onnx":
        raise UsageError(f"'{artifact}' is not an ONNX file; its name must end in .onnx")
    if not artifact.is_file():
        raise UsageError(f"'{artifact}' does not exist; give the path of an ONNX file")
    onnx_guard.check(artifact)
    found = inspection.inspect(artifact)
    options["name"] = options.get("name") or re.sub(r"[^A-Za-z0-9._-]", "_", artifact.stem)
    if against.suffix.lower() == ".npz" and not options.get("output_name"):
        options["output_name"] = [output.name for output in found.outputs]
    options["opset"] = found.opset
    return _export(against, options, artifact)


@naming_extras()
def verify(path: Path | Location | str, **options: Unpack[VerifyOptions]) -> Verification:
    """Check the files of a published version, then run its proof again.

    Args:
        path: the folder of a version, or of a model for its newest version; or a URL of object
            storage.
        options: those of ``modelport verify``; ``progress`` is called as the work advances.

    Raises:
        InvalidArgument: no version is at ``path``, or something that the proof needs is missing.
        IntegrityError: the files are not as published, or the signature does not fit.
        ParityError: the artifact does not compute what the checkpoint computes.
        Unsupported: the artifact is native code, neither signed nor trusted.
    """
    given = complete("verify", VerifyOptions, options)
    proof = {name: given[name] for name in ("checkpoint", "lora", "data", "model", "trust")}
    if given["integrity"] and any(proof.values()):
        flag = next(name for name, value in proof.items() if value)
        raise UsageError(f"--integrity does not repeat the proof; omit --{flag}")
    from modelport.exporters.proof import verify as verification
    from modelport.exporters.publishing import download
    from modelport.gateway.repository import signing_keys

    keys = [signing_keys.load_public_key(Path(key)) for key in given["public_key"]]
    place = place_of(path)
    with contextlib.ExitStack() as stack:
        if isinstance(place, Location):
            version = stack.enter_context(download.copied(place))
        else:
            version = verification.find_version(place)
        checked = verification.check(version, keys)
        if given["integrity"]:
            return Verification(checked, None)
        inputs = verification.VerificationInputs(
            checkpoint=path_of(given["checkpoint"]),
            lora=path_of(given["lora"]),
            data=path_of(given["data"]),
            model=given["model"],
            trust=given["trust"],
        )
        proven = verification.prove(checked, inputs, given["progress"] or _silent)
        return Verification(checked, proven)


@naming_extras()
def convert(
    source: Path | str, target: Path | str, *, model: str, **options: Unpack[ConvertOptions]
) -> ConversionReport:
    """Convert weights between PyTorch and Keras, and prove that both are the same model.

    Args:
        source: a PyTorch checkpoint or a Keras file.
        target: the file of the other framework to write; it is never overwritten.
        model: a registered model with a Keras port, such as ``fraud`` or ``vit``.
        options: those of ``modelport convert``; ``progress`` is called as the work advances.

    Returns:
        The comparison, tensor by tensor, which is also stored beside ``target``.

    Raises:
        InvalidArgument: a file is not what it should be, or does not fit the model.
        AlreadyExists: ``target`` exists.
        ParityError: the two are not the same model.
        Unsupported: the model has no Keras port, or a library is not installed.
        IntegrityError: a file is damaged or wants to run code.
    """
    given = complete("convert", ConvertOptions, options)
    check_bounds(samples=given["samples"], seed=given["seed"])
    from modelport.exporters.keras_conversion.convert_request import ConvertRequest

    request = ConvertRequest(
        Path(source),
        Path(target),
        model,
        dict(given["model_kwargs"] or {}),
        samples=given["samples"],
        seed=given["seed"],
        check=given["check"],
    )
    request.check_arguments()
    from modelport.exporters.keras_conversion import convert as conversion

    return conversion.convert(request, given["progress"] or _silent)


def _silent(stage: str, done: int, total: int) -> None:
    """Report no progress."""
