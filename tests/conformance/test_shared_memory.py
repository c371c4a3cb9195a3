"""System shared memory as ``tritonclient``'s own utilities use it, over all four clients."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tritonclient.utils import (
    serialize_byte_tensor,
    shared_memory,
)

from tests.conformance import wire
from tests.conformance.clients import CALLERS, CONTROLS, Ask, ControlCaller, samples, status
from tests.conformance.regions import ROW, Array, RegionClient, allowing, wire_parameters
from tests.conformance.repository import IDENTITY
from tests.conformance.wire import message
from tests.gateway.server.workers.processes import workers
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


def serialized(array: Array) -> Array:
    return serialize_byte_tensor(array) if array.dtype == object else array


def size_of(array: Array) -> int:
    return len(serialized(array).item()) if array.dtype == object else array.nbytes


# -- tensors --------------------------------------------------------------------------------------


@pytest.mark.parametrize("datatype", IDENTITY)
def test_every_datatype_goes_in_and_comes_out(client: RegionClient, datatype: str) -> None:
    array = samples()[datatype]
    size = size_of(array)
    source, _ = client.region(size, serialized(array))
    target, handle = client.region(size + 64)
    result = client.infer(
        IDENTITY[datatype],
        [client.input("x", array, source, size)],
        [client.output("y", target, size, 64)],
    )
    raw = bytes(handle._mpsm_handle.buf[64 : 64 + size])
    assert raw == (serialized(array).item() if array.dtype == object else array.tobytes())
    assert_nothing_but_its_form(client.transport, result, array.shape, datatype)


def assert_nothing_but_its_form(
    transport: str, result: Any, shape: tuple[int, ...], datatype: str
) -> None:
    """The reply of Triton: with ``parameters`` NVIDIA's C++ client takes it for binary data."""
    response = result.get_response()
    if transport == "http":
        form = {"name": "y", "datatype": datatype, "shape": list(shape)}
        assert response["outputs"] == [form]
    else:
        (output,) = response.outputs
        assert (output.name, output.datatype, tuple(output.shape)) == ("y", datatype, shape)
        assert not output.parameters
        assert list(response.raw_output_contents) == [b""]


def test_inputs_and_outputs_may_share_one_region(client: RegionClient) -> None:
    region, handle = client.region(64, np.arange(8, dtype=np.float32))
    a, b = np.float32([[0, 1]]), np.float32([[2, 3]])
    client.infer(
        "add_and_subtract",
        [client.input("a", a, region, 8), client.input("b", b, region, 8, 8)],
        [client.output("total", region, 8, 32), client.output("difference", region, 8, 40)],
    )
    found = shared_memory.get_contents_as_numpy(handle, np.float32, [4], 32)
    assert found.tolist() == [2, 4, -2, -2]


@pytest.mark.parametrize("shared_first", [True, False])
def test_some_tensors_may_travel_in_the_request(client: RegionClient, shared_first: bool) -> None:
    """Raw contents are those of the inputs that are not in shared memory; outputs are by place."""
    a, b = np.float32([[5, 6]]), np.float32([[2, 3]])
    region, handle = client.region(64, a if shared_first else b)
    inputs = [
        client.input("a", a, *((region, 8) if shared_first else ())),
        client.input("b", b, *(() if shared_first else (region, 8))),
    ]
    outputs = [
        client.output("total", *((region, 8, 16) if shared_first else ())),
        client.output("difference", *(() if shared_first else (region, 8, 16))),
    ]
    result = client.infer("add_and_subtract", inputs, outputs)
    expected = {"total": [[7, 9]], "difference": [[3, 3]]}
    inside, outside = ("total", "difference") if shared_first else ("difference", "total")
    assert result.as_numpy(outside).tolist() == expected[outside]
    found = shared_memory.get_contents_as_numpy(handle, np.float32, [1, 2], 16)
    assert found.tolist() == expected[inside]


def test_a_stream_passes_shared_memory_too(allowed: Gateway, runner: asyncio.Runner) -> None:
    client = RegionClient("grpc", allowed, runner)
    try:
        region, handle = client.region(32, ROW)
        request = message("x2", ("x", "FP32", [1, 4]))
        place = {"shared_memory_region": region, "shared_memory_byte_size": 16}
        wire_parameters(request.inputs[0], **place)
        wire_parameters(request.outputs.add(name="y"), **place, shared_memory_offset=16)
        with wire.stub(allowed.grpc) as stub:
            (answer,) = stub.ModelStreamInfer(iter([request]), timeout=60)
        assert answer.error_message == ""
        assert list(answer.infer_response.raw_output_contents) == [b""]
        found = shared_memory.get_contents_as_numpy(handle, np.float32, [1, 4], 16)
        assert found.tolist() == (ROW * 2).tolist()
    finally:
        client.close()


# -- registrations --------------------------------------------------------------------------------


