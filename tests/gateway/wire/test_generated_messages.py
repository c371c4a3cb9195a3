"""The messages of other projects' services, against the modules that those projects generate."""

from __future__ import annotations

from types import ModuleType

import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from grpc_health.v1 import health_pb2 as grpc_health
from tritonclient.grpc import model_config_pb2 as triton_config
from tritonclient.grpc import service_pb2 as triton_service

from modelport.gateway.wire.proto import grpc_service_pb2, health_pb2, model_config_pb2

#: Messages that the installed original does not have yet.
NEWER = {"HealthListRequest", "HealthListResponse"}


def described(module: ModuleType) -> FileDescriptorProto:
    found = FileDescriptorProto()
    module.DESCRIPTOR.CopyToProto(found)
    return found


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (grpc_service_pb2, triton_service),
        (model_config_pb2, triton_config),
        (health_pb2, grpc_health),
    ],
)
def test_every_message_and_field_is_the_originals(ours: ModuleType, theirs: ModuleType) -> None:
    mine, original = described(ours), described(theirs)
    assert mine.package == original.package
    names = {each.name for each in original.message_type}
    mine_too = [each for each in mine.message_type if each.name in names]
    assert mine_too == list(original.message_type)
    assert names == {each.name for each in mine.message_type} - NEWER
    assert mine.enum_type == original.enum_type
    mine.message_type[0].name += "X"
    assert mine.message_type != original.message_type, "the comparison sees a difference"
