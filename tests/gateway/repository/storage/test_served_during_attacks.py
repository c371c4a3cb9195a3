"""Real gateways on a storage that is attacked while they are asked; ``make storage`` runs these.

Every version of ``x2`` multiplies by its own number, so that each answer says whether it is right.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from modelport.gateway.repository import manifest
from tests.gateway.repository.storage.moto_server import BUCKET, ENVIRONMENT, Moto
from tests.gateway.repository.storage.test_served import ask, index
from tests.models import X2_CONFIG, weighty
from tests.polling import WAIT_SECONDS
from tests.server import Gateway, serving

pytestmark = [
    pytest.mark.skipif(
        not os.environ.get("MODELPORT_SLOW_TESTS"), reason="make storage runs these"
    ),
    pytest.mark.usefixtures("storage_environment"),
]
POLL = ("--model-control-mode", "poll", "--repository-poll-secs", "0.1")
KILLS = 50
TENSOR = {"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [1, 1, 1, 1]}
NOT_READY = "object storage cannot be read; retrying"


def put(moto: Moto, work: Path, number: int, factor: float | None = None) -> None:
    """A version with a manifest, written over whatever is there."""
    folder = work / str(number)
    weighty(folder / "model.onnx", number if factor is None else factor)
    manifest.write(folder)
    moto.put("p/x2/config.pbtxt", X2_CONFIG.encode())
    moto.upload(folder, f"p/x2/{number}", ["model.onnx", "manifest.json"])


def serve(moto: Moto, *flags: str) -> Any:
    return serving(moto.url("p"), *POLL, *flags)  # type: ignore[arg-type]


class AskingClient:
    """Asks a gateway all along, and leaves the cores to those who publish."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._ending = threading.Event()
        #: Version → what it multiplied by.
        self.answers: dict[int, set[float]] = {}
        self.refusals: set[tuple[int, str]] = set()
        self.count = 0
        self._thread = threading.Thread(target=self._work)
        self._thread.start()

    def _work(self) -> None:
        while not self._ending.wait(0.005):
            url = f"http://{self._gateway.http}/v2/models/x2/infer"
            status, text = ask(url, {"inputs": [TENSOR]})
            self.count += 1
            if status != 200:
                self.refusals.add((status, text))
                continue
            answer = json.loads(text)
            number = int(answer["model_version"])
            self.answers.setdefault(number, set()).update(answer["outputs"][0]["data"])

    def wait_for(self, number: int) -> None:
        """Until that version has answered."""
        give_up = time.monotonic() + WAIT_SECONDS
        while number not in self.answers:
            assert time.monotonic() < give_up, (number, self.answers, self.refusals)
            time.sleep(0.05)

    def close(self) -> None:
        self._ending.set()
        self._thread.join()


@contextlib.contextmanager
def asking(*gateways: Gateway) -> Iterator[list[AskingClient]]:
    clients = [AskingClient(gateway) for gateway in gateways]
    try:
        yield clients
    finally:
        for client in clients:
            client.close()


def killed(url: str, first: int, after_seconds: float) -> list[int]:
    """Kill a publisher ``after_seconds`` and return the one or two version numbers it printed."""
    with subprocess.Popen(
        [sys.executable, "-m", "tests.gateway.repository.storage.publisher", url, str(first)],
        stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[4],
    ) as process:  # fmt: skip
        try:
            assert process.stdout is not None
            begun = int(process.stdout.readline())
            time.sleep(after_seconds)
        finally:
            process.kill()
        return [begun, *map(int, process.stdout.read().split())]


