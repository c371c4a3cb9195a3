"""Check that all readers interpret a zip archive in the same way.

Readers treat ambiguous zips differently: of two records with one name, ``zipfile`` uses the last
and torch's miniz the first; some ignore case, some trust local headers, some the central directory,
some skip bytes before the first record. So a file checked with one reader could be loaded as
something else by another. A zip passes only if its records follow each other from the first byte,
the central directory after them lists exactly these, both agree, and all names differ on every file
system. Encryption, comments and links are refused, because no model has them.
"""

from __future__ import annotations

import os
import re
import stat
import struct
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import IO, NamedTuple

from modelport.gateway.errors import IntegrityError
from modelport.gateway.repository import untrusted_files

MAX_RECORDS = 1_000_000
MAX_DIRECTORY_BYTES = 256 << 20

_LOCAL = struct.Struct("<4s5H3I2H")
_CENTRAL = struct.Struct("<4s6H3I5H2I")
_END = struct.Struct("<4s4H2IH")
_END64 = struct.Struct("<4sQ2H2I4Q")
_LOCATOR = struct.Struct("<4sIQI")
_FULL, _FULL_SHORT = 0xFFFFFFFF, 0xFFFF

_DESCRIPTOR, _UTF8 = 1 << 3, 1 << 11
#: Both of the above, and the two bits for the compression level of DEFLATE.
_FLAGS = _DESCRIPTOR | _UTF8 | 0b110
_STORED, _DEFLATED = 0, 8
_ZIP64 = 0x0001
#: Extra fields without effect: torch's and Android's padding, times, owners, Java's mark.
_EXTRAS = frozenset({_ZIP64, 0x4246, 0xD935, 0x000A, 0x5455, 0x7875, 0x5855, 0xCAFE})
_DRIVE = re.compile(r"[A-Za-z]:")


class _Record(NamedTuple):
    """An entry of the central directory, with full sizes and offset."""

    name: str
    raw: bytes
    flags: int
    method: int
    crc: int
    compressed: int
    size: int
    offset: int


class _Ambiguous(Exception):
    """A part of the zip that two readers may read differently."""


def check(path: Path, one_root: bool = False) -> None:
    """Refuse a zip that two readers may read differently.

    Args:
        one_root: all records must be in the same top folder, as in torch's archives.

    Raises:
        IntegrityError: naming the ambiguity.
        OSError: the file cannot be read.
    """
    try:
        with untrusted_files.open_file(path) as file:
            _check(file, one_root)
    except _Ambiguous as error:
        raise IntegrityError(
            f"'{path.name}' is not a plain zip, so two readers may read it differently: {error}; "
            "refused: write it again, with one record for each name and nothing else in the file"
        ) from error
    except (struct.error, EOFError) as error:
        raise IntegrityError(f"'{path.name}' is truncated or damaged; copy it again") from error


def is_zip(path: Path) -> bool:
    """Whether the file begins like a zip that ``check`` accepts, even if it is damaged."""
    with untrusted_files.open_file(path) as file:
        return file.read(4) in (b"PK\x03\x04", b"PK\x05\x06")


def _check(file: IO[bytes], one_root: bool) -> None:
    begin, end, count = _directory(file)
    records = sorted(_records(file, begin, end, count), key=lambda record: record.offset)
    _check_names([record.name for record in records], one_root)
    position = 0
    for index, record in enumerate(records):
        following = records[index + 1].offset if index + 1 < len(records) else begin
        if record.offset != position:
            what = "overlaps another" if record.offset < position else "comes after hidden bytes"
            raise _Ambiguous(f"record {record.name!r} {what}")
        position = _end_of(file, record, following)
    if position != begin:
        raise _Ambiguous("there are bytes between the last record and the central directory")


