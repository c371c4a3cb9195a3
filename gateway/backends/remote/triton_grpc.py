"""Open Inference Protocol servers over gRPC: raw tensors both ways.

A message is the concatenation of its parts (protobuf's encoding): what is the same for every
request is serialised when the model loads, and tensors are sent from where they lie.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from tritonclient.grpc import service_pb2 as pb

from gateway.backends.remote.agreement import Agreement, Answer, Metadata
from gateway.backends.remote.triton_model import parameters, tensor_metadata
from gateway.errors import Internal, InvalidArgument, ModelportError
from gateway.repository.config import ModelConfig
from gateway.routes import Route
from gateway.types import Array, Deadline, InferRequest, Parameter
from gateway.upstream import EndpointFailed, Failure, grpc, public
from gateway.upstream.grpc import MAX_MESSAGE_BYTES, Call
from gateway.upstream.grpc_stream import StreamChannel
from gateway.wire import contents, raw
from gateway.wire.raw import Buffer

_SERVICE = "/inference.GRPCInferenceService/"
_STREAM = f"{_SERVICE}ModelStreamInfer"
_FINAL = "triton_final_response"
_METHODS = ("ModelMetadata", "ModelConfig", "ModelReady", "ModelInfer")
_LENGTH_DELIMITED = 2
_RAW_FIELD = pb.ModelInferRequest.DESCRIPTOR.fields_by_name["raw_input_contents"].number
_RAW_TAG = bytes([_RAW_FIELD << 3 | _LENGTH_DELIMITED])
_MAX_INT64 = 2**63 - 1


class GrpcServer:
    """One channel for each endpoint."""

    def __init__(self, route: Route, model: str) -> None:
        self._model = model
        self._route = route
        self._streams: dict[str, StreamChannel] = {}
        self._channels = {address: grpc.Channel(address, route) for address in route.endpoints}
        self._calls: dict[tuple[str, str], Call] = {
            (address, method): channel.method(_SERVICE + method)
            for address, channel in self._channels.items()
            for method in _METHODS
        }
        self._head = b""
        self._all = b""
        self._outputs: dict[str, bytes] = {}

    async def metadata(self, address: str, version: str, limit: Deadline) -> Metadata:
        message = pb.ModelMetadataRequest(name=self._model, version=version)
        reply = await self._ask(address, "ModelMetadata", message, limit)
        inputs, outputs = (
            tuple(tensor_metadata(t.name, t.datatype, t.shape) for t in tensors)
            for tensors in (reply.inputs, reply.outputs)
        )
        return Metadata(tuple(reply.versions), inputs, outputs)

    async def config(self, address: str, version: str, limit: Deadline) -> ModelConfig | None:
        message = pb.ModelConfigRequest(name=self._model, version=version)
        try:
            return (await self._ask(address, "ModelConfig", message, limit)).config
        except ModelportError:  # not all servers have it
            return None

    async def ready(self, address: str, version: str, limit: Deadline) -> None:
        message = pb.ModelReadyRequest(name=self._model, version=version)
        if not (await self._ask(address, "ModelReady", message, limit)).ready:
            raise EndpointFailed(Failure.UNREADY)

    async def _ask(self, address: str, method: str, message: Any, limit: Deadline) -> Any:
        reply = getattr(pb, f"{method}Response").FromString
        call = self._calls[address, method]
        return await grpc.unary(call, message.SerializeToString(), reply, limit)

    async def serve(self, address: str, version: str, agreement: Agreement) -> None:
        self._agreement = agreement
        head = pb.ModelInferRequest(model_name=self._model, model_version=version)
        self._head = head.SerializeToString()
        for name in agreement.outputs:
            output = pb.ModelInferRequest()
            output.outputs.add(name=name)
            self._outputs[name] = output.SerializeToString()
        self._all = b"".join(self._outputs.values())
        if agreement.decoupled:
            self._streams = {a: StreamChannel(a, self._route) for a in self._route.endpoints}

    async def infer(self, address: str, request: InferRequest, limit: Deadline) -> Answer:
        message = self._encode(request, limit)
        reply = await grpc.unary(
            self._calls[address, "ModelInfer"], message, pb.ModelInferResponse.FromString, limit
        )
        return self._decode(reply, request)

    async def stream(
        self, address: str, request: InferRequest, deadline: Deadline
    ) -> AsyncGenerator[Answer, None]:
        message = self._encode(request, deadline)
        reply = pb.ModelStreamInferResponse.FromString
        channel = self._streams[address]
        async with aclosing(channel.replies(_STREAM, message, reply, deadline)) as replies:
            async for each in replies:
                if each.error_message:
                    raise _failed(public(each.error_message))
                response = each.infer_response
                final = False
                if _FINAL in response.parameters:
                    final = response.parameters[_FINAL].bool_param
                    del response.parameters[_FINAL]
                if response.outputs or not final:
                    yield self._decode(response, request)

    def _encode(self, request: InferRequest, limit: Deadline) -> list[Buffer]:
        message = pb.ModelInferRequest(id=request.id)
        parts: list[Buffer] = []
        for tensor in self._agreement.to_wire(request):
            message.inputs.add(
                name=tensor.name, datatype=tensor.datatype.value, shape=tensor.data.shape
            )
            blob = raw.encode(tensor)
            parts += (_RAW_TAG, _varint(len(blob)), blob)
        for key, value in parameters(request, limit.remaining()).items():
            _set(message.parameters[key], key, value)
        if request.outputs:
            parts += map(self._outputs.__getitem__, request.outputs)
        else:
            parts.append(self._all)
        parts += (message.SerializeToString(), self._head)
        if sum(map(len, parts)) > MAX_MESSAGE_BYTES:
            raise InvalidArgument("the request is too large for gRPC, which carries 2 GiB")
        return parts

    def _decode(self, message: Any, request: InferRequest) -> Answer:
        agreement = self._agreement
        batch = agreement.batch_size(request)
        blobs = message.raw_output_contents
        if blobs and len(blobs) != len(message.outputs):
            raise EndpointFailed(Failure.DAMAGED, "its outputs and their contents do not match")
        arrays: dict[str, Array] = {}
        for index, item in enumerate(message.outputs):
            name, datatype, shape = agreement.expect(item.name, item.datatype, item.shape, batch)
            try:
                raw.parse_shape(name, shape)
                if blobs:
                    arrays[name] = raw.decode(name, datatype, shape, blobs[index])
                else:
                    arrays[name] = contents.decode(name, datatype, shape, item.contents)
            except InvalidArgument as error:
                raise EndpointFailed(
                    Failure.DAMAGED, f"output '{name}' does not hold what its shape needs"
                ) from error
        outputs = agreement.ordered(arrays, len(message.outputs), request)
        if not message.parameters:
            return Answer(outputs)
        return Answer(outputs, {key: _value(p) for key, p in message.parameters.items()})

    async def close(self) -> None:
        await asyncio.gather(
            *(channel.close() for channel in self._channels.values()),
            *(channel.close() for channel in self._streams.values()),
        )


def _failed(said: str) -> ModelportError:
    """An error in a stream has no status; of those that ask to try again the words are known."""
    error = grpc.meant("UNAVAILABLE", said)
    return Internal(said) if isinstance(error, EndpointFailed) else error


def _varint(number: int) -> bytes:
    parts = bytearray()
    while number > 0x7F:
        parts.append(number & 0x7F | 0x80)
        number >>= 7
    parts.append(number)
    return bytes(parts)


def _set(parameter: Any, key: str, value: Parameter) -> None:
    if type(value) is bool:
        parameter.bool_param = value
    elif type(value) is int:
        if key == "priority" or value > _MAX_INT64:  # Triton takes a priority in no other field
            parameter.uint64_param = value
        else:
            parameter.int64_param = value
    elif type(value) is float:
        parameter.double_param = value
    else:
        parameter.string_param = value


def _value(parameter: Any) -> Parameter:
    value: Parameter = getattr(
        parameter, parameter.WhichOneof("parameter_choice") or "string_param"
    )
    return value
