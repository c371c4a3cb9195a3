"""A proxy that spoils a model server: ``python -m tests.loadtests.gating.proxy PORT UPSTREAM``.

HTTP/1.1 in lockstep, a thread for every connection. What it does to inferences is exact: answers
that took longer than nearly all before them are held for a part of their time, which moves the
quantiles beyond by that part and no others; or the last byte of a share of answers is changed.
"""

from __future__ import annotations

import argparse
import bisect
import random
import socket
import socketserver
import threading
import time
from collections import deque
from typing import BinaryIO

#: The share of answers that are held: the p99 is among them.
HELD = 0.03
#: What "before" is: a machine that was slower a minute ago must not hide what is slow now.
REMEMBERED = 500


class Spoiler:
    """Shared by all connections; the lock guards what has been seen."""

    def __init__(self, tail: float, wrong: float, die_after: int) -> None:
        self._tail, self._wrong, self._die_after = tail, wrong, die_after
        self._random = random.Random(0)
        self._lock = threading.Lock()
        self._times: deque[float] = deque()
        self._sorted: list[float] = []
        self._count = 0

    def spoil(self, answer: bytearray, began: float) -> bool:
        """Change and hold one answer; false: break the connection instead."""
        took = time.perf_counter() - began
        with self._lock:
            self._count += 1
            if self._die_after and self._count > self._die_after:
                return False
            slow = self._is_slow(took)
            wrong = self._random.random() < self._wrong
        if wrong:
            answer[-1] ^= 0x41
        if slow and self._tail > 1:
            time.sleep(max(0.0, began + took * self._tail - time.perf_counter()))
        return True

    def _is_slow(self, took: float) -> bool:
        self._times.append(took)
        bisect.insort(self._sorted, took)
        if len(self._times) > REMEMBERED:
            del self._sorted[bisect.bisect_left(self._sorted, self._times.popleft())]
        return took >= self._sorted[int(len(self._sorted) * (1 - HELD))]


def message(stream: BinaryIO) -> bytearray:
    """One request or answer with a Content-Length; empty at the connection's end."""
    head, length = bytearray(), 0
    while True:
        line = stream.readline()
        if not line:
            return bytearray()
        head += line
        if line in (b"\r\n", b"\n"):
            break
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length":
            length = int(value)
    body = stream.read(length) if length else b""
    return head + body


def serve(port: int, upstream: tuple[str, int], spoiler: Spoiler) -> None:
    class ProxyHandler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            client: socket.socket = self.request
            server = socket.create_connection(upstream)
            for one in (client, server):
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with server, client.makefile("rb") as asked, server.makefile("rb") as answered:
                while request := message(asked):
                    began = time.perf_counter()
                    server.sendall(request)
                    answer = message(answered)
                    if not answer:
                        return
                    if b"/infer " in request[:300] and not spoiler.spoil(answer, began):
                        return
                    client.sendall(answer)

    class ProxyServer(socketserver.ThreadingTCPServer):
        daemon_threads = True
        allow_reuse_address = True

    with ProxyServer(("127.0.0.1", port), ProxyHandler) as listening:
        listening.serve_forever()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("port", type=int)
    parser.add_argument("upstream", metavar="HOST:PORT")
    parser.add_argument("--tail", type=float, default=1.0, metavar="FACTOR")
    parser.add_argument("--wrong", type=float, default=0.0, metavar="SHARE")
    parser.add_argument("--die-after", type=int, default=0, metavar="REQUESTS")
    options = parser.parse_args()
    host, _, port = options.upstream.rpartition(":")
    spoiler = Spoiler(options.tail, options.wrong, options.die_after)
    serve(options.port, (host, int(port)), spoiler)


if __name__ == "__main__":
    main()
