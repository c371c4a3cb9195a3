"""The parent and its workers: deaths of either, signals, and starts that fail."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from modelport.loadtests.system.processes import free_ports
from tests.faults import probes
from tests.faults.ledger import parameter, recorded
from tests.faults.probes import EXPLICIT, POLL, ChangingRepository
from tests.faults.traffic import RequestOutcome, dropped, failures, flowing, kinds
from tests.gateway.server.workers.processes import (
    TWO,
    bindable,
    factors,
    folders,
    indexes,
    replies,
    running,
    served,
    slow,
    spare,
    statistics,
    workers,
)
from tests.polling import eventually
from tests.server import Gateway, serving
from tests.thorough import sampled, thorough

SITE = Path(__file__).parent / "site"
HTTP = ["http"]


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The gateway's folder for temporary files; its path is short, as sockets' paths must be."""
    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.setenv("TMPDIR", folder)
        yield Path(folder)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """Two workers that nothing happens to."""
    repository = ChangingRepository(tmp_path_factory.mktemp("pair"))
    repository.version(2.0)
    with serving(repository.root, *TWO) as gateway:
        yield gateway


def restarted(before: dict[int, int], after: dict[int, int], number: int) -> bool:
    return len(after) == len(before) and after[number] != before[number]


# -- a worker dies --------------------------------------------------------------------------------


@pytest.mark.thorough
def test_others_serve_on_while_a_killed_worker_is_replaced_and_no_count_goes_back(
    repository: ChangingRepository,
) -> None:
    repository.version(2.0)
    with serving(repository.root, *TWO) as gateway:
        before = workers(gateway)
        with flowing(gateway, (2.0,), ("http", "grpc"), each=4) as traffic:
            eventually(lambda: traffic.each_has(20), "traffic flows")
            counts = [served(gateway)]
            repository.version(3.0, 2)  # with ``--model-control-mode none`` it is not served
            os.kill(before[1], signal.SIGKILL)
            killed_at = time.monotonic()
            while not restarted(before, workers(gateway), 1):
                counts.append(served(gateway))
            survivor = [c for c in traffic.clients if not failures(c.outcomes)]
            assert any(o.at > killed_at for c in survivor for o in c.outcomes), "nobody is served"
            gateway.wait_for("worker restarted", worker=1)
            counts += [
                served(gateway),
                statistics(gateway)[0]["inference_stats"]["success"]["count"],
            ]
            eventually(lambda: traffic.each_has(20, after=time.monotonic() - 60), "it goes on")
        assert counts == sorted(counts), "a count has gone back"
        assert counts[0] > 0
        assert kinds(traffic.outcomes)["wrong"] == 0
        # Only what was in flight in the killed one is lost, and what is sent at once over what its
        # port still accepted: the kernel closes its sockets one by one. A channel of gRPC's then
        # says no by itself for a while before it connects again.
        for client in traffic.clients:
            assert _gaps(client.outcomes) <= 1, client.name
            if client.name.startswith("http"):
                assert len(failures(client.outcomes)) <= 2, failures(client.outcomes)
        assert workers(gateway)[0] == before[0]
        assert probes.ready(gateway)
        assert factors(gateway) == {2.0}
        assert gateway.terminate() == 0


def _gaps(outcomes: list[RequestOutcome]) -> int:
    """Count the times that a failure followed an answer."""
    answered = [outcome.kind == "answered" for outcome in outcomes]
    return sum(before and not after for before, after in itertools.pairwise(answered))


