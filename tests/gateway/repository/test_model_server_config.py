"""TensorFlow Serving's file of models: what it may say, base paths, and reading it again."""

from __future__ import annotations

import time
from pathlib import Path

import httpx
import pytest

from modelport.gateway.errors import InvalidArgument
from modelport.gateway.models.model_config import read_config, version_labels
from modelport.gateway.repository import model_server_config
from modelport.gateway.repository.model_server_config import ModelServerConfigFile
from tests import models
from tests.polling import eventually
from tests.server import serving


def listed(folder: Path, *entries: str) -> Path:
    file = folder / "models.config"
    text = "".join(f"config: {{ {entry} }}, " for entry in entries)
    file.write_text(f"model_config_list: {{ {text} }}")
    return file


def entry(name: str, base: Path, more: str = "") -> str:
    return f'name: "{name}", base_path: "{base}" {more}'


@pytest.fixture
def base(tmp_path: Path) -> Path:
    base = tmp_path / "base"
    for version in ("00000002", "3", "012"):
        (base / version / "variables").mkdir(parents=True)
        (base / version / "saved_model.pb").touch()
    (base / "v4").mkdir()
    return base


def test_versions_may_be_padded_and_are_saved_models_themselves(base: Path, tmp_path: Path) -> None:
    more = """model_platform: "tensorflow", model_version_policy { specific { versions: 2 } }
    version_labels { key: "stable" value: 2 }"""
    (found,) = ModelServerConfigFile(listed(tmp_path, entry("m", base, more)), 0).scan()
    assert found.name == "m"
    assert sorted(found.versions) == [2, 3, 12]
    assert found.versions[12].path == base / "012"
    assert found.ignored == ("v4",)
    config = read_config(found)
    assert (config.backend, config.default_model_filename) == ("tensorflow", "saved_model.pb")
    assert list(config.version_policy.specific.versions) == [2]
    assert version_labels(config) == {"stable": 2}


@pytest.mark.parametrize(
    ("policy", "kept"),
    [("", "latest"), ("latest { num_versions: 2 }", "latest"), ("all {}", "all")],
)
def test_version_policies_are_those_of_the_file(
    policy: str, kept: str, base: Path, tmp_path: Path
) -> None:
    more = f"model_version_policy {{ {policy} }}" if policy else ""
    (found,) = ModelServerConfigFile(listed(tmp_path, entry("m", base, more)), 0).scan()
    assert read_config(found).version_policy.WhichOneof("policy_choice") == kept


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        (['name: "m", base_path: "models/m"'], "'models/m' of model 'm' must be an absolute path"),
        (['name: "m"'], "the base_path '' of model 'm' must be an absolute"),
        (['name: "../m", base_path: "/m"'], "'../m' is not a model's name"),
        (['base_path: "/m"'], "'' is not a model's name"),
        (['name: "m", base_path: "/a"', 'name: "m", base_path: "/b"'], "'m' is listed twice"),
        (['name: "m", base_path: "/m", model_platform: "x"'], "must be 'tensorflow', not 'x'"),
        (['nome: "m"'], "^Error parsing text-format tensorflow.serving.ModelServerConfig: "),
    ],
)
def test_a_file_that_cannot_be_followed_is_refused(
    entries: list[str], message: str, tmp_path: Path
) -> None:
    with pytest.raises(InvalidArgument, match=message):
        model_server_config.read(listed(tmp_path, *entries))


def test_a_file_without_a_list_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "models.config"
    with pytest.raises(InvalidArgument, match="cannot be read: No such file"):
        model_server_config.read(file)
    file.touch()
    with pytest.raises(InvalidArgument, match="has no model_config_list"):
        model_server_config.read(file)


def test_the_file_is_read_again_after_its_time_and_a_bad_one_changes_nothing(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    once = ModelServerConfigFile(listed(tmp_path, entry("a", base)), 0)
    polled = ModelServerConfigFile(listed(tmp_path, entry("a", base)), 5)

    def names(file: ModelServerConfigFile) -> list[str]:
        return [found.name for found in file.scan()]

    listed(tmp_path, entry("a", base), entry("b", base))
    now = 4.9
    assert names(polled) == ["a"]
    now = 5.0
    assert names(polled) == ["a", "b"]
    (tmp_path / "models.config").write_text("")
    now = 10.0
    assert names(polled) == ["a", "b"]
    assert names(once) == ["a"]


def test_a_gateway_follows_the_file(tmp_path: Path) -> None:
    for name in ("a", "b"):
        models.multiply(tmp_path / name / "00000007" / "model.onnx")
    file = listed(tmp_path, entry("first", tmp_path / "a"))
    flags = ("--model-config-file", str(file), "--model-config-file-poll-wait-seconds", "0.05")
    polls = ("--model-control-mode", "poll", "--repository-poll-secs", "0.05")
    repository = tmp_path / "empty"
    repository.mkdir()
    with serving(repository, *flags, *polls, wait_for="model version is ready") as gateway:

        def states() -> dict[str, str]:
            rows = httpx.post(f"http://{gateway.http}/v2/repository/index", json={}).json()
            return {
                f"{row['name']}/{row['version']}": row["state"] for row in rows if "state" in row
            }

        assert states() == {"first/7": "READY"}
        listed(tmp_path, entry("second", tmp_path / "b"))
        eventually(lambda: states().get("second/7") == "READY", "the new model")
        eventually(lambda: states().get("first/7") != "READY", "the end of the old one")
