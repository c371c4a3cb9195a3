"""Validate a request against its model's signature, and reshape tensors for the model.

Everything known at load time is computed then; a request costs only comparisons. Clients match on
some of the messages, which are Triton's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from modelport.gateway.errors import InvalidArgument
from modelport.gateway.types import (
    NUMPY_DTYPES,
    Axis,
    Datatype,
    InferRequest,
    InferResponse,
    ModelSignature,
    Reshape,
    Tensor,
    TensorSpec,
    dims_text,
)

#: The most bytes of a number in JSON with comma and indentation, and of everything around the
#: numbers: names, parameters, syntax.
NUMBER_BYTES = 64
SURROUNDINGS_BYTES = 1024 * 1024


class Validator:
    """The validator of a model version or a named signature."""

    def __init__(self, model_name: str, signature: ModelSignature) -> None:
        self._model = model_name
        self._max_batch_size = signature.max_batch_size
        batched = signature.max_batch_size > 0
        self._inputs = {s.name: _InputCheck(model_name, s, signature) for s in signature.inputs}
        self._required = frozenset(s.name for s in signature.inputs if not s.optional)
        self._outputs = frozenset(s.name for s in signature.outputs)
        self._any_shape = signature.any_shape
        self._plain = {} if self._any_shape else self._plain_inputs(signature)
        max_elements = _max_elements(signature)
        #: The most bytes of a valid request in any encoding; None: the signature sets no limit.
        self.max_bytes: int | None = None
        if max_elements is not None:
            self.max_bytes = max_elements * NUMBER_BYTES + SURROUNDINGS_BYTES
        self._reshaped = {
            s.name: Reshape(s.reshape, s.wire_dims, batched)
            for s in signature.outputs
            if s.reshape is not None
        }

    def check(self, request: InferRequest) -> int:
        """Raise unless ``request`` is valid; then give its tensors the model's shapes.

        Returns:
                The batch size (1 for a model that does not batch).

        Raises:
            InvalidArgument: the message names the input and the expectation.
        """
        inputs = request.inputs
        if self._plain and not request.outputs:
            batch = self._check_plain(inputs)
            if batch:
                return batch
        for name in request.outputs:
            if name not in self._outputs:
                raise InvalidArgument(
                    f"unexpected inference output '{name}' for model '{self._model}'"
                )
        if len(inputs) != len(self._inputs) or not all(t.name in self._inputs for t in inputs):
            self._check_names(inputs)
        if self._any_shape:
            batch = max(1, *(t.data.shape[0] if t.data.ndim else 1 for t in inputs), 1)
        else:
            batch = self._batch_size(inputs) if self._max_batch_size else 1
        sizes: dict[str, int] = {}
        seen = set()
        for tensor in inputs:
            self._inputs[tensor.name].check(tensor, sizes)
            seen.add(tensor.name)
        if len(seen) != len(inputs):
            self._check_names(inputs)
        for tensor in inputs:
            self._inputs[tensor.name].check_values(tensor, sizes)
        twice = _duplicate(request.outputs)
        if twice is not None:
            raise InvalidArgument(f"output '{twice}' already exists in request")
        return batch

    def _plain_inputs(
        self, signature: ModelSignature
    ) -> dict[str, tuple[Datatype, tuple[int, ...]]]:
        """Datatype and dims by name if all inputs need no other check; else empty."""
        plain = not any(
            spec.optional
            or (spec.reshape, spec.minimum, spec.maximum) != (None, None, None)
            or -1 in spec.wire_dims
            for spec in signature.inputs
        )
        return {s.name: (s.datatype, s.wire_dims) for s in signature.inputs} if plain else {}

    def _check_plain(self, inputs: Sequence[Tensor]) -> int:
        """The batch size if a fast check finds the inputs valid; 0: run the full check."""
        if len(inputs) != len(self._plain):
            return 0
        batch, most = 0, self._max_batch_size
        for tensor in inputs:
            shape = tensor.data.shape
            if most:
                if not shape or batch not in (0, shape[0]):
                    return 0
                batch, shape = shape[0], shape[1:]
            if self._plain.get(tensor.name) != (tensor.datatype, shape):
                return 0
        if len(inputs) > 1 and len({tensor.name for tensor in inputs}) != len(inputs):
            return 0
        if not most:
            return 1
        return batch if batch <= most else 0

    def restore(self, response: InferResponse) -> None:
        """Give reshaped outputs their shape on the wire."""
        if self._reshaped:
            for tensor in response.outputs:
                reshape = self._reshaped.get(tensor.name)
                if reshape is not None:
                    tensor.data = reshape(tensor.data)

    def raw_input(self, size_bytes: int) -> tuple[TensorSpec, tuple[int, ...]]:
        """The only input and its shape, for a body of raw tensor data.

        Raises:
            InvalidArgument: the model has several inputs, or the size does not determine the
                shape.
        """
        if len(self._inputs) != 1:
            raise InvalidArgument(
                "Raw request must only have 1 input (found 1) to be deduced but got "
                f"{len(self._inputs)} inputs in '{self._model}' model configuration"
            )
        spec = next(iter(self._inputs.values())).spec
        dims = list(spec.wire_dims)
        fixed = math.prod(d for d in dims if d != -1)
        if dims.count(-1) > 1:
            raise InvalidArgument(
                f"The shape of the raw input '{spec.name}' can not be deduced because there are "
                "more than one variable-sized dimension"
            )
        if spec.datatype is Datatype.BYTES:
            if fixed != 1 or -1 in dims:
                raise InvalidArgument(
                    f"For BYTE datatype raw input '{spec.name}', the model must have input shape "
                    "[1]"
                )
        elif -1 in dims:
            dims[dims.index(-1)] = size_bytes // (fixed * NUMPY_DTYPES[spec.datatype].itemsize)
        return spec, (1, *dims) if self._max_batch_size else tuple(dims)

    def _batch_size(self, inputs: Sequence[Tensor]) -> int:
        batch = -1
        for tensor in inputs:
            shape = tensor.data.shape
            if not shape:
                raise InvalidArgument(
                    f"input '{tensor.name}' has no shape but model requires batch dimension for "
                    f"'{self._model}'"
                )
            if batch == -1:
                batch = shape[0]
            elif shape[0] != batch:
                raise InvalidArgument(
                    f"input '{tensor.name}' batch size does not match other inputs for "
                    f"'{self._model}'"
                )
        if batch > self._max_batch_size:
            raise InvalidArgument(
                f"inference request batch-size must be <= {self._max_batch_size} for "
                f"'{self._model}'"
            )
        if batch < 1:
            raise InvalidArgument(f"inference request batch-size must be >= 1 for '{self._model}'")
        return batch

    def _check_names(self, inputs: Sequence[Tensor]) -> None:
        got = [tensor.name for tensor in inputs]
        twice = _duplicate(got)
        if twice is not None:
            raise InvalidArgument(f"input '{twice}' already exists in request")
        for name in got:
            if name not in self._inputs:
                raise InvalidArgument(
                    f"unexpected inference input '{name}' for model '{self._model}'"
                )
        missing = [name for name in self._inputs if name in self._required and name not in got]
        if missing:
            least, most = len(self._required), len(self._inputs)
            expected = f"number of inputs between {least} and {most}"
            raise InvalidArgument(
                f"expected {f'{most} inputs' if least == most else expected} but got {len(got)} "
                f"inputs for model '{self._model}'. Got input(s) {_quoted(got)}, but missing "
                f"required input(s) {_quoted(missing)}. Please provide all required input(s)."
            )


def _duplicate(names: Sequence[str]) -> str | None:
    """The first name that occurs twice."""
    seen: set[str] = set()
    for name in names:
        if name in seen:
            return name
        seen.add(name)
    return None


def _quoted(names: Sequence[str]) -> str:
    """Names in Triton's format, on which clients match: ``['a','b']``."""
    return "[" + ",".join(f"'{name}'" for name in names) + "]"


