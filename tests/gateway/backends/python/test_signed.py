"""Signed Python models: published with a certificate of their files, and served without a flag."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import httpx
import pytest
from click.testing import CliRunner, Result

from modelport.cli import modelport
from modelport.gateway.repository import config as configuration
from tests.gateway.backends.python import python_models
from tests.gateway.backends.python.asking import ask
from tests.server import serving

CODE = "import helper\nreturn [reply(helper.VALUE)]"


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(modelport, [str(each) for each in arguments])


@pytest.fixture
def published(tmp_path: Path) -> Path:
    """A repository with a signed version, and the key beside it."""
    folder = python_models.coded(tmp_path / "source", "act")
    (folder / "helper.py").write_text("VALUE = 3")
    (folder / "__pycache__").mkdir()
    assert run("keygen", "--output", tmp_path / "mine").exit_code == 0
    done = run(
        "publish", folder.parent, "--repository", tmp_path / "repository", "--sign-key",
        tmp_path / "mine.key",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    return tmp_path / "repository"


def test_a_signed_version_needs_no_flag_and_is_loaded_from_a_copy(published: Path) -> None:
    version = published / "act" / "1"
    assert sorted(path.name for path in version.iterdir()) == [
        "certificate.json", "certificate.json.sig", "helper.py", "manifest.json", "model.py",
    ]  # fmt: skip
    (published / "act" / "beside.py").write_text("raise SystemExit")
    with serving(published, "--require-signature", str(published.parent / "mine.pub")) as gateway:
        assert ask(gateway, CODE)[1]["outputs"][0]["data"] == [3.0]
        (version / "helper.py").write_text("VALUE = 4")
        assert ask(gateway, "os._exit(1)")[0] == 503
        assert ask(gateway, CODE)[1]["outputs"][0]["data"] == [3.0]
        _, text = ask(gateway, "import beside")
        assert "No module named 'beside'" in text


def test_signed_files_of_a_request_are_served_and_others_refused(
    published: Path, tmp_path: Path
) -> None:
    version, key = published / "act" / "1", published.parent / "mine.pub"
    files = {f"file:1/{each.name}": each.read_bytes() for each in version.iterdir()}
    text = (version.parent / "config.pbtxt").read_text()
    config = json.dumps(configuration.to_json(configuration.parse(text)))
    flags = ("--model-control-mode", "explicit", "--require-signature", str(key))
    (tmp_path / "empty").mkdir()
    with serving(tmp_path / "empty", *flags) as gateway:

        def load(**changed: bytes) -> str:
            parameters = {
                "config": config,
                **{
                    name: base64.b64encode(content).decode()
                    for name, content in {**files, **changed}.items()
                    if content
                },
            }
            url = f"http://{gateway.http}/v2/repository/models/act/load"
            return httpx.post(url, json={"parameters": parameters}, timeout=60).text

        assert "certificate.json" in load(**{"file:1/certificate.json.sig": b""})
        assert "helper.py" in load(**{"file:1/helper.py": b"VALUE = 9"})
        assert load() == ""
        assert ask(gateway, CODE)[1]["outputs"][0]["data"] == [3.0]
        assert ask(gateway, "os._exit(1)")[0] == 503  # the next process reads the files again
        assert ask(gateway, CODE)[1]["outputs"][0]["data"] == [3.0]
        assert gateway.terminate() == 0


@pytest.mark.parametrize("name", ["helper.py", "model.py", "new.py"])
def test_a_changed_or_added_file_is_refused(published: Path, name: str) -> None:
    (published / "act" / "1" / name).write_text("VALUE = 5")
    (published / "act" / "1" / "manifest.json").unlink()
    with serving(
        published, "--require-signature", str(published.parent / "mine.pub"),
        wait_for="model version is not served",
    ) as gateway:  # fmt: skip
        reason = gateway.wait_for("model version is not served")["reason"]
    assert f"'{name}'" in reason
    assert "certificate.json" in reason


def test_an_unsigned_version_is_published_with_a_manifest_and_still_needs_the_flag(
    tmp_path: Path,
) -> None:
    folder = python_models.coded(tmp_path / "source", "act")
    (folder.parent / "config.pbtxt").unlink()
    done = run("publish", folder, "--repository", tmp_path / "repository")
    assert done.exit_code == 0, done.output
    with serving(tmp_path / "repository", wait_for="model version is not served") as gateway:
        assert "--allow-python" in gateway.wait_for("model version is not served")["reason"]


def test_other_models_are_not_signed_by_publishing(published: Path, tmp_path: Path) -> None:
    done = run(
        "publish", published / "act", "--repository", tmp_path / "other", "--sign-key",
        tmp_path / "mine.key",
    )  # fmt: skip
    assert done.exit_code == 2
    assert "has a certificate" in done.output


def test_a_signed_pipeline_is_served(published: Path) -> None:
    source, key = published.parent / "pipeline", published.parent / "mine.key"
    (source / "1").mkdir(parents=True)
    text = 'inputs = ["code"]\noutputs = { y = "a.y" }\n'
    text += '[steps.a]\nmodel = "act"\ninputs = { code = "code" }\n'
    (source / "1" / "pipeline.toml").write_text(text)
    done = run("publish", source, "--repository", published, "--sign-key", key)
    assert done.exit_code == 0, done.output
    with serving(published, "--require-signature", str(published.parent / "mine.pub")) as gateway:
        assert ask(gateway, CODE, "pipeline")[1]["outputs"][0]["data"] == [3.0]
