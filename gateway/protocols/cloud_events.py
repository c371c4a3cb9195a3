"""CloudEvents 1.0 over HTTP, in and out, as KServe exchanges them for inference.

In binary mode the attributes are headers (``ce-id``), and the body is the event's data. In
structured mode the body is a JSON object of attributes and ``data``. The response to an event has
its mode.
"""

from __future__ import annotations

import base64
import binascii
import uuid
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from functools import partial
from urllib.parse import quote

import numpy as np
import orjson

from modelport.gateway.errors import InvalidArgument
from modelport.gateway.protocols import request_body
from modelport.gateway.protocols.http_message import (
    Answer,
    HttpRequest,
    HttpResponse,
)
from modelport.gateway.runtime import offload, request_memory
from modelport.gateway.types import Deadline, finished
from modelport.gateway.wire.incremental_json import STEPS
from modelport.gateway.wire.json_window import without_escapes
from modelport.gateway.wire.raw_tensors import Buffer

SPECVERSION = b"ce-specversion"
#: Beginning of the media types of structured mode; other formats and batches are refused.
STRUCTURED = b"application/cloudevents"
MEDIA_TYPE = b"application/cloudevents+json"
TYPE = "io.kserve.inference.response"
#: Limit of an event without its data, and of its attributes.
ENVELOPE_BYTES, MAX_ATTRIBUTES = 64 * 1024, 100
_REQUIRED = ("specversion", "id", "source", "type")
_CONTENT_TYPE = b"content-type"
_JSON = b"application/json"
_SPACE = b" \t\r\n"
_PIECE_BYTES = 64 * 1024


def is_event(headers: Mapping[bytes, bytes]) -> bool:
    """Whether a request with these headers holds an event."""
    return SPECVERSION in headers or headers.get(_CONTENT_TYPE, b"").startswith(STRUCTURED)


async def exchange(
    model: str,
    request: HttpRequest,
    limit: int,
    deadline: Deadline,
    bound: int | None,
    answer: Callable[[HttpRequest, bytes], Answer],
) -> HttpResponse:
    """Pass the event's data to ``answer``, and make an event of its response.

    The request's headers become those of the data. The limits are those of ``request_body.take``.

    Raises:
        InvalidArgument: The event is malformed, or as ``request_body.take``.
    """
    headers, source = request.fields, f"io.kserve.inference.{quote(model)}"
    structured = headers.get(_CONTENT_TYPE, b"").startswith(STRUCTURED)
    if not structured:
        _check(
            {name: headers.get(b"ce-" + name.encode(), b"").decode("latin-1") for name in _REQUIRED}
        )
        most = bound
    else:
        kind = headers[_CONTENT_TYPE].partition(b";")[0].strip().lower()
        if kind != MEDIA_TYPE:
            raise InvalidArgument(
                f"the CloudEvents format '{kind[:64].decode('latin-1')}' is not supported; send "
                f"one event as {MEDIA_TYPE.decode()}"
            )
        # The data may be base64.
        most = None if bound is None else bound * 4 // 3 + ENVELOPE_BYTES
    data = await request_body.read(request, limit, deadline, most)
    if structured:
        work = partial(_opened, data)
        data = await offload.run(work, deadline) if len(data) > offload.INLINE_BYTES else work()
        for name in (b"content-encoding", b"content-length", b"accept-encoding"):
            headers.pop(name, None)
        headers[_CONTENT_TYPE] = _JSON
    response = await finished(answer(request, data))
    if response.status != 200:
        return response
    if structured:
        event = _event(source, dict(response.headers)[_CONTENT_TYPE], response.body)
        return HttpResponse(200, event, response.headers).adding((_CONTENT_TYPE, MEDIA_TYPE))
    fields = [(f"ce-{k}".encode(), v.encode()) for k, v in _attributes(source).items()]
    return response.adding(*fields)


def _attributes(source: str) -> dict[str, str]:
    """Make the attributes of a response."""
    now = datetime.now(UTC).isoformat()
    return {
        "specversion": "1.0",
        "id": str(uuid.uuid4()),
        "source": source,
        "type": TYPE,
        "time": now,
    }


def _check(attributes: Mapping[str, object]) -> None:
    for name in _REQUIRED:
        value = attributes.get(name)
        if type(value) is not str or not value:
            raise InvalidArgument(f"the CloudEvent has no attribute '{name}', a string")
    if attributes["specversion"] != "1.0":
        shown = str(attributes["specversion"])[:64]
        raise InvalidArgument(f"the CloudEvent's specversion is '{shown}'; send one of 1.0")


