"""Hostile requests, each with the answer it must get, and a good request after each.

A reply's body is exactly ``{"error": text}`` and the text holds no path, class or host name of the
server. Whatever is malformed below HTTP's requests (a method that is none, a header without end)
never reaches the application: there the reply may be empty, but not a success, and not private.
"""

from __future__ import annotations

import functools
import gzip
import json
import socket
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest
from tritonclient.grpc import service_pb2 as pb

from tests.attacks.conftest import MAX_INPUT_BYTES, cpu_seconds, peak_bytes
from tests.conformance import wire
from tests.conformance.repository import IDENTITY
from tests.conformance.wire import HEADER_LENGTH, KeptConnection, json_body, json_input, message
from tests.server import Gateway

INFER = "/v2/models/x2/infer"
DIGITS = "9" * 5000
ROW = b"\0\0\x80\x3f" * 4
#: One hostile request may keep the server from others for no longer.
MAX_SECONDS = 2.0
#: ... and make it hold no more than this beyond what it held before.
MAX_GROWTH_BYTES = 128 * 2**20


@dataclass(frozen=True)
class HostileRequest:
    status: int
    method: str = "POST"
    path: str = INFER
    body: bytes | Callable[[], bytes | Iterable[bytes]] = b""
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def content(self) -> bytes | Iterable[bytes]:
        return self.body if isinstance(self.body, bytes) else self.body()


