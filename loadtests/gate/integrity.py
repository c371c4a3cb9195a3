"""What a candidate's folder proves before anything is measured: files, signature, certificate."""

from __future__ import annotations

import json
from typing import Any

from exporters.errors import UsageError
from loadtests.command import INTEGRITY, INTERRUPTED, Failed, modelport
from loadtests.gate.decision import Question
from loadtests.gate.sides import Published
from loadtests.gate.slo import Certificate
from loadtests.report.checks import Status

CERTIFICATE = "certificate.json"


def questions(candidate: Published, wanted: Certificate) -> tuple[Question, ...]:
    """The candidate's files against its manifest, its certificate, its signature.

    ``modelport verify --integrity`` looks at them, in a process of its own.

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
    """The files are not what manifest, certificate and signature say."""
    return _failed("integrity of the files", problem)


def read(published: Published) -> dict[str, Any]:
    """The certificate; nothing where there is none, or none that can be read."""
    try:
        found = json.loads((published.path / CERTIFICATE).read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _content(certificate: dict[str, Any], wanted: Certificate) -> list[Question]:
    parity = certificate.get("parity")
    passed = isinstance(parity, dict) and parity.get("passed") is True
    detail = f"{parity.get('samples')} samples" if passed and isinstance(parity, dict) else ""
    found = [
        _passed("parity", detail)
        if passed
        else _failed("parity", "the certificate does not say that parity passed; export it again")
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
    return Question(name, "", Status.PASS, detail=detail)


def _failed(name: str, detail: str) -> Question:
    return Question(name, "", Status.FAIL, detail=detail)
