"""SIGTERM: readiness off, nothing in flight is lost, and the process is gone when it said.

The trials under load are ``MODELPORT_TRIALS`` (2; a soak runs 50) per protocol.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tritonclient.grpc import service_pb2_grpc

from modelport.gateway.protocols.torchserve.grpc import INFERENCE_SERVICE
from modelport.gateway.wire.proto import torchserve_inference_pb2
from tests.faults import probes
from tests.faults.ledger import parameter, recorded
from tests.faults.probes import EXPLICIT, POLL, Background, ChangingRepository
from tests.faults.traffic import (
    CLIENTS,
    GrpcTrafficClient,
    RequestOutcome,
    dropped,
    failures,
    flowing,
    infer_message,
)
from tests.gateway.server.workers.processes import bindable
from tests.polling import eventually
from tests.server import Gateway, serving
from tests.thorough import sampled, thorough

TRIALS = int(os.environ.get("MODELPORT_TRIALS", "2"))
PENDING = "modelport_requests_in_flight"


def slow_config(seconds: float) -> str:
    return parameter("delay_seconds", seconds)


def terminate(gateway: Gateway) -> None:
    gateway.process.send_signal(signal.SIGTERM)


def in_flight(gateway: Gateway, model: str, number: int = 1) -> None:
    eventually(lambda: probes.metric(gateway, PENDING, model=model) == number, "in flight")


def processes(marker: Path) -> list[str]:
    """Processes whose command line names ``marker``."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != os.getpid():
            try:
                command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
            if str(marker) in command:
                found.append(f"{folder.name}: {command}")
    return found


# -- under load -----------------------------------------------------------------------------------


def shut_down_under_load(
    repository: ChangingRepository, ledger: Path, protocol: str, number: signal.Signals
) -> tuple[int, list[RequestOutcome], list[str], list[str]]:
    """Exit status, what the clients saw, and what the backend began and ended."""
    with recorded(repository.root, ledger) as (gateway, written):
        with flowing(gateway, (2.0,), [protocol], each=6, until_refused=True) as traffic:
            eventually(lambda: traffic.each_has(5), "traffic flows")
            if number == signal.SIGKILL:
                eventually(lambda: len(written.begun) > len(written.ended), "some are in flight")
            gateway.process.send_signal(number)
            exit_status = gateway.process.wait(30)
        return exit_status, traffic.outcomes, written.begun, written.ended


@pytest.mark.parametrize("protocol", sampled(CLIENTS, "http", "grpc"))
def test_sigterm_under_load_drops_no_request(
    protocol: str, repository: ChangingRepository, tmp_path: Path
) -> None:
    """Every other trial with requests that take 20 ms, so that each client has one in flight."""
    lost: list[tuple[int, RequestOutcome]] = []
    repository.version(2.0, backend="ledger")
    plain = (repository.root / "m" / "config.pbtxt").read_text()
    for trial in range(TRIALS if protocol in ("http", "grpc") else min(TRIALS, 2)):
        repository.config(plain + slow_config(0.02 if trial % 2 else 0.0))
        exit_status, outcomes, begun, ended = shut_down_under_load(
            repository, tmp_path / "ledger", protocol, signal.SIGTERM
        )
        assert exit_status == 0
        assert sorted(begun) == sorted(ended), "a request was begun and never ended"
        assert len(begun) == len(set(begun)), "a request was computed twice"
        assert len(failures(outcomes)) == 6, "each client goes on until it is not answered"
        lost += [(trial, outcome) for outcome in dropped(outcomes, begun)]
    assert lost == [], f"{len(lost)} dropped in {TRIALS} trials"


@pytest.mark.parametrize("protocol", ["http", thorough("grpc")])
def test_the_check_sees_what_sigkill_drops(
    protocol: str, repository: ChangingRepository, tmp_path: Path
) -> None:
    """The known-bad end: with 6 clients and slow requests some are in flight, and lost."""
    repository.version(2.0, backend="ledger", config=slow_config(0.05))
    exit_status, outcomes, begun, ended = shut_down_under_load(
        repository, tmp_path / "ledger", protocol, signal.SIGKILL
    )
    assert exit_status == -signal.SIGKILL
    assert dropped(outcomes, begun) != []
    assert len(ended) < len(begun)


