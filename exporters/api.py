"""Export, verify and convert: the functions behind the commands of these names.

PyTorch, TensorFlow and the runtimes are imported when a function is called.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from modelport.exporters.arguments import check_bounds, path_of, place_of
from modelport.gateway.cli.errors import UsageError, naming_extras
from modelport.gateway.repository.storage.location import Location

if TYPE_CHECKING:
    from modelport.exporters.export_pipeline import ExportResult as ExportResult
    from modelport.exporters.keras_conversion.report import ConversionReport
    from modelport.exporters.proof.verify import Checked, Proven

#: Called with the stage's name, the work done and the whole work; 0 of 0 is unknown.
Progress = Callable[[str, int, int], None]


P = ParamSpec("P")
T = TypeVar("T")


def _renamed(**names: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Refuse arguments that have other names now: those of the command's options."""

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> T:
            for old in names.keys() & kwargs:
                raise UsageError(f"the argument '{old}' is '{names[old]}' now, as the option")
            return function(*args, **kwargs)

        return checked

    return decorate


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


@_renamed(
    formats="format",
    inputs="input",
    output_names="output_name",
    masks="mask",
    version="model_version",
)
@naming_extras()
def export(
    checkpoint: Path | str,
    *,
    format: str | Sequence[str] = "onnx",
    model: str | None = None,
    task: str | None = None,
    model_kwargs: Mapping[str, Any] | None = None,
    lora: Path | str | None = None,
    input: Sequence[str] = (),
    output_name: Sequence[str] = (),
    mask: Sequence[str] = (),
    max_batch_size: int = 8,
    repository: Path | Location | str = "model_repository",
    name: str | None = None,
    name_template: str | None = None,
    model_version: int | str = "auto",
    dtype: str = "fp32",
    quantize: str | None = None,
    opset: int | None = None,
    optimize: str | None = None,
    calibrate: Sequence[Path | str] = (),
    calibration_method: str | None = None,
    per_channel: bool | None = None,
    block_size: int | None = None,
    samples: int | None = None,
    seed: int = 0,
    atol: float | None = None,
    rtol: float | None = None,
    data: Path | str | None = None,
    max_drop: float = 0.01,
    min_agreement: float | None = None,
    max_relative_error: float | None = None,
    image: Mapping[str, str] | None = None,
    labels: Path | str | None = None,
    sign_key: Path | str | None = None,
    output: Path | str | None = None,
    artifact: Path | str | None = None,
    progress: Progress | None = None,
) -> list[ExportResult]:
    """Export a checkpoint, prove each artifact equal to it, and publish it.

    All formats are proven before any is published. The arguments are the options of
    ``modelport export``, which error messages name.

    Args:
        checkpoint: a ``.pt``, ``.pth`` or ``.safetensors`` file, a Hugging Face folder, a Keras
            file, a SavedModel, or a file of XGBoost, LightGBM or skops.
        format: ``onnx``, ``torchscript``, ``savedmodel``, ``tflite``, ``openvino``, ``pt2``,
            ``aoti``, ``executorch``, or ``all`` for the first four; one or several.
        model: a registered name or ``package.module:factory``; Hugging Face folders, Keras files
            and SavedModels need none.
        task: Hugging Face's name of the task to export a folder for; None takes its
            architecture's.
        model_kwargs: hyper-parameters; they take precedence over the checkpoint's.
        lora: a folder of PEFT adapters to merge into a Hugging Face checkpoint.
        input: ``NAME:DATATYPE[DIMS]`` of each input of a model that declares no signature.
        output_name: names of its outputs, in order, or some of its own names.
        mask: ``NAME[:right|left|any][=OUTPUT,...]`` of each input that says which positions hold
            data, and the outputs that are undefined elsewhere.
        max_batch_size: rows of the largest batch; 0: shapes have no batch dimension.
        repository: a folder, or ``s3://``, ``gs://`` or ``az://BUCKET/PREFIX``.
        name: the model's name there; None takes the one that the model declares.
        name_template: of ``{name}``, ``{format}`` and ``{precision}``, for several formats.
        model_version: a positive number, or ``auto`` for the next free one.
        dtype: precision inside the artifact: ``fp32``, ``fp16`` or ``bf16``.
        quantize: ``int8`` quantises weights and activations, ``int8-weight-only`` and ``int4``
            weights alone, in blocks.
        opset: ONNX's operator set; None takes the default.
        optimize: ``O1``, ``O2`` or ``O3`` optimises the ONNX graph.
        calibrate: files of inputs; ``int8`` is then static.
        calibration_method: ``minmax``, ``entropy`` or ``percentile``; None takes the first.
        per_channel: a scale for each channel of int8 weights; None: yes.
        block_size: weights that share a scale, of ``int8-weight-only`` and ``int4``; None: 32.
        samples: random inputs to compare on; None decides by the model's size.
        seed: of the random inputs.
        atol: absolute tolerance; None takes the model's.
        rtol: relative tolerance; None takes the model's.
        data: an ``.npz`` file of held-out inputs by name, and ``labels``.
        max_drop: accuracy or AUC that may be lost on ``data``, 0 to 1.
        min_agreement: share of decisions that must stay below fp32, 0 to 1.
        max_relative_error: the bound below fp32 for a model that declares no decision.
        image: ``mean``, ``std``, ``scale``, ``size``, ``resize``, ``interpolation``, ``layout``.
        labels: a file with the names of the classes, one a line.
        sign_key: a file with the Ed25519 key that signs the certificates.
        output: write the artifact and its certificate here instead of publishing.
        artifact: an ONNX file to prove instead of converting, see ``certify``.
        progress: is called as the work advances.

    Returns:
        One result for each format: name, version, path, size in bytes, proof.

    Raises:
        InvalidArgument: an argument is wrong or does not fit the checkpoint.
        AlreadyExists: the version is published already.
        ParityError: an artifact does not compute what the checkpoint computes.
        Unsupported: no route leads to this format, or a library is not installed.
        IntegrityError: the checkpoint is damaged or wants to run code.
    """
    from modelport.exporters import export_pipeline, export_request
    from modelport.exporters.formats.base import ExportTarget

    source = export_request.source(checkpoint, model, task, model_kwargs, lora, max_batch_size)
    source = source.declaring(input, output_name, mask)
    checks = export_request.checks(
        samples, seed, atol, rtol, max_drop, min_agreement, max_relative_error
    )
    optimization = export_request.optimization(
        optimize, calibrate, calibration_method, per_channel, block_size
    )
    request = export_request.ExportRequest(
        source=source,
        formats=(format,) if isinstance(format, str) else tuple(format),
        target=ExportTarget(dtype, quantize, opset),
        checks=checks,
        destination=export_request.destination(
            repository, name, name_template, model_version, output
        ),
        optimization=optimization,
        data=path_of(data),
        image=dict(image or {}),
        labels=path_of(labels),
        sign_key=path_of(sign_key),
        artifact=path_of(artifact),
    )
    return export_pipeline.export(request, progress or _silent)


