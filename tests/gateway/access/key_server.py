"""An HTTPS server of key sets, which can also fail in many ways."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
import time
from collections.abc import Callable
from typing import Any


class KeyServer:
    """An HTTPS server in threads; ``answer`` gets each connection after its request was read."""

    def __init__(self, context: ssl.SSLContext) -> None:
        self.answer: Callable[[ssl.SSLSocket], None] = lambda peer: None
        self.requests = 0
        self.arrived = threading.Condition()
        self._context = context
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                peer, _ = self._socket.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(peer,), daemon=True).start()

    def _serve(self, plain: socket.socket) -> None:
        with contextlib.suppress(OSError), self._context.wrap_socket(plain, True) as peer:
            request = b""
            while b"\r\n\r\n" not in request:
                request += peer.recv(4096) or b"\r\n\r\n"
            answer = self.answer
            with self.arrived:
                self.requests += 1
                self.arrived.notify_all()
            answer(peer)

    def wait(self, requests: int) -> None:
        with self.arrived:
            assert self.arrived.wait_for(lambda: self.requests >= requests, 60)

    def close(self) -> None:
        self._socket.close()


def reply(body: bytes, status: str = "200 OK", headers: str = "") -> Callable[[Any], None]:
    head = f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n{headers}\r\n".encode()
    return lambda peer: peer.sendall(head + body)


def dawdle(peer: ssl.SSLSocket) -> None:
    peer.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
    while True:
        peer.sendall(b" ")
        time.sleep(0.05)


def endless_body(peer: ssl.SSLSocket) -> None:
    peer.sendall(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
    while True:
        peer.sendall(b"1000\r\n" + b" " * 0x1000 + b"\r\n")


def endless_head(peer: ssl.SSLSocket) -> None:
    peer.sendall(b"HTTP/1.1 200 OK\r\n")
    while True:
        peer.sendall(b"X: " + b"x" * 4000 + b"\r\n")
