"""Header blocks of an HTTP/2 peer: HPACK decoding with limits, and validation."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Generic, NamedTuple, TypeVar

import hpack

from modelport.gateway.wire.http2.frames import ErrorCode, ProtocolError

T = TypeVar("T")
Fields = list[tuple[bytes, bytes]]

#: The largest header block, also across its frames, and the largest header list.
MAX_HEADER_BYTES = 64 * 1024
#: The fields of a block: each costs more to decode than the one byte it may take. Envoy allows 100.
MAX_FIELDS = 256
#: The decoded blocks that a connection keeps, and the largest of them.
MAX_KNOWN = 64
MAX_KNOWN_BYTES = 1024
_INDEXED, _INDEXING, _WITHOUT_TABLE = 0x80, 0x40, 0x20
#: The bits of an integer in the first byte of an index, of a literal's name, of a string.
_INDEX, _INDEXED_NAME, _SIZE, _NAME, _STRING = 0x7F, 0x3F, 0x1F, 0x0F, 0x7F
_MORE = 0x80
#: No length or index takes more than four bytes behind its first.
_MAX_SHIFT = 21
#: Fields of HTTP/1.1's connections (RFC 9113, 8.2.2).
CONNECTION_SPECIFIC = frozenset(
    (b"connection", b"proxy-connection", b"keep-alive", b"transfer-encoding", b"upgrade")
)
#: RFC 9113, 8.2.1.
_FIELD_NAME = re.compile(rb":?[^\x00-\x20A-Z:\x7f-\xff]+\Z")
BAD_IN_VALUE = re.compile(rb"[\x00\r\n]")
#: More digits than any length has.
_MAX_LENGTH_DIGITS = 20


class FieldSection(NamedTuple):
    """The fields of a header block, validated as RFC 9113, 8.2 and 8.3 demand.

    ``well_formed`` refers to all that holds for trailers, too; a request or response needs its
    ``pseudo`` fields besides, see ``valid_request`` and ``valid_response``.
    """

    pseudo: dict[bytes, bytes]
    regular: Fields
    well_formed: bool
    content_length: int | None

    @property
    def valid_request(self) -> bool:
        pseudo = self.pseudo
        required = pseudo.get(b":path") and b":method" in pseudo and b":scheme" in pseudo
        return self.well_formed and bool(required) and b":status" not in pseudo

    @property
    def valid_response(self) -> bool:
        status = self.pseudo.get(b":status", b"")
        return self.well_formed and len(self.pseudo) == 1 and len(status) == 3 and status.isdigit()

    @property
    def valid_trailers(self) -> bool:
        return self.well_formed and not self.pseudo


_PSEUDO = frozenset((b":method", b":scheme", b":path", b":authority", b":status"))


def section(fields: Fields) -> FieldSection:
    """``fields``, validated; values are without blanks at their ends.

    The RFC calls a field with such blanks malformed, but grpc-core sends such metadata.
    """
    pseudo: dict[bytes, bytes] = {}
    regular: Fields = []
    sound, length = True, None
    for name, given in fields:
        value = given.strip(b" \t")
        sound &= _FIELD_NAME.match(name) is not None and BAD_IN_VALUE.search(value) is None
        if name[:1] == b":":
            sound &= name in _PSEUDO and not regular and name not in pseudo
            pseudo[name] = value
            continue
        sound &= name not in CONNECTION_SPECIFIC and (name != b"te" or value == b"trailers")
        if name == b"content-length":
            sound &= value.isdigit() and len(value) < _MAX_LENGTH_DIGITS and length in (None, value)
            length = value
        regular.append((name, value))
    return FieldSection(pseudo, regular, sound, int(length) if sound and length else None)


class HeaderBlocks(Generic[T]):
    """The header decoder of one connection; ``make`` converts the fields of a block.

    Peers send most requests with the same blocks, so what ``make`` returned is kept. The meaning of
    a block depends on the table that earlier blocks have filled: one that changes it ends that.
    """

    def __init__(self, make: Callable[[FieldSection], T]) -> None:
        self._decoder = hpack.Decoder(max_header_list_size=MAX_HEADER_BYTES)
        self._make = make
        self._known: dict[bytes, T] = {}

    def decode(self, block: bytes) -> T:
        """Decode and convert ``block``.

        Raises:
            ProtocolError: it is damaged, or too large.
        """
        made = self._known.get(block)
        if made is None:
            keeps_table = scan(block)
            made = self._make(section(self._fields(block)))
            if not keeps_table:
                self._known.clear()
            elif len(self._known) < MAX_KNOWN and len(block) <= MAX_KNOWN_BYTES:
                self._known[block] = made
        return made

    def _fields(self, block: bytes) -> Fields:
        try:
            fields: Iterable[tuple[bytes, bytes]] = self._decoder.decode(block, raw=True)
        except hpack.OversizedHeaderListError as error:
            reason = "the header list is too large"
            raise ProtocolError(reason, ErrorCode.ENHANCE_YOUR_CALM) from error
        except (hpack.HPACKError, ValueError, IndexError) as error:
            raise _damaged() from error
        return [(name, value) for name, value in fields]


def scan(block: bytes) -> bool:
    """Whether ``block`` leaves the table as it is: only indices, and literals without indexing.

    Raises:
        ProtocolError: it is damaged, or has too many fields.
    """
    at, end, fields, keeps_table = 0, len(block), 0, True
    try:
        while at < end:
            fields += 1
            if fields > MAX_FIELDS:
                raise ProtocolError("too many header fields", ErrorCode.ENHANCE_YOUR_CALM)
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
    except IndexError as error:
        raise _damaged() from error
    return keeps_table


def _damaged() -> ProtocolError:
    return ProtocolError("the header block cannot be decoded", ErrorCode.COMPRESSION_ERROR)


def _integer(block: bytes, at: int, prefix: int) -> tuple[int, int]:
    """Return the integer at ``at`` in the bits of ``prefix``, and its end (RFC 7541, 5.1)."""
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