def test_a_refusal_is_not_believed_where_the_request_was_begun() -> None:
    refused = [RequestOutcome("a", "refused", "UNAVAILABLE"), RequestOutcome("b", "answered")]
    assert dropped(refused, ["b"]) == []
    assert dropped(refused, ["a", "b"]) == refused[:1]


# -- the order of the end -------------------------------------------------------------------------


def test_readiness_turns_false_first_and_the_request_in_flight_is_answered(
    repository: ChangingRepository, background: Background
) -> None:
    repository.slow(1.5)
    with serving(repository.root) as gateway:
        reply = background(probes.ask, gateway, "slow")
        in_flight(gateway, "slow")
        assert probes.ready(gateway)
        terminate(gateway)
        gateway.wait_for("draining")
        assert not probes.ready(gateway)
        assert probes.live(gateway)
        assert not reply.done()
        assert reply.result(25).status_code == 200
        assert gateway.process.wait(25) == 0


def test_clients_on_kept_connections_are_asked_to_close_them(
    repository: ChangingRepository, background: Background
) -> None:
    repository.slow(1.0)
    with serving(repository.root) as gateway, httpx.Client() as client:
        reply = background(probes.ask, gateway, "slow")
        url = f"http://{gateway.http}/v2/health/live"
        assert "connection" not in client.get(url).headers
        in_flight(gateway, "slow")
        terminate(gateway)
        gateway.wait_for("draining")
        while client.get(url).headers.get("connection") != "close":
            pass  # connections are told right after the log
        assert reply.result(25).status_code == 200


def test_a_health_watcher_hears_of_the_end_before_it_comes(
    repository: ChangingRepository, background: Background
) -> None:
    repository.slow(2.0)
    with serving(repository.root) as gateway, grpc.insecure_channel(gateway.grpc) as channel:
        reply = background(probes.ask, gateway, "slow")
        in_flight(gateway, "slow")
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        heard: Iterator[object] = (message.status for message in watch)
        assert next(heard) == health_pb2.HealthCheckResponse.SERVING
        terminate(gateway)
        assert next(heard) == health_pb2.HealthCheckResponse.NOT_SERVING
        assert not reply.done()
        assert reply.result(25).status_code == 200
        assert list(heard) == []
        assert gateway.process.wait(25) == 0


@pytest.mark.parametrize(
    "signal_",
    [signal.SIGTERM, thorough(signal.SIGINT), thorough(signal.SIGHUP)],
    ids=["SIGTERM", "SIGINT", "SIGHUP"],
)
def test_an_idle_gateway_ends_at_once_with_status_0_and_leaves_nothing_behind(
    signal_: signal.Signals, repository: ChangingRepository
) -> None:
    if signal.getsignal(signal_) is signal.SIG_IGN:
        pytest.skip("the tests run with nohup: so does the gateway")
    repository.version(2.0)
    with serving(repository.root, may_fork=False) as gateway, httpx.Client() as idle:
        idle.get(f"http://{gateway.http}/v2/health/live")  # a kept connection, doing nothing
        ports = (gateway.http_port, gateway.grpc_port, gateway.metrics_port)
        assert not any(bindable(port) for port in ports)
        assert processes(repository.root), "they are found while there are some"
        gateway.process.send_signal(signal_)
        assert gateway.process.wait(25) == 0
        assert all(bindable(port) for port in ports)
        assert processes(repository.root) == []
        gateway.wait_for("stopped")
        assert "Traceback" not in str(gateway.logs)


def test_a_gateway_can_be_started_again_on_the_same_ports_at_once(
    repository: ChangingRepository,
) -> None:
    repository.version(2.0)
    with serving(repository.root) as first:
        assert probes.answer(first) == ("1", 2.0)
        ports = (("http", first.http_port), ("grpc", first.grpc_port))
        assert first.terminate() == 0
    flags = [part for name, port in ports for part in (f"--{name}-port", str(port))]
    with serving(repository.root, *flags) as second:
        assert probes.answer(second) == ("1", 2.0)


