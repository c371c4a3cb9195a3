"""The reader of recorded traffic, for all commands that take it.

A record is hostile until it is checked: sizes are bounded, and what is damaged is skipped with a
note, as the last line of a process that was killed.
"""

from __future__ import annotations

import base64
import heapq
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from io import BytesIO
from pathlib import Path
from typing import IO, Any, TypeVar

import numpy as np
import orjson

from modelport.gateway.errors import InvalidArgument, ModelportError, UsageError
from modelport.gateway.recording import record_encryption
from modelport.gateway.recording.record_files import PART, SUFFIX, RecordFile, files_in
from modelport.gateway.recording.record_format import TYPE
from modelport.gateway.repository import untrusted_files
from modelport.gateway.repository.storage.location import Location
from modelport.gateway.repository.storage.objects import ObjectStore
from modelport.gateway.types import NUMPY_DTYPES, Array, Datatype, Tensor
from modelport.gateway.wire import raw_tensors

#: Size of one record, and of an object, which is held in memory.
MOST_LINE_BYTES, MOST_OBJECT_BYTES = 64 << 20, 1 << 30
#: Damaged records whose reasons are told; the others are counted.
MOST_NOTES = 5
#: A record begins at most so long before its file; one that lasted longer comes late. All files
#: of this time are open together, and objects in memory.
SLACK_SECONDS = 60.0
#: The latest time of a record, in seconds since the epoch.
MOST_TIME = 2.0**37
Note = Callable[[str], None]
ValueT = TypeVar("ValueT")


class DamagedRecord(ValueError):
    """A line is no record."""


@dataclass(frozen=True, slots=True)
class RecordedTensor:
    """A tensor of a record.

    Attributes:
        data: None if a rule has left its values out.
        response: The number of the response that has it, of a decoupled model.
    """

    name: str
    datatype: Datatype
    data: Array | None
    response: int = 0

    @property
    def size_bytes(self) -> int:
        if self.data is None:
            return 0
        return Tensor(self.name, self.datatype, self.data).size_bytes


@dataclass(frozen=True, slots=True)
class RecordedMessage:
    """A request or a response; ``body`` is None if it is not recorded."""

    headers: Mapping[str, str]
    body: bytes | None


@dataclass(frozen=True, slots=True)
class RecordedRequest:
    """A request and its answer.

    Attributes:
        at: Seconds since the epoch.
        data: All of the record's ``data``, as it was written.
    """

    id: str
    at: float
    model: str
    version: int
    protocol: str
    method: str
    target: str
    status: int
    grpc_status: str
    is_failure: bool
    request: RecordedMessage
    response: RecordedMessage
    data: Mapping[str, Any] = field(repr=False)

    def inferences(self) -> Iterator[tuple[list[RecordedTensor], list[RecordedTensor]]]:
        """The inputs and outputs of each call of the model.

        Raises:
            DamagedRecord: A tensor is not what it says.
        """
        for call in _typed(self.data.get("inferences", []), list):
            entry = _typed(call, dict)
            yield (
                [_tensor(each) for each in _typed(entry.get("inputs", []), list)],
                [_tensor(each) for each in _typed(entry.get("outputs", []), list)],
            )


def is_records(path: Path) -> bool:
    """Whether ``path`` is a folder or a file of records, by its name and its beginning."""
    if path.is_dir():
        return True
    if not path.name.endswith((SUFFIX, PART)):
        return False
    try:
        with untrusted_files.open_file(path) as file:
            begin = file.read(64)
            return b'"specversion"' in begin or begin.startswith(record_encryption.BEGIN)
    except OSError:
        return False


def read(where: Path | Location, note: Note) -> Iterator[RecordedRequest]:
    """The records in a file, a folder, a folder of folders or object storage, in the order of time.

    Args:
        note: told about what is skipped.

    Raises:
        UsageError: there are no records.
    """
    if isinstance(where, Path) and where.is_file():
        files = [RecordFile(where.name, where.stat().st_size, 0.0)]
        where = where.parent
    else:
        files = files_in(where)
    if not files:
        raise UsageError(f"'{where}' holds no records; 'modelport serve --record DIR' writes them")
    damaged = _Damage(note)
    # Files are opened when it is their turn: their names begin with the time.
    waiting: list[tuple[float, int, RecordedRequest | None, Iterator[RecordedRequest]]] = [
        (_time_of(each), number, None, _records(where, each, damaged))
        for number, each in enumerate(files)
    ]
    heapq.heapify(waiting)
    while waiting:
        _, number, record, rest = waiting[0]
        if record is not None:
            yield record
        following = next(rest, None)
        if following is None:
            heapq.heappop(waiting)
        else:
            heapq.heapreplace(waiting, (following.at, number, following, rest))
    damaged.tell_rest()


class _Damage:
    """Tells about damaged records, the first ones by themselves."""

    def __init__(self, note: Note) -> None:
        self._note, self._count = note, 0

    def __call__(self, name: str, number: int, reason: str) -> None:
        self._count += 1
        if self._count <= MOST_NOTES:
            self._note(f"{name}, record {number} is skipped: {reason}")

    def tell_rest(self) -> None:
        if self._count > MOST_NOTES:
            self._note(f"{self._count - MOST_NOTES} more damaged records are skipped")


def _time_of(file: RecordFile) -> float:
    """A time before a file's first record: a record begins before it is written."""
    try:
        begun = datetime.strptime(file.name.partition("-")[0] + "+0000", "%Y%m%dT%H%M%S.%fZ%z")
    except ValueError:
        return 0.0
    return begun.timestamp() - SLACK_SECONDS


