"""Certificates replaced under load, the way Kubernetes does: no request may fail."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from cryptography import x509

from modelport.gateway.wire.proto import grpc_service_pb2 as messages
from tests.certificates import LOOPBACK, TestAuthority, write_pair
from tests.server import Gateway

MODEL = "x2"
BODY = b'{"inputs": [{"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}]}'
REQUEST = (
    f"POST /v2/models/{MODEL}/infer HTTP/1.1\r\nHost: localhost\r\n"
    f"Content-Type: application/json\r\nContent-Length: {len(BODY)}\r\n\r\n"
).encode() + BODY
#: Of the requests over HTTP, one in so many begins a connection.
FRESH = 5
#: As many connections in a row must show the new certificate: each worker has its own.
SIGHTINGS = 6
#: Between two looks at the certificates; each is a handshake for every port, besides the load.
LOOK_SECONDS = 0.05


class MountedSecret:
    """A folder as Kubernetes mounts a Secret: ``tls.crt -> ..data/tls.crt``, ``..data -> ..N``."""

    def __init__(self, folder: Path, authority: TestAuthority) -> None:
        self.folder, self._authority = folder, authority
        self._count = 0
        self.certificate, self.key = folder / "tls.crt", folder / "tls.key"
        (folder / "ca.crt").write_bytes(authority.pem)
        self.serial = self.publish()
        for path in (self.certificate, self.key):
            path.symlink_to(f"..data/{path.name}")

    def publish(self) -> int:
        """Replace certificate and key at once; return the serial number."""
        self._count += 1
        part = self.folder / f"..{self._count}"
        part.mkdir()
        certificate, key = self._authority.sign(*LOOPBACK)
        write_pair(part, "tls", certificate, key)
        link = self.folder / "..new"
        link.symlink_to(part.name)
        link.rename(self.folder / "..data")
        return x509.load_pem_x509_certificate(certificate).serial_number

    @property
    def flags(self) -> tuple[str, ...]:
        return "--tls-cert", str(self.certificate), "--tls-key", str(self.key)

    def client(self) -> ssl.SSLContext:
        return ssl.create_default_context(cafile=self.folder / "ca.crt")


@dataclass
class LoadDuringSwaps:
    """Requests in a steady rhythm, over HTTP/1.1 and gRPC, on old and new connections."""

    gateway: Gateway
    secret: MountedSecret
    per_second: float
    requests: int = 0
    connections: int = 0
    seconds: float = 0.0
    errors: list[str] = field(default_factory=list)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        pace, begun, ending = 2 / self.per_second, time.monotonic(), asyncio.Event()
        async with asyncio.TaskGroup() as group:
            for each in (self._http, self._grpc):
                group.create_task(self._repeat(each, pace, ending))
            try:
                yield
            finally:
                self.seconds += time.monotonic() - begun
                ending.set()

    async def _repeat(self, client: Any, pace: float, ending: asyncio.Event) -> None:
        """Send requests at their times, whether or not the ones before are answered."""
        async with client() as send, asyncio.TaskGroup() as group:
            due, number = time.monotonic(), 0
            while not ending.is_set():
                number += 1
                group.create_task(self._count(send, number))
                due += pace
                await asyncio.sleep(max(0.0, due - time.monotonic()))

    async def _count(self, send: Any, number: int) -> None:
        try:
            await send(number)
            self.requests += 1
        except Exception as error:
            self.errors.append(f"{type(error).__name__}: {error}")

    @contextlib.asynccontextmanager
    async def _http(self) -> AsyncIterator[Any]:
        idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
        context = self.secret.client()

        async def send(number: int) -> None:
            fresh = number % FRESH == 0
            if idle and not fresh:
                reader, writer = idle.pop()
            else:
                self.connections += 1
                port = self.gateway.http_port
                reader, writer = await asyncio.open_connection("localhost", port, ssl=context)
            try:
                writer.write(REQUEST)
                head = await reader.readuntil(b"\r\n\r\n")
                assert head.startswith(b"HTTP/1.1 200"), head
                length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
                await reader.readexactly(length)
            except BaseException:  # the end of the load, too
                writer.transport.abort()
                raise
            if fresh:
                writer.close()
            else:
                idle.append((reader, writer))

        try:
            yield send
        finally:
            for _, writer in idle:
                writer.transport.abort()

    @contextlib.asynccontextmanager
    async def _grpc(self) -> AsyncIterator[Any]:
        credentials = grpc.ssl_channel_credentials((self.secret.folder / "ca.crt").read_bytes())
        address = f"localhost:{self.gateway.grpc_port}"
        infer = messages.ModelInferRequest(
            model_name=MODEL,
            inputs=[
                messages.ModelInferRequest.InferInputTensor(
                    name="x",
                    datatype="FP32",
                    shape=[1, 4],
                    contents=messages.InferTensorContents(fp32_contents=[1, 2, 3, 4]),
                )
            ],
        )
        async with grpc.aio.secure_channel(address, credentials) as channel:
            call = channel.unary_unary(
                "/inference.GRPCInferenceService/ModelInfer",
                request_serializer=messages.ModelInferRequest.SerializeToString,
                response_deserializer=messages.ModelInferResponse.FromString,
            )

            async def send(number: int) -> None:
                await call(infer)

            yield send


async def served_serial(port: int, context: ssl.SSLContext) -> int:
    """The serial number of the certificate that a new connection gets."""
    _, writer = await asyncio.open_connection("localhost", port, ssl=context)
    der = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    return x509.load_der_x509_certificate(der).serial_number


async def until_served(gateway: Gateway, secret: MountedSecret, serial: int) -> float:
    """Wait until every port serves the certificate; return the seconds that it took."""
    begun, context = time.monotonic(), secret.client()
    last_old = begun
    ports = (gateway.http_port, gateway.grpc_port, gateway.metrics_port)
    seen = 0
    while seen < SIGHTINGS:
        serials = {await served_serial(port, context) for port in ports}
        if serials == {serial}:
            seen += 1
        else:
            seen, last_old = 0, time.monotonic()
            await asyncio.sleep(LOOK_SECONDS)
    return last_old - begun


async def swap(load: LoadDuringSwaps, swaps: int) -> float:
    """Replace the certificate so often under ``load``; return the longest time until it served."""
    longest = 0.0
    async with load.running():
        for _ in range(swaps):
            serial = load.secret.publish()
            longest = max(longest, await until_served(load.gateway, load.secret, serial))
    return longest
