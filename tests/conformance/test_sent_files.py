"""Model files sent in a load request, by Triton's own clients and by hostile ones."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import shutil
import signal
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from modelport.gateway.repository import manifest
from tests import models
from tests.conformance import wire
from tests.conformance.clients import CALLERS, ControlCaller, status
from tests.gateway.server.workers.processes import workers
from tests.polling import eventually
from tests.server import Gateway, serving

EXPLICIT = ("--model-control-mode", "explicit")
CONFIG = '{"backend": "onnxruntime"}'
MOST_BYTES = 1024 * 1024
#: The model of the repository, under a name that no other test has, to find its folder.
OWN = f"own{uuid.uuid4().hex}"


@pytest.fixture(scope="module")
def content(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A model that multiplies by five; the repository's does by two."""
    return models.multiply(tmp_path_factory.mktemp("sent") / "model.onnx", 5.0).read_bytes()


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    root = models.repository(tmp_path_factory.mktemp("explicit"))
    (root / "x2").rename(root / OWN)
    (root / OWN / "1").rename(root / OWN / "3")
    (root / OWN / "config.pbtxt").write_text(models.X2_CONFIG.replace("x2", OWN))
    with serving(root, *EXPLICIT, "--http-max-input-size", str(MOST_BYTES)) as gateway:
        yield gateway


@pytest.fixture
def new() -> Iterator[str]:
    """A name that no other test has, to find its folder, which a gateway leaves if it is killed."""
    name = f"sent{uuid.uuid4().hex}"
    yield name
    for folder in folders(name):
        shutil.rmtree(folder.parent, ignore_errors=True)


def folders(name: str) -> list[Path]:
    return list(Path(tempfile.gettempdir()).glob(f"modelport-sent-*/{name}"))


def answer(gateway: Gateway, model: str) -> list[float] | int:
    path = wire.infer_path(model)
    reply = wire.send(gateway.http, "POST", path, wire.good_body())
    if reply.status != 200:
        return reply.status
    values: list[float] = reply.json["outputs"][0]["data"]
    return values


def load(gateway: Gateway, model: str, config: str | None = CONFIG, **files: Any) -> wire.WireReply:
    """Load by hand; files are base64 or what else JSON has."""
    parameters = {"config": config, **files} if config is not None else files
    body = json.dumps({"parameters": parameters}).encode()
    return wire.send(gateway.http, "POST", f"/v2/repository/models/{model}/load", body)


def coded(content: bytes) -> str:
    return base64.b64encode(content).decode()


@pytest.mark.parametrize("transport", ["http", "grpc"])
def test_files_serve_under_any_name_until_the_model_is_loaded_or_unloaded(
    gateway: Gateway, content: bytes, new: str, runner: asyncio.Runner, transport: str
) -> None:
    control = ControlCaller(CALLERS[transport](gateway, runner), runner)
    files = {"file:1/model.onnx": content}
    control("load_model", OWN)
    for name in (new, OWN):
        assert "config" in control.refusal("load_model", name, files=files).message()
        control("load_model", name, config=CONFIG, files=files)
        assert answer(gateway, name) == [5, 10, 15, 20]
        (folder,) = folders(name)
        assert folder.parent.stat().st_mode & 0o777 == 0o700
        assert control("get_model_metadata", name)["versions"] == ["1"]
    control("load_model", OWN)
    assert not folders(OWN)
    assert answer(gateway, OWN) == [2, 4, 6, 8]
    control("load_model", new, config=CONFIG, files={"file:7/model.onnx": content})
    assert [each.name for each in folders(new)[0].iterdir()] == ["7"]
    control("unload_model", new)
    assert not folders(new)
    assert answer(gateway, new) == 404
    assert control.refusal("load_model", new).status() == status(transport, 404, "NOT_FOUND")
    control("unload_model", OWN)
    control.close()


def test_files_that_do_not_load_change_nothing_and_are_not_kept(
    gateway: Gateway, content: bytes, new: str
) -> None:
    damaged = {"file:9/model.onnx": coded(b"no model")}
    reply = load(gateway, new, **damaged)
    assert (reply.status, "version 9" in reply.json["error"]) == (400, True)
    assert not folders(new)
    index = wire.send(gateway.http, "POST", "/v2/repository/index").json
    assert new not in {row["name"] for row in index}
    assert load(gateway, new, **{"file:1/model.onnx": coded(content)}).status == 200
    kept = folders(new)
    for files in (damaged, {"file:1/model.onnx": coded(b"")}, {"file:labels.txt": coded(b"a")}):
        assert load(gateway, new, **files).status == 400
        assert answer(gateway, new) == [5, 10, 15, 20]
        assert folders(new) == kept
    assert load(gateway, new, '{"backend": "nobody"}', **damaged).status != 200
    assert answer(gateway, new) == [5, 10, 15, 20]
    assert load(gateway, OWN, None).status == 200
    assert load(gateway, OWN, **damaged).status == 400
    assert answer(gateway, OWN) == [2, 4, 6, 8]
    assert not folders(OWN)