def _records(
    where: Path | Location, file: RecordFile, damaged: _Damage
) -> Iterator[RecordedRequest]:
    try:
        opened = _open(where, file)
    except OSError as error:
        damaged(file.key, 0, str(error.strerror))
        return
    except ModelportError as error:
        damaged(file.key, 0, str(error))
        return
    with opened:
        # What a gateway appends from now on may be the replay of these very records.
        number, left, key = 0, file.size, record_encryption.given_key()
        while left > 0 and (line := opened.readline(MOST_LINE_BYTES + 1)):
            number, left = number + 1, left - len(line)
            try:
                if not line.endswith(b"\n"):
                    if len(line) <= MOST_LINE_BYTES:
                        raise DamagedRecord("its line is torn")
                    while (rest := opened.readline(1 << 20)) and not rest.endswith(b"\n"):
                        pass
                    raise DamagedRecord(f"it is longer than {MOST_LINE_BYTES} bytes")
                record = parse(_clear(line, key))
            except DamagedRecord as error:
                damaged(file.key, number, str(error))
            else:
                yield record


def _clear(line: bytes, key: bytes | None) -> bytes:
    try:
        return record_encryption.decrypt(line, key)
    except ValueError as error:
        raise DamagedRecord(str(error)) from error


def _open(where: Path | Location, file: RecordFile) -> IO[bytes]:
    if isinstance(where, Path):
        return untrusted_files.open_file(where / file.key)
    if file.size > MOST_OBJECT_BYTES:
        raise InvalidArgument(f"it has more than {MOST_OBJECT_BYTES} bytes")
    return BytesIO(ObjectStore(where).read(file.key, MOST_OBJECT_BYTES))


def parse(line: bytes) -> RecordedRequest:
    """Parse one line.

    Raises:
        DamagedRecord: it is no record.
    """
    try:
        event = _typed(orjson.loads(line), dict)
    except ValueError as error:
        raise DamagedRecord("it is not JSON") from error
    if event.get("type") != TYPE or event.get("specversion") != "1.0":
        raise DamagedRecord(f"it is no CloudEvent of type {TYPE}")
    data = _typed(event.get("data"), dict)
    request, response = _typed(data.get("request"), dict), _typed(data.get("response"), dict)
    try:
        at = datetime.fromisoformat(_typed(event.get("time"), str)).timestamp()
    except (OverflowError, ValueError) as error:
        raise DamagedRecord("its time is not RFC 3339") from error
    if not 0.0 <= at < MOST_TIME:
        raise DamagedRecord("its time is before 1970, or too far ahead")
    return RecordedRequest(
        _typed(event.get("id"), str),
        at,
        _typed(data.get("model", ""), str),
        _typed(data.get("version", 0), int),
        _typed(request.get("protocol", ""), str),
        _typed(request.get("method", ""), str),
        _typed(request.get("target", ""), str),
        _typed(data.get("status", 0), int),
        _typed(data.get("grpc_status", ""), str),
        _typed(data.get("is_failure", False), bool),
        _message(request),
        _message(response),
        data,
    )


def _message(found: Mapping[str, Any]) -> RecordedMessage:
    headers = _typed(found.get("headers", {}), dict)
    for name, value in headers.items():
        if not isinstance(value, str) or not (name + value).isascii():
            raise DamagedRecord("a header field is not text of ASCII")
        if any(c in name + value for c in "\r\n\0"):
            raise DamagedRecord("a header field holds a line break")
    if "body" in found:
        return RecordedMessage(headers, _typed(found["body"], str).encode("utf-8", "replace"))
    if "body_base64" in found:
        return RecordedMessage(headers, _base64(found["body_base64"]))
    return RecordedMessage(headers, None)


def _tensor(found: Any) -> RecordedTensor:
    entry = _typed(found, dict)
    name, shape = _typed(entry.get("name"), str), _typed(entry.get("shape"), list)
    response = _typed(entry.get("response", 0), int)
    try:
        datatype = raw_tensors.parse_datatype(name, entry.get("datatype"))
        dims = raw_tensors.parse_shape(name, shape)
        if "data_base64" in entry:
            data: Array | None = raw_tensors.decode(
                name, datatype, dims, _base64(entry["data_base64"])
            )
        elif "data" in entry:
            data = _array(datatype, dims, _typed(entry["data"], list))
        else:
            data = None
    except (InvalidArgument, OverflowError, TypeError, ValueError) as error:
        raise DamagedRecord(f"tensor '{name[:80]}' is damaged: {str(error)[:200]}") from error
    return RecordedTensor(name, datatype, data, response)


def _array(datatype: Datatype, shape: tuple[int, ...], values: list[Any]) -> Array:
    if len(values) != math.prod(shape):
        raise DamagedRecord(f"{len(values)} values do not have the shape {list(shape)}")
    if datatype is Datatype.BYTES:
        return raw_tensors.object_array([_typed(each, str).encode() for each in values], shape)
    return np.array(values, NUMPY_DTYPES[datatype]).reshape(shape)


def _base64(text: Any) -> bytes:
    try:
        return base64.b64decode(_typed(text, str), validate=True)
    except ValueError as error:
        raise DamagedRecord("its base64 is damaged") from error


def _typed(value: Any, kind: type[ValueT]) -> ValueT:
    if type(value) is not kind:
        raise DamagedRecord(f"a field is {type(value).__name__}, and should be {kind.__name__}")
    return value
