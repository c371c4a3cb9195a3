"""Common mistakes of re-implementations: the numbered lines of section 6 of PROTOCOLS.md."""

from __future__ import annotations

import asyncio
import concurrent.futures
import gzip
import itertools
import json
import queue
import random
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import grpc
import httpx
import numpy as np
import pytest
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from tests import models
from tests.attacks.conftest import peak_bytes
from tests.conformance import wire
from tests.conformance.repository import FACTORS, IDENTITY, SLOW_SECONDS
from tests.conformance.wire import (
    HEADER_LENGTH,
    TIMEOUT_SECONDS,
    KeptConnection,
    json_input,
    message,
)
from tests.server import Gateway, serving

INVALID = grpc.StatusCode.INVALID_ARGUMENT
ROW = np.array([1, 2, 3, 4], np.float32).tobytes()


def refusal(stub: Any, request: Any) -> grpc.RpcError:
    with pytest.raises(grpc.RpcError) as caught:
        stub.ModelInfer(request, timeout=TIMEOUT_SECONDS)
    wire.assert_public(caught.value.details())
    error: grpc.RpcError = caught.value
    return error


# -- 1. Header length invalid, negative or beyond the body: 400 ----------------------------------


@pytest.mark.parametrize(
    "length",
    [
        *("-1", "-0x1", "abc", "", " ", "1.0", "1e1", "0x10", "1_0", "+5", "1 0", "1,1", "NaN"),
        *("99999", "9" * 20, "9" * 5000, "18446744073709551616", "-9223372036854775809", "१०"),
    ],
)
def test_1_a_header_length_that_is_no_length_within_the_body_is_refused(
    connection: KeptConnection, length: str
) -> None:
    connection_headers = {HEADER_LENGTH: length.encode().decode("latin-1")}
    reply = connection.send("POST", "/v2/models/x2/infer", wire.good_body(), connection_headers)
    wire.assert_error(reply, 400, sent=length)


@pytest.mark.parametrize("form", ["+{}", "{}.0", "{}_", "{:,}", "{}e0", "0x{:x}", "{} {}"])
def test_1_the_right_header_length_in_any_form_but_digits_is_refused(
    connection: KeptConnection, form: str
) -> None:
    body = wire.json_body(json_input("x", "FP32", [1, 4], [1, 2, 3, 4]), id="a" * 1000)
    headers = {HEADER_LENGTH: form.format(len(body), len(body))}
    reply = connection.send("POST", "/v2/models/x2/infer", body, headers)
    wire.assert_error(reply, 400)


@pytest.mark.parametrize("offset", [-1, 1])
def test_1_a_header_length_that_cuts_the_json_is_refused(
    connection: KeptConnection, offset: int
) -> None:
    header = wire.json_body(json_input("x", "FP32", [1, 4], binary_data_size=16))
    headers = {HEADER_LENGTH: str(len(header) + offset)}
    reply = connection.send("POST", "/v2/models/x2/infer", header + ROW, headers)
    wire.assert_error(reply, 400)


def test_1_a_header_length_is_checked_against_the_body_without_its_coding(
    connection: KeptConnection,
) -> None:
    body = wire.json_body(json_input("x", "FP32", [1, 4], [1, 2, 3, 4]), id="a" * 1000)
    packed = gzip.compress(body)
    assert len(packed) < len(body)
    headers = {"Content-Encoding": "gzip", HEADER_LENGTH: str(len(body))}
    assert connection.send("POST", "/v2/models/x2/infer", packed, headers).status == 200
    headers[HEADER_LENGTH] = str(len(body) + 1)
    wire.assert_error(connection.send("POST", "/v2/models/x2/infer", packed, headers), 400)


# -- 2. Shapes that overflow, negative dimensions, rank 1000 -------------------------------------

