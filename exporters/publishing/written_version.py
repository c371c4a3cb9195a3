"""Versions of Python models and pipelines, which have a certificate of their files and no proof."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any, NamedTuple

from modelport.exporters.proof import certificate
from modelport.gateway.backend_registry import WRITTEN, Platform
from modelport.gateway.errors import UsageError
from modelport.gateway.repository import config, manifest, signed_config, signing, untrusted_files
from modelport.gateway.repository.config import ModelConfig
from modelport.gateway.repository.signing_keys import PrivateKey

#: What importing leaves behind.
_CACHES = shutil.ignore_patterns("__pycache__")


class WrittenVersion(NamedTuple):
    """The configuration of a version without a certificate, and its format."""

    config: ModelConfig
    platform: Platform


def uncertified(version: Path) -> WrittenVersion | None:
    """A Python model or pipeline whose ``version`` has no certificate yet; None for any other."""
    if os.path.lexists(version / signing.CERTIFICATE):
        return None
    try:
        text = untrusted_files.read_text(
            version.parent / config.FILENAME, untrusted_files.MAX_CONFIG_BYTES
        )
    except FileNotFoundError:
        text = ""
    wanted = config.parse(text)
    derived = not (wanted.backend or wanted.platform)
    for platform in WRITTEN:
        if derived and (version / platform.default_filename).is_file():
            wanted.backend = platform.backend
        if wanted.backend == platform.backend:
            wanted.name = version.parent.name
            filename = wanted.default_model_filename or platform.default_filename
            if not (version / filename).is_file():
                raise UsageError(f"'{version}' has no {filename}; add it, or give another version")
            return WrittenVersion(wanted, platform)
    return None


def stage(version: Path, staged: Path, written: WrittenVersion, key: PrivateKey | None) -> None:
    """Copy ``version`` to ``staged``, with a certificate of its files, signed with ``key``."""
    shutil.copytree(version, staged, dirs_exist_ok=True, ignore=_CACHES)
    wanted = written.config
    names = sorted(set(manifest.files_of(staged)) - signing.UNLISTED)
    document: dict[str, Any] = {
        "format": certificate.FORMAT,
        "model": {"name": wanted.name},
        signed_config.KEY: signed_config.document(config.complete(wanted, wanted.name)),
        "artifact": {
            "format": written.platform.format,
            "size_bytes": sum((staged / name).stat().st_size for name in names),
            "files": {name: {"sha256": manifest.sha256_of(staged / name)} for name in names},
        },
    }
    (staged / signing.CERTIFICATE).write_text(json.dumps(document, indent=2) + "\n")
    if key is not None:
        signing.sign(staged, key)