# -- what does not end by itself ------------------------------------------------------------------


@pytest.mark.parametrize("protocol", ["http", thorough("grpc")])
def test_a_request_that_never_completes_ends_with_the_exit_timeout(
    protocol: str, repository: ChangingRepository, background: Background
) -> None:
    repository.slow(600)
    timeout = 1.0
    with serving(repository.root, "--exit-timeout-secs", str(timeout)) as gateway:
        reply = background(hang, gateway, protocol)
        in_flight(gateway, "slow")
        terminate(gateway)
        gateway.process.wait(25)
        with pytest.raises((httpx.HTTPError, grpc.RpcError, AssertionError)):
            reply.result(25)


def test_a_pending_request_gets_an_error_when_the_process_ends_at_the_exit_timeout(
    repository: ChangingRepository, background: Background
) -> None:
    repository.slow(600)
    with serving(repository.root, "--exit-timeout-secs", "1.5") as gateway:
        reply = background(probes.ask, gateway, "slow", timeout=60)
        in_flight(gateway, "slow")
        terminate(gateway)
        assert gateway.process.wait(25) == 0
        answer = reply.result(25)
        assert answer.status_code == 503
        assert answer.json() == {"error": "the server is shutting down"}
        gateway.wait_for("stopped")
        assert [entry for entry in gateway.logs if entry.get("level") == "error"] == []
        assert "Traceback" not in str(gateway.logs)


def hang(gateway: Gateway, protocol: str) -> None:
    if protocol == "http":
        assert probes.ask(gateway, "slow", timeout=60).status_code == 200
        return
    client = GrpcTrafficClient(gateway, "hang", (1.0,), None, False, "slow")  # type: ignore[arg-type]
    try:
        assert client.ask("hang", 1.0).kind == "answered"
    finally:
        client.close()


def test_a_run_that_cannot_be_stopped_ends_with_the_exit_timeout(
    repository: ChangingRepository, background: Background
) -> None:
    """ONNX Runtime computes in a thread of its own, for an hour or so."""
    repository.count()
    timeout = 1.0
    with serving(repository.root, "--exit-timeout-secs", str(timeout)) as gateway:
        body = probes.count_request(4_000_000_000)
        reply = background(probes.post, gateway, "/v2/models/count/infer", body, 60)
        in_flight(gateway, "count")
        terminate(gateway)
        gateway.process.wait(25)
        with pytest.raises((httpx.HTTPError, AssertionError)):
            assert reply.result(25).status_code == 200


def test_with_an_exit_timeout_of_0_nothing_is_waited_for(
    repository: ChangingRepository, background: Background
) -> None:
    repository.slow(600)
    with serving(repository.root, "--exit-timeout-secs", "0") as gateway:
        reply = background(hang, gateway, "http")
        in_flight(gateway, "slow")
        terminate(gateway)
        gateway.process.wait(25)
        with pytest.raises((httpx.HTTPError, AssertionError)):
            reply.result(25)


def test_an_idle_stream_does_not_hold_up_the_end(repository: ChangingRepository) -> None:
    """A health watcher, or an inference stream between two requests, is nothing in flight."""
    repository.version(2.0)
    with serving(repository.root) as gateway, grpc.insecure_channel(gateway.grpc) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        next(watch)
        requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
        message = infer_message("m", "first", 1.0)
        requests.put(message)
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        replies = stub.ModelStreamInfer(iter(requests.get, None))
        assert next(replies).infer_response.id == "first"
        terminate(gateway)
        try:
            assert gateway.process.wait(25) == 0
        finally:
            requests.put(None)