HOSTILE_SHAPES = {
    "an overflow": [16, 2**60],
    "an overflow to zero": [2**32, 2**32],
    "an overflow to the right size": [2**62 + 1, 4],
    "the largest integer": [2**63 - 1],
    "many large": [2**40] * 20,
    "a large one behind a zero": [0, 2**63 - 1, 2**63 - 1],
    "a terabyte": [1, 2**40],
    "a negative": [-1, 4],
    "two negatives": [-1, -4],
    "the least integer": [-(2**63), 4],
    "rank 1000": [1] * 1000,
    "rank 33": [1] * 32 + [4],
    "rank 100000": [1] * 100_000,
}


@pytest.mark.parametrize("form", ["json", "binary"])
@pytest.mark.parametrize("datatype", ["FP32", "BYTES", "BOOL"])
@pytest.mark.parametrize("what", HOSTILE_SHAPES)
def test_2_a_hostile_shape_is_refused_over_http_before_anything_is_allocated(
    gateway: Gateway, connection: KeptConnection, what: str, datatype: str, form: str
) -> None:
    shape, before = HOSTILE_SHAPES[what], peak_bytes(gateway)
    if form == "json":
        data = ["a"] * 4 if datatype == "BYTES" else [1] * 4
        reply = wire.infer_json(
            gateway.http, IDENTITY[datatype], json_input("x", datatype, shape, data)
        )
    else:
        reply = wire.infer_binary(gateway.http, IDENTITY[datatype], [("x", datatype, shape, ROW)])
    wire.assert_error(reply, 400)
    assert peak_bytes(gateway) - before < 32 * 2**20


@pytest.mark.parametrize("form", ["typed", "raw"])
@pytest.mark.parametrize("datatype", ["FP32", "BYTES", "BOOL"])
@pytest.mark.parametrize("what", HOSTILE_SHAPES)
def test_2_a_hostile_shape_is_refused_over_grpc_before_anything_is_allocated(
    gateway: Gateway, stub: Any, what: str, datatype: str, form: str
) -> None:
    before = peak_bytes(gateway)
    request = message(IDENTITY[datatype], ("x", datatype, HOSTILE_SHAPES[what]))
    if form == "raw":
        request.raw_input_contents.append(ROW)
    elif datatype == "BYTES":
        request.inputs[0].contents.bytes_contents.extend([b"a"] * 4)
    elif datatype == "BOOL":
        request.inputs[0].contents.bool_contents.extend([True] * 4)
    else:
        request.inputs[0].contents.fp32_contents.extend([1.0] * 4)
    assert refusal(stub, request).code() is INVALID
    assert peak_bytes(gateway) - before < 32 * 2**20


@pytest.mark.parametrize(
    "shape", ["[1.0,4]", "[true,4]", '["1",4]', "[null]", "[[1,4]]", "[1e0,4]", "{}", "4", "null"]
)
def test_2_a_dimension_is_an_integer_and_nothing_else(
    connection: KeptConnection, shape: str
) -> None:
    body = wire.good_body().decode().replace("[1, 4]", shape)
    assert shape in body
    reply = connection.send("POST", "/v2/models/x2/infer", body.encode())
    wire.assert_error(reply, 400)


# -- 3. NaN and Infinity in JSON: bare tokens both ways ------------------------------------------


@pytest.mark.parametrize("datatype", ["FP32", "FP64"])
def test_3_not_a_number_goes_in_and_comes_out_as_a_bare_token(
    connection: KeptConnection, datatype: str
) -> None:
    tensor = '{"name":"x","datatype":"%s","shape":[1,4],"data":[NaN,-Infinity,Infinity,0.5]}'
    body = ('{"inputs":[' + tensor % datatype + "]}").encode()
    reply = connection.send("POST", f"/v2/models/{IDENTITY[datatype]}/infer", body)
    assert reply.status == 200
    assert b'"data":[NaN,-Infinity,Infinity,0.5]' in reply.body
    assert b"null" not in reply.body


def test_3_not_a_number_from_bytes_comes_out_as_a_bare_token(gateway: Gateway) -> None:
    data = np.array([np.nan, np.inf, -np.inf, 1], np.float32).tobytes()
    reply = wire.infer_binary(gateway.http, "x2", [("x", "FP32", [1, 4], data)])
    assert b'"data":[NaN,Infinity,-Infinity,2.0]' in reply.body