def test_gateways_serve_whole_versions_alone_while_publishers_are_killed(
    own_moto: Moto, tmp_path: Path
) -> None:
    put(own_moto, tmp_path, 1)
    chosen, number, whole = random.Random(1), 1, {1}
    with serve(own_moto) as first, serve(own_moto, "--repository-cache", str(tmp_path)) as second:
        with asking(first, second) as clients:
            for _ in range(KILLS):
                said = killed(own_moto.url("p"), number + 1, chosen.uniform(0.0, 1.5))
                number = max(said)
                whole |= {each for each in said if said.count(each) == 2}
            last = max(whole)
            for gateway in (first, second):
                gateway.wait_for("model version is ready", version=last)
            put(own_moto, tmp_path, number + 1)
            for gateway in (first, second):
                gateway.wait_for("model version is ready", version=number + 1)
        rows = [[r for r in index(g) if r["state"] == "READY"] for g in (first, second)]
        events = [line["event"] for gateway in (first, second) for line in gateway.logs]
    there = own_moto.keys("p/x2")
    published = {int(key.split("/")[0]) for key in there if key.endswith("manifest.json")}
    half = {int(key.split("/")[0]) for key in there if key.endswith("claim")} - published
    print(
        f"{KILLS} kills, {len(published)} versions whole, {len(half)} half, "
        f"{sum(client.count for client in clients)} answers"
    )
    assert half, "no kill was in the middle"
    assert whole <= published
    assert rows[0] == rows[1] == [{**rows[0][0], "version": str(number + 1)}]
    assert "model version is not served" not in events
    for client in clients:
        assert client.refusals == set()
        assert client.answers == {n: {float(n)} for n in client.answers}
        assert client.answers.keys() <= published


def test_a_version_that_is_overwritten_is_answered_by_one_content_or_the_other(
    own_moto: Moto, tmp_path: Path
) -> None:
    """By gateways that share a cache, one of which dies by SIGKILL while it downloads."""
    put(own_moto, tmp_path, 1, 0.0)
    with serve(own_moto) as first, asking(first) as (client,):
        for turn in range(1, 11):
            second = Gateway(own_moto.url("p"), *POLL, wait_for="listening")  # type: ignore[arg-type]
            try:
                seen = len(first.logs)
                put(own_moto, tmp_path, 1, float(turn))
                time.sleep(0.05 * turn)
                second.process.kill()
                first.wait_for("model version was overwritten in storage", seen, version=1)
                first.wait_for("model version is ready", seen, version=1)
            finally:
                second.close()
    assert client.refusals == set()
    assert client.answers == {1: {float(turn) for turn in range(11)} & client.answers[1]}
    contents = [*(tmp_path / "cache" / "modelport").glob("s3-*/x2/1/*")]
    assert 1 <= len(contents) <= 2, contents
    assert all(manifest.verify(path) for path in contents)


def test_what_is_deleted_under_load_is_refused_and_never_answered_wrongly(
    own_moto: Moto, tmp_path: Path
) -> None:
    put(own_moto, tmp_path, 1)
    with serve(own_moto) as gateway, asking(gateway) as (client,):
        own_moto.delete(*(f"p/x2/{key}" for key in own_moto.keys("p/x2")))
        gateway.wait_for("model version is unloaded", version=1)
        put(own_moto, tmp_path, 2)
        gateway.wait_for("model version is ready", version=2)
        client.wait_for(2)
    assert {status for status, _ in client.refusals} <= {404, 503}, client.refusals
    assert client.answers == {1: {1.0}, 2: {2.0}}


def test_a_bucket_that_goes_and_comes_back_costs_nothing_but_the_news(
    own_moto: Moto, tmp_path: Path
) -> None:
    put(own_moto, tmp_path, 1)
    with serve(own_moto) as gateway, asking(gateway) as (client,):
        keys = own_moto.keys("p")
        # In one step, as moto sees it: an empty bucket would be an empty repository.
        state = urllib.request.Request(f"{own_moto.endpoint}/moto-api/reset", b"", method="POST")
        urllib.request.urlopen(state).close()
        told = gateway.wait_for(NOT_READY)
        assert "no such bucket" in told["reason"]
        assert keys
        assert ask(f"http://{gateway.http}/v2/health/ready")[0] == 200
        other = tmp_path / "other"
        own_moto.client.create_bucket(Bucket=BUCKET)
        put(own_moto, other, 2)
        gateway.wait_for("object storage is reachable again")
        client.wait_for(2)
    assert client.answers == {n: {float(n)} for n in (1, 2)}
    assert {status for status, _ in client.refusals} <= {404, 503}, client.refusals


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 30 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=30m", "none", folder])
    if mounted.returncode:
        pytest.skip("no disk can be mounted here")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


