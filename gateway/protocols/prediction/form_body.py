"""Forms in request bodies: ``multipart/form-data`` and ``application/x-www-form-urlencoded``."""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import unquote_to_bytes

import numpy as np
from python_multipart.multipart import parse_options_header

from modelport.gateway.errors import InvalidArgument
from modelport.gateway.runtime import offload

MULTIPART, URLENCODED = b"multipart/form-data", b"application/x-www-form-urlencoded"
#: Fields that TorchServe's handlers read, in this order.
FIELDS = ("body", "data")
#: Limit of the fields of a form; only one is read.
MAX_FIELDS = 100
#: Size limits of an encoded field name, of a boundary (RFC 2046) and the spaces after it, and of
#: the headers of a part.
MAX_NAME, MAX_BOUNDARY, MAX_PADDING, MAX_PART_HEADERS = 64, 70, 64, 8192
#: Bytes that are searched at once.
_SEARCHED_BYTES = 256 * 1024
#: A header's name (RFC 9110, 5.6.2).
_TOKEN = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
#: Value of each hexadecimal digit by its character, -1 for other characters.
_HEX = np.full(256, -1, np.int16)
for _digit in "0123456789abcdefABCDEF":
    _HEX[ord(_digit)] = int(_digit, 16)


@dataclass(slots=True)
class FormField:
    """A field of a form."""

    content: bytes
    content_type: bytes = b""


def is_form(content_type: bytes, body: bytes) -> bool:
    """Whether a body is a form; ``curl -d`` calls every body one, JSON as well."""
    if content_type == URLENCODED:
        return not body.startswith((b"{", b"["))
    return content_type == MULTIPART


def media_type(header: bytes) -> bytes:
    """Extract the media type of a ``Content-Type`` header."""
    return header.partition(b";")[0].strip().lower()


def data_field(body: bytes, header: bytes) -> FormField:
    """Find the field with the input; ``header`` is the ``Content-Type``.

    Raises:
        InvalidArgument: The form is malformed or has no such field.
    """
    fields = _multipart(body, header) if media_type(header) == MULTIPART else _urlencoded(body)
    for name in FIELDS:
        if name in fields:
            return fields[name]
    raise InvalidArgument(
        "the form has no field 'data'; add it, or send application/json, or JSON and bytes as "
        "application/octet-stream"
    )


def _urlencoded(body: bytes) -> dict[str, FormField]:
    fields = {}
    for part in body.split(b"&", MAX_FIELDS)[:MAX_FIELDS]:
        name, _, value = part.partition(b"=")
        if len(name) > MAX_NAME:
            continue
        text = unquote_to_bytes(name.replace(b"+", b" ")).decode(errors="replace")
        if text in FIELDS:
            fields[text] = FormField(_unquote(value))
    return fields


def _unquote(text: bytes) -> bytes:
    """Decode ``+`` and percent-encoding in pieces."""
    parts, start = [], 0
    while start < len(text):
        end = start + offload.PIECE_BYTES
        cut = text.find(b"%", end - 2, end)
        if cut >= 0 and end < len(text):  # do not split an escape
            end = cut
        parts.append(_unquoted(text[start:end].replace(b"+", b" ")))
        start = end
        offload.checkpoint()
    return b"".join(parts)


def _unquoted(text: bytes) -> bytes:
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


def _multipart(body: bytes, header: bytes) -> dict[str, FormField]:
    """Parse the parts of ``body`` (RFC 2046, 5.1.1) after its preamble."""
    boundary = parse_options_header(header)[1].get(b"boundary")
    if not boundary:
        raise InvalidArgument("the Content-Type multipart/form-data has no boundary")
    if len(boundary) > MAX_BOUNDARY:
        raise InvalidArgument(f"the boundary of the form is longer than {MAX_BOUNDARY} bytes")
    delimiter = b"\r\n--" + boundary
    at = 0 if body.startswith(delimiter[2:]) else _find(body, delimiter, 0) + 2
    if at == 1:
        raise InvalidArgument("the body is not valid multipart/form-data")
    fields: dict[str, FormField] = {}
    at += len(delimiter) - 2
    for _ in range(MAX_FIELDS + 1):
        if body.startswith(b"--", at):
            return fields
        line = body.find(b"\r\n", at, at + MAX_PADDING + 2)
        if line < 0 or body[at:line].strip(b" \t"):
            raise InvalidArgument("the body is not valid multipart/form-data")
        end = _find(body, delimiter, line)
        if end < 0:
            raise InvalidArgument("the multipart/form-data body is cut short")
        name, found = _part(body, line + 2, end)
        if name:
            fields[name] = found
        at = end + len(delimiter)
        offload.checkpoint()
    raise InvalidArgument(f"the form has more than {MAX_FIELDS} fields")


def _find(body: bytes, delimiter: bytes, start: int) -> int:
    """Find ``delimiter`` in pieces, or return -1: one search of a long body takes too long."""
    while start < len(body):
        found = body.find(delimiter, start, start + _SEARCHED_BYTES + len(delimiter) - 1)
        if found >= 0:
            return found
        start += _SEARCHED_BYTES
        offload.checkpoint()
    return -1


def _part(body: bytes, start: int, end: int) -> tuple[str, FormField]:
    """Parse a part: headers, an empty line and the content."""
    headers: dict[bytes, bytes] = {}
    last = start + MAX_PART_HEADERS
    while not body.startswith(b"\r\n", start):
        stop = body.find(b"\r\n", start, min(last, end + 2))
        key, colon, value = body[start:stop].partition(b":")
        if stop < 0 or not colon or not _TOKEN.fullmatch(key):
            raise InvalidArgument("the body is not valid multipart/form-data")
        headers[key.lower()] = value.strip(b" \t")
        start = stop + 2
    content = body[min(start + 2, end) : end]
    options = parse_options_header(headers.get(b"content-disposition", b""))[1]
    name = options.get(b"name", b"").decode(errors="replace")
    return name, FormField(content, media_type(headers.get(b"content-type", b"")))