def test_3_beside_not_a_number_the_other_values_keep_every_bit(gateway: Gateway) -> None:
    values = np.array([[0.1, 1e-45, 3.4028235e38, np.nan]], np.float32)
    tensor = ("x", "FP32", [1, 4], values.tobytes())
    reply = wire.infer_binary(gateway.http, IDENTITY["FP32"], [tensor])
    found = np.array(reply.json["outputs"][0]["data"], np.float32)
    assert found[:3].tobytes() == values[0, :3].tobytes()


@pytest.mark.parametrize(
    ("datatype", "element"),
    [
        ("FP32", "null"),
        ("FP32", '"NaN"'),
        ("FP32", "nan"),
        ("FP32", "Inf"),
        ("FP32", "+Infinity"),
        ("FP32", "-NaN"),
        ("INT32", "NaN"),
        ("UINT8", "Infinity"),
        ("BOOL", "NaN"),
        ("BYTES", "NaN"),
    ],
)
def test_3_no_other_spelling_and_no_other_datatype(
    connection: KeptConnection, datatype: str, element: str
) -> None:
    body = '{"inputs":[{"name":"x","datatype":"%s","shape":[1,1],"data":[%s]}]}'
    path = f"/v2/models/{IDENTITY[datatype]}/infer"
    wire.assert_error(connection.send("POST", path, (body % (datatype, element)).encode()), 400)


@pytest.mark.parametrize("member", ["id", "inputs", "outputs", "parameters"])
def test_3_not_a_number_in_any_other_place_is_refused(
    connection: KeptConnection, member: str
) -> None:
    body = json.dumps({**json.loads(wire.good_body()), member: float("nan")})
    assert "NaN" in body
    wire.assert_error(connection.send("POST", "/v2/models/x2/infer", body.encode()), 400)


# -- 4. NUL bytes inside BYTES, empty strings, empty tensors -------------------------------------

STRINGS = [b"", b"\0", b"a\0b", b"\0\0", b"end\0", b""]


def test_4_strings_with_nul_and_empty_strings_over_http(gateway: Gateway) -> None:
    for model in (IDENTITY["BYTES"], "echo_bytes"):
        tensor = ("x", "BYTES", [2, 3], wire.pack(STRINGS))
        reply = wire.infer_binary(
            gateway.http, model, [tensor], parameters={"binary_data_output": True}
        )
        assert wire.unpack(wire.binary_outputs(reply)["y"][2]) == STRINGS
        reply = wire.infer_json(
            gateway.http, model, json_input("x", "BYTES", [2, 3], [s.decode() for s in STRINGS])
        )
        assert [text.encode() for text in reply.json["outputs"][0]["data"]] == STRINGS


def test_4_strings_with_nul_and_empty_strings_over_grpc(stub: Any) -> None:
    for model in (IDENTITY["BYTES"], "echo_bytes"):
        raw = message(model, ("x", "BYTES", [2, 3]), raw=[wire.pack(STRINGS)])
        typed = message(model, ("x", "BYTES", [2, 3]))
        typed.inputs[0].contents.bytes_contents.extend(STRINGS)
        for request in (raw, typed):
            reply = stub.ModelInfer(request, timeout=TIMEOUT_SECONDS)
            assert wire.unpack(reply.raw_output_contents[0]) == STRINGS


@pytest.mark.parametrize("datatype", sorted(IDENTITY))
def test_4_an_empty_tensor_is_a_tensor(gateway: Gateway, stub: Any, datatype: str) -> None:
    for shape in ([1, 0], [8, 0]):
        reply = wire.infer_binary(
            gateway.http,
            IDENTITY[datatype],
            [("x", datatype, shape, b"")],
            parameters={"binary_data_output": True},
        )
        assert wire.binary_outputs(reply) == {"y": (datatype, shape, b"")}
        request = message(IDENTITY[datatype], ("x", datatype, shape), raw=[b""])
        answer = stub.ModelInfer(request, timeout=TIMEOUT_SECONDS)
        assert list(answer.outputs[0].shape) == shape
        assert list(answer.raw_output_contents) == [b""]