def test_status_names_what_is_registered_until_it_is_not(client: RegionClient) -> None:
    first, _ = client.region(64)
    second, _ = client.region(32)
    row = {"name": first, "key": f"/{first}", "byte_size": 64}
    (found,) = client.status(first)
    assert {**found, "offset": found.get("offset", 0)} == {**row, "offset": 0}
    assert {r["name"] for r in client.status()} == {first, second}
    client.control("unregister_system_shared_memory", first)
    assert {r["name"] for r in client.status()} == {second}
    client.control("unregister_system_shared_memory", first)  # as Triton: no error
    refusal = client.control.refusal("get_system_shared_memory_status", first)
    assert refusal.status() == status(client.transport, 404, "NOT_FOUND")
    client.control("unregister_system_shared_memory")
    assert client.status() == []


def test_a_name_is_given_once(client: RegionClient) -> None:
    name, _ = client.region(64)
    error = client.control.refusal("register_system_shared_memory", name, f"/{name}", 32)
    assert error.status() == status(client.transport, 400, "ALREADY_EXISTS")
    assert client.status(name)[0]["byte_size"] == 64


@pytest.mark.parametrize(
    ("key", "byte_size", "offset"),
    [
        *(("../../etc/passwd", 1, 0), ("/../etc/passwd", 1, 0), ("/etc/passwd", 1, 0)),
        *(("/a/b", 1, 0), ("", 1, 0), ("/", 1, 0)),
        *(("/triton_python_backend_shm_region_1", 1, 0), ("KEY", 65, 0), ("KEY", 0, 0)),
        *(("KEY", 1, 64), ("KEY", 2, 2**63 - 1), ("KEY", 2**63 - 1, 2), ("KEY", 2**64 - 1, 2)),
    ],
)
def test_a_registration_of_anything_but_a_clients_memory_is_refused(
    client: RegionClient, key: str, byte_size: int, offset: int
) -> None:
    name, _ = client.region(64)
    client.control("unregister_system_shared_memory", name)
    key = key.replace("KEY", f"/{name}")
    error = client.control.refusal("register_system_shared_memory", name, key, byte_size, offset)
    assert error.status() == status(client.transport, 400, "INVALID_ARGUMENT")
    wire.assert_public(error.message(), key)
    assert client.status() == []


def test_an_object_that_is_not_there_is_an_internal_error_as_in_triton(
    client: RegionClient,
) -> None:
    key = "/test-not-there"
    error = client.control.refusal("register_system_shared_memory", "r", key, 1)
    assert error.status() == status(client.transport, 500, "INTERNAL")
    wire.assert_public(error.message(), key)
    assert client.status() == []


def test_cudas_calls_that_clients_make_in_any_case_are_answered(client: RegionClient) -> None:
    client.control("unregister_cuda_shared_memory")
    client.control("unregister_cuda_shared_memory", "r")
    assert not client.control("get_cuda_shared_memory_status")
    handle = b"aGFuZGxl"
    error = client.control.refusal("register_cuda_shared_memory", "r", handle, 0, 64)
    assert error.status() == status(client.transport, 501, "UNIMPLEMENTED")
    assert "CUDA" in error.message()


def test_the_extension_is_named_where_it_is_allowed(client: RegionClient) -> None:
    assert "system_shared_memory" in client.control("get_server_metadata")["extensions"]


@pytest.mark.parametrize("name", CONTROLS)
def test_where_it_is_not_allowed_it_says_how_it_would_be(
    gateway: Gateway, runner: asyncio.Runner, name: str
) -> None:
    control = ControlCaller(CALLERS[name](gateway, runner), runner)
    try:
        for call in (
            ("register_system_shared_memory", "r", "/r", 8),
            ("unregister_system_shared_memory",),
            ("unregister_cuda_shared_memory",),
        ):
            error = control.refusal(*call)
            assert error.status() == status(control.transport, 501, "UNIMPLEMENTED")
            assert "--allow-client-shm=true" in error.message()
        assert not (control("get_system_shared_memory_status") or {}).get("regions")
    finally:
        control.close()


def test_other_requests_do_not_notice(allowed: Gateway, runner: asyncio.Runner) -> None:
    for name in CALLERS:
        caller = CALLERS[name](allowed, runner)
        assert caller.infer(Ask("x2", [("x", ROW)])).arrays["y"].tolist() == (ROW * 2).tolist()
        caller.close()


@pytest.mark.thorough
def test_every_worker_has_a_region_and_one_that_is_started_again_too(
    tmp_path: Path, runner: asyncio.Runner
) -> None:
    with allowing(tmp_path / "models", "--workers", "2") as gateway:
        client = RegionClient("http", gateway, runner)
        region, handle = client.region(32, ROW)

        def ask_all() -> None:
            """Connections enough for both workers to get some."""
            for i in range(32):
                other = RegionClient(("http", "grpc")[i % 2], gateway, runner)
                inputs = [other.input("x", ROW, region, 16)]
                other.infer("x2", inputs, [other.output("y", region, 16, 16)])
                found = shared_memory.get_contents_as_numpy(handle, np.float32, [1, 4], 16)
                assert found.tolist() == (ROW * 2).tolist()
                other.control.close()

        ask_all()
        os.kill(workers(gateway)[0], signal.SIGKILL)
        gateway.wait_for("worker restarted")
        ask_all()
        client.control("unregister_system_shared_memory")
        for _ in range(16):
            other = RegionClient("grpc", gateway, runner)
            assert other.status() == []
            other.control.close()
        client.close()
