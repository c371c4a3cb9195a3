"""TorchServe's handler for one TorchScript model with named tensors; needs torch and numpy only.

The archive holds this module beside the model and ``signature.json``. Rows of one TorchServe batch
run together if their shapes allow it, with at most ``max_batch_size`` elements at once. A wrong row
is answered ``{"error": ...}`` with status 400, and a row that the model fails on with 500; other
rows of the batch are not affected.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

# Relative, because the package has another name in the archive.
from .torchserve_envelope import (
    BINARY,
    BINARY_ONLY,
    DTYPES,
    HEADER_LENGTH,
    JSON,
    MODEL_FAILED,
    Array,
    EnvelopeTensor,
    Request,
    RowError,
    decode,
    encode,
)

SIGNATURE = "signature.json"
#: Header of a row that asks for the model's signature.
DESCRIBE = "describe"

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Spec:
    """One input or output.

    ``dims`` are the wire's, without the batch; a dynamic one is -1 or the name of an axis.
    ``reshape`` are the model's own dims if they differ.
    """

    name: str
    datatype: str
    dims: Sequence[int | str]
    reshape: Sequence[int] | None
    minimum: float | None
    maximum: float | str | None

    @property
    def wire_dims(self) -> list[int]:
        return [-1 if isinstance(dim, str) else dim for dim in self.dims]


@dataclass(frozen=True)
class HandlerSignature:
    """The content of ``signature.json``; with ``max_batch_size`` 0 dims are the whole shape."""

    name: str
    version: str
    max_batch_size: int
    inputs: Sequence[Spec]
    outputs: Sequence[Spec]
    axes: Mapping[str, Sequence[int | None]]  # smallest and largest size
    padding: Mapping[str, Any]  # by axis; stored for clients, unused here

    @classmethod
    def read(cls, path: Path) -> HandlerSignature:
        document = json.loads(path.read_text(encoding="utf-8"))
        for kind in ("inputs", "outputs"):
            document[kind] = [Spec(**spec) for spec in document[kind]]
        return cls(**document)

    @property
    def leading(self) -> int:
        """The number of dims before a spec's own."""
        return int(self.max_batch_size > 0)

    def check(self, request: Request) -> None:
        """Raise ``RowError`` unless the inputs match the signature."""
        specs = {spec.name: spec for spec in self.inputs}
        for name in request.inputs:
            if name not in specs:
                raise RowError(f"unexpected input '{name}'; the inputs are {_names(specs)}")
        missing = [name for name in specs if name not in request.inputs]
        if missing:
            raise RowError(f"missing input {_names(missing)}")
        sizes: dict[str, int] = {}
        for name, tensor in request.inputs.items():
            self._check_shape(specs[name], tensor, sizes)
        for name, tensor in request.inputs.items():
            _check_values(specs[name], tensor.data, sizes)
        if self.max_batch_size:
            batches = sorted({tensor.data.shape[0] for tensor in request.inputs.values()})
            if len(batches) != 1:
                raise RowError(f"the inputs have different batch sizes: {batches}")
            if not 1 <= batches[0] <= self.max_batch_size:
                most = self.max_batch_size
                raise RowError(f"the batch size must be from 1 to {most}, not {batches[0]}")

    def _check_shape(self, spec: Spec, tensor: EnvelopeTensor, sizes: dict[str, int]) -> None:
        """Check a shape, and record the size of each axis in ``sizes``."""
        name = spec.name
        if tensor.datatype != spec.datatype:
            raise RowError(f"input '{name}' must be {spec.datatype}, not {tensor.datatype}")
        dims = [-1] * self.leading + spec.wire_dims
        shape = tensor.data.shape
        if len(shape) != len(dims) or any(
            dim not in (-1, size) for dim, size in zip(dims, shape, strict=True)
        ):
            raise RowError(f"input '{name}' must have shape {dims}, not {list(shape)}")
        for axis, size in zip(spec.dims, shape[self.leading :], strict=True):
            if not isinstance(axis, str):
                continue
            low, high = self.axes[axis]
            if size < (low or 0) or (high is not None and size > high):
                span = f"at least {low}" if high is None else f"from {low} to {high}"
                raise RowError(f"input '{name}': '{axis}' must be {span}, not {size}")
            if sizes.setdefault(axis, size) != size:
                raise RowError(
                    f"input '{name}' has a '{axis}' of {size}, another input of {sizes[axis]}"
                )

    def wanted(self, request: Request) -> dict[str, bool]:
        """The outputs to answer, each with whether to send it as bytes."""
        specs = {spec.name: spec for spec in self.outputs}
        wanted = request.outputs
        if wanted is None:
            wanted = dict.fromkeys(specs, request.binary)
        for name, binary in wanted.items():
            if name not in specs:
                raise RowError(f"unexpected output '{name}'; the outputs are {_names(specs)}")
            if specs[name].datatype in BINARY_ONLY and not binary:
                raise RowError(f"output '{name}' is {specs[name].datatype}: ask for 'binary_data'")
        return wanted


