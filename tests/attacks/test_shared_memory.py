"""Hostile use of system shared memory: nothing leaves its region, and the server lives on."""

from __future__ import annotations

import asyncio
import json
import os
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families
from tritonclient.grpc import service_pb2 as pb
from tritonclient.utils import (
    InferenceServerException,
    shared_memory,
)

from tests.conformance import wire
from tests.conformance.clients import CONTROLS, status
from tests.conformance.regions import MAX_INPUT_BYTES, ROW, RegionClient, allowing, wire_parameters
from tests.conformance.repository import IDENTITY
from tests.conformance.wire import json_body, json_input, message
from tests.server import Gateway


@pytest.fixture(scope="module")
def allowed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    with allowing(tmp_path_factory.mktemp("shared") / "models") as gateway:
        yield gateway


@pytest.fixture(params=CONTROLS)
def client(
    request: pytest.FixtureRequest, allowed: Gateway, runner: asyncio.Runner
) -> Iterator[RegionClient]:
    made = RegionClient(request.param, allowed, runner)
    yield made
    made.close()


@pytest.mark.parametrize(
    ("size", "offset", "reason"),
    [
        *((16, 49, "offset"), (16, 64, "offset"), (16, 2**62, "offset"), (65, 0, "expect|size")),
        *((2**62, 0, "size"), (2**63 - 1, 2**63 - 1, "offset|size"), (12, 0, "size")),
    ],
)
def test_an_input_that_is_not_within_its_region_is_refused(
    client: RegionClient, size: int, offset: int, reason: str
) -> None:
    region, _ = client.region(64, ROW)
    error = client.refusal("x2", [client.input("x", ROW, region, size, offset)])
    assert error.status() == status(client.transport, 400, "INVALID_ARGUMENT")
    assert any(word in error.message() for word in reason.split("|"))


@pytest.mark.parametrize(("size", "offset"), [(16, 49), (65, 0), (2**62, 2**62), (15, 0)])
def test_an_output_that_has_no_room_is_refused_and_nothing_is_written(
    client: RegionClient, size: int, offset: int
) -> None:
    region, handle = client.region(64)
    output = client.output("y", region, size, offset)
    error = client.refusal("x2", [client.input("x", ROW)], [output])
    assert error.status() == status(client.transport, 400, "INVALID_ARGUMENT")
    assert bytes(handle._mpsm_handle.buf[:64]) == bytes(64)


def test_a_region_that_nobody_registered_is_not_found(client: RegionClient) -> None:
    for arguments in (
        ([client.input("x", ROW, "nobody's", 16)], None),
        ([client.input("x", ROW)], [client.output("y", "nobody's", 16)]),
    ):
        error = client.refusal("x2", *arguments)
        assert error.status() == status(client.transport, 404, "NOT_FOUND")
        assert "Unable to find shared memory region: 'nobody's'" in error.message()


@pytest.mark.parametrize(
    "parameters",
    [
        {"shared_memory_region": "r"},
        {"shared_memory_region": 1, "shared_memory_byte_size": 16},
        {"shared_memory_region": "r", "shared_memory_byte_size": -1},
        {"shared_memory_region": "r", "shared_memory_byte_size": "16"},
        {"shared_memory_region": "r", "shared_memory_byte_size": 2**64},
        {"shared_memory_region": "r", "shared_memory_byte_size": 16, "shared_memory_offset": -1},
        {"shared_memory_region": "r", "shared_memory_byte_size": 16, "binary_data_size": 0},
        {"shared_memory_region": "r", "shared_memory_byte_size": 16, "classification": 1},
        {"shared_memory_region": "r", "shared_memory_byte_size": 16, "binary_data": True},
    ],
)
def test_parameters_that_say_too_little_or_too_much_are_refused(
    allowed: Gateway, runner: asyncio.Runner, parameters: dict[str, Any]
) -> None:
    client = RegionClient("http", allowed, runner)
    try:
        name, _ = client.region(64, ROW)
        if parameters["shared_memory_region"] == "r":
            parameters = {**parameters, "shared_memory_region": name}
        inline = json_input("x", "FP32", [1, 4], [1, 2, 3, 4])
        bodies = [json_body(inline, outputs=[{"name": "y", "parameters": parameters}])]
        if not {"classification", "binary_data"} & set(parameters):
            shared = {"name": "x", "datatype": "FP32", "shape": [1, 4], "parameters": parameters}
            bodies.append(json_body(shared))
        if "binary_data_size" in parameters:
            del bodies[0]
        for body in bodies:
            wire.assert_error(wire.send(allowed.http, "POST", wire.infer_path("x2"), body), 400)
    finally:
        client.close()


def test_data_and_shared_memory_do_not_go_together(
    allowed: Gateway, runner: asyncio.Runner
) -> None:
    client = RegionClient("http", allowed, runner)
    try:
        region, _ = client.region(64, ROW)
        place = {"shared_memory_region": region, "shared_memory_byte_size": 16}
        both = {**json_input("x", "FP32", [1, 4], [1, 2, 3, 4]), "parameters": place}
        reply = wire.send(allowed.http, "POST", wire.infer_path("x2"), json_body(both))
        assert "only one of" in wire.assert_error(reply, 400)
        request = message("x2", ("x", "FP32", [1, 4]))
        wire_parameters(request.inputs[0], **place)
        surplus, typed = pb.ModelInferRequest(), pb.ModelInferRequest()
        for other in (surplus, typed):
            other.CopyFrom(request)
        surplus.raw_input_contents.append(ROW.tobytes())
        typed.inputs[0].contents.fp32_contents.extend([1, 2, 3, 4])
        with wire.stub(allowed.grpc) as stub:
            assert stub.ModelInfer(request).raw_output_contents[0] == (ROW * 2).tobytes()
            for wrong in (surplus, typed):
                with pytest.raises(grpc.RpcError) as caught:
                    stub.ModelInfer(wrong)
                assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    finally:
        client.close()


