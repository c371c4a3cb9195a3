"""Servers behind the gateway that die, hang and come back."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from modelport.loadtests.system.processes import free_ports
from tests.faults.probes import ChangingRepository, answer, ask, index, ready
from tests.faults.traffic import failures, flowing
from tests.polling import eventually
from tests.server import Gateway
from tests.thorough import sampled
from tests.upstream import fronting, table

#: ``make soak`` asks for more.
KILLS = int(os.environ.get("MODELPORT_TRIALS", "2"))
#: The replicas' model answers its input: it loads at once.
FACTOR = 1.0
ONE = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [1, 1, 1, 1]}]}


class Replica:
    """A server of ``m`` that can be killed and started again on the same port."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self.http, self.grpc = free_ports(2)
        self.gateway: Gateway | None = None
        self.start()

    def start(self) -> None:
        ports = ("--http-port", str(self.http), "--grpc-port", str(self.grpc))
        self.gateway = Gateway(self._root, *ports)

    @property
    def running(self) -> bool:
        return self.gateway is not None and self.gateway.process.poll() is None

    def signal(self, number: int) -> None:
        assert self.gateway is not None
        self.gateway.process.send_signal(number)

    def kill(self) -> None:
        assert self.gateway is not None
        self.gateway.process.kill()
        self.gateway.close()

    def address(self, protocol: str) -> str:
        return f"127.0.0.1:{self.http if protocol == 'http' else self.grpc}"


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Replica]]:
    repository = ChangingRepository(tmp_path_factory.mktemp("repository"))
    repository.slow(0.0, "m")
    repository.slow(30.0)
    with ThreadPoolExecutor(2) as threads:
        made = list(threads.map(lambda _: Replica(repository.root), range(2)))
    yield made
    for replica in made:
        replica.kill()


@pytest.fixture
def replicas(started: list[Replica]) -> Iterator[list[Replica]]:
    yield started
    for replica in started:
        replica.signal(signal.SIGCONT)
        if not replica.running:
            replica.start()


def routes(replicas: list[Replica], protocol: str, model: str = "m", **keys: Any) -> str:
    addresses = [replica.address(protocol) for replica in replicas]
    return table(model, addresses, protocol=protocol, **keys)


def kill_in_turn(front: Gateway, replicas: list[Replica], protocol: str) -> None:
    """Kill -9 and start again, one after the other, under load."""
    for number in range(KILLS):
        replica = replicas[number % 2]
        address, seen = replica.address(protocol), len(front.logs)
        replica.kill()
        front.wait_for("an endpoint is ejected", after=seen, endpoint=address)
        replica.start()
        front.wait_for("an endpoint is in use again", after=seen, endpoint=address)


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_killing_one_of_two_replicas_under_load_costs_no_client_an_error(
    replicas: list[Replica], tmp_path: Path, protocol: str
) -> None:
    with (
        fronting(tmp_path / "front", routes(replicas, protocol)) as front,
        flowing(front, (FACTOR,)) as traffic,
    ):
        kill_in_turn(front, replicas, protocol)
        now = time.monotonic()
        eventually(lambda: traffic.each_has(5, after=now))
    assert failures(traffic.outcomes) == []
    assert len(traffic.outcomes) > 100


@pytest.mark.thorough
def test_the_check_sees_a_gateway_that_does_not_try_again(
    replicas: list[Replica], tmp_path: Path
) -> None:
    bad = {"MODELPORT_NO_RETRIES": "1"}
    with (
        fronting(tmp_path / "front", routes(replicas, "grpc"), environment=bad) as front,
        flowing(front, (FACTOR,)) as traffic,
    ):
        kill_in_turn(front, replicas, "grpc")
    assert failures(traffic.outcomes)


