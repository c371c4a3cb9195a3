"""Dataclasses as JSON: what is read is of exactly their fields and types."""

from __future__ import annotations

import functools
from typing import Any, TypeVar

import orjson

from modelport.gateway.errors import InvalidArgument

T = TypeVar("T")
#: The configuration of a dataclass in which unknown fields and non-finite numbers are errors.
STRICT = {"extra": "forbid", "allow_inf_nan": False}


def read(kind: type[T], content: bytes) -> T:
    """The ``kind`` that the JSON document ``content`` describes.

    Raises:
        InvalidArgument: it is not JSON, or has a wrong, missing or unknown field.
    """
    from pydantic import ValidationError  # takes longer to import than the rest of a rollout

    reader: Any = _reader
    try:
        found: T = reader(kind).validate_json(content, strict=True)
        return found
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    where = ".".join(map(str, first["loc"]))
    problem = first["msg"].removeprefix("Input ").replace("\n", " ")
    raise InvalidArgument(f"'{where}': {problem}" if where else problem)


def write(value: Any) -> bytes:
    """The JSON document that ``read`` reads.

    Raises:
        InvalidArgument: JSON cannot hold the value.
    """
    try:
        return orjson.dumps(value, default=lambda named_tuple: named_tuple._asdict())
    except orjson.JSONEncodeError as error:
        raise InvalidArgument(f"this is not JSON: {error}") from error


@functools.cache
def _reader(kind: Any) -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(kind)
