"""Requests of a Python model to other models of its gateway: ``modelport.infer`` and the like.

A request has the deadline of the one that the model answers. Outside of a gateway there are no
other models, and each raises ``Unavailable``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

import triton_python_backend_utils as pb_utils
from modelport.gateway.errors import (
    AlreadyExists,
    Internal,
    InvalidArgument,
    ModelportError,
    NotFound,
    Unavailable,
    Unsupported,
)
from triton_python_backend_utils._runtime import BLS_REFUSED

Outputs = dict[str, np.ndarray[Any, Any]]
#: By the codes of ``TritonError``.
_ERRORS: Mapping[int, type[ModelportError]] = {
    pb_utils.TritonError.NOT_FOUND: NotFound,
    pb_utils.TritonError.INVALID_ARG: InvalidArgument,
    pb_utils.TritonError.UNAVAILABLE: Unavailable,
    pb_utils.TritonError.UNSUPPORTED: Unsupported,
    pb_utils.TritonError.ALREADY_EXISTS: AlreadyExists,
}


def infer(
    model: str, inputs: Mapping[str, ArrayLike], *, version: int = 0, outputs: Sequence[str] = ()
) -> Outputs:
    """Send a request to another model of the gateway, and return its outputs by name.

    Args:
        inputs: arrays by name, of the datatype and shape that the other model declares; text is
            encoded as UTF-8, and text in outputs is ``bytes``.
        version: 0: the one that the model's policy chooses.
        outputs: all of them unless given.

    Raises:
        ModelportError: the error of the other model.
    """
    with _translated():
        return _outputs(_request(model, inputs, version, outputs).exec())


async def infer_async(
    model: str, inputs: Mapping[str, ArrayLike], *, version: int = 0, outputs: Sequence[str] = ()
) -> Outputs:
    """``infer`` for an ``async`` model."""
    with _translated():
        return _outputs(await _request(model, inputs, version, outputs).async_exec())


def infer_stream(
    model: str, inputs: Mapping[str, ArrayLike], *, version: int = 0, outputs: Sequence[str] = ()
) -> Iterator[Outputs]:
    """``infer`` of a model that streams: its responses, one after the other."""
    with _translated():
        responses = _request(model, inputs, version, outputs).exec(decoupled=True)
        try:
            for response in responses:
                yield _outputs(response)
        finally:
            responses.cancel()


def _request(
    model: str, inputs: Mapping[str, ArrayLike], version: int, outputs: Sequence[str]
) -> pb_utils.InferenceRequest:
    tensors = [pb_utils.Tensor(name, _array(value)) for name, value in inputs.items()]
    return pb_utils.InferenceRequest(
        inputs=tensors, requested_output_names=outputs, model_name=model,
        model_version=version or -1,
    )  # fmt: skip


def _array(value: ArrayLike) -> np.ndarray[Any, Any]:
    array = np.asarray(value)
    return array.astype(object) if array.dtype.kind in "US" else array


def _outputs(response: pb_utils.InferenceResponse) -> Outputs:
    error = response.error()
    if error is not None:
        raise _ERRORS.get(error.reason[1], Internal)(error.reason[0])
    return {tensor.name(): tensor.as_numpy() for tensor in response.output_tensors()}


@contextlib.contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except pb_utils.TritonModelException as error:
        if str(error) == BLS_REFUSED:
            raise Unavailable(
                "another model can only be called while a gateway's model answers a request; "
                "modelport.testing.serve starts a gateway"
            ) from error
        raise InvalidArgument(str(error)) from error
