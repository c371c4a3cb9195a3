"""Requests to a gateway in the background, through HTTP and gRPC, and who answered."""

from __future__ import annotations

import http.client
import itertools
import json
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import grpc
import numpy as np

from modelport.gateway.wire.proto import grpc_service_pb2 as pb
from tests import models
from tests.polling import WAIT_SECONDS
from tests.server import Gateway

X = [1.0, 2.0, 3.0, 4.0]
OIP = {"id": "a1", "inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 4], "data": X}]}
METHOD = "/inference.GRPCInferenceService/ModelInfer"
#: A version and the first number of its output.
Answer = tuple[int, float]
#: Versions and the factor that each computes; 2 is as good as 1, and 3 is not.
FACTORS = {1: 2.0, 2: 2.0, 3: 5.0}


def repository(root: Path, config: str) -> Path:
    """Three versions of ``x2``, and a fourth one that takes other inputs."""
    for version, factor in FACTORS.items():
        models.multiply(root / f"x2/{version}/model.onnx", factor)
    (root / "x2/config.pbtxt").write_text(models.X2_CONFIG + config)
    return root


def infer_http(gateway: Gateway) -> Generator[Answer, None, None]:
    """Answers: the version and the first number."""
    connection = http.client.HTTPConnection("127.0.0.1", gateway.http_port, timeout=WAIT_SECONDS)
    with closing(connection):
        while True:
            connection.request("POST", "/v2/models/x2/infer", json.dumps(OIP))
            answer = connection.getresponse()
            document = json.loads(answer.read())
            assert answer.status == 200, document
            yield int(document["model_version"]), document["outputs"][0]["data"][0]


def infer_grpc(gateway: Gateway) -> Generator[Answer, None, None]:
    request = pb.ModelInferRequest(model_name="x2")
    request.inputs.add(name="x", datatype="FP32", shape=[1, 4])
    request.raw_input_contents.append(np.array(X, np.float32).tobytes())
    with grpc.insecure_channel(gateway.grpc) as channel:
        call = channel.unary_unary(
            METHOD, pb.ModelInferRequest.SerializeToString, pb.ModelInferResponse.FromString
        )
        while True:
            answer = call(request, timeout=WAIT_SECONDS)
            first = np.frombuffer(answer.raw_output_contents[0], np.float32)[0]
            yield int(answer.model_version), float(first)


class RolloutTraffic:
    """The answers so far."""

    def __init__(self) -> None:
        #: The time at which each request began, and the version that answered it.
        self._answers: list[tuple[float, int]] = []
        self.problems: list[str] = []
        self._answered = threading.Condition()
        self._stopping = threading.Event()

    def ask(self, answers: Generator[Answer, None, None]) -> None:
        """Take answers until the end."""
        try:
            with closing(answers):
                self._ask(answers)
        except Exception as error:
            if not self._stopping.is_set():
                self.problems.append(repr(error))
                with self._answered:
                    self._answered.notify_all()

    def _ask(self, answers: Generator[Answer, None, None]) -> None:
        while not self._stopping.is_set():
            began = time.monotonic()
            version, first = next(answers)
            if first != FACTORS[version] * X[0]:
                self.problems.append(f"version {version} answered {first}")
            with self._answered:
                self._answers.append((began, version))
                self._answered.notify_all()

    @property
    def versions(self) -> list[int]:
        """The versions of all answers so far."""
        return [version for _, version in self._answers]

    def more(self, count: int = 50) -> list[int]:
        """The versions that answer ``count`` requests which begin from now on."""
        now, before = time.monotonic(), len(self._answers)
        found: list[int] = []

        def enough() -> bool:
            found[:] = [version for began, version in self._answers[before:] if began >= now]
            return len(found) >= count or bool(self.problems)

        with self._answered:
            assert self._answered.wait_for(enough, WAIT_SECONDS)
        assert not self.problems, self.problems
        return found

    def until(self, holds: Callable[[list[int]], bool]) -> None:
        """Wait until the next answers hold."""
        for _ in itertools.repeat(None):
            if holds(self.more()):
                return

    def stop(self) -> None:
        self._stopping.set()


@contextmanager
def traffic(gateway: Gateway) -> Iterator[RolloutTraffic]:
    """Two clients, one of each protocol. Every request must be answered, and correctly."""
    found = RolloutTraffic()
    threads = [
        threading.Thread(target=found.ask, args=(infer(gateway),), daemon=True)
        for infer in (infer_http, infer_grpc)
    ]
    for thread in threads:
        thread.start()
    try:
        yield found
        found.more(10)
    finally:
        found.stop()
        for thread in threads:
            thread.join(WAIT_SECONDS)
    assert found.problems == []
