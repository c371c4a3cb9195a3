"""The cost of decoding a JPEG or PNG, read from its structure before any of it is decoded.

A few kilobytes may say that they are an image of 33 million pixels, or of 2,000 scans that each go
through all of them, or hold millions of chunks. The sides, the scans and the chunks are bounded by
the number of bytes, and by the size of the model's input: what is much larger than that must be
paid for in bytes.
"""

from __future__ import annotations

import re

#: Pixels that an image of any number of bytes may have, all scans together: for each pixel of the
#: model's input, at least and at most; and if the model takes every size.
FREE_RATIO, LEAST_FREE_PIXELS, MOST_FREE_PIXELS = 64, 1 << 18, 1 << 22
OPEN_FREE_PIXELS = 1 << 20
#: What a row or a column costs besides its pixels.
SIDE_PIXELS = 16
#: Past those: decoded bytes for each byte sent. JPEGs of one colour have 190, photographs 10 to 40.
RATIO = 256
#: Chunks or segments that an image of any size may have, and bytes for each one more.
FREE_CHUNKS, CHUNK_BYTES = 1000, 1024
_BYTES_PER_PIXEL = 3
_WINDOW_BYTES = 128 * 1024
_PNG = b"\x89PNG\r\n\x1a\n"
#: The chunks that pixels are made of. Others may be compressed, and nothing here reads them.
_PNG_CHUNKS = frozenset({b"IHDR", b"PLTE", b"tRNS", b"IDAT", b"IEND"})
#: A marker; within a scan, zeros and restarts (D0 to D7) are none.
_MARKER = re.compile(rb"\xff[^\x00\xff]")
_MARKER_IN_SCAN = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]")
_START, _END, _SCAN, _ALONE = 0xD8, 0xD9, 0xDA, 0x01
#: Start of frame, of every process: C0 to CF without DHT, JPG and DAC.
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}


class TooCostly(Exception):
    """The message names the excess, relative to the number of bytes."""


#: The part of an image's data that a decoder needs, its pixels and scans.
Cost = tuple[bytes, int, int]


def checked(data: bytes, model_pixels: int) -> bytes:
    """Return ``data``, or the part of it that a decoder needs.

    Data that is not a JPEG or PNG, or damaged, is left to the decoder.

    Args:
        model_pixels: the size of the model's input; 0: every size.

    Raises:
        TooCostly: decoding would cost too much for so few bytes.
    """
    size = len(data)
    needed, pixels, scans = _png(data) if data.startswith(_PNG) else _jpeg(data)
    free = OPEN_FREE_PIXELS
    if model_pixels:
        free = min(max(FREE_RATIO * model_pixels, LEAST_FREE_PIXELS), MOST_FREE_PIXELS)
        free = max(free, 2 * model_pixels)
    if pixels > max(free, RATIO * size // _BYTES_PER_PIXEL):
        raise TooCostly(f"the cost of {pixels} pixels in {size} bytes")
    if pixels * scans > max(free, RATIO * size):
        raise TooCostly(f"the cost of {scans} scans of {pixels} pixels in {size} bytes")
    return needed


def _bound_chunks(count: int, size: int) -> None:
    if count > FREE_CHUNKS + size // CHUNK_BYTES:
        raise TooCostly(f"more than {count - 1} chunks in {size} bytes")


def _pixels(width: int, height: int) -> int:
    """The pixels that cost as much: those of a narrow image cost more than others."""
    if not width or not height:
        return 0
    return width * height + SIDE_PIXELS * (width + height)


def _png(data: bytes) -> Cost:
    view, offset, count, pixels = memoryview(data), len(_PNG), 0, 0
    kept: list[memoryview] = [view[:offset]]
    while offset + 8 <= len(data):
        end = offset + 12 + int.from_bytes(view[offset : offset + 4])
        kind = bytes(view[offset + 4 : offset + 8])
        count += 1
        _bound_chunks(count, len(data))
        if kind == b"IHDR":
            width, height = (int.from_bytes(view[at : at + 4]) for at in (offset + 8, offset + 12))
            pixels = max(pixels, _pixels(width, height))
        if kind in _PNG_CHUNKS:
            kept.append(view[offset:end])
        offset = end
    return data if len(kept) == count + 1 else b"".join(kept), pixels, 1


def _jpeg(data: bytes) -> Cost:
    offset = count = pixels = scans = 0
    pattern = _MARKER
    while (found := _search(pattern, data, offset)) is not None:
        marker, offset = data[found.end() - 1], found.end()
        if marker == _END:
            break
        count += 1
        _bound_chunks(count, len(data))
        if marker in (_START, _ALONE) or 0xD0 <= marker <= 0xD7:
            continue
        if marker in _FRAMES:
            height, width = (int.from_bytes(data[at : at + 2]) for at in (offset + 3, offset + 5))
            pixels = max(pixels, _pixels(width, height))
        pattern = _MARKER
        if marker == _SCAN:
            scans += 1
            pattern = _MARKER_IN_SCAN
        offset += max(2, int.from_bytes(data[offset : offset + 2]))
    return data, pixels, max(1, scans)


def _search(pattern: re.Pattern[bytes], data: bytes, offset: int) -> re.Match[bytes] | None:
    """The first match after ``offset``; other threads can run between windows."""
    for start in range(offset, len(data), _WINDOW_BYTES):
        # A marker may begin in one window and end in the next.
        found = pattern.search(data, max(offset, start - 1), start + _WINDOW_BYTES)
        if found is not None:
            return found
    return None
