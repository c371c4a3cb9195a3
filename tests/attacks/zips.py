"""Zips written byte by byte, so that they can lie in every way that a zip can."""

from __future__ import annotations

import io
import struct
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace

LOCAL, CENTRAL, END = struct.Struct("<4s5H3I2H"), struct.Struct("<4s6H3I5H2I"), "<4s4H2IH"


@dataclass(frozen=True)
class ZipRecord:
    """A record; what is not None differs from what its content says.

    Attributes:
        header: the name in the local header.
        hidden: the central directory does not list it.
        at: the number of the record whose place it shares.
    """

    name: bytes
    content: bytes
    header: bytes | None = None
    header_size: int | None = None
    flags: int = 0
    method: int = 0
    extra: bytes = b""
    attributes: int = 0
    hidden: bool = False
    at: int | None = None


@dataclass(frozen=True)
class Zip:
    """A zip of ``entries``; ``between`` lies before the last record."""

    entries: tuple[ZipRecord, ...]
    prefix: bytes = b""
    between: bytes = b""
    suffix: bytes = b""
    comment: bytes = b""
    count: int | None = None
    tail: Callable[[bytes, int, int, int], bytes] | None = field(default=None)

    def content(self) -> bytes:
        out, directory, offsets = io.BytesIO(), io.BytesIO(), list[int]()
        out.write(self.prefix)
        for number, entry in enumerate(self.entries):
            if number == len(self.entries) - 1:
                out.write(self.between)
            offset = out.tell() if entry.at is None else offsets[entry.at]
            offsets.append(offset)
            size, crc = len(entry.content), zlib.crc32(entry.content)
            name = entry.name if entry.header is None else entry.header
            if entry.at is None:
                told = size if entry.header_size is None else entry.header_size
                lengths = (len(name), 0)
                head = (b"PK\x03\x04", 20, entry.flags, entry.method, 0, 33, crc, told, told)
                out.write(LOCAL.pack(*head, *lengths) + name + entry.content)
            if not entry.hidden:
                head = (b"PK\x01\x02", 788, 20, entry.flags, entry.method, 0, 33, crc, size, size)
                rest = (len(entry.name), len(entry.extra), 0, 0, 0, entry.attributes, offset)
                directory.write(CENTRAL.pack(*head, *rest) + entry.name + entry.extra)
        begin, listing = out.tell(), directory.getvalue()
        count = (
            sum(not entry.hidden for entry in self.entries) if self.count is None else self.count
        )
        end = struct.pack(
            END, b"PK\x05\x06", 0, 0, count, count, len(listing), begin, len(self.comment)
        )
        if self.tail is not None:
            end = self.tail(end, begin, len(listing), count)
        return out.getvalue() + listing + end + self.comment + self.suffix


def read(content: bytes) -> Zip:
    """An honest zip, taken apart."""
    with zipfile.ZipFile(io.BytesIO(content)) as file:
        names = [info for info in file.infolist() if not info.is_dir()]
        return Zip(tuple(ZipRecord(info.filename.encode(), file.read(info)) for info in names))


def _victim(plain: Zip) -> ZipRecord:
    return plain.entries[0]


def _beside(plain: Zip, *more: ZipRecord) -> Zip:
    return replace(plain, entries=(*plain.entries, *more))


def _named(form: Callable[[bytes], bytes]) -> Callable[[Zip], Zip]:
    """The first record once more, under a name that some readers take for the same."""
    return lambda plain: _beside(plain, ZipRecord(form(_victim(plain).name), b"hostile"))


def _changed(**fields: object) -> Callable[[Zip], Zip]:
    """The first record with something about it changed."""
    return lambda plain: replace(
        plain,
        entries=(replace(_victim(plain), **fields), *plain.entries[1:]),  # type: ignore[arg-type]
    )


def _in_last(name: bytes, form: Callable[[bytes], bytes]) -> bytes:
    folder, separator, last = name.rpartition(b"/")
    return folder + separator + form(last)


