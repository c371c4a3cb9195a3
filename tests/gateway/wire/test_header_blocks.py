"""Header blocks that are decoded once, and those that change what the next one means."""

from __future__ import annotations

import hpack
import pytest

from modelport.gateway.wire.http2.header_blocks import FieldSection, HeaderBlocks, scan
from tests.gateway.upstream.http2_peer import OK, TRAILERS


def text(section: FieldSection) -> dict[str, str]:
    fields = [*section.pseudo.items(), *section.regular]
    return {name.decode(): value.decode() for name, value in fields}


def test_a_block_that_fills_the_table_changes_what_the_next_means() -> None:
    encoder, blocks = hpack.Encoder(), HeaderBlocks(text)
    for round_ in range(3):
        for fields in (OK, TRAILERS, [("grpc-status", str(round_)), ("grpc-message", "x" * 200)]):
            assert blocks.decode(encoder.encode(fields)) == dict(fields)
            assert blocks.decode(encoder.encode(fields)) == dict(fields)
    assert blocks.decode(b"\x88") == {":status": "200"}


@pytest.mark.parametrize(
    ("block", "leaves"),
    [
        (b"", True),
        (b"\x88\xbe", True),
        (b"\x00\x01a\x02bc\x88", True),
        (b"\x0d\x02ab", True),
        (b"\x10\x81a\x82bc", True),
        (b"\x40\x01a\x01b", False),
        (b"\x88\x41\x01b", False),
        (b"\x20", False),
        (b"\xff\x01", True),
        (b"\xff\x81\x01\x20", False),
        (b"\x0f\x0d\x0258", True),  # content-length, as nghttp2 sends it
        (b"\x0f\x0d\x0258\x40\x01a\x01b", False),
        (b"\x00\x7f\x00" + bytes(127) + b"\x00", True),
        (b"\x00\x7f\x00" + bytes(127) + b"\x00\x20", False),
    ],
)
def test_which_blocks_leave_the_table_alone(block: bytes, leaves: bool) -> None:
    assert scan(block) is leaves
