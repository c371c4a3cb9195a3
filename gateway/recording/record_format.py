"""The format of a record: a CloudEvent in JSON (CloudEvents 1.0), one on each line of a file.

``id``, ``source``, ``type``, ``time`` and ``subject`` are attributes of CloudEvents; ``data`` holds
the request, the response and the tensors. ``docs/recorded-traffic.md`` lists all fields.
"""

from __future__ import annotations

import base64
import fnmatch
import hashlib
import hmac
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

import numpy as np
import orjson

from modelport.gateway.telemetry.captured_traffic import (
    CapturedInference,
    CapturedTensor,
    CapturedTraffic,
)
from modelport.gateway.telemetry.request_record import RequestRecord, random_id
from modelport.gateway.types import Datatype, Tensor
from modelport.gateway.wire import raw_tensors

TYPE = "io.modelport.inference"
#: Header fields that a request is sent again with; others are recorded if an option names them.
HEADERS = frozenset(
    {b"accept", b"accept-encoding", b"content-encoding", b"content-type", b"grpc-encoding"}
    | {b"inference-header-content-length", b"inference-content-length"}
    | {b"x-amzn-sagemaker-target-model", b"x-amzn-sagemaker-custom-attributes"}
    | {b"ce-id", b"ce-source", b"ce-specversion", b"ce-type"}
)
RESPONSE_HEADERS = frozenset(
    {b"content-encoding", b"content-type", b"inference-header-content-length", b"retry-after"}
)
#: Tensors with more elements are written as bytes in base64.
MOST_VALUES = 1024
#: Prefixes of the rules for fields that are no tensors.
HEADER_RULE, CALLER_RULE = "header:", "caller"
_OPTIONS = orjson.OPT_APPEND_NEWLINE | orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_UTC_Z
_AS_NUMBERS = frozenset(set(Datatype) - {Datatype.BF16, Datatype.BYTES})


class Rules(NamedTuple):
    """The fields that are left out of records, and those that are replaced by a keyed hash.

    A rule is a tensor's name, ``MODEL/TENSOR``, ``header:NAME`` or ``caller``; ``*`` and ``?``
    stand for any characters.
    """

    redacted: tuple[str, ...] = ()
    hashed: tuple[str, ...] = ()
    key: bytes = b""
    headers: frozenset[bytes] = frozenset()

    @property
    def names_tensors(self) -> bool:
        rules = (*self.redacted, *self.hashed)
        return any(not each.startswith(HEADER_RULE) and each != CALLER_RULE for each in rules)

    @property
    def is_empty(self) -> bool:
        return not self.redacted and not self.hashed

    def recorded(self, fields: Mapping[bytes, bytes]) -> dict[bytes, bytes]:
        """Return the header fields of a request that are recorded."""
        return {key: fields[key] for key in fields if key in HEADERS or key in self.headers}

    def text(self, name: str, value: str) -> str | None:
        """Return a text as it is to be written; None: not at all."""
        if self.is_empty:
            return value
        if _matches(self.redacted, (name,)):
            return None
        return self._hash(value.encode()) if _matches(self.hashed, (name,)) else value

    def tensor(self, model: str, each: CapturedTensor) -> dict[str, Any] | None:
        """Return what is written in place of a tensor's values; None: the values."""
        if self.is_empty:
            return None
        names = (each.name, f"{model}/{each.name}")
        if _matches(self.redacted, names):
            return {"redacted": True}
        if not _matches(self.hashed, names):
            return None
        if each.datatype is Datatype.BYTES:
            return {"hashes": [self._hash(_bytes(item)) for item in each.data.reshape(-1)]}
        return {"hashes": [self._hash(bytes(_raw(each)))]}

    def _hash(self, value: bytes) -> str:
        return hmac.new(self.key, value, hashlib.sha256).hexdigest()


def pattern(rule: str) -> str:
    """Return a rule as a pattern of ``fnmatch``, in which a bracket would begin a set."""
    found = rule.lower() if rule.lower().startswith(HEADER_RULE) else rule
    return found.replace("[", "[[]")


