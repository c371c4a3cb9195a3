"""Conversions shared by the HTTP and gRPC clients for Open Inference Protocol servers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from modelport.gateway.repository.autocomplete import ArtifactTensor
from modelport.gateway.types import Datatype, InferRequest, Parameter
from modelport.gateway.upstream.outlier_detection import EndpointFailed, FailureKind
from modelport.gateway.wire import raw_tensors

#: Parameters that the protocols carry in other fields.
_UNSENT = frozenset(
    {
        "binary_data",
        "binary_data_output",
        "binary_data_size",
        "classification",
        "timeout",
        "triton_enable_empty_final_response",
    }
)
_DATATYPES = frozenset(datatype.value for datatype in Datatype)


def parameters(request: InferRequest, remaining_seconds: float | None) -> dict[str, Parameter]:
    """The parameters to send; a client's timeout becomes the remaining time, where that is less.

    The timeout of a request of a sequence limits the wait for a slot alone, and not its deadline.
    """
    if not request.parameters:
        return {}
    kept = {key: value for key, value in request.parameters.items() if key not in _UNSENT}
    timeout = int(request.parameters.get("timeout", 0))
    if timeout and remaining_seconds is not None:
        kept["timeout"] = max(1, min(timeout, int(remaining_seconds * 1_000_000)))
    return kept


def tensor_metadata(name: object, datatype: object, shape: Sequence[Any]) -> ArtifactTensor:
    """Check one tensor of a server's metadata.

    Raises:
        EndpointFailed: it does not describe a tensor.
    """
    sizes = tuple(shape)
    if (
        not isinstance(name, str)
        or len(sizes) > raw_tensors.MAX_RANK
        or not all(type(size) is int and size >= -1 for size in sizes)
        or datatype not in _DATATYPES
    ):
        raise EndpointFailed(FailureKind.DAMAGED, "its metadata is invalid")
    return ArtifactTensor(name, Datatype(datatype), sizes)
