"""The process that waits to take a worker's place."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys

from modelport.gateway.server.workers.process import VARIABLE

SPARE = """
import os, sys, threading
from modelport.gateway.server.workers import worker
number = worker.take_assignment().number
print(number, os.sched_getscheduler(0), threading.active_count(), "onnxruntime" in sys.modules)
"""


def test_a_spare_has_done_its_imports_with_the_usual_priority_when_it_takes_a_place() -> None:
    """With idle priority they would take minutes on a busy machine, and it would not be ready."""
    parent, channel = socket.socketpair()
    with parent, channel:
        content = json.dumps([3, []]).encode()  # its number and no files, before it has started
        parent.sendall(len(content).to_bytes(4, "big") + content)
        assignment = {"number": -1, "http_port": 0, "grpc_port": 0, "arguments": []}
        given = {
            **assignment,
            "channel": channel.fileno(),
            "spare": True,
            "backends": ["onnxruntime", "gone"],
        }
        run = subprocess.run(
            [sys.executable, "-c", SPARE],
            env={**os.environ, VARIABLE: json.dumps(given)},
            pass_fds=[channel.fileno()],
            stdout=subprocess.PIPE,
            text=True,
            timeout=60,
            check=True,
        )
    assert run.stdout.split() == ["3", str(os.SCHED_OTHER), "1", "True"]
