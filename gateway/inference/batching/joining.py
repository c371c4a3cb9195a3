"""Join several requests into one, and split its response again.

Requests are joined if they have the same inputs of the same sizes. Along an axis that declares
``padding``, sizes may differ: shorter inputs are padded at the end, and outputs along that axis are
cut to the size of each request.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import chain
from typing import Any

import numpy as np

from modelport.gateway.errors import Internal, InvalidArgument
from modelport.gateway.types import (
    NUMPY_DTYPES,
    Array,
    Datatype,
    InferRequest,
    InferResponse,
    ModelSignature,
    Tensor,
    TensorSpec,
)

#: Parameters for the batcher itself.
_OWN_PARAMETERS = frozenset({"priority", "timeout"})


class Joiner:
    """Joins requests of one signature. Tensors have the model's own shapes.

    Raises:
        InvalidArgument: with padding, a dynamic dimension of an output has no axis name, or the
            axes of an input have different values.
    """

    def __init__(
        self,
        signature: ModelSignature,
        parameters: bool,
        ragged: frozenset[str] = frozenset(),
    ) -> None:
        self._batched = signature.max_batch_size > 0
        self._parameters, self._ragged = parameters, ragged
        self._inputs = {spec.name: _JoinedInput(spec, signature) for spec in signature.inputs}
        self._outputs = {spec.name: _padded(spec, signature) for spec in signature.outputs}
        self._pads = any(tensor.padded for tensor in self._inputs.values())
        if self._pads:
            _check_outputs(signature)
        fixed = all(-1 not in s.model_dims and not s.optional for s in signature.inputs)
        #: All requests can be joined, or none.
        self._uniform = (fixed and not parameters) or not self._batched

    def size(self, request: InferRequest) -> int:
        """Batch elements."""
        return int(request.inputs[0].data.shape[0]) if self._batched and request.inputs else 1

    def bucket(self, request: InferRequest) -> Hashable:
        """A key: requests of equal buckets can be joined."""
        if self._uniform:
            return None
        inputs = self._inputs
        shapes = [
            (t.name, () if t.name in self._ragged else inputs[t.name].fixed(t.data.shape[1:]))
            for t in request.inputs
        ]
        shapes.sort()
        if not self._parameters:
            return tuple(shapes)
        others = {k: v for k, v in request.parameters.items() if k not in _OWN_PARAMETERS}
        # 1, 1.0 and True are equal, but a backend may treat them differently.
        return (request.via, *shapes, *sorted((k, type(v).__name__, v) for k, v in others.items()))

    def join(self, requests: Sequence[InferRequest]) -> InferRequest:
        """One request with the rows of all, in order, and the outputs that any of them asks for.

        Args:
            requests: at least two, of one bucket.
        """
        first = requests[0]
        columns = [{tensor.name: tensor.data for tensor in r.inputs} for r in requests]
        inputs = [
            Tensor(
                tensor.name,
                tensor.datatype,
                self._inputs[tensor.name].join([column[tensor.name] for column in columns]),
            )
            for tensor in first.inputs
        ]
        return InferRequest(
            first.model_name,
            inputs,
            _union([request.outputs for request in requests]),
            first.model_version,
            parameters=first.parameters if self._parameters else {},
            signature=first.signature,
            via=first.via,
        )

    def split(
        self, response: InferResponse, joined: InferRequest, requests: Sequence[InferRequest]
    ) -> list[InferResponse]:
        """Split the response to ``joined`` into one for each of ``requests``, as views.

        Raises:
            Internal: the response has the wrong number of rows or the wrong sizes.
        """
        sizes = [self.size(request) for request in requests]
        rows, longest = sum(sizes), self._lengths(joined)  # without inputs only they tell the rows
        for tensor in response.outputs:
            shape = tensor.data.shape
            cut = self._outputs.get(tensor.name, ())
            if not shape or shape[0] != rows or any(shape[i] != longest[a] for i, a in cut):
                raise Internal(
                    f"output '{tensor.name}' has shape {list(shape)} for a batch of {rows}"
                )
        answers, start = [], 0
        for request, size in zip(requests, sizes, strict=True):
            end, lengths = start + size, self._lengths(request)
            outputs = [
                Tensor(t.name, t.datatype, self._part(t, start, end, lengths))
                for t in _wanted(response.outputs, request.outputs)
            ]
            answers.append(
                InferResponse(
                    response.model_name,
                    response.model_version,
                    outputs,
                    parameters=response.parameters,
                )
            )
            start = end
        return answers

    def _lengths(self, request: InferRequest) -> dict[str, int]:
        """The size of the inputs along each padded axis."""
        if not self._pads:
            return {}
        return {
            axis: tensor.data.shape[index]
            for tensor in request.inputs
            for index, axis in self._inputs[tensor.name].padded
        }

    def _part(self, tensor: Tensor, start: int, end: int, lengths: dict[str, int]) -> Array:
        part = tensor.data[start:end]
        for index, axis in self._outputs.get(tensor.name, ()):
            part = part[(*[slice(None)] * index, slice(lengths[axis]))]
        return part


class _JoinedInput:
    """Joins the arrays of one input."""

    def __init__(self, spec: TensorSpec, signature: ModelSignature) -> None:
        self.padded = _padded(spec, signature)
        self._padded = frozenset(index - 1 for index, _ in self.padded)
        self._pad = _pad_value(spec, signature) if self.padded else None

    def fixed(self, sizes: tuple[int, ...]) -> tuple[int, ...]:
        """``sizes`` without the batch dimension; -1 for padded dimensions."""
        if not self._padded:
            return sizes
        return tuple(-1 if i in self._padded else size for i, size in enumerate(sizes))

    def join(self, arrays: Sequence[Array]) -> Array:
        first = arrays[0].shape[1:]
        if not self.padded or all(array.shape[1:] == first for array in arrays):
            return np.concatenate(arrays)
        longest = tuple(map(max, zip(*(array.shape[1:] for array in arrays), strict=True)))
        rows = sum(array.shape[0] for array in arrays)
        joined: Array = np.full((rows, *longest), self._pad, dtype=arrays[0].dtype)
        start = 0
        for array in arrays:
            end = start + array.shape[0]
            joined[(slice(start, end), *map(slice, array.shape[1:]))] = array
            start = end
        return joined


def _padded(spec: TensorSpec, signature: ModelSignature) -> tuple[tuple[int, str], ...]:
    """Index, batch dimension included, and axis name of each padded dimension."""
    names = iter([d for d in spec.dims if isinstance(d, str) or d == -1])
    found = []
    for index, size in enumerate(spec.model_dims):
        name = next(names) if size == -1 else None
        if isinstance(name, str) and signature.axes[name].padding is not None:
            found.append((index + 1, name))
    return tuple(found)


def _pad_value(spec: TensorSpec, signature: ModelSignature) -> Any:
    """The value that pads ``spec`` at its end."""
    paddings = [signature.axes[axis].padding for _, axis in _padded(spec, signature)]
    values = {dict(p)[spec.name] if isinstance(p, tuple) else p for p in paddings}
    if len(values) > 1:
        raise InvalidArgument(
            f"input '{spec.name}' has axes with different values for 'padding'; give it one value"
        )
    (value,) = values
    if spec.datatype is Datatype.BYTES:
        return b""
    if spec.datatype is Datatype.BF16:  # the upper half of a float's bits
        return np.uint16(np.array(value, np.float32).view(np.uint32) >> np.uint32(16))
    return np.array(value).astype(NUMPY_DTYPES[spec.datatype])[()]


def _check_outputs(signature: ModelSignature) -> None:
    for spec in signature.outputs:
        if -1 in spec.dims:
            raise InvalidArgument(
                f"with 'padding' declared, every dynamic dimension of output '{spec.name}' needs "
                f"the name of an axis; name it in the parameter 'axes.{spec.name}'"
            )


def _union(wanted: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    """All names without repetition; empty, which means all outputs, if any is empty."""
    return tuple(dict.fromkeys(chain(*wanted))) if all(wanted) else ()


def _wanted(outputs: Sequence[Tensor], names: tuple[str, ...]) -> Sequence[Tensor]:
    if not names or len(names) == len(outputs) == 1:
        return outputs
    by_name = {tensor.name: tensor for tensor in outputs}
    return [by_name[name] for name in names]
