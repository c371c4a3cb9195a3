"""OIP over gRPC, message by message, and ``grpc.health.v1``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tritonclient.grpc import service_pb2 as pb

from modelport.gateway.wire.proto import health_pb2 as own_health_pb2
from tests import models
from tests.conformance import wire
from tests.conformance.repository import IDENTITY
from tests.conformance.wire import TIMEOUT_SECONDS, message
from tests.server import Gateway, serving

INVALID = grpc.StatusCode.INVALID_ARGUMENT
ROW = np.array([1, 2, 3, 4], np.float32).tobytes()

#: datatype → field, values, and the bytes they are.
TYPED: dict[str, tuple[str, Sequence[Any], bytes]] = {
    "BOOL": ("bool_contents", [True, False], b"\1\0"),
    "INT8": ("int_contents", [-128, 127], b"\x80\x7f"),
    "INT16": ("int_contents", [-(2**15), 2**15 - 1], b"\0\x80\xff\x7f"),
    "INT32": ("int_contents", [-(2**31), 2**31 - 1], b"\0\0\0\x80\xff\xff\xff\x7f"),
    "INT64": ("int64_contents", [-(2**63), 2**63 - 1], b"\0" * 7 + b"\x80" + b"\xff" * 7 + b"\x7f"),
    "UINT8": ("uint_contents", [0, 255], b"\0\xff"),
    "UINT16": ("uint_contents", [1, 2**16 - 1], b"\1\0\xff\xff"),
    "UINT32": ("uint_contents", [1, 2**32 - 1], b"\1\0\0\0\xff\xff\xff\xff"),
    "UINT64": ("uint64_contents", [1, 2**64 - 1], b"\1" + b"\0" * 7 + b"\xff" * 8),
    "FP32": ("fp32_contents", [-0.0, 0.5], b"\0\0\0\x80\0\0\0\x3f"),
    "FP64": ("fp64_contents", [-0.0, 0.5], b"\0" * 7 + b"\x80" + b"\0" * 6 + b"\xe0\x3f"),
    "BYTES": ("bytes_contents", [b"", b"a\0b"], wire.pack([b"", b"a\0b"])),
}
FIELDS = sorted({field for field, *_ in TYPED.values()})


@pytest.fixture(scope="module")
def stub(gateway: Gateway) -> Iterator[Any]:
    with wire.stub(gateway.grpc) as opened:
        yield opened


def typed(datatype: str, field: str, values: Sequence[Any], shape: Sequence[int]) -> Any:
    request = message(IDENTITY[datatype], ("x", datatype, shape))
    getattr(request.inputs[0].contents, field).extend(values)
    return request


def infer(stub: Any, request: Any) -> Any:
    return stub.ModelInfer(request, timeout=TIMEOUT_SECONDS)


def refusal(stub: Any, request: Any) -> grpc.RpcError:
    with pytest.raises(grpc.RpcError) as caught:
        infer(stub, request)
    wire.assert_public(caught.value.details())
    wire.assert_serves_grpc(stub)
    error: grpc.RpcError = caught.value
    return error


# -- contents ------------------------------------------------------------------------------------


@pytest.mark.parametrize("datatype", TYPED)
def test_typed_contents_are_taken_and_answered_raw(stub: Any, datatype: str) -> None:
    field, values, expected = TYPED[datatype]
    reply = infer(stub, typed(datatype, field, values, [1, 2]))
    (output,) = reply.outputs
    assert (output.name, output.datatype, list(output.shape)) == ("y", datatype, [1, 2])
    assert not output.HasField("contents")
    assert list(reply.raw_output_contents) == [expected]


@pytest.mark.parametrize("datatype", sorted(IDENTITY))
def test_raw_contents_are_taken_and_answered_raw(stub: Any, datatype: str) -> None:
    sixteen = b"\x00\x3c\x00\x80"
    data = TYPED[datatype][2] if datatype in TYPED else sixteen
    reply = infer(stub, message(IDENTITY[datatype], ("x", datatype, [1, 2]), raw=[data]))
    assert list(reply.raw_output_contents) == [data]
    assert reply.outputs[0].datatype == datatype


def test_one_raw_entry_for_each_output_in_its_place(stub: Any) -> None:
    inputs = [("a", "FP32", [1, 4]), ("b", "FP32", [1, 4])]
    request = message("add_and_subtract", *inputs, raw=[ROW, ROW], outputs=["difference", "total"])
    reply = infer(stub, request)
    assert [output.name for output in reply.outputs] == ["difference", "total"]
    difference, total = (np.frombuffer(r, np.float32).tolist() for r in reply.raw_output_contents)
    assert (difference, total) == ([0, 0, 0, 0], [2, 4, 6, 8])


@pytest.mark.parametrize("blobs", [1, 2])
def test_contents_beside_raw_ones_are_refused_whatever_their_number(stub: Any, blobs: int) -> None:
    inputs = [("a", "FP32", [1, 4]), ("b", "FP32", [1, 4])]
    request = message("add_and_subtract", *inputs, raw=[ROW] * blobs)
    request.inputs[0].contents.fp32_contents.extend([1, 2, 3, 4])
    with pytest.raises(grpc.RpcError) as caught:
        infer(stub, request)
    assert caught.value.details() == (
        "contents field must not be specified when using raw_input_contents for 'a' for model "
        "'add_and_subtract'"
    )


def test_an_empty_output_has_its_raw_entry_too(stub: Any) -> None:
    request = message("add_and_subtract", ("a", "FP32", [1, 0]), ("b", "FP32", [1, 0]))
    assert list(infer(stub, request).raw_output_contents) == [b"", b""]
    request.raw_input_contents.extend([b"", b""])
    assert list(infer(stub, request).raw_output_contents) == [b"", b""]


def test_the_reply_names_model_version_and_id(stub: Any) -> None:
    request = message("two_versions", ("x", "FP32", [1, 4]), raw=[ROW], request_id="nonce")
    reply = infer(stub, request)
    assert (reply.model_name, reply.model_version, reply.id) == ("two_versions", "2", "nonce")


def test_raw_and_typed_together_are_refused(stub: Any) -> None:
    request = typed("FP32", "fp32_contents", [1, 2], [1, 2])
    request.raw_input_contents.append(ROW[:8])
    error = refusal(stub, request)
    assert error.code() is INVALID
    assert str(error.details()).startswith(
        "contents field must not be specified when using raw_input"
    )


def test_raw_for_one_input_and_typed_for_the_other_is_refused(stub: Any) -> None:
    request = message("add_and_subtract", ("a", "FP32", [1, 4]), ("b", "FP32", [1, 4]), raw=[ROW])
    request.inputs[1].contents.fp32_contents.extend([1, 2, 3, 4])
    assert refusal(stub, request).code() is INVALID


@pytest.mark.parametrize("count", [0, 1, 3])
def test_another_number_of_raw_entries_than_inputs_is_refused(stub: Any, count: int) -> None:
    request = message(
        "add_and_subtract", ("a", "FP32", [1, 4]), ("b", "FP32", [1, 4]), raw=[ROW] * count
    )
    assert refusal(stub, request).code() is INVALID


@pytest.mark.parametrize("datatype", ["FP16", "BF16"])
@pytest.mark.parametrize("field", ["fp32_contents", "uint_contents", "bytes_contents"])
def test_sixteen_bit_floats_are_raw_only(stub: Any, datatype: str, field: str) -> None:
    values = [b"\0\0"] if field == "bytes_contents" else [1]
    error = refusal(stub, typed(datatype, field, values, [1, 1]))
    assert error.code() is INVALID
    assert (
        error.details() == f"input 'x' is {datatype}, which is carried by raw_input_contents only"
    )


@pytest.mark.parametrize(
    ("datatype", "field"),
    [(d, f) for d, (right, *_) in TYPED.items() for f in FIELDS if f != right],
)
def test_values_in_the_field_of_another_datatype_are_refused(
    stub: Any, datatype: str, field: str
) -> None:
    values = [b"\0\0"] if field == "bytes_contents" else [1]
    assert refusal(stub, typed(datatype, field, values, [1, 1])).code() is INVALID


@pytest.mark.parametrize("datatype", TYPED)
@pytest.mark.parametrize("length", [0, 1, 3])
def test_another_number_of_values_than_the_shape_says_is_refused(
    stub: Any, datatype: str, length: int
) -> None:
    field, values, _ = TYPED[datatype]
    wrong = [*values, values[0]][:length]
    assert refusal(stub, typed(datatype, field, wrong, [1, 2])).code() is INVALID


@pytest.mark.parametrize(
    ("datatype", "value"),
    [("INT8", 128), ("INT8", -129), ("INT16", 2**15), ("UINT8", 256), ("UINT16", 2**16)],
)
def test_a_typed_value_that_does_not_fit_is_refused(stub: Any, datatype: str, value: int) -> None:
    error = refusal(stub, typed(datatype, TYPED[datatype][0], [value], [1, 1]))
    assert error.code() is INVALID
    assert error.details() == f"a value of input 'x' does not fit {datatype}"


@pytest.mark.parametrize(
    "data",
    [b"", b"\1", b"\2\0\0\0a", b"\xff\xff\xff\xffa", b"\1\0\0\0a\0", b"\1\0\0\0a\0\0\0\0"],
)
def test_bytes_that_lie_about_their_length_are_refused(stub: Any, data: bytes) -> None:
    request = message(IDENTITY["BYTES"], ("x", "BYTES", [1, 1]), raw=[data])
    assert refusal(stub, request).code() is INVALID


@pytest.mark.parametrize("value", [2, 255])
def test_a_boolean_is_zero_or_one(stub: Any, value: int) -> None:
    request = message(IDENTITY["BOOL"], ("x", "BOOL", [1, 2]), raw=[bytes([1, value])])
    assert refusal(stub, request).code() is INVALID


# -- parameters, versions, deadlines -------------------------------------------------------------


@pytest.mark.parametrize("field", ["int64_param", "uint64_param"])
@pytest.mark.parametrize("key", ["timeout", "priority"])
def test_unsigned_parameters_come_in_either_integer_field(stub: Any, key: str, field: str) -> None:
    request = wire.good_message()
    setattr(request.parameters[key], field, 30_000_000)
    assert infer(stub, request).model_name == "x2"


@pytest.mark.parametrize(
    ("key", "field", "value"),
    [
        ("timeout", "string_param", "1"),
        ("timeout", "double_param", 1.0),
        ("timeout", "bool_param", True),
        ("timeout", "int64_param", -1),
        ("priority", "string_param", "1"),
        ("priority", "int64_param", -1),
        ("sequence_start", "string_param", "true"),
        ("sequence_end", "int64_param", 1),
        ("sequence_id", "bool_param", True),
        ("triton_anything", "int64_param", 1),
    ],
)
def test_a_parameter_of_the_wrong_type_is_refused(
    stub: Any, key: str, field: str, value: Any
) -> None:
    request = wire.good_message()
    setattr(request.parameters[key], field, value)
    assert refusal(stub, request).code() is INVALID


def test_a_parameter_without_a_value_is_refused(stub: Any) -> None:
    request = wire.good_message()
    request.parameters["empty"].SetInParent()
    assert refusal(stub, request).code() is INVALID


def test_tritonclients_own_stream_parameter_is_taken(stub: Any) -> None:
    request = wire.good_message()
    request.parameters["triton_enable_empty_final_response"].bool_param = True
    answers = list(stub.ModelStreamInfer(iter([request]), timeout=TIMEOUT_SECONDS))
    assert [answer.error_message for answer in answers] == [""]


@pytest.mark.parametrize(
    ("version", "code"),
    [
        ("2", grpc.StatusCode.NOT_FOUND),
        ("0", grpc.StatusCode.NOT_FOUND),
        ("one", INVALID),
        ("-1", INVALID),
        ("1.0", INVALID),
        ("٣", INVALID),
        (" 1", INVALID),
        ("9" * 30, INVALID),
    ],
)
def test_a_version_that_is_not_served_is_refused(
    stub: Any, version: str, code: grpc.StatusCode
) -> None:
    request = message("x2", ("x", "FP32", [1, 4]), raw=[ROW], version=version)
    assert refusal(stub, request).code() is code


def test_shared_memory_is_unsupported(stub: Any) -> None:
    request = message("x2", ("x", "FP32", [1, 4]))
    request.inputs[0].parameters["shared_memory_region"].string_param = "region"
    request.inputs[0].parameters["shared_memory_byte_size"].int64_param = 16
    assert refusal(stub, request).code() is grpc.StatusCode.UNIMPLEMENTED
    request = wire.good_message()
    output = request.outputs.add(name="y")
    output.parameters["shared_memory_region"].string_param = "region"
    assert refusal(stub, request).code() is grpc.StatusCode.UNIMPLEMENTED


def test_a_deadline_ends_the_wait(stub: Any) -> None:
    slow = message("slow", ("x", "INT64", [1, 1]), raw=[np.int64(1).tobytes()])
    with pytest.raises(grpc.RpcError) as caught:
        stub.ModelInfer(slow, timeout=0.05)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    wire.assert_serves_grpc(stub)


# -- everything else -----------------------------------------------------------------------------


def test_the_index_gives_each_row_its_four_fields(stub: Any) -> None:
    reply = stub.RepositoryIndex(pb.RepositoryIndexRequest(), timeout=TIMEOUT_SECONDS)
    rows = [(row.name, row.version, row.state, row.reason) for row in reply.models]
    assert ("x2", "1", "READY", "") in rows
    ready = stub.RepositoryIndex(pb.RepositoryIndexRequest(ready=True), timeout=TIMEOUT_SECONDS)
    assert len(ready.models) == len(rows)


@pytest.mark.parametrize("request_message", [pb.RepositoryIndexRequest(repository_name="other")])
def test_a_repository_cannot_be_named(stub: Any, request_message: Any) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        stub.RepositoryIndex(request_message, timeout=TIMEOUT_SECONDS)
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_statistics_are_numbers_of_the_message(stub: Any) -> None:
    wire.assert_serves_grpc(stub)
    request = pb.ModelStatisticsRequest(name="x2", version="1")
    (row,) = stub.ModelStatistics(request, timeout=TIMEOUT_SECONDS).model_stats
    assert (row.name, row.version) == ("x2", "1")
    assert row.inference_count >= row.execution_count >= 1
    assert row.inference_stats.success.count >= 1
    assert row.inference_stats.success.ns > 0
    assert row.batch_stats[0].compute_infer.count >= 1


def test_the_configuration_is_the_message_itself(stub: Any) -> None:
    request = pb.ModelConfigRequest(name="x2", version="1")
    config = stub.ModelConfig(request, timeout=TIMEOUT_SECONDS).config
    assert (config.name, config.max_batch_size) == ("x2", 8)
    assert list(config.input[0].dims) == [4]
    assert not config.HasField("dynamic_batching")


def test_a_method_that_is_not_there_is_unimplemented(gateway: Gateway) -> None:
    with wire.channel(gateway.grpc) as channel:
        for path in (
            "/inference.GRPCInferenceService/Nothing",
            "/inference.Nobody/ModelInfer",
            "/inference.GRPCInferenceService/",
        ):
            method = channel.unary_unary(path, None, None)
            with pytest.raises(grpc.RpcError) as caught:
                method(b"", timeout=TIMEOUT_SECONDS)
            assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


# -- grpc.health.v1 ------------------------------------------------------------------------------


@pytest.mark.parametrize("service", ["", "inference.GRPCInferenceService"])
def test_health_check_says_serving(gateway: Gateway, service: str) -> None:
    with wire.channel(gateway.grpc) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        reply = health.Check(
            health_pb2.HealthCheckRequest(service=service), timeout=TIMEOUT_SECONDS
        )
    assert reply.status == health_pb2.HealthCheckResponse.SERVING


def test_health_check_of_an_unknown_service_is_not_found(gateway: Gateway) -> None:
    with wire.channel(gateway.grpc) as channel, pytest.raises(grpc.RpcError) as caught:
        health_pb2_grpc.HealthStub(channel).Check(
            health_pb2.HealthCheckRequest(service="nobody"), timeout=TIMEOUT_SECONDS
        )
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


def test_health_lists_every_service(gateway: Gateway) -> None:
    with wire.channel(gateway.grpc) as channel:
        listed = channel.unary_unary(
            "/grpc.health.v1.Health/List",
            response_deserializer=own_health_pb2.HealthListResponse.FromString,
        )(b"", timeout=TIMEOUT_SECONDS)
    names = {"", "grpc.health.v1.Health", "inference.GRPCInferenceService"}
    assert {name: each.status for name, each in listed.statuses.items()} == dict.fromkeys(
        names, health_pb2.HealthCheckResponse.SERVING
    )


def test_health_watch_tells_the_status_at_once(gateway: Gateway) -> None:
    with wire.channel(gateway.grpc) as channel:
        for service, status in (
            ("", health_pb2.HealthCheckResponse.SERVING),
            ("nobody", health_pb2.HealthCheckResponse.SERVICE_UNKNOWN),
        ):
            request = health_pb2.HealthCheckRequest(service=service)
            watch = health_pb2_grpc.HealthStub(channel).Watch(request, timeout=TIMEOUT_SECONDS)
            assert next(watch).status == status
            watch.cancel()


def test_health_watch_tells_of_the_end(tmp_path: Any) -> None:
    slow = models.fake(models.repository(tmp_path), "slow", "INT64", "1", delay_seconds="1.5")
    with serving(slow.parent) as gateway, wire.channel(gateway.grpc) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(
            health_pb2.HealthCheckRequest(), timeout=TIMEOUT_SECONDS
        )
        assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
        gateway.process.terminate()
        assert next(watch).status == health_pb2.HealthCheckResponse.NOT_SERVING


def test_health_of_a_server_that_does_not_serve_every_model(tmp_path: Any) -> None:
    root = models.repository(tmp_path)
    (root / "broken" / "1").mkdir(parents=True)
    (root / "broken" / "1" / "model.onnx").write_bytes(b"no model")
    with serving(root) as gateway, wire.channel(gateway.grpc) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        reply = health.Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_SECONDS)
        assert reply.status == health_pb2.HealthCheckResponse.NOT_SERVING
        reply = wire.send(gateway.http, "GET", "/v2/health/ready")
        assert (reply.status, reply.json) == (400, {"ready": False})
        assert wire.send(gateway.http, "GET", "/v2/health/live").status == 200
        assert wire.send(gateway.http, "GET", "/v2/models/x2/ready").status == 200
