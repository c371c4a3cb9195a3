"""System shared memory: regions that clients on this machine create and register by name.

A region is accessed with ``pread`` and ``pwrite`` and never mapped. Its owner may truncate it at
any time: access to a mapping past the end raises SIGBUS, which would end the process, while a short
read only fails the request. The one copy costs no more than receiving the tensor from a socket, and
the client cannot change the copied data after its validation.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import weakref
from typing import Any

import numpy as np

from modelport.gateway.errors import (
    AlreadyExists,
    Internal,
    InvalidArgument,
    NotFound,
    Unavailable,
    Unsupported,
)

#: The folder of POSIX shared memory objects on Linux.
FOLDER = "/dev/shm"
#: Each region holds a file descriptor.
MAX_REGIONS = 512
MAX_NAME_LENGTH = 255
#: A key as ``shm_open`` takes it: one name, with or without a leading slash.
_KEY = re.compile(r"/?([^/\0]{1,255})")
#: Objects of servers, not clients: of Triton's Python backend, and glibc's named semaphores, which
#: lie in the same folder.
RESERVED = ("triton_python_backend_shm_region_", "sem.")
#: File offsets are signed 64-bit integers.
_END = 2**63
#: The maximum of C's ``size_t``, in which Triton adds offset and size.
_MAX_SIZE = 2**64 - 1
DISABLED = (
    "Client shared memory is disabled. Start the server with '--allow-client-shm=true' to enable."
)
Row = dict[str, Any]


class Region:
    """A registered part of an open object; closed when its last request has ended.

    A request keeps its regions, so it writes its outputs even after they are unregistered.
    """

    def __init__(self, name: str, key: str, offset: int, byte_size: int, descriptor: int) -> None:
        self.name = name
        self.key = key
        self.offset = offset
        self.byte_size = byte_size
        self._descriptor = descriptor
        weakref.finalize(self, os.close, descriptor)

    def row(self) -> Row:
        keys = ("name", "key", "offset", "byte_size")
        return {key: getattr(self, key) for key in keys}

    def check(self, offset: int, byte_size: int) -> None:
        """Raise unless this range lies within the region.

        Raises:
            InvalidArgument: the range exceeds the region.
        """
        if offset < 0 or offset >= self.byte_size:
            raise InvalidArgument(f"Invalid offset for shared memory region: '{self.name}'")
        if byte_size > _MAX_SIZE - offset:
            raise InvalidArgument(
                f"Integer overflow detected: byte_size ({byte_size}) + offset ({offset}) exceeds "
                f"maximum value ({_MAX_SIZE}) for region '{self.name}'"
            )
        if byte_size < 0 or byte_size > self.byte_size - offset:
            raise InvalidArgument(
                f"Invalid offset + byte size for shared memory region: '{self.name}'"
            )

    def read(self, offset: int, byte_size: int) -> memoryview:
        """Return a copy of a range.

        Raises:
            InvalidArgument: the range exceeds the region, or the object has been truncated.
        """
        self.check(offset, byte_size)
        view, done = np.empty(byte_size, np.uint8).data, 0
        while done < byte_size:
            part = os.preadv(self._descriptor, [view[done:]], self.offset + offset + done)
            if not part:
                raise self._truncated()
            done += part
        return view

    def write(self, offset: int, data: memoryview) -> None:
        """Write ``data``, a view of bytes, at ``offset``.

        Raises:
            InvalidArgument: the range exceeds the region, or the object has been truncated.
            Unavailable: the machine has no memory for it.
        """
        self.check(offset, len(data))
        start, done = self.offset + offset, 0
        # Writing would extend a truncated object. If it is truncated after this check, the write
        # extends it at most to the registered size.
        if os.fstat(self._descriptor).st_size < start + len(data):
            raise self._truncated()
        try:
            while done < len(data):
                done += os.pwrite(self._descriptor, data[done:], start + done)
        except OSError as error:
            raise Unavailable(f"cannot write to shared memory region '{self.name}'") from error

    def _truncated(self) -> InvalidArgument:
        return InvalidArgument(
            f"shared memory region '{self.name}' has become smaller than when it was registered; "
            "register it again"
        )


class SharedMemoryRegions:
    """The registered regions by name. Only the event loop uses them.

    ``allowed`` false: clients may neither register nor use regions.
    """

    def __init__(self, allowed: bool) -> None:
        self.allowed = allowed
        self._regions: dict[str, Region] = {}
        #: Unregistered regions of requests in flight, which others may use as long, as in Triton.
        self._leaving = weakref.WeakValueDictionary[str, Region]()

    def register(self, name: str, key: str, offset: int, byte_size: int) -> None:
        """Register ``byte_size`` bytes of the object ``key``, from ``offset``, as ``name``.

        Raises:
            Unsupported: shared memory is not allowed.
            AlreadyExists: the name is taken.
            Internal: the object cannot be opened, as in Triton.
            InvalidArgument: the object is reserved, or too small.
            Unavailable: there are too many regions.
        """
        self.require_allowed()
        _check_name(name)
        if name in self._regions:
            raise AlreadyExists(f"shared memory region '{name}' already in manager")
        if len(self._regions) + len(self._leaving) >= MAX_REGIONS:
            raise Unavailable(
                f"there are {MAX_REGIONS} shared memory regions already; unregister one first"
            )
        descriptor = _open(name, key)
        region = Region(name, key, offset, byte_size, descriptor)
        if min(offset, byte_size) < 0 or byte_size == 0 or offset + byte_size >= _END:
            raise InvalidArgument(
                f"failed to register shared memory region '{name}': invalid args; 'offset' and "
                "'byte_size' must lie within the object"
            )
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or offset + byte_size > status.st_size:
            raise InvalidArgument(
                f"failed to register shared memory region '{name}': invalid args; the object "
                f"'{key}' has no {byte_size} bytes from byte {offset} on"
            )
        self._leaving.pop(name, None)
        self._regions[name] = region

    def unregister(self, name: str) -> None:
        """Remove the region, if it exists, once no request in flight uses it.

        Raises:
            Unsupported: shared memory is not allowed.
        """
        self.require_allowed()
        region = self._regions.pop(name, None)
        if region is not None:
            self._leaving[name] = region

    def unregister_all(self) -> None:
        """Remove all regions, as ``unregister`` does."""
        self.require_allowed()
        self._leaving.update(self._regions)
        self._regions.clear()

    def registered(self) -> list[Row]:
        """The regions that have not been unregistered."""
        return [region.row() for region in self._regions.values()]

    def status(self, name: str = "") -> list[Row]:
        """All regions, or the named one.

        Raises:
            NotFound: there is no region of that name.
        """
        regions = {**self._leaving, **self._regions}
        if name and name not in regions:
            raise NotFound(f"Unable to find system shared memory region: '{name}'")
        return [region.row() for region in regions.values() if name in ("", region.name)]

    def get(self, name: str) -> Region:
        """The region of that name, to read or write.

        Raises:
            Unsupported: shared memory is not allowed.
            NotFound: there is no region of that name.
        """
        self.require_allowed()
        region = self._regions.get(name) or self._leaving.get(name)
        if region is None:
            raise NotFound(f"Unable to find shared memory region: '{name}'")
        return region

    def require_allowed(self) -> None:
        if not self.allowed:
            raise Unsupported(DISABLED)


def _check_name(name: str) -> None:
    if not 0 < len(name) <= MAX_NAME_LENGTH:
        raise InvalidArgument(
            f"a shared memory region's name has 1 to {MAX_NAME_LENGTH} characters, not {len(name)}"
        )


def _open(name: str, key: str) -> int:
    bare = key.lstrip("/")
    reserved = next((prefix for prefix in RESERVED if bare.startswith(prefix)), "")
    if reserved:
        raise InvalidArgument(
            f"cannot register shared memory region '{name}' with key '{key}' as the key contains "
            f"the reserved prefix '{reserved}'"
        )
    found = _KEY.fullmatch(key)
    if found is None or found[1] in (".", ".."):
        raise InvalidArgument(
            f"cannot register shared memory region '{name}' - invalid shm key '{key}'; give one "
            "name, as for shm_open"
        )
    try:
        # O_NONBLOCK: opening a FIFO or device must not block.
        flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        return os.open(os.path.join(FOLDER, found[1]), flags)
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise Unavailable("the server has too many open files") from error
        raise Internal(f"Unable to open shared memory region: '{key}'") from error
    except ValueError as error:  # a lone surrogate
        raise InvalidArgument(f"Unable to open shared memory region: {key!a}") from error
