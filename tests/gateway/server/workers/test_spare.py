"""The process that waits to take a worker's place."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys

from modelport.gateway.server.workers.process import VARIABLE

SPARE = """
import os
from modelport.gateway.server.workers import worker
print(worker.take_assignment().number, os.sched_getscheduler(0))
"""


def test_a_spare_that_takes_a_place_at_once_has_the_usual_priority() -> None:
    """It begins with idle priority, which takes privileges to leave."""
    parent, channel = socket.socketpair()
    with parent, channel:
        content = json.dumps([3, []]).encode()  # its number and no files, before it has started
        parent.sendall(len(content).to_bytes(4, "big") + content)
        assignment = {"number": -1, "http_port": 0, "grpc_port": 0, "arguments": []}
        given = {**assignment, "channel": channel.fileno(), "spare": True}
        run = subprocess.run(
            [sys.executable, "-c", SPARE],
            env={**os.environ, VARIABLE: json.dumps(given)},
            pass_fds=[channel.fileno()],
            stdout=subprocess.PIPE,
            text=True,
            timeout=60,
            check=True,
        )
    assert run.stdout.split() == ["3", str(os.SCHED_OTHER)]
