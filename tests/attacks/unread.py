"""Clients that ask for answers and do not read them, by every route, method and window.

Each attack is some connections, with what each of them sends. The memory that the server then holds
is bounded by ``--max-request-memory``, and by constants for each connection and request.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import select
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import hpack
from google.protobuf.descriptor import FieldDescriptor

from modelport.gateway.server.grpc.framing import frame as message
from modelport.gateway.wire.http2.frames import (
    DATA,
    DEFAULT_WINDOW_BYTES,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    INITIAL_WINDOW_SIZE,
    MAX_WINDOW_BYTES,
    PREFACE,
    frame,
    settings,
    window_update,
)
from modelport.gateway.wire.proto import grpc_service_pb2
from tests import models
from tests.attacks import cost
from tests.server import Gateway

#: The budget of the gateway that is attacked.
BUDGET_BYTES = 16 * 2**20
CONNECTIONS, REQUESTS = 4, 1000
#: Held besides the budget: a connection with its buffers, and a request with its task.
CONNECTION_BYTES, REQUEST_BYTES = 2**18, 8000
#: Allocators keep more than is asked for.
NOISE_BYTES = 24 * 2**20
#: The memory is looked at when no more of what was sent is taken for this time.
QUIET_SECONDS = 0.2
#: Or when it has not grown by ``GROWTH_BYTES`` while the server computed for this time. A quick
#: server refuses what exceeds the budget; one that waits for a processor cuts off stalled responses
#: instead, and renders thousands of others for minutes.
STEADY_CPU_SECONDS, GROWTH_BYTES = 5.0, 2**20

#: A response is held by the window of its stream, by that of the connection, or by the socket.
WINDOWS = {"stream": (0, 0), "connection": (MAX_WINDOW_BYTES, 0), "socket": (MAX_WINDOW_BYTES, 1)}


class UnreadAttack(NamedTuple):
    name: str
    port: int
    sent: bytes
    connections: int = CONNECTIONS


def greeting(window: str) -> bytes:
    stream, connection = WINDOWS[window]
    more = MAX_WINDOW_BYTES - DEFAULT_WINDOW_BYTES if connection else 0
    opened = settings((INITIAL_WINDOW_SIZE, stream))
    return PREFACE + opened + (window_update(0, more) if more else b"")


def requests(fields: dict[str, str], body: bytes, window: str) -> bytes:
    """``REQUESTS`` requests of one connection, whose heads are a few bytes each."""
    encoder, parts = hpack.Encoder(), [greeting(window)]
    first, later = encoder.encode(fields.items()), encoder.encode(fields.items())
    ends = END_HEADERS if body else END_HEADERS | END_STREAM
    for number in range(1, 2 * REQUESTS, 2):
        parts.append(frame(HEADERS, ends, number, later if number > 1 else first))
        if body:
            parts.append(frame(DATA, END_STREAM, number, body))
    return b"".join(parts)


def head(method: str, path: str, **more: str) -> dict[str, str]:
    return {":method": method, ":scheme": "http", ":path": path, ":authority": "a"} | more


def grpc_attacks(gateway: Gateway) -> Iterator[UnreadAttack]:
    """Every method, for a model whose metadata or answer is large, and one that does not exist."""
    targets: list[tuple[str, bytes]] = [("/no.Service/Method", message(b""))]
    for service, name, row in cost.methods():
        bodies = (message(naming(row, model)) for model in ("big", "wide"))
        targets += [(f"/{service}/{name}", body) for body in bodies]
    for (path, body), window in itertools.product(targets, WINDOWS):
        fields = head("POST", path, te="trailers", **{"content-type": "application/grpc"})
        yield UnreadAttack(f"{path} {window}", gateway.grpc_port, requests(fields, body, window))


def naming(row: Any, model: str) -> bytes:
    """A request that names ``model``; for an inference, with the input that it takes."""
    fields = row.request.DESCRIPTOR.fields
    content: bytes = b""
    for field in fields:
        text = field.type == FieldDescriptor.TYPE_STRING
        if text and field.name in ("model_name", "name"):
            content = cost.tagged(field, model.encode())
        elif field.name == "model_spec":
            name = field.message_type.fields_by_name["name"]
            content = cost.tagged(field, cost.tagged(name, model.encode()))
    if row.request.DESCRIPTOR.name == "ModelInferRequest":
        request = grpc_service_pb2.ModelInferRequest.FromString(content)
        x = request.inputs.add(name="x", datatype="UINT8", shape=[1, 1])
        x.contents.uint_contents.append(1)
        content = request.SerializeToString()
    return content


def http_attacks(gateway: Gateway) -> Iterator[UnreadAttack]:
    """Every route, over HTTP/2 and as a pipeline of HTTP/1.1."""
    for method, path in [*cost.routes(gateway, ("get", "post")), ("GET", "/" + "a" * 2000)]:
        for model in ("big", "wide") if "{model}" in path else ("",):
            target = path.replace("{model}", model).replace("{version}", "1")
            target = target.replace("{", "").replace("}", "")
            body = body_for(target) if method == "POST" else b""
            for window in WINDOWS:
                sent = requests(head(method, target), body, window)
                yield UnreadAttack(f"{method} {target} {window}", gateway.http_port, sent)
            line = f"{method} {target} HTTP/1.1\r\nHost: a\r\nContent-Length: {len(body)}\r\n\r\n"
            sent = (line.encode() + body) * REQUESTS
            yield UnreadAttack(f"{method} {target} HTTP/1.1", gateway.http_port, sent)


def body_for(path: str) -> bytes:
    """An inference request of the dialect that ``path`` belongs to."""
    if re.search("/generate", path):
        return b'{"x":[1]}'
    if re.search("^/v1/|/(predictions|explanations)/", path):
        return b'{"instances":[[1]]}'
    x = {"name": "x", "datatype": "UINT8", "shape": [1, 1], "data": [1]}
    return json.dumps({"inputs": [x]}).encode()


def attacks(gateway: Gateway, match: str = "") -> list[UnreadAttack]:
    every = itertools.chain(grpc_attacks(gateway), http_attacks(gateway))
    return [attack for attack in every if re.search(match, attack.name)]


def held(gateway: Gateway, attack: UnreadAttack, before: int) -> int:
    """The memory that the server holds for an attack, in bytes, beside what it held ``before``.

    Allocators keep what they had once, so that is counted from the server's start.
    """
    meter = cost.Meter(gateway.process.pid)
    wait_until_idle(meter, Growth(meter))  # it closes the connections of the attack before
    with contextlib.ExitStack() as stack:
        meter.reset_peak()
        rest: dict[socket.socket, memoryview] = {}
        for _ in range(attack.connections):
            opened = stack.enter_context(socket.socket())
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            opened.connect(("127.0.0.1", attack.port))
            opened.setblocking(False)
            rest[opened] = memoryview(attack.sent)
        growth = Growth(meter)
        while rest and growth.goes_on():
            _, writable, _ = select.select([], rest, [], QUIET_SECONDS)
            if not writable:
                wait_until_idle(meter, growth)
                if not select.select([], rest, [], 0)[1]:
                    break
            for each in writable:
                try:
                    rest[each] = rest[each][each.send(rest[each]) :]
                except OSError:
                    rest[each] = memoryview(b"")  # the server has had enough of it
                if not rest[each]:
                    del rest[each]
        wait_until_idle(meter, growth)
        return max(0, meter.peak_bytes() - before)


class Growth:
    """The growth of a server's memory, by the processor time that it takes."""

    def __init__(self, meter: cost.Meter) -> None:
        self._meter = meter
        self._peak, self._grew_at = meter.peak_bytes(), meter.cpu_seconds()

    def goes_on(self) -> bool:
        peak, now = self._meter.peak_bytes(), self._meter.cpu_seconds()
        if peak >= self._peak + GROWTH_BYTES:
            self._peak, self._grew_at = peak, now
        return now < self._grew_at + STEADY_CPU_SECONDS