@pytest.mark.parametrize("protocol", sampled(("grpc", "http"), "grpc"))
def test_with_every_replica_down_it_is_503_at_once_and_recovers_by_itself(
    replicas: list[Replica], tmp_path: Path, protocol: str
) -> None:
    with fronting(tmp_path / "front", routes(replicas, protocol)) as front:
        assert answer(front) == ("1", FACTOR)
        for replica in replicas:
            replica.kill()
        eventually(lambda: ask(front).status_code == 503 and not ready(front))
        with httpx.Client(base_url=f"http://{front.http}") as client:
            for _ in range(50):
                reply = client.post("/v2/models/m/infer", json=ONE)
                assert reply.status_code == 503
                assert reply.headers["retry-after"]
                said = reply.json()["error"]
                assert said.startswith("the server that runs 'm' ")
                assert "127.0.0.1" not in said
        assert index(front)["1"] == ("UNAVAILABLE", said)
        for replica in replicas:
            replica.start()
        eventually(lambda: ready(front))  # without a single request for the model
        assert answer(front) == ("1", FACTOR)


@pytest.mark.parametrize("protocol", sampled(("grpc", "http"), "http"))
def test_a_stalled_server_does_not_extend_a_deadline(
    replicas: list[Replica], tmp_path: Path, protocol: str
) -> None:
    tables = [
        routes(replicas[:1], protocol, timeout_seconds=0.5),
        routes(replicas[:1], protocol, "slow", timeout_seconds=0.5),
    ]
    with fronting(tmp_path / "front", *tables) as front:
        assert answer(front) == ("1", FACTOR)
        with httpx.Client(base_url=f"http://{front.http}") as client:
            assert client.post("/v2/models/m/infer", json=ONE).status_code == 200
            for model in ("slow", "m"):
                if model == "m":
                    replicas[0].signal(signal.SIGSTOP)
                reply = client.post(f"/v2/models/{model}/infer", json=ONE)
                assert reply.status_code == 503
                assert reply.json()["error"] == "Request timeout expired"
        replicas[0].signal(signal.SIGCONT)
        eventually(lambda: ask(front).status_code == 200)


def test_a_stalled_replica_is_ejected_after_a_few_requests(
    replicas: list[Replica], tmp_path: Path
) -> None:
    with fronting(tmp_path / "front", routes(replicas, "grpc", timeout_seconds=1.0)) as front:
        replicas[0].signal(signal.SIGSTOP)
        for _ in range(10):
            ask(front)  # they take turns, mostly: three in a row that are its eject it
        front.wait_for("an endpoint is ejected", endpoint=replicas[0].address("grpc"))
        assert [ask(front).status_code for _ in range(10)] == [200] * 10


@pytest.mark.parametrize("protocol", sampled(("grpc", "http"), "grpc"))
def test_a_gateway_started_before_its_server_serves_once_that_is_there(
    replicas: list[Replica], tmp_path: Path, protocol: str
) -> None:
    replica = replicas[0]
    replica.kill()
    # "listening": it waits for what it has been asked to serve.
    with fronting(tmp_path / "front", routes([replica], protocol), wait_for="listening") as front:
        assert not ready(front)
        replica.start()
        eventually(lambda: ready(front))
        assert answer(front) == ("1", FACTOR)


@contextlib.contextmanager
def black_hole() -> Iterator[str]:
    """An address that accepts connections and never says anything."""
    with socket.create_server(("127.0.0.1", 0), backlog=512) as listening:
        yield f"127.0.0.1:{listening.getsockname()[1]}"


@pytest.mark.parametrize("protocol", sampled(("grpc", "http"), "http"))
def test_a_server_that_accepts_and_never_speaks_costs_no_request_and_no_start(
    replicas: list[Replica], tmp_path: Path, protocol: str
) -> None:
    keys = {"protocol": protocol, "connect_timeout_seconds": 0.5, "timeout_seconds": 5.0}
    with black_hole() as silent:
        tables = [
            table("m", [silent, replicas[0].address(protocol)], **keys),
            table("alone", [silent], model="m", **keys),
        ]
        with fronting(tmp_path / "front", *tables) as front:
            front.wait_for("an endpoint is ejected", endpoint=silent)
            assert [ask(front).status_code for _ in range(20)] == [200] * 20
            assert ask(front, "alone").status_code == 503
            ((state, reason),) = index(front, "alone").values()
            assert (state, reason) == (
                "UNAVAILABLE",
                "the server that runs 'alone' does not respond",
            )
            assert not [entry for entry in front.logs if "exception" in entry]
            assert front.process.poll() is None
