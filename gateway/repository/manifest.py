"""``manifest.json``: the SHA-256 of every file of a published version.

    {"format": "modelport-manifest/1", "files": {"model.onnx": {"sha256": "…", "size_bytes": 123}}}

Written by the exporters as the last file of a version, verified by the gateway before it loads one.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path

from modelport.gateway.errors import IntegrityError

FILENAME = "manifest.json"
#: The file with the exporters' evidence (``signing``).
CERTIFICATE = "certificate.json"
FORMAT = "modelport-manifest/1"
MAX_MANIFEST_BYTES = 16 * 1024 * 1024


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def files_of(version: Path) -> Iterator[str]:
    """Every file below ``version`` except the manifest, as a relative POSIX path.

    A linked folder counts as a file: it is not followed.
    """
    for folder, folders, names in os.walk(version):
        folders.sort()
        linked = [name for name in folders if (Path(folder) / name).is_symlink()]
        for name in sorted(names + linked):
            relative = (Path(folder) / name).relative_to(version).as_posix()
            if relative != FILENAME:
                yield relative


def write(version: Path) -> Path:
    """Write the manifest with the hash of every file below ``version``; return its path."""
    files = {
        name: {"sha256": sha256_of(version / name), "size_bytes": (version / name).stat().st_size}
        for name in files_of(version)
    }
    path = version / FILENAME
    path.write_text(json.dumps({"format": FORMAT, "files": files}, indent=2) + "\n")
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
        return {str(name): (str(f["sha256"]), int(f["size_bytes"])) for name, f in listed.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise IntegrityError(f"{FILENAME} is not a manifest; publish the version again") from error


def verify(version: Path) -> bool:
    """Check ``version`` against its manifest.

    Returns:
        True if every file matches; False if there is no manifest to check against.

    Raises:
        IntegrityError: naming the first file that is changed, missing or unlisted.
    """
    path = version / FILENAME
    try:
        if path.stat().st_size > MAX_MANIFEST_BYTES:
            raise IntegrityError(f"{FILENAME} is larger than {MAX_MANIFEST_BYTES} bytes")
        expected = parse(path.read_bytes())
    except FileNotFoundError:
        return False
    present = set(files_of(version))
    for name in sorted(expected.keys() - present):
        raise IntegrityError(f"'{name}' is listed in {FILENAME} but missing")
    for name in sorted(present - expected.keys()):
        raise IntegrityError(f"'{name}' is not listed in {FILENAME}")
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