def test_a_small_request_cannot_make_the_server_copy_without_end(
    allowed: Gateway, runner: asyncio.Runner
) -> None:
    client = RegionClient("http", allowed, runner)
    try:
        region, _ = client.region(MAX_INPUT_BYTES)
        count = MAX_INPUT_BYTES // 4
        place = {"shared_memory_region": region, "shared_memory_byte_size": MAX_INPUT_BYTES}
        one = {"name": "x", "datatype": "FP32", "shape": [1, count], "parameters": place}
        path = wire.infer_path(IDENTITY["FP32"])
        assert wire.send(allowed.http, "POST", path, json_body(one)).status == 200
        text = wire.assert_error(
            wire.send(allowed.http, "POST", path, json_body(*[one] * 500)), 400
        )
        assert "--http-max-input-size" in text
    finally:
        client.close()


def test_truncation_under_load_fails_requests_and_never_the_server(client: RegionClient) -> None:
    """With a mapping the first read past the end is a SIGBUS: the process is gone."""
    size = 64 * 1024
    x = np.arange(size // 4, dtype=np.float32).reshape(1, -1)
    source, _ = client.region(size, x)
    target, _ = client.region(size)
    paths = [Path("/dev/shm") / name for name in (source, target)]
    stop, turns = threading.Event(), 0

    def truncate() -> None:
        nonlocal turns
        while not stop.is_set():
            for length in (0, size // 2, size):
                for path in paths:
                    os.truncate(path, length)
            turns += 1

    thread = threading.Thread(target=truncate)
    thread.start()
    refused, texts = 0, set()
    try:
        while refused < 20 or turns < 50:
            try:
                client.infer(
                    IDENTITY["FP32"],
                    [client.input("x", x, source, size)],
                    [client.output("y", target, size)],
                )
            except InferenceServerException as error:
                texts.add((error.status(), error.message().partition("' ")[2]))
                refused += 1
    finally:
        stop.set()
        thread.join()
    ((code, text),) = texts
    assert code == status(client.transport, 400, "INVALID_ARGUMENT")
    assert text.startswith("has become smaller")
    assert client.control("is_server_live")
    assert client.gateway.process.poll() is None


def test_a_region_that_is_unregistered_in_between_fails_cleanly_or_not_at_all(
    allowed: Gateway, runner: asyncio.Runner
) -> None:
    client, other = RegionClient("http", allowed, runner), RegionClient("grpc", allowed, runner)
    try:
        region, handle = client.region(32, ROW)
        stop = threading.Event()

        def flip() -> None:
            while not stop.is_set():
                other.control("unregister_system_shared_memory", region)
                other.control("register_system_shared_memory", region, f"/{region}", 32)

        thread = threading.Thread(target=flip)
        thread.start()
        codes: set[str] = set()
        answered = missed = 0
        try:
            while not (answered > 20 and missed > 5) and answered + missed < 3000:
                try:
                    client.infer(
                        "x2",
                        [client.input("x", ROW, region, 16)],
                        [client.output("y", region, 16, 16)],
                    )
                except InferenceServerException as error:
                    codes.add(error.status())
                    missed += 1
                else:
                    found = shared_memory.get_contents_as_numpy(handle, np.float32, [1, 4], 16)
                    assert found.tolist() == (ROW * 2).tolist()
                    answered += 1
        finally:
            stop.set()
            thread.join()
        assert answered > 20
        assert codes == {"404"}
    finally:
        client.close()
        other.close()


def pending(gateway: Gateway, model: str) -> bool:
    text = urllib.request.urlopen(gateway.metrics).read().decode()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    rows = families["modelport_requests_in_flight"].samples
    return any(row.value for row in rows if row.labels["model"] == model)


def test_an_answer_goes_into_its_region_even_if_that_is_unregistered_meanwhile(
    allowed: Gateway, runner: asyncio.Runner
) -> None:
    client = RegionClient("grpc", allowed, runner)
    try:
        meanwhile = False
        while not meanwhile:  # a busy machine may be too late
            region, handle = client.region(16)
            request = message("slow", ("x", "INT64", [1, 1]), raw=[np.int64(41).tobytes()])
            place = {"shared_memory_region": region, "shared_memory_byte_size": 8}
            wire_parameters(request.outputs.add(name="y"), **place)
            with wire.stub(allowed.grpc) as stub:
                answer = stub.ModelInfer.future(request)
                while not (seen := pending(allowed, "slow")) and not answer.done():
                    pass
                client.control("unregister_system_shared_memory")
                meanwhile = seen and not answer.done()
                if meanwhile:
                    assert list(answer.result().raw_output_contents) == [b""]
        assert shared_memory.get_contents_as_numpy(handle, np.int64, [1, 1]).tolist() == [[41]]
    finally:
        client.close()


@pytest.mark.parametrize(
    "body",
    [
        *({}, [], "x", {"key": 1, "byte_size": 8}, {"key": "/x"}, {"key": "/x", "byte_size": "8"}),
        *({"key": "/x", "byte_size": -8}, {"key": "/x", "byte_size": 8.0}),
        *({"key": "/x", "byte_size": True}, {"key": "/x", "byte_size": 8, "offset": None}),
    ],
)
def test_a_registration_that_is_no_registration_is_refused(allowed: Gateway, body: Any) -> None:
    path = "/v2/systemsharedmemory/region/r/register"
    reply = wire.send(allowed.http, "POST", path, json.dumps(body).encode())
    wire.assert_error(reply, 400)
