"""The checkpoint's answers in a published version: written by an export, or by a sample later."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result
from torch import nn

from modelport.exporters.cli.keygen import keygen
from modelport.exporters.cli.sample import sample
from modelport.exporters.requests import sample_requests
from modelport.exporters.requests.random_inputs import draw
from modelport.gateway.errors import IntegrityError
from modelport.gateway.repository import manifest, signing, signing_keys
from modelport.gateway.types import Datatype, ModelSignature, TensorSpec
from modelport.loadtests.load import payloads

Invoke = Callable[..., Result]
WIDE = ModelSignature(
    inputs=(TensorSpec("x", Datatype.FP32, (1000,)),),
    outputs=(TensorSpec("y", Datatype.FP32, (1,)),),
    max_batch_size=4,
)


def verify(version: Path) -> None:
    assert manifest.verify(version)
    signing.verify_files(version, signing.read_certificate(version, version.parent.name))


def strip(version: Path) -> None:
    """Make ``version`` one that an older modelport published."""
    (version / sample_requests.FILENAME).unlink()
    path = version / signing.CERTIFICATE
    certificate = json.loads(path.read_text())
    del certificate["samples"]
    path.write_text(json.dumps(certificate))
    manifest.write(version)


def test_an_export_records_what_the_checkpoint_itself_answers(
    invoke: Invoke, fraud: nn.Module, fraud_checkpoint: Path, tmp_path: Path
) -> None:
    assert invoke(fraud_checkpoint, "--format", "torchscript").exit_code == 0
    version = tmp_path / "repository" / "fraud" / "1"
    verify(version)
    found = payloads.read(version / sample_requests.FILENAME)
    told = json.loads((version / signing.CERTIFICATE).read_text())["samples"]
    assert told["requests"] == len(found.requests) > 1
    assert found.expected is not None
    for request, expected in zip(found.requests, found.expected, strict=True):
        tokens, lengths = (
            torch.from_numpy(request[name].copy()) for name in ("tokens", "seq_lens")
        )
        right = fraud(tokens, lengths.squeeze(1)).detach().numpy()
        assert np.array_equal(expected["probability"].ravel(), right.ravel())


def test_a_record_that_was_changed_or_slipped_in_is_refused(
    invoke: Invoke, fraud_checkpoint: Path, tmp_path: Path
) -> None:
    assert invoke(fraud_checkpoint, "--format", "torchscript").exit_code == 0
    version = tmp_path / "repository" / "fraud" / "1"
    path = version / sample_requests.FILENAME
    path.write_text(path.read_text().replace('"seq_lens"', '"seq-lens"', 1))
    with pytest.raises(IntegrityError, match=r"'samples.json' does not match"):
        manifest.verify(version)
    manifest.write(version)  # which anybody can
    with pytest.raises(IntegrityError, match=r"'samples.json' does not match its SHA-256 in cert"):
        verify(version)
    kept = path.read_bytes()
    strip(version)
    path.write_bytes(kept)
    manifest.write(version)
    with pytest.raises(IntegrityError, match=r"'samples.json' is not listed in certificate.json"):
        verify(version)


def test_the_size_of_a_record_is_bounded(tmp_path: Path) -> None:
    def record(most_bytes: int) -> dict[str, Any] | None:
        return sample_requests.record_version(
            tmp_path,
            WIDE,
            draw,
            lambda inputs: {"y": inputs["x"].sum(axis=1, keepdims=True)},
            (1e-6, 1e-5),
            most_bytes=most_bytes,
        )

    assert record(5_000) is None  # one request alone has 4,000 bytes, in base64 more
    assert not list(tmp_path.iterdir())
    told = record(20_000)
    assert told is not None
    assert 1 < told["requests"] < 10
    assert (tmp_path / sample_requests.FILENAME).stat().st_size < 21_000


@pytest.mark.thorough
def test_a_version_without_a_record_gets_one_later(
    invoke: Invoke, fraud_checkpoint: Path, tmp_path: Path
) -> None:
    assert invoke(fraud_checkpoint, "--format", "torchscript").exit_code == 0
    version = tmp_path / "repository" / "fraud" / "1"
    before = payloads.read(version / sample_requests.FILENAME)
    strip(version)
    done = CliRunner().invoke(sample, [str(version.parent)])
    assert done.exit_code == 0, done.output
    verify(version)
    after = payloads.read(version / sample_requests.FILENAME)
    assert before.expected is not None
    assert after.expected is not None
    assert len(after.requests) == sample_requests.MOST_REQUESTS
    for one, other in zip(before.expected, after.expected, strict=False):
        assert np.allclose(one["probability"], other["probability"], atol=1e-5)
    again = CliRunner().invoke(sample, [str(version)])
    assert again.exit_code == 2
    assert "exists; --output writes" in again.output


@pytest.mark.thorough
def test_a_signed_version_gets_a_record_with_its_key_only(
    invoke: Invoke, fraud_checkpoint: Path, tmp_path: Path
) -> None:
    prefix = tmp_path / "release"
    assert CliRunner().invoke(keygen, ["--output", str(prefix)]).exit_code == 0
    key = f"{prefix}.key"
    assert invoke(fraud_checkpoint, "--format", "torchscript", "--sign-key", key).exit_code == 0
    version = tmp_path / "repository" / "fraud" / "1"
    strip(version)
    refused = CliRunner().invoke(sample, [str(version)])
    assert refused.exit_code == 2
    assert "is signed" in refused.output
    assert "--sign-key" in refused.output
    assert not (version / sample_requests.FILENAME).exists()
    assert CliRunner().invoke(sample, [str(version), "--sign-key", key]).exit_code == 0
    public = signing_keys.load_public_key(Path(f"{prefix}.pub"))
    certificate = signing.verify_signature(version, "fraud", [public])
    signing.verify_files(version, certificate)
    assert certificate.samples is not None


def test_a_checkpoint_has_no_folder_for_its_answers(fraud_checkpoint: Path) -> None:
    done = CliRunner().invoke(sample, [str(fraud_checkpoint), "--model", "fraud"])
    assert done.exit_code == 2
    assert "with --output" in done.output