def test_4_an_empty_tensor_as_json_is_an_empty_list(gateway: Gateway) -> None:
    cases: tuple[list[Any], ...] = ([], [[]])
    for data in cases:
        tensor = json_input("x", "FP32", [1, 0], data)
        reply = wire.infer_json(gateway.http, IDENTITY["FP32"], tensor)
        assert reply.json["outputs"][0]["data"] == []


# -- 5. Duplicate input or output names: 400 -----------------------------------------------------


@pytest.mark.parametrize("names", ["aa", "bb", "aab", "aba", "abb"])
def test_5_an_input_given_twice_is_refused(gateway: Gateway, stub: Any, names: str) -> None:
    tensors = [json_input(name, "FP32", [1, 4], [1, 2, 3, 4]) for name in names]
    wire.assert_error(wire.infer_json(gateway.http, "add_and_subtract", *tensors), 400)
    request = message(
        "add_and_subtract", *((name, "FP32", [1, 4]) for name in names), raw=[ROW] * len(names)
    )
    assert refusal(stub, request).code() is INVALID


@pytest.mark.parametrize("outputs", [["y", "y"], ["y", "y", "y"]])
def test_5_an_output_asked_for_twice_is_refused(
    gateway: Gateway, stub: Any, outputs: list[str]
) -> None:
    reply = wire.infer_json(
        gateway.http,
        "x2",
        json_input("x", "FP32", [1, 4], [1, 2, 3, 4]),
        outputs=[{"name": name} for name in outputs],
    )
    wire.assert_error(reply, 400)
    request = message("x2", ("x", "FP32", [1, 4]), raw=[ROW], outputs=outputs)
    assert refusal(stub, request).code() is INVALID


# -- 6. Version directories: only canonical positive integers ------------------------------------


def test_6_only_canonical_positive_integers_are_versions(tmp_path: Path) -> None:
    root = models.repository(tmp_path)
    for name in ("01", "v2", ".tmp", "0", "-1", "1.0", "2x", "\uff13", "+4", " 5", "1e1", "9" * 30):
        models.multiply(root / "x2" / name / "model.onnx", factor=100.0)
    (root / "x2" / "7").write_text("a file and no directory")
    (root / "x2" / "config.pbtxt").write_text(models.X2_CONFIG + "version_policy { all {} }")
    with serving(root) as gateway:
        reply = wire.send(gateway.http, "GET", "/v2/models/x2")
        assert reply.json["versions"] == ["1"]
        rows = wire.send(gateway.http, "POST", "/v2/repository/index").json
        assert rows == [{"name": "x2", "version": "1", "state": "READY", "reason": ""}]
        reply = wire.send(gateway.http, "POST", "/v2/models/x2/infer", wire.good_body())
        assert reply.json["outputs"][0]["data"] == [2, 4, 6, 8]


# -- 7. Queue full is 503 while another request runs ---------------------------------------------


def test_7_a_full_queue_is_503_while_others_run(gateway: Gateway) -> None:
    body = wire.json_body(json_input("x", "FP32", [1], [1.0]))
    done: queue.Queue[wire.WireReply] = queue.Queue()

    def ask() -> None:
        done.put(wire.send(gateway.http, "POST", "/v2/models/heavy/infer", body))

    # One runs, one waits: six of eight find the queue full.
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        concurrent.futures.wait([pool.submit(ask) for _ in range(8)])
    replies = [done.get_nowait() for _ in range(8)]
    statuses = [reply.status for reply in replies]
    assert set(statuses) == {200, 503}
    assert statuses.count(200) >= 2
    assert statuses[0] == 503, "the refusals wait for nobody"
    for reply in replies:
        if reply.status == 503:
            assert wire.assert_error(reply, 503) == "Exceeds maximum queue size"
            assert int(reply.headers["retry-after"]) >= 1
    assert wire.send(gateway.http, "POST", "/v2/models/heavy/infer", body).status == 200


