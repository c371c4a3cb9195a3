"""The images: their file, and what is built from it.

MODELPORT_DEPLOY_TARGETS names the targets to build; those with a framework take minutes.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import models
from tests.deploy import thorough, tools
from tests.deploy.images import DOCKERFILE, START_SECONDS, Container, build, release, running
from tests.deploy.manifests import served_with

TEXT = DOCKERFILE.read_text()
STAGES = dict(re.findall(r"^FROM (\S+) AS (\S+)$", TEXT, re.MULTILINE))
TARGETS = os.environ.get("MODELPORT_DEPLOY_TARGETS", "onnx litert torch tensorflow").split()
#: Extra → the line of `modelport doctor` that must say it is there.
BACKEND = {
    "onnx": "onnxruntime",
    "litert": "tflite",
    "torch": "pytorch",
    "tensorflow": "tensorflow",
}


@pytest.fixture(scope="module", autouse=True)
def nothing_stays_mounted() -> Iterator[None]:
    yield
    release()


def blocks() -> dict[str, str]:
    """The instructions of each build stage, by its name."""
    found = re.split(r"^FROM \S+ AS (\S+)$", TEXT, flags=re.MULTILINE)[1:]
    return dict(zip(found[::2], found[1::2], strict=True))


def test_what_runs_is_no_root_has_a_probe_and_hears_signals_itself() -> None:
    for stage in ("runtime", "gpu"):
        block = blocks()[stage]
        assert "USER 10001:10001" in block
        assert re.search(r"HEALTHCHECK .*\\\n\s+CMD \[", block)
        (entrypoint,) = re.findall(r"^ENTRYPOINT (.*)$", block, re.MULTILINE)
        (command,) = re.findall(r"^CMD (.*)$", block, re.MULTILINE)
        assert json.loads(entrypoint) == ["modelport"]
        options = served_with(json.loads(command))
        assert {options[f"{kind}_address"] for kind in ("http", "grpc", "metrics")} == {"0.0.0.0"}
        for kind in ("http", "grpc", "metrics"):
            assert str(options[f"{kind}_port"]) in re.findall(r"^EXPOSE (.*)$", block, re.M)[0]


def test_the_image_with_cuda_runs_as_the_others_do() -> None:
    runtime, gpu = (blocks()[name].split("\n\n")[0].strip() for name in ("runtime", "gpu"))
    assert gpu.replace("COPY --from=build-gpu /opt/modelport /opt/modelport\n", "") == runtime


def test_base_images_are_pinned_and_every_extra_has_a_target() -> None:
    for image in re.findall(r"^ARG (?:PYTHON|CUDA)=(.*)$", TEXT, re.MULTILINE):
        assert re.search(r":\d[^:/]*$", image), image
    targets = {name for name in blocks() if f"build-{name}" in blocks()}
    assert targets == {"onnx", "litert", "tensorflow", "torch", "huggingface", "all", "gpu"}


@thorough
def test_hadolint_has_nothing_to_say(tmp_path: Path) -> None:
    assert tools.check(tools.linter("hadolint"), DOCKERFILE) == ""
    bad = tmp_path / "Dockerfile"
    bad.write_text(TEXT.replace('ENTRYPOINT ["modelport"]', "ENTRYPOINT modelport"))
    assert tools.said(tools.linter("hadolint"), bad)[0] != 0


def wait_healthy(container: Container) -> None:
    give_up = time.monotonic() + START_SECONDS
    while not container.healthy():
        assert container.process.poll() is None, container.log.read_text()
        assert time.monotonic() < give_up, container.log.read_text()
        time.sleep(0.2)


def repository(target: str, root: Path) -> Path:
    """``x2`` for every image, ``slow``, and a model in the image's own format."""
    models.repository(root)
    models.fake(root, "slow", "FP32", "4", delay_seconds="3")
    if target != "onnx":
        script = Path(__file__).with_name("artifacts.py")
        tools.check(sys.executable, script, target, root / "own", cwd=script.parents[2])
    return root


ASK = """
import json, sys, urllib.request
body = {"inputs": [{"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}]}
url = f"http://127.0.0.1:8000/v2/models/{sys.argv[1]}/infer"
print(urllib.request.urlopen(url, json.dumps(body).encode()).read().decode())
"""
WRITE = """
import os, sys
try:
    open(sys.argv[1], "w")
    print("written")
except OSError as error:
    print(error.strerror)
print(os.getuid(), open("/proc/1/status").read().split("CapEff:")[1].split()[0])
"""


def ask(container: Container, model: str) -> list[float]:
    status, said = container.execute("python", "-c", ASK, model)
    assert status == 0, said + container.log.read_text()
    data: list[float] = json.loads(said)["outputs"][0]["data"]
    return data


@thorough
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("target", TARGETS)
def test_an_image_serves_read_only_without_privileges_and_drains(
    target: str, tmp_path: Path
) -> None:
    image = build(target)
    print(f"{target}: /opt/modelport {image.size_bytes / 1e6:.0f} MB", file=sys.stderr)
    assert not (image.root / "opt" / "modelport" / "bin" / "pip").exists()
    assert not (image.root / "src").exists()
    folder = repository(target, tmp_path / "models")
    with running(image, folder, tmp_path / "log") as container:
        wait_healthy(container)
        for path, said in (
            ("/opt/modelport/x", "Read-only file system"),
            ("/models/x", "Read-only file system"),
            ("/tmp/x", "written"),
        ):
            status, told = container.execute("python", "-c", WRITE, path)
            assert (status, told.split("\n")[:2]) == (0, [said, "10001 0000000000000000"])
        assert ask(container, "x2") == [2, 4, 6, 8]
        if target != "onnx":
            assert ask(container, "own") == [2, 4, 6, 8]
        status, told = container.execute("modelport", "doctor")
        backend = BACKEND.get(target, "onnxruntime")
        states = [row.split() for row in told.splitlines() if row.split()[1:2] == [backend]]
        assert "ok" in states[0], told
        sigterm_drains(container)


def metrics(container: Container) -> str:
    url = "http://127.0.0.1:8002/metrics"
    code = f"import urllib.request as u; print(u.urlopen('{url}').read().decode())"
    return container.execute("python", "-c", code)[1]


def sigterm_drains(container: Container) -> None:
    """A request that is in flight when process 1 is told to end gets its answer."""
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask, container, "slow")
        while 'modelport_requests_in_flight{model="slow",version="1"} 1' not in metrics(container):
            assert not asked.done(), asked.result()
        os.kill(container.pid, signal.SIGTERM)
        assert asked.result() == [1, 2, 3, 4]
    assert container.process.wait(30) == 0
    assert "stopped" in container.log.read_text()


@thorough
@pytest.mark.timeout(1800)
def test_a_damaged_start_is_unhealthy_and_ends_with_a_message(tmp_path: Path) -> None:
    image = build("onnx")
    arguments = ["serve", "--model-repository", "/nothing"]
    with running(image, tmp_path, tmp_path / "log", arguments) as container:
        assert container.process.wait(30) == 2
    assert "/nothing" in container.log.read_text()
