"""TorchServe over HTTP: ``POST /predictions``; the management API describes the model."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any
from urllib.parse import quote

from modelport.gateway.backends.remote import torchserve_model, triton_http
from modelport.gateway.backends.remote.signature_negotiation import (
    Metadata,
    NegotiatedSignature,
    RemoteResponse,
)
from modelport.gateway.backends.remote.triton_http import HEADER_LENGTH
from modelport.gateway.errors import ModelportError
from modelport.gateway.repository.config import ModelConfig
from modelport.gateway.repository.routes_file import ModelRoute
from modelport.gateway.types import Datatype, Deadline, InferRequest, Tensor
from modelport.gateway.upstream import http
from modelport.gateway.upstream.http import HttpReply
from modelport.gateway.upstream.outlier_detection import EndpointFailed, FailureKind
from modelport.gateway.wire import raw_tensors


class TorchServeHttpClient(triton_http.TritonHttpClient):
    """The HTTP client. The body of a row is that of the Open Inference Protocol."""

    def __init__(self, route: ModelRoute, model: str, config: ModelConfig | None) -> None:
        super().__init__(route, model)
        self._model = model
        self._declared = config if config is not None and (config.input or config.output) else None
        self._only_versions = config is None
        self._theirs: ModelConfig | None = None
        self._spelled: dict[str, str] = {}
        self._raw = False

    # -- the management API -------------------------------------------------------------------

    async def _management(self, path: str, limit: Deadline) -> Any:
        """The successful response of ``/models/<model><path>``."""
        path = f"/models/{quote(self._model, safe='')}{path}"
        return _good(await self._session.ask("GET", self._route.management, path, limit))

    async def _described_versions(self, limit: Deadline) -> list[dict[str, Any]]:
        rows = await self._management("/all", limit)
        if type(rows) is not list or not all(type(row) is dict for row in rows):
            raise EndpointFailed(FailureKind.DAMAGED, "it does not describe the model")
        return rows

    async def _told_versions(self, limit: Deadline) -> tuple[str, ...]:
        """The versions that have a worker; also records TorchServe's names for them."""
        rows = await self._described_versions(limit)
        ready = []
        for row in rows:
            word = row.get("modelVersion")
            number = torchserve_model.number(word)
            if number and type(word) is str:
                self._spelled[number] = word
                if _has_worker(row):
                    ready.append(number)
        if rows and not any(map(_has_worker, rows)):
            raise EndpointFailed(FailureKind.UNREADY, "it has no worker for the model")
        return tuple(sorted(ready, key=int))

    async def _handlers_own(self, version: str, limit: Deadline) -> ModelConfig | None:
        """The signature of modelport's handler; other handlers fail or return something else."""
        try:
            rows = await self._management(f"{self._of(version)}?customized=true", limit)
        except ModelportError:
            return None
        except EndpointFailed as error:
            if error.failure is not FailureKind.UNREADY:
                raise
            return None
        row = rows[0] if type(rows) is list and rows and type(rows[0]) is dict else {}
        return torchserve_model.described_by_handler(row.get("customizedMetadata"))

    # -- RemoteClient -------------------------------------------------------------------------

    async def metadata(self, address: str, version: str, limit: Deadline) -> Metadata:
        told = self._route.management
        versions = await self._told_versions(limit) if told else ()
        if versions and version and torchserve_model.number(version) not in ("", *versions):
            raise EndpointFailed(FailureKind.UNREADY, f"it has no worker for version {version}")
        if not told or self._only_versions:
            await self.exists(address, version, limit)
        if self._only_versions:
            return Metadata(versions, (), ())
        if self._declared is not None:
            return torchserve_model.described(versions, self._declared)
        self._theirs = await self._handlers_own(version, limit) if told else None
        if self._theirs is None:
            return torchserve_model.undescribed(versions)
        return torchserve_model.described(versions, self._theirs)

    async def config(self, address: str, version: str, limit: Deadline) -> ModelConfig | None:
        return self._theirs

    async def ready(self, address: str, version: str, limit: Deadline) -> None:
        await self.exists(address, version, limit)
        if self._route.management and len(self._route.endpoints) == 1:  # it belongs to the endpoint
            rows = await self._management(self._of(version), limit)
            if type(rows) is not list or not any(map(_has_worker, rows)):
                raise EndpointFailed(FailureKind.UNREADY, "it has no worker for the model")

    async def loading(self, address: str, limit: Deadline) -> bool:
        if not self._route.management:
            return False
        rows = await self._described_versions(limit)
        return any(row.get("workers") and not _has_worker(row) for row in rows)

    async def exists(self, address: str, version: str, limit: Deadline) -> None:
        """Raise unless the model is registered."""
        _good(await self._session.ask("OPTIONS", address, self._prediction(version), limit))

    async def serve(self, address: str, version: str, agreement: NegotiatedSignature) -> None:
        self._agreement = agreement
        self._infer_path = self._prediction(version)
        self._raw = torchserve_model.raw_signature(agreement.config)
        if not self._raw:
            agreement.refuse(
                (Datatype.BYTES,),
                "PyTorch does not have; a model of raw bytes has the input 'data' and the output "
                "'output' of shape [1]",
            )

    async def infer(self, address: str, request: InferRequest, limit: Deadline) -> RemoteResponse:
        headers, body = self.row(request, limit)
        reply = await self._session.ask("POST", address, self._infer_path, limit, body, headers)
        if reply.status != 200:
            _good(reply)  # raises the server's error
        return self.answer(reply, request)

    async def stream(
        self, address: str, request: InferRequest, deadline: Deadline
    ) -> AsyncGenerator[RemoteResponse, None]:
        """Yield the parts that a handler sends with ``send_intermediate_predict_response``."""
        headers, body = self.row(request, deadline)
        found = self._session.parts(address, self._infer_path, deadline, body, headers, _good)
        async with aclosing(found) as parts:
            async for part in parts:
                yield self.answer(HttpReply(200, {}, part), request)

    # -- rows, also used over gRPC ------------------------------------------------------------

    def row(self, request: InferRequest, limit: Deadline) -> tuple[dict[str, str], bytes]:
        """The headers, with the length of the JSON part of the body, and the body."""
        headers = {"Content-Type": "application/octet-stream"}
        if self._raw:
            return headers, bytes(request.inputs[0].data.reshape(-1)[0])
        header, blobs = self._encode(request, limit)
        headers[HEADER_LENGTH] = str(len(header))
        return headers, b"".join((header, *blobs))

    def answer(self, reply: HttpReply, request: InferRequest) -> RemoteResponse:
        if self._raw:
            data = raw_tensors.object_array([reply.body], (1,))
            return RemoteResponse([Tensor(torchserve_model.RAW_OUTPUT, Datatype.BYTES, data)])
        return self._decode(reply, request)

    def spell(self, version: str) -> str:
        """TorchServe's name for ``version``."""
        return self._spelled.get(version, version)

    def _of(self, version: str) -> str:
        """The part of a path for ``version``, if it is not empty."""
        return f"/{quote(self.spell(version), safe='')}" if version else ""

    def _prediction(self, version: str) -> str:
        return f"/predictions/{quote(self._model, safe='')}{self._of(version)}"


def _has_worker(row: Any) -> bool:
    workers = row.get("workers") if type(row) is dict else None
    return type(workers) is list and any(
        type(worker) is dict and worker.get("status") == "READY" for worker in workers
    )


def _good(reply: HttpReply) -> Any:
    """The JSON of a successful reply; raises what TorchServe or the handler reports otherwise."""
    return http.read_json(reply, "it is not JSON", _error)


def _error(status: int, document: Mapping[str, Any]) -> Exception:
    said = document.get("error") or document.get("message")
    if type(said) is not str and status == 413:
        said = "the server's max_request_size is too small"
    meant = http.meant(status, said)
    return torchserve_model.cause_of(meant) if isinstance(meant, ModelportError) else meant