def test_7_a_full_queue_is_unavailable_over_grpc(gateway: Gateway, stub: Any) -> None:
    request = message("heavy", ("x", "FP32", [1]), raw=[np.float32(1).tobytes()])
    calls = [stub.ModelInfer.future(request, timeout=TIMEOUT_SECONDS) for _ in range(8)]
    codes = [call.code() for call in calls]
    assert set(codes) == {grpc.StatusCode.OK, grpc.StatusCode.UNAVAILABLE}
    details = {c.details() for c in calls if c.code() is grpc.StatusCode.UNAVAILABLE}
    assert details == {"Exceeds maximum queue size"}


# -- 8. A failed reload leaves the old version, a failed first load shows its reason --------------


@pytest.fixture(scope="module")
def explicit(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Gateway, Path]]:
    root = models.repository(tmp_path_factory.mktemp("reload"))
    (root / "broken" / "1").mkdir(parents=True)
    (root / "broken" / "1" / "model.onnx").write_bytes(b"no model")
    flags = ("--model-control-mode", "explicit", "--load-model", "x2")
    with serving(root, *flags) as gateway:
        yield gateway, root


def _load(gateway: Gateway, model: str) -> wire.WireReply:
    return wire.send(gateway.http, "POST", f"/v2/repository/models/{model}/load")


def _rows(gateway: Gateway, model: str) -> list[dict[str, str]]:
    rows = wire.send(gateway.http, "POST", "/v2/repository/index").json
    return [row for row in rows if row["name"] == model]


@pytest.mark.parametrize("damage", ["truncated", "emptied", "removed", "another signature"])
def test_8_a_failed_reload_leaves_the_old_version_ready(
    explicit: tuple[Gateway, Path], damage: str
) -> None:
    gateway, root = explicit
    file = root / "x2" / "1" / "model.onnx"
    whole = file.read_bytes()
    try:
        if damage == "truncated":
            file.write_bytes(whole[:-20])
        elif damage == "emptied":
            file.write_bytes(b"")
        elif damage == "removed":
            file.unlink()
        else:
            models.identity(file, "INT32")
        wire.assert_error(_load(gateway, "x2"), 400)
        (row,) = _rows(gateway, "x2")
        assert (row["version"], row["state"]) == ("1", "READY")
        assert wire.send(gateway.http, "GET", "/v2/models/x2/ready").status == 200
        reply = wire.send(gateway.http, "POST", "/v2/models/x2/infer", wire.good_body())
        assert reply.json["outputs"][0]["data"] == [2, 4, 6, 8]
    finally:
        file.write_bytes(whole)
    assert _load(gateway, "x2").status == 200
    assert _rows(gateway, "x2")[0]["reason"] == ""


def test_8_a_broken_configuration_leaves_the_old_version_ready(
    explicit: tuple[Gateway, Path],
) -> None:
    gateway, root = explicit
    file = root / "x2" / "config.pbtxt"
    whole = file.read_text()
    try:
        file.write_text("this is { no configuration")
        wire.assert_error(_load(gateway, "x2"), 400)
        assert _rows(gateway, "x2")[0]["state"] == "READY"
        reply = wire.send(gateway.http, "POST", "/v2/models/x2/infer", wire.good_body())
        assert reply.json["outputs"][0]["data"] == [2, 4, 6, 8]
    finally:
        file.write_text(whole)
    assert _load(gateway, "x2").status == 200


def test_8_a_failed_first_load_is_unavailable_with_its_reason(
    explicit: tuple[Gateway, Path],
) -> None:
    gateway, _ = explicit
    wire.assert_error(_load(gateway, "broken"), 400)
    (row,) = _rows(gateway, "broken")
    assert (row["version"], row["state"]) == ("1", "UNAVAILABLE")
    assert "model.onnx" in row["reason"]
    assert wire.send(gateway.http, "GET", "/v2/health/live").status == 200
    assert wire.send(gateway.http, "GET", "/v2/models/x2/ready").status == 200


# -- 9. Cancelling one request leaves the others unharmed ----------------------------------------


