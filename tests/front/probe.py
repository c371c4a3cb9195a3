"""A small application inside Envoy, which tells what becomes of its requests.

``MODELPORT_PROBE`` is JSON: the two ports, and constants of ``requests`` that are to be others.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from typing import Any

from google.protobuf.wrappers_pb2 import BytesValue, Int64Value

from gateway.errors import NotFound, TimedOut
from gateway.front.envoy import requests
from gateway.front.envoy.application import Application, MakeFront
from gateway.protocols.asgi import Receive, Scope, Send
from gateway.protocols.grpc_method import Method
from gateway.settings import Settings
from gateway.types import Deadline

options = json.loads(os.environ["MODELPORT_PROBE"])
settings = Settings(
    (), http_port=options["ports"][0], grpc_port=options["ports"][1], http_max_input_bytes=2**20
)
for name, value in options["constants"].items():
    setattr(requests, name, value)
#: What has happened, in order.
journal: list[str] = []


async def http(scope: Scope, receive: Receive, send: Send) -> None:
    path, reply = scope["path"], b""
    if path == "/journal":
        reply = json.dumps(journal).encode()
    elif path.startswith("/wait"):
        if path == "/wait/after/reading":
            while (await receive()).get("more_body"):
                pass
        await _wait(path)
    elif path == "/leave":
        while (await receive())["type"] != "http.disconnect":
            pass
        journal.append("left")
    elif path == "/large":
        reply = bytes(int(scope["query_string"]))
    else:
        size, more = 0, True
        if scope["query_string"]:
            await asyncio.sleep(float(scope["query_string"]))
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                journal.append("no whole body")
                return
            size += len(message["body"])
            more = message["more_body"]
        reply = f"{scope['raw_path'].decode()} {size}".encode()
    headers = [(b"content-length", b"%d" % len(reply))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": reply})


async def _wait(name: str) -> None:
    """Until somebody cancels it."""
    journal.append(f"{name} waits")
    try:
        await asyncio.sleep(60)
    except asyncio.CancelledError:
        journal.append(f"{name} cancelled")
        raise


async def echo(message: Any, _: Deadline) -> Any:
    return message


async def wait(_: Any, deadline: Deadline) -> Any:
    await _wait("unary")


async def expire(_: Any, deadline: Deadline) -> Any:
    await asyncio.sleep(deadline.remaining() or 0)
    raise TimedOut


async def fail(message: Any, _: Deadline) -> Any:
    raise NotFound(message.value.decode())


async def count(message: Any, _: Deadline) -> AsyncIterator[Any]:
    for number in range(message.value):
        yield Int64Value(value=number)
    if not message.value:
        await _wait("stream")


async def talk(messages: AsyncIterator[Any], _: Deadline) -> AsyncIterator[Any]:
    async for message in messages:
        if message.value == b"wait":
            await _wait("talk")
        yield message


METHODS = {
    "probe.Probe": {
        "Echo": Method(BytesValue, BytesValue, echo),
        "Wait": Method(BytesValue, BytesValue, wait),
        "Expire": Method(BytesValue, BytesValue, expire),
        "Fail": Method(BytesValue, BytesValue, fail),
        "Count": Method(Int64Value, Int64Value, count, reply_streams=True),
        "Talk": Method(BytesValue, BytesValue, talk, request_streams=True, reply_streams=True),
    }
}


async def run(make_front: MakeFront) -> None:
    await make_front(http, METHODS, settings).start()
    await asyncio.Event().wait()


application = Application(run)
