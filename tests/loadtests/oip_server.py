"""A model server over HTTP that errs when told: OIP JSON, ``y = 2x``, in threads.

    python -m tests.loadtests.oip_server PORT

It starts in a tenth of the gateway's time, for tests about what is done with a server.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

#: The number of the request, from 0, and its inputs by name → (status, y by name); it may wait.
Answer = Callable[[int, list[float]], tuple[int, list[float]]]

CONFIG = {
    "name": "double",
    "max_batch_size": 8,
    "input": [{"name": "x", "data_type": "TYPE_FP32", "dims": [4]}],
    "output": [{"name": "y", "data_type": "TYPE_FP32", "dims": [4]}],
    "parameters": {"range.x": {"string_value": "0..10"}},
}


def double(number: int, x: list[float]) -> tuple[int, list[float]]:
    return 200, [2 * value for value in x]


class OipServer:
    """``asked``: when each request's body had arrived, ``time.perf_counter``."""

    def __init__(self, answer: Answer, port: int = 0) -> None:
        self.asked: list[float] = []
        lock, asked = threading.Lock(), self.asked

        class OipHandler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def do_GET(self) -> None:
                self._reply(200, CONFIG)

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                with lock:
                    number = len(asked)
                    asked.append(time.perf_counter())
                tensor = json.loads(body)["inputs"][0]
                status, y = answer(number, tensor["data"])
                output = {"name": "y", "datatype": "FP32", "shape": tensor["shape"], "data": y}
                self._reply(
                    status, {"outputs": [output]} if status == 200 else {"error": "told to"}
                )

            def _reply(self, status: int, document: Any) -> None:
                data = json.dumps(document).encode()
                self.send_response(status)
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", port), OipHandler)
        self._server.daemon_threads = True
        #: What an answer raises ends its connection; it is no error of the test.
        self._server.handle_error = lambda *_: None  # type: ignore[method-assign]
        self.address = f"127.0.0.1:{self._server.server_port}"

    def run(self) -> None:
        """Serve until the process ends."""
        self._server.serve_forever()

    @contextmanager
    def running(self) -> Iterator[OipServer]:
        thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self._server.shutdown()
            self._server.server_close()
            thread.join()


@contextmanager
def serving(answer: Answer = double) -> Iterator[OipServer]:
    with OipServer(answer).running() as server:
        yield server


if __name__ == "__main__":
    OipServer(double, int(sys.argv[1])).run()
