"""Versions of Python models: code, which has a certificate of its files and no proof."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

from modelport.exporters.proof import certificate
from modelport.gateway.backend_registry import PYTHON
from modelport.gateway.errors import UsageError
from modelport.gateway.repository import config, manifest, signed_config, signing, untrusted_files
from modelport.gateway.repository.config import ModelConfig
from modelport.gateway.repository.signing_keys import PrivateKey

#: What importing leaves behind.
_CACHES = shutil.ignore_patterns("__pycache__")


def uncertified(version: Path) -> ModelConfig | None:
    """The configuration of a Python model whose ``version`` has no certificate yet; else None."""
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
    if derived and (version / PYTHON.default_filename).is_file():
        wanted.backend = PYTHON.backend
    if wanted.backend != PYTHON.backend:
        return None
    wanted.name = version.parent.name
    filename = wanted.default_model_filename or PYTHON.default_filename
    if not (version / filename).is_file():
        raise UsageError(f"'{version}' has no {filename}; add it, or give another version")
    return wanted


def stage(version: Path, staged: Path, wanted: ModelConfig, key: PrivateKey | None) -> None:
    """Copy ``version`` to ``staged``, with a certificate of its files, signed with ``key``."""
    shutil.copytree(version, staged, dirs_exist_ok=True, ignore=_CACHES)
    names = sorted(set(manifest.files_of(staged)) - signing.UNLISTED)
    document: dict[str, Any] = {
        "format": certificate.FORMAT,
        "model": {"name": wanted.name},
        signed_config.KEY: signed_config.document(config.complete(wanted, wanted.name)),
        "artifact": {
            "format": PYTHON.format,
            "size_bytes": sum((staged / name).stat().st_size for name in names),
            "files": {name: {"sha256": manifest.sha256_of(staged / name)} for name in names},
        },
    }
    (staged / signing.CERTIFICATE).write_text(json.dumps(document, indent=2) + "\n")
    if key is not None:
        signing.sign(staged, key)
