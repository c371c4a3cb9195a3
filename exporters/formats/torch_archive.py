"""Rewriting torch's zip archives: the signature is added, source paths are removed.

``modelport.gateway.repository.artifact_checks.torch_archive`` reads them.
"""

from __future__ import annotations

import json
import shutil
import zipfile
from pathlib import Path
from typing import IO

from modelport.gateway.repository import config
from modelport.gateway.repository.artifact_checks.torch_archive import EXTRA, SIGNATURE
from modelport.gateway.types import ModelSignature

#: torch's alignment: records begin at multiples of this, after an extra field of this name.
ALIGNMENT = 64
PADDING = b"FB"

LOCAL_HEADER_BYTES = 30

_NEUTRAL = config.Platform("", "", "", "")


def seal(
    draft: IO[bytes], path: Path, signature: ModelSignature, without: tuple[str, ...] = ()
) -> None:
    """Write the archive ``draft`` to ``path`` with the signature in it.

    ``draft`` is in memory, because torch's own writer ends the process when the disk is full.

    Args:
        without: suffixes of records to leave out: torch's debugging records of source files and
            lines, with paths of the exporting machine.

    Raises:
        OSError: ``path`` cannot be written.
    """
    text = json.dumps(config.to_json(config.build("", _NEUTRAL, signature)), indent=2)
    with (
        zipfile.ZipFile(draft) as source,
        path.open("wb") as file,
        zipfile.ZipFile(file, "w") as to,
    ):
        for info in source.infolist():
            if not info.filename.endswith(without or ("\0",)):
                with source.open(info) as record, to.open(_aligned(info, file), "w") as copy:
                    shutil.copyfileobj(record, copy)
        root = source.namelist()[0].partition("/")[0]
        to.writestr(zipfile.ZipInfo(f"{root}/{EXTRA}{SIGNATURE}"), text)


def _aligned(info: zipfile.ZipInfo, file: IO[bytes]) -> zipfile.ZipInfo:
    """The header of a copy whose content is aligned for memory mapping."""
    # of the year 1980, as torch writes: equal files stay equal
    header = zipfile.ZipInfo(info.filename)
    header.file_size = info.file_size
    unpadded = file.tell() + LOCAL_HEADER_BYTES + len(info.filename.encode()) + len(PADDING) + 2
    length = -unpadded % ALIGNMENT
    header.extra = PADDING + length.to_bytes(2, "little") + bytes(length)
    return header
