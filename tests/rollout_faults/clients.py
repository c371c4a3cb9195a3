"""Clients that remember every request: each answer tells, in two ways, which version gave it.

The versions compute almost the same, within the tolerance of the comparison, so that a good
candidate is promoted; the factor in the answer and its ``model_version`` must be the same side's.
A client sends a request again until it is answered, as real clients do.
"""

from __future__ import annotations

import http.client
import json
import threading
import time
from dataclasses import dataclass, field
from typing import Any

import grpc
import numpy as np

from modelport.gateway.rollout.plan import ROUTE_KEY
from modelport.gateway.wire.proto import grpc_service_pb2 as pb

MODEL = "x2"
METHOD = "/inference.GRPCInferenceService/ModelInfer"
ATTEMPT_SECONDS = 30.0
#: Time between two requests of a client, and between two attempts of one request.
PAUSE_SECONDS, RETRY_SECONDS = 0.004, 0.02
#: One of so many requests names the baseline by its number, and is never diverted.
EXPLICIT_EVERY = 7
#: Factors by the name of the version that answers. 2 is as good as 1, and 3 is not; ``remote/1``
#: is the version of another server.
FACTORS = {"1": 2.0, "2": 2.0002, "3": 5.0, "remote/1": 1.9998}
BASELINE, LABEL = "1", "stable"
#: Route keys of the clients that send some.
KEYS = 40
#: Errors of a request for a version that is served no more.
UNLOADED = ("status 404", "StatusCode.NOT_FOUND", "is not at ready state")


@dataclass(frozen=True, slots=True)
class Attempt:
    """One attempt of one request; without an ``error``, ``version`` answered."""

    client: str
    began: float
    ended: float
    version: str = ""
    explicit: bool = False
    error: str = ""
    #: An answer that is no version's, or another's than it says.
    wrong: str = ""
    #: The key of a sticky assignment, if the client sends one.
    key: str = ""


@dataclass
class LedgerClient:
    """One thread with one connection."""

    name: str
    port: int
    stop: threading.Event
    #: Whether requests have one of ``KEYS`` route keys.
    keyed: bool = False
    #: Written by this thread, read by others.
    attempts: list[Attempt] = field(default_factory=list)
    #: Requests that were given up.
    lost: int = 0

    def run(self) -> None:
        number = 0
        while not self.stop.is_set():
            number += 1
            self._request(number)
            time.sleep(PAUSE_SECONDS)
        self.close()

    def _request(self, number: int) -> None:
        value, explicit = float(1 + number % 97), number % EXPLICIT_EVERY == 0
        key = f"user {number % KEYS}" if self.keyed else ""
        limit = time.monotonic() + ATTEMPT_SECONDS
        while True:
            began = time.monotonic()
            try:
                version, data = self.ask(value, explicit, key)
            except (OSError, http.client.HTTPException, grpc.RpcError, ValueError) as error:
                text = f"{type(error).__name__}: {error}"[:400]
                self._add(Attempt(self.name, began, time.monotonic(), "", explicit, text))
                self.close()
                if explicit and any(each in text for each in UNLOADED):
                    return
            else:
                wrong = misfit(version, explicit, value, data)
                ended = time.monotonic()
                self._add(Attempt(self.name, began, ended, version, explicit, "", wrong, key))
                return
            if time.monotonic() > limit:
                self.lost += 1
                return
            if self.stop.wait(RETRY_SECONDS):
                return

    def _add(self, attempt: Attempt) -> None:
        self.attempts.append(attempt)

    def ask(self, value: float, explicit: bool, key: str) -> tuple[str, list[float]]:
        """The version that answered, and the numbers."""
        raise NotImplementedError

    def close(self) -> None:
        """Close the connection; the next request opens another."""
        raise NotImplementedError


def misfit(version: str, explicit: bool, value: float, data: list[float]) -> str:
    """The reason why an answer is wrong; empty if it is right."""
    factor = FACTORS.get(version)
    if factor is None or not fits(data, factor * value):
        return f"version {version} answered {data} to {value}"
    if explicit and version != BASELINE:
        return f"version {version} answered a request for version {BASELINE}"
    return ""


def fits(data: list[float], value: float) -> bool:
    """Whether all of ``data`` is ``value``."""
    return bool(np.allclose(data, value, rtol=1e-6, atol=0))


