"""The comparison of an answer with the recorded one: bit by bit, else by values."""

from __future__ import annotations

import json
import math
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping
from enum import StrEnum
from typing import Any, NamedTuple

import numpy as np

from modelport.gateway.recording.record_reader import RecordedMessage, RecordedRequest
from modelport.loadtests.load.payloads import UNREADABLE, Tensors

#: Size of an answer after decompression.
MOST_BYTES = 1 << 30
#: Values of the envelopes for language models that no two answers have in common.
VOLATILE = frozenset({"id", "created", "request_id", "responseId"})
#: Dialects with such values.
TEXT_DIALECTS = frozenset({"openai", "cohere", "tei"})
_PREFIX = struct.Struct(">BI")


class ReplayOutcome(StrEnum):
    """The outcome of one request."""

    EQUAL = "equal"
    CLOSE = "within tolerance"
    DIFFERENT = "different"
    FAILED = "no answer"
    SKIPPED = "skipped"


class Answer(NamedTuple):
    """The answer to a request that was sent again.

    Attributes:
        status: HTTP's, or the name of gRPC's.
        message: The body; over gRPC its messages with their prefixes.
    """

    status: str
    message: RecordedMessage


class Compared(NamedTuple):
    """The outcome, and the reason if it is not equal."""

    outcome: ReplayOutcome
    reason: str = ""


def status_of(record: RecordedRequest) -> str:
    return record.grpc_status or ("OK" if record.protocol == "gRPC" else str(record.status))


def compare(record: RecordedRequest, answer: Answer, absolute: float, relative: float) -> Compared:
    """Compare an answer; numbers may differ by ``absolute`` + ``relative`` * the recorded one."""
    if answer.status != status_of(record):
        return Compared(
            ReplayOutcome.DIFFERENT, f"status {answer.status}, recorded {status_of(record)}"
        )
    recorded = record.response
    if recorded.body is None:
        return Compared(ReplayOutcome.SKIPPED, "its answer is not recorded")
    if answer.message.body == recorded.body:
        return Compared(ReplayOutcome.EQUAL)
    if record.is_failure:
        return Compared(ReplayOutcome.CLOSE, "another error message")
    try:
        read = _reader(record)
        one, other = read(recorded), read(answer.message)
        worst = _Differences(absolute, relative, _is_text(record))
        worst.compare(one, other, "answer")
    except _Differs as differs:
        return Compared(ReplayOutcome.DIFFERENT, str(differs))
    except (*UNREADABLE, LookupError, TypeError, AttributeError, zlib.error):
        return Compared(ReplayOutcome.DIFFERENT, "the bodies differ, and one cannot be decoded")
    return Compared(ReplayOutcome.CLOSE if worst.found else ReplayOutcome.EQUAL)


def _is_text(record: RecordedRequest) -> bool:
    return record.data.get("dialect") in TEXT_DIALECTS


def messages(body: bytes) -> Iterator[bytes]:
    """The messages of a gRPC body, decompressed.

    Raises:
        ValueError: it is damaged.
    """
    position = 0
    while position < len(body):
        try:
            compressed, size = _PREFIX.unpack_from(body, position)
        except struct.error as error:
            raise ValueError("a message of gRPC is torn") from error
        position += _PREFIX.size
        content = body[position : position + size]
        if compressed > 1 or len(content) != size:
            raise ValueError("a message of gRPC is torn")
        position += size
        yield _inflated(content) if compressed else content


def framed(contents: list[bytes]) -> bytes:
    return b"".join(_PREFIX.pack(0, len(each)) + each for each in contents)


def _inflated(content: bytes) -> bytes:
    """Decompress gzip or zlib.

    Raises:
        ValueError: it is neither, or too large.
    """
    inflater = zlib.decompressobj(zlib.MAX_WBITS | 32)
    try:
        found = inflater.decompress(content, MOST_BYTES)
    except zlib.error as error:
        raise ValueError("it is not compressed as it says") from error
    if inflater.unconsumed_tail:
        raise ValueError(f"it is larger than {MOST_BYTES} bytes")
    return found


# -- the dialects -------------------------------------------------------------------------------


