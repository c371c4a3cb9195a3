"""Clients that keep asking and remember every outcome, and the judgement over what they saw.

Each request carries a nonce in its id and its values. An outcome is

- ``answered``: a whole reply that is for this request and is right;
- ``refused``: the server said no before it began: connection refused, 503, or UNAVAILABLE;
- ``lost``: anything else. The request was sent and nobody knows what became of it;
- ``wrong``: a reply that is not this request's answer.

A refusal is believed only where the ledger, which the backend writes, shows that the request never
began. So a request is dropped when it was sent into an open connection and got no whole answer, or
when it was begun and its client was told that it was not.
"""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import grpc
import numpy as np
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from modelport.gateway.types import Datatype, Tensor
from modelport.gateway.wire import tensor_proto
from modelport.gateway.wire.proto import serving_pb2, torchserve_inference_pb2
from tests.server import Gateway

STOP_SECONDS = 60.0
#: Between two requests of a client that goes on: what the traffic waits for needs a processor, too.
PAUSE_SECONDS = 0.01


@dataclass(frozen=True)
class RequestOutcome:
    id: str
    kind: str
    detail: str = ""
    factor: float = 0.0
    at: float = 0.0


@dataclass
class TrafficClient:
    """One thread. ``outcomes`` is its own until it has ended, and may be read meanwhile."""

    gateway: Gateway
    name: str
    factors: tuple[float, ...]
    stop: threading.Event
    #: Stop after the first request that is not answered: the server is on its way out.
    until_refused: bool
    model: str = "m"
    outcomes: list[RequestOutcome] = field(default_factory=list)

    def run(self) -> None:
        for number in count():
            if self.stop.is_set() and not self.until_refused:
                return
            outcome = self.ask(f"{self.name}-{number}", float(1 + number % 1000))
            self.outcomes.append(outcome)
            if not self.until_refused:
                self.stop.wait(PAUSE_SECONDS)
            elif outcome.kind != "answered":
                return

    def ask(self, request_id: str, value: float) -> RequestOutcome:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError

    def judge(
        self, request_id: str, answered_id: str, value: float, data: list[float]
    ) -> RequestOutcome:
        factors = {y / value for y in data}
        if answered_id != request_id or len(data) != 8 or len(factors) != 1:
            return RequestOutcome(request_id, "wrong", f"{answered_id}: {data} for {value}")
        (factor,) = factors
        kind = "answered" if factor in self.factors else "wrong"
        return RequestOutcome(request_id, kind, str(factor), factor, time.monotonic())


@dataclass
class HttpTrafficClient(TrafficClient):
    """Keeps its connection until the server closes it."""

    _connection: http.client.HTTPConnection | None = None

    def ask(self, request_id: str, value: float) -> RequestOutcome:
        path, body = self.request(request_id, value)
        connection = self._connection
        if connection is None:
            connection = http.client.HTTPConnection("127.0.0.1", self.gateway.http_port, timeout=30)
            self._connection = connection
        kept = connection.sock is not None
        try:
            if not kept:
                connection.connect()
        except ConnectionRefusedError:
            return RequestOutcome(request_id, "refused", "connection refused")
        except OSError as error:
            return RequestOutcome(request_id, "lost", f"connecting: {error!r}")
        try:
            connection.request("POST", path, body, {"x-request-id": request_id})
            reply = connection.getresponse()
            status, content = reply.status, reply.read()
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            return RequestOutcome(request_id, "lost", f"{'kept' if kept else 'new'}: {error!r}")
        if status == 503:
            return RequestOutcome(request_id, "refused", content.decode())
        if status != 200:
            return RequestOutcome(request_id, "lost", f"{status} {content.decode()}")
        answered_id, data = self.answer(request_id, json.loads(content))
        return self.judge(request_id, answered_id, value, data)

    def request(self, request_id: str, value: float) -> tuple[str, str]:
        """Path and body."""
        tensor = {"name": "x", "datatype": "FP32", "shape": [2, 4], "data": [value] * 8}
        body = json.dumps({"id": request_id, "inputs": [tensor]})
        return f"/v2/models/{self.model}/infer", body

    def answer(self, request_id: str, document: Any) -> tuple[str, list[float]]:
        """The id of the request that is answered, and the values."""
        return document.get("id", ""), document["outputs"][0]["data"]

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()


def infer_message(model: str, request_id: str, value: float) -> Any:
    message = pb.ModelInferRequest(model_name=model, id=request_id)
    message.inputs.add(name="x", datatype="FP32", shape=[2, 4])
    message.raw_input_contents.append(np.full(8, value, np.float32).tobytes())
    return message


@dataclass
class GrpcTrafficClient(TrafficClient):
    """Has a channel, and a connection, of its own."""

    def __post_init__(self) -> None:
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0)]
        self._channel = grpc.insecure_channel(self.gateway.grpc, options)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)

    def ask(self, request_id: str, value: float) -> RequestOutcome:
        message = infer_message(self.model, request_id, value)
        try:
            reply = self._stub.ModelInfer(message, timeout=30)
        except grpc.RpcError as error:
            refused = error.code() is grpc.StatusCode.UNAVAILABLE
            detail = f"{error.code().name}: {error.details()}"
            return RequestOutcome(request_id, "refused" if refused else "lost", detail)
        data = np.frombuffer(reply.raw_output_contents[0], np.float32).tolist()
        return self.judge(request_id, reply.id, value, data)

    def close(self) -> None:
        self._channel.close()


class TfServingHttpTraffic(HttpTrafficClient):
    def request(self, request_id: str, value: float) -> tuple[str, str]:
        body = json.dumps({"instances": [[value] * 4] * 2})
        return f"/v1/models/{self.model}:predict", body

    def answer(self, request_id: str, document: Any) -> tuple[str, list[float]]:
        return request_id, [y for row in document["predictions"] for y in row]


