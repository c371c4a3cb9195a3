"""``modelport keygen``, ``export --sign-key``, and a gateway that asks for the signature."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result
from torch import nn

from modelport.exporters.cli.keygen import keygen
from modelport.gateway.repository import manifest, signing, signing_keys
from modelport.gateway.repository.signing_keys import PrivateKey
from tests.faults import probes
from tests.server import serving

Invoke = Callable[..., Result]
Snapshot = Callable[[Path], dict[str, str]]


def make_keys(prefix: object) -> Result:
    return CliRunner().invoke(keygen, ["--output", str(prefix)])


@pytest.fixture
def keys(tmp_path: Path) -> tuple[Path, Path]:
    assert make_keys(tmp_path / "release").exit_code == 0
    return tmp_path / "release.key", tmp_path / "release.pub"


def line_of(result: Result, code: int) -> str:
    assert result.exit_code == code, result.output
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1, result.stderr
    return lines[0].removeprefix("modelport: error: ")


# -- keygen ---------------------------------------------------------------------------------------


def test_a_pair_of_keys_is_made_and_belongs_together(tmp_path: Path) -> None:
    result = make_keys(tmp_path / "a.b")
    private, public = tmp_path / "a.b.key", tmp_path / "a.b.pub"
    key = signing_keys.load_private_key(private)
    assert signing_keys.load_public_key(public) == key.public
    for said in (str(private), str(public), key.public.fingerprint):
        assert said in result.stdout
    assert private.read_text().startswith("-----BEGIN PRIVATE KEY-----\n")
    assert public.read_text().startswith("-----BEGIN PUBLIC KEY-----\n")


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_only_the_owner_can_read_the_private_key(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        make_keys(tmp_path / "release")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "release.key").stat().st_mode) == 0o600


@pytest.mark.parametrize("suffix", [".key", ".pub"])
def test_no_key_is_ever_overwritten_and_no_half_pair_left(
    tmp_path: Path, suffix: str, snapshot: Snapshot
) -> None:
    (tmp_path / f"release{suffix}").write_text("precious")
    before = snapshot(tmp_path)
    assert "exists and is not overwritten" in line_of(make_keys(tmp_path / "release"), 2)
    assert snapshot(tmp_path) == before
    (tmp_path / f"release{suffix}").unlink()
    (tmp_path / f"release{suffix}").symlink_to(tmp_path / "elsewhere")
    assert "exists and is not overwritten" in line_of(make_keys(tmp_path / "release"), 2)
    assert not (tmp_path / "elsewhere").exists()


def test_a_prefix_that_is_no_place_for_files_is_one_line(tmp_path: Path) -> None:
    for prefix in (tmp_path, f"{tmp_path}/new/", "", ".."):
        assert "is a folder; give a prefix" in line_of(make_keys(prefix), 2)
    assert "No such file or directory" in line_of(make_keys(tmp_path / "new" / "release"), 2)
    assert list(tmp_path.iterdir()) == []


def test_a_prefix_that_is_no_text_is_a_prefix(tmp_path: Path) -> None:
    prefix = os.fsdecode(os.fsencode(tmp_path) + b"/k\xff")
    assert make_keys(prefix).exit_code == 0
    assert signing_keys.load_private_key(Path(f"{prefix}.key"))


# -- export ---------------------------------------------------------------------------------------


def test_a_signed_export_is_served_where_its_signature_is_required(
    invoke: Invoke, keys: tuple[Path, Path], tmp_path: Path
) -> None:
    private, public = keys
    checkpoint = tmp_path / "fraud.pt"
    torch.save(nn.PReLU().state_dict(), checkpoint)
    options = ("--input", "x:FP32[2]", "--name", "fraud", "--sign-key", str(private))
    assert invoke(checkpoint, *options, model="torch.nn:PReLU").exit_code == 0
    repository = tmp_path / "repository"
    signed, unsigned = repository / "fraud" / "1", repository / "fraud" / "2"
    assert manifest.verify(signed)
    shutil.copytree(signed, unsigned)
    (unsigned / signing.SIGNATURE).unlink()
    manifest.write(unsigned)
    key = signing_keys.load_public_key(public)
    certificate = signing.verify_signature(signed, "fraud", [key])
    signing.verify_files(signed, certificate)
    assert set(certificate.files) == {"model.onnx"}
    with serving(repository, "--require-signature", str(public)) as gateway:
        states = probes.index(gateway, "fraud")
        assert states["1"] == ("READY", "")
        assert states["2"][0] == "UNAVAILABLE"
        assert "certificate.json.sig is missing" in states["2"][1]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "cannot be read: Is a directory"),
        (b"", "is not a key in PEM"),
        (b"\xff\x00", "is not a key in PEM"),
        (PrivateKey(bytes(32)).public.pem(), "is a public key; give its private key"),
    ],
)
def test_a_key_that_cannot_sign_is_one_line_and_nothing_is_published(
    content: bytes | None, reason: str, invoke: Invoke, fraud_checkpoint: Path, tmp_path: Path
) -> None:
    path = tmp_path / "bad.key"
    if content is None:
        path.mkdir()
    else:
        path.write_bytes(content)
    line = line_of(invoke(fraud_checkpoint, "--sign-key", str(path)), 2)
    assert line.startswith(f"private key '{path}' {reason}")
    assert not (tmp_path / "repository").exists()