@naming_extras()
def certify(artifact: Path | str, against: Path | str, **options: Any) -> list[ExportResult]:
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
    options.setdefault("name", None)
    options["name"] = options["name"] or re.sub(r"[^A-Za-z0-9._-]", "_", artifact.stem)
    if against.suffix.lower() == ".npz" and not options.get("output_name"):
        options["output_name"] = [output.name for output in found.outputs]
    return export(against, opset=found.opset, artifact=artifact, **options)


@_renamed(public_keys="public_key")
@naming_extras()
def verify(
    path: Path | Location | str,
    *,
    integrity: bool = False,
    public_key: Sequence[Path | str] = (),
    checkpoint: Path | str | None = None,
    lora: Path | str | None = None,
    data: Path | str | None = None,
    model: str | None = None,
    trust: bool = False,
    progress: Progress | None = None,
) -> Verification:
    """Check the files of a published version, then run its proof again.

    Args:
        path: the folder of a version, or of a model for its newest version; or a URL of object
            storage.
        integrity: check the files alone and run nothing.
        public_key: files of Ed25519 keys; one of the keys must have signed the version.
        checkpoint: the file that was exported; None looks for the certificate's here and in
            ``checkpoints/``.
        lora: the adapters that were merged.
        data: the held-out inputs of the evaluation.
        model: the factory that an unsigned certificate names, to allow running it.
        trust: run what the version holds and its certificate names without a signature.
        progress: is called as the work advances.

    Raises:
        InvalidArgument: no version is at ``path``, or something that the proof needs is missing.
        IntegrityError: the files are not as published, or the signature does not fit.
        ParityError: the artifact does not compute what the checkpoint computes.
        Unsupported: the artifact is native code, neither signed nor trusted.
    """
    given: dict[str, Any] = {
        "checkpoint": path_of(checkpoint),
        "lora": path_of(lora),
        "data": path_of(data),
        "model": model,
        "trust": trust,
    }
    if integrity and any(given.values()):
        flag = next(name for name, value in given.items() if value)
        raise UsageError(f"--integrity does not repeat the proof; omit --{flag}")
    from modelport.exporters.proof import verify as verification
    from modelport.exporters.publishing import download
    from modelport.gateway.repository import signing_keys

    keys = [signing_keys.load_public_key(Path(key)) for key in public_key]
    place = place_of(path)
    with contextlib.ExitStack() as stack:
        if isinstance(place, Location):
            version = stack.enter_context(download.copied(place))
        else:
            version = verification.find_version(place)
        checked = verification.check(version, keys)
        if integrity:
            return Verification(checked, None)
        proven = verification.prove(
            checked, verification.VerificationInputs(**given), progress or _silent
        )
        return Verification(checked, proven)


@naming_extras()
def convert(
    source: Path | str,
    target: Path | str,
    *,
    model: str,
    model_kwargs: Mapping[str, Any] | None = None,
    samples: int = 1000,
    seed: int = 0,
    check: bool = False,
    progress: Progress | None = None,
) -> ConversionReport:
    """Convert weights between PyTorch and Keras, and prove that both are the same model.

    Args:
        source: a PyTorch checkpoint or a Keras file.
        target: the file of the other framework to write; it is never overwritten.
        model: a registered model with a Keras port, such as ``fraud`` or ``vit``.
        model_kwargs: hyper-parameters; they take precedence over the files'.
        samples: random inputs to compare both models on.
        seed: of the random inputs.
        check: compare two files that exist, and write no model.
        progress: is called as the work advances.

    Returns:
        The comparison, tensor by tensor, which is also stored beside ``target``.

    Raises:
        InvalidArgument: a file is not what it should be, or does not fit the model.
        AlreadyExists: ``target`` exists.
        ParityError: the two are not the same model.
        Unsupported: the model has no Keras port, or a library is not installed.
        IntegrityError: a file is damaged or wants to run code.
    """
    check_bounds(samples=samples, seed=seed)
    from modelport.exporters.keras_conversion.convert_request import ConvertRequest

    request = ConvertRequest(
        Path(source),
        Path(target),
        model,
        dict(model_kwargs or {}),
        samples=samples,
        seed=seed,
        check=check,
    )
    request.check_arguments()
    from modelport.exporters.keras_conversion import convert as conversion

    return conversion.convert(request, progress or _silent)


def _silent(stage: str, done: int, total: int) -> None:
    """Report no progress."""
