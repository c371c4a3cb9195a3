"""torch's zip archives, TorchScript's and ``.pt2``: the signature goes in, source paths come out.

    <root>/extra/modelport/signature.json    the signature, as a Triton model configuration in JSON

``torch.jit.load`` and ``torch.export.load`` hand that record out by the name
``modelport/signature.json``. Reading needs no torch, and runs nothing that an archive holds.
"""

from __future__ import annotations

import json
import shutil
import struct
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, TypeVar

from gateway.errors import IntegrityError, InvalidArgument
from gateway.repository import config
from gateway.types import ModelSignature

SIGNATURE = "modelport/signature.json"

EXTRA = "extra/"

#: A record that is read whole: code, a graph, a description. Weights are not read.
MAX_RECORD_BYTES = 1 << 30

#: torch's: records begin at multiples of this, after an extra field of this name.
ALIGNMENT = 64
PADDING = b"FB"

LOCAL_HEADER_BYTES = 30

#: What reading a damaged zip comes to; encryption is a RuntimeError.
DAMAGE = (
    EOFError,
    LookupError,
    RuntimeError,
    ValueError,
    struct.error,
    zipfile.BadZipFile,
    zlib.error,
)

T = TypeVar("T")

_NEUTRAL = config.Platform("", "", "", "")


class Archive:
    """An archive's records by their names without the root folder.

    Raises:
        IntegrityError: the file is no archive, or a record is damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with zipfile.ZipFile(path) as file:
                self._records = {
                    info.filename.partition("/")[2]: info
                    for info in file.infolist()
                    if not info.is_dir()
                }
        except DAMAGE as error:
            raise self._damaged(error) from error

    def __contains__(self, name: str) -> bool:
        return name in self._records

    def below(self, folder: str, suffix: str = "") -> list[str]:
        """The records in ``folder``, at any depth, whose names end in ``suffix``."""
        return [n for n in self._records if n.startswith(folder) and n.endswith(suffix)]

    def size(self, name: str) -> int:
        """In bytes."""
        return self._records[name].file_size

    def read(self, name: str) -> bytes:
        """The content of a record."""
        if name not in self._records:
            raise IntegrityError(f"'{self.path.name}' is damaged: it has no record '{name}'")
        info = self._records[name]
        if info.file_size > MAX_RECORD_BYTES:
            raise IntegrityError(f"'{self.path.name}': record '{name}' is larger than 1 GiB")
        try:
            with zipfile.ZipFile(self.path) as file:
                return file.read(info)
        except DAMAGE as error:
            raise self._damaged(error) from error

    def text(self, name: str) -> str:
        """The content of a record, as UTF-8."""
        return self._parsed(lambda content: content.decode(), name)

    def json(self, name: str) -> Any:
        """The content of a record, as JSON."""
        return self._parsed(json.loads, name)

    def _parsed(self, parse: Callable[[bytes], T], name: str) -> T:
        try:
            return parse(self.read(name))
        except (ValueError, RecursionError) as error:
            raise self._damaged(f"record '{name}' does not parse") from error

    def signature(self) -> ModelSignature | None:
        """What ``seal`` put in; None where modelport did not write the archive."""
        if EXTRA + SIGNATURE not in self:
            return None
        try:
            return config.signature(config.parse_json(self.text(EXTRA + SIGNATURE)))
        except InvalidArgument as error:
            raise self._damaged(error) from error

    def _damaged(self, reason: object) -> IntegrityError:
        return IntegrityError(
            f"'{self.path.name}' is damaged ({reason}); export the model again, or copy it again"
        )


def seal(
    draft: IO[bytes], path: Path, signature: ModelSignature, without: tuple[str, ...] = ()
) -> None:
    """Write the archive ``draft`` to ``path`` with the signature in it.

    ``draft`` lies in memory: torch's own writer ends the process where a disk is full.

    Args:
        without: records that end in one of these are left out. They are what torch keeps for
            debugging: source files and lines, with the paths of the machine that wrote them.

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
    """The header of a copy whose content begins where a tensor may be mapped into memory."""
    header = zipfile.ZipInfo(info.filename)  # of the year 1980, like torch's: files are comparable
    header.file_size = info.file_size
    unpadded = file.tell() + LOCAL_HEADER_BYTES + len(info.filename.encode()) + len(PADDING) + 2
    length = -unpadded % ALIGNMENT
    header.extra = PADDING + length.to_bytes(2, "little") + bytes(length)
    return header