def test_a_worker_that_is_started_again_serves_what_was_asked_for_meanwhile(
    repository: ChangingRepository,
) -> None:
    """Loaded on request, also by another name or configuration; unloaded; pinned; not asked for."""
    repository.version(2.0)
    repository.version(3.0, 2)
    repository.version(5.0, model="other")
    repository.version(7.0, model="gone")
    loaded = [part for name in ("m", "gone") for part in ("--load-model", name)]
    override = '{"backend": "onnxruntime", "max_batch_size": 4, "version_policy": {"all": {}}}'
    with serving(repository.root, *TWO, *EXPLICIT, *loaded) as gateway:
        before = workers(gateway)
        assert probes.load(gateway, config=override).status_code == 200
        assert httpx.put(f"http://{gateway.http}/models/m/1/set-default").status_code == 200
        assert probes.load(gateway, "other").status_code == 200
        register = f"http://{gateway.http}/models?url=other&model_name=named"
        assert httpx.post(register).status_code == 200
        assert factors(gateway, "named") == {5.0}
        assert probes.unload(gateway, "gone").status_code == 200
        repository.version(11.0, 3)  # nobody asks for it yet
        told = indexes(gateway)
        os.kill(before[0], signal.SIGKILL)
        eventually(lambda: restarted(before, workers(gateway), 0), "it is replaced")
        gateway.wait_for("worker restarted", worker=0)
        os.kill(before[1], signal.SIGSTOP)  # whoever connects now reaches the new one, or waits
        try:
            assert _answers_of_the_other(gateway.http_port) == {2.0}
        finally:
            os.kill(before[1], signal.SIGCONT)
        eventually(lambda: probes.ready(gateway), "both are there")
        assert factors(gateway) == {2.0}
        assert factors(gateway, "other") == factors(gateway, "named") == {5.0}
        assert {status for status, _ in replies(gateway, "gone")} == {404}
        assert _without_unloaded(indexes(gateway)) == _without_unloaded(told)
        assert probes.load(gateway).status_code == 200  # in both, the override is for older files
        assert factors(gateway) == {11.0}
        assert httpx.delete(f"http://{gateway.http}/models/named").status_code == 200
        assert {status for status, _ in replies(gateway, "named")} == {404}


def _answers_of_the_other(port: int) -> set[float]:
    """The factors of one of two workers while the other is stopped."""
    body = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [1, 1, 1, 1]}]}
    found = set()
    for _ in range(20):
        with contextlib.suppress(httpx.TimeoutException):
            url = f"http://127.0.0.1:{port}/v2/models/m/infer"
            document = httpx.post(url, json=body, timeout=1.0).json()
            found.add(float(document["outputs"][0]["data"][0]))
            break
    return found


def _without_unloaded(indexes: set[str]) -> set[str]:
    """A worker that has started since knows of no version that it has unloaded."""
    return {text.partition('{"name":"gone"')[0] for text in indexes}


@slow
def test_workers_that_poll_come_to_the_same_versions(repository: ChangingRepository) -> None:
    repository.version(2.0)
    with serving(repository.root, *TWO, *POLL) as gateway:
        repository.version(3.0, 2)
        eventually(lambda: factors(gateway) == {3.0}, "both serve the new version")
        before = workers(gateway)
        os.kill(before[1], signal.SIGKILL)
        gateway.wait_for("worker restarted", worker=1)
        assert factors(gateway) == {3.0}


# -- the parent dies ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "stopped", [thorough(False), True], ids=["idle", "with a worker that hangs"]
)
def test_kill_9_of_the_parent_leaves_no_process_no_port_and_no_file(
    stopped: bool, repository: ChangingRepository, temporary: Path
) -> None:
    repository.version(2.0)
    with serving(repository.root, *TWO) as gateway:
        found = workers(gateway)
        assert len(found) == 2
        if stopped:
            os.kill(found[0], signal.SIGSTOP)
        gateway.process.kill()
        gateway.process.wait(60)
        eventually(lambda: not any(map(running, found.values())), "the workers are gone")
        ports = (gateway.http_port, gateway.grpc_port, gateway.metrics_port)
        eventually(lambda: all(map(bindable, ports)), "the ports are free")
        assert folders(temporary) == []


# -- signals --------------------------------------------------------------------------------------


def test_sigterm_under_load_with_two_workers_loses_no_request(
    repository: ChangingRepository, tmp_path: Path, temporary: Path
) -> None:
    repository.version(2.0, backend="ledger", config=parameter("delay_seconds", 0.02))
    with recorded(repository.root, tmp_path / "ledger", *TWO) as (gateway, written):
        found = workers(gateway)
        with flowing(gateway, (2.0,), ("http", "grpc"), each=4, until_refused=True) as traffic:
            eventually(lambda: traffic.each_has(5), "traffic flows")
            gateway.process.send_signal(signal.SIGTERM)
            assert gateway.process.wait(30) == 0
        assert sorted(written.begun) == sorted(written.ended)
        assert dropped(traffic.outcomes, written.begun) == []
        assert len(failures(traffic.outcomes)) == len(traffic.clients)
        assert not any(map(running, found.values()))
        assert folders(temporary) == []
        gateway.wait_for("stopped")
        events = [entry["event"] for entry in gateway.logs]
        once = ("listening", "started", "draining", "stopped", "model version is ready")
        assert [events.count(event) for event in once] == [1] * len(once)