class TorchServeHttpTraffic(TfServingHttpTraffic):
    def request(self, request_id: str, value: float) -> tuple[str, str]:
        _, body = super().request(request_id, value)
        return f"/predictions/{self.model}", body


@dataclass
class DialectGrpcClient(TrafficClient):
    """A gRPC client of a dialect without request ids; the ledger identifies requests by value."""

    method: str = ""
    _number: int = 0

    def __post_init__(self) -> None:
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0)]
        self._channel = grpc.insecure_channel(self.gateway.grpc, options)
        self._call = self._channel.unary_unary(self.method)
        # Exact in FP32 for as long as a test lasts.
        self._number = 100_000 * int(self.name.rpartition("-")[2])

    def ask(self, request_id: str, value: float) -> RequestOutcome:
        self._number += 1
        value = float(self._number)
        try:
            reply = self._call(self.request(value), timeout=30)
        except grpc.RpcError as error:
            refused = error.code() is grpc.StatusCode.UNAVAILABLE
            detail = f"{error.code().name}: {error.details()}"
            return RequestOutcome(str(value), "refused" if refused else "lost", detail)
        return self.judge(str(value), str(value), value, self.answer(reply))

    def request(self, value: float) -> bytes:
        raise NotImplementedError

    def answer(self, reply: bytes) -> list[float]:
        raise NotImplementedError

    def close(self) -> None:
        self._channel.close()


@dataclass
class TfServingGrpcTraffic(DialectGrpcClient):
    method: str = "/tensorflow.serving.PredictionService/Predict"

    def request(self, value: float) -> bytes:
        message = serving_pb2.PredictRequest(model_spec=serving_pb2.ModelSpec(name=self.model))
        tensor = Tensor("x", Datatype.FP32, np.full((2, 4), value, np.float32))
        tensor_proto.encode(tensor, message.inputs["x"])
        return message.SerializeToString()

    def answer(self, reply: bytes) -> list[float]:
        return list(serving_pb2.PredictResponse.FromString(reply).outputs["y"].float_val)


@dataclass
class TorchServeGrpcTraffic(DialectGrpcClient):
    method: str = "/org.pytorch.serve.grpc.inference.InferenceAPIsService/Predictions"

    def request(self, value: float) -> bytes:
        body = json.dumps({"instances": [[value] * 4] * 2}).encode()
        message = torchserve_inference_pb2.PredictionsRequest(
            model_name=self.model, input={"data": body}
        )
        return message.SerializeToString()

    def answer(self, reply: bytes) -> list[float]:
        body = torchserve_inference_pb2.PredictionResponse.FromString(reply).prediction
        return [y for row in json.loads(body)["predictions"] for y in row]


CLIENTS: dict[str, type[TrafficClient]] = {
    "http": HttpTrafficClient,
    "grpc": GrpcTrafficClient,
    "tfserving-http": TfServingHttpTraffic,
    "tfserving-grpc": TfServingGrpcTraffic,
    "torchserve-http": TorchServeHttpTraffic,
    "torchserve-grpc": TorchServeGrpcTraffic,
}


class ConcurrentTraffic:
    """A few clients at once."""

    def __init__(self, clients: list[TrafficClient]) -> None:
        self.clients = clients
        self._threads = [threading.Thread(target=c.run, daemon=True) for c in clients]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def join(self) -> None:
        deadline = time.monotonic() + STOP_SECONDS
        for client, thread in zip(self.clients, self._threads, strict=True):
            thread.join(max(0.0, deadline - time.monotonic()))
            assert not thread.is_alive(), f"{client.name} hangs; last: {client.outcomes[-1:]}"

    @property
    def outcomes(self) -> list[RequestOutcome]:
        return [outcome for client in self.clients for outcome in client.outcomes]

    def each_has(self, answers: int, factor: float | None = None, after: float = 0.0) -> bool:
        """Whether every client has that many answers (of this factor, after that moment)."""
        return all(
            sum(
                o.kind == "answered" and o.at >= after and factor in (None, o.factor)
                for o in client.outcomes
            )
            >= answers
            for client in self.clients
        )


@contextmanager
def flowing(
    gateway: Gateway,
    factors: tuple[float, ...],
    protocols: Collection[str] = ("http", "grpc"),
    each: int = 2,
    until_refused: bool = False,
) -> Iterator[ConcurrentTraffic]:
    """``each`` clients per protocol for as long as the block runs."""
    stop = threading.Event()
    traffic = ConcurrentTraffic(
        [
            CLIENTS[protocol](gateway, f"{protocol}-{n}", factors, stop, until_refused)
            for protocol in protocols
            for n in range(each)
        ]
    )
    traffic.start()
    try:
        yield traffic
    finally:
        stop.set()
        traffic.join()
        for client in traffic.clients:
            client.close()


def failures(outcomes: Collection[RequestOutcome]) -> list[RequestOutcome]:
    return [outcome for outcome in outcomes if outcome.kind != "answered"]


def dropped(outcomes: Collection[RequestOutcome], begun: Collection[str]) -> list[RequestOutcome]:
    """Requests that were accepted and got no correct answer; ``begun`` is the ledger's."""
    began = set(begun)
    return [
        outcome
        for outcome in outcomes
        if outcome.kind in ("lost", "wrong") or (outcome.kind == "refused" and outcome.id in began)
    ]


def kinds(outcomes: Collection[RequestOutcome]) -> Counter[str]:
    return Counter(outcome.kind for outcome in outcomes)
