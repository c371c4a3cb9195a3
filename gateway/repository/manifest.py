"""``manifest.json``: the SHA-256 of every file of a published version.

    {"format": "modelport-manifest/1", "files": {"model.onnx": {"sha256": "…", "size_bytes": 123}}}

Written by the exporters as the last file of a version, verified by the gateway before it loads one.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Set
from pathlib import Path
from typing import Any

from modelport.gateway.errors import IntegrityError
from modelport.gateway.repository import untrusted_files

FILENAME = "manifest.json"
#: The file with the exporters' evidence (``signing``).
CERTIFICATE = "certificate.json"
FORMAT = "modelport-manifest/1"
MAX_MANIFEST_BYTES = 16 * 1024 * 1024
MAX_FILE_BYTES = 2**63 - 1
SHA256 = re.compile(r"[0-9a-f]{64}")
#: Errors of a parser that meets a document of another shape.
MALFORMED = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError)


def sha256_of(path: Path) -> str:
    """Raises ``OSError`` unless it is a readable regular file."""
    with untrusted_files.open_file(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def files_of(version: Path) -> Iterator[str]:
    """Every file below ``version`` except the manifest, as ``files.below`` names it."""
    return (name for name in untrusted_files.below(version) if name != FILENAME)


def write(version: Path) -> Path:
    """Write the manifest with the hash of every file below ``version``; return its path."""
    listed = {
        name: {"sha256": sha256_of(version / name), "size_bytes": (version / name).stat().st_size}
        for name in files_of(version)
    }
    path = version / FILENAME
    path.write_text(json.dumps({"format": FORMAT, "files": listed}, indent=2) + "\n")
    return path


def parse(content: bytes) -> dict[str, tuple[str, int]]:
    """The SHA-256 and the size in bytes of every file in a manifest.

    Raises:
        IntegrityError: it is not a manifest.
    """
    try:
        document = json.loads(content)
        listed = document["files"]
        if document["format"] != FORMAT:
            raise ValueError(document["format"])
        return {name: _described(file) for name, file in listed.items()}
    except MALFORMED as error:
        raise IntegrityError(f"{FILENAME} is not a manifest; publish the version again") from error


def _described(file: Any) -> tuple[str, int]:
    digest, size = file["sha256"], file["size_bytes"]
    if type(size) is not int or not 0 <= size <= MAX_FILE_BYTES or not SHA256.fullmatch(digest):
        raise ValueError(file)
    return digest, size


def check_names(document: str, listed: Mapping[str, object], present: Set[str]) -> None:
    """Require that the files ``present`` are those ``listed`` in ``document``.

    Raises:
        IntegrityError: naming the first file that is missing or unlisted.
    """
    for name in sorted(listed.keys() - present):
        raise IntegrityError(f"'{name}' is listed in {document} but missing")
    for name in sorted(present - listed.keys()):
        raise IntegrityError(f"'{name}' is not listed in {document}")


def verify(version: Path) -> bool:
    """Check ``version`` against its manifest.

    Returns:
        True if every file matches; False if there is no manifest to check against.

    Raises:
        IntegrityError: naming the first file that is changed, missing or unlisted.
    """
    path = version / FILENAME
    try:
        expected = parse(untrusted_files.read(path, MAX_MANIFEST_BYTES))
    except FileNotFoundError:
        return False
    except OSError as error:
        raise IntegrityError(f"{FILENAME} cannot be read: {error.strerror}") from error
    check_names(FILENAME, expected, set(files_of(version)))
    for name, (digest, size) in expected.items():
        try:
            actual = (version / name).stat().st_size
            if actual != size:
                raise IntegrityError(f"'{name}' has {actual} bytes, {FILENAME} says {size}")
            if sha256_of(version / name) != digest:
                raise IntegrityError(f"'{name}' does not match its SHA-256 in {FILENAME}")
        except OSError as error:
            raise IntegrityError(f"'{name}' cannot be read: {error.strerror}") from error
    return True
