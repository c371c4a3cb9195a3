"""What the front bounds, each with the same thing unbounded or just within the bound."""

from __future__ import annotations

import http.client
import selectors
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress

import pytest

from tests.conformance import wire
from tests.front.launcher import Envoy, envoy

HEAD_SECONDS = 1
BODY_IDLE_SECONDS = 0.5
MAX_CONNECTIONS = 620
DRIBBLING = 500


@pytest.fixture(scope="module")
def impatient() -> Iterator[Envoy]:
    """With limits that a test can wait for."""
    with envoy(
        {"BODY_IDLE_SECONDS": BODY_IDLE_SECONDS},
        HEAD_SECONDS=HEAD_SECONDS,
        MAX_CONNECTIONS=MAX_CONNECTIONS,
    ) as running:
        yield running


def connect(envoy: Envoy) -> socket.socket:
    return socket.create_connection(("127.0.0.1", envoy.http_port), 10)


def answer(stream: socket.socket) -> tuple[int, bytes]:
    response = http.client.HTTPResponse(stream)
    response.begin()
    return response.status, response.read()


# -- heads ----------------------------------------------------------------------------------------


def test_a_head_is_limited_in_size(probe: Envoy) -> None:
    headers = {f"x-{n}": "a" * 1000 for n in range(70)}
    reply = wire.send(probe.http, "GET", "/", headers=headers)
    assert reply.status == 431
    assert reply.json == {"error": "Request Header Fields Too Large"}
    assert reply.headers["content-type"] == "application/json"
    within = dict(list(headers.items())[:50])
    assert wire.send(probe.http, "GET", "/", headers=within).status == 200


def test_five_hundred_dribbling_heads_are_given_up_and_disturb_nobody(impatient: Envoy) -> None:
    """Each sends a byte now and then; meanwhile others are served."""
    quiet = slowest(impatient, 100)
    with ExitStack() as stack, selectors.DefaultSelector() as waiting:
        streams = [stack.enter_context(connect(impatient)) for _ in range(DRIBBLING)]
        for stream in streams:
            stream.sendall(b"GET / HTTP/1.1\r\nhost: a\r\nx: ")
            waiting.register(stream, selectors.EVENT_READ)
        started = time.monotonic()
        statuses: list[int] = []
        loud = 0.0
        while len(statuses) < DRIBBLING and time.monotonic() - started < 10:
            for key, _ in waiting.select(0.01):
                waiting.unregister(key.fileobj)
                assert isinstance(key.fileobj, socket.socket)
                statuses.append(answer(key.fileobj)[0])
            for stream in {key.fileobj for key in waiting.get_map().values()}:
                assert isinstance(stream, socket.socket)
                stream.send(b"a")
            loud = max(loud, slowest(impatient, 5))
    assert statuses == [408] * DRIBBLING
    assert loud < max(2 * quiet, 0.25)


def slowest(envoy: Envoy, requests: int) -> float:
    seconds = []
    for _ in range(requests):
        started = time.monotonic()
        assert wire.send(envoy.http, "GET", "/").status == 200
        seconds.append(time.monotonic() - started)
    return max(seconds)


def test_the_time_of_a_head_is_bounded_by_the_configuration_alone(probe: Envoy) -> None:
    """The known-bad variant: with ten seconds, nobody is given up after one."""
    with connect(probe) as stream:
        stream.sendall(b"GET / HTTP/1.1\r\nhost: a\r\nx: ")
        stream.settimeout(HEAD_SECONDS + 0.5)
        with pytest.raises(TimeoutError):
            stream.recv(1)


# -- bodies ---------------------------------------------------------------------------------------

HEAD = b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 4\r\n\r\n"


def test_a_body_that_stands_still_is_given_up(impatient: Envoy) -> None:
    with connect(impatient) as stream:
        stream.sendall(HEAD + b"a")
        assert answer(stream) == (408, b'{"error":"Request Timeout"}')
    impatient.wait_for("no whole body")


def test_a_body_that_is_slow_but_moves_is_taken(impatient: Envoy) -> None:
    with connect(impatient) as stream:
        stream.sendall(HEAD)
        for _ in range(4):
            time.sleep(BODY_IDLE_SECONDS * 0.6)
            stream.sendall(b"a")
        assert answer(stream) == (200, b"/ 4")


@pytest.mark.parametrize("seconds", ["", "0.5"])
def test_a_body_of_sixty_megabytes_passes_whenever_it_is_read(probe: Envoy, seconds: str) -> None:
    reply = wire.send(probe.http, "POST", f"/?{seconds}", bytes(60_000_000))
    assert (reply.status, reply.body) == (200, b"/ 60000000")
    chunks = (bytes(1_000_000) for _ in range(60))
    assert wire.send(probe.http, "POST", f"/?{seconds}", chunks).body == b"/ 60000000"


def test_a_reply_that_is_not_read_is_given_up() -> None:
    size = 20_000_000
    with envoy(KEEP_ALIVE_SECONDS=1) as running, connect(running) as stream:
        stream.sendall(b"GET /large?%d HTTP/1.1\r\nhost: a\r\n\r\n" % size)
        time.sleep(3)  # the client does nothing: that is what is tested
        received = 0
        with suppress(ConnectionResetError):
            while chunk := stream.recv(2**20):
                received += len(chunk)
        assert received < size
        assert len(wire.send(running.http, "GET", f"/large?{size}").body) == size


# -- the rest -------------------------------------------------------------------------------------


def test_connections_are_limited_in_number(impatient: Envoy) -> None:
    with ExitStack() as stack:
        streams = [stack.enter_context(connect(impatient)) for _ in range(MAX_CONNECTIONS + 20)]
        refused = 0
        for stream in reversed(streams):
            stream.settimeout(0.2)
            try:
                refused += stream.recv(1) == b""
            except ConnectionResetError:
                refused += 1
            except TimeoutError:
                break
        assert refused == 20
    assert wire.send(impatient.http, "GET", "/").status == 200


@pytest.mark.parametrize("path", ["/a%2Fb//c/../d/%2e%2e/e", "//", "/a/./b", "/%C3%A9", "/a_b\\c"])
def test_a_path_reaches_the_application_as_it_came(probe: Envoy, path: str) -> None:
    assert wire.send(probe.http, "GET", path).body == f"{path} 0".encode()


@pytest.mark.parametrize("path", ["/%ff", "/%c0%ae", "/%ed%a0%80", "/%f5%80%80%80", "/%zz", "/%"])
def test_a_path_that_is_no_text_is_answered(probe: Envoy, path: str) -> None:
    """pyvoy would never answer."""
    reply = wire.send(probe.http, "GET", path)
    assert (reply.status, reply.json) == (404, {"error": "Not Found"})


def test_an_offer_to_upgrade_is_ignored(probe: Envoy) -> None:
    for offer in ("websocket", "h2c", "anything"):
        headers = {"connection": "upgrade", "upgrade": offer}
        assert wire.send(probe.http, "POST", "/", b"ab", headers).body == b"/ 2"


def test_nothing_is_added_to_the_answer(probe: Envoy) -> None:
    reply = wire.send(probe.http, "GET", "/")
    assert set(reply.headers) == {"content-length", "date"}


def test_both_ports_speak_http_2_without_tls(probe: Envoy) -> None:
    for address, status in ((probe.http, "200"), (probe.grpc, "415")):
        command = ["curl", "-s", "-o", "/dev/null", "-w", "%{http_version} %{http_code}"]
        done = subprocess.run(
            [*command, "--http2-prior-knowledge", f"http://{address}/"],
            capture_output=True,
            text=True,
        )
        assert done.stdout == f"2 {status}"
