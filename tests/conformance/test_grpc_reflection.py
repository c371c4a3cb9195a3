"""Server reflection, as a client uses it that knows no message but those of reflection.

``make peer-suites`` (``grpc``) asks with gRPC's own client.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from google.protobuf import message_factory
from google.protobuf.descriptor_database import DescriptorDatabase
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool

from modelport.gateway.wire.proto import reflection_pb2 as pb
from tests.conformance import wire
from tests.conformance.wire import TIMEOUT_SECONDS
from tests.server import Gateway

VERSIONS = ("grpc.reflection.v1", "grpc.reflection.v1alpha")
SERVICES = {
    "grpc.health.v1.Health",
    "grpc.reflection.v1.ServerReflection",
    "grpc.reflection.v1alpha.ServerReflection",
    "inference.GRPCInferenceService",
    "org.pytorch.serve.grpc.inference.InferenceAPIsService",
    "org.pytorch.serve.grpc.management.ManagementAPIsService",
    "tensorflow.serving.ModelService",
    "tensorflow.serving.PredictionService",
}


@pytest.fixture(scope="module")
def channel(gateway: Gateway) -> Iterator[grpc.Channel]:
    with wire.channel(gateway.grpc) as opened:
        yield opened


def ask(channel: grpc.Channel, *requests: Any, version: str = VERSIONS[0]) -> list[Any]:
    method = channel.stream_stream(
        f"/{version}.ServerReflection/ServerReflectionInfo",
        request_serializer=pb.ServerReflectionRequest.SerializeToString,
        response_deserializer=pb.ServerReflectionResponse.FromString,
    )
    return list(method(iter(requests), timeout=TIMEOUT_SECONDS))


def described(channel: grpc.Channel, symbol: str, version: str = VERSIONS[0]) -> DescriptorPool:
    """A pool of the files that a client needs for ``symbol``."""
    request = pb.ServerReflectionRequest(file_containing_symbol=symbol)
    (answer,) = ask(channel, request, version=version)
    database = DescriptorDatabase()
    for file in answer.file_descriptor_response.file_descriptor_proto:
        database.Add(FileDescriptorProto.FromString(file))
    return DescriptorPool(database)


@pytest.mark.parametrize("version", VERSIONS)
def test_every_service_is_listed_and_described(channel: grpc.Channel, version: str) -> None:
    (answer,) = ask(channel, pb.ServerReflectionRequest(list_services="*"), version=version)
    names = [each.name for each in answer.list_services_response.service]
    assert set(names) == SERVICES
    for name in names:
        service = described(channel, name, version).FindServiceByName(name)
        assert len(service.methods) >= 1
        assert all(each.input_type.full_name for each in service.methods)


def test_a_client_calls_a_model_with_the_messages_that_it_was_told(channel: grpc.Channel) -> None:
    name = "inference.GRPCInferenceService"
    service = described(channel, name).FindServiceByName(name)
    infer = service.methods_by_name["ModelInfer"]
    request, reply = map(message_factory.GetMessageClass, (infer.input_type, infer.output_type))
    message = request(model_name="x2")
    tensor = message.inputs.add(name="x", datatype="FP32", shape=[1, 4])
    tensor.contents.fp32_contents.extend([1, 2, 3, 4])
    call = channel.unary_unary(f"/{name}/{infer.name}", request.SerializeToString, reply.FromString)
    assert call(message, timeout=TIMEOUT_SECONDS).outputs[0].name == "y"
    stream = service.methods_by_name["ModelStreamInfer"]
    assert (stream.client_streaming, stream.server_streaming) == (True, True)


def test_messages_methods_and_files_are_found_by_name(channel: grpc.Channel) -> None:
    symbols = (
        "inference.ModelInferRequest",
        "inference.ModelInferRequest.InferInputTensor",
        "inference.GRPCInferenceService.ModelInfer",
        "tensorflow.DataType",
    )
    requests = [pb.ServerReflectionRequest(file_containing_symbol=each) for each in symbols]
    answers = ask(channel, *requests)
    for answer in answers:
        found = FileDescriptorProto.FromString(
            answer.file_descriptor_response.file_descriptor_proto[0]
        )
        (again,) = ask(channel, pb.ServerReflectionRequest(file_by_filename=found.name))
        assert again.file_descriptor_response == answer.file_descriptor_response
    extensions = pb.ServerReflectionRequest(all_extension_numbers_of_type=symbols[0], host="h")
    (answer,) = ask(channel, extensions)
    assert answer.all_extension_numbers_response.base_type_name == symbols[0]
    assert (answer.valid_host, answer.original_request) == ("h", extensions)


@pytest.mark.parametrize(
    "asked",
    [
        {"file_by_filename": "nothing.proto"},
        {"file_containing_symbol": "inference.Nothing"},
        {"file_containing_symbol": ""},
        {"file_containing_symbol": "x" * 100_000},
        {"all_extension_numbers_of_type": "inference.Nothing"},
        {"all_extension_numbers_of_type": "inference.GRPCInferenceService"},
        {"file_containing_extension": pb.ExtensionRequest(containing_type="a", extension_number=1)},
        {},
    ],
)
def test_what_is_not_there_is_not_found_and_the_stream_goes_on(
    channel: grpc.Channel, asked: dict[str, Any]
) -> None:
    wrong, right = pb.ServerReflectionRequest(**asked), pb.ServerReflectionRequest(list_services="")
    answer, following = ask(channel, wrong, right)
    assert answer.error_response.error_code == grpc.StatusCode.NOT_FOUND.value[0]
    assert len(answer.error_response.error_message) < 200
    assert following.HasField("list_services_response")
