"""A signed candidate: who signed it and what was signed is shown before anything is measured."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
from click.testing import CliRunner

from modelport.gateway.repository import manifest, signing, signing_keys
from modelport.gateway.repository.signing_keys import PrivateKey
from modelport.gateway.slo import CertificateSettings
from modelport.loadtests.checks import CheckStatus
from modelport.loadtests.cli import gate as cli
from modelport.loadtests.gate import baseline_and_candidate, integrity
from modelport.loadtests.gate.baseline_and_candidate import Published
from tests.loadtests.gating.models import published


@dataclass(frozen=True)
class Signed:
    """A model whose version 2 is signed; files of the key that did it, and of another."""

    model: Path
    right: Path
    wrong: Path


@pytest.fixture
def signed(tmp_path: Path) -> Signed:
    found = Signed(
        published(tmp_path / "repository" / "tiny", versions=2),
        tmp_path / "right.pub",
        tmp_path / "wrong.pub",
    )
    key, other = PrivateKey.generate(), PrivateKey.generate()
    signing.sign(found.model / "2", key)
    manifest.write(found.model / "2")
    found.right.write_bytes(key.public.pem())
    found.wrong.write_bytes(other.public.pem())
    return found


def refused(signed: Signed, key: Path) -> str:
    """The reason that a gate on version 2 failed without measuring."""
    slo, report = signed.right.with_name("slo.toml"), signed.right.with_name("gate.json")
    slo.write_text("[certificate]\npublic_keys = ['right.pub']" if key == signed.right else "")
    given = [] if key == signed.right else ["--public-key", str(key)]
    sides_ = [str(signed.model / number) for number in ("1", "2")]
    told = CliRunner().invoke(
        cli.gate, [*sides_, "--slo", str(slo), "--json-report", str(report), *given]
    )
    assert told.exit_code == 1, told.output
    document = json.loads(report.read_text())
    assert (document["status"], document["rounds"]) == ("fail", 0)
    assert document["runs"] == {"baseline": [], "candidate": []}
    (failed,) = (one for one in document["questions"] if one["status"] == "fail")
    return str(failed["detail"])


def test_the_key_that_signed_it_passes_and_is_named(signed: Signed) -> None:
    side = baseline_and_candidate.side(str(signed.model / "2"))
    assert isinstance(side, Published)
    found = integrity.questions(side, CertificateSettings(public_keys=(signed.wrong, signed.right)))
    assert {one.status for one in found} == {CheckStatus.PASS}
    (signature,) = (one for one in found if one.name == "signature")
    assert signing_keys.load_public_key(signed.right).fingerprint in signature.detail


def test_another_key_fails_unmeasured(signed: Signed) -> None:
    assert "it is signed with key" in refused(signed, signed.wrong)


def test_an_unsigned_version_fails_unmeasured(signed: Signed) -> None:
    (signed.model / "2" / signing.SIGNATURE).unlink()
    manifest.write(signed.model / "2")
    assert "not signed" in refused(signed, signed.right)


@pytest.mark.parametrize("file", ["model.onnx", "certificate.json"])
def test_what_was_changed_after_signing_fails_unmeasured(signed: Signed, file: str) -> None:
    """Also where whoever changed it wrote the manifest anew, which anyone can."""
    path = signed.model / "2" / file
    path.write_bytes(path.read_bytes() + b" ")
    manifest.write(signed.model / "2")
    said = refused(signed, signed.right)
    assert file in said


def test_a_signature_of_another_version_fails_unmeasured(signed: Signed, tmp_path: Path) -> None:
    other = published(tmp_path / "other" / "tiny", factor=3.0)
    for name in ("model.onnx", "certificate.json"):
        shutil.copy(other / "1" / name, signed.model / "2" / name)
    manifest.write(signed.model / "2")
    assert "certificate.json does not match certificate.json.sig" in refused(signed, signed.right)