def _check_values(spec: Spec, array: Array, sizes: Mapping[str, int]) -> None:
    low, high = spec.minimum, spec.maximum
    if isinstance(high, str):
        high = sizes.get(high)
    if (low is None and high is None) or not array.size or spec.datatype in ("BF16", "BOOL"):
        return
    least, most = array.min(), array.max()
    # Written so that NaN fails every range.
    below = low is not None and not least >= low
    if below or (high is not None and not most <= high):
        span = f"[{'' if low is None else low}, {'' if high is None else high}]"
        raise RowError(f"input '{spec.name}' must lie in {span}, got {least if below else most}")


def _reshape(array: Array, leading: int, before: Sequence[int], after: Sequence[int]) -> Array:
    """Reshape ``array`` from dims ``before`` to ``after``; dynamic sizes keep their order."""
    shape = array.shape
    dynamic = (size for size, dim in zip(shape[leading:], before, strict=True) if dim == -1)
    return array.reshape(shape[:leading] + tuple(next(dynamic) if d == -1 else d for d in after))


def _names(names: Any) -> str:
    return ", ".join(f"'{name}'" for name in names)


@dataclass
class HandlerRow:
    """A valid request; ``inputs`` are in the model's order and shapes."""

    index: int
    id: str
    batch: int
    inputs: list[Array]
    wanted: dict[str, bool]


