"""Whoever hangs up no longer costs anything: HTTP. For gRPC see ``test_grpc``."""

from __future__ import annotations

import socket

import pytest

from tests.front.launcher import Envoy

BODY = b"content-length: 3\r\n\r\nabc"


def ask(probe: Envoy, path: str, rest: bytes = BODY) -> socket.socket:
    stream = socket.create_connection(("127.0.0.1", probe.http_port), 10)
    stream.sendall(b"POST %b HTTP/1.1\r\nhost: a\r\n%b" % (path.encode(), rest))
    return stream


def test_a_client_that_hangs_up_cancels_its_request(probe: Envoy) -> None:
    with ask(probe, "/wait/after/reading"):
        probe.wait_for("/wait/after/reading waits")
    assert probe.wait_for("/wait/after/reading cancelled") < 0.5


def test_a_client_that_stays_is_waited_for(probe: Envoy) -> None:
    """The known-good twin: only who is gone is cancelled."""
    with ask(probe, "/wait/after/reading"):
        entries = len(probe.journal())
        with pytest.raises(AssertionError, match="waits"):
            probe.wait_for("nothing of the kind", 0.5)
        assert probe.journal()[entries:].count("/wait/after/reading cancelled") == 0


def test_after_the_body_receive_waits_for_the_client_to_leave(probe: Envoy) -> None:
    """pyvoy's own ``receive`` answers at once and for ever; whoever loops on it stops the loop."""
    with ask(probe, "/leave"):
        assert "left" not in probe.journal()
    assert probe.wait_for("left") < 0.5


def test_a_body_that_breaks_off_ends_its_request(probe: Envoy) -> None:
    before = probe.journal().count("no whole body")
    with ask(probe, "/", b"content-length: 100\r\n\r\nabc"):
        pass
    probe.wait_for("no whole body")
    assert probe.journal().count("no whole body") == before + 1


def test_nothing_of_this_is_an_error_to_envoy_or_python(probe: Envoy) -> None:
    log = probe.log.read_text()  # of the whole session: refusals of bad requests are in it
    assert [line for line in log.splitlines() if "[debug" not in line] == []