class HttpLedgerClient(LedgerClient):
    _connection: http.client.HTTPConnection | None = None

    def ask(self, value: float, explicit: bool, key: str) -> tuple[str, list[float]]:
        tensor = {"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [value] * 4}
        path = f"/v2/models/{MODEL}" + f"/versions/{BASELINE}" * explicit + "/infer"
        told, document = self._post(path, {"inputs": [tensor]}, key)
        return told or document["model_version"], document["outputs"][0]["data"]

    def _post(self, path: str, document: dict[str, Any], key: str) -> tuple[str | None, Any]:
        """The version in the header of the answer, and its document."""
        if self._connection is None:
            self._connection = http.client.HTTPConnection(
                "127.0.0.1", self.port, timeout=ATTEMPT_SECONDS
            )
        headers = {ROUTE_KEY: key} if key else {}
        self._connection.request("POST", path, json.dumps(document), headers)
        answer = self._connection.getresponse()
        content = answer.read()
        if answer.status != 200:
            raise ValueError(f"status {answer.status}: {content.decode(errors='replace')}")
        return answer.getheader("x-modelport-model-version"), json.loads(content)

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


class LabelLedgerClient(HttpLedgerClient):
    """Asks for a label in TensorFlow Serving's dialect, whose answers name no version."""

    def ask(self, value: float, explicit: bool, key: str) -> tuple[str, list[float]]:
        which = f"versions/{BASELINE}" if explicit else f"labels/{LABEL}"
        path = f"/v1/models/{MODEL}/{which}:predict"
        told, document = self._post(path, {"instances": [[value] * 4]}, key)
        (data,) = document["predictions"]
        computed = (name for name, factor in FACTORS.items() if fits(data, factor * value))
        return told or next(computed, ""), data


class GrpcLedgerClient(LedgerClient):
    _channel: grpc.Channel | None = None

    def ask(self, value: float, explicit: bool, key: str) -> tuple[str, list[float]]:
        if self._channel is None:
            options = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0)]
            self._channel = grpc.insecure_channel(f"127.0.0.1:{self.port}", options)
            self._call = self._channel.unary_unary(
                METHOD, pb.ModelInferRequest.SerializeToString, pb.ModelInferResponse.FromString
            )
        request = pb.ModelInferRequest(model_name=MODEL, model_version=BASELINE if explicit else "")
        request.inputs.add(name="x", datatype="FP32", shape=[1, 4])
        request.raw_input_contents.append(np.full(4, value, np.float32).tobytes())
        metadata = [(ROUTE_KEY, key)] if key else None
        answer, call = self._call.with_call(request, timeout=ATTEMPT_SECONDS, metadata=metadata)
        told = dict(call.trailing_metadata() or ()).get("x-modelport-model-version")
        data = np.frombuffer(answer.raw_output_contents[0], np.float32).tolist()
        return str(told or answer.model_version), data

    def close(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None


class LedgerClients:
    """Two clients of each protocol, until ``finish``.

    Args:
        label: whether there is a client that asks for a label, too.
        keyed: whether requests have route keys.
    """

    def __init__(
        self, http_port: int, grpc_port: int, *, label: bool = False, keyed: bool = False
    ) -> None:
        self._stop = threading.Event()
        kinds: list[tuple[str, type[LedgerClient], int]] = [
            ("http 1", HttpLedgerClient, http_port), ("http 2", HttpLedgerClient, http_port),
            ("grpc 1", GrpcLedgerClient, grpc_port), ("grpc 2", GrpcLedgerClient, grpc_port),
        ]  # fmt: skip
        if label:
            kinds.append(("label", LabelLedgerClient, http_port))
        self.clients = [kind(name, port, self._stop, keyed) for name, kind, port in kinds]
        self._threads = [threading.Thread(target=each.run, daemon=True) for each in self.clients]
        for thread in self._threads:
            thread.start()

    def finish(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(2 * ATTEMPT_SECONDS)

    @property
    def attempts(self) -> list[Attempt]:
        return [attempt for client in self.clients for attempt in tuple(client.attempts)]

    @property
    def lost(self) -> int:
        hung = sum(thread.is_alive() for thread in self._threads)
        return hung + sum(client.lost for client in self.clients)

    def answered_since(self, moment: float) -> int:
        """The least number of answers, over the clients, to requests that began since."""
        return min(
            sum(not each.error and each.began >= moment for each in tuple(client.attempts))
            for client in self.clients
        )
