"""Header blocks that an HTTP/2 peer sends, decoded once each where they stay the same."""

from __future__ import annotations

import hpack

Headers = dict[str, str]

HEADER_LIMIT_BYTES = 64 * 1024
MAX_KNOWN = 64
_INDEXED, _WITHOUT_TABLE, _STRING = 0x80, 0x20, 0x7F


class HeaderBlocks:
    """The decoder of one connection.

    A server answers most calls with the same two blocks. What a block means depends on the table
    that earlier ones have filled, so those that are known are forgotten when one changes it.
    """

    def __init__(self) -> None:
        self._decoder = hpack.Decoder(max_header_list_size=HEADER_LIMIT_BYTES)
        self._known: dict[bytes, Headers] = {}

    def decode(self, block: bytes) -> Headers:
        """The fields of ``block``; of a name that is there twice, the last.

        Raises:
            HPACKError: it is damaged, or too large.
        """
        headers = self._known.get(block)
        if headers is None:
            headers = {str(name): str(value) for name, value in self._decoder.decode(block)}
            if not leaves_table(block):
                self._known.clear()
            elif len(self._known) < MAX_KNOWN:
                self._known[block] = headers
        return headers


def leaves_table(block: bytes) -> bool:
    """Whether ``block`` is sure to leave the table as it is; it is a sound one (RFC 7541, 6).

    It is of indices and of literals that are not to be indexed, all of the short forms.
    """
    at, end = 0, len(block)
    while at < end:
        first = block[at]
        at += 1
        if first >= _INDEXED:
            if first == 0xFF:
                return False
            continue
        if first >= _WITHOUT_TABLE or first & 0x0F == 0x0F:
            return False
        for _ in range(1 if first & 0x0F else 2):  # the value, or a name before it
            length = block[at] & _STRING
            if length == _STRING:
                return False
            at += 1 + length
    return True
