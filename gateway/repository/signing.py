"""Ed25519 signatures (RFC 8032) of published versions, and what they cover.

    certificate.json       names the model and the SHA-256 of every file of the artifact, and of
                           samples.json where there is one
    certificate.json.sig   {"format": "modelport-signature/1", "key": "…", "signature": "…"}

The signature is over the exact bytes of the certificate. Together with the digests it covers every
file of a version except itself and ``manifest.json``, which is not protected, and the part of
``config.pbtxt`` in the certificate (``signed_config``). It does not cover label files, nor the
version's number: a release keeps its signature in another repository, and an older one can be
served again. To revoke releases, sign the others with a new key. ``cryptography`` is imported
lazily.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import io
import json
import os
import tempfile
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from modelport.gateway.errors import IntegrityError, Internal
from modelport.gateway.repository import manifest, untrusted_files
from modelport.gateway.repository.signing_keys import PrivateKey, PublicKey

CERTIFICATE = manifest.CERTIFICATE
SIGNATURE = "certificate.json.sig"
#: Requests and the checkpoint's responses, read by no server: see
#: ``exporters.requests.sample_requests``.
SAMPLES = "samples.json"
FORMAT = "modelport-signature/1"
#: The prefix of the signed bytes, so that signatures for other purposes do not fit.
DOMAIN = FORMAT.encode() + b"\0"
#: Files of a version outside of the artifact.
UNLISTED = frozenset({CERTIFICATE, SIGNATURE, SAMPLES, manifest.FILENAME})

MAX_SIGNATURE_BYTES = 4096
#: Of a name or a digest.
MAX_TEXT = 4096
COPY_BYTES = 1024 * 1024  # at a time

MALFORMED = manifest.MALFORMED


@dataclass(frozen=True, slots=True)
class VersionCertificate:
    """The files of a version by its certificate.

    Attributes:
        model: the model's name in the repository.
        files: SHA-256 in hex of every file of the artifact, by its path relative to the version.
        size_bytes: the size of all files together.
        document: the whole certificate.
        samples: SHA-256 in hex of ``samples.json``; None: the version has none.
    """

    model: str
    files: Mapping[str, str]
    size_bytes: int
    document: Mapping[str, Any]
    samples: str | None = None


def sign(version: Path, key: PrivateKey) -> Path:
    """Sign the certificate in ``version`` and return the path of the signature."""
    content = (version / CERTIFICATE).read_bytes()
    document = {
        "format": FORMAT,
        "key": key.public.fingerprint,
        "signature": base64.b64encode(key.sign(DOMAIN + content)).decode(),
    }
    path = version / SIGNATURE
    path.write_text(json.dumps(document, indent=2) + "\n")
    return path


def signer_of(version: Path) -> str | None:
    """The fingerprint of the key that signed ``version``, unverified; None: not signed.

    Raises:
        IntegrityError: the signature file is not a signature.
    """
    return _read_signature(version)[0] if os.path.lexists(version / SIGNATURE) else None


def read_certificate(version: Path, model: str) -> VersionCertificate:
    """Read the certificate of a version of ``model``, signed or not.

    Raises:
        IntegrityError: it is missing, damaged, or of another model.
    """
    return _parse_certificate(_read_certificate(version), model)


def verify_signature(version: Path, model: str, keys: Collection[PublicKey]) -> VersionCertificate:
    """Read the certificate, and verify that it is signed with one of ``keys``.

    It does not check the files; use ``verify_files`` or ``verified_copy``.

    Raises:
        IntegrityError: as above, or it is not signed, not with one of ``keys``, or was changed.
    """
    from cryptography.exceptions import InvalidSignature

    content = _read_certificate(version)
    if not os.path.lexists(version / SIGNATURE):
        raise IntegrityError(
            f"{SIGNATURE} is missing, the version is not signed; publish it with 'modelport export "
            "--sign-key'"
        )
    fingerprint, signature = _read_signature(version)
    trusted = {key.fingerprint: key for key in keys}
    if fingerprint not in trusted:
        raise IntegrityError(
            f"it is signed with key {fingerprint}, but trusted is {' or '.join(trusted) or 'none'}"
        )
    try:
        trusted[fingerprint].verify(signature, DOMAIN + content)
    except InvalidSignature as error:
        raise IntegrityError(
            f"{CERTIFICATE} does not match {SIGNATURE}; publish the version again"
        ) from error
    return _parse_certificate(content, model)


def verify_files(version: Path, certificate: VersionCertificate) -> None:
    """Check that ``version`` contains the files of ``certificate``, and no others.

    Raises:
        IntegrityError: naming the first file that is changed, missing or unlisted.
    """
    _check_names(version, certificate)
    for name, digest in certificate.files.items():
        _check_file(version, name, digest)
    if os.path.lexists(version / SAMPLES):
        if certificate.samples is None:
            raise IntegrityError(f"'{SAMPLES}' is not listed in {CERTIFICATE}")
        _check_file(version, SAMPLES, certificate.samples)


@contextlib.contextmanager
def verified_copy(version: Path, certificate: VersionCertificate) -> Iterator[Path]:
    """A private copy of the artifact in ``version``, verified while it is copied.

    So the files cannot change between check and use. The copy is in the folder for temporary files
    (``TMPDIR``) and is removed afterwards.

    Args:
        certificate: of the version; its signature is verified.

    Raises:
        IntegrityError: as ``verify_files``.
        Internal: there is no room for the copy.
    """
    _check_names(version, certificate)
    with contextlib.ExitStack() as stack:
        try:
            folder = tempfile.TemporaryDirectory(prefix="modelport-", ignore_cleanup_errors=True)
            copy = Path(stack.enter_context(folder)) / certificate.model / version.name
            copy.mkdir(parents=True)
            left = certificate.size_bytes
            for name, digest in certificate.files.items():
                left = _copy(version, copy, name, digest, left)
        except OSError as error:
            raise Internal(
                f"the verified copy cannot be written: {error.strerror}; set the environment "
                f"variable TMPDIR to a folder with {certificate.size_bytes} bytes of room"
            ) from error
        yield copy


def _copy(version: Path, copy: Path, name: str, expected: str, left: int) -> int:
    """Copy at most ``left`` bytes and return how many remain."""
    (copy / name).parent.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256()
    with _open(version, name) as reading, (copy / name).open("xb") as writing:
        while chunk := reading.read(COPY_BYTES):
            left -= len(chunk)
            if left < 0:
                raise IntegrityError(f"'{name}' is larger than {CERTIFICATE} says")
            digest.update(chunk)
            writing.write(chunk)
    _check_digest(name, digest.hexdigest(), expected)
    return left


def _check_names(version: Path, certificate: VersionCertificate) -> None:
    present = set(manifest.files_of(version)) - UNLISTED
    manifest.check_names(CERTIFICATE, certificate.files, present)


def _check_file(version: Path, name: str, digest: str) -> None:
    with _open(version, name) as file:
        _check_digest(name, hashlib.file_digest(file, "sha256").hexdigest(), digest)


def _check_digest(name: str, actual: str, expected: str) -> None:
    if actual != expected:
        raise IntegrityError(f"'{name}' does not match its SHA-256 in {CERTIFICATE}")


def certified_name(artifact: Path) -> str:
    """The model's name in the certificate beside an artifact, if that lists it; else empty."""
    with contextlib.suppress(IntegrityError):  # a damaged one is reported when the model loads
        certificate = _parse_certificate(_read_certificate(artifact.parent), None)
        if any(name.partition("/")[0] == artifact.name for name in certificate.files):
            return certificate.model
    return ""


