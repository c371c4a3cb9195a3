"""Servers that the gateway starts, with a stand-in for the program: killed, broken, hung, orphaned.

``make managed`` does the same to the real TorchServe and the real Triton.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from modelport.loadtests.system.processes import free_ports
from tests.managed import ROOT, STANDIN, ManagedPlace, ask, infer, load, reason, wrong
from tests.managed.standin import FLOOD_BYTES
from tests.polling import eventually
from tests.server import serving

UNLOAD = "/v2/repository/models/x2/unload"


@pytest.fixture
def place(tmp_path: Path) -> ManagedPlace:
    return ManagedPlace(tmp_path).does("serve")


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_a_server_killed_under_load_is_said_to_be_down_and_comes_back(
    place: ManagedPlace, protocol: str
) -> None:
    place.protocol = protocol
    with place.serving() as gateway:
        assert '"data":[2.0,4.0,6.0,8.0]' in infer(gateway).body
        with load(gateway, 2) as outcomes:
            eventually(lambda: outcomes and outcomes[-1].status == 200, "it serves")
            killed_at = time.monotonic()
            os.kill(place.server(), signal.SIGKILL)
            eventually(lambda: outcomes[-1].status == 503, "it is down")
            eventually(lambda: outcomes[-1].status == 200, "it is back")
            eventually(
                lambda: [o.status for o in outcomes[-8:]] == [200] * 8, "all are served again"
            )
        assert wrong(outcomes, killed_at) == []
        assert gateway.terminate() == 0
        place.nothing_is_left()


def test_a_server_that_nobody_starts_again_is_caught_by_the_same_judgement(
    place: ManagedPlace,
) -> None:
    """The known-bad variant: the same stand-in, reached through a route, and killed."""
    http, grpc = free_ports(2)
    flags = [f"--http-port={http}", f"--grpc-port={grpc}", f"--model-repository={place.repository}"]
    server = subprocess.Popen(
        [sys.executable, str(STANDIN), str(place.mode), *flags],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stderr=subprocess.DEVNULL,
    )
    file = place.root / "remote.toml"
    file.write_text(f'[models.x2]\nbackend = "triton"\nendpoints = ["127.0.0.1:{grpc}"]\n')
    try:
        with place.serving(routes=file) as gateway, load(gateway) as outcomes:
            eventually(lambda: outcomes and outcomes[-1].status == 200, "it serves")
            killed_at = time.monotonic()
            server.kill()
            eventually(lambda: outcomes[-1].status == 503, "it is down")
            eventually(lambda: len([o for o in outcomes if o.status == 503]) > 20, "it stays down")
    finally:
        server.kill()
        server.wait()
    problems = wrong(outcomes, killed_at)
    assert "nobody was told that it is being restarted" in problems
    assert "it was not down, or is not back" in problems


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_nothing_that_a_server_started_outlives_the_gateway(
    place: ManagedPlace, number: signal.Signals
) -> None:
    place.does("breed")
    with place.serving() as gateway:
        # The guardian, the server, and two of its making, one in a session of its own.
        assert (
            len(eventually(lambda: len(place.processes()) == 4 and place.processes(), "four")) == 4
        )
        gateway.process.send_signal(number)
        gateway.process.wait(30)
        place.nothing_is_left()


def test_what_a_killed_server_had_started_is_gone_before_it_is_started_again(
    place: ManagedPlace,
) -> None:
    place.does("breed")
    with place.serving() as gateway:
        first = set(eventually(lambda: len(place.processes()) == 4 and place.processes(), "four"))
        os.kill(place.server(), signal.SIGKILL)
        eventually(lambda: infer(gateway).status == 503, "it is down")
        eventually(lambda: infer(gateway).status == 200, "it is back")
        assert first & set(place.processes()) == set()


def test_a_killed_guardian_takes_its_server_with_it_and_both_come_back(place: ManagedPlace) -> None:
    place.does("breed")
    with place.serving() as gateway:
        server, (guardian,) = place.server(), place.processes("guardian.py")
        os.kill(guardian, signal.SIGKILL)
        eventually(lambda: server not in place.processes(), "the server is gone")
        eventually(lambda: infer(gateway).status == 200, "it is back")


def test_a_server_that_does_not_start_gives_its_last_meaningful_line(place: ManagedPlace) -> None:
    place.does("crash")
    with place.serving() as gateway:
        assert reason(gateway) == (
            "the server of 'x2' ended (exit status 3); Triton said: error: creating server: ... "
            "is broken"
        )
        gateway.wait_for("Triton: I am about to begin", server="Triton", model="x2", version=1)
        assert infer(gateway).status == 503
        place.does("serve")
        eventually(lambda: infer(gateway).status == 200, "it is tried again, and serves")


def test_a_server_that_does_not_start_again_keeps_being_tried(place: ManagedPlace) -> None:
    with place.serving() as gateway:
        place.does("crash")
        os.kill(place.server(), signal.SIGKILL)
        eventually(lambda: "error: creating server" in infer(gateway).body, "the reason is told")
        place.does("serve")
        eventually(lambda: infer(gateway).status == 200, "it is back")


def test_a_server_that_never_gets_ready_is_given_up_in_time(place: ManagedPlace) -> None:
    place.does("mute")
    with place.serving(routes=place.routes(start_seconds=0.5)) as gateway:
        assert reason(gateway) == "the server of 'x2' is not ready after 0.5 s"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_gateway_that_ends_while_a_server_starts_leaves_nothing(
    place: ManagedPlace, number: signal.Signals
) -> None:
    place.does("mute")
    with place.serving(wait_for="listening") as gateway:
        eventually(place.processes, "it is being started")
        gateway.process.send_signal(number)
        gateway.process.wait(25)
        place.nothing_is_left()


def test_a_program_that_is_missing_is_one_line_with_the_remedy(place: ManagedPlace) -> None:
    with place.serving(routes=place.routes(["no-such-tritonserver"])) as gateway:
        said = reason(gateway)
        assert said.startswith(
            "Triton is not installed at the path in 'command': run the container"
        )
        assert "\n" not in said


def test_a_model_that_is_code_needs_a_route_to_a_triton(place: ManagedPlace) -> None:
    (place.repository / "x2" / "1" / "model.onnx").rename(place.repository / "x2/1/model.py")
    config = place.repository / "x2" / "config.pbtxt"
    config.write_text(config.read_text().replace("onnxruntime", "python"))
    with serving(place.repository) as gateway:
        assert reason(gateway).startswith("backend 'python' runs Python code, as only Triton does")


def test_a_line_of_megabytes_is_cut(place: ManagedPlace) -> None:
    with place.does("flood").serving() as gateway:
        assert infer(gateway).status == 200

        def flooded() -> list[str]:
            return [entry["event"] for entry in gateway.logs if "xxxx" in entry["event"]]

        (line,) = eventually(flooded, "the line is logged")
        assert len(line) < 3000 < FLOOD_BYTES


def test_a_model_is_unloaded_while_its_server_is_being_started_again(place: ManagedPlace) -> None:
    explicit = ("--model-control-mode=explicit", "--load-model=x2")
    with place.serving(*explicit) as gateway:
        assert infer(gateway).status == 200
        place.does("mute")
        os.kill(place.server(), signal.SIGKILL)
        eventually(lambda: len(place.processes()) > 1 and infer(gateway).status == 503, "it starts")
        answer = ask(gateway, UNLOAD, {})
        assert answer.status == 200, answer
        place.nothing_is_left()
        place.does("serve")
        assert ask(gateway, UNLOAD.replace("unload", "load"), {}).status == 200
        assert infer(gateway).status == 200
