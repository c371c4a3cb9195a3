"""Clients of a proxy that asks for certificates and tokens: httpx and tritonclient, unmodified."""

from __future__ import annotations

import base64
import json
import socket
import ssl
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import tritonclient.grpc

from tests.certificates import TestAuthority
from tests.deploy.envoy import EnvoyProxy

TENSOR = {"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}
BODY = json.dumps({"inputs": [TENSOR]}).encode()
INFER = "/v2/models/%s/infer"


class ClusterCaller:
    """A client with a certificate, the authority's, and a token."""

    def __init__(self, folder: Path, authority: TestAuthority, token: str) -> None:
        self.ca = folder / "ca.crt"
        self.ca.write_bytes(authority.pem)
        self.certificate, self.key = authority.write(folder, "client", "client.example.com")
        self.token = token

    @property
    def headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.token}"} if self.token else {}

    def with_token(self, token: str) -> ClusterCaller:
        other = ClusterCaller.__new__(ClusterCaller)
        other.__dict__ = self.__dict__ | {"token": token}
        return other

    def tls(self, *, certificate: bool = True) -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=str(self.ca))
        if certificate:
            context.load_cert_chain(self.certificate, self.key)
        return context

    def http(self, *, http2: bool = False) -> httpx.Client:
        return httpx.Client(verify=self.tls(), http2=http2, headers=self.headers, timeout=30)

    def infer(self, proxy: EnvoyProxy, model: str = "fraud", **headers: str) -> httpx.Response:
        with self.http() as client:
            return client.post(proxy.url + INFER % model, content=BODY, headers=headers)

    def grpc(self, proxy: EnvoyProxy) -> tritonclient.grpc.InferenceServerClient:
        return tritonclient.grpc.InferenceServerClient(
            proxy.grpc, ssl=True, root_certificates=str(self.ca),
            private_key=str(self.key), certificate_chain=str(self.certificate),
        )  # fmt: skip

    def infer_grpc(self, proxy: EnvoyProxy, model: str = "fraud", **headers: str) -> list[float]:
        """Return the output.

        Raises:
            InferenceServerException: it is refused.
        """
        with self.grpc(proxy) as client:
            answer = client.infer(
                model, [tensor(tritonclient.grpc)], headers=self.headers | headers
            )
        values: list[float] = answer.as_numpy("y").tolist()[0]
        return values


def tensor(client: Any) -> Any:
    """The input, for tritonclient's ``http`` or ``grpc``."""
    made = client.InferInput("x", [1, 4], "FP32")
    made.set_data_from_numpy(np.array([[1, 2, 3, 4]], np.float32))
    return made


def forged(token: str, **claims: Any) -> str:
    """The token with other claims, and the signature that it had."""
    head, body, signature = token.split(".")
    found = json.loads(base64.urlsafe_b64decode(body + "=="))
    text = json.dumps(found | claims).encode()
    return f"{head}.{base64.urlsafe_b64encode(text).decode().rstrip('=')}.{signature}"


def status_of_raw(proxy: EnvoyProxy, caller: ClusterCaller, path: str) -> int:
    """The status of a GET whose path no library has put in order."""
    with connection(proxy, caller) as stream:
        head = f"GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
        stream.sendall(head.encode())
        return int(stream.makefile("rb").readline().split()[1])


def connection(proxy: EnvoyProxy, caller: ClusterCaller) -> ssl.SSLSocket:
    plain = socket.create_connection(("127.0.0.1", proxy.http_port), timeout=20)
    return caller.tls().wrap_socket(plain, server_hostname="localhost")