def _parse_certificate(content: bytes, model: str | None) -> VersionCertificate:
    try:
        document = json.loads(content)
        json.dumps(document, ensure_ascii=False).encode()  # or it could not be shown
        artifact, samples = document["artifact"], document.get("samples")
        certificate = VersionCertificate(
            model=_text(document["model"]["name"]),
            files={name: _text(file["sha256"]) for name, file in artifact["files"].items()},
            size_bytes=artifact["size_bytes"],
            document=document,
            samples=_text(samples["sha256"]) if samples else None,
        )
        size = certificate.size_bytes
        if type(size) is not int or not 0 <= size <= manifest.MAX_FILE_BYTES:
            raise ValueError(size)
    except MALFORMED as error:
        raise IntegrityError(
            f"{CERTIFICATE} is not a certificate; publish the version again"
        ) from error
    if model is not None and certificate.model != model:
        raise IntegrityError(
            f"{CERTIFICATE} is of model '{certificate.model}', not '{model}'; publish the model "
            "under its own name"
        )
    return certificate


def _text(value: Any) -> str:
    if not isinstance(value, str) or len(value) > MAX_TEXT:
        raise TypeError(value)
    return value


def _read_signature(version: Path) -> tuple[str, bytes]:
    """The fingerprint of the key and the signature, both unverified."""
    try:
        document = json.loads(_read(version, SIGNATURE, MAX_SIGNATURE_BYTES))
        fingerprint = document["key"]
        signature = base64.b64decode(document["signature"], None, True)
        if document["format"] != FORMAT or not manifest.SHA256.fullmatch(fingerprint):
            raise ValueError(document["format"])
    except MALFORMED as error:
        raise IntegrityError(
            f"{SIGNATURE} is not a signature; publish the version again"
        ) from error
    return fingerprint, signature


def _read_certificate(version: Path) -> bytes:
    return _read(version, CERTIFICATE, untrusted_files.MAX_CERTIFICATE_BYTES)


def _read(version: Path, name: str, most: int) -> bytes:
    if not os.path.lexists(version / name):
        raise IntegrityError(f"{name} is missing; publish the version with 'modelport export'")
    with _open(version, name) as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise IntegrityError(f"{name} is larger than {most} bytes")
    return content


def _open(version: Path, name: str) -> io.BufferedReader:
    """Open a regular file for reading, without blocking on a pipe in its place."""
    try:
        return untrusted_files.open_file(version / name)
    except OSError as error:
        raise IntegrityError(f"'{name}' cannot be read: {error.strerror}") from error
