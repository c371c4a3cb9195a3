"""Validation of request and tensor parameters, shared by HTTP and gRPC."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from modelport.gateway.errors import InvalidArgument
from modelport.gateway.types import Deadline, InferRequest


def _unsigned(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**64


def _positive(value: Any) -> bool:
    return _unsigned(value) and value > 0


def _boolean(value: Any) -> bool:
    return type(value) is bool


def _sequence(value: Any) -> bool:
    return _unsigned(value) or type(value) is str


def _text(value: Any) -> bool:
    return type(value) is str


_KNOWN: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "binary_data_output": (_boolean, "true or false"),
    "binary_data": (_boolean, "true or false"),
    "binary_data_size": (_unsigned, "an unsigned integer"),
    "classification": (_positive, "an integer above 0"),
    "shared_memory_region": (_text, "a string"),
    "shared_memory_offset": (_unsigned, "an unsigned integer"),
    "shared_memory_byte_size": (_unsigned, "an unsigned integer"),
    "priority": (_unsigned, "an unsigned integer"),
    "timeout": (_unsigned, "an unsigned integer, in microseconds"),
    "sequence_start": (_boolean, "true or false"),
    "sequence_end": (_boolean, "true or false"),
    "sequence_id": (_sequence, "an unsigned integer or a string"),
}
_RESERVED = "triton_"


def check(key: str, value: Any) -> None:
    """Check the parameter ``key``.

    Raises:
        InvalidArgument: The key is reserved, or the value does not have the parameter's type.
    """
    if key in _KNOWN:
        accepts, form = _KNOWN[key]
        if not accepts(value):
            raise InvalidArgument(f"Unable to parse '{key}': it must be {form}")
    elif key.startswith(_RESERVED):
        raise InvalidArgument(
            "parameter keys starting with 'triton_' are reserved for Triton usage and should not "
            "be specified."
        )
    elif type(value) not in (bool, int, float, str):
        raise InvalidArgument(
            f"parameter '{key}' has invalid type. It should be either 'bool', 'int', 'double' or "
            "'string'."
        )


def deadline(request: InferRequest, limit: Deadline) -> Deadline:
    """Return the earlier of ``limit`` and the request's ``timeout``, in microseconds."""
    timeout = request.parameters.get("timeout")
    return limit.earliest(int(timeout) / 1_000_000) if timeout else limit