def _directory(file: IO[bytes]) -> tuple[int, int, int]:
    """Start and end of the central directory, and the number of records it lists."""
    length = file.seek(0, os.SEEK_END)
    if length < _END.size:
        raise EOFError
    file.seek(length - _END.size)
    magic, disk, first, here, count, size, begin, comment = _END.unpack(file.read(_END.size))
    if magic != b"PK\x05\x06" or comment:
        file.seek(max(0, length - _END.size - _FULL_SHORT))
        tail = file.read()
        found = tail.rfind(b"PK\x05\x06")
        if found < 0 or len(tail) - found < _END.size:
            raise EOFError
        raise _Ambiguous("it has a comment, or other bytes after its central directory")
    end = length - _END.size
    small = here, count, size, begin
    file.seek(max(0, end - _LOCATOR.size))
    locator = file.read(_LOCATOR.size) if end >= _LOCATOR.size else b""
    if locator[:4] == b"PK\x06\x07":
        _, at_disk, where, disks = _LOCATOR.unpack(locator)
        end -= _LOCATOR.size + _END64.size
        if where != end or at_disk or disks > 1:
            raise _Ambiguous("its zip64 directory is not at the stated place")
        file.seek(where)
        fields = _END64.unpack(file.read(_END64.size))
        magic, own, _, _, disk64, first64, here, count, size, begin = fields
        if magic != b"PK\x06\x06" or own != _END64.size - 12 or disk64 or first64:
            raise _Ambiguous("its zip64 directory is invalid")
        full, large = (_FULL_SHORT, _FULL_SHORT, _FULL, _FULL), (here, count, size, begin)
        if any(value not in pair for value, *pair in zip(small, full, large, strict=True)):
            raise _Ambiguous("its two directories disagree")
    if (disk, first) not in ((0, 0), (_FULL_SHORT, _FULL_SHORT)) or here != count:
        raise _Ambiguous("it is one part of a split archive")
    if begin + size != end or size > MAX_DIRECTORY_BYTES or count > MAX_RECORDS:
        raise _Ambiguous(
            "its central directory is not at the stated place, or not of the stated size"
        )
    return begin, end, count


def _records(file: IO[bytes], begin: int, end: int, count: int) -> Iterator[_Record]:
    file.seek(begin)
    content = file.read(end - begin)
    position = 0
    for _ in range(count):
        (
            magic, _, _, flags, method, _, _, crc, compressed, size,
            name_length, extra_length, comment_length, disk, _, attributes, offset,
        ) = _CENTRAL.unpack_from(content, position)  # fmt: skip
        position += _CENTRAL.size
        raw = content[position : position + name_length]
        position += name_length
        extra = content[position : position + extra_length]
        position += extra_length
        name = _name(raw, flags)
        if magic != b"PK\x01\x02" or comment_length or disk not in (0, _FULL_SHORT):
            raise _Ambiguous(f"the central directory's entry of {name!r} is not plain")
        if flags & ~_FLAGS or method not in (_STORED, _DEFLATED):
            raise _Ambiguous(f"record {name!r} is encrypted, or neither stored nor deflated")
        if stat.S_IFMT(attributes >> 16) not in (0, stat.S_IFREG, stat.S_IFDIR):
            raise _Ambiguous(f"record {name!r} is a link or a device")
        size, compressed, offset = _in_full(name, extra, size, compressed, offset)
        if (method == _STORED and compressed != size) or (name.endswith("/") and size):
            raise _Ambiguous(f"record {name!r} has two sizes")
        yield _Record(name, raw, flags, method, crc, compressed, size, offset)
    if position != len(content):
        raise _Ambiguous("its central directory holds more records than it states")


def _name(raw: bytes, flags: int) -> str:
    try:
        name = raw.decode("utf-8" if flags & _UTF8 else "ascii")
    except UnicodeDecodeError:
        raise _Ambiguous(
            f"the record name {raw[:200]!r} is neither ASCII nor marked as UTF-8"
        ) from None
    parts = name.removesuffix("/").split("/")
    plain = name.isprintable() and "\\" not in name and not _DRIVE.match(name)
    if not plain or any(part in ("", ".", "..") or len(part.encode()) > 255 for part in parts):
        raise _Ambiguous(f"the record name {name[:200]!r} is not safe")
    return name


