"""The body of a prediction, whatever its form: what TorchServe, SageMaker and Vertex clients send.

    a picture         JPEG or PNG, for a model with one input that is an image
    OIP               an object with ``inputs``; bytes may follow (binary tensor data extension)
    plain JSON        ``instances``, ``data`` or a bare value (``plain_json``)
    anything          as it is, for a model with one BYTES input

The bytes tell which, not the content type: ``curl -T`` sends none. Only of a BYTES model's body it
decides: JSON that does not say so is text there, unless it is an object with one of those members.
OIP and plain JSON are answered in like form. A picture, or bytes as they are, are answered with the
classes (``top_classes``), else with the outputs of that one element.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from modelport.gateway.errors import InvalidArgument
from modelport.gateway.inference.service import InferenceService
from modelport.gateway.models.manager import ModelManager
from modelport.gateway.models.model import ServedVersion
from modelport.gateway.protocols import image_decoding, response_encoding
from modelport.gateway.protocols.oip import json as oip_json
from modelport.gateway.protocols.oip import parameters as oip_parameters
from modelport.gateway.protocols.per_version import VersionCache
from modelport.gateway.protocols.prediction import plain_json
from modelport.gateway.protocols.prediction.top_classes import TopClasses, top_classes
from modelport.gateway.runtime import offload
from modelport.gateway.types import (
    Datatype,
    Deadline,
    InferRequest,
    InferResponse,
    ModelSignature,
    Tensor,
    TensorSpec,
)
from modelport.gateway.wire import json_text, json_writer, raw
from modelport.gateway.wire.raw import Buffer

JSON, BINARY = b"application/json", b"application/octet-stream"
_SPACE = b" \t\r\n"
_PICTURES = (b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n")
_MEMBER = re.compile(rb'"(?:inputs|instances|data)"\s*:')
#: A string, or what opens or closes an array or object.
#: One that is not closed goes on to the end, so that no character is looked at twice.
_TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*+"?|[][{}]', re.DOTALL)
#: How many of those are looked at for where a JSON part ends: hundredths of a second.
MAX_TOKENS = 200_000
#: Where it is decided of which form a body is.
_GLANCE_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Call:
    """A prediction that is asked for.

    ``header_length`` is the size of the JSON part where the client says it. ``version`` 0: the
    default.
    """

    model: str
    version: int
    body: bytes
    content_type: bytes = b""
    header_length: int | None = None
    trace: str = ""


@dataclass(frozen=True, slots=True)
class Reply:
    """``header_length`` is the size of the JSON part where bytes follow it."""

    body: Buffer
    content_type: bytes = JSON
    header_length: int | None = None


Encode = Callable[[InferResponse], Reply]
Predict = Callable[[Call, Deadline], Awaitable[Reply]]
PredictStream = Callable[[Call, Deadline], AsyncGenerator[Reply, None]]


class Predictor:
    """``Call`` → ``Reply``."""

    def __init__(self, service: InferenceService, manager: ModelManager) -> None:
        self._service = service
        self._manager = manager
        self._forms = VersionCache(_Forms)

    async def __call__(self, call: Call, deadline: Deadline) -> Reply:
        """Answer ``call``.

        Raises:
            ModelportError: as ``InferenceService.infer``; ``InvalidArgument`` names what is wrong.
        """
        request, encode, deadline = await self._decode(call, deadline)
        response = await self._service.infer(request, deadline)
        return await response_encoding.encode(partial(encode, response), response.outputs, deadline)

    async def stream(self, call: Call, deadline: Deadline) -> AsyncGenerator[Reply, None]:
        """Every response to ``call``, as ``InferenceService.stream`` gives and raises them."""
        request, encode, deadline = await self._decode(call, deadline)
        async with aclosing(self._service.stream(request, deadline)) as responses:
            async for response in responses:
                work = partial(encode, response)
                yield await response_encoding.encode(work, response.outputs, deadline)

    def max_bytes(self, model: str, version: int) -> int | None:
        """The most bytes of a valid request; None: any number; raises as ``ModelManager.get``."""
        return self._forms(self._manager.get(model, version)).max_bytes

    def is_decoupled(self, model: str, version: int) -> bool:
        """Whether ``model`` gives any number of responses; raises as ``ModelManager.get``."""
        return self._manager.get(model, version).decoupled

    async def _decode(
        self, call: Call, deadline: Deadline
    ) -> tuple[InferRequest, Encode, Deadline]:
        def find() -> _Forms:
            return self._forms(self._manager.get(call.model, call.version))

        def decode(forms: _Forms) -> tuple[InferRequest, Encode]:
            return forms.decode(call)

        _, (request, encode) = await image_decoding.decode_for(
            find, lambda forms: forms.slow(call), decode, deadline
        )
        request.trace = call.trace
        return request, encode, oip_parameters.deadline(request, deadline)


class _Forms:
    """What bodies mean to one model version. It holds nothing that keeps the version."""

    def __init__(self, served: ServedVersion) -> None:
        self._signature: ModelSignature = served.signature
        self._batched = served.signature.max_batch_size > 0
        self._raw_input = served.validator.raw_input
        self._decoders = image_decoding.decoders(served)
        # Pictures come in every size.
        self.max_bytes = None if self._decoders else served.validator.max_bytes
        only = served.signature.inputs[0] if len(served.signature.inputs) == 1 else None
        self._picture = only if only is not None and only.name in self._decoders else None
        self._text = only if only is not None and _is_text(only) else None
        self._classes, self._problem = _classes(served)

    def slow(self, call: Call) -> bool:
        """Whether the body is large, or there may be a picture in it."""
        if len(call.body) > offload.INLINE_BYTES:
            return True
        if not self._decoders or call.header_length is not None:
            return False
        return self._is_picture(call) or image_decoding.in_json(call.body)

    def decode(self, call: Call) -> tuple[InferRequest, Encode]:
        """The request in the body, and what writes its answer.

        Raises:
            InvalidArgument: naming the member or the input.
        """
        if call.header_length is not None:
            return self._oip(call, call.header_length)
        if self._picture is not None and self._is_picture(call):
            data = self._decoders[self._picture.name](call.body)
            return self._single(call, self._picture, data)
        if self._text is not None and not _is_document(call):
            shape = (1,) * len(self._text.dims)
            return self._single(call, self._text, raw.object_array([call.body], shape))
        if call.body.startswith(_PICTURES):
            names = ", ".join(f"'{spec.name}'" for spec in self._signature.inputs)
            raise InvalidArgument(
                f"the body is an image, but the model's input {names} is none; send JSON, as in "
                "the Open Inference Protocol"
            )
        document, end = _leading_json(call.body)
        if type(document) is dict and "inputs" in document:
            request, form = oip_json.decode_document(
                document, call.body, end, call.model, call.version
            )
            return request, _Oip(form)
        if end != len(call.body):
            raise InvalidArgument(f"{len(call.body) - end} bytes follow the JSON value")
        tensors, shape_of_answer = plain_json.decode(document, self._signature, self._decoders)
        request = InferRequest(call.model, tensors, model_version=call.version)
        return request, lambda response: Reply(plain_json.encode(response, shape_of_answer))

    def _is_picture(self, call: Call) -> bool:
        return self._picture is not None and (
            call.body.startswith(_PICTURES)
            or call.content_type.startswith(b"image/")
            or call.content_type == b"application/x-image"
        )

    def _oip(self, call: Call, header_length: int) -> tuple[InferRequest, Encode]:
        if header_length:
            request, form = oip_json.decode(call.body, header_length, call.model, call.version)
        else:
            spec, shape = self._raw_input(len(call.body))
            request, form = oip_json.decode_raw(call.body, spec, shape, call.model, call.version)
        return request, _Oip(form)

    def _single(
        self, call: Call, spec: TensorSpec, data: np.ndarray[Any, Any]
    ) -> tuple[InferRequest, Encode]:
        if self._problem is not None:
            raise InvalidArgument(str(self._problem))
        tensor = Tensor(spec.name, spec.datatype, data[np.newaxis] if self._batched else data)
        request = InferRequest(call.model, [tensor], model_version=call.version)
        return request, self._encode_single

    def _encode_single(self, response: InferResponse) -> Reply:
        if self._classes is not None:
            for tensor in response.outputs:
                if tensor.name == self._classes.output:
                    values = tensor.data[0] if self._batched else tensor.data
                    # As TorchServe prints it.
                    return Reply(json.dumps(self._classes(values), indent=2).encode())
        (first, *more) = response.outputs
        if not more and first.datatype is Datatype.BYTES and first.data.size == 1:
            return Reply(first.data.reshape(-1)[0], BINARY)
        return Reply(plain_json.encode(response, plain_json.Form(False, single=self._batched)))


class _Oip:
    """The answer to an OIP request in its own form."""

    __slots__ = ("_form",)

    def __init__(self, form: oip_json.ResponseFormat) -> None:
        self._form = form

    def __call__(self, response: InferResponse) -> Reply:
        text, blobs = oip_json.encode(response, self._form)
        if not any(map(len, blobs)):
            return Reply(text)
        return Reply(json_writer.join((text, *blobs)), BINARY, len(text))


def _classes(served: ServedVersion) -> tuple[TopClasses | None, InvalidArgument | None]:
    try:
        return top_classes(served), None
    except InvalidArgument as error:
        return None, InvalidArgument(f"model '{served.name}': {error}")


def _is_text(spec: TensorSpec) -> bool:
    return spec.datatype is Datatype.BYTES and all(dim in (-1, 1) for dim in spec.wire_dims)


def _is_document(call: Call) -> bool:
    if call.content_type == JSON:
        return True
    start = call.body[:_GLANCE_BYTES].lstrip(_SPACE)
    return start.startswith(b"{") and _MEMBER.search(start) is not None


def _leading_json(body: bytes) -> tuple[Any, int]:
    """The JSON value that ``body`` starts with, and where it ends: the body's end, or its bytes'.

    Raises:
        InvalidArgument: there is none.
    """
    start, last = body[:_GLANCE_BYTES].lstrip(_SPACE), body[-_GLANCE_BYTES:].rstrip(_SPACE)
    if not start:
        raise InvalidArgument("the body is empty; send JSON, an image or the bytes of one tensor")
    if not start.startswith((b"{", b"[")):
        # A number or a string alone: whatever json_text makes of it.
        return json_text.loads(body), len(body)
    if last.endswith((b"}", b"]")):
        try:
            return json_text.loads(body), len(body)
        except InvalidArgument:
            end = _end(body)
            if end is None or not body[end:].strip(_SPACE):
                raise
    else:
        end = _end(body)
        if end is None:
            raise InvalidArgument(
                "the end of the body's JSON value is not found; Inference-Header-Content-Length "
                "says where it is"
            )
    return json_text.loads(body[:end]), end


def _end(body: bytes) -> int | None:
    """Where the array or object that ``body`` starts with is closed; looked for, not parsed."""
    depth = 0
    for token in itertools.islice(_TOKEN.finditer(body), MAX_TOKENS):
        mark = body[token.start()]
        if mark in b"[{":
            depth += 1
            if depth > json_text.MAX_DEPTH:
                return None
        elif mark in b"]}":
            depth -= 1
            if depth <= 0:
                return token.end()
    return None