def _reader(record: RecordedRequest) -> Callable[[RecordedMessage], Any]:
    """The function that decodes the answers to a request."""
    if record.protocol != "gRPC":
        return _read_http
    from modelport.loadtests.users import oip, tfserving, torchserve

    readers: Mapping[str, Callable[[bytes, int | None], Tensors]] = {
        "ModelInfer": oip.read_message,
        "Predict": tfserving.GRPC.read,
        "Predictions": torchserve.GRPC.read,
    }
    method = record.target.rpartition("/")[2]
    read: Callable[[bytes, int | None], Any]
    read = _read_stream if method == "ModelStreamInfer" else readers[method]
    return lambda message: [read(each, None) for each in messages(message.body or b"")]


def _read_stream(content: bytes, _: int | None) -> Any:
    from tritonclient.grpc import service_pb2

    from modelport.loadtests.users import oip

    answer = service_pb2.ModelStreamInferResponse.FromString(content)
    if answer.error_message:
        return answer.error_message
    return oip.read_message(answer.infer_response.SerializeToString(), None)


def _read_http(message: RecordedMessage) -> Any:
    body, headers = message.body or b"", message.headers
    if headers.get("content-encoding", "identity") != "identity":
        body = _inflated(body)
    size = headers.get("inference-header-content-length")
    if size is not None:
        from modelport.loadtests.users import oip

        return oip.read_http(body, int(size))
    if headers.get("content-type", "").startswith("text/event-stream"):
        return [_event(line) for line in body.decode().splitlines() if line.startswith("data:")]
    return json.loads(body)


def _event(line: str) -> Any:
    text = line.removeprefix("data:").strip()
    return json.loads(text) if text.startswith(("{", "[{")) else text


# -- values -------------------------------------------------------------------------------------


class _Differs(Exception):
    """Two answers differ by more than the tolerance."""


class _Differences:
    """Compares decoded answers; ``found`` tells whether anything differs within the tolerance."""

    def __init__(self, absolute: float, relative: float, is_text: bool) -> None:
        self._absolute, self._relative, self._is_text = absolute, relative, is_text
        self.found = False

    def compare(self, one: Any, other: Any, where: str) -> None:
        """Raise ``_Differs`` at the first difference."""
        if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
            self._arrays(one, other, where)
        elif isinstance(one, dict) and isinstance(other, dict):
            for name in one.keys() | other.keys():
                if self._is_text and name in VOLATILE:
                    continue
                if name not in one or name not in other:
                    raise _Differs(f"{where}: '{name}' is missing on one side")
                self.compare(one[name], other[name], f"{where}.{name}")
        elif isinstance(one, list) and isinstance(other, list):
            if len(one) != len(other):
                raise _Differs(f"{where}: {len(other)} values, recorded {len(one)}")
            for number, (a, b) in enumerate(zip(one, other, strict=True)):
                self.compare(a, b, f"{where}[{number}]")
        elif _is_number(one) and _is_number(other):
            self._numbers(one, other, where)
        elif one != other:
            raise _Differs(f"{where}: {str(other)[:40]!r}, recorded {str(one)[:40]!r}")

    def _numbers(self, one: float, other: float, where: str) -> None:
        if one == other or (math.isnan(one) and math.isnan(other)):
            return
        if not abs(one - other) <= self._absolute + self._relative * abs(one):
            raise _Differs(f"{where}: {other:g}, recorded {one:g}")
        self.found = True

    def _arrays(self, one: Any, other: Any, where: str) -> None:
        if one.shape != other.shape or one.dtype != other.dtype:
            raise _Differs(
                f"{where}: {other.dtype}{list(other.shape)}, recorded {one.dtype}{list(one.shape)}"
            )
        if one.dtype.kind == "f":
            a, b = one.astype(np.float64), other.astype(np.float64)
            with np.errstate(invalid="ignore"):
                off = np.abs(a - b)
                same = (a == b) | (np.isnan(a) & np.isnan(b))
                bad = ~(same | (off <= self._absolute + self._relative * np.abs(a)))
            if bad.any():
                at = int(np.argmax(bad.ravel()))
                raise _Differs(f"{where}: {b.ravel()[at]:g}, recorded {a.ravel()[at]:g}")
            self.found = self.found or not same.all()
        elif not np.array_equal(one, other):
            raise _Differs(f"{where}: {int((one != other).sum())} values differ")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