class _InputCheck:
    """The checks of one input, prepared at load time."""

    def __init__(self, model: str, spec: TensorSpec, signature: ModelSignature) -> None:
        self.spec = spec
        self._model = model
        self._datatype = spec.datatype
        batched = signature.max_batch_size > 0
        self._dims = ((-1,) if batched else ()) + spec.wire_dims
        self._rank = len(self._dims)
        self._any_shape = signature.any_shape
        offset = int(batched)
        self._fixed = [(i, d) for i, d in enumerate(self._dims) if d != -1]
        self._axes: list[tuple[int, Axis]] = [
            (offset + i, signature.axes[d]) for i, d in enumerate(spec.dims) if isinstance(d, str)
        ]
        self._minimum = spec.minimum
        self._maximum = spec.maximum
        self._bounded = (
            spec.minimum is not None or spec.maximum is not None
        ) and spec.datatype not in (Datatype.BYTES, Datatype.BF16, Datatype.BOOL)
        self._reshape = (
            Reshape(spec.wire_dims, spec.reshape, batched) if spec.reshape is not None else None
        )

    def check(self, tensor: Tensor, sizes: dict[str, int]) -> None:
        """Check datatype, rank and sizes; record the size of each named axis in ``sizes``."""
        shape = tensor.data.shape
        if tensor.datatype is not self._datatype:
            raise InvalidArgument(
                f"inference input '{tensor.name}' data-type is '{tensor.datatype}', but model "
                f"'{self._model}' expects '{self._datatype}'"
            )
        if self._any_shape:
            return
        if len(shape) != self._rank:
            raise self._unexpected(tensor)
        for index, size in self._fixed:
            if shape[index] != size:
                raise self._unexpected(tensor)
        for index, axis in self._axes:
            size = shape[index]
            if size < axis.minimum or (axis.maximum is not None and size > axis.maximum):
                most = "" if axis.maximum is None else f" and <= {axis.maximum}"
                raise InvalidArgument(
                    f"unexpected shape for input '{tensor.name}' for model '{self._model}'. "
                    f"Expected {dims_text(self._dims)}, got {dims_text(shape)}: '{axis.name}' must "
                    f"be >= {axis.minimum}{most}"
                )
            if sizes.setdefault(axis.name, size) != size:
                raise InvalidArgument(
                    f"input '{tensor.name}' for model '{self._model}' has '{axis.name}' of size "
                    f"{size}, but another input has {sizes[axis.name]}"
                )

    def check_values(self, tensor: Tensor, sizes: dict[str, int]) -> None:
        """Check the bounds of the values, then reshape the tensor for the model."""
        data = tensor.data
        if self._bounded and data.size:
            maximum: Any = self._maximum
            if isinstance(maximum, str):
                maximum = sizes.get(maximum)
            low, high = _range(data)
            below = self._minimum is not None and not low >= self._minimum
            if below or (maximum is not None and not high <= maximum):
                raise InvalidArgument(
                    f"input '{tensor.name}' for model '{self._model}' must lie in "
                    f"[{'' if self._minimum is None else self._minimum}, "
                    f"{'' if maximum is None else maximum}], got {low if below else high}"
                )
        if self._reshape is not None:
            tensor.data = self._reshape(data)

    def _unexpected(self, tensor: Tensor) -> InvalidArgument:
        note = "."
        if self._dims[:1] == (-1,) and len(self._dims) != len(self.spec.dims):
            note = (
                ". NOTE: Setting a non-zero max_batch_size in the model config requires a batch "
                "dimension to be prepended to each input shape."
            )
        return InvalidArgument(
            f"unexpected shape for input '{tensor.name}' for model '{self._model}'. Expected "
            f"{dims_text(self._dims)}, got {dims_text(tensor.data.shape)}{note}"
        )


def _max_elements(signature: ModelSignature) -> int | None:
    """The elements of the largest valid request; None: the signature sets no limit."""
    if signature.any_shape:
        return None
    total = 0
    for spec in signature.inputs:
        count = max(1, signature.max_batch_size)
        for dim in spec.dims:
            most = signature.axes[dim].maximum if isinstance(dim, str) else dim
            if most is None or most == -1 or spec.datatype is Datatype.BYTES:
                return None
            count *= most
        total += count
    return total


def _range(data: np.ndarray[Any, Any]) -> tuple[Any, Any]:
    """Minimum and maximum, by the ufuncs that numpy's methods would call."""
    if data.size == 1:
        value = data.reshape(())[()]
        return value, value
    return np.minimum.reduce(data, axis=None), np.maximum.reduce(data, axis=None)
