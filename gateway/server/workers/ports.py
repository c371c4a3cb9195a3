"""Ports that the workers share, reserved by the parent.

A socket that is bound but does not listen receives no connections, and keeps the port for this
gateway while no worker listens, even if the system chose its number.
"""

from __future__ import annotations

import errno
import socket

from modelport.gateway.server.listening_socket import taken


class ReservedPort:
    """A bound port. ``number`` is its real number, ``flag`` the option to name in an error.

    Raises:
        Unavailable: The port is taken, or the address does not belong to this machine.
    """

    def __init__(self, address: str, port: int, flag: str) -> None:
        try:
            if port:  # SO_REUSEPORT alone would share the port of another gateway
                with _bound(address, port):
                    pass
            self._socket = _reserved(address, port)
        except OSError as error:
            raise taken(address, port, flag, error.strerror or str(error)) from error
        self.number: int = self._socket.getsockname()[1]

    def close(self) -> None:
        self._socket.close()


def _reserved(address: str, port: int) -> socket.socket:
    # Without SO_REUSEADDR no other process can bind the port before a worker listens.
    try:
        return _bound(address, port, socket.SO_REUSEPORT)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        # The port is only held by connections of an earlier process in TIME_WAIT.
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