def wait_until_idle(meter: cost.Meter, growth: Growth) -> None:
    """Wait while the memory grows, until the server neither computes nor waits for a processor."""
    while growth.goes_on():
        before = meter.cpu_seconds() + meter.waited_seconds()
        time.sleep(QUIET_SECONDS / 2)
        if meter.cpu_seconds() + meter.waited_seconds() - before < QUIET_SECONDS / 20:
            return


def allowed(attack: UnreadAttack) -> int:
    requests = attack.connections * REQUESTS
    constant = attack.connections * CONNECTION_BYTES + requests * REQUEST_BYTES
    return BUDGET_BYTES + constant + NOISE_BYTES


def findings(
    gateway: Gateway, attacks: Sequence[UnreadAttack], tell: Callable[[str], None] = print
) -> list[str]:
    """The attacks for which the server holds more than is allowed."""
    found, before = [], cost.Meter(gateway.process.pid).reset_peak()
    for attack in attacks:
        size = held(gateway, attack, before)
        if size > allowed(attack):
            sent = attack.connections * len(attack.sent)
            found.append(f"{attack.name}: {sent} bytes hold {size >> 20} MiB")
            tell(found[-1])
    return found


def repository(root: Path) -> Path:
    """A model with large metadata, and one with a large answer to a small request."""
    outputs = [f"an_output_with_a_long_name_{number} FP32 1" for number in range(2000)]
    for name, wanted in (("big", outputs), ("wide", [f"y FP32 {1 << 16}"])):
        (root / name / "1").mkdir(parents=True)
        text = models.config(name, ["x UINT8 1"], wanted, backend="fake")
        (root / name / "config.pbtxt").write_text(text)
    return root
