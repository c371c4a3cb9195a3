"""Ports that the workers share, held for them by the parent.

A socket that is bound and does not listen gets no connection, but the port is this gateway's while
it is open: also while no worker listens, and also where the system chose the number.
"""

from __future__ import annotations

import errno
import socket

from modelport.gateway.errors import Unavailable


class HeldPort:
    """``number`` is the port really held; ``flag`` is the option that asks for it.

    Raises:
        Unavailable: somebody else has it, or the address is none of this machine's.
    """

    def __init__(self, address: str, port: int, flag: str) -> None:
        try:
            if port:  # with SO_REUSEPORT another gateway's port would be shared, not refused
                with _bound(address, port):
                    pass
            self._socket = _held(address, port)
        except OSError as error:
            raise Unavailable(
                f"cannot listen on {address}:{port}: {(error.strerror or str(error)).lower()}; "
                f"choose another with {flag} or {flag.replace('port', 'address')}"
            ) from error
        self.number: int = self._socket.getsockname()[1]

    def close(self) -> None:
        self._socket.close()


def _held(address: str, port: int) -> socket.socket:
    # Without SO_REUSEADDR whoever binds the port meanwhile is refused, though nobody listens yet.
    try:
        return _bound(address, port, socket.SO_REUSEPORT)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        # What is left are connections of an earlier process that linger on the port.
        return _bound(address, port, socket.SO_REUSEPORT, socket.SO_REUSEADDR)


def _bound(address: str, port: int, *options: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        for option in options or (socket.SO_REUSEADDR,):
            bound.setsockopt(socket.SOL_SOCKET, option, 1)
        bound.bind((address, port))
    except BaseException:
        bound.close()
        raise
    return bound
