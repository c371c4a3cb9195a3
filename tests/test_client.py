"""``modelport models`` and ``modelport infer`` against a real gateway."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from modelport.gateway.cli.infer import MAX_FILE_BYTES
from tests import models
from tests.commands import modelport
from tests.server import Gateway, serving


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    root = models.repository(tmp_path_factory.mktemp("repository"))
    models.add_and_subtract(root / "sums" / "1" / "model.onnx")
    models.identity(root / "words" / "1" / "model.onnx", "BYTES")
    models.identity(root / "whole" / "1" / "model.onnx", "INT64")
    models.identity(root / "bits" / "1" / "model.onnx", "BF16")
    models.identity(root / "picture" / "1" / "model.onnx", "FP32", ("batch", 1, 4, 4))
    (root / "picture" / "config.pbtxt").write_text(
        'backend: "onnxruntime" max_batch_size: 2 '
        'parameters { key: "image.mean" value { string_value: "0.5" } } '
        'parameters { key: "image.std" value { string_value: "0.25" } } '
        'input { name: "x" data_type: TYPE_FP32 dims: [1, 4, 4] } '
        'output { name: "y" data_type: TYPE_FP32 dims: [1, 4, 4] }'
    )
    (root / "broken" / "1").mkdir(parents=True)
    (root / "broken" / "1" / "model.onnx").write_bytes(b"not a model")
    with serving(root) as running:
        yield running


@pytest.fixture(params=["http", "grpc"])
def target(request: pytest.FixtureRequest, gateway: Gateway) -> list[str]:
    url = gateway.http if request.param == "http" else gateway.grpc
    return ["--protocol", request.param, "--url", url]


def outputs(*arguments: str, stdin: str = "") -> dict[str, object]:
    done = modelport("infer", *arguments, "--json", stdin=stdin)
    assert done.returncode == 0, done.stderr
    found: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_models_shows_states_reasons_and_signatures(target: list[str]) -> None:
    done = modelport("models", *target)
    assert done.returncode == 0, done.stderr
    assert "x FP32 [-1, 4]" in done.stdout
    assert "UNAVAILABLE" in done.stdout
    assert "does not load" in done.stdout
    rows = {row["name"]: row for row in json.loads(modelport("models", *target, "--json").stdout)}
    assert rows["x2"]["state"] == "READY"
    assert rows["x2"]["outputs"] == [{"name": "y", "datatype": "FP32", "shape": [-1, 4]}]
    assert rows["broken"]["state"] == "UNAVAILABLE"


def test_infer_takes_json_by_name_or_as_an_oip_request_or_from_stdin(
    target: list[str], tmp_path: Path
) -> None:
    document = tmp_path / "a.json"
    document.write_text('{"x": [[1, 2, 3, 4]]}')
    assert outputs("x2", str(document), *target) == {"y": [[2.0, 4.0, 6.0, 8.0]]}
    body = '{"inputs":[{"name":"x","shape":[1,4],"datatype":"FP32","data":[1,2,3,4]}]}'
    document.write_text(body)
    assert outputs("x2", str(document), *target) == {"y": [[2.0, 4.0, 6.0, 8.0]]}
    assert outputs("x2", "-", *target, stdin="[[1, 2, 3, 5]]") == {"y": [[2.0, 4.0, 6.0, 10.0]]}


def test_the_command_is_a_program_that_reads_its_standard_input(target: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "modelport", "infer", "x2", "-", *target, "--json"],
        capture_output=True,
        text=True,
        input="[[1, 2, 3, 5]]",
        env={"PATH": "/usr/bin:/bin"},
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout) == {"y": [[2.0, 4.0, 6.0, 10.0]]}


def test_infer_takes_numpy_files_and_adds_a_missing_batch_dimension(
    target: list[str], tmp_path: Path
) -> None:
    np.save(tmp_path / "x.npy", np.arange(4.0))
    assert outputs("x2", str(tmp_path / "x.npy"), *target) == {"y": [[0.0, 2.0, 4.0, 6.0]]}
    one = np.ones((1, 2), np.float32)
    np.savez(tmp_path / "ab.npz", a=one, b=2 * one)
    chosen = outputs("sums", str(tmp_path / "ab.npz"), *target, "--output-name", "total")
    assert chosen == {"total": [[3.0, 3.0]]}


def test_infer_takes_images_with_the_preprocessing_that_the_model_declares(
    target: list[str], tmp_path: Path
) -> None:
    Image.fromarray(np.full((4, 4), 255, np.uint8)).save(tmp_path / "white.png")
    assert outputs("picture", str(tmp_path / "white.png"), *target) == {"y": [[[[2.0] * 4] * 4]]}


def test_infer_rounds_numbers_to_bfloat16(target: list[str], tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"x": [[1, -2.5, 0.1, 8]]}')
    assert outputs("bits", str(tmp_path / "a.json"), *target) == {
        "y": [[1, -2.5, 0.10009765625, 8]]
    }


def test_infer_sends_and_prints_strings(target: list[str], tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"x": [["a", "", "é", "NUL\\u0000"]]}')
    assert outputs("words", str(tmp_path / "a.json"), *target) == {"y": [["a", "", "é", "NUL\0"]]}


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["nope", "a.json"], "Request for unknown model: 'nope' is not found"),
        (["x2", "missing.json"], "'missing.json' does not exist"),
        (["x2", "bad.json"], "'bad.json' cannot be read"),
        (["x2", "deep.json"], "'deep.json' cannot be read"),
        (["x2", "empty.npy"], "'empty.npy' cannot be read"),
        (["x2", "damaged.npz"], "'damaged.npz' cannot be read"),
        (
            ["x2", "pipe.json"],
            "'pipe.json' cannot be read: it is not a regular file; name a file, or",
        ),
        (
            ["x2", "pipe.npy"],
            "'pipe.npy' cannot be read: it is not a regular file; name a file, or",
        ),
        (["x2", "large.json"], "'large.json' cannot be read: it is larger than"),
        (["picture", "large.png"], "'large.png' is larger than"),
        (["x2", "wrong.json"], "holds 'z', but the model's inputs are x"),
        (["x2", "words.json"], "input 'x' is not FP32"),
        (["whole", "fraction.json"], "input 'x' is not INT64"),
        (["whole", "text.json"], "input 'x' is not INT64"),
        (["whole", "plain.json"], "input 'x' is not INT64"),
        (["x2", "text.json"], "input 'x' is not FP32"),
        (["x2", "vast.json"], "input 'x' is not FP32: overflow"),
        (["sums", "x.npy"], "the model takes the inputs a, b"),
        (["x2", "pickled.npy"], "cannot be read"),
        (["x2", "a.json", "--model-version", "9"], "version 9 is not found"),
        (["x2", "a.json", "--output-name", "w"], "unexpected inference output 'w'"),
        (["broken", "a.json"], "has no available versions"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(
    arguments: list[str],
    text: str,
    target: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.json").write_text('{"x": [[1, 2, 3, 4]]}')
    Path("bad.json").write_text('{"x": ')
    Path("deep.json").write_text("[" * 200_000)
    Path("empty.npy").touch()
    np.savez_compressed("damaged.npz", x=np.arange(400))
    with open("damaged.npz", "r+b") as file:
        file.seek(200)
        file.write(b"\xff" * 60)
    for name in ("pipe.json", "pipe.npy"):
        os.mkfifo(name)
    for name in ("large.json", "large.png"):
        with open(name, "wb") as file:
            file.truncate(MAX_FILE_BYTES + 1)
    Path("wrong.json").write_text('{"z": [1]}')
    Path("words.json").write_text('{"x": [["a", "b", "c", "d"]]}')
    for name, data in (("fraction", [1, 2, 3, 4.5]), ("text", ["1", "2", "3", "4"])):
        tensor = {"name": "x", "datatype": "INT64", "shape": [1, 4], "data": data}
        Path(f"{name}.json").write_text(json.dumps({"inputs": [tensor]}))
    Path("plain.json").write_text('{"x": [[1, 2, 3, 4.5]]}')
    Path("vast.json").write_text('{"x": [[1, 2, 3, 1e300]]}')
    np.save("x.npy", np.ones(4))
    np.save("pickled.npy", np.array([{}], dtype=object), allow_pickle=True)
    done = modelport("infer", *arguments, *target)
    assert done.returncode not in (0, None)
    assert done.stderr.startswith("modelport: error: ")
    assert done.stderr.count("\n") == 1, done.stderr
    assert text in done.stderr


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_no_gateway_is_one_line_with_the_remedy(protocol: str) -> None:
    done = modelport("models", "--protocol", protocol, "--url", "127.0.0.1:1")
    assert done.returncode == 1
    assert "start one with 'modelport serve'" in done.stderr
    assert done.stderr.count("\n") == 1
