"""Header blocks that an HTTP/2 peer sends, decoded once each where they stay the same."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

import hpack

from modelport.gateway.wire.http2 import COMPRESSION_ERROR, ENHANCE_YOUR_CALM, MAX_HEADER_BYTES
from modelport.gateway.wire.http2_reader import Broken

T = TypeVar("T")
Fields = list[tuple[bytes, bytes]]

#: Of a block: each costs more to decode than the byte that it may take. Envoy allows 100.
MAX_FIELDS = 256
MAX_KNOWN = 64
#: A larger block is decoded each time: what a connection keeps is bounded.
MAX_KNOWN_BYTES = 1024
_INDEXED, _INDEXING, _WITHOUT_TABLE = 0x80, 0x40, 0x20
#: The bits of an integer in the first byte of an index, of a literal's name, of a string.
_INDEX, _INDEXED_NAME, _SIZE, _NAME, _STRING = 0x7F, 0x3F, 0x1F, 0x0F, 0x7F
_MORE = 0x80
#: No length or index takes more than four bytes behind its first.
_MAX_SHIFT = 21


class HeaderBlocks(Generic[T]):
    """The decoder of one connection; ``make`` turns a block's fields into what the caller needs.

    Peers send most calls with the same blocks. What a block means depends on the table that
    earlier ones have filled, so those that are known are forgotten when one changes it.
    """

    def __init__(self, make: Callable[[Fields], T]) -> None:
        self._decoder = hpack.Decoder(max_header_list_size=MAX_HEADER_BYTES)
        self._make = make
        self._known: dict[bytes, T] = {}

    def decode(self, block: bytes) -> T:
        """What ``make`` makes of ``block``.

        Raises:
            Broken: it is damaged, or too large.
        """
        made = self._known.get(block)
        if made is None:
            keeps_table = scan(block)
            made = self._make(self._fields(block))
            if not keeps_table:
                self._known.clear()
            elif len(self._known) < MAX_KNOWN and len(block) <= MAX_KNOWN_BYTES:
                self._known[block] = made
        return made

    def _fields(self, block: bytes) -> Fields:
        try:
            fields: Iterable[tuple[bytes, bytes]] = self._decoder.decode(block, raw=True)
        except hpack.OversizedHeaderListError as error:
            raise Broken("its headers are too large", ENHANCE_YOUR_CALM) from error
        except (hpack.HPACKError, ValueError, IndexError) as error:
            raise Broken("its headers are damaged", COMPRESSION_ERROR) from error
        return [(name, value) for name, value in fields]


def text(fields: Fields) -> dict[str, str]:
    """The fields by name; of a name that is there twice, the last."""
    return {name.decode("latin-1"): value.decode("utf-8", "replace") for name, value in fields}


def scan(block: bytes) -> bool:
    """Whether ``block`` leaves the table as it is: of indices, and literals that are not indexed.

    Raises:
        Broken: it is damaged, or has too many fields.
    """
    try:
        return _scan(block)
    except IndexError as error:
        raise Broken("its headers are damaged", COMPRESSION_ERROR) from error


def _scan(block: bytes) -> bool:
    at, end, fields, keeps_table = 0, len(block), 0, True
    while at < end:
        fields += 1
        if fields > MAX_FIELDS:
            raise Broken("its headers are too many", ENHANCE_YOUR_CALM)
        first = block[at]
        if first >= _INDEXED:
            _, at = _integer(block, at, _INDEX)
            continue
        prefix = _NAME
        if first >= _WITHOUT_TABLE:
            keeps_table = False
            if first < _INDEXING:  # the table's size
                _, at = _integer(block, at, _SIZE)
                continue
            prefix = _INDEXED_NAME
        name, at = _integer(block, at, prefix)
        for _ in range(1 if name else 2):  # the value, or a name before it
            length, at = _integer(block, at, _STRING)
            at += length
    return keeps_table


def _integer(block: bytes, at: int, prefix: int) -> tuple[int, int]:
    """The integer at ``at`` in the bits of ``prefix``, and where it ends (RFC 7541, 5.1)."""
    value = block[at] & prefix
    at += 1
    if value == prefix:
        shift = 0
        while True:
            if shift > _MAX_SHIFT:
                raise IndexError("an integer has too many bytes")
            byte = block[at]
            at += 1
            value += (byte & (_MORE - 1)) << shift
            shift += 7
            if byte < _MORE:
                break
    return value, at