def test_9_cancelled_calls_leave_the_others_their_own_answers(
    gateway: Gateway, runner: asyncio.Runner
) -> None:
    chance = random.Random(9)

    async def ask(stub: Any, nonce: int) -> int | None:
        """The nonce that came back, or None if the call was cancelled."""
        raw = np.int64(nonce).tobytes()
        call = stub.ModelInfer(message("slow", ("x", "INT64", [1, 1]), raw=[raw]))
        if nonce % 2:
            loop = asyncio.get_running_loop()
            loop.call_later(chance.uniform(0, SLOW_SECONDS * 0.9), call.cancel)
        try:
            reply = await asyncio.wait_for(call, TIMEOUT_SECONDS)
        except asyncio.CancelledError:
            return None
        return int(np.frombuffer(reply.raw_output_contents[0], np.int64)[0])

    async def storm() -> list[int | None]:
        async with grpc.aio.insecure_channel(gateway.grpc) as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            return await asyncio.gather(*(ask(stub, nonce) for nonce in range(200)))

    answers = runner.run(storm())
    assert answers == [None if nonce % 2 else nonce for nonce in range(200)]
    settle(gateway)


def test_9_clients_that_hang_up_leave_the_others_their_own_answers(
    gateway: Gateway, runner: asyncio.Runner
) -> None:
    chance = random.Random(90)

    async def ask(client: httpx.AsyncClient, nonce: int) -> int | None:
        body = wire.json_body(json_input("x", "INT64", [1, 1], [nonce]))
        seconds = chance.uniform(0.01, SLOW_SECONDS * 0.9) if nonce % 2 else TIMEOUT_SECONDS
        try:
            async with asyncio.timeout(seconds):
                reply = await client.post("/v2/models/slow/infer", content=body)
        except TimeoutError:
            return None
        return int(reply.json()["outputs"][0]["data"][0])

    async def storm() -> list[int | None]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(
            base_url=f"http://{gateway.http}", limits=limits, timeout=TIMEOUT_SECONDS
        ) as client:
            return await asyncio.gather(*(ask(client, nonce) for nonce in range(100)))

    answers = runner.run(storm())
    assert answers == [None if nonce % 2 else nonce for nonce in range(100)]
    settle(gateway)


def settle(gateway: Gateway) -> None:
    """Nothing stays behind: the pending count of ``slow`` comes down to 0."""
    until = time.monotonic() + 10
    pattern = re.compile(r'modelport_requests_in_flight\{model="slow",version="1"\} (\S+)')
    host = f"127.0.0.1:{gateway.metrics_port}"
    while True:
        match = pattern.search(wire.send(host, "GET", "/metrics").body.decode())
        assert match
        if float(match[1]) == 0:
            return
        assert time.monotonic() < until, f"{match[1]} requests are still pending"


# -- 10. One model's or version's answer is never another's ---------------------------------------


def test_10_the_same_request_to_models_and_versions_gets_each_its_own_answer(
    gateway: Gateway,
) -> None:
    targets = [("x2", "", 2.0), ("x3", "", 3.0), ("two_versions", "", 3.0), ("auto", "", 2.0)]
    targets += [("two_versions", str(version), factor) for version, factor in FACTORS.items()]
    body = wire.good_body()

    def http(target: tuple[str, str, float]) -> None:
        model, version, factor = target
        connection = KeptConnection(gateway.http)
        for _ in range(50):
            reply = connection.send("POST", wire.infer_path(model, version), body)
            assert reply.json["model_name"] == model
            assert version in ("", reply.json["model_version"])
            assert reply.json["outputs"][0]["data"] == [factor * n for n in (1, 2, 3, 4)]
        connection.close()

    def over_grpc(target: tuple[str, str, float]) -> None:
        model, version, factor = target
        request = message(model, ("x", "FP32", [1, 4]), raw=[ROW], version=version)
        with wire.stub(gateway.grpc) as stub:
            for _ in range(50):
                reply = stub.ModelInfer(request, timeout=TIMEOUT_SECONDS)
                assert reply.model_name == model
                assert version in ("", reply.model_version)
                values = np.frombuffer(reply.raw_output_contents[0], np.float32)
                assert values.tolist() == [factor * n for n in (1, 2, 3, 4)]

    jobs = list(itertools.product((http, over_grpc), targets))
    with concurrent.futures.ThreadPoolExecutor(len(jobs)) as pool:
        for future in [pool.submit(job, target) for job, target in jobs]:
            future.result()