def encode(record: RequestRecord, captured: CapturedTraffic, rules: Rules, source: str) -> bytes:
    """Make the line of a request that has ended."""
    names = record.route()
    inferences, is_changed = _inferences(record.model, captured.inferences, rules)
    # The bodies hold the same values; those that nobody could decode may hold any.
    hides = is_changed or (rules.names_tensors and not inferences)
    caller = rules.text(CALLER_RULE, record.caller) if record.caller else None
    # The message of a refusal names the caller.
    if record.caller and caller != record.caller and record.caller in record.error:
        hides = True
    event: dict[str, Any] = {
        "specversion": "1.0",
        "id": random_id(),
        "source": source,
        "type": TYPE,
        # As fast as a stamp gets, and orjson writes it in RFC 3339.
        "time": datetime.fromtimestamp(record.started_at / 1e9, UTC),
        "datacontenttype": "application/json",
    }
    if record.model:
        event["subject"] = f"{record.model}/{record.version}"
    timing = record.timing
    data = {
        "request_id": record.request_id,
        "caller": caller,
        "model": record.model,
        "version": record.version,
        "rollout": record.side,
        "dialect": names.dialect,
        "route": names.route,
        "status": record.status,
        "grpc_status": record.grpc_status,
        "error": "" if hides else record.error,
        "is_failure": record.is_failure,
        "trace_id": "" if record.span is None else f"{record.span.trace.id:032x}",
        "duration_us": (record.ended_ns - record.started_ns) // 1000,
        "batch_size": 0 if timing is None else timing.batch_size,
        "bodies_redacted": hides,
        "inferences": inferences,
    }
    request: dict[str, Any] = {
        "protocol": record.protocol,
        "method": record.method,
        "target": (captured.target or record.path).decode("latin-1"),
        "headers": _headers(captured.fields.items(), HEADERS, rules),
    }
    response: dict[str, Any] = {"headers": _headers(captured.headers, RESPONSE_HEADERS, rules)}
    if not hides:
        if captured.was_read or not record.method:
            request |= _body(captured.request)
        response |= _body(captured.response)
    event["data"] = {name: value for name, value in data.items() if value or value is False}
    event["data"] |= {"request": request, "response": response}
    try:
        return orjson.dumps(event, option=_OPTIONS)
    except TypeError:  # a lone surrogate
        return orjson.dumps(_escaped(event), option=_OPTIONS)


def _inferences(
    model: str, captured: Sequence[CapturedInference], rules: Rules
) -> tuple[list[dict[str, Any]], bool]:
    """Return the tensors of the calls, and whether a rule has changed one."""
    made, is_changed = [], False
    for call in captured:
        entry: dict[str, Any] = {}
        for side, tensors in (("inputs", call.inputs), ("outputs", call.outputs)):
            entry[side] = []
            for each in tensors:
                shown = rules.tensor(model, each)
                is_changed = is_changed or shown is not None
                entry[side].append(_described(each) | (_values(each) if shown is None else shown))
        made.append(entry)
    return made, is_changed


def _described(each: CapturedTensor) -> dict[str, Any]:
    found = {"name": each.name, "datatype": each.datatype.value, "shape": list(each.data.shape)}
    return {**found, "response": each.response} if each.response else found


def _values(each: CapturedTensor) -> dict[str, Any]:
    """The values of a tensor, flat: numbers or texts if they are few, else bytes in base64."""
    if each.data.size <= MOST_VALUES:
        if each.datatype is Datatype.BYTES:
            items = [_bytes(item) for item in each.data.reshape(-1)]
            try:
                return {"data": [item.decode() for item in items]}
            except UnicodeDecodeError:
                pass
        elif each.datatype in _AS_NUMBERS:
            numbers = orjson.dumps(np.ascontiguousarray(each.data).reshape(-1), option=_OPTIONS)
            if numbers.find(b"null") < 0:  # JSON has no NaN and no infinity
                return {"data": orjson.Fragment(numbers[:-1])}
    return {"data_base64": base64.b64encode(_raw(each)).decode()}


def _raw(each: CapturedTensor) -> raw_tensors.Buffer:
    return raw_tensors.encode(Tensor(each.name, each.datatype, each.data))


def _bytes(item: Any) -> bytes:
    return item if isinstance(item, bytes) else str(item).encode()


def _body(parts: Sequence[bytes]) -> dict[str, str]:
    body = b"".join(parts)
    try:
        return {"body": body.decode()}
    except UnicodeDecodeError:
        return {"body_base64": base64.b64encode(body).decode()}


def _headers(
    fields: Iterable[tuple[bytes, bytes]], names: frozenset[bytes], rules: Rules
) -> dict[str, str]:
    found = {}
    for key, value in fields:
        if key in names or key in rules.headers:
            name = key.decode("latin-1")
            shown = rules.text(HEADER_RULE + name, value.decode("latin-1"))
            if shown is not None:
                found[name] = shown
    return found


def _matches(patterns: Sequence[str], names: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, each) for each in patterns for name in names)


def _escaped(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, Mapping):
        return {_escaped(key): _escaped(each) for key, each in value.items()}
    return [_escaped(each) for each in value] if isinstance(value, list) else value
