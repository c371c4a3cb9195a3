"""Inspection of artifacts of every format, without running any code in them.

Every format has a module with ``inspect(path) -> Inspection``, which imports the library it needs.
TorchScript and ``.pt2`` are read by the standard library alone.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import pickle
import struct
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError

from modelport.exporters.requests.random_inputs import model_dims
from modelport.gateway.backend_registry import platforms
from modelport.gateway.errors import IntegrityError, InvalidArgument, UsageError
from modelport.gateway.extras import missing_extra
from modelport.gateway.repository import config, untrusted_files
from modelport.gateway.repository.artifact_checks.torch_archive import Archive
from modelport.gateway.repository.scan import VERSION_NAME
from modelport.gateway.types import Axis, ModelSignature, TensorSpec

BATCH = "batch"

SAVED_MODEL = "saved_model.pb"
CERTIFICATE = "certificate.json"

#: Formats by suffix. The content of torch's archives tells them apart.
FILES = {
    ".onnx": "onnx",
    ".pt": "",
    ".pth": "",
    ".pt2": "",
    ".tflite": "tflite",
    ".xml": "openvino",
}

#: Integer types of at most 8 bits, used for quantised weights; booleans are masks.
NARROW = frozenset({"INT8", "UINT8", "INT4", "UINT4", "INT2", "UINT2"})

#: Exceptions that the readers raise on damaged bytes.
DAMAGE = (
    ArithmeticError,
    AttributeError,
    DecodeError,
    EOFError,
    LookupError,
    MemoryError,
    RecursionError,
    SyntaxError,
    TypeError,
    ValueError,
    pickle.UnpicklingError,
    struct.error,
)

#: The formats' datatype names, mapped to the protocol's.
WORDS = {
    "FLOAT": "FP32",
    "FLOAT16": "FP16",
    "FLOAT32": "FP32",
    "FLOAT64": "FP64",
    "DOUBLE": "FP64",
    "HALF": "FP16",
    "BFLOAT16": "BF16",
    "STRING": "BYTES",
}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """An input or output.

    Attributes:
        datatype: the protocol's name, else the format's own; None: not stored.
        shape: with the batch dimension; a dynamic size is its axis' name, or -1. None: not stored.
    """

    name: str
    datatype: str | None
    shape: tuple[int | str, ...] | None


@dataclass(frozen=True, slots=True)
class AxisInfo:
    """A named dynamic dimension with inclusive bounds; None: not stored."""

    name: str
    minimum: int | None = None
    maximum: int | None = None


@dataclass(frozen=True, slots=True)
class ExternalFile:
    """A file with weights beside the artifact."""

    file: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Inspection:
    """The description of an artifact; None: the format does not store the value.

    Attributes:
        format: as in ``modelport export --format``.
        opset: the version of the operator set.
        format_version: of the file format.
        producer: the library that wrote the artifact, with its version.
        dynamic_axes: the named ones.
        size_bytes: of the artifact, with external data.
        weights: number of values by datatype, of the constant tensors that are floating-point or at
            most 8 bits wide: wider integers are indexes and shapes.
        operators: number of occurrences in the computation of the signature, with subgraphs;
            constants are not counted.
        notes: limitations of the figures.
        certificate: the content of ``certificate.json`` beside the artifact.
    """

    format: str
    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]
    size_bytes: int
    opset: int | None = None
    format_version: str | None = None
    producer: str | None = None
    dynamic_axes: tuple[AxisInfo, ...] = ()
    weights: Mapping[str, int] | None = None
    operators: Mapping[str, int] | None = None
    external_data: tuple[ExternalFile, ...] = ()
    notes: tuple[str, ...] = ()
    certificate: Mapping[str, Any] | None = None

    @property
    def parameters(self) -> int | None:
        """The number of values in ``weights``."""
        return None if self.weights is None else sum(self.weights.values())

    @property
    def quantized_share(self) -> float | None:
        """The fraction of ``parameters`` that is stored in 8 bits or less."""
        if self.weights is None or not self.parameters:
            return None if self.weights is None else 0.0
        return sum(n for name, n in self.weights.items() if is_narrow(name)) / self.parameters

    def to_json(self) -> dict[str, Any]:
        """Every attribute and property by its name."""
        document = asdict(self)
        document["parameters"] = self.parameters
        document["quantized_share"] = self.quantized_share
        return document


def word(datatype: str) -> str:
    """The protocol's name for a format's datatype, or the format's own, in capitals."""
    return WORDS.get(datatype.upper(), datatype.upper())


def is_narrow(datatype: str) -> bool:
    """Whether values of ``datatype`` take at most 8 bits and may be weights."""
    return datatype in NARROW or datatype.startswith(("FLOAT8", "FLOAT4"))


def tally(constants: Iterable[tuple[str, int]]) -> dict[str, int]:
    """Build ``Inspection.weights`` from the datatype and the size of every constant tensor."""
    weights: Counter[str] = Counter()
    for datatype, size in constants:
        if is_narrow(datatype) or datatype.startswith(("FP", "BF", "FLOAT", "COMPLEX")):
            weights[datatype] += size
    return dict(weights.most_common())


def inspect(path: Path) -> Inspection:
    """Inspect a file, a SavedModel, or a model or version of a repository.

    Raises:
        UsageError: ``path`` cannot be inspected.
        IntegrityError: the artifact is damaged.
        Unsupported: the library that reads it is not installed.
    """
    try:
        if not path.exists():
            raise UsageError(f"'{path}' does not exist; give the path of an artifact")
        if path.is_dir() and not (path / SAVED_MODEL).is_file():
            return _inspect_version(_newest_version(path.resolve()))
        return _inspect_artifact(path)
    except OSError as error:
        raise UsageError(f"'{path}' cannot be read: {error.strerror or error}") from error


