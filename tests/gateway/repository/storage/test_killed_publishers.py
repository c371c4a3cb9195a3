"""Publishers killed by SIGKILL while gateways look on; ``make storage`` runs these."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from modelport.gateway.repository import manifest
from modelport.gateway.repository.storage.mirror import Mirror
from tests.gateway.repository.storage.moto_server import Moto
from tests.models import X2_CONFIG, multiply
from tests.server import Gateway, serving

pytestmark = [
    pytest.mark.skipif(
        not os.environ.get("MODELPORT_SLOW_TESTS"), reason="make storage runs these"
    ),
    pytest.mark.usefixtures("storage_environment"),
]
POLL = ["--model-control-mode", "poll", "--repository-poll-secs", "0.1"]
SIZE_BYTES = 400_000


def publisher(url: str, model: str, count: int, size: int, *death: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "tests.gateway.repository.storage.publisher"),
            *(url, model, str(count), str(size), *death),
        ],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[4],
    )


class MirrorWatcher:
    """Looks without a pause, as a gateway does, and takes what it finds."""

    def __init__(self, url_of: Any, cache: Path) -> None:
        self._mirror = Mirror(url_of, cache)
        self._ending = threading.Event()
        self.looks = 0
        self.broken: list[str] = []
        self.found: dict[str, set[int]] = {}
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()

    def _watch(self) -> None:
        while not self._ending.is_set():
            self.look()

    def look(self) -> None:
        self.looks += 1
        for name, model in self._mirror.look().items():
            if not model.versions or model.problem or not model.config_text:
                self.broken.append(f"{name}: {model}")
            for number, entry in model.versions.items():
                try:
                    assert entry.fetch is not None
                    entry.fetch()
                    assert manifest.verify(entry.path)
                except Exception as error:
                    self.broken.append(f"{name} {number}: {error!r}")
                self.found.setdefault(name, set()).add(number)

    def close(self) -> None:
        self._ending.set()
        self._thread.join()


@pytest.fixture
def watcher(own_moto: Moto, tmp_path: Path) -> Iterator[MirrorWatcher]:
    watching = MirrorWatcher(own_moto.location("p"), tmp_path / "watched")
    yield watching
    watching.close()


def test_a_publisher_killed_at_every_call_leaves_nothing_that_is_ever_served(
    own_moto: Moto, watcher: MirrorWatcher
) -> None:
    for when in ("before", "after"):
        at, served = 0, []
        while True:
            at += 1
            model = f"{when}{at}"
            process = publisher(own_moto.url("p"), model, 1, 1000, str(at), when)
            process.communicate()
            if process.returncode == 0:
                break
            assert process.returncode == -signal.SIGKILL
            watcher.look()
            served.append(model in watcher.found)
        # Claim, certificate, artifact, labels, configuration, manifest; and the claim's end.
        assert served == ([False] * 6 + [True] if when == "before" else [False] * 5 + [True] * 2)
    assert watcher.broken == []


def test_publishers_killed_at_random_leave_whole_versions_alone(
    own_moto: Moto, watcher: MirrorWatcher
) -> None:
    chosen, published = random.Random(0), 0
    for _ in range(50):
        process = publisher(own_moto.url("p"), "m", 1000, SIZE_BYTES)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        time.sleep(chosen.uniform(0.0, 1.5))
        process.kill()
        published += len(process.communicate()[0].split())
    watcher.look()
    print(f"50 kills, {published} versions published, {watcher.looks} looks")
    assert watcher.broken == []
    assert len(watcher.found["m"]) >= published > 0
    assert [key for key in own_moto.keys("p") if "claim" in key], "no kill was in the middle"


def test_publishers_race_each_other_while_they_are_watched(
    own_moto: Moto, watcher: MirrorWatcher
) -> None:
    processes = [publisher(own_moto.url("p"), "m", 10, 100_000) for _ in range(5)]
    numbers = [int(line) for p in processes for line in p.communicate()[0].split()[1:]]
    assert sorted(numbers) == [*range(1, 51)]
    watcher.look()
    assert watcher.found == {"m": {*range(1, 51)}}
    assert watcher.broken == []


def call(gateway: Gateway, path: str, body: Any) -> Any:
    request = urllib.request.Request(
        f"http://{gateway.http}{path}", json.dumps(body).encode(), method="POST"
    )
    with urllib.request.urlopen(request, timeout=20) as answer:
        return json.loads(answer.read())


def test_two_gateways_come_to_the_same_index_while_versions_come_and_the_storage_goes(
    own_moto: Moto, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has a cache of its own, as on two machines."""
    tensor = {"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [1, 1, 1, 1]}

    def put(server: Moto, number: int) -> None:
        folder = tmp_path / "versions" / str(number)
        multiply(folder / "model.onnx", float(number))
        manifest.write(folder)
        server.put("p/x2/config.pbtxt", X2_CONFIG.encode())
        server.upload(folder, f"p/x2/{number}", ["manifest.json", "model.onnx"])

    def infer(gateway: Gateway) -> None:
        answer = call(gateway, "/v2/models/x2/infer", {"inputs": [tensor]})
        assert answer["outputs"][0]["data"] == [float(answer["model_version"])] * 4

    put(own_moto, 1)
    cached = [[*POLL, "--repository-cache", str(tmp_path / f"cache{n}")] for n in range(2)]
    with (
        serving(own_moto.url("p"), *cached[0]) as first,  # type: ignore[arg-type]
        serving(own_moto.url("p"), *cached[1]) as second,  # type: ignore[arg-type]
    ):
        server = own_moto
        for number in range(2, 12):
            if number % 4 == 0:  # the storage ends with all that it holds, and comes back
                server.close()
                for gateway in (first, second):
                    infer(gateway)
                server = Moto(own_moto.log, own_moto.port)
            put(server, number)
            for gateway in (first, second):
                gateway.wait_for("model version is ready", version=number)
                infer(gateway)
            indexes = [call(gateway, "/v2/repository/index", {}) for gateway in (first, second)]
            ready = [[row for row in rows if row["state"] == "READY"] for rows in indexes]
            assert ready[0] == ready[1]
            assert [row["version"] for row in ready[0]] == [str(number)]
        server.close()
        for gateway in (first, second):
            said = [line["event"] for line in gateway.logs]
            assert "model version is not served" not in said
            assert gateway.terminate() == 0
