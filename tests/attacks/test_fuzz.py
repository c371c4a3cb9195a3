"""Mutated requests by the thousand: decoders raise ``ModelportError`` or nothing at all.

``MODELPORT_FUZZ_CASES`` sets the number of decoder cases, ``MODELPORT_FUZZ_WIRE_CASES`` that of
requests to a real server. A case is made from its number alone, and failures name it.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import http.client
import json
import math
import os
import random
import resource
import time
import traceback
from collections.abc import Callable
from typing import Any

import grpc
import numpy as np
import pytest
from google.protobuf.message import DecodeError
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2 as pb

from modelport.gateway.errors import InvalidArgument, ModelportError
from modelport.gateway.protocols.oip import grpc_request, http_request, http_response
from modelport.gateway.types import NUMPY_DTYPES, Datatype, InferResponse, Tensor, TensorSpec
from modelport.gateway.wire import json_text, raw_tensors, tensor_contents
from modelport.gateway.wire.long_array import LongArray
from tests import processor
from tests.conformance import wire
from tests.conformance.wire import HEADER_LENGTH, KeptConnection, json_body, json_input
from tests.server import Gateway

CASES = int(os.environ.get("MODELPORT_FUZZ_CASES", "20000"))
WIRE_CASES = int(os.environ.get("MODELPORT_FUZZ_WIRE_CASES", "2000"))
SHARE = CASES // 4  # of each decoder
#: One case of a few kilobytes: what takes longer does not grow with its input as it should.
MAX_CASE_SECONDS = 1.0

# -- mutations -----------------------------------------------------------------------------------

#: What breaks parsers.
TOKENS = (
    *(b"NaN", b"Infinity", b"-Infinity", b"null", b"true", b"1e999", b"-0", b"9" * 25, b"9" * 4400),
    *(b'"\\ud800"', b'"\\udfff\\ud800"', b'"\\u0000"', b"\xff\xfe", b"\xed\xa0\x80", b"\0", b"\\"),
    *(b"[" * 120, b"]" * 120, b"[" * 2000 + b"]" * 2000, b'"' + b"]" * 2000 + b'"', b'{"a":' * 99),
    *(b"18446744073709551616", b"-9223372036854775809", b"1.5", b"[]", b"{}", b'""', b":", b","),
    *(b'"shared_memory_region"', b'"binary_data_size"', b'"triton_x"', b'"BYTES"', b'"FP16"'),
    *(b'"' + b'\\"' * 300, b"\xff\xff\xff\xff", b"\x80" * 11, b"\x7f\xff\xff\xff", b"'", b"\n"),
)
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2**31, 2**63, 2**64 - 1, 2**64, -(2**63) - 1, 10**40, 0.5),
    *(float("nan"), float("inf"), 1e308, "", "x", "BYTES", "FP16", "BF16", "FP99", "\0", "\ud800"),
    *("y" * 3000, [], {}, [[]], [None], [0], ["a"], [[1], 2], [1.5], {"a": []}, [2**62, 4]),
    *([-1], [1] * 40, [0, 2**63], {"binary_data_size": 4}, {"binary_data_size": -1}),
    *({"shared_memory_region": "r"}, {"classification": 2**64}, {"binary_data": 1}),
)


def mutate_bytes(chance: random.Random, data: bytes) -> bytes:
    """A few random edits of ``data``."""
    edited = bytearray(data)
    for _ in range(chance.choice((1, 1, 1, 2, 3, 8))):
        at = chance.randrange(len(edited) + 1)
        end = min(len(edited), at + chance.choice((1, 2, 4, 16, 200)))
        kind = chance.randrange(8)
        if kind == 0 and at < len(edited):
            edited[at] ^= 1 << chance.randrange(8)
        elif kind == 1:
            edited[at:at] = chance.randbytes(chance.choice((1, 2, 4, 9)))
        elif kind == 2:
            del edited[at:end]
        elif kind == 3:
            edited[at:at] = chance.choice(TOKENS)
        elif kind == 4:
            edited[at:end] = chance.choice(TOKENS)
        elif kind == 5:
            edited[at:at] = edited[at:end] * chance.choice((1, 2, 50))
        elif kind == 6:
            del edited[at:]
        elif at < len(edited):
            edited[at] = chance.randrange(256)
    return bytes(edited)


def mutate_value(chance: random.Random, value: Any) -> Any:
    """``value`` with one place in it, at any depth, made into something else."""
    if chance.random() < 0.2 or not isinstance(value, dict | list) or not value:
        return chance.choice(VALUES)
    copy: Any = value.copy()
    place = chance.choice(list(copy)) if isinstance(copy, dict) else chance.randrange(len(copy))
    kind = chance.randrange(6)
    if kind == 0:
        del copy[place]
    elif kind == 1 and isinstance(copy, list):
        copy[place:place] = [copy[place]] * chance.choice((1, 2, 30))
    elif kind == 1:
        copy[chance.choice(("id", "name", "data", "parameters", "x", "\ud800"))] = copy[place]
    else:
        copy[place] = mutate_value(chance, copy[place])
    return copy


def dump(value: Any) -> bytes:
    """JSON, with all values that Python can hold and JSON can not."""
    return json.dumps(value).encode()


def http_seeds() -> list[tuple[bytes, bytes]]:
    """JSON part and binary part of good requests."""
    row = np.array([1, 2, 3, 4], np.float32).tobytes()
    seeds = [(json_body(json_input("x", "FP32", [1, 4], [1.0, -2.5, 3, 4])), b"")]
    seeds.append((json_body(json_input("x", "FP32", [2, 2], [[1, 2], [3, float("nan")]])), b""))
    seeds.append((json_body(json_input("x", "FP32", [1, 4], binary_data_size=16)), row))
    strings = wire.pack([b"", b"a\0b", "é".encode()])
    size = len(strings)
    seeds.append((json_body(json_input("x", "BYTES", [3], binary_data_size=size)), strings))
    for datatype in Datatype:
        if datatype in (Datatype.FP16, Datatype.BF16):
            document = json_input("x", datatype, [2], binary_data_size=4)
            seeds.append((json_body(document), b"\0\x3c\1\2"))
        else:
            data = {"BOOL": [True, False], "BYTES": ["a", "é"]}.get(datatype, [1, 0])
            seeds.append((json_body(json_input("x", datatype, [2], data)), b""))
    full = json_body(
        json_input("a", "INT64", [1, 2], [1, 2]),
        json_input("b", "INT8", [1, 2], binary_data_size=2),
        id="request",
        parameters={"timeout": 1000, "priority": 1, "sequence_id": "s", "binary_data_output": True},
        outputs=[{"name": "y", "parameters": {"classification": 3, "binary_data": False}}],
    )
    return [*seeds, (full, b"\1\2")]


def grpc_seeds() -> list[bytes]:
    messages = [wire.good_message()]
    messages.append(
        wire.message("x2", ("a", "BYTES", [2]), raw=[wire.pack([b"a", b""])], version="1")
    )
    typed = wire.message("x2", ("x", "INT8", [2]), ("z", "BYTES", [1]), outputs=["y"])
    typed.inputs[0].contents.int_contents.extend([1, -1])
    typed.inputs[1].contents.bytes_contents.append(b"a\0")
    typed.parameters["timeout"].int64_param = 5
    typed.parameters["text"].string_param = "t"
    typed.outputs[0].parameters["classification"].int64_param = 2
    messages.append(typed)
    for datatype, field in tensor_contents.FIELDS.items():
        message = wire.message("m", ("x", datatype.value, [1]))
        value = b"a" if datatype is Datatype.BYTES else 1
        getattr(message.inputs[0].contents, field).append(value)
        messages.append(message)
    return [message.SerializeToString() for message in messages]


HTTP_SEEDS = http_seeds()
GRPC_SEEDS = grpc_seeds()


def http_case(chance: random.Random) -> tuple[bytes, bytes]:
    """A mutated request: its JSON part and what follows."""
    header, blob = chance.choice(HTTP_SEEDS)
    kind = chance.randrange(4)
    if kind < 2:
        value = json.loads(header)
        for _ in range(chance.choice((1, 1, 2, 4))):
            value = mutate_value(chance, value)
        header = dump(value)
        if kind == 1:
            header = mutate_bytes(chance, header)
    else:
        header = mutate_bytes(chance, header)
    return header, mutate_bytes(chance, blob) if chance.random() < 0.3 else blob


class Finds:
    """Failures found by fuzzing, one of each kind, so that one bug does not hide another."""

    def __init__(self) -> None:
        self._found: dict[str, str] = {}
        self.passed = 0

    def run(self, number: int, what: bytes, run: Callable[[], Any]) -> None:
        started = time.process_time()
        try:
            run()
            self.passed += 1
        except ModelportError as error:
            private = wire.private(str(error), what.decode("latin-1") + ascii(what))
            if private:
                self.note(number, f"the text of an error holds {private}", what)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            frame = traceback.extract_tb(error.__traceback__)[-1]
            kind = f"{type(error).__name__} at {frame.filename}:{frame.lineno}: {error}"
            self.note(number, kind[:300], what)
        spent = time.process_time() - started
        if spent > MAX_CASE_SECONDS and processor.scaled(spent) > MAX_CASE_SECONDS:
            self.note(number, f"slower than {MAX_CASE_SECONDS} s", what)

    def note(self, number: int, kind: str, what: bytes) -> None:
        self._found.setdefault(kind, f"case {number}: {kind}; of {what[:1500]!r}")

    def assert_none(self) -> None:
        assert not self._found, "\n\n".join(self._found.values())


# -- decoders ------------------------------------------------------------------------------------


def test_the_json_reader_raises_nothing_unforeseen() -> None:
    finds = Finds()
    for number in range(SHARE):
        header, _ = http_case(random.Random(f"json {number}"))
        finds.run(number, header, functools.partial(json_text.loads, header))
    finds.assert_none()
    assert SHARE * 0.1 < finds.passed < SHARE * 0.95, "mutations that are too mild, or too wild"


def test_the_http_decoder_raises_nothing_unforeseen_and_its_requests_are_answerable() -> None:
    finds = Finds()
    for number in range(SHARE):
        chance = random.Random(f"http {number}")
        header, blob = http_case(chance)
        length = len(header)
        if chance.random() < 0.1:
            length = chance.randrange(len(header + blob) + 1)

        def run(body: bytes = header + blob, length: int = length) -> None:
            request, form = http_request.decode(body, length, "model", 1)
            for tensor in request.inputs:
                _check(tensor)
            # What was taken in must be able to go out: the id, the names, the values.
            response = InferResponse("model", 1, request.inputs, request.id)
            text, _ = http_response.encode(response, form)
            text.decode()

        finds.run(number, header + blob, run)
    finds.assert_none()
    assert SHARE * 0.01 < finds.passed < SHARE * 0.9, "mutations that are too mild, or too wild"


def test_the_grpc_decoder_raises_nothing_unforeseen_and_its_requests_are_answerable() -> None:
    finds = Finds()
    for number in range(SHARE):
        chance = random.Random(f"grpc {number}")
        data = mutate_bytes(chance, chance.choice(GRPC_SEEDS))
        message = pb.ModelInferRequest()
        try:
            message.ParseFromString(data)
        except DecodeError:
            # grpc never shows these to the decoder: mutate a field of the message instead.
            message.ParseFromString(chance.choice(GRPC_SEEDS))
            _mutate_message(chance, message)

        def run(message: Any = message) -> None:
            request = grpc_request.decode(message)
            for tensor in request.inputs:
                _check(tensor)

        finds.run(number, message.SerializeToString(), run)
    finds.assert_none()
    assert SHARE * 0.01 < finds.passed < SHARE * 0.9, "mutations that are too mild, or too wild"


def _mutate_message(chance: random.Random, message: Any) -> None:
    tensor = chance.choice(message.inputs)
    kind = chance.randrange(7)
    if kind == 0:
        tensor.datatype = chance.choice((*(d.value for d in Datatype), "", "FP99", "fp32"))
    elif kind == 1:
        tensor.shape.append(chance.choice((0, -1, 2**62, -(2**63), 2**63 - 1, 1, 7)))
    elif kind == 2:
        tensor.shape.extend([1] * 40)
    elif kind == 3:
        message.raw_input_contents.append(chance.randbytes(chance.randrange(9)))
    elif kind == 4:
        message.model_version = chance.choice(("0" * 5000, "-1", "9" * 5000, "१", "1 ", "1_0"))
    elif kind == 5:
        message.parameters["timeout"].double_param = 1.0
    else:
        tensor.parameters["shared_memory_region"].bool_param = True


def _check(tensor: Any) -> None:
    """An invalid tensor cannot exist past the decoder."""
    assert tensor.data.dtype == NUMPY_DTYPES[tensor.datatype]
    assert tensor.data.ndim <= raw_tensors.MAX_RANK
    if tensor.datatype is Datatype.BYTES:
        assert all(type(item) is bytes for item in tensor.data.reshape(-1))
    else:
        assert tensor.data.flags.aligned


def test_the_raw_decoder_takes_a_tensor_only_if_its_size_is_exact() -> None:
    finds = Finds()
    datatypes = list(Datatype)
    for number in range(SHARE):
        chance = random.Random(f"raw {number}")
        datatype = chance.choice(datatypes)
        shape: list[Any] = [chance.choice((0, 1, 1, 2, 3)) for _ in range(chance.randrange(4))]
        if chance.random() < 0.2:
            odd = (-1, 2**31, 2**62, 2**63, 10**30, None, "1", True, 1.0, float("nan"))
            shape.insert(chance.randrange(len(shape) + 1), chance.choice(odd))
        count = math.prod(s for s in shape if type(s) is int)
        if datatype is Datatype.BYTES:
            items = [chance.randbytes(chance.randrange(5)) for _ in range(min(max(count, 0), 50))]
            data = wire.pack(items)
        else:
            size = min(max(count, 0), 50) * NUMPY_DTYPES[datatype].itemsize
            data = bytes(size) if datatype is Datatype.BOOL else chance.randbytes(size)
        if chance.random() < 0.5:
            data = mutate_bytes(chance, data)

        def run(
            datatype: Datatype = datatype, shape: Any = tuple(shape), data: bytes = data
        ) -> None:
            parsed = raw_tensors.parse_shape("x", shape)
            view = memoryview(b"\0" + data)[1:] if len(data) % 2 else data
            array = raw_tensors.decode("x", datatype, parsed, view)
            tensor = Tensor("x", datatype, array)
            _check(tensor)
            assert array.shape == parsed
            assert bytes(raw_tensors.encode(tensor)) == data

        finds.run(number, repr((datatype, shape, data)).encode(), run)
    finds.assert_none()
    assert SHARE * 0.1 < finds.passed < SHARE * 0.9, "mutations that are too mild, or too wild"


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters())
    | st.sampled_from([d.value for d in Datatype]),
    lambda inner: (
        st.lists(inner, max_size=5)
        | st.dictionaries(
            st.sampled_from(
                (
                    *("id", "inputs", "outputs", "parameters", "name", "shape", "datatype"),
                    *("data", "binary_data_size", "classification", "timeout"),
                )
            )
            | st.text(max_size=3),
            inner,
            max_size=5,
        )
    ),
    max_leaves=20,
)
PROPERTY = settings(
    max_examples=100,
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)


@PROPERTY
@given(JSON)
def test_any_json_at_all_is_a_request_or_an_error(value: Any) -> None:
    body = dump(value)
    with contextlib.suppress(ModelportError):
        http_request.decode(body, len(body), "model", 0)


@PROPERTY
@given(JSON, JSON, JSON, JSON)
def test_any_members_at_all_make_an_input_or_an_error(
    name: Any, datatype: Any, shape: Any, data: Any
) -> None:
    tensor = {"name": name, "datatype": datatype, "shape": shape, "data": data}
    body = dump({"inputs": [tensor]})
    with contextlib.suppress(ModelportError):
        http_request.decode(body, len(body), "model", 0)


@PROPERTY
@given(st.binary(max_size=200))
def test_any_bytes_at_all_are_json_or_an_error(data: bytes) -> None:
    with contextlib.suppress(ModelportError):
        json_text.loads(data)


@PROPERTY
@given(
    st.sampled_from(list(Datatype)),
    st.lists(st.integers(0, 4), max_size=3),
    st.binary(max_size=64),
)
def test_any_bytes_at_all_are_a_tensor_of_exactly_that_size_or_an_error(
    datatype: Datatype, shape: list[int], data: bytes
) -> None:
    spec = TensorSpec("x", datatype, tuple(shape))
    try:
        request, _ = http_request.decode_raw(data, spec, tuple(shape), "model", 0)
    except InvalidArgument:
        return
    except ValueError:  # a raw string has one element; the validator lets no other shape here
        assert datatype is Datatype.BYTES
        assert math.prod(shape) != 1
        return
    array = request.inputs[0].data
    assert array.shape == tuple(shape)
    if datatype is not Datatype.BYTES:
        assert array.nbytes == len(data)


# -- time and memory -----------------------------------------------------------------------------

BOMBS: dict[str, Callable[[], bytes]] = {
    "depth 100000": lambda: b"[" * 100_000,
    "depth 100000 and closed": lambda: b"[" * 100_000 + b"]" * 100_000,
    "depth 100000 hidden behind a string": lambda: (
        b'{"a":"' + b"]" * 100_000 + b'","b":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    ),
    "a million keys": lambda: b"{" + b",".join(b'"k%d":0' % n for n in range(10**6)) + b"}",
    "escaped quotes without end": lambda: b'["' + b"[" * 200 + b'\\"' * 3000,
    "strings without end": lambda: b'["' + b"[" * 200 + b'","' * 3000 + b'"',
    "backslashes without end": lambda: b'["' + b"[" * 200 + b"\\\\" * 3000,
    "colons in a string without end": lambda: b'["' + b":" * 20_000 + b'\\"' * 3000,
}


@pytest.mark.parametrize("what", BOMBS)
def test_a_bomb_is_refused_within_a_tenth_of_a_second(what: str) -> None:
    bomb = BOMBS[what]()

    def seconds() -> float:
        started = time.process_time()
        with pytest.raises(InvalidArgument):
            json_text.loads(bomb)
        return processor.seconds_since(started)

    assert min(seconds() for _ in range(3)) < 0.1


@pytest.mark.thorough
def test_the_number_of_arrays_in_json_is_limited() -> None:
    value = json_text.loads(b"[" + b",".join([b"[]"] * 1_000_000) + b"]")
    assert isinstance(value, LongArray)
    assert value.shape == (1_000_000, 0)
    with pytest.raises(InvalidArgument, match="more than 4000000 arrays and objects"):
        json_text.loads(b"[" + b",".join([b"[]"] * 4_000_000) + b"]")
    json_text.loads(b'["' + b"[]" * 4_000_000 + b'"]')
    assert gc.isenabled()


TRICKY = st.text(st.sampled_from('"\\[]{}:,a\n\u2028'), max_size=8)


@PROPERTY
@given(
    st.recursive(
        TRICKY,
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TRICKY, inner, max_size=4),
        max_leaves=30,
    ),
    st.booleans(),
)
def test_what_bounds_a_document_sees_its_keys_and_its_depth_through_any_string(
    value: Any, ascii_only: bool
) -> None:
    def keys(item: Any) -> int:
        if isinstance(item, dict):
            return len(item) + sum(map(keys, item.values()))
        return sum(map(keys, item)) if isinstance(item, list) else 0

    text = json.dumps(value, ensure_ascii=ascii_only).encode()
    json_text._check_size(text, keys(value))
    if keys(value):
        with pytest.raises(InvalidArgument, match="keys"):
            json_text._check_size(text, keys(value) - 1)
    deep = b"[" * json_text.MAX_DEPTH
    json_text._check_size(b"[" + text + b"," + deep[1:] + b"]" * json_text.MAX_DEPTH, keys(value))
    with pytest.raises(InvalidArgument, match="nesting depth"):
        json_text._check_size(b"[" + text + b"," + deep, keys(value))


def test_a_long_string_beside_brackets_costs_no_multiple_of_its_size() -> None:
    text = b'{"a":"' + b"[" * 200 + b'","b":"' + b"x" * 4_000_000 + b'"}'
    json_text.loads(text)  # what it needs at all
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started = time.process_time()
    longer = text.replace(b"x", b"xx")
    json_text.loads(longer)
    assert processor.seconds_since(started) < 0.5
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    assert grown < 16 * len(longer)


# -- the wire ------------------------------------------------------------------------------------

PATHS = (
    *["/v2/models/x2/infer"] * 8,
    "/v2/models/x2/versions/1/infer",
    "/v2/models/identity_bytes/infer",
    "/v2/models/identity_int8/infer",
    "/v2/models/add_and_subtract/infer",
    "/v2/repository/index",
    "/v2/repository/models/x2/load",
)
HEADERS = (
    ("Content-Encoding", "gzip"),
    ("Content-Encoding", "deflate"),
    ("Content-Encoding", "\xff"),
    ("Accept-Encoding", "gzip;q=nan, deflate;q=inf"),
    ("Accept-Encoding", ";;;,,,=q"),
    ("Content-Type", "\xe9"),
    ("Transfer-Encoding", "identity"),
    ("Expect", "100-continue"),
    ("Upgrade", "websocket"),
    ("X-Request-Id", "\xff" * 300),
    (HEADER_LENGTH, "-1"),
    (HEADER_LENGTH, "0"),
    (HEADER_LENGTH, "4"),
    (HEADER_LENGTH, "9" * 4400),
    (HEADER_LENGTH, "\xb2"),
)


#: The front's own answer, before there is a request for the application.
NO_HTTP = b"Invalid HTTP request received."


def wire_case(chance: random.Random) -> tuple[str, str, bytes, list[tuple[str, str]]]:
    if chance.random() < 0.5:  # near enough to a good request for some of them to be one
        header, blob = HTTP_SEEDS[chance.choice((0, 2))]
        path = "/v2/models/x2/infer"
        if chance.random() < 0.8:
            header = dump(mutate_value(chance, json.loads(header)))
        return "POST", path, header + blob, [(HEADER_LENGTH, str(len(header)))]
    header, blob = http_case(chance)
    path = chance.choice(PATHS)
    if chance.random() < 0.2:
        at = chance.randrange(4, len(path) + 1)
        odd = ("%", "%2f", "%00", "..", "/", "//", "?", "#", "%ff", "%c2%b2", "0" * 4400, ";", "~")
        path = path[:at] + chance.choice(odd) + path[at + chance.randrange(3) :]
    method = chance.choice(("POST",) * 12 + ("GET", "PUT", "DELETE", "HEAD", "OPTIONS", "TRACE"))
    headers = [(HEADER_LENGTH, str(len(header)))] if chance.random() < 0.7 else []
    headers += chance.choices(HEADERS, k=chance.choice((0, 0, 0, 1, 2)))
    return method, path, header + blob, headers


def test_no_mutated_request_is_answered_with_a_fault_of_the_server(gateway: Gateway) -> None:
    """Allowed beside 2xx and 4xx: 501 and 503, which say what the client asked for in vain."""
    finds = Finds()
    connection = KeptConnection(gateway.http)
    statuses: dict[int, int] = {}
    for number in range(WIRE_CASES):
        method, path, body, headers = wire_case(random.Random(f"wire {number}"))
        told = f"{method} {path} {headers}\n".encode("latin-1", "replace") + body
        try:
            reply = connection.send(method, path, body, headers)
        except (OSError, http.client.HTTPException) as error:
            finds.note(number, f"{type(error).__name__}: {error}", told)
            connection = KeptConnection(gateway.http)
            continue
        statuses[reply.status] = statuses.get(reply.status, 0) + 1
        if reply.status >= 500 and reply.status not in (501, 503):
            finds.note(number, f"status {reply.status}, {reply.body[:100]!r}", told)
            connection.close()
        elif reply.status >= 400 and method != "HEAD" and reply.body != NO_HTTP:
            if reply.headers.get("content-type") != "application/json":
                finds.note(number, f"an error that is no JSON: {reply.body[:100]!r}", told)
            elif list(reply.json) != ["error"]:
                finds.note(number, f"an error that is {list(reply.json)}", told)
            else:
                sent = told.decode("latin-1") + ascii(body)
                private = wire.private(reply.json["error"], sent)
                if private:
                    finds.note(number, f"the text of an error holds {private}", told)
        if number % 100 == 99:
            wire.assert_serves(connection)
    wire.assert_serves(connection)
    connection.close()
    finds.assert_none()
    assert statuses.get(400, 0) > WIRE_CASES / 10, statuses
    assert statuses.get(200, 0) > WIRE_CASES / 100, statuses


def test_mutated_bytes_of_whole_requests_do_no_harm(gateway: Gateway) -> None:
    """Whatever http makes of them: no fault of the server, and the next request is served."""
    body = wire.good_body()
    head = b"POST /v2/models/x2/infer HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % len(body)
    good = KeptConnection(gateway.http)
    for number in range(WIRE_CASES // 50):
        chance = random.Random(f"bytes {number}")
        data = mutate_bytes(chance, head) + body
        try:
            reply = wire.send_bytes(gateway.http, data, timeout_seconds=0.05)
        except TimeoutError:  # it waits for the rest of a longer request
            reply = None
        if reply is not None:
            assert reply.status < 500 or reply.status in (501, 503, 505), (number, data, reply)
        if number % 20 == 19:
            wire.assert_serves(good)
    wire.assert_serves(good)
    good.close()


ALLOWED = {
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.UNAVAILABLE,
}


def test_mutated_messages_do_no_harm_over_grpc(stub: Any) -> None:
    finds = Finds()
    for number in range(WIRE_CASES // 10):
        chance = random.Random(f"message {number}")
        message = pb.ModelInferRequest()
        try:
            message.ParseFromString(mutate_bytes(chance, chance.choice(GRPC_SEEDS)))
        except DecodeError:
            message.ParseFromString(GRPC_SEEDS[0])
            _mutate_message(chance, message)
        call = stub.ModelInfer.future(message, timeout=wire.TIMEOUT_SECONDS)
        error = call.exception()
        if error is not None:
            sent = message.SerializeToString()
            if call.code() not in ALLOWED:
                finds.note(number, f"{call.code()}: {call.details()}", sent)
            private = wire.private(call.details(), str(message))
            if private:
                finds.note(number, f"the text of an error holds {private}", sent)
    wire.assert_serves_grpc(stub)
    finds.assert_none()
