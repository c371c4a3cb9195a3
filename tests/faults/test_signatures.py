"""``--require-signature``: nothing is loaded that was not signed with one of the keys."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from modelport.gateway.backends.base import Artifact
from modelport.gateway.backends.fake import FakeBackend
from modelport.gateway.models.manager import ModelManager
from modelport.gateway.repository import config, manifest, signed_config, signing
from modelport.gateway.repository.signing_keys import PrivateKey
from modelport.gateway.settings import Settings
from tests import models
from tests.commands import modelport
from tests.faults import probes
from tests.faults.probes import EXPLICIT, POLL, ChangingRepository
from tests.polling import eventually
from tests.server import serving

ALL = "version_policy { all { } }"


@pytest.fixture(scope="module")
def key() -> PrivateKey:
    return PrivateKey.generate()


@pytest.fixture
def require(key: PrivateKey, tmp_path: Path) -> tuple[str, str]:
    """The flag with the public key."""
    (tmp_path / "release.pub").write_bytes(key.public.pem())
    return "--require-signature", str(tmp_path / "release.pub")


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the gateway's verified copies."""
    (tmp_path / "scratch").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "scratch"))
    return tmp_path / "scratch"


def certify(version: Path, model: str = "m") -> None:
    files = [name for name in manifest.files_of(version) if name not in signing.UNLISTED]
    artifact = {
        "format": "onnx",
        "size_bytes": sum((version / name).stat().st_size for name in files),
        "files": {name: {"sha256": manifest.sha256_of(version / name)} for name in files},
    }
    path = version.parent / config.FILENAME
    text = path.read_text() if path.exists() else 'backend: "onnxruntime"'
    certificate = {
        "model": {"name": model},
        "configuration": signed_config.document(
            config.complete(config.parse(text), version.parent.name)
        ),
        "artifact": artifact,
    }
    (version / signing.CERTIFICATE).write_text(json.dumps(certificate))


def sign(version: Path, key: PrivateKey, model: str = "m") -> Path:
    certify(version, model)
    signing.sign(version, key)
    manifest.write(version)
    return version


def test_only_what_is_signed_with_the_key_is_served(
    repository: ChangingRepository, key: PrivateKey, require: tuple[str, str], scratch: Path
) -> None:
    sign(repository.version(1.0, 1, config=ALL), key)
    repository.version(2.0, 2)
    sign(repository.version(3.0, 3), PrivateKey.generate())
    tampered = sign(repository.version(4.0, 4), key)
    models.multiply(tampered / "model.onnx", 40.0)
    manifest.write(tampered)
    certified = sign(repository.version(5.0, 5), key)
    models.multiply(certified / "model.onnx", 50.0)
    certify(certified)
    manifest.write(certified)
    sign(repository.version(6.0, 6), key, model="another")
    added = sign(repository.version(7.0, 7), key)
    (added / "extra.so").write_bytes(b"")
    manifest.write(added)
    bare = sign(repository.version(8.0, 8), key)
    (bare / signing.CERTIFICATE).unlink()
    manifest.write(bare)
    damaged = sign(repository.version(9.0, 9), key)
    probes.flip(damaged / "model.onnx")
    reasons = {
        2: "certificate.json is missing",
        3: "trusted is " + key.public.fingerprint,
        4: "'model.onnx' does not match its SHA-256 in certificate.json",
        5: "certificate.json does not match certificate.json.sig",
        6: "is of model 'another', not 'm'",
        7: "'extra.so' is not listed in certificate.json",
        8: "certificate.json is missing",
        9: "does not match its SHA-256 in manifest.json",
    }
    with serving(repository.root, *require) as gateway:
        assert probes.answer(gateway) == ("1", 1.0)
        for number, reason in reasons.items():
            assert probes.state(gateway, number) == "UNAVAILABLE"
            assert reason in probes.reason(gateway, number)
            assert probes.ask(gateway, number=number).status_code == 404
        assert str(repository.root.parent) not in str(probes.index(gateway))
        assert list(scratch.glob("modelport-*")) == []


def test_a_load_request_is_answered_with_the_reason_and_mended_by_signing(
    repository: ChangingRepository, key: PrivateKey, require: tuple[str, str]
) -> None:
    sign(repository.version(1.0, 1), key)
    version = repository.version(2.0, 2)
    certify(version)
    manifest.write(version)
    with serving(repository.root, *require, *EXPLICIT) as gateway:
        reply = probes.load(gateway)
        assert reply.status_code == 400
        assert "certificate.json.sig is missing, the version is not signed" in reply.text
        assert probes.answer(gateway) == ("1", 1.0)
        sign(version, key)
        assert probes.load(gateway).status_code == 200
        assert probes.answer(gateway) == ("2", 2.0)


