"""The serialized file of an archive, and the signature from the file, its handler or flags."""

from __future__ import annotations

import zipfile
from dataclasses import dataclass, replace
from pathlib import Path

from modelport.exporters import inspection
from modelport.exporters.inspection import DAMAGE, Inspection, TensorInfo, torchscript
from modelport.exporters.sources.tensor_flags import parse_tensors
from modelport.gateway.errors import IntegrityError, Unsupported, UsageError
from modelport.gateway.repository import config
from modelport.gateway.repository.artifact_checks import pt2_guard, torch_archive, torchscript_guard
from modelport.gateway.repository.config import Platform
from modelport.gateway.types import Axis, Datatype, ModelSignature, TensorSpec

TORCH = (".pt", ".pth", ".pt2")
EXPORT_IT = "export it with 'modelport export {file} --model package.module:factory --format onnx'"
DECLARE = "declare every tensor, such as --input 'x:FP32[16]' --output-tensor 'y:FP32[2]'"

#: A dict of outputs; any of its keys may be declared.
NAMED = "Dict[str, Tensor]"
#: The input dims of ``ts/torch_handler/image_classifier.py``.
IMAGE_DIMS = (3, 224, 224)


@dataclass(frozen=True, slots=True)
class Flags:
    """The declarations of tensors, and the batch size; None: the old server's."""

    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    max_batch_size: int | None = None

    def __bool__(self) -> bool:
        return bool(self.inputs or self.outputs) or self.max_batch_size is not None


def platform_of(path: Path, eager: bool) -> Platform:
    """The row of ``config.PLATFORMS`` that serves the file.

    Args:
        eager: the archive contains the model's Python class, so the file is a checkpoint.

    Raises:
        Unsupported: nothing serves the file; the message says how to get one that is served.
        IntegrityError: the file is damaged, or would unpickle objects.
    """
    how = EXPORT_IT.format(file=path.name)
    if eager:
        raise Unsupported(f"'{path.name}' is an eager checkpoint, which needs Python code; {how}")
    rows = {row.platform: row for row in config.PLATFORMS}
    if path.suffix.lower() == ".onnx":
        return rows["onnxruntime_onnx"]
    if path.suffix.lower() not in TORCH:
        raise Unsupported(f"'{path.name}' is of a format that no backend serves; {how}")
    if not zipfile.is_zipfile(path):
        raise Unsupported(f"'{path.name}' is a pickle, which is not opened; {how}")
    archive = torch_archive.Archive(path)
    try:
        kind = archive.kind()
    except Unsupported as error:
        raise Unsupported(f"'{path.name}' is a checkpoint, which is not opened; {how}") from error
    if kind is torch_archive.Kind.EXPORTED:
        pt2_guard.check(archive)
    elif kind is torch_archive.Kind.TORCHSCRIPT:
        torchscript_guard.check_archive(archive)
    return rows[kind.value]


def sealed(path: Path, platform: Platform) -> ModelSignature | None:
    """The signature that ``modelport export`` wrote; None if it did not write the file."""
    if platform.format == "onnx":
        return None
    return torch_archive.Archive(path).signature()


def external_files(path: Path, platform: Platform) -> tuple[str, ...]:
    """The files beside an ONNX file that hold its weights."""
    if platform.format != "onnx":
        return ()
    return tuple(external.file for external in inspection.inspect(path).external_data)


def signature(
    path: Path, platform: Platform, flags: Flags, max_batch_size: int, handler: str
) -> ModelSignature:
    """The signature of a file that modelport did not write.

    Args:
        flags: override everything else if they are given.
        max_batch_size: of models that take batches, unless the file says otherwise.
        handler: TorchServe's own handler that the archive uses, which determines its tensors.

    Raises:
        UsageError: the signature is incomplete, and the message names the flags; or the flags do
            not fit the file.
        Unsupported: no protocol has a tensor's type.
        IntegrityError: the file is damaged.
    """
    forward = _forward(path) if platform.format == "torchscript" else None
    if flags.inputs and flags.outputs:
        return _declared(flags, max_batch_size, forward)
    if forward is None:
        found = inspection.inspect(path)
        if flags.inputs or flags.outputs or not found.inputs:
            raise UsageError(f"'{path.name}' does not store its inputs and outputs; {DECLARE}")
        return _stored(found, max_batch_size)
    names = [name for name, _ in forward.arguments[: forward.required]]
    if handler == "image_classifier" and len(names) == 1 and forward.result == "Tensor":
        inputs, outputs, axes = parse_tensors(flags.inputs, flags.outputs)
        image = inputs or [TensorSpec(names[0], Datatype.FP32, IMAGE_DIMS)]
        given = outputs or [TensorSpec("output", Datatype.FP32, (-1,))]
        return ModelSignature(tuple(image), tuple(given), max(1, max_batch_size), axes)
    taken = ", ".join(f"{name}: {kind}" for name, kind in forward.arguments)
    raise UsageError(
        f"TorchScript stores no datatypes and sizes, and forward({taken}) -> {forward.result} of "
        f"'{path.name}' gives no others; {DECLARE}"
    )


