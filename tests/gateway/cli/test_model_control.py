"""``modelport label`` and ``modelport rollback``, ``load`` and ``unload``."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from modelport import cli
from modelport.gateway.cli import rollout
from modelport.gateway.repository import config as configuration
from modelport.gateway.repository import untrusted_files
from tests import models
from tests.server import serving

CONFIG = """# kept
backend: "onnxruntime" # kept too
parameters: {
  key: "version_label.stable"
  value: { string_value: "1" }  # { braces }
}
parameters { key: "other" value { string_value: "}" } }
"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    for version in (1, 2, 10):
        models.multiply(tmp_path / f"iris/{version}/model.onnx", float(version))
    (tmp_path / "iris/config.pbtxt").write_text(CONFIG.replace("# { braces }", ""))
    return tmp_path / "iris"


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli.modelport, arguments, prog_name="modelport")


def told(model: Path, verb: str, *arguments: str) -> str:
    result = run(verb, "iris", *arguments, "--model-repository", str(model.parent))
    assert result.exit_code == 0, result.output
    return result.output


def parsed(model: Path) -> configuration.ModelConfig:
    return configuration.parse((model / "config.pbtxt").read_text())


def test_a_label_moves_and_the_rest_of_the_file_stays(model: Path) -> None:
    before = parsed(model)
    assert "stable is version 2" in told(model, "label", "stable", "2")
    after = parsed(model)
    assert after.parameters["version_label.stable"].string_value == "2"
    after.parameters["version_label.stable"].string_value = "1"
    assert after == before
    assert (model / "config.pbtxt").read_text().startswith("# kept\n")


def test_label_reports_a_version_that_is_not_served_yet(model: Path) -> None:
    assert "is not served yet" in told(model, "label", "stable", "2")
    assert "is not served yet" not in told(model, "label", "stable", "10")


def test_labels_are_added_listed_and_removed(model: Path) -> None:
    told(model, "label", "canary", "10")
    assert "version 10 (served): canary" in told(model, "label")
    told(model, "label", "canary", "--remove")
    assert "canary" not in told(model, "label")


def test_a_model_without_a_configuration_gets_one(model: Path) -> None:
    (model / "config.pbtxt").unlink()
    told(model, "label", "stable", "10")
    assert parsed(model).parameters["version_label.stable"].string_value == "10"


def test_rollback_goes_one_version_back_each_time_and_latest_undoes_it(model: Path) -> None:
    assert "version 2 is served, was 10" in told(model, "rollback")
    assert "version 1 is served, was 2" in told(model, "rollback")
    result = run("rollback", "iris", "--model-repository", str(model.parent))
    assert (result.exit_code, list(parsed(model).version_policy.specific.versions)) == (2, [1])
    assert "version 10, the newest" in told(model, "rollback", "--latest")
    assert parsed(model).version_policy.latest.num_versions == 1


def test_rollback_of_a_label_leaves_the_policy(model: Path) -> None:
    told(model, "label", "stable", "10")
    assert "stable is version 2, was 10" in told(model, "rollback", "--label", "stable")
    assert not parsed(model).HasField("version_policy")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("label", "irs"), "did you mean 'iris'?"),
        (("label", "../iris"), "is not a valid model name"),
        (("label", "iris", "stable", "3"), "it has 1, 2, 10"),
        (("label", "iris", "stable"), "give a LABEL and its VERSION"),
        (("label", "iris", "a b", "1"), "is not a valid label"),
        (("label", "iris", "canary", "--remove"), "has no label 'canary'"),
        (("rollback", "iris", "--label", "stabel"), "did you mean 'stable'?"),
        (("rollback", "iris", "--model-version", "7"), "it has 1, 2, 10"),
        (("rollback", "iris", "--latest", "--label", "stable"), "--latest takes neither"),
    ],
)
def test_a_mistake_is_one_line_and_changes_nothing(
    model: Path, arguments: tuple[str, ...], words: str
) -> None:
    before = (model / "config.pbtxt").read_text()
    result = run(*arguments, "--model-repository", str(model.parent))
    assert result.exit_code == 2
    [line] = result.stderr.splitlines()
    assert line.startswith("modelport: error: ")
    assert words in line
    assert (model / "config.pbtxt").read_text() == before


def test_the_states_of_rollouts_are_not_suggested_as_a_model(model: Path) -> None:
    (model.parent / ".rollouts").mkdir()
    result = run("rollback", "rollouts", "--model-repository", str(model.parent))
    assert result.exit_code == 2
    assert ".rollouts" not in result.stderr


def test_a_file_that_cannot_be_changed_with_certainty_is_left_alone(model: Path) -> None:
    text = CONFIG  # the comment has braces, which end the block too early or too late
    text = text.replace("# { braces }", "# }")
    (model / "config.pbtxt").write_text(text)
    result = run("label", "iris", "stable", "2", "--model-repository", str(model.parent))
    assert result.exit_code == 2
    assert 'edit it by hand to have: parameters { key: "version_label.stable"' in result.stderr
    assert (model / "config.pbtxt").read_text() == text


@pytest.mark.parametrize(
    ("arguments", "most"),
    [
        (("load", "iris", "--model-config"), untrusted_files.MAX_CONFIG_BYTES),
        (("rollout", "feedback", "iris"), rollout.MAX_FEEDBACK_BYTES),
    ],
    ids=["load", "feedback"],
)
def test_only_a_regular_file_of_a_bounded_size_is_read(
    tmp_path: Path, arguments: tuple[str, ...], most: int
) -> None:
    pipe, large = tmp_path / "pipe", tmp_path / "large"
    os.mkfifo(pipe)
    with large.open("wb") as stream:
        stream.truncate(most + 1)
    for file, words in ((pipe, "it is not a regular file"), (large, f"larger than {most} bytes")):
        result = run(*arguments, str(file))
        assert result.exit_code == 2
        [line] = result.stderr.splitlines()
        assert line.startswith(f"modelport: error: '{file}' cannot be read: ")
        assert words in line


def test_load_and_unload_control_a_running_gateway(model: Path, tmp_path: Path) -> None:
    override = tmp_path / "override.pbtxt"
    override.write_text('backend: "onnxruntime" version_policy { all {} }')
    with serving(model.parent, "--model-control-mode", "explicit") as gateway:
        for protocol, url in (("http", gateway.http), ("grpc", gateway.grpc)):
            where = ("--url", url, "--protocol", protocol)
            assert "version 10 is READY" in run("load", "iris", *where).output
            loaded = run("load", "iris", "--model-config", str(override), *where)
            assert "version 1 is READY" in loaded.output
            assert "is UNAVAILABLE: unloaded" in run("unload", "iris", *where).output
        missing = run("infer", "irs", str(_request(tmp_path)), "--url", gateway.http)
        assert "did you mean 'iris'?" in missing.stderr


def _request(folder: Path) -> Path:
    file = folder / "request.json"
    file.write_text(json.dumps({"x": [[1, 2, 3, 4]]}))
    return file