def test_the_check_sees_what_is_lost_when_a_worker_is_killed_at_the_end(
    repository: ChangingRepository, tmp_path: Path
) -> None:
    """The known-bad variant."""
    repository.version(2.0, backend="ledger", config=parameter("delay_seconds", 0.2))
    with recorded(repository.root, tmp_path / "ledger", *TWO) as (gateway, written):
        with flowing(gateway, (2.0,), ("http",), each=8, until_refused=True) as traffic:
            eventually(lambda: traffic.each_has(1), "traffic flows")
            for process in workers(gateway).values():
                os.kill(process, signal.SIGKILL)
            gateway.process.kill()
            gateway.process.wait(30)
        assert dropped(traffic.outcomes, written.begun) != []


def test_ctrl_c_in_the_terminal_reaches_the_parent_alone(pair: Gateway) -> None:
    found = workers(pair)
    assert os.getpgid(pair.process.pid) not in set(map(os.getpgid, found.values()))
    for process in found.values():  # and neither hears these
        os.kill(process, signal.SIGINT)
        os.kill(process, signal.SIGTERM)
    assert factors(pair) == {2.0}
    assert workers(pair) == found


def test_a_second_signal_ends_the_gateway_at_once(repository: ChangingRepository) -> None:
    repository.slow(600)
    with serving(repository.root, *TWO, "--exit-timeout-secs", "600") as gateway:
        found = workers(gateway)
        gateway.process.send_signal(signal.SIGTERM)
        gateway.wait_for("draining")
        gateway.process.send_signal(signal.SIGTERM)
        assert gateway.process.wait(60) == 1
        eventually(lambda: not any(map(running, found.values())), "the workers are gone")


@slow
def test_the_exit_timeout_holds_for_a_worker_that_hangs(repository: ChangingRepository) -> None:
    repository.version(2.0)
    with serving(repository.root, *TWO, "--exit-timeout-secs", "1") as gateway:
        hanging = workers(gateway)[1]
        os.kill(hanging, signal.SIGSTOP)
        gateway.process.send_signal(signal.SIGINT)
        assert gateway.process.wait(60) == 0
        assert not running(hanging)
        gateway.wait_for("a worker did not end in time and is killed", worker=1)


@pytest.mark.thorough
def test_a_worker_that_hangs_is_killed_and_replaced(repository: ChangingRepository) -> None:
    repository.version(2.0)
    with serving(repository.root, *TWO, may_fork=False) as gateway:  # a fork has every import
        before = workers(gateway)
        eventually(lambda: spare(gateway), "there is a spare")
        waits = spare(gateway)
        (maps,) = (Path(f"/proc/{each}/maps") for each in waits)
        eventually(lambda: "onnxruntime" in maps.read_text(), "it has imported the models' runtime")
        os.kill(before[1], signal.SIGSTOP)
        gateway.wait_for("a worker hangs and is killed", worker=1)
        eventually(lambda: restarted(before, workers(gateway), 1), "it is replaced")
        gateway.wait_for("worker restarted", worker=1)
        assert workers(gateway)[1] in waits, "the spare has taken its place"
        eventually(lambda: spare(gateway) - waits, "and there is another")
        assert factors(gateway) == {2.0}


@pytest.mark.thorough
def test_a_spare_that_dies_costs_nothing_but_its_help(repository: ChangingRepository) -> None:
    repository.version(2.0)
    with serving(repository.root, *TWO) as gateway:
        eventually(lambda: spare(gateway), "there is a spare")
        (waits,) = spare(gateway)
        os.kill(waits, signal.SIGKILL)
        eventually(lambda: not running(waits), "it is gone")
        before = workers(gateway)
        os.kill(before[0], signal.SIGKILL)
        gateway.wait_for("worker restarted", worker=0)
        eventually(lambda: probes.ready(gateway), "both are there")
        assert factors(gateway) == {2.0}
        assert gateway.terminate() == 0


