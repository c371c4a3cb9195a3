"""A gateway in a child process, on free ports of the loopback interface."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from modelport.gateway.errors import Internal, Unavailable
from modelport.gateway.repository.storage.location import Location
from modelport.gateway.runtime.child_process import ChildProcess

STOP_SECONDS = 120.0


@contextmanager
def serving(repository: Path | Location, *flags: str) -> Iterator[dict[str, int]]:
    """Run a gateway and yield its ports by name (``http_port``, ...) once it is ready.

    The gateway is stopped at the end of the block.

    Raises:
        Unavailable: it does not start; the message has the last reason that it logged.
        Internal: it ended with an error.
    """
    command = [sys.executable, "-m", "modelport", "serve"]
    command += ["--model-repository", str(repository), "--log-format", "json"]
    command += ["--http-port", "0", "--grpc-port", "0", "--metrics-port", "0", *flags]
    process = ChildProcess(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    rest: list[str] = []
    reader = threading.Thread(target=lambda: rest.extend(process.stderr or ()), daemon=True)
    try:
        ports = _wait_until_ready(process)
        reader.start()  # a full pipe would block the gateway
        yield ports
    finally:
        process.stop(STOP_SECONDS)
        if reader.ident is not None:
            reader.join()
        process.stderr.close()
    if process.returncode:
        raise Internal(f"the gateway exited with status {process.returncode}: {rest[-1:]}")


def _wait_until_ready(process: ChildProcess) -> dict[str, int]:
    ports: dict[str, int] = {}
    said = ""
    assert process.stderr is not None
    for line in process.stderr:
        entry: dict[str, object] = {}
        with suppress(ValueError):
            entry = json.loads(line)
        said = str(entry.get("reason") or said or line.strip())
        if entry.get("event") == "listening":
            ports = {key: int(str(value)) for key, value in entry.items() if key.endswith("_port")}
        elif entry.get("event") == "started":
            return ports
    raise Unavailable(f"the gateway did not start: {said}")