def _inspect_artifact(path: Path) -> Inspection:
    try:
        module = importlib.import_module(f"modelport.exporters.inspection.{_reader(path)}")
    except ImportError as error:
        raise missing_extra(error) from error
    try:
        inspection: Inspection = module.inspect(path)
    except DAMAGE as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise IntegrityError(
            f"'{path.name}' is damaged, or of an unknown version ({reason}); export the model again"
        ) from error
    return inspection


def _reader(path: Path) -> str:
    if path.is_dir():
        return "savedmodel"
    if path.suffix.lower() not in FILES:
        raise UsageError(
            f"'{path.name}' is not an artifact; use a file that ends in {', '.join(FILES)}, a "
            "SavedModel, or a model's folder in a repository"
        )
    if reader := FILES[path.suffix.lower()]:
        return reader
    archive = Archive(path)
    if "constants.pkl" in archive:
        return "torchscript"
    if archive.below("data/aotinductor/") or archive.below("models/", ".json"):
        return "pt2"
    raise UsageError(f"'{path.name}' is a checkpoint, or of an unknown format; export it first")


def _newest_version(path: Path) -> Path:
    """The newest version of a model's folder; ``path`` itself if it is a version's."""
    if VERSION_NAME.match(path.name) and _artifact(path) is not None:
        return path
    versions = [p for p in path.iterdir() if VERSION_NAME.match(p.name) and p.is_dir()]
    if not versions:
        raise UsageError(
            f"'{path}' is neither a SavedModel nor a model's folder in a repository; give a "
            "folder with versions in it, or a file"
        )
    return max(versions, key=lambda p: int(p.name))


def _artifact(version: Path) -> Path | None:
    known = [row.default_filename for row in platforms()]
    declared = _declared(version.parent)
    names = [declared.default_model_filename, *known] if declared is not None else known
    return next((version / name for name in names if name and (version / name).exists()), None)


def _declared(model: Path) -> config.ModelConfig | None:
    """The model's ``config.pbtxt``; None if there is none, or it does not parse."""
    try:
        text = untrusted_files.read_text(model / config.FILENAME, untrusted_files.MAX_CONFIG_BYTES)
        return config.complete(config.parse(text), model.name)
    except (OSError, ValueError, InvalidArgument):
        return None


def _inspect_version(version: Path) -> Inspection:
    """Inspect a version's artifact; add axis names from the configuration, and the certificate."""
    artifact = _artifact(version)
    if artifact is None:
        raise UsageError(f"'{version}' holds no artifact that can be inspected")
    inspection = _inspect_artifact(artifact)
    declared = _declared(version.parent)
    if declared is not None:
        # the configuration leaves the inputs to the artifact
        with contextlib.suppress(InvalidArgument):
            inspection = _name_axes(inspection, config.signature(declared))
    try:
        text = untrusted_files.read_text(
            version / CERTIFICATE, untrusted_files.MAX_CERTIFICATE_BYTES
        )
        certificate = json.loads(text)
    except FileNotFoundError:
        return inspection
    except (OSError, ValueError, RecursionError) as error:
        raise IntegrityError(f"'{CERTIFICATE}' is damaged; publish the version again") from error
    return replace(inspection, certificate=certificate if isinstance(certificate, dict) else {})


def _name_axes(inspection: Inspection, signature: ModelSignature) -> Inspection:
    """Give unnamed dynamic sizes the names in the configuration."""
    declared, axes = describe(signature)
    known = {tensor.name: tensor.shape for tensor in declared}

    def named(tensors: Iterable[TensorInfo]) -> tuple[TensorInfo, ...]:
        return tuple(replace(t, shape=_merge(t.shape, known.get(t.name))) for t in tensors)

    inputs, outputs = named(inspection.inputs), named(inspection.outputs)
    used = {d for tensor in (*inputs, *outputs) for d in tensor.shape or () if isinstance(d, str)}
    bounds = {axis.name: axis for axis in (*inspection.dynamic_axes, *axes) if axis.name in used}
    return replace(inspection, inputs=inputs, outputs=outputs, dynamic_axes=(*bounds.values(),))


def _merge(
    stored: tuple[int | str, ...] | None, declared: tuple[int | str, ...] | None
) -> tuple[int | str, ...] | None:
    if stored is None or declared is None or len(stored) != len(declared):
        return stored
    pairs = zip(stored, declared, strict=True)
    return tuple(name if size == -1 and isinstance(name, str) else size for size, name in pairs)


def describe(signature: ModelSignature) -> tuple[tuple[TensorInfo, ...], tuple[AxisInfo, ...]]:
    """A signature's inputs and outputs in this order, in the model's own shapes, and its axes."""
    batched = signature.max_batch_size > 0
    batch = (Axis(BATCH, 1, signature.max_batch_size),) if batched else ()

    def tensor(spec: TensorSpec) -> TensorInfo:
        return TensorInfo(spec.name, spec.datatype.value, (BATCH,) * batched + model_dims(spec))

    axes = (AxisInfo(a.name, a.minimum, a.maximum) for a in (*batch, *signature.axes.values()))
    return tuple(tensor(spec) for spec in (*signature.inputs, *signature.outputs)), tuple(axes)