def test_a_full_or_read_only_disk_is_reported_and_versions_keep_serving(
    own_moto: Moto, tmp_path: Path, disk: Path
) -> None:
    put(own_moto, tmp_path, 1)
    with serve(own_moto, "--repository-cache", str(disk)) as gateway, asking(gateway) as (client,):
        filler = disk / "filler"
        with filler.open("wb") as file, contextlib.suppress(OSError):
            while True:
                file.write(b"x" * 65536)
        put(own_moto, tmp_path, 2)
        told = gateway.wait_for("model version is not served", version=2)
        assert told["reason"].startswith("the disk of --repository-cache is full")
        filler.unlink()
        client.wait_for(2)
        subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
        put(own_moto, tmp_path, 3)
        told = gateway.wait_for("model version is not served", version=3)
        assert "cannot be written: Read-only file system" in told["reason"]
        subprocess.run(["mount", "-o", "remount,rw", disk], check=True)
        client.wait_for(3)
    assert client.refusals == set()
    assert client.answers == {n: {float(n)} for n in (1, 2, 3)}


def test_a_cache_that_cannot_be_written_to_ends_the_start_in_one_line(
    own_moto: Moto, tmp_path: Path, disk: Path
) -> None:
    put(own_moto, tmp_path, 1)
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
    ended = subprocess.run(
        [sys.executable, "-m", "modelport", "serve", "--model-repository", own_moto.url("p"),
         "--repository-cache", disk, "--http-port", "0", "--grpc-port", "0", "--metrics-port", "0"],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert ended.returncode == 2
    assert "cannot be created (Read-only file system)" in ended.stderr.splitlines()[-1]
    assert "Traceback" not in ended.stderr


def test_no_secret_is_in_any_log_answer_metric_or_argument_of_any_process(
    own_moto: Moto, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With every library told to say all it knows, of workers too, and of programs that fail."""
    secrets = [ENVIRONMENT[f"AWS_{name}"] for name in (
        "ACCESS_KEY_ID", "SECRET_ACCESS_KEY", "SESSION_TOKEN",
    )]  # fmt: skip
    for name in ("S3FS_LOGGING_LEVEL", "FSSPEC_LOGGING_LEVEL", "BOTO_LOG_LEVEL"):
        monkeypatch.setenv(name, "DEBUG")
    put(own_moto, tmp_path, 1)
    said = []
    with serve(own_moto, "--workers", "2", "--log-verbose", "2") as gateway:
        ask(f"{own_moto.endpoint}/moto-api/reset-auth", 0)  # from here on, access is refused
        gateway.wait_for(NOT_READY)
        paths = ("/v2/models/x2/infer", "/v2/models/none/infer", "/v2/repository/index")
        said += [ask(f"http://{gateway.http}{p}", {"inputs": [TENSOR]})[1] for p in paths]
        said.append(ask(gateway.metrics)[1])
        family = psutil.Process(gateway.process.pid)
        commands = [" ".join(each.cmdline()) for each in (family, *family.children(recursive=True))]
        assert len(commands) >= 3
        said += commands
        for words in (
            ("publish", str(tmp_path / "1"), "--repository", own_moto.url("p")),
            ("verify", "--integrity", own_moto.url("p/x2/1")),
            ("verify", "--integrity", "s3://127.0.0.1:1/nowhere/x2/1"),
        ):
            done = subprocess.run(
                [sys.executable, "-m", "modelport", *words],
                capture_output=True, text=True, timeout=120, check=False,
            )  # fmt: skip
            assert done.returncode != 0
            said += [done.stdout, done.stderr]
        assert gateway.terminate() == 0
        said.append(str(gateway.logs))
    assert len(said) > 10
    for text in said:
        assert not [secret for secret in secrets if secret in text], text


def test_a_file_that_goes_up_in_parts_is_published_and_fetched_whole(
    own_moto: Moto, tmp_path: Path
) -> None:
    """Above 100 MB."""
    from modelport.exporters.publishing import publish
    from modelport.gateway.repository import config
    from modelport.gateway.repository.storage.mirror import Mirror

    location = own_moto.location("p")
    with publish.staging(location) as staged:
        weighty(staged / "model.onnx", 1.0, width=2**22)  # 128 MiB
        size = (staged / "model.onnx").stat().st_size
        assert size > 100e6
        publish.publish(staged, location, config.parse(X2_CONFIG), 1)
    assert [line for line in own_moto.requests() if "partNumber=2" in line]
    entry = Mirror(location, tmp_path / "large").look()["x2"].versions[1]
    assert entry.fetch is not None
    entry.fetch()
    assert manifest.verify(entry.path)