def _event(source: str, content_type: bytes, data: Buffer) -> bytes:
    attributes = {**_attributes(source), "datacontenttype": content_type.decode("latin-1")}
    head = orjson.dumps(attributes)[:-1]
    if content_type == _JSON:
        return b"".join((head, b',"data":', data, b"}"))
    return b"".join((head, b',"data_base64":"', base64.b64encode(data), b'"}'))


# -- structured mode -------------------------------------------------------------------------------


def _opened(body: bytes) -> bytes:
    """Return the data of an event in JSON.

    Only the attributes are parsed here. The data is cut out, because its decoder has the limits.

    Raises:
        InvalidArgument: It is malformed, or has no data.
    """
    members: dict[str, tuple[int, int]] = {}
    at = _expect(body, _past_space(body, 0), b"{")
    while not body.startswith(b"}", at := _past_space(body, at)):
        at = _expect(body, at, b",") if members else at
        start = _past_space(body, at)
        end = _end_of_value(body, start)
        key = _parsed(body, start, end)
        if type(key) is not str or key in members or len(members) == MAX_ATTRIBUTES:
            raise _malformed()
        start = _past_space(body, _expect(body, _past_space(body, end), b":"))
        at = _end_of_value(body, start)
        members[key] = start, at
    if _past_space(body, at + 1) != len(body):
        raise _malformed()
    data, encoded = members.pop("data", None), members.pop("data_base64", None)
    _check({name: _parsed(body, *place) for name, place in members.items()})
    if (data is None) == (encoded is None):
        raise InvalidArgument("the CloudEvent must have one of 'data' and 'data_base64'")
    request_memory.reserve(len(body))
    if data is not None:
        return body[slice(*data)]
    assert encoded is not None
    return _decoded(body, *encoded)


def _decoded(body: bytes, start: int, end: int) -> bytes:
    parts = []
    try:
        if body[start : start + 1] != b'"':
            raise ValueError
        for at in range(start + 1, end - 1, _PIECE_BYTES):
            piece = body[at : min(at + _PIECE_BYTES, end - 1)]
            parts.append(base64.b64decode(piece, validate=True))
            offload.checkpoint()
    except (ValueError, binascii.Error):
        raise InvalidArgument("the 'data_base64' of the CloudEvent is not base64") from None
    return b"".join(parts)


def _malformed() -> InvalidArgument:
    return InvalidArgument(
        "the CloudEvent is not one JSON object of attributes and data, each of them once"
    )


def _past_space(body: bytes, at: int) -> int:
    """Skip the white space from ``at`` on, up to the size of an envelope."""
    piece = body[at : at + ENVELOPE_BYTES]
    return at + len(piece) - len(piece.lstrip(_SPACE))


def _expect(body: bytes, at: int, mark: bytes) -> int:
    if not body.startswith(mark, at):
        raise _malformed()
    return at + 1


def _parsed(body: bytes, start: int, end: int) -> object:
    """Parse a key or an attribute."""
    if end - start > ENVELOPE_BYTES:
        raise InvalidArgument(f"an attribute of the CloudEvent exceeds {ENVELOPE_BYTES} bytes")
    try:
        return orjson.loads(body[start:end])
    except orjson.JSONDecodeError:
        raise _malformed() from None


def _end_of_value(body: bytes, start: int) -> int:
    """Find the end of the JSON value at ``start``; what is in it is checked by its decoder."""
    first = body[start : start + 1]
    if first not in (b'"', b"[", b"{"):
        piece = body[start : start + 64]
        return start + len(piece) - len(piece.lstrip(b"+-.0123456789eEINaflnrstuy"))
    quotes = depth = 0
    escaped = False
    for at in range(start, len(body), _PIECE_BYTES):
        piece = body[at : at + _PIECE_BYTES]
        piece = without_escapes(b"_" + piece[1:] if escaped else piece)
        escaped = piece.endswith(b"\\")
        letters = np.frombuffer(piece, np.uint8)
        are_quotes = letters == ord('"')
        outside = ((np.cumsum(are_quotes, dtype=np.int32) + quotes) & 1) == 0
        depths = np.cumsum(np.where(outside, STEPS[letters], 0), dtype=np.int32) + depth
        closed = are_quotes if first == b'"' else STEPS[letters] < 0
        ends = np.flatnonzero(closed & outside & (depths == 0))
        if len(ends):
            return at + int(ends[0]) + 1
        quotes, depth = quotes + int(np.count_nonzero(are_quotes)), int(depths[-1])
        offload.checkpoint()
    raise _malformed()
