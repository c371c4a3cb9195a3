"""Integrity of a candidate's folder, checked before measuring: files, signature, certificate."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from modelport.gateway.errors import UsageError
from modelport.gateway.repository import untrusted_files
from modelport.gateway.slo import CertificateSettings
from modelport.loadtests.checks import CheckStatus
from modelport.loadtests.gate.baseline_and_candidate import Published
from modelport.loadtests.gate.decision import Question
from modelport.loadtests.load import payloads
from modelport.loadtests.load.payloads import BadPayload, Payloads
from modelport.loadtests.system.modelport_command import INTEGRITY, INTERRUPTED, Failed, modelport

CERTIFICATE = "certificate.json"
SAMPLES = "samples.json"


def questions(candidate: Published, wanted: CertificateSettings) -> tuple[Question, ...]:
    """Check the candidate's files against its manifest, its certificate and its signature.

    ``modelport verify --integrity`` does so in its own process.

    Raises:
        UsageError: a public key cannot be read.
    """
    keys = [part for key in wanted.public_keys for part in ("--public-key", str(key))]
    if not (candidate.path / CERTIFICATE).is_file():
        if wanted.required or keys:
            return (_failed("certificate", f"{candidate.path / CERTIFICATE} is missing"),)
        return ()
    try:
        said = modelport(["verify", str(candidate.path), "--integrity", "--json", *keys])
    except Failed as error:
        if error.status == INTERRUPTED:
            raise KeyboardInterrupt from error
        if error.status != INTEGRITY:
            raise UsageError(f"the candidate cannot be verified: {error}") from error
        return (failed(str(error)),)
    found = json.loads(said)
    passed = [_passed("integrity of the files", f"{found['files']} files as in the manifest")]
    if keys:
        passed.append(_passed("signature", f"key {found['signature']['key']}"))
    certificate = read(candidate)
    return (*passed, *_content(certificate, wanted))


def failed(problem: str) -> Question:
    """The question about files that do not match manifest, certificate or signature."""
    return _failed("integrity of the files", problem)


def read(published: Published) -> dict[str, Any]:
    """Read the certificate; empty if it is missing or cannot be read."""
    try:
        found = json.loads(
            untrusted_files.read_text(
                published.path / CERTIFICATE, untrusted_files.MAX_CERTIFICATE_BYTES
            )
        )
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def recording(side: Published) -> Payloads | None:
    """The recorded answers of the checkpoint of ``side``; None if it has none.

    Raises:
        UsageError: they do not match the certificate.
    """
    listed, path = read(side).get("samples"), side.path / SAMPLES
    if not isinstance(listed, dict):
        return None
    try:
        with untrusted_files.open_file(path) as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != listed.get("sha256"):
                raise UsageError(f"'{path}' does not match its certificate")
        return payloads.read(path)
    except OSError as error:
        raise UsageError(f"'{path}' cannot be read: {error.strerror}") from error
    except BadPayload as error:
        raise UsageError(str(error)) from error


def _content(certificate: dict[str, Any], wanted: CertificateSettings) -> list[Question]:
    parity = certificate.get("parity")
    passed = isinstance(parity, dict) and parity.get("passed") is True
    detail = f"{parity.get('samples')} samples" if passed and isinstance(parity, dict) else ""
    found = [
        _passed("parity", detail)
        if passed
        else _failed(
            "parity", "the certificate does not state that parity passed; export the model again"
        )
    ]
    for name, required, section, key in (
        ("model of the certificate", wanted.model, "model", "name"),
        ("checkpoint of the certificate", wanted.checkpoint_sha256, "checkpoint", "sha256"),
    ):
        if required is None:
            continue
        part = certificate.get(section)
        has = part.get(key) if isinstance(part, dict) else None
        if has == required:
            found.append(_passed(name, required))
        else:
            found.append(_failed(name, f"it is {has!r}, not '{required}'"))
    return found


def _passed(name: str, detail: str) -> Question:
    return Question(name, "", CheckStatus.PASS, detail=detail)


def _failed(name: str, detail: str) -> Question:
    return Question(name, "", CheckStatus.FAIL, detail=detail)
