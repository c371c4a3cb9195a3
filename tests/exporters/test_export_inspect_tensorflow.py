"""``modelport inspect`` of SavedModel and TFLite files, alone and in a repository."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from modelport.exporters.runtime.output_capture import quiet
from modelport.gateway.repository import config
from modelport.gateway.types import Axis, Datatype, ModelSignature, TensorSpec
from tests.inspected import refused, run, show, survives_damage


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a SavedModel, and with that as TFLite, in fp32 and int8."""
    from modelport.exporters.runtime.tensorflow_runtime import tf

    folder = tmp_path_factory.mktemp("saved")
    with quiet():
        root = tf.Module()
        root.table = tf.Variable(np.random.default_rng(0).random((8, 64)).astype("f4"))
        root.weight = tf.Variable(np.random.default_rng(1).random((64, 64)).astype("f4"))
        root.unused = tf.Variable(np.ones(7, "f4"))

        @tf.function(input_signature=[tf.TensorSpec([None, None], tf.int64, name="tokens")])
        def serve(tokens: Any) -> dict[str, Any]:
            hidden = tf.nn.relu(tf.matmul(tf.gather(root.table, tokens), root.weight))
            hidden = tf.while_loop(
                lambda i, _: i < 2, lambda i, h: (i + 1, tf.math.tanh(h)), (0, hidden)
            )[1]
            return {"score": tf.reduce_mean(hidden, axis=[1, 2])}

        root.serve = serve
        place = str(folder / "model.savedmodel")
        tf.saved_model.save(root, place, signatures={"serving_default": serve})
        for name, optimizations in (("fp32", []), ("int8", [tf.lite.Optimize.DEFAULT])):
            converter = tf.lite.TFLiteConverter.from_saved_model(place)
            converter.optimizations = optimizations
            (folder / f"{name}.tflite").write_bytes(converter.convert())
    return folder


SCORE = [{"name": "score", "datatype": "FP32", "shape": [-1]}]
TOKENS = [{"name": "tokens", "datatype": "INT64", "shape": [-1, -1]}]


def test_a_savedmodel_shows_what_its_signature_computes(saved: Path) -> None:
    path = saved / "model.savedmodel"
    shown = show(path)
    assert (shown["format"], shown["inputs"], shown["outputs"]) == ("savedmodel", TOKENS, SCORE)
    assert shown["weights"] == {"FP32": 8 * 64 + 64 * 64}
    assert shown["notes"] == ["7 more values are stored and not used"]
    for operator in ("Tanh", "Relu", "Mean"):
        assert shown["operators"][operator] == 1
    assert shown["producer"].startswith("tensorflow 2.")
    assert shown["size_bytes"] == sum(f.stat().st_size for f in path.rglob("*") if f.is_file())
    (shard,) = shown["external_data"]
    assert shard["file"] == "variables/variables.data-00000-of-00001"


def test_tflite_shows_its_signature_and_the_share_in_eight_bits(saved: Path) -> None:
    full, small = show(saved / "fp32.tflite"), show(saved / "int8.tflite")
    for shown in (full, small):
        assert (shown["format"], shown["inputs"], shown["outputs"]) == ("tflite", TOKENS, SCORE)
        assert {"GATHER", "TANH", "WHILE"} <= set(shown["operators"])
    assert full["weights"] == {"FP32": 8 * 64 + 64 * 64}
    assert (full["quantized_share"], small["weights"]["INT8"]) == (0, 64 * 64)
    assert small["quantized_share"] > 0.8
    assert "Flex" not in " ".join(small["notes"])


def version(folder: Path, number: int, artifact: Path, **changes: Any) -> Path:
    declared = ModelSignature(
        (TensorSpec("tokens", Datatype.INT64, ("sequence",), 0, 7),),
        (TensorSpec("score", Datatype.FP32, (1,), reshape=()),),
        16,
        {"sequence": Axis("sequence", 1, 40)},
    )
    path = folder / str(number)
    path.mkdir(parents=True)
    shutil.copy(artifact, path / "model.tflite")
    row = next(row for row in config.PLATFORMS if row.format == "tflite")
    text = config.to_text(config.build(folder.name, row, declared))
    (folder / config.FILENAME).write_text(changes.get("text", text))
    return path


def test_a_models_folder_shows_its_newest_version_and_its_certificate(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tmp_path / "scorer"
    version(model, 9, saved / "int8.tflite")
    newest = version(model, 10, saved / "fp32.tflite")
    certificate = {
        "created": "2026-01-02T03:04:05+00:00",
        "checkpoint": {"file": "scorer.pt"},
        "parity": {"outputs": {"score": {"max_abs_error": 1e-7}}, "decision": None},
    }
    (newest / "certificate.json").write_text(json.dumps(certificate))
    shown = show(model)
    assert shown == show(newest)
    monkeypatch.chdir(newest)
    assert shown == show(Path())
    assert shown["quantized_share"] == 0
    assert shown["inputs"][0]["shape"] == ["batch", "sequence"]
    assert {axis["name"]: axis["maximum"] for axis in shown["dynamic_axes"]} == {
        "batch": 16,
        "sequence": 40,
    }
    assert shown["certificate"] == certificate
    table = run(model).stdout
    assert "scorer.pt" in table
    assert "score 1e-07" in table
    assert show(model / "9")["certificate"] is None
    for strange in ('{"parity": [1], "checkpoint": 7}', "[]"):
        (newest / "certificate.json").write_text(strange)
        show(model)
    (newest / "certificate.json").write_text("{")
    refused(model, 5, "'certificate.json' is damaged")


def test_a_configuration_that_leaves_things_open_is_no_hindrance(
    saved: Path, tmp_path: Path
) -> None:
    for index, text in enumerate(("", 'platform: "nonsense"', "{{{", 'input { name: "tokens" }')):
        model = tmp_path / f"m{index}"
        version(model, 1, saved / "fp32.tflite", text=text)
        assert show(model)["inputs"] == TOKENS


def test_a_savedmodel_without_all_of_its_variables_is_damaged(saved: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.savedmodel"
    shutil.copytree(saved / "model.savedmodel", path)
    index = path / "variables" / "variables.index"
    content = index.read_bytes()
    index.write_bytes(content[: len(content) // 2])
    refused(path, 5, "variables.index does not parse")
    index.unlink()
    refused(path, 5, "it does not store every variable that it uses")


def test_damage_is_one_line_wherever_it_is(saved: Path, tmp_path: Path) -> None:
    tflite = Path(shutil.copy(saved / "fp32.tflite", tmp_path))
    survives_damage(tflite, tflite)
    path = Path(shutil.copytree(saved / "model.savedmodel", tmp_path / "model.savedmodel"))
    survives_damage(path, path / "saved_model.pb")