# -- 11. Percent-encoded slashes and dots in names reach no path ----------------------------------

NAMES = (
    "..",
    "%2e%2e",
    ".%2e",
    "..%2f..%2fetc%2fpasswd",
    "%2e%2e%2fx2",
    "..%5c..%5cx2",
    "%2fetc%2fpasswd",
    "x2%2f1",
    "x2%2f..%2fx2",
    "x2%00",
    "%00",
    "x2%0a",
    "%252e%252e%252f",
    "%c0%ae%c0%ae%c0%af",
    "%ff",
    "%",
    "%zz",
    "x2%",
    "x2%20",
    "x2;",
    "x2%3f",
    "%78%32%2f",
    "config.pbtxt",
    "~",
    "a" * 300,
)
ROUTES = (
    ("GET", "/v2/models/{}"),
    ("GET", "/v2/models/{}/config"),
    ("GET", "/v2/models/{}/stats"),
    ("GET", "/v2/models/{}/versions/1"),
    ("GET", "/v2/models/{}/versions/1/config"),
    ("GET", "/v2/models/{}/versions/1/stats"),
    ("POST", "/v2/models/{}/infer"),
    ("POST", "/v2/models/{}/versions/1/infer"),
)


@pytest.mark.parametrize("name", NAMES)
def test_11_an_invalid_name_is_not_found_on_any_route(
    connection: KeptConnection, name: str
) -> None:
    for method, route in ROUTES:
        reply = connection.send(method, route.format(name), wire.good_body())
        wire.assert_error(reply, 404, sent=name)


@pytest.mark.parametrize("name", NAMES)
def test_11_a_model_with_an_invalid_name_is_not_ready(
    connection: KeptConnection, name: str
) -> None:
    for route in ("/v2/models/{}/ready", "/v2/models/{}/versions/1/ready"):
        assert connection.send("GET", route.format(name)).status in (400, 404)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("verb", ["load", "unload"])
def test_11_an_invalid_name_loads_nothing(
    explicit: tuple[Gateway, Path], verb: str, name: str
) -> None:
    gateway, _ = explicit
    reply = wire.send(gateway.http, "POST", f"/v2/repository/models/{name}/{verb}")
    if reply.status == 200:  # what is not there is unloaded already
        assert verb == "unload"
    else:
        wire.assert_error(
            reply, 400 if unquote(name) == ".." and verb == "load" else 404, sent=name
        )
    assert {row["name"] for row in _rows(gateway, "x2")} == {"x2"}


GRPC_NAMES = ("..", "../x2", "x2/1", "/etc/passwd", "x2\0", "\0", "%2e%2e", "x2/", "", "a" * 300)


@pytest.mark.parametrize("name", GRPC_NAMES)
def test_11_an_invalid_name_is_not_found_over_grpc(stub: Any, name: str) -> None:
    calls = (
        (stub.ModelInfer, message(name, ("x", "FP32", [1, 4]), raw=[ROW])),
        (stub.ModelMetadata, pb.ModelMetadataRequest(name=name)),
        (stub.ModelConfig, pb.ModelConfigRequest(name=name)),
        *([(stub.ModelStatistics, pb.ModelStatisticsRequest(name=name))] if name else []),
    )
    for call, request in calls:
        with pytest.raises(grpc.RpcError) as caught:
            call(request, timeout=TIMEOUT_SECONDS)
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        wire.assert_public(caught.value.details(), sent=name)
    ready = stub.ModelReady(pb.ModelReadyRequest(name=name), timeout=TIMEOUT_SECONDS)
    assert not ready.ready