def x(**members: Any) -> dict[str, Any]:
    """The good input of ``x2`` with other or further members; None takes one away."""
    document = {"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4], **members}
    return {key: value for key, value in document.items() if value is not None}


def bad(*inputs: Any, **members: Any) -> HostileRequest:
    return HostileRequest(400, body=json_body(*inputs, **members))


def text(body: str | bytes) -> HostileRequest:
    return HostileRequest(400, body=body.encode() if isinstance(body, str) else body)


def binary(header: bytes, blobs: bytes, status: int = 400, path: str = INFER) -> HostileRequest:
    return HostileRequest(
        status, path=path, body=header + blobs, headers={HEADER_LENGTH: str(len(header))}
    )


def sized(
    size: Any, blobs: bytes = ROW, datatype: str = "FP32", path: str = INFER
) -> HostileRequest:
    document = json_input("x", datatype, [1, 4], binary_data_size=size)
    return binary(json_body(document), blobs, path=path)


def strings(data: bytes, count: int = 1) -> HostileRequest:
    document = json_input("x", "BYTES", [1, count], binary_data_size=len(data))
    return binary(json_body(document), data, path=f"/v2/models/{IDENTITY['BYTES']}/infer")


def hidden(depth: int, beside: str = "0") -> str:
    """Depth behind a string of closing brackets, which a count of brackets takes for its end."""
    return f'{{"id":"{"]" * depth}","a":{beside},"inputs":{"[" * depth}{"]" * depth}}}'


@functools.cache
def gzipped(size: int) -> bytes:
    compressor = zlib.compressobj(9, wbits=zlib.MAX_WBITS | 16)
    block = b" " * 2**20
    parts = [compressor.compress(block) for _ in range(size // len(block))]
    return b"".join([*parts, compressor.flush()])


def flood() -> Iterator[bytes]:
    """More than is allowed, in chunks, without a length beforehand."""
    for _ in range(MAX_INPUT_BYTES // 65536 + 2):
        yield b" " * 65536


def keys(count: int) -> bytes:
    return b"{" + b",".join(b'"a%d":0' % n for n in range(count)) + b"}"


GZIP = {"Content-Encoding": "gzip"}
DEFLATE = {"Content-Encoding": "deflate"}
MALFORMED = {
    "nothing": text(""),
    "blanks": text("   \n"),
    "no JSON": text("inputs"),
    "half an object": text('{"inputs": ['),
    "two objects": text(wire.good_body() * 2),
    "a byte behind the object": text(wire.good_body() + b"\0"),
    "a byte order mark": text(b"\xef\xbb\xbf" + wire.good_body()),
    "UTF-16": text(wire.good_body().decode().encode("utf-16")),
    "bytes that are no UTF-8": text(b'{"id":"\xff","inputs":[]}'),
    "bytes that are no UTF-8 beside NaN": text(b'{"id":"\xff","a":NaN,"inputs":[]}'),
    "half a surrogate pair": text('{"id":"\\ud800","inputs":[]}'),
    "half a surrogate pair beside NaN": text(
        '{"a":NaN,"id":"\\ud800","inputs":[{"name":"x","datatype":"FP32","shape":[1,4],'
        '"data":[1,2,3,4]}],"outputs":[{"name":"\\ud800"}]}'
    ),
    "an input named by half a surrogate pair beside NaN": text(
        '{"inputs":[{"name":"\\ud800","datatype":"FP32","shape":[1,1],"data":[NaN]}]}'
    ),
    "a string of half a surrogate pair beside NaN": HostileRequest(
        400,
        path=f"/v2/models/{IDENTITY['BYTES']}/infer",
        body=b'{"a":NaN,"inputs":[{"name":"x","datatype":"BYTES","shape":[1,1],'
        b'"data":["\\udfff"]}]}',
    ),
    "a control character in a string": text(b'{"id":"\x01","inputs":[]}'),
    "a comment": text(b"/* */" + wire.good_body()),
    "a comma too many": text(wire.good_body()[:-1] + b",}"),
    "single quotes": text(wire.good_body().replace(b'"', b"'")),
    "a list": text(b"[" + wire.good_body() + b"]"),
    "a string": text('"inputs"'),
    "a number": text("1"),
    "null": text("null"),
    "a bare NaN": text("NaN"),
    "a number of 5000 digits": text(f'{{"id":{DIGITS},"inputs":[]}}'),
    "a number of 5000 digits beside NaN": text(f'{{"id":{DIGITS},"a":NaN,"inputs":[]}}'),
    "an exponent without end": text(
        '{"inputs":[{"name":"x","datatype":"FP32","shape":[1e999999],"data":[1]}]}'
    ),
}
DEPTH = {
    "depth 101": text("[" * 101 + "]" * 101),
    "depth 100000": text("[" * 100_000),
    "depth 100000 of objects": text('{"a":' * 100_000),
    "depth 100000 and closed": text("[" * 100_000 + "]" * 100_000),
    "depth 100000 beside NaN": text('{"a":NaN,"b":' + "[" * 100_000 + "]" * 100_000 + "}"),
    "depth 500 hidden behind a string": text(hidden(500)),
    "depth 100000 hidden behind a string": text(hidden(100_000)),
    "depth 100000 hidden behind a string beside NaN": text(hidden(100_000, "NaN")),
    "depth in the data of an input": bad(x(data=json.loads("[" * 200 + "1" + "]" * 200))),
    "depth 100000 in the index": HostileRequest(
        400, path="/v2/repository/index", body=b"[" * 100_000
    ),
    "depth hidden beside NaN in the index": HostileRequest(
        400, path="/v2/repository/index", body=hidden(100_000, "NaN").encode()
    ),
    "depth 100000 in a load": HostileRequest(
        400, path="/v2/repository/models/x2/load", body=b'{"a":' * 100_000
    ),
}
FLOODS = {
    "20000 keys": HostileRequest(400, body=lambda: keys(20_000)),
    "500000 keys": HostileRequest(400, body=lambda: keys(500_000)),
    "500000 keys behind brackets in a string": HostileRequest(
        400, body=lambda: b'{"id":"' + b"[" * 200 + b'",' + keys(500_000)[1:]
    ),
    "a long string and brackets": HostileRequest(
        400, body=lambda: b'{"id":"' + b"a" * 7_000_000 + b'","x":"' + b"[" * 200 + b'"}'
    ),
    "quotes without end behind brackets": HostileRequest(
        400, body=lambda: b'["' + b"[" * 200 + b'\\"' * 30_000
    ),
    "backslashes without end behind colons": HostileRequest(
        400, body=lambda: b'["' + b":" * 20_000 + b'\\"' * 30_000
    ),
    "a megabyte of blanks": HostileRequest(400, body=lambda: b" " * 2**20),
    "a body above the limit": HostileRequest(400, body=lambda: b" " * (MAX_INPUT_BYTES + 1)),
    "chunks above the limit": HostileRequest(400, body=flood),
    "a gzip bomb of 256 MiB": HostileRequest(400, body=lambda: gzipped(2**28), headers=GZIP),
    "a deflate bomb of 256 MiB": HostileRequest(
        400, body=lambda: zlib.compress(b"\0" * 2**28, 1), headers=DEFLATE
    ),
    "a bomb in a bomb": HostileRequest(
        400, body=lambda: gzip.compress(gzipped(2**28)), headers=GZIP
    ),
}
CODINGS = {
    "gzip that is none": HostileRequest(400, body=b"no gzip at all", headers=GZIP),
    "gzip of nothing": HostileRequest(400, body=b"", headers=GZIP),
    "gzip cut short": HostileRequest(400, body=gzip.compress(wire.good_body())[:-4], headers=GZIP),
    "gzip and more behind": HostileRequest(
        400, body=gzip.compress(wire.good_body()) + b"x", headers=GZIP
    ),
    "gzip with a wrong checksum": HostileRequest(
        400, body=gzip.compress(wire.good_body())[:-8] + b"\0" * 8, headers=GZIP
    ),
    "deflate in gzip's name": HostileRequest(
        400, body=zlib.compress(wire.good_body()), headers=GZIP
    ),
    "gzip in deflate's name": HostileRequest(
        400, body=gzip.compress(wire.good_body()), headers=DEFLATE
    ),
    "an unknown coding": HostileRequest(
        501, body=wire.good_body(), headers={"Content-Encoding": "br"}
    ),
    "two codings": HostileRequest(
        501, body=wire.good_body(), headers={"Content-Encoding": "gzip, deflate"}
    ),
    "a coding of 10000 letters": HostileRequest(
        501, body=wire.good_body(), headers={"Content-Encoding": "x" * 10_000}
    ),
}
#: Values that fit no member but their own.
_WRONG: Mapping[str, Any] = {
    "null": None,
    "true": True,
    "a number": 7,
    "a fraction": 0.5,
    "text": "text",
    "a list": [1],
    "an object": {"a": 1},
    "a huge number": 10**30,
}
_RIGHT: Mapping[str, set[str]] = {
    "id": {"null", "text"},
    "parameters": {"null", "an object"},
    "inputs": set(),
    "outputs": {"null"},
    "inputs[0]": set(),
    "outputs[0]": set(),
    "name": {"text"},
    "datatype": set(),
    "shape": set(),
    "data": set(),
    "parameters of an input": {"null", "an object"},
    "binary_data_size": set(),
    "name of an output": {"text"},
    "parameters of an output": {"null", "an object"},
    "classification": {"a number"},
    "binary_data": {"true"},
    "binary_data_output": {"true"},
    "timeout": {"a number"},
    "priority": {"a number"},
    "sequence_id": {"a number", "text"},
    "sequence_start": {"true"},
    "sequence_end": {"true"},
    "a parameter": {"true", "a number", "a fraction", "text", "a huge number"},
}


def _with(member: str, value: Any) -> bytes:
    """The good request with one member in another type."""
    tensor: dict[str, Any] = x()
    output: dict[str, Any] = {"name": "y"}
    document: dict[str, Any] = {"inputs": [tensor], "outputs": [output]}
    places: dict[str, tuple[Any, Any]] = {
        "inputs[0]": (document["inputs"], 0),
        "outputs[0]": (document["outputs"], 0),
        "parameters of an input": (tensor, "parameters"),
        "name of an output": (output, "name"),
        "parameters of an output": (output, "parameters"),
        "binary_data_size": (tensor.setdefault("parameters", {}), member),
        "classification": (output.setdefault("parameters", {}), member),
        "binary_data": (output["parameters"], member),
        **{key: (tensor, key) for key in ("name", "datatype", "shape", "data")},
        **{key: (document, key) for key in ("id", "parameters", "inputs", "outputs")},
    }
    if member in places:
        owner, key = places[member]
    else:
        owner, key = document.setdefault("parameters", {}), member
    owner[key] = value
    return json.dumps(document).encode()


TYPES = {
    f"{member} is {what}": HostileRequest(400, body=_with(member, value))
    for member, right in _RIGHT.items()
    for what, value in _WRONG.items()
    if what not in right
}
MEMBERS = {
    "no inputs": text("{}"),
    "an empty list of inputs": bad(),
    "an input without a name": bad(x(name=None)),
    "an input without a datatype": bad(x(datatype=None)),
    "an input without a shape": bad(x(shape=None)),
    "an input without data": bad(x(data=None)),
    "data and a size": bad(x(parameters={"binary_data_size": 16})),
    "a datatype that is none": bad(x(datatype="FP33")),
    "a datatype in small letters": bad(x(datatype="fp32")),
    "a datatype of a megabyte": bad(x(datatype="F" * 2**20)),
    "a name of a megabyte": bad(x(name="x" * 2**20)),
    "half precision as JSON": HostileRequest(
        400,
        path=f"/v2/models/{IDENTITY['FP16']}/infer",
        body=json_body(x(datatype="FP16")),
    ),
    "half precision asked for as JSON": HostileRequest(
        400,
        path=f"/v2/models/{IDENTITY['BF16']}/infer",
        body=json_body(x(datatype="BF16")),
    ),
    "data that is ragged": bad(x(data=[[1, 2], 3, 4])),
    "data of other depth": bad(x(data=[1, 2, [3], 4])),
    "data too short": bad(x(data=[1, 2, 3])),
    "data too long": bad(x(data=[1, 2, 3, 4, 5])),
    "data of strings": bad(x(data=["1", "2", "3", "4"])),
    "data of booleans": bad(x(data=[True] * 4)),
    "data of nulls": bad(x(data=[None] * 4)),
    "data of objects": bad(x(data=[{}] * 4)),
    "a fraction for an integer": HostileRequest(
        400,
        path=f"/v2/models/{IDENTITY['INT32']}/infer",
        body=json_body(x(datatype="INT32", data=[1, 2, 3, 4.5])),
    ),
    "an integer that does not fit": HostileRequest(
        400,
        path=f"/v2/models/{IDENTITY['UINT8']}/infer",
        body=json_body(x(datatype="UINT8", data=[1, 2, 3, 256])),
    ),
    "a negative for an unsigned": HostileRequest(
        400,
        path=f"/v2/models/{IDENTITY['UINT64']}/infer",
        body=json_body(x(datatype="UINT64", data=[1, 2, 3, -1])),
    ),
    "an integer above 64 bits": HostileRequest(
        400,
        path=f"/v2/models/{IDENTITY['INT64']}/infer",
        body=json_body(x(datatype="INT64", data=[1, 2, 3, 2**64])),
    ),
    "a number for a boolean": HostileRequest(
        400,
        path=f"/v2/models/{IDENTITY['BOOL']}/infer",
        body=json_body(x(datatype="BOOL", data=[1, 0, 1, 0])),
    ),
    "a dimension above 64 bits": bad(x(shape=[2**64])),
    "a dimension of 5000 digits": text(
        wire.good_body().replace(b"[1, 4]", b"[%s]" % DIGITS.encode())
    ),
    "a dimension of 4000 digits beside NaN": text(
        wire.good_body().replace(b"[1, 4]", b"[%s]" % (b"9" * 4000)).replace(b"[1, 2", b"[NaN, 2")
    ),
    "dimensions of 4000 digits beside NaN": text(
        wire.good_body()
        .replace(b"[1, 4]", b"[%s]" % b",".join([b"9" * 4000] * 32))
        .replace(b"[1, 2", b"[NaN, 2")
    ),
    "a reserved parameter": bad(x(), parameters={"triton_secret": 1}),
    "a reserved parameter of an input": bad(x(parameters={"triton_secret": 1})),
    "a timeout below zero": bad(x(), parameters={"timeout": -1}),
    "a timeout above 64 bits": bad(x(), parameters={"timeout": 2**64}),
    "a priority below zero": bad(x(), parameters={"priority": -1}),
    "a classification below zero": bad(
        x(), outputs=[{"name": "y", "parameters": {"classification": -1}}]
    ),
    "a classification of strings": HostileRequest(
        400,
        path="/v2/models/echo_bytes/infer",
        body=json_body(
            {"name": "x", "datatype": "BYTES", "shape": [1, 1], "data": ["a"]},
            outputs=[{"name": "y", "parameters": {"classification": 1}}],
        ),
    ),
    "2000 inputs": bad(*[x(name=str(n)) for n in range(2000)]),
    "2000 times the same input": bad(*[x()] * 2000),
    "2000 times the same output": bad(x(), outputs=[{"name": "y"}] * 2000),
    "shared memory for an input": HostileRequest(
        501,
        body=json_body(
            x(data=None, parameters={"shared_memory_region": "r", "shared_memory_byte_size": 16})
        ),
    ),
    "shared memory for an output": HostileRequest(
        501,
        body=json_body(
            x(), outputs=[{"name": "y", "parameters": {"shared_memory_region": "/etc/passwd"}}]
        ),
    ),
    "an index that is asked for in a list": HostileRequest(
        400, path="/v2/repository/index", body=b"[]"
    ),
    "an index that is ready in words": HostileRequest(
        400, path="/v2/repository/index", body=b'{"ready": "yes"}'
    ),
}
SIZES = {
    "a size below zero": sized(-1),
    "a size of nothing": sized(0),
    "a size too small": sized(15, ROW[:15]),
    "a size too large": sized(17, ROW + b"\0"),
    "a size beyond the body": sized(17),
    "a size of 64 bits": sized(2**64 - 1),
    "a size above 64 bits": sized(2**64),
    "a size that wraps around": sized(2**64 - 16),
    "bytes left over": sized(16, ROW + b"\0"),
    "half of the bytes": sized(16, ROW[:8]),
    "a boolean that is two": HostileRequest(
        400,
        path=f"/v2/models/{IDENTITY['BOOL']}/infer",
        body=b"\0\1\2\0",
        headers={HEADER_LENGTH: "0"},
    ),
    "a string longer than the body": strings(b"\xff\xff\xff\xffabc"),
    "a string one byte too long": strings(b"\4\0\0\0abc"),
    "a string one byte too short": strings(b"\2\0\0\0abc"),
    "half a length": strings(b"\1\0"),
    "one string too many": strings(wire.pack([b"a", b"b"])),
    "one string too few": strings(wire.pack([b"a"]), count=2),
    "a million strings in four bytes": strings(b"\0\0\0\0", count=10**6),
    "a string that is not text": strings(wire.pack([b"\xff\xfe"])),
    "a header length beyond the body": HostileRequest(
        400, body=wire.good_body(), headers={HEADER_LENGTH: "100000"}
    ),
    "a header length below zero": HostileRequest(
        400, body=wire.good_body(), headers={HEADER_LENGTH: "-1"}
    ),
    "a header length of 5000 digits": HostileRequest(
        400, body=wire.good_body(), headers={HEADER_LENGTH: DIGITS}
    ),
    "a header length in words": HostileRequest(
        400, body=wire.good_body(), headers={HEADER_LENGTH: "all of it"}
    ),
    "a raw body of three bytes": HostileRequest(400, body=b"abc", headers={HEADER_LENGTH: "0"}),
    "a raw body for two inputs": HostileRequest(
        400, path="/v2/models/add_and_subtract/infer", body=ROW, headers={HEADER_LENGTH: "0"}
    ),
}
PATHS = {
    "version 0": HostileRequest(404, path="/v2/models/x2/versions/0/infer", body=wire.good_body()),
    "a version in words": HostileRequest(404, path="/v2/models/x2/versions/one/infer"),
    "a version below zero": HostileRequest(404, path="/v2/models/x2/versions/-1/infer"),
    "a version above 64 bits": HostileRequest(
        400, path=f"/v2/models/x2/versions/{2**64}/infer", body=wire.good_body()
    ),
    "a version of 5000 nines": HostileRequest(
        400, path=f"/v2/models/x2/versions/{DIGITS}/infer", body=wire.good_body()
    ),
    "a version of 5000 zeros": HostileRequest(
        404, path=f"/v2/models/x2/versions/{'0' * 5000}/infer", body=wire.good_body()
    ),
    "metadata of a version of 5000 nines": HostileRequest(
        400, method="GET", path=f"/v2/models/x2/versions/{DIGITS}"
    ),
    "metadata of a version of 5000 zeros": HostileRequest(
        404, method="GET", path=f"/v2/models/x2/versions/{'0' * 5000}"
    ),
    "statistics of a version of 5000 nines": HostileRequest(
        400, method="GET", path=f"/v2/models/x2/versions/{DIGITS}/stats"
    ),
    "a version in Arabic digits": HostileRequest(404, path="/v2/models/x2/versions/%d9%a1/infer"),
    "a version in superscript": HostileRequest(
        404, path="/v2/models/x2/versions/%c2%b2/infer", body=wire.good_body()
    ),
    "a path of 30000 letters": HostileRequest(
        404, path="/v2/models/" + "a" * 30_000 + "/infer", body=wire.good_body()
    ),
    "a path of 10000 slashes": HostileRequest(404, path="/" * 10_000),
    "a path of dots": HostileRequest(404, path="/v2/models/" + "../" * 100 + "etc/passwd"),
    "a path of encoded dots": HostileRequest(
        404, path="/v2/models/" + "%2e%2e%2f" * 100 + "passwd"
    ),
    "a name with a NUL": HostileRequest(404, path="/v2/models/x2%00/infer", body=wire.good_body()),
    "a name with a line feed": HostileRequest(404, path="/v2/models/x2%0aa:b/infer"),
    "a name with a tag": HostileRequest(
        404, path="/v2/models/%3Cscript%3E/infer", body=wire.good_body()
    ),
    "the trace settings": HostileRequest(
        501, path="/v2/trace/setting", body=b'{"trace_file":"/tmp/x"}'
    ),
    "the logging settings": HostileRequest(501, path="/v2/logging", body=b'{"log_file":"/tmp/x"}'),
    "shared memory": HostileRequest(
        501, path="/v2/systemsharedmemory/region/r/register", body=b'{"key":"/x"}'
    ),
    "no shared memory": HostileRequest(501, path="/v2/systemsharedmemory/unregister"),
    "shared memory in two segments": HostileRequest(
        404, path="/v2/systemsharedmemory/region/a/b/register", body=b'{"key":"/x"}'
    ),
    "shared memory of CUDA": HostileRequest(501, path="/v2/cudasharedmemory/region/r/register"),
    "a management route of TorchServe": HostileRequest(
        405, path="/models?url=http://example.invalid/a.mar"
    ),
    "a load that nobody allowed": HostileRequest(503, path="/v2/repository/models/x2/load"),
    "a load with files that nobody allowed": HostileRequest(
        503, path="/v2/repository/models/x2/load", body=b'{"parameters":{"file:1/m":"YQ=="}}'
    ),
    "GET of infer": HostileRequest(405, method="GET"),
    "PUT of infer": HostileRequest(405, method="PUT", body=wire.good_body()),
    "TRACE": HostileRequest(405, method="TRACE", path="/v2"),
    "PROPFIND": HostileRequest(405, method="PROPFIND", path="/v2"),
    "POST of the metadata": HostileRequest(405, path="/v2/models/x2", body=wire.good_body()),
    "DELETE of a model": HostileRequest(405, method="DELETE", path="/v2/models/x2"),
}
CORPUS = {
    **MALFORMED, **DEPTH, **FLOODS, **CODINGS, **TYPES, **MEMBERS, **SIZES, **PATHS,
}  # fmt: skip


def test_the_corpus_is_as_large_as_is_asked_for() -> None:
    groups = (MALFORMED, DEPTH, FLOODS, CODINGS, TYPES, MEMBERS, SIZES, PATHS)
    assert len(CORPUS) == sum(map(len, groups)) >= 60


@pytest.mark.parametrize("what", CORPUS)
def test_over_http_is_refused(gateway: Gateway, connection: KeptConnection, what: str) -> None:
    attack, before = CORPUS[what], peak_bytes(gateway)
    content = attack.content
    started = cpu_seconds(gateway)
    reply = connection.send(attack.method, attack.path, content, attack.headers)
    seconds = cpu_seconds(gateway) - started
    sent = attack.path + (content.decode("latin-1") if isinstance(content, bytes) else "")
    wire.assert_error(reply, attack.status, sent)
    assert len(reply.body) < 4096 + len(attack.path)
    assert seconds < MAX_SECONDS
    assert peak_bytes(gateway) - before < MAX_GROWTH_BYTES


# -- below the application -----------------------------------------------------------------------

_GOOD = b"Host: a\r\nContent-Length: 0\r\n\r\n"
BELOW = {
    "no HTTP": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03 hello\r\n\r\n",
    "a method that is none": b"FROB /v2 HTTP/1.1\r\n" + _GOOD,
    "a method of 10000 letters": b"G" * 10_000 + b" /v2 HTTP/1.1\r\n" + _GOOD,
    "no path": b"GET HTTP/1.1\r\n" + _GOOD,
    "a version that is none": b"GET /v2 HTTP/9.9\r\n" + _GOOD,
    "a path with a raw NUL": b"GET /v2/models/x2\0 HTTP/1.1\r\n" + _GOOD,
    "a path of bytes above ASCII": b"GET /v2/models/\xff\xfe HTTP/1.1\r\n" + _GOOD,
    "a name above ASCII to infer": b"POST /v2/models/\xff/infer HTTP/1.1\r\n" + _GOOD,
    "a header without a colon": b"GET /v2 HTTP/1.1\r\nHost: a\r\nnonsense\r\n\r\n",
    "a header name with a blank": b"GET /v2 HTTP/1.1\r\nHost: a\r\nbad name: 1\r\n\r\n",
    "a header with a NUL": b"GET /v2 HTTP/1.1\r\nHost: a\r\na: b\0c\r\n\r\n",
    "a length below zero": b"POST /v2 HTTP/1.1\r\nHost: a\r\nContent-Length: -1\r\n\r\n",
    "a length in words": b"POST /v2 HTTP/1.1\r\nHost: a\r\nContent-Length: all\r\n\r\n",
    "a length beyond 64 bits": b"POST /v2 HTTP/1.1\r\nHost: a\r\nContent-Length: "
    + b"9" * 30
    + b"\r\n\r\n",
    "two lengths": b"POST /v2 HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n" + _GOOD,
    "a length and chunks": (
        b"POST /v2 HTTP/1.1\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
    ),
    "a chunk whose size is not a number": (
        b"POST /v2/models/x2/infer HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
        b"xyz\r\nabc\r\n0\r\n\r\n"
    ),
    "a chunk of 2^64 bytes": (
        b"POST /v2/models/x2/infer HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
        b"10000000000000000\r\nabc\r\n0\r\n\r\n"
    ),
    "a transfer coding that is none": (
        b"POST /v2/models/x2/infer HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: gzip\r\n\r\n"
    ),
}


@pytest.mark.parametrize("what", BELOW)
def test_below_http_is_refused(gateway: Gateway, connection: KeptConnection, what: str) -> None:
    reply = wire.send_bytes(gateway.http, BELOW[what], timeout_seconds=5)
    if reply is not None:
        assert 400 <= reply.status < 500 or reply.status in (501, 505)
        wire.assert_public(reply.body.decode())


@pytest.mark.parametrize("size", [200_000, 5_000_000])
def test_a_header_without_end_is_refused(
    gateway: Gateway, connection: KeptConnection, size: int
) -> None:
    data = b"GET /v2 HTTP/1.1\r\nHost: a\r\nx: " + b"a" * size + b"\r\n\r\n"
    reply = wire.send_bytes(gateway.http, data, timeout_seconds=5)
    assert reply is None or reply.status in (400, 413, 431)


def test_headers_without_number_are_refused(gateway: Gateway, connection: KeptConnection) -> None:
    many = b"".join(b"x-%d: %s\r\n" % (n, b"a" * 50) for n in range(20_000))
    data = b"GET /v2 HTTP/1.1\r\nHost: a\r\n" + many + b"\r\n"
    reply = wire.send_bytes(gateway.http, data, timeout_seconds=5)
    assert reply is None or reply.status in (400, 413, 431)


def test_a_client_that_disconnects_midway_affects_no_other(
    gateway: Gateway, connection: KeptConnection
) -> None:
    host, _, port = gateway.http.partition(":")
    head = b"POST /v2/models/x2/infer HTTP/1.1\r\nHost: a\r\nContent-Length: 1000\r\n\r\n"
    for data in (b"P", head[:30], head, head + b"{"):
        with socket.create_connection((host, int(port))) as stream:
            stream.sendall(data)
    wire.assert_serves(connection)
    assert not [e for e in gateway.logs if "Traceback" in str(e.get("exception", ""))]


# -- gRPC ----------------------------------------------------------------------------------------

NOT_FOUND = grpc.StatusCode.NOT_FOUND
INVALID = grpc.StatusCode.INVALID_ARGUMENT


def _typed(datatype: str, shape: list[int], **contents: list[Any]) -> Any:
    request = message(IDENTITY[datatype], ("x", datatype, shape))
    for name, values in contents.items():
        getattr(request.inputs[0].contents, name).extend(values)
    return request


def _x2(shape: list[int], *raw: bytes, datatype: str = "FP32", version: str = "") -> Any:
    return message("x2", ("x", datatype, shape), raw=raw, version=version)


def _parameter(key: str, **value: Any) -> Any:
    request = wire.good_message()
    request.parameters[key].SetInParent()
    for name, content in value.items():
        setattr(request.parameters[key], name, content)
    return request


GRPC_CORPUS: Mapping[str, tuple[grpc.StatusCode, Callable[[], Any]]] = {
    "nothing": (NOT_FOUND, pb.ModelInferRequest),
    "no inputs": (INVALID, lambda: message("x2")),
    "a name that climbs": (NOT_FOUND, lambda: message("../../etc/passwd")),
    "a name with a NUL": (NOT_FOUND, lambda: message("x2\0")),
    "a name of 300 letters": (NOT_FOUND, lambda: message("a" * 300)),
    "a name of a megabyte": (NOT_FOUND, lambda: message("a" * 2**20)),
    "a version of 5000 nines": (INVALID, lambda: _x2([1, 4], ROW, version=DIGITS)),
    "a version of 5000 zeros": (NOT_FOUND, lambda: _x2([1, 4], ROW, version="0" * 5000)),
    "a version in words": (INVALID, lambda: _x2([1, 4], ROW, version="one")),
    "a version of a megabyte": (INVALID, lambda: _x2([1, 4], ROW, version="v" * 2**20)),
    "a datatype of a megabyte": (INVALID, lambda: _x2([1, 4], ROW, datatype="F" * 2**20)),
    "an input named by a megabyte": (
        INVALID,
        lambda: message("x2", ("x" * 2**20, "FP32", [1, 4]), raw=[ROW]),
    ),
    "an output named by a megabyte": (
        INVALID,
        lambda: message("x2", ("x", "FP32", [1, 4]), raw=[ROW], outputs=["y" * 2**20]),
    ),
    "a shape that overflows": (INVALID, lambda: _x2([2**62 + 1, 4], ROW)),
    "a negative shape": (INVALID, lambda: _x2([-1, -4], ROW)),
    "a rank of 100000": (INVALID, lambda: _x2([1] * 100_000, ROW)),
    "three bytes": (INVALID, lambda: _x2([1, 4], b"abc")),
    "no bytes": (INVALID, lambda: _x2([1, 4], b"")),
    "too many raw entries": (INVALID, lambda: _x2([1, 4], *[ROW] * 1000)),
    "raw and typed": (
        INVALID,
        lambda: (r := _x2([1, 4], ROW), r.inputs[0].contents.fp32_contents.append(1))[0],
    ),
    "the wrong field": (INVALID, lambda: _typed("FP32", [1, 1], fp64_contents=[1.0])),
    "a value that does not fit": (INVALID, lambda: _typed("INT8", [1, 1], int_contents=[1000])),
    "typed half precision": (INVALID, lambda: _typed("FP16", [1, 1], fp32_contents=[1.0])),
    "a string longer than the message": (
        INVALID,
        lambda: message(IDENTITY["BYTES"], ("x", "BYTES", [1, 1]), raw=[b"\xff\xff\xff\xffa"]),
    ),
    "a huge shape of strings": (
        INVALID,
        lambda: message(IDENTITY["BYTES"], ("x", "BYTES", [1, 2**40]), raw=[b"\0\0\0\0"]),
    ),
    "10000 inputs": (
        INVALID,
        lambda: message(
            "x2", *[(str(n), "FP32", [1, 4]) for n in range(10_000)], raw=[ROW] * 10**4
        ),
    ),
    "10000 times the same input": (
        INVALID,
        lambda: message("x2", *[("x", "FP32", [1, 4])] * 10_000, raw=[ROW] * 10_000),
    ),
    "10000 times the same output": (
        INVALID,
        lambda: message("x2", ("x", "FP32", [1, 4]), raw=[ROW], outputs=["y"] * 10_000),
    ),
    "a timeout in words": (INVALID, lambda: _parameter("timeout", string_param="a" * 2**20)),
    "a parameter without a value": (INVALID, lambda: _parameter("a" * 2**20)),
    "a reserved parameter": (INVALID, lambda: _parameter("triton_a", int64_param=1)),
    "shared memory": (
        grpc.StatusCode.UNIMPLEMENTED,
        lambda: _shared(message("x2", ("x", "FP32", [1, 4]))),
    ),
}


def _shared(request: Any) -> Any:
    request.inputs[0].parameters["shared_memory_region"].string_param = "../../etc/passwd"
    return request


@pytest.mark.parametrize("what", GRPC_CORPUS)
def test_over_grpc_is_refused(gateway: Gateway, stub: Any, what: str) -> None:
    code, build = GRPC_CORPUS[what]
    request = build()
    before, started = peak_bytes(gateway), cpu_seconds(gateway)
    with pytest.raises(grpc.RpcError) as caught:
        stub.ModelInfer(request, timeout=wire.TIMEOUT_SECONDS)
    assert caught.value.code() is code, caught.value.details()
    wire.assert_public(caught.value.details(), str(request)[:1000])
    assert cpu_seconds(gateway) - started < MAX_SECONDS
    assert peak_bytes(gateway) - before < MAX_GROWTH_BYTES
    wire.assert_serves_grpc(stub)


@pytest.mark.parametrize("what", GRPC_CORPUS)
def test_over_a_stream_is_refused_and_the_stream_goes_on(stub: Any, what: str) -> None:
    _, build = GRPC_CORPUS[what]
    requests = iter([build(), wire.good_message()])
    answers = list(stub.ModelStreamInfer(requests, timeout=60))
    assert [bool(answer.error_message) for answer in answers] == [True, False]
    wire.assert_public(answers[0].error_message, str(build())[:1000])


@pytest.mark.parametrize(
    "data", [b"\xff" * 10, b"\x0a\xff\xff\xff\xff\x0f", b"\x0a\x05ab", b"\x0a\x02\xff\xfe"]
)
@pytest.mark.parametrize("method", ["ModelInfer", "ModelMetadata", "RepositoryIndex", "ModelReady"])
def test_bytes_that_are_no_message_are_an_invalid_argument(
    gateway: Gateway, stub: Any, method: str, data: bytes
) -> None:
    """A malformed proto is INVALID_ARGUMENT, and the connection survives."""
    with wire.channel(gateway.grpc) as channel:
        call = channel.unary_unary(f"/inference.GRPCInferenceService/{method}", None, None)
        with pytest.raises(grpc.RpcError) as caught:
            call(data, timeout=60)
        assert caught.value.code() is INVALID
        wire.assert_public(caught.value.details() or "")
    wire.assert_serves_grpc(stub)


def test_the_server_has_logged_no_unforeseen_exception(gateway: Gateway) -> None:
    """Last in the file: every attack above has been foreseen."""
    assert gateway.process.poll() is None
    unforeseen = [entry for entry in gateway.logs if "Traceback" in json.dumps(entry)]
    assert not unforeseen, unforeseen[:3]