def _forward(path: Path) -> torchscript.Forward:
    try:
        forward = torchscript.forward(path)
    except DAMAGE as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise IntegrityError(f"'{path.name}' is damaged ({reason}); copy it again") from error
    kinds = [kind for _, kind in forward.arguments[: forward.required]]
    if wrong := [kind for kind in kinds if kind != "Tensor"]:
        raise Unsupported(
            f"forward() of '{path.name}' takes {wrong[0]}; only tensors can be sent: wrap the "
            "model in one that takes tensors, and export that"
        )
    if forward.result != NAMED and ("Dict" in forward.result or "List" in forward.result):
        raise Unsupported(
            f"forward() of '{path.name}' returns {forward.result}; wrap the model in one that "
            "returns a tensor, a tuple of tensors or tensors by name, and export that"
        )
    return forward


def _declared(
    flags: Flags, max_batch_size: int, forward: torchscript.Forward | None
) -> ModelSignature:
    inputs, outputs, axes = parse_tensors(flags.inputs, flags.outputs)
    if forward is not None:
        names = [name for name, _ in forward.arguments]
        if not forward.required <= len(inputs) <= len(names):
            raise UsageError(
                f"--input is given {len(inputs)} times, but forward() takes {', '.join(names)}"
            )
        if {spec.name for spec in inputs} <= set(names):  # any order is accepted
            inputs.sort(key=lambda spec: names.index(spec.name))
        count = forward.result.count(",") + 1 if forward.result.startswith("Tuple[") else 1
        if len(outputs) != count and forward.result != NAMED:
            raise UsageError(
                f"--output-tensor is given {len(outputs)} times, but forward() returns {count}"
            )
    return ModelSignature(tuple(inputs), tuple(outputs), max_batch_size, axes)


def _stored(found: Inspection, max_batch_size: int) -> ModelSignature:
    """The signature in a file; tensors whose first dimensions are one dynamic axis take batches."""
    tensors = (*found.inputs, *found.outputs)
    if unknown := [t.name for t in tensors if t.shape is None or t.datatype is None]:
        raise UsageError(f"the file does not state the shape of '{unknown[0]}'; {DECLARE}")
    firsts = {tensor.shape[0] if tensor.shape else 0 for tensor in tensors}
    batched = len(firsts) == 1 and not any(isinstance(f, int) and f >= 0 for f in firsts)
    bounds = {axis.name: axis for axis in found.dynamic_axes}
    axes: dict[str, Axis] = {}

    def spec(tensor: TensorInfo) -> TensorSpec:
        if tensor.datatype not in list(Datatype):
            raise Unsupported(f"'{tensor.name}' is {tensor.datatype}, which no protocol supports")
        dims = (tensor.shape or ())[int(batched) :]
        for dim in dims:
            if isinstance(dim, str):
                known = bounds.get(dim)
                low, high = (known.minimum, known.maximum) if known else (None, None)
                axes[dim] = Axis(dim, low or 1, high)
        datatype = Datatype(tensor.datatype)
        if not dims:
            return TensorSpec(tensor.name, datatype, (1,), reshape=())
        return TensorSpec(tensor.name, datatype, tuple(dims))

    inputs, outputs = (tuple(map(spec, side)) for side in (found.inputs, found.outputs))
    return ModelSignature(inputs, outputs, max(1, max_batch_size) if batched else 0, axes)


def with_classes(signature: ModelSignature, classes: int) -> ModelSignature:
    """Set the open size of the only output to the number of labels."""
    outputs = signature.outputs
    if len(outputs) == 1 and outputs[0].dims == (-1,):
        return replace(signature, outputs=(replace(outputs[0], dims=(classes,)),))
    return signature
