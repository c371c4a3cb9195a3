"""An issuer that rotates its keys, fails, dawdles and lies, while tokens come in.

The gateway runs in this process, and its event loop's longest pause is measured. The issuer and the
callers are threads of another process, which does not share the gateway's interpreter.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import ssl
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from http.client import HTTPConnection
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Thread
from typing import Any

from modelport.gateway.access import jwks
from modelport.gateway.access.jwks import JwksUrl
from modelport.gateway.access.jwt_authenticator import JwtAuthenticator
from tests.certificates import TestAuthority
from tests.gateway.access.gateway import serving
from tests.gateway.access.identities import AUDIENCE, ISSUER, Issuer, key_set
from tests.gateway.access.key_server import KeyServer, dawdle, endless_body, endless_head, reply
from tests.gateway.access.test_every_route import OIP

CALLERS = 4
#: Every answer of the issuer comes in every part of the time.
PARTS = 6
RULES = f"""
[[rules]]
principals = ["jwt:alice"]
operations = ["infer"]

[jwt]
issuer = "{ISSUER}"
audience = "{AUDIENCE}"
algorithms = ["RS256"]
jwks = "https://localhost:PORT/jwks"
jwks_ca = "ca.pem"
"""


@dataclass
class TokenDecisions:
    """Decisions by kind of token, and the event loop's longest pause in each part of the time."""

    requests: int = 0
    fetches: int = 0
    wrong: list[str] = field(default_factory=list)
    longest_pauses: list[float] = field(default_factory=list)

    @property
    def longest_pause(self) -> float:
        """The median of the parts."""
        return statistics.median(self.longest_pauses)


def faults(issuer: Issuer, rotated: Issuer) -> list[Callable[[ssl.SSLSocket], Any]]:
    """Answers of the issuer; those that are key sets have the first key."""
    large = {"keys": [issuer.jwk(), *([rotated.jwk(x5c=["A" * 200])] * 90)]}
    return [
        reply(key_set(issuer, rotated)),
        lambda peer: None,
        reply(b"", "503 Oops"),
        reply(b"[" * jwks.MAX_DOCUMENT_BYTES),
        reply(b'{"keys": [' + b"[]," * 20_000 + b"1]}"),
        reply(json.dumps(large).encode()),
        dawdle,
        endless_body,
        endless_head,
        reply(key_set(issuer)),
    ]


def play(pipe: Connection, folder: Path, has_faults: bool, seconds: float) -> None:
    """The issuer and the callers, in a process of their own."""
    issuer, rotated, stranger = Issuer(), Issuer(kid="key-2"), Issuer()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "server.crt", folder / "server.key")
    server = KeyServer(context)
    server.answer = reply(key_set(issuer))
    pipe.send(server.port)
    address = pipe.recv()
    tokens = {
        "right": (issuer.token(), (200,)),
        "stranger": (stranger.token(), (401,)),
        "expired": (issuer.token(exp=1), (401,)),
        "unknown": (stranger.token({"kid": "key-3"}), (401,)),
        "rotated": (rotated.token(), (200, 401)),  # as the last key set that was fetched says
    }
    outcome, end = TokenDecisions(), time.monotonic() + seconds

    def call() -> None:
        connection = HTTPConnection(address)
        while time.monotonic() < end:
            for name, (token, expected) in tokens.items():
                headers = {"x-api-key": token.decode()}
                connection.request("POST", "/v2/models/mine/infer", json.dumps(OIP), headers)
                answer = connection.getresponse()
                answer.read()
                outcome.requests += 1
                if answer.status not in expected:
                    outcome.wrong.append(f"{name}: {answer.status}")
            time.sleep(0.01)
        connection.close()

    callers = [Thread(target=call) for _ in range(CALLERS)]
    for each in callers:
        each.start()
    answers = faults(issuer, rotated) if has_faults else [server.answer]
    while time.monotonic() < end:
        for answer in answers:
            server.answer = answer
            with server.arrived:  # the second request comes when the first one has its outcome
                enough = partial(lambda count: server.requests >= count, server.requests + 2)
                server.arrived.wait_for(enough, max(0.0, end - time.monotonic()))
    for each in callers:
        each.join()
    outcome.fetches = server.requests
    pipe.send(outcome)


async def longest_pause(seconds: float) -> float:
    """The event loop's longest pause, in processor time of the process's other threads.

    Other programs of the machine cause pauses, too, but take no processor time of this process.
    """
    longest, end = 0.0, time.monotonic() + seconds
    while time.monotonic() < end:
        began, others = time.perf_counter(), time.process_time() - time.thread_time()
        await asyncio.sleep(0.001)
        late = time.perf_counter() - began - 0.001
        longest = max(longest, min(late, time.process_time() - time.thread_time() - others))
    return longest


async def measure(folder: Path, has_faults: bool, seconds: float) -> TokenDecisions:
    """Serve while the issuer fails, or while it does not."""
    authority = TestAuthority()
    (folder / "access").mkdir(parents=True)
    authority.write(folder, "server")
    (folder / "access" / "ca.pem").write_bytes(authority.pem)
    processes = multiprocessing.get_context("spawn")
    pipe, theirs = processes.Pipe()
    process = processes.Process(target=play, args=(theirs, folder, has_faults, seconds))
    process.start()
    rules = RULES.replace("PORT", str(await asyncio.to_thread(pipe.recv)))
    async with serving(folder, rules, "ci") as gateway:
        access = gateway.server._access
        assert access is not None
        [source] = [
            each.source for each in access._authenticators if isinstance(each, JwtAuthenticator)
        ]
        while source.keys is None:
            await asyncio.sleep(0.01)
        pipe.send(gateway.http_url.removeprefix("http://"))
        pauses = [await longest_pause(seconds / PARTS) for _ in range(PARTS)]
        outcome: TokenDecisions = await asyncio.to_thread(pipe.recv)
        outcome.longest_pauses = pauses
    process.join()
    return outcome


def compare(folder: Path, seconds: float) -> tuple[TokenDecisions, TokenDecisions]:
    """Outcomes with a good issuer, and with one that fails; fetches follow each other at once."""
    kept = JwksUrl.MIN_SECONDS, JwksUrl.FETCH_SECONDS
    JwksUrl.MIN_SECONDS, JwksUrl.FETCH_SECONDS = 0.05, 1.0
    try:
        good = asyncio.run(measure(folder / "good", False, seconds))
        return good, asyncio.run(measure(folder / "bad", True, seconds))
    finally:
        JwksUrl.MIN_SECONDS, JwksUrl.FETCH_SECONDS = kept
