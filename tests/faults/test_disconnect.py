"""A client that goes takes its request with it: what waits is dropped, and counted as canceled."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.faults import probes
from tests.faults.probes import Background, ChangingRepository
from tests.polling import eventually
from tests.server import Gateway, serving

URL = "/v2/models/count/infer"
#: About as many microseconds.
TURNS = 1_500_000


@pytest.fixture
def counting(repository: ChangingRepository) -> Iterator[Gateway]:
    repository.count()
    with serving(repository.root) as gateway:
        yield gateway


def metric(gateway: Gateway, name: str, **labels: str) -> float:
    return probes.metric(gateway, name, model="count", **labels)


def pending(gateway: Gateway, number: int) -> None:
    eventually(
        lambda: metric(gateway, "modelport_requests_in_flight") == number, f"{number} pending"
    )


def ask(gateway: Gateway, turns: int) -> socket.socket:
    """A request on a connection of its own."""
    connection = socket.create_connection(("127.0.0.1", gateway.http_port))
    body = json.dumps(probes.count_request(turns)).encode()
    head = f"POST {URL} HTTP/1.1\r\nhost: a\r\ncontent-length: {len(body)}\r\n\r\n"
    connection.sendall(head.encode() + body)
    return connection


@pytest.mark.thorough
def test_what_clients_have_left_behind_is_never_computed(
    counting: Gateway, background: Background
) -> None:
    with ExitStack() as stack:
        running = background(probes.post, counting, URL, probes.count_request(TURNS))
        pending(counting, 1)
        left = [stack.enter_context(ask(counting, TURNS)) for _ in range(10)]
        kept = stack.enter_context(ask(counting, 1000))
        pending(counting, 12)
        for connection in left:
            connection.close()
        pending(counting, 2)
        assert not running.done()
        assert metric(counting, "request_failure", reason="CANCELED") == 10
        kept.shutdown(socket.SHUT_WR)  # this client has ended its side, and waits
        assert running.result(30).status_code == 200
        kept.settimeout(30)
        answer = b""
        while not answer.endswith(b"}"):
            answer += kept.recv(65536)
    assert b"HTTP/1.1 200 OK" in answer
    assert metric(counting, "request_success") == 2
    assert metric(counting, "exec_count") == 2