class Handler:
    """A loaded model."""

    def __init__(self, context: Any) -> None:
        properties = context.system_properties
        folder = Path(properties["model_dir"])
        gpu = properties.get("gpu_id")
        on_gpu = gpu is not None and torch.cuda.is_available()
        self._device = torch.device(f"cuda:{gpu}" if on_gpu else "cpu")
        self._signature = HandlerSignature.read(folder / SIGNATURE)
        self._described = (folder / SIGNATURE).read_bytes()
        file = folder / context.manifest["model"]["serializedFile"]
        load: Any = torch.jit.load  # it has no type information
        self._model = load(str(file), map_location=self._device)

    def __call__(self, data: Sequence[Mapping[str, Any]], context: Any) -> list[bytes]:
        """Answer the rows in order."""
        answers: dict[int, bytes] = {}
        rows = []
        for index, parameters in enumerate(data):
            headers = context.get_all_request_header(index)
            if headers.get(DESCRIBE) == "True":  # the management API sends it with customized=true
                answers[index] = self._described
                continue
            try:
                rows.append(self._read(index, parameters, headers))
            except RowError as error:
                answers[index] = _refuse(context, index, error)
        for row, result in self._infer(rows):
            if isinstance(result, RowError):
                answers[row.index] = _refuse(context, row.index, result)
            else:
                answers[row.index] = self._answer(context, row, result)
        return [answers[index] for index in range(len(data))]

    def _read(
        self, index: int, parameters: Mapping[str, Any], headers: Mapping[str, Any]
    ) -> HandlerRow:
        request = decode(parameters, headers)
        self._signature.check(request)
        leading = self._signature.leading
        inputs, batch = [], 1
        for spec in self._signature.inputs:
            array = request.inputs[spec.name].data
            batch = array.shape[0] if leading else 1
            if spec.reshape is not None:
                array = _reshape(array, leading, spec.wire_dims, spec.reshape)
            inputs.append(array)
        return HandlerRow(index, request.id, batch, inputs, self._signature.wanted(request))

    def _infer(
        self, rows: Sequence[HandlerRow]
    ) -> Iterator[tuple[HandlerRow, list[Array] | RowError]]:
        groups: dict[Any, list[HandlerRow]] = {}
        for row in rows:
            shapes = tuple(array.shape[1:] for array in row.inputs)
            groups.setdefault(shapes if self._signature.max_batch_size else row.index, []).append(
                row
            )
        for group in groups.values():
            for part in self._parts(group):
                yield from self._infer_together(part)

    def _parts(self, rows: Sequence[HandlerRow]) -> Iterator[list[HandlerRow]]:
        """Yield ``rows`` in order, in groups that fit ``max_batch_size``."""
        part: list[HandlerRow] = []
        for row in rows:
            if part and sum(r.batch for r in part) + row.batch > self._signature.max_batch_size:
                yield part
                part = []
            part.append(row)
        yield part

    def _infer_together(
        self, rows: Sequence[HandlerRow]
    ) -> Iterator[tuple[HandlerRow, list[Array] | RowError]]:
        """Run the rows as one batch; if that fails, run each alone, so that only the cause
        fails."""
        try:
            results = self._run(rows)
        except Exception as error:
            if len(rows) > 1:
                for row in rows:
                    yield from self._infer_together([row])
                return
            _logger.exception("the model failed")
            reason = (str(error).strip() or type(error).__name__).splitlines()[-1]
            yield rows[0], RowError(f"the model failed: {reason}", MODEL_FAILED)
            return
        start = 0
        for row in rows:
            end = start + row.batch
            batched = self._signature.max_batch_size > 0
            yield row, [result[start:end] for result in results] if batched else results
            start = end

    def _run(self, rows: Sequence[HandlerRow]) -> list[Array]:
        """The outputs of all rows, concatenated, in the shapes of the wire."""
        columns = zip(*(row.inputs for row in rows), strict=True)
        joined = [parts[0] if len(parts) == 1 else np.concatenate(parts) for parts in columns]
        specs = zip(self._signature.inputs, joined, strict=True)
        tensors = [_to_torch(spec.datatype, array).to(self._device) for spec, array in specs]
        with torch.inference_mode():
            given = self._model(*tensors)
        outputs = (given,) if isinstance(given, torch.Tensor) else tuple(given)
        leading = self._signature.leading
        total = (sum(row.batch for row in rows),) * leading
        results = []
        for spec, output in zip(self._signature.outputs, outputs, strict=True):
            array = _to_numpy(output)
            if array.dtype != DTYPES[spec.datatype] or array.shape[:leading] != total:
                raise ValueError(
                    f"output '{spec.name}' is {array.dtype} {list(array.shape)} for a batch of "
                    f"{list(total)}, which is not in {SIGNATURE}"
                )
            if spec.reshape is not None:
                array = _reshape(array, leading, spec.reshape, spec.wire_dims)
            results.append(array)
        return results

    def _answer(self, context: Any, row: HandlerRow, results: Sequence[Array]) -> bytes:
        specs = zip(self._signature.outputs, results, strict=True)
        given = {
            spec.name: EnvelopeTensor(spec.name, spec.datatype, array) for spec, array in specs
        }
        outputs = [(given[name], binary) for name, binary in row.wanted.items()]
        name, version = self._signature.name, self._signature.version
        body, header_length = encode(row.id, name, version, outputs)
        if header_length is None:
            context.set_response_content_type(row.index, JSON)
        else:
            context.set_response_content_type(row.index, BINARY)
            context.set_response_header(row.index, HEADER_LENGTH, str(header_length))
        return body


def _refuse(context: Any, index: int, error: RowError) -> bytes:
    code, phrase = error.status
    context.set_response_status(code=code, phrase=phrase, idx=index)
    context.set_response_content_type(index, JSON)
    return json.dumps({"error": str(error)}).encode()


def _to_torch(datatype: str, array: Array) -> torch.Tensor:
    if datatype == "BF16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def _to_numpy(tensor: torch.Tensor) -> Array:
    tensor = tensor.detach().cpu().contiguous()
    if tensor.dtype == torch.bfloat16:
        bits: Array = tensor.view(torch.int16).numpy().view("<u2")
        return bits
    array: Array = tensor.numpy()
    return array


_handler: Handler | None = None


def handle(data: Any, context: Any) -> list[bytes] | None:
    """TorchServe's entry point; its first call, without data, loads the model."""
    global _handler
    if _handler is None:
        _handler = Handler(context)
    return None if data is None else _handler(data, context)