def _in_full(name: str, extra: bytes, *values: int) -> list[int]:
    """``values``, with those that did not fit from the zip64 field, in the standard's order."""
    fields = dict[int, bytes]()
    position = 0
    while position < len(extra):
        kind, length = struct.unpack_from("<2H", extra, position)
        content = extra[position + 4 : position + 4 + length]
        if kind not in _EXTRAS or kind in fields or len(content) != length:
            raise _Ambiguous(
                f"record {name!r} has an extra field that readers may interpret differently"
            )
        fields[kind] = content
        position += 4 + length
    large = fields.get(_ZIP64, b"")
    wanted = sum(value == _FULL for value in values)
    if len(large) % 8 or len(large) // 8 < wanted:
        raise _Ambiguous(f"record {name!r} has a zip64 field that does not fit")
    numbers = iter(struct.unpack(f"<{len(large) // 8}Q", large))
    found = [next(numbers) if value == _FULL else value for value in values]
    if wanted and next(numbers, None) is not None:
        raise _Ambiguous(f"record {name!r} has a zip64 field that does not fit")
    return found


def _check_names(names: list[str], one_root: bool) -> None:
    seen: dict[str, str] = {}
    folders: dict[str, str] = {}
    for name in names:
        plain = unicodedata.normalize("NFKC", name.removesuffix("/")).casefold()
        if plain in seen:
            raise _Ambiguous(f"{seen[plain]!r} and {name!r} are one name to some readers")
        seen[plain] = name
        while "/" in plain:
            plain = plain.rpartition("/")[0]
            folders.setdefault(plain, name)
    for plain, name in seen.items():
        if plain in folders and not name.endswith("/"):
            raise _Ambiguous(f"{name!r} is a file and a folder")
    roots = {name.partition("/")[0] for name in names}
    if one_root and (len(roots) != 1 or any("/" not in name for name in names)):
        raise _Ambiguous("its records lie in more than one top folder")


def _end_of(file: IO[bytes], record: _Record, following: int) -> int:
    """The end of the record, whose local header must match the central directory."""
    file.seek(record.offset)
    (
        magic, _, flags, method, _, _, crc, compressed, size, name_length, extra_length,
    ) = _LOCAL.unpack(file.read(_LOCAL.size))  # fmt: skip
    raw = file.read(name_length)
    extra = file.read(extra_length)
    if (magic, raw, flags, method) != (b"PK\x03\x04", record.raw, record.flags, record.method):
        raise _Ambiguous(f"the header of record {record.name!r} contradicts the directory")
    size, compressed = _in_full(record.name, extra, size, compressed)
    later = bool(flags & _DESCRIPTOR)
    stated = crc, compressed, size
    if stated != (record.crc, record.compressed, record.size) and not (later and not any(stated)):
        raise _Ambiguous(f"the header of record {record.name!r} contradicts the directory")
    end = record.offset + _LOCAL.size + name_length + extra_length + record.compressed
    return _descriptor_end(file, record, end, following) if later else end


def _descriptor_end(file: IO[bytes], record: _Record, end: int, following: int) -> int:
    """The end of the checksum and sizes after the content: 32 or 64 bits, with or without mark."""
    file.seek(end)
    content = file.read(max(0, min(following - end, 24)))
    for form, most in (("<3I", _FULL), ("<I2Q", 2**64 - 1)):
        stated = struct.pack(form, record.crc, min(record.compressed, most), min(record.size, most))
        if content in (stated, b"PK\x07\x08" + stated):
            return following
    raise _Ambiguous(f"the descriptor of record {record.name!r} contradicts the directory")