UP = "../" * 8 + "tmp/escaped"
PATHS = [
    *("", "/", ".", "..", "1/..", "1/../../m", "../m", UP, f"1/{UP}", "//etc/m", "1//m", "1/./m"),
    *("1/", ".hidden", "1/.hidden/m", "1\\m", "1/a\nb", "1/a\0b", "1/\ud800", "config.pbtxt"),
    *("a/" * 17 + "m", "/../m"),
]


@pytest.mark.parametrize("path", PATHS, ids=ascii)
def test_a_path_out_of_the_model_is_refused(gateway: Gateway, new: str, path: str) -> None:
    reply = load(gateway, new, **{f"file:{path}": "YQ=="})
    assert reply.status == 400, reply.body
    assert not folders(new)
    assert not Path("/tmp/escaped").exists()


def test_what_cannot_be_a_file_is_refused(gateway: Gateway, new: str) -> None:
    for files, said in (
        ({"file:1/m": "no base64!"}, "base64"),
        ({"file:1/m": 7}, "base64"),
        ({"file:1/m": None}, "base64"),
        ({"file:1": "YQ==", "file:1/m": "YQ=="}, "the folder of another file"),
        ({"file:1/m": "YQ==", "file:/1/m": "YQ=="}, "same path"),
        ({f"file:1/{n}": "" for n in range(1001)}, "more than 1000 files"),
        ({"files:1/m": "YQ=="}, "unknown load parameter"),
    ):
        reply = load(gateway, new, **files)
        assert (reply.status, said in reply.json["error"]) == (400, True), reply.json
    reply = load(gateway, new, **{"file:1/m": "A" * MOST_BYTES})
    assert reply.status == 400
    assert "exceeds the maximum allowed input size" in reply.json["error"]
    assert not folders(new)


def test_the_policy_of_the_gateway_is_that_of_a_repository(
    content: bytes, new: str, tmp_path: Path
) -> None:
    root = models.repository(tmp_path / "models")
    with serving(root, *EXPLICIT, "--require-manifest") as gateway:
        files = {"file:1/model.onnx": coded(content)}
        assert "--require-manifest" in load(gateway, new, **files).json["error"]
        (tmp_path / "sent").mkdir()
        (tmp_path / "sent" / "model.onnx").write_bytes(content)
        sums = coded(manifest.write(tmp_path / "sent").read_bytes())
        reply = load(gateway, new, **files, **{"file:1/manifest.json": sums})
        assert reply.status == 200, reply.json
        assert answer(gateway, new) == [5, 10, 15, 20]


PYTHON = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", np.full((1, 4), 7, np.float32))])
                for _ in requests]
"""
PYTHON_CONFIG = json.dumps({
    "backend": "python",
    "input": [{"name": "x", "data_type": "TYPE_FP32", "dims": [1, 4]}],
    "output": [{"name": "y", "data_type": "TYPE_FP32", "dims": [1, 4]}],
})  # fmt: skip


def test_python_from_a_request_runs_only_for_callers_that_the_gateway_knows(
    new: str, tmp_path: Path
) -> None:
    root = models.repository(tmp_path / "models")
    code = {"file:1/model.py": coded(PYTHON.encode())}
    options = (*EXPLICIT, "--allow-python")
    with serving(root, *options, "--allow-native-code") as gateway:
        reply = load(gateway, new, PYTHON_CONFIG, **code)
        assert "--access" in reply.json["error"]
        assert answer(gateway, new) == 404
    rules = tmp_path / "access.toml"
    rules.write_text('[[rules]]\nprincipals = ["anonymous"]\noperations = ["*"]\nmodels = ["*"]\n')
    with serving(root, *options, "--access", str(rules)) as gateway:
        assert load(gateway, new, PYTHON_CONFIG, **code).status == 200
        assert answer(gateway, new) == [7, 7, 7, 7]


def test_python_and_pickles_from_a_request_are_refused(gateway: Gateway, new: str) -> None:
    reply = load(gateway, new, PYTHON_CONFIG, **{"file:1/model.py": coded(PYTHON.encode())})
    assert "--allow-python" in reply.json["error"]
    reply = load(gateway, new, **{"file:1/model.onnx": "", "file:1/a.pkl": ""})
    assert "may run code" in reply.json["error"]
    assert not folders(new)


def test_every_worker_serves_the_files_and_so_does_the_next_one(
    content: bytes, new: str, tmp_path: Path
) -> None:
    def both() -> list[list[float] | int]:
        return [answer(gateway, new) for _ in range(20)]  # a connection each

    root = models.repository(tmp_path)
    with serving(root, *EXPLICIT, "--workers", "2") as gateway:
        assert load(gateway, new, **{"file:1/model.onnx": coded(content)}).status == 200
        assert both() == [[5, 10, 15, 20]] * 20
        pids = workers(gateway)
        os.kill(pids[0], signal.SIGKILL)
        gateway.wait_for("worker restarted")
        eventually(lambda: both() == [[5, 10, 15, 20]] * 20, "the new one serves them, too")
        assert len(folders(new)) == 1
        assert load(gateway, new, **{"file:1/model.onnx": ""}).status == 400
        assert both() == [[5, 10, 15, 20]] * 20
        assert len(folders(new)) == 1
        assert gateway.terminate() == 0
    assert not folders(new)
