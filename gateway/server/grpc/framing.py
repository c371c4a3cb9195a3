"""gRPC's length-prefixed messages, its compression and its text forms.

https://github.com/grpc/grpc/blob/master/doc/PROTOCOL-HTTP2.md
"""

from __future__ import annotations

import contextlib
import struct
import zlib

from modelport.gateway.wire import inflation

PREFIX_BYTES = 5
#: gRPC's own default is 4 MB; Triton's limit, and protobuf's, is 2 GiB.
MAX_MESSAGE_BYTES = 2**31 - 1
#: For both protocols there is one limit.
REMEDY = "raise --http-max-input-size"
IDENTITY = b"identity"
#: Enough of a compressed message to tell the model it names.
BEGINNING_BYTES = 4096
ENCODINGS = b"identity,deflate,gzip"
_prefix = struct.Struct(">BI")


class MalformedFrame(Exception):
    """A message is not framed as the protocol says."""


class MessageTooLarge(Exception):
    """The message is larger than the limit."""


def prefix(length: int) -> bytes:
    """Return the prefix of an uncompressed message of ``length`` bytes."""
    return _prefix.pack(0, length)


def frame(content: bytes) -> bytes:
    return _prefix.pack(0, len(content)) + content


def too_large(length: int, limit: int = MAX_MESSAGE_BYTES) -> MessageTooLarge:
    return MessageTooLarge(f"Received message larger than max ({length} vs. {limit}); {REMEDY}")


def not_one_message() -> MalformedFrame:
    return MalformedFrame("the request is not exactly one complete message")


class Frames:
    """Cuts messages out of bytes as they come.

    Args:
        encoding: what the client states in ``grpc-encoding``: ``IDENTITY``, or one of
            ``inflation.WINDOW_BITS``.
        limit: the largest message, in bytes, also after decompression.
    """

    __slots__ = ("_encoding", "_limit", "_offset", "buffer")

    def __init__(self, encoding: bytes, limit: int) -> None:
        self._encoding, self._limit = encoding, limit
        #: What has come and is not taken yet, from ``_offset`` on.
        self.buffer = bytearray()
        self._offset = 0

    def __len__(self) -> int:
        """The number of bytes that are held."""
        return len(self.buffer) - self._offset

    def missing(self) -> int:
        """Return the number of bytes that the next message lacks, as far as it is known."""
        held = len(self)
        if held < PREFIX_BYTES:
            return PREFIX_BYTES - held
        length = int.from_bytes(self.buffer[self._offset + 1 : self._offset + PREFIX_BYTES])
        return max(0, PREFIX_BYTES + length - held)

    def take(self) -> bytes | None:
        """The next message, if it is complete; ``Compressed`` where it is.

        Raises:
            MalformedFrame: it is not framed or compressed as the protocol says.
            MessageTooLarge: it is, or says that it will be, larger than the limit.
        """
        start = self._offset
        if len(self.buffer) - start < PREFIX_BYTES:
            return None
        compressed, length = _prefix.unpack_from(self.buffer, start)
        if length > self._limit:
            raise too_large(length, self._limit)
        if len(self.buffer) - start - PREFIX_BYTES < length:
            return None
        end = start + PREFIX_BYTES + length
        with memoryview(self.buffer) as view:
            content = bytes(view[start + PREFIX_BYTES : end])
        self._offset = end
        if end == len(self.buffer):
            self.buffer, self._offset = bytearray(), 0
        elif end > len(self.buffer) // 2:
            del self.buffer[:end]
            self._offset = 0
        return self._plain(compressed, content)

    def only(self, body: bytes | memoryview) -> bytes | memoryview:
        """The one message that ``body`` is, without a copy of a large one.

        Raises:
            MalformedFrame, MessageTooLarge: as ``take``.
        """
        if len(body) < PREFIX_BYTES:
            raise MalformedFrame("the request has no message")
        compressed, length = _prefix.unpack_from(body)
        if length > self._limit:
            raise too_large(length, self._limit)
        if length != len(body) - PREFIX_BYTES:
            raise not_one_message()
        content = memoryview(body)[PREFIX_BYTES:]
        return self._plain(compressed, content) if compressed else content

    def _plain(self, compressed: int, content: bytes | memoryview) -> bytes:
        if not compressed:
            return bytes(content)
        if compressed != 1 or self._encoding not in inflation.WINDOW_BITS:
            raise MalformedFrame("a message is marked as compressed, but no grpc-encoding is given")
        found = Compressed(content)
        found.encoding = self._encoding
        return found


class Compressed(bytes):
    """A message as it came."""

    encoding: bytes

    def beginning(self) -> bytes:
        """Its first plain bytes, as far as they are any."""
        inflater = zlib.decompressobj(inflation.WINDOW_BITS[self.encoding])
        with contextlib.suppress(zlib.error):
            return inflater.decompress(self[:BEGINNING_BYTES], BEGINNING_BYTES)
        return b""

    def plain(self, limit: int) -> bytes:
        """The message.

        Raises:
            MalformedFrame: it is not compressed as the protocol says.
            MessageTooLarge: it becomes larger than the limit.
        """
        try:
            return inflation.inflate(self, self.encoding, limit)
        except inflation.MalformedStream as error:
            raise MalformedFrame("a message is not compressed as grpc-encoding states") from error
        except inflation.DecompressedTooLarge as error:
            raise MessageTooLarge(
                f"Received message that decompresses to more than max ({limit}); {REMEDY}"
            ) from error