@pytest.mark.thorough
def test_an_idle_stream_of_torchserves_does_not_hold_up_the_end_either(
    repository: ChangingRepository,
) -> None:
    repository.version(2.0)
    request = torchserve_inference_pb2.PredictionsRequest(model_name="m", sequence_id="1")
    request.input["data"] = b'{"instances": [[1, 2, 3, 4]]}'
    with serving(repository.root) as gateway, grpc.insecure_channel(gateway.grpc) as channel:
        requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
        requests.put(request.SerializeToString())
        stream = channel.stream_stream(f"/{INFERENCE_SERVICE}/StreamPredictions2")
        replies = stream(iter(requests.get, None))
        reply = torchserve_inference_pb2.PredictionResponse.FromString(next(replies))
        assert json.loads(reply.prediction) == {"predictions": [[2, 4, 6, 8]]}
        terminate(gateway)
        try:
            assert gateway.process.wait(25) == 0
            with pytest.raises(grpc.RpcError) as ended:
                next(replies)
            assert ended.value.code() is grpc.StatusCode.UNAVAILABLE
        finally:
            requests.put(None)


@pytest.mark.parametrize("flags", [(), thorough(POLL)], ids=["at start", "on a poll"])
def test_sigterm_while_a_model_loads_ends_promptly(
    flags: tuple[str, ...], repository: ChangingRepository, tmp_path: Path
) -> None:
    slow_load = parameter("load_seconds", 600)
    if not flags:
        repository.version(2.0, backend="ledger", config=slow_load)
    ledger = tmp_path / "ledger"
    wait_for = "started" if flags else "listening"
    with recorded(repository.root, ledger, *flags, wait_for=wait_for) as (gateway, written):
        if flags:
            repository.version(2.0, backend="ledger", config=slow_load)
        eventually(lambda: written.lines("load"), "loading")
        assert probes.state(gateway) == "LOADING"
        terminate(gateway)
        assert gateway.process.wait(25) == 0
        gateway.wait_for("stopped")
        assert "Traceback" not in str(gateway.logs)


def test_a_gateway_that_loads_is_live_and_not_ready(
    repository: ChangingRepository, tmp_path: Path
) -> None:
    repository.version(2.0, backend="ledger", config=parameter("load_seconds", 2))
    with recorded(repository.root, tmp_path / "ledger", wait_for="listening") as (gateway, _):
        eventually(lambda: probes.state(gateway) == "LOADING", "loading")
        assert probes.live(gateway)
        assert not probes.ready(gateway)
        assert probes.ask(gateway).status_code == 503
        gateway.wait_for("started")
        assert probes.ready(gateway)


def test_a_second_sigterm_ends_the_process_at_once(
    repository: ChangingRepository, background: Background
) -> None:
    repository.slow(600)
    with serving(repository.root, *EXPLICIT, "--load-model", "*") as gateway:
        reply = background(hang, gateway, "http")
        in_flight(gateway, "slow")
        terminate(gateway)
        gateway.wait_for("draining")
        terminate(gateway)
        assert gateway.process.wait(25) != 0
        with pytest.raises((httpx.HTTPError, AssertionError)):
            reply.result(25)


@pytest.mark.thorough
def test_a_gateway_serves_and_ends_after_the_reader_of_its_log_is_gone(
    repository: ChangingRepository,
) -> None:
    """The case of ``modelport serve 2>&1 | head``: every further line would be an error."""
    repository.version(2.0)
    command = [sys.executable, "-m", "modelport", "serve", "--log-verbose", "1"]
    command += ["--model-repository", str(repository.root), "--log-format", "json"]
    command += [part for kind in ("http", "grpc", "metrics") for part in (f"--{kind}-port", "0")]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        lines = (json.loads(line) for line in process.stderr)
        port = next(line["http_port"] for line in lines if line["event"] == "listening")
        next(line for line in lines if line["event"] == "started")
        process.stderr.close()
        body = {
            "inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4]}]
        }
        for _ in range(3):
            answer = httpx.post(f"http://127.0.0.1:{port}/v2/models/m/infer", json=body)
            assert answer.status_code == 200, answer.text
        process.terminate()
        assert process.wait(25) == 0
    finally:
        process.kill()
        process.wait()
