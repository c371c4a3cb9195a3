"""A network of the run's own, as the tests name fixed ports (8000, 8001, 8500 …) on localhost.

Processes that share a run have one each, and shared memory of their own.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import shutil
import socket
import struct
import subprocess
import sys

INSIDE = "MODELPORT_PEER_SUITES_NETWORK"
_CLONE_NEWNS, _CLONE_NEWNET = 0x00020000, 0x40000000
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 1


def enter() -> bool:
    """Run this program again in a network namespace of its own, where the system has them.

    Elsewhere the machine's own ports are used; a taken one is an error when the gateway starts.

    Returns: Whether the program has a network of its own.
    """
    if os.environ.get(INSIDE):
        _raise_loopback()
        return True
    unshare = shutil.which("unshare")
    command = [unshare or "", "--map-root-user", "--net"]
    if unshare and not subprocess.run([*command, "true"], capture_output=True).returncode:
        os.environ[INSIDE] = "1"
        os.execv(unshare, [*command, *sys.orig_argv])
    return False


def apart() -> None:
    """Give this process a network and a ``/dev/shm`` of its own; the run has entered one."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNS | _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "no namespaces of networks and mounts")
    _raise_loopback()
    if libc.mount(b"tmpfs", b"/dev/shm", b"tmpfs", 0, None):
        raise OSError(ctypes.get_errno(), "no /dev/shm of its own")


def _raise_loopback() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("16sH14s", b"lo", 0, b"")
        _, flags, _ = struct.unpack("16sH14s", fcntl.ioctl(any_socket, _SIOCGIFFLAGS, request))
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sH14s", b"lo", flags | _IFF_UP, b""))
