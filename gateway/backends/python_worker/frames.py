"""Frames between the gateway and a worker, over a stream socket.

A frame is a header, JSON and the content of tensors. Contents of more than ``INLINE_BYTES`` travel
in a region of shared memory (``regions``). Where none is free or large enough, they travel in a
sealed memory file, whose descriptor comes with the frame. Neither side can change or truncate what
the other one reads. Both sides use this module.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import socket
import struct
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

from .regions import Buffer, ReceivedRegions, SentRegions, aligned

#: Size of the JSON, the same with the content, kind, descriptors, region or 0, number, and a value.
#: The content of a sealed memory file does not count.
HEADER = struct.Struct("<IIBBBxQQ")
INLINE_BYTES = 64 * 1024
#: Of JSON. Texts are cut to ``MAX_TEXT`` before they are sent.
MAX_META_BYTES = 1024 * 1024
MAX_TEXT = 8 * 1024
#: Begins a line of standard error that is a record of ``Logger``.
LOG_MARK = "\x1emodelport-log "
READ_BYTES = 256 * 1024
_MAX_FDS = 32
_INT = struct.Struct("i")
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
_NO_FDS = socket.CMSG_SPACE(_MAX_FDS * 4)
#: As integers: each operation on Python's enumerations costs a microsecond.
_CLOEXEC, _CTRUNC = int(socket.MSG_CMSG_CLOEXEC), int(socket.MSG_CTRUNC)
DONTWAIT = int(socket.MSG_DONTWAIT)

# From the gateway.
START, INITIALIZE, INFER, CANCEL, CREDIT, REPLY, STOP, CHECK = range(1, 9)
# From the worker.
(
    CONFIGURED,
    READY,
    FAILED,
    RESULT,
    RESPONSE,
    CALL,
    CALL_NEXT,
    CALL_END,
    CONTROL,
    METRICS,
    CHECKED,
) = range(16, 27)
#: Bits of a header's value: of the last response; of READY, that the model works on several batches
#: at once, and that it checks itself.
FINAL = CONCURRENT = 1
CHECKS = 2


class FrameError(Exception):
    """The other side does not keep to the protocol."""


class TooLarge(ValueError):
    """The texts of a frame are too large."""


class Frame(NamedTuple):
    """A received frame. ``content`` has the tensors; it is read-only unless it is a bytearray."""

    kind: int
    number: int
    value: int
    meta: bytes
    content: Any


class OutgoingFrame(NamedTuple):
    """A frame to send; ``descriptor`` is closed once it is sent, -1: none."""

    data: bytes
    descriptor: int = -1


def pack(
    kind: int, number: int, value: int = 0, meta: bytes = b"", buffers: Sequence[Buffer] = (),
    regions: SentRegions | None = None,
) -> OutgoingFrame:  # fmt: skip
    """Make a frame.

    Args:
        regions: those that large contents go to.

    Raises:
        TooLarge: its JSON is too large.
        OSError: there is no memory for its tensors.
    """
    if len(meta) > MAX_META_BYTES:
        raise TooLarge(
            f"names, parameters and other texts of tensors take {len(meta)} bytes, at most "
            f"{MAX_META_BYTES}"
        )
    if not buffers:
        return OutgoingFrame(HEADER.pack(len(meta), len(meta), kind, 0, 0, number, value) + meta)
    if len(buffers) == 1 and len(buffers[0]) <= INLINE_BYTES:
        size = len(meta) + len(buffers[0])
        head = HEADER.pack(len(meta), size, kind, 0, 0, number, value)
        return OutgoingFrame(b"".join((head, meta, buffers[0])))
    size = sum(aligned(len(buffer)) for buffer in buffers)
    if size > INLINE_BYTES and regions is not None:
        region, descriptor = regions.put(buffers, size)
        if region:
            files = descriptor >= 0
            head = HEADER.pack(len(meta), len(meta) + size, kind, files, region, number, value)
            return OutgoingFrame(head + meta, descriptor)
    parts: list[Buffer] = []
    for buffer in buffers:
        parts += (buffer, bytes(aligned(len(buffer)) - len(buffer)))
    if size <= INLINE_BYTES:
        head = HEADER.pack(len(meta), len(meta) + size, kind, 0, 0, number, value)
        return OutgoingFrame(b"".join((head, meta, *parts)))
    head = HEADER.pack(len(meta), len(meta), kind, 1, 0, number, value)
    return OutgoingFrame(head + meta, _sealed(parts))


def _sealed(parts: Sequence[Buffer]) -> int:
    """A memory file of ``parts`` that nobody can change any more."""
    file = os.memfd_create("tensors", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        for part in parts:
            view = memoryview(part)
            while view.nbytes:
                view = view[os.write(file, view) :]
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, _SEALS | fcntl.F_SEAL_SEAL)
    except BaseException:
        os.close(file)
        raise
    return file


class FrameReader:
    """Splits what a socket receives into frames.

    Args:
        most: the largest memory file that is mapped, in bytes.
        writable: tensors are copied, or mapped so that writes stay private.
    """

    def __init__(self, stream: socket.socket, most: int, writable: bool) -> None:
        self._stream, self._most, self._writable = stream, most, writable
        # Python would make and shrink an object of this size for every read.
        self._received = memoryview(bytearray(READ_BYTES))
        self._into = [self._received]
        self._buffer = b""
        self._descriptors: deque[int] = deque()
        self._regions = ReceivedRegions()

    def read(self, flags: int = 0) -> list[Frame]:
        """Receive once, and return the frames that are complete.

        Raises:
            EOFError: the other side has closed its end.
            FrameError: it does not keep to the protocol.
            OSError: nothing is there (``BlockingIOError``), or the socket fails.
        """
        size, ancillary, message_flags, _ = self._stream.recvmsg_into(
            self._into, _NO_FDS, flags | _CLOEXEC
        )
        for level, kind, content in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                usable = len(content) - len(content) % 4
                self._descriptors.extend(memoryview(content)[:usable].cast("i"))
        if not size:
            raise EOFError
        data = bytes(self._received[:size])
        if message_flags & _CTRUNC or len(self._descriptors) > _MAX_FDS:
            raise FrameError("it sends too many descriptors")
        return self._frames(self._buffer + data if self._buffer else data)

    def _frames(self, data: bytes) -> list[Frame]:
        found = []
        start, end = 0, len(data)
        while end - start >= HEADER.size:
            meta_size, size, kind, files, region, number, value = HEADER.unpack_from(data, start)
            inline = meta_size if region else size
            if meta_size > size or inline > MAX_META_BYTES + INLINE_BYTES or files > 1:
                raise FrameError("a frame has a false size")
            begin = start + HEADER.size
            if end - begin < inline:
                break
            start = begin + inline
            content: Any = None
            if region:
                content = self._copied(region, files, size - meta_size)
            elif files:
                content = self._mapped()
            elif size > meta_size:
                content = data[begin + meta_size : start]
                if self._writable:
                    content = bytearray(content)
            found.append(Frame(kind, number, value, data[begin : begin + meta_size], content))
        self._buffer = data[start:]
        return found

    def _copied(self, region: int, files: int, size: int) -> bytes | bytearray:
        """Copy the content of a frame out of its region, which may come with it."""
        try:
            if files:
                file = self._descriptor()
                try:
                    self._regions.add(region, file)
                finally:
                    os.close(file)
            return self._regions.take(region, size, self._writable)
        except OSError as error:
            raise FrameError("a descriptor is no memory file") from error
        except ValueError as error:
            raise FrameError(str(error)) from error

    def _descriptor(self) -> int:
        if not self._descriptors:
            raise FrameError("a frame lacks its descriptor")
        return self._descriptors.popleft()

    def _mapped(self) -> mmap.mmap:
        file = self._descriptor()
        try:
            if fcntl.fcntl(file, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
                raise FrameError("a memory file is not sealed")
            size = os.fstat(file).st_size
            if not 0 < size <= self._most:
                raise FrameError(f"a memory file has {size} bytes, at most {self._most}")
            access = mmap.ACCESS_COPY if self._writable else mmap.ACCESS_READ
            return mmap.mmap(file, size, access=access)
        except OSError as error:
            raise FrameError("a descriptor is no memory file") from error
        finally:
            os.close(file)

    def close(self) -> None:
        """Close the descriptors that no frame has taken, and the regions."""
        while self._descriptors:
            os.close(self._descriptors.popleft())
        self._regions = ReceivedRegions()


def send(stream: socket.socket, frame: OutgoingFrame, flags: int = 0) -> OutgoingFrame | None:
    """Send what the socket takes; return the rest of ``frame``, whose descriptor is gone then."""
    if frame.descriptor < 0:
        sent = stream.send(frame.data, flags)
    else:
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, _INT.pack(frame.descriptor))
        sent = stream.sendmsg([frame.data], [rights], flags)
        os.close(frame.descriptor)
    return None if sent == len(frame.data) else OutgoingFrame(frame.data[sent:])
