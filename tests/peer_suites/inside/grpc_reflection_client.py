"""Tests of the gateway with ``grpcio-reflection``'s client; ``GATEWAY_GRPC`` is its address."""

import os

import grpc
import pytest
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)


@pytest.fixture
def channel():
    with grpc.insecure_channel(os.environ["GATEWAY_GRPC"]) as opened:
        yield opened


def test_every_service_is_described(channel):
    database = ProtoReflectionDescriptorDatabase(channel)
    pool = DescriptorPool(database)
    services = database.get_services()
    assert "inference.GRPCInferenceService" in services
    for name in services:
        assert pool.FindServiceByName(name).methods


def test_a_model_is_called_with_reflected_messages(channel):
    pool = DescriptorPool(ProtoReflectionDescriptorDatabase(channel))
    service = pool.FindServiceByName("inference.GRPCInferenceService")
    method = service.methods_by_name["ModelInfer"]
    request = GetMessageClass(method.input_type)(model_name="x2")
    tensor = request.inputs.add(name="x", datatype="FP32", shape=[1, 4])
    tensor.contents.fp32_contents.extend([1, 2, 3, 4])
    reply_class = GetMessageClass(method.output_type)
    call = channel.unary_unary(
        f"/{service.full_name}/{method.name}",
        type(request).SerializeToString,
        reply_class.FromString,
    )
    assert call(request, timeout=20).outputs[0].shape == [1, 4]
