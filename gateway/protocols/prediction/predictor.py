"""Prediction from the bodies that clients of TorchServe, SageMaker and Vertex AI send.

    an image          JPEG or PNG, for a model with one input that is an image
    a sound           WAV, for a model with one input that is a sound
    OIP               an object with ``inputs``; bytes may follow (binary tensor data extension)
    plain JSON        ``instances``, ``data`` or a bare value (``plain_json``)
    texts             for a model with a text interface: as plain JSON, Hugging Face's ``inputs``
                      (``text_inputs``), or a body that is no JSON
    any bytes         for a model with one BYTES input

The kind is detected from the body, because ``curl -T`` sends no content type. Only for a model with
a BYTES input does the content type decide: JSON without it is text, unless it is an object with one
of those members. The response to OIP and plain JSON has the format of the request. The response to
an image, a sound or bytes has the classes (``top_classes``), or the outputs of that one element.
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from modelport.gateway.backends import parameters
from modelport.gateway.errors import InvalidArgument
from modelport.gateway.inference import audio_decoding
from modelport.gateway.inference.text.text_infer import TextInterface
from modelport.gateway.models.inference_service import SupportsInference
from modelport.gateway.models.model import ServedVersion
from modelport.gateway.models.model_view import ModelView
from modelport.gateway.protocols import encoded_inputs, response_encoding, text_inputs
from modelport.gateway.protocols.oip import http_request, http_response
from modelport.gateway.protocols.oip import parameters as oip_parameters
from modelport.gateway.protocols.prediction import plain_json
from modelport.gateway.protocols.prediction.top_classes import TopClasses, top_classes
from modelport.gateway.protocols.version_cache import VersionCache
from modelport.gateway.runtime import offload
from modelport.gateway.types import (
    Datatype,
    Deadline,
    InferRequest,
    InferResponse,
    ModelSignature,
    Tensor,
    TensorSpec,
    finished,
)
from modelport.gateway.wire import json_text, raw_tensors
from modelport.gateway.wire.raw_tensors import Buffer

JSON, BINARY = b"application/json", b"application/octet-stream"
_SPACE = b" \t\r\n"
_IMAGES = (b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n")
_MEDIA = (b"image/", b"audio/", b"application/x-image")
_MEMBER = re.compile(rb'"(?:inputs|instances|data)"\s*:')
#: Bytes at both ends of a body from which its kind is detected.
_GLANCE_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class PredictionCall:
    """A prediction request.

    ``header_length`` is the size of the JSON part if the client states it. ``version`` 0 is the
    default version; ``label`` is the one that chose the version, if any did.
    """

    model: str
    version: int
    body: bytes
    content_type: bytes = b""
    header_length: int | None = None
    trace: str = ""
    label: str | None = None


@dataclass(frozen=True, slots=True)
class PredictionReply:
    """A response; ``header_length`` is the size of its JSON part if bytes follow."""

    body: Buffer
    content_type: bytes = JSON
    header_length: int | None = None


Encode = Callable[[InferResponse], PredictionReply]


class Predictor:
    """Runs predictions on any model."""

    def __init__(self, service: SupportsInference, manager: ModelView) -> None:
        self._service = service
        self._manager = manager
        self._decoders_by_version = VersionCache(_BodyDecoder)

    async def __call__(self, call: PredictionCall, deadline: Deadline) -> PredictionReply:
        """Predict.

        Raises:
            ModelportError: As ``InferenceService.infer``, or ``InvalidArgument`` for the body.
        """
        request, encode, deadline = await self._decode(call, deadline)
        response = await finished(self._service.infer(request, deadline))
        return await response_encoding.encode(partial(encode, response), response.outputs, deadline)

    async def stream(
        self, call: PredictionCall, deadline: Deadline
    ) -> AsyncGenerator[PredictionReply, None]:
        """Yield every response of a decoupled model, as ``InferenceService.stream``."""
        request, encode, deadline = await self._decode(call, deadline)
        async with aclosing(self._service.stream(request, deadline)) as responses:
            async for response in responses:
                work = partial(encode, response)
                yield await response_encoding.encode(work, response.outputs, deadline)

    def max_bytes(self, model: str, version: int) -> int | None:
        """Return the size limit of valid requests, or None; raise as ``ModelManager.get``."""
        return self._decoders_by_version(self._manager.get(model, version)).max_bytes

    def is_decoupled(self, model: str, version: int) -> bool:
        """Whether ``model`` is decoupled; raise as ``ModelManager.get``."""
        return self._manager.get(model, version).decoupled

    async def _decode(
        self, call: PredictionCall, deadline: Deadline
    ) -> tuple[InferRequest, Encode, Deadline]:
        def find() -> _BodyDecoder:
            return self._decoders_by_version(self._manager.get(call.model, call.version))

        def decode(forms: _BodyDecoder) -> tuple[InferRequest, Encode]:
            return forms.decode(call)

        request, encode = await encoded_inputs.decode_for(
            find, lambda forms: forms.slow(call), decode, deadline
        )
        request.trace, request.label = call.trace, call.label
        return request, encode, oip_parameters.deadline(request, deadline)


class _BodyDecoder:
    """Decoder of bodies for one model version, without a reference to it."""

    def __init__(self, served: ServedVersion) -> None:
        self._signature: ModelSignature = served.signature
        self._batched = served.signature.max_batch_size > 0
        self._raw_input = served.validator.raw_input
        self._decoders = encoded_inputs.decoders(served)
        # The signature does not bound the size of encoded images and sounds.
        self.max_bytes = None if self._decoders else served.validator.max_bytes
        only = served.signature.inputs[0] if len(served.signature.inputs) == 1 else None
        self._encoded = only if only is not None and only.name in self._decoders else None
        self._text = only if only is not None and _is_text(only) else None
        self._raw = parameters.boolean(served.config, "raw_body", default=False)
        self._interface = served.text
        self._classes: TopClasses | None = None
        self._problem = ""
        try:
            self._classes = top_classes(served)
        except InvalidArgument as error:
            self._problem = f"model '{served.name}': {error}"

    def slow(self, call: PredictionCall) -> bool:
        """Whether the body is large, or may hold an image or a sound."""
        if len(call.body) > offload.INLINE_BYTES:
            return True
        if not self._decoders or call.header_length is not None:
            return False
        return self._is_encoded(call) or encoded_inputs.in_json(call.body)

    def decode(self, call: PredictionCall) -> tuple[InferRequest, Encode]:
        """Decode the body; return the request and the encoder of its response.

        Raises:
            InvalidArgument: A member or an input is invalid; the message names it.
        """
        if call.header_length is not None:
            return self._oip(call, call.header_length)
        if self._encoded is not None and self._is_encoded(call):
            data = self._decoders[self._encoded.name](call.body)
            return self._single(call, self._encoded, data)
        if self._text is not None and (self._raw or not _is_document(call)):
            shape = (1,) * len(self._text.dims)
            data = raw_tensors.object_array([call.body], shape)
            request, encode = self._single(call, self._text, data)
            if self._raw:
                request.parameters = {"content_type": call.content_type.decode("latin-1")}
            return request, encode
        if self._interface is not None and not _may_be_json(call):
            try:
                inputs = {"inputs": call.body.decode()}
            except UnicodeDecodeError as error:
                raise InvalidArgument("the body is neither JSON nor UTF-8 text") from error
            return self._texts(call, inputs, self._interface)
        if kind := _kind(call.body):
            names = ", ".join(f"'{spec.name}'" for spec in self._signature.inputs)
            raise InvalidArgument(
                f"the body is {kind}, but the model's input {names} takes none; send JSON, as in "
                "the Open Inference Protocol"
            )
        document, end = _leading_json(call.body)
        try:
            return self._document(call, document, end)
        finally:
            json_text.discard(document, end)

    def _document(
        self, call: PredictionCall, document: Any, end: int
    ) -> tuple[InferRequest, Encode]:
        """Decode a body that is JSON up to ``end``."""
        text, signature = self._interface, self._signature
        has_inputs = type(document) is dict and "inputs" in document
        if text is not None and has_inputs and text_inputs.is_request(document):
            return self._texts(call, document, text)
        if has_inputs:
            request, form = http_request.decode_document(
                document, call.body, end, call.model, call.version
            )
            return request, partial(_encode_oip, form)
        if end != len(call.body):
            raise InvalidArgument(f"{len(call.body) - end} bytes follow the JSON value")
        if text is not None and text_inputs.are_texts(_value(document), text.names):
            signature = text.signature
        tensors, plain = plain_json.decode(document, signature, self._decoders)
        request = InferRequest(call.model, tensors, model_version=call.version)
        return request, lambda response: PredictionReply(plain_json.encode(response, plain))

    def _texts(
        self, call: PredictionCall, document: dict[str, Any], text: TextInterface
    ) -> tuple[InferRequest, Encode]:
        request, encode = text_inputs.decode(document, text, call.model, call.version)
        return request, lambda response: PredictionReply(encode(response))

    def _is_encoded(self, call: PredictionCall) -> bool:
        return self._encoded is not None and (
            bool(_kind(call.body)) or call.content_type.startswith(_MEDIA)
        )

    def _oip(self, call: PredictionCall, header_length: int) -> tuple[InferRequest, Encode]:
        if header_length:
            request, form = http_request.decode(call.body, header_length, call.model, call.version)
        else:
            spec, shape = self._raw_input(len(call.body))
            request, form = http_request.decode_raw(
                call.body, spec, shape, call.model, call.version
            )
        return request, partial(_encode_oip, form)

    def _single(
        self, call: PredictionCall, spec: TensorSpec, data: np.ndarray[Any, Any]
    ) -> tuple[InferRequest, Encode]:
        if self._problem:
            raise InvalidArgument(self._problem)
        tensor = Tensor(spec.name, spec.datatype, data[np.newaxis] if self._batched else data)
        request = InferRequest(call.model, [tensor], model_version=call.version)
        return request, self._encode_single

    def _encode_single(self, response: InferResponse) -> PredictionReply:
        if self._classes is not None:
            for tensor in response.outputs:
                if tensor.name == self._classes.output:
                    values = tensor.data[0] if self._batched else tensor.data
                    # TorchServe indents it.
                    return PredictionReply(json.dumps(self._classes(values), indent=2).encode())
        (first, *more) = response.outputs
        if not more and first.datatype is Datatype.BYTES and first.data.size == 1:
            return PredictionReply(first.data.reshape(-1)[0], BINARY)
        return PredictionReply(
            plain_json.encode(response, plain_json.ResponseForm(False, single=self._batched))
        )


def _encode_oip(form: http_response.ResponseFormat, response: InferResponse) -> PredictionReply:
    text, blobs = http_response.encode(response, form)
    body, header_length = http_response.joined(text, blobs)
    return PredictionReply(body, BINARY, header_length) if header_length else PredictionReply(body)


def _kind(body: bytes) -> str:
    """Name the kind of a body that is an image or a sound; empty: it is neither."""
    if body.startswith(_IMAGES):
        return "an image"
    return "a sound" if audio_decoding.is_wav(body) else ""


def _may_be_json(call: PredictionCall) -> bool:
    start = call.body[:_GLANCE_BYTES].lstrip(_SPACE)[:1]
    return call.content_type == JSON or start in (b"{", b"[", b'"')


def _value(document: Any) -> Any:
    """The values of plain JSON, without what is around them."""
    if type(document) is dict:
        return document.get("instances", document.get("data", document))
    return document


def _is_text(spec: TensorSpec) -> bool:
    return spec.datatype is Datatype.BYTES and all(dim in (-1, 1) for dim in spec.wire_dims)


def _is_document(call: PredictionCall) -> bool:
    if call.content_type == JSON:
        return True
    start = call.body[:_GLANCE_BYTES].lstrip(_SPACE)
    return start.startswith(b"{") and _MEMBER.search(start) is not None


def _leading_json(body: bytes) -> tuple[Any, int]:
    """Parse the JSON value at the start of ``body``; return it and its end.

    Raises:
        InvalidArgument: There is none.
    """
    start, last = body[:_GLANCE_BYTES].lstrip(_SPACE), body[-_GLANCE_BYTES:].rstrip(_SPACE)
    if not start:
        raise InvalidArgument(
            "the body is empty; send JSON, an image, a sound or the bytes of one tensor"
        )
    if not start.startswith((b"{", b"[")):
        # A bare number or string.
        return json_text.loads(body), len(body)
    if last.endswith((b"}", b"]")):
        try:
            return json_text.loads(body), len(body)
        except InvalidArgument:
            end = json_text.end(body)
            if end is None or not body[end:].strip(_SPACE):
                raise
    else:
        end = json_text.end(body)
        if end is None:
            raise InvalidArgument(
                "the end of the body's JSON value is not found; set Inference-Header-Content-"
                "Length to its size"
            )
    return json_text.loads(body[:end]), end