def _zip64_that_lies(end: bytes, begin: int, size: int, count: int) -> bytes:
    """A zip64 directory of one record fewer than the other directory lists."""
    wide = struct.pack(
        "<4sQ2H2I4Q", b"PK\x06\x06", 44, 45, 45, 0, 0, count - 1, count - 1, size, begin
    )
    locator = struct.pack("<4sIQI", b"PK\x06\x07", 0, begin + size, 1)
    return wide + locator + end


def _second_end(plain: Zip) -> Zip:
    """A comment that is the end of another zip, of which the first one is a part."""
    inner = plain.content()
    return replace(plain, comment=inner[-22:])


#: What is done to an honest zip, by what the refusal says of it.
MANIPULATIONS: dict[str, tuple[Callable[[Zip], Zip], str]] = {
    "a name twice": (_named(lambda n: n), "one name"),
    "a name twice, hostile first": (
        lambda z: replace(z, entries=(ZipRecord(_victim(z).name, b"hostile"), *z.entries)),
        "one name",
    ),
    "names that differ in case": (_named(lambda n: _in_last(n, bytes.swapcase)), "one name"),
    "names that differ in width": (
        lambda z: _beside(
            z,
            ZipRecord(b"m/full", b"1"),
            ZipRecord("m/\uff46ull".encode(), b"2", flags=1 << 11),
        ),
        "one name",
    ),
    "a name with a dot": (_named(lambda n: _in_last(n, lambda last: b"./" + last)), "not safe"),
    "a name with two slashes": (
        _named(lambda n: _in_last(n, lambda last: b"/" + last)),
        "not safe",
    ),
    "a name with a backslash": (_named(lambda n: n.replace(b"/", b"\\") + b"\\x"), "not safe"),
    "a name that leaves": (_named(lambda n: b"../../" + n), "not safe"),
    "an absolute name": (_named(lambda n: b"/" + n), "not safe"),
    "a drive": (_named(lambda n: b"C:" + n), "not safe"),
    "a name with a NUL": (_named(lambda n: n + b"\0.txt"), "not safe"),
    "a name that is not text": (_named(lambda n: n + b"\xff"), "neither ASCII nor"),
    "a file that is a folder": (_named(lambda n: n + b"/inside"), "a file and a folder"),
    "a record that is not listed": (
        lambda z: _beside(z, ZipRecord(_victim(z).name, b"hostile", hidden=True)),
        "between the last record and",
    ),
    "a hidden record in front": (
        lambda z: replace(
            z, entries=(ZipRecord(_victim(z).name, b"hostile", hidden=True), *z.entries)
        ),
        "hidden bytes",
    ),
    "a header of another name": (_changed(header=b"m/other"), "contradicts the directory"),
    "a header of another size": (_changed(header_size=1), "contradicts the directory"),
    "two records in one place": (
        lambda z: _beside(
            z, replace(_victim(z), name=_in_last(_victim(z).name, lambda last: b"again"), at=0)
        ),
        "overlaps",
    ),
    "bytes in front": (lambda z: replace(z, prefix=b"#!/bin/sh\n"), "hidden bytes"),
    "bytes between records": (lambda z: replace(z, between=b"hidden"), "hidden bytes"),
    "bytes behind": (lambda z: replace(z, suffix=b"hidden"), "after its central directory"),
    "a comment": (lambda z: replace(z, comment=b"hello"), "after its central directory"),
    "a second end": (_second_end, ""),
    "a zip64 directory that lies": (lambda z: replace(z, tail=_zip64_that_lies), "disagree"),
    "fewer records than listed": (
        lambda z: replace(z, count=len(z.entries) - 1),
        "more records than it states",
    ),
    "an encrypted record": (_changed(flags=1), "encrypted"),
    "an unusual packing": (_changed(method=12), "neither stored nor deflated"),
    "a link": (_changed(attributes=0o120777 << 16), "a link"),
    "a field with another name": (
        _changed(extra=struct.pack("<2H", 0x7075, 5) + b"\x01\0\0\0\0"),
        "extra field",
    ),
}