def test_a_served_version_that_is_tampered_with_serves_on_as_it_was(
    repository: ChangingRepository, key: PrivateKey, require: tuple[str, str]
) -> None:
    version = sign(repository.version(2.0, 1), key)
    with serving(repository.root, *require, *POLL) as gateway:
        assert probes.answer(gateway) == ("1", 2.0)
        models.multiply(version / "model.onnx", 3.0)
        manifest.write(version)
        eventually(lambda: "in certificate.json" in probes.reason(gateway), "the change refused")
        assert probes.answer(gateway) == ("1", 2.0)


async def test_what_is_changed_between_the_check_and_the_load_is_not_loaded(
    repository: ChangingRepository, key: PrivateKey
) -> None:
    version = sign(repository.version(2.0, 1), key)
    original, loaded = (version / "model.onnx").read_bytes(), []

    def load(artifact: Artifact) -> FakeBackend:
        models.multiply(version / "model.onnx", 3.0)
        loaded.append((artifact.path / "model.onnx").read_bytes())
        return FakeBackend(artifact)

    settings = Settings((repository.root,), require_signature=(key.public,))
    manager = ModelManager(settings, lambda name: load)
    await manager.start()
    assert manager.versions("m") == [1]
    assert loaded == [original]
    await manager.stop()


def test_any_of_several_keys_will_do(
    repository: ChangingRepository, key: PrivateKey, require: tuple[str, str], tmp_path: Path
) -> None:
    successor = PrivateKey.generate()
    (tmp_path / "next.pub").write_bytes(successor.public.pem())
    sign(repository.version(2.0, 1, model="old"), key, "old")
    sign(repository.version(3.0, 1, model="new"), successor, "new")
    both = ("--require-signature", str(tmp_path / "next.pub"))
    with serving(repository.root, *require, *both) as gateway:
        assert probes.answer(gateway, "old") == ("1", 2.0)
        assert probes.answer(gateway, "new") == ("1", 3.0)


def test_weights_in_a_file_of_their_own_are_served_after_the_copy_is_gone(
    repository: ChangingRepository, key: PrivateKey, require: tuple[str, str], scratch: Path
) -> None:
    """And a signed file that is no model says so, without a path of the copy."""
    folder = repository.root / "m"
    models.external(folder / "1" / "model.onnx", "w.bin")
    (folder / "1" / "w.bin").write_bytes(b"\0\0\x80\x3f" * 4)  # 1.0
    repository.config(
        'backend: "onnxruntime" input { name: "x" data_type: TYPE_FP32 dims: 4 } '
        'output { name: "y" data_type: TYPE_FP32 dims: 4 }'
    )
    sign(folder / "1", key)
    (repository.root / "broken" / "1").mkdir(parents=True)
    (repository.root / "broken" / "1" / "model.onnx").write_bytes(b"not a model")
    sign(repository.root / "broken" / "1", key, "broken")
    with serving(repository.root, *require) as gateway:
        body = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [4], "data": [0, 1, 2, 3]}]}
        reply = probes.post(gateway, "/v2/models/m/infer", body)
        assert reply.json()["outputs"][0]["data"] == [1.0, 2.0, 3.0, 4.0]
        reason = probes.reason(gateway, 1, "broken")
        assert "'model.onnx' does not load" in reason
        assert str(scratch) not in reason
        assert list(scratch.glob("modelport-*")) == []


def test_a_version_without_a_manifest_passes_by_its_signature_unless_both_are_required(
    repository: ChangingRepository, key: PrivateKey, require: tuple[str, str]
) -> None:
    version = sign(repository.version(2.0, 1), key)
    (version / manifest.FILENAME).unlink()
    with serving(repository.root, *require) as gateway:
        assert probes.answer(gateway) == ("1", 2.0)
        assert [e for e in gateway.logs if e.get("level") not in ("info", None)] == []
    with serving(repository.root, *require, "--require-manifest") as gateway:
        assert "--require-manifest" in probes.reason(gateway)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "cannot be read: No such file or directory"),
        (b"", "is not a key in PEM"),
        (b"\xff\x00", "is not a key in PEM"),
        ("private", "is a private key; give its public key"),
    ],
)
def test_an_invalid_key_file_ends_the_command_before_it_listens(
    content: bytes | str | None, reason: str, tmp_path: Path, key: PrivateKey
) -> None:
    path = tmp_path / "release.pub"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else key.pem())
    run = modelport("serve", "--model-repository", str(tmp_path), "--require-signature", str(path))
    assert (run.returncode, run.stdout) == (2, "")
    assert run.stderr.startswith(f"modelport: error: public key '{path}' {reason}")
    assert run.stderr.count("\n") == 1
