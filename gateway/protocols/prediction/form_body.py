"""Forms as request bodies: ``multipart/form-data`` and ``application/x-www-form-urlencoded``."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from urllib.parse import unquote_to_bytes

import numpy as np
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from gateway.errors import InvalidArgument

MULTIPART, URLENCODED = b"multipart/form-data", b"application/x-www-form-urlencoded"
#: TorchServe's handlers look for these fields, in this order.
FIELDS = ("body", "data")
#: A form has one field that counts, and few beside it.
MAX_FIELDS = 100
#: The value of a hexadecimal digit, by its character; -1: it is none.
_HEX = np.full(256, -1, np.int16)
for _digit in "0123456789abcdefABCDEF":
    _HEX[ord(_digit)] = int(_digit, 16)

# It warns of every damaged form; whoever sent that is told.
logging.getLogger("python_multipart").setLevel(logging.CRITICAL)


@dataclass(slots=True)
class Field:
    content: bytes
    content_type: bytes = b""


def is_form(content_type: bytes) -> bool:
    return content_type in (MULTIPART, URLENCODED)


def media_type(header: bytes) -> bytes:
    """A ``Content-Type`` without its parameters."""
    return header.partition(b";")[0].strip().lower()


def data_field(body: bytes, header: bytes) -> Field:
    """The field with the input, of the form in ``body``; ``header`` is the ``Content-Type``.

    Raises:
        InvalidArgument: the form is damaged or has no such field.
    """
    fields = _multipart(body, header) if media_type(header) == MULTIPART else _urlencoded(body)
    for name in FIELDS:
        if name in fields:
            return fields[name]
    raise InvalidArgument(
        "the form has no field 'data'; or send application/json, or JSON with bytes behind it as "
        "application/octet-stream"
    )


def _urlencoded(body: bytes) -> dict[str, Field]:
    fields = {}
    for part in body.split(b"&", MAX_FIELDS)[:MAX_FIELDS]:
        name, _, value = part.partition(b"=")
        text = unquote_to_bytes(name.replace(b"+", b" ")).decode(errors="replace")
        if text in FIELDS:
            fields[text] = Field(_unquote(value.replace(b"+", b" ")))
    return fields


def _unquote(text: bytes) -> bytes:
    """As ``unquote_to_bytes``, of megabytes: that makes a list with an item for every ``%``."""
    letters = np.frombuffer(text, np.uint8)
    places = np.flatnonzero(letters[:-2] == ord("%"))
    high, low = _HEX[letters[places + 1]], _HEX[letters[places + 2]]
    valid = (high >= 0) & (low >= 0)
    places = places[valid]
    decoded = letters.copy()
    decoded[places] = high[valid] * 16 + low[valid]
    keep = np.ones(letters.size, bool)
    keep[places + 1] = keep[places + 2] = False
    return decoded[keep].tobytes()


@dataclass(slots=True)
class _Part:
    headers: dict[bytes, bytes] = field(default_factory=dict)
    chunks: list[bytes] = field(default_factory=list)


def _multipart(body: bytes, header: bytes) -> dict[str, Field]:
    boundary = parse_options_header(header)[1].get(b"boundary")
    if not boundary:
        raise InvalidArgument("the Content-Type multipart/form-data has no boundary")
    parts: list[_Part] = []
    key, value = bytearray(), bytearray()
    complete = False

    def begin() -> None:
        if len(parts) == MAX_FIELDS:
            raise InvalidArgument(f"the form has more than {MAX_FIELDS} fields")
        parts.append(_Part())

    def header_end() -> None:
        parts[-1].headers[bytes(key).lower()] = bytes(value)
        key.clear()
        value.clear()

    def end() -> None:
        nonlocal complete
        complete = True

    try:
        parser = MultipartParser(
            boundary,
            {
                "on_part_begin": begin,
                "on_part_data": lambda data, start, stop: parts[-1].chunks.append(data[start:stop]),
                "on_header_field": lambda data, start, stop: key.extend(data[start:stop]),
                "on_header_value": lambda data, start, stop: value.extend(data[start:stop]),
                "on_header_end": header_end,
                "on_end": end,
            },
        )
        parser.write(body)
        parser.finalize()
    except FormParserError as error:
        raise InvalidArgument("the body is not valid multipart/form-data") from error
    if not complete:
        raise InvalidArgument("the multipart/form-data body is cut short")
    return {name: found for part in parts for name, found in [_field(part)] if name}


def _field(part: _Part) -> tuple[str, Field]:
    options = parse_options_header(part.headers.get(b"content-disposition", b""))[1]
    name = options.get(b"name", b"").decode(errors="replace")
    kind = media_type(part.headers.get(b"content-type", b""))
    return name, Field(b"".join(part.chunks), kind)