# -- starts that fail -----------------------------------------------------------------------------


def serve(repository: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "modelport", "serve", "--model-repository", str(repository)]
    ports = {"--http-port": "0", "--grpc-port": "0", "--metrics-port": "0"}
    given = dict(zip(flags[::2], flags[1::2], strict=True))
    arguments = [part for flag in ({**ports, "--workers": "2", **given}).items() for part in flag]
    return subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=60)


@pytest.fixture
def taken() -> Iterator[str]:
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)  # it would share
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        yield str(holder.getsockname()[1])


@pytest.mark.parametrize("kind", sampled(("http", "grpc", "metrics"), "http"))
def test_a_port_in_use_is_refused_in_the_usual_line(
    kind: str, taken: str, repository: ChangingRepository
) -> None:
    run = serve(repository.root, f"--{kind}-port", taken)
    assert run.returncode == 1
    assert run.stderr == (
        f"modelport: error: cannot listen on 127.0.0.1:{taken}: address already in use; choose "
        f"another with --{kind}-port or --{kind}-address\n"
    )


def test_two_gateways_do_not_share_a_port_though_their_workers_do(
    pair: Gateway, repository: ChangingRepository
) -> None:
    run = serve(repository.root, "--http-port", str(pair.http_port))
    assert run.returncode == 1
    assert "address already in use" in run.stderr


def test_workers_that_end_at_every_start_end_the_gateway_with_one_line(
    repository: ChangingRepository, monkeypatch: pytest.MonkeyPatch, temporary: Path
) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{SITE}{os.pathsep}{Path(__file__).parents[4]}")
    run = serve(repository.root)
    assert run.returncode == 1
    last = run.stderr.splitlines()[-1]
    assert last.startswith("modelport: error: worker "), run.stderr
    assert "ended 3 times (status 7) before it had started" in last
    assert "Traceback" not in run.stderr
    assert folders(temporary) == []


@pytest.mark.thorough
def test_a_model_that_must_load_and_does_not_ends_all_workers_with_the_reason(
    repository: ChangingRepository,
) -> None:
    repository.version(2.0)
    repository.file().write_bytes(b"no model")
    run = serve(repository.root, "--exit-on-error", "true")
    assert run.returncode == 1
    assert "a worker cannot continue" not in run.stderr, "the parent says why, once"
    last = run.stderr.splitlines()[-1]
    assert last.startswith("modelport: error: failed to load all models: m (")


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (("--http-port", "18123", "--grpc-port", "18123"), "are both 18123"),
        thorough(("--http-port", "18123", "--metrics-port", "18123"), "are both 18123"),
        thorough(("--http-address", ""), "--http-address is empty"),
        thorough(("--grpc-address", ""), "--grpc-address is empty"),
    ],
)
def test_listeners_that_cannot_be_are_a_mistake_of_usage(
    flags: tuple[str, ...], reason: str, repository: ChangingRepository
) -> None:
    run = serve(repository.root, *flags)
    assert run.returncode == 2
    assert reason in run.stderr
    assert run.stderr.count("\n") == 1


# -- what the caller, and the machine, may take away ----------------------------------------------


def test_a_gateway_serves_though_its_caller_closed_the_standard_streams(
    repository: ChangingRepository,
) -> None:
    """Else the first sockets are taken for them, and what is logged is sent to whoever connects."""
    repository.version(2.0)
    (port,) = free_ports(1)
    command = [sys.executable, "-m", "modelport", "serve", "--model-repository"]
    ports = ("--http-port", str(port), "--grpc-port", "0", "--metrics-port", "0")
    process = subprocess.Popen([*command, str(repository.root), *ports], preexec_fn=_close_streams)
    try:
        eventually(lambda: _ready(port, process), "it is ready")
        process.terminate()
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()


def _close_streams() -> None:
    for descriptor in range(3):
        os.close(descriptor)


def _ready(port: int, process: subprocess.Popen[bytes]) -> bool:
    assert process.poll() is None, f"it has ended with {process.returncode}"
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(f"http://127.0.0.1:{port}/v2/health/ready").status_code == 200
    return False
