"""Gateways that are each other's upstream servers: a request is refused when it comes back."""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from modelport.gateway.wire import via_header
from modelport.loadtests.system.processes import free_ports
from tests import models
from tests.conformance import wire
from tests.server import Gateway, serving
from tests.thorough import thorough
from tests.upstream import fronting, table

MESSAGE = "form a loop"
BODY = {"inputs": [{"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}]}

REQUEST = wire.message("x2", ("x", "FP32", [1, 4]), raw=[struct.pack("<4f", 1, 2, 3, 4)])


@contextlib.contextmanager
def ring(folder: Path, protocol: str) -> Iterator[Gateway]:
    """A gateway whose upstream server's upstream server it is.

    The upstream server runs the model itself when the gateway agrees with it, and no more later.
    """
    http, rpc = free_ports(2)
    ports = ("--http-port", str(http), "--grpc-port", str(rpc))
    repository = folder / "repository"
    models.repository(repository)
    with contextlib.ExitStack() as stack:
        address = f"127.0.0.1:{rpc if protocol == 'grpc' else http}"
        with serving(repository, *ports) as upstream:
            first = stack.enter_context(
                fronting(folder / "first", table("x2", [address], protocol=protocol))
            )
            assert httpx.post(url(first), json=BODY).status_code == 200
            upstream.terminate()
        back = first.grpc if protocol == "grpc" else first.http
        routes = table("x2", [back], protocol=protocol)
        stack.enter_context(fronting(folder / "second", routes, flags=ports))
        yield first


def url(gateway: Gateway) -> str:
    return f"http://{gateway.http}/v2/models/x2/infer"


@pytest.mark.parametrize("protocol", ["http", thorough("grpc")])
def test_a_request_that_comes_back_is_refused_and_says_why(protocol: str, tmp_path: Path) -> None:
    with ring(tmp_path, protocol) as gateway:

        def asked() -> int:
            document = httpx.get(f"http://{gateway.http}/v2/models/x2/stats").json()
            counts: dict[str, Any] = document["model_stats"][0]["inference_stats"]
            return int(counts["success"]["count"]) + int(counts["fail"]["count"])

        before = asked()
        reply = httpx.post(url(gateway), json=BODY, timeout=30)
        assert reply.status_code >= 400
        assert MESSAGE in reply.json()["error"]
        with wire.stub(gateway.grpc) as stub, pytest.raises(grpc.RpcError) as caught:
            stub.ModelInfer(REQUEST, timeout=30)
        assert MESSAGE in caught.value.details()
        assert asked() - before == 2, "neither went around again"


def test_a_request_through_other_gateways_passes_and_one_through_too_many_does_not() -> None:
    others = ", ".join(f"1.1 modelport-{number:016x}" for number in range(via_header.MAX_HOPS - 1))
    assert not via_header.loops(b"1.1 squid, 2 nginx")
    assert not via_header.loops(others.encode())
    assert via_header.loops(f"{others}, 2 modelport-{'f' * 16}".encode())
    assert via_header.loops(f"1.1 squid, 2 {via_header.OWN}".encode())
    assert via_header.loops(b"x" * 5000)


@pytest.mark.parametrize("via", ["1.1 squid", "1.1 modelport-0123456789abcdef, 2 other"])
def test_proxies_before_it_are_no_loop(via: str, tmp_path: Path) -> None:
    models.repository(tmp_path)
    with serving(tmp_path) as gateway, wire.stub(gateway.grpc) as stub:
        assert httpx.post(url(gateway), json=BODY, headers={"via": via}).status_code == 200
        assert stub.ModelInfer(REQUEST, metadata=[("via", via)], timeout=60).outputs


@pytest.mark.parametrize("protocol", [thorough("http"), "grpc"])
def test_a_client_that_claims_many_gateways_does_no_harm_to_the_server_behind(
    protocol: str, tmp_path: Path
) -> None:
    claimed = ", ".join(f"1.1 modelport-{number:016x}" for number in range(via_header.MAX_HOPS - 1))
    models.repository(tmp_path / "repository")
    with serving(tmp_path / "repository") as upstream:
        address = upstream.grpc if protocol == "grpc" else upstream.http
        routes = table("x2", [address], protocol=protocol)
        with fronting(tmp_path / "front", routes) as gateway:
            for _ in range(10):
                refused = httpx.post(url(gateway), json=BODY, headers={"via": claimed}, timeout=30)
                assert refused.status_code == 400, "the request is wrong, not the server"
                assert MESSAGE in refused.json()["error"]
                assert httpx.post(url(gateway), json=BODY, timeout=30).status_code == 200
