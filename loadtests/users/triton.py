"""Triton's own client library, unmodified; its overhead counts, as for its users.

The library does not report the first byte, so the end of the answer stands for it.
"""

from __future__ import annotations

import json
from time import perf_counter
from types import ModuleType
from typing import Any, NamedTuple

import tritonclient.grpc
import tritonclient.http
from tritonclient.utils import InferenceServerException

from modelport.gateway.upstream import connection_errors
from modelport.loadtests.load.payloads import Payloads
from modelport.loadtests.load.samples import Outcome
from modelport.loadtests.load.target import LoadTestTarget
from modelport.loadtests.users import authentication, oip
from modelport.loadtests.users.client import Unanswered
from modelport.loadtests.users.protocol_table import Dialect

#: Every user has its own connection, as in every other protocol.
OPTIONS = (("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0))
#: Marks of a refusal in the statuses and messages of its exceptions.
REFUSED = ("429", "503", "StatusCode.RESOURCE_EXHAUSTED", "StatusCode.UNAVAILABLE")
TIMED_OUT = ("StatusCode.DEADLINE_EXCEEDED", "499")


class PreparedRequest(NamedTuple):
    """The arguments of one request."""

    model: str
    version: str
    inputs: list[Any]


def _prepare(
    module: ModuleType, target: LoadTestTarget, payloads: Payloads, number: int
) -> PreparedRequest:
    tensors = []
    for name, array in payloads.requests[number].items():
        tensor = module.InferInput(name, list(array.shape), payloads.datatypes[name])
        tensor.set_data_from_numpy(array)
        tensors.append(tensor)
    return PreparedRequest(target.model, target.version, tensors)


class _TritonClient:
    """Base of both clients; the answer is converted to one bytes object for the check."""

    def __init__(self, client: Any, target: LoadTestTarget, **options: Any) -> None:
        self.sent = self.first_byte = self.done = 0.0
        self._client, self._headers = client, authentication.headers(target)
        self._options = {**options, "headers": self._headers}

    def connect(self) -> None:
        try:
            self._client.is_server_live(headers=self._headers)
        except InferenceServerException as error:
            raise Unanswered(Outcome.FAILED, f"cannot connect: {error.message()}") from error
        except OSError as error:
            raise Unanswered(
                Outcome.FAILED, f"cannot connect: {connection_errors.reason(error)}"
            ) from error

    def ask(self, request: PreparedRequest) -> tuple[bytes, int | None]:
        self.sent = perf_counter()
        try:
            result = self._client.infer(
                request.model, request.inputs, request.version, **self._options
            )
        except InferenceServerException as error:
            self.done = self.first_byte = perf_counter()
            raise _unanswered(error) from error
        except TimeoutError as error:
            self.done = self.first_byte = perf_counter()
            raise Unanswered(Outcome.TIMED_OUT, "no response in time") from error
        except Exception as error:  # errors of sockets and of the HTTP library
            self.done = self.first_byte = perf_counter()
            raise Unanswered(Outcome.FAILED, f"{type(error).__name__}: {error}") from error
        self.done = self.first_byte = perf_counter()
        return self._answer(result)

    def _answer(self, result: Any) -> tuple[bytes, int | None]:
        """Bytes for the check, and the size of their JSON part; outside the timed section."""
        raise NotImplementedError

    def close(self) -> None:
        self._client.close()


def _unanswered(error: InferenceServerException) -> Unanswered:
    status, message = str(error.status()), str(error.message())
    if status in TIMED_OUT:
        return Unanswered(Outcome.TIMED_OUT, f"{status}: {message}")
    outcome = Outcome.REFUSED if status in REFUSED else Outcome.FAILED
    return Unanswered(outcome, f"{status}: {message}")


class TritonHttp(_TritonClient):
    """The HTTP client."""

    def __init__(self, target: LoadTestTarget, timeout_seconds: float) -> None:
        context = authentication.context(target)
        tls: dict[str, Any] = {}
        if context is not None:
            tls = {"ssl": True, "ssl_options": {}, "ssl_context_factory": lambda: context}
        client = tritonclient.http.InferenceServerClient(
            target.address,
            connection_timeout=timeout_seconds,
            network_timeout=timeout_seconds,
            **tls,
        )
        super().__init__(client, target)

    def _answer(self, result: Any) -> tuple[bytes, int | None]:
        """Rebuild the binary answer that the library decoded."""
        outputs, parts = [], []
        for one in result.get_response()["outputs"]:
            parts.append(oip.raw(result.as_numpy(one["name"])))
            told = {key: one[key] for key in ("name", "datatype", "shape")}
            outputs.append(told | {"parameters": {"binary_data_size": len(parts[-1])}})
        head = json.dumps({"outputs": outputs}).encode()
        return head + b"".join(parts), len(head)


class TritonGrpc(_TritonClient):
    """The gRPC client."""

    def __init__(self, target: LoadTestTarget, timeout_seconds: float) -> None:
        tls: dict[str, Any] = {}
        if target.tls:
            files = authentication.grpc_files(target).items()
            tls = {"ssl": True} | {name: str(path) for name, path in files if path is not None}
        client = tritonclient.grpc.InferenceServerClient(
            target.address, channel_args=list(OPTIONS), **tls
        )
        super().__init__(client, target, client_timeout=timeout_seconds)

    def _answer(self, result: Any) -> tuple[bytes, int | None]:
        return bytes(result.get_response().SerializeToString()), None


def _http(target: LoadTestTarget, payloads: Payloads, number: int) -> PreparedRequest:
    return _prepare(tritonclient.http, target, payloads, number)


def _grpc(target: LoadTestTarget, payloads: Payloads, number: int) -> PreparedRequest:
    return _prepare(tritonclient.grpc, target, payloads, number)


HTTP = Dialect(_http, TritonHttp, oip.read_http)
GRPC = Dialect(_grpc, TritonGrpc, oip.read_message)
