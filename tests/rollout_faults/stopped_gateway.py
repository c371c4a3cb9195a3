"""A gateway that is stopped (SIGSTOP) beyond its lease, while another one rolls back.

Requests wait in its sockets meanwhile. When it continues, it must answer all of them by the
baseline, although nothing has told it of the rollback yet.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from modelport.gateway.rollout.lease import LEASE_SECONDS
from tests.polling import eventually
from tests.rollout_faults.clients import BASELINE, MODEL
from tests.rollout_faults.served import PATH, GatewayPlace, place, repository

ROLLOUTS = "/v2/rollouts"
CONNECTIONS = 10
BODY = json.dumps(
    {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [1.0] * 4}]}
)
REQUEST = {"candidate": "2", "steps": [1.0], "manual": True, "min_seconds": 600.0, "keep": True}


def run(variant: str = "") -> list[str]:
    """Stop one of two gateways; return the violations."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        root = repository(Path(folder))
        stopped, other = place(root, variant=variant), place(root)
        gateways = [each.start() for each in (stopped, other)]
        for gateway in gateways:
            stack.callback(gateway.close)
        stopped.admin.post(PATH, REQUEST)
        for each in (stopped, other):
            eventually(
                lambda e=each: [s["share"] for s in e.admin.get(ROLLOUTS)] == [1.0], "a split"
            )  # type: ignore[misc]
        connections = [_connection(stopped, stack) for _ in range(CONNECTIONS)]
        before = []
        for each in connections:
            _ask(each)
            before.append(_answer(each))
        os.kill(gateways[0].process.pid, signal.SIGSTOP)
        began = time.monotonic()
        try:
            other.admin.post(f"{PATH}/rollback", {"reason": "a hunch"})
            for each in connections:
                _ask(each)
            # Nothing but time ends a lease.
            time.sleep(max(0.0, began + LEASE_SECONDS - time.monotonic()))
        finally:
            os.kill(gateways[0].process.pid, signal.SIGCONT)
        after = [_answer(each) for each in connections]
    found = [] if set(before) == {"2"} else [f"{before} answered before"]
    if set(after) != {BASELINE}:
        found.append(f"after the rollback at the other gateway, {after} answered")
    return found


def _connection(place: GatewayPlace, stack: ExitStack) -> http.client.HTTPConnection:
    connection = http.client.HTTPConnection("127.0.0.1", place.http_port, timeout=60.0)
    stack.callback(connection.close)
    return connection


def _ask(connection: http.client.HTTPConnection) -> None:
    connection.request("POST", f"/v2/models/{MODEL}/infer", BODY)


def _answer(connection: http.client.HTTPConnection) -> str:
    """The version that answered."""
    answer = connection.getresponse()
    document = json.loads(answer.read())
    return str(document.get("model_version", document))
