"""Validation of request and tensor parameters, shared by HTTP and gRPC."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from modelport.gateway.errors import InvalidArgument
from modelport.gateway.types import Deadline, InferRequest


def _is_unsigned(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**64


#: Whether a value has a parameter's type, and the type's name in messages.
_Type = tuple[Callable[[Any], bool], str]
_BOOLEAN: _Type = (lambda value: type(value) is bool, "true or false")
_UNSIGNED: _Type = (_is_unsigned, "an unsigned integer")
_KNOWN: Mapping[str, _Type] = {
    "binary_data_output": _BOOLEAN,
    "binary_data": _BOOLEAN,
    "binary_data_size": _UNSIGNED,
    "classification": (lambda value: _is_unsigned(value) and value > 0, "an integer above 0"),
    "shared_memory_region": (lambda value: type(value) is str, "a string"),
    "shared_memory_offset": _UNSIGNED,
    "shared_memory_byte_size": _UNSIGNED,
    "priority": _UNSIGNED,
    "timeout": (_is_unsigned, "an unsigned integer, in microseconds"),
    "sequence_start": _BOOLEAN,
    "sequence_end": _BOOLEAN,
    "sequence_id": (
        lambda value: _is_unsigned(value) or type(value) is str,
        "an unsigned integer or a string",
    ),
}
_RESERVED = "triton_"
#: Parameters that clients set by other means, and headers cannot.
_RESERVED_HEADERS = frozenset({"headers", *_KNOWN})


def is_reserved(header: str) -> bool:
    """Whether a header of this name may be no parameter."""
    return header in _RESERVED_HEADERS or header.startswith(_RESERVED)


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
    """Return the earlier of ``limit`` and the request's ``timeout``, in microseconds.

    Of a sequence, the ``timeout`` only limits the wait for its begin, as in Triton.
    """
    timeout = request.parameters.get("timeout")
    if timeout and request.parameters.get("sequence_id"):
        return limit
    return limit.earliest(int(timeout) / 1_000_000) if timeout else limit
