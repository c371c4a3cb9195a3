"""OIP over HTTP, byte for byte, without a client library."""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from modelport import __version__
from tests.conformance import wire
from tests.conformance.repository import IDENTITY, LABELS
from tests.conformance.wire import (
    HEADER_LENGTH,
    TRANSPORTS,
    KeptConnection,
    infer_binary,
    infer_json,
    json_input,
)
from tests.server import Gateway

VALUES = [1.0, 2.0, 3.0, 4.0]
RAW = np.array(VALUES, np.float32).tobytes()
DOUBLED = np.array([2, 4, 6, 8], np.float32).tobytes()


@pytest.fixture(params=TRANSPORTS)
def connection(gateway: Gateway, request: pytest.FixtureRequest) -> Iterator[KeptConnection]:
    opened = TRANSPORTS[request.param](gateway.http)
    yield opened
    opened.close()


# -- health, metadata, routes --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("/v2/health/live", {"live": True}),
        ("/v2/health/ready", {"ready": True}),
        ("/v2/models/x2/ready", {"name": "x2", "ready": True}),
        ("/v2/models/x2/versions/1/ready", {"name": "x2", "ready": True}),
        ("/v2/models/x2/versions/2/ready", None),
        ("/v2/models/nobody/ready", None),
    ],
)
def test_health_replies_have_the_status_and_document_of_the_oip(
    connection: KeptConnection, path: str, told: dict[str, Any] | None
) -> None:
    reply = connection.send("GET", path)
    if told is None:
        wire.assert_error(reply, 400)
    else:
        assert (reply.status, reply.json) == (200, told)
        assert reply.headers["content-type"] == "application/json"


def test_the_server_document(connection: KeptConnection) -> None:
    reply = connection.send("GET", "/v2")
    assert (reply.status, reply.headers["content-type"]) == (200, "application/json")
    assert reply.json == {
        "name": "modelport",
        "version": __version__,
        "extensions": [
            "classification",
            "sequence",
            "model_repository",
            "model_repository(unload_dependents)",
            "schedule_policy",
            "model_configuration",
            "binary_tensor_data",
            "parameters",
            "statistics",
            "trace",
            "logging",
            "generate",
        ],
    }


def test_the_metadata_document(connection: KeptConnection) -> None:
    for path in ("/v2/models/x2", "/v2/models/x2/versions/1"):
        reply = connection.send("GET", path)
        assert (reply.status, reply.headers["content-type"]) == (200, "application/json")
        assert reply.json == {
            "name": "x2",
            "versions": ["1"],
            "platform": "onnxruntime_onnx",
            "inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, 4]}],
            "outputs": [{"name": "y", "datatype": "FP32", "shape": [-1, 4]}],
        }


GET_ROUTES = (
    "/v2",  # and with a slash: OIP's own document has it so
    "/v2/",
    "/v2/health/live",
    "/v2/health/ready",
    "/v2/models",
    "/v2/models/stats",
    "/v2/models/x2",
    "/v2/models/x2/ready",
    "/v2/models/x2/config",
    "/v2/models/x2/stats",
    "/v2/models/x2/versions/1",
    "/v2/models/x2/versions/1/ready",
    "/v2/models/x2/versions/1/config",
    "/v2/models/x2/versions/1/stats",
    "/v2/systemsharedmemory/status",
    "/v2/cudasharedmemory/status",
)
#: Read too, but the models of these tests have none.
CERTIFICATE_ROUTES = ("/v2/models/x2/certificate", "/v2/models/x2/versions/1/certificate")
#: Read too, but there are no regions.
REGION_ROUTES = (
    "/v2/systemsharedmemory/region/r/status",
    "/v2/cudasharedmemory/region/r/status",
)
#: Read, and posted to.
SETTING_ROUTES = ("/v2/trace/setting", "/v2/models/x2/trace/setting", "/v2/logging")
POST_ROUTES = (
    "/v2/rerank",
    "/v2/models/x2/infer",
    "/v2/models/x2/versions/1/infer",
    "/v2/models/x2/generate",
    "/v2/models/x2/generate_stream",
    "/v2/models/x2/versions/1/generate",
    "/v2/models/x2/versions/1/generate_stream",
    "/v2/models/x2/explain",
    "/v2/models/x2/versions/1/explain",
    "/v2/repository/index",
    "/v2/repository/models/x2/load",
    "/v2/repository/models/x2/unload",
    "/v2/systemsharedmemory/unregister",
    "/v2/systemsharedmemory/region/r/register",
    "/v2/systemsharedmemory/region/r/unregister",
    "/v2/cudasharedmemory/unregister",
    "/v2/cudasharedmemory/region/r/register",
    "/v2/cudasharedmemory/region/r/unregister",
)


@pytest.mark.parametrize("path", GET_ROUTES)
def test_a_route_that_is_read_answers_get(connection: KeptConnection, path: str) -> None:
    assert connection.send("GET", path).status == 200


@pytest.mark.parametrize("path", GET_ROUTES)
@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_a_route_that_is_read_refuses_other_methods(
    connection: KeptConnection, method: str, path: str
) -> None:
    wire.assert_error(connection.send(method, path), 405)


@pytest.mark.parametrize("path", POST_ROUTES)
@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_a_route_that_is_posted_to_refuses_other_methods(
    connection: KeptConnection, method: str, path: str
) -> None:
    wire.assert_error(connection.send(method, path), 405)


@pytest.mark.parametrize(
    "path",
    [
        "//",
        "/v1",
        "/v2/nothing",
        "/v2/health",
        "/v2/models/",
        "/v2/models//ready",
        "/v2/models/x2/nothing",
        "/v2/models/x2/versions",
        "/v2/models/x2/versions/",
        "/v2/models/x2/versions/one",
        "/v2/models/x2/versions/-1",
        "/v2/models/x2/versions/1.0",
        "/v2/models/x2/versions/1/nothing",
        "/v2/repository",
    ],
)
def test_a_path_that_is_no_route_is_not_found(connection: KeptConnection, path: str) -> None:
    wire.assert_error(connection.send("GET", path), 404)


@pytest.mark.parametrize("path", GET_ROUTES[2:])
def test_a_trailing_slash_is_another_path(connection: KeptConnection, path: str) -> None:
    wire.assert_error(connection.send("GET", path + "/"), 404)


@pytest.mark.parametrize("path", POST_ROUTES)
def test_a_trailing_slash_is_another_path_to_post_to(connection: KeptConnection, path: str) -> None:
    wire.assert_error(connection.send("POST", path + "/", wire.good_body()), 404)


@pytest.mark.parametrize("query", ["?", "?a=b", "?a=%2F..", "?x2/infer", "?version=9&ready=1"])
def test_a_query_string_changes_nothing(connection: KeptConnection, query: str) -> None:
    reply = connection.send("POST", f"/v2/models/x2/infer{query}", wire.good_body())
    assert reply.json["outputs"][0]["data"] == [2, 4, 6, 8]
    for path in GET_ROUTES:
        assert connection.send("GET", path + query).status == 200


@pytest.mark.parametrize("name", ["%782", "x%32", "%78%32"])
def test_a_percent_encoded_name_is_the_name(connection: KeptConnection, name: str) -> None:
    reply = connection.send("POST", f"/v2/models/{name}/infer", wire.good_body())
    assert (reply.status, reply.json["model_name"]) == (200, "x2")
    assert connection.send("GET", f"/v2/models/{name}").json["name"] == "x2"
    assert connection.send("GET", f"/v2/models/{name}/versions/1/config").json["name"] == "x2"


# -- infer ---------------------------------------------------------------------------------------


def test_a_json_request_gets_a_json_reply(gateway: Gateway) -> None:
    reply = infer_json(gateway.http, "x2", json_input("x", "FP32", [1, 4], VALUES))
    assert (reply.status, reply.headers["content-type"]) == (200, "application/json")
    assert HEADER_LENGTH.lower() not in reply.headers
    assert reply.json == {
        "model_name": "x2",
        "model_version": "1",
        "outputs": [{"name": "y", "datatype": "FP32", "shape": [1, 4], "data": [2, 4, 6, 8]}],
    }


def test_an_id_comes_back_only_if_it_was_given(gateway: Gateway) -> None:
    tensor = json_input("x", "FP32", [1, 4], VALUES)
    assert infer_json(gateway.http, "x2", tensor, id="é1").json["id"] == "é1"
    assert "id" not in infer_json(gateway.http, "x2", tensor).json


def test_a_binary_reply_states_the_length_of_its_json(gateway: Gateway) -> None:
    reply = infer_binary(
        gateway.http,
        "x2",
        [("x", "FP32", [1, 4], RAW)],
        parameters={"binary_data_output": True},
    )
    assert (reply.status, reply.headers["content-type"]) == (200, "application/octet-stream")
    length = int(reply.headers[HEADER_LENGTH.lower()])
    assert json.loads(reply.body[:length]) == {
        "model_name": "x2",
        "model_version": "1",
        "outputs": [
            {
                "name": "y",
                "datatype": "FP32",
                "shape": [1, 4],
                "parameters": {"binary_data_size": 16},
            }
        ],
    }
    assert reply.body[length:] == DOUBLED
    assert reply.headers["content-length"] == str(len(reply.body))


def test_a_binary_request_is_answered_in_json_unless_it_asks(gateway: Gateway) -> None:
    reply = infer_binary(gateway.http, "x2", [("x", "FP32", [1, 4], RAW)])
    assert reply.headers["content-type"] == "application/json"
    assert reply.json["outputs"][0]["data"] == [2, 4, 6, 8]


def test_an_output_says_for_itself_whether_it_is_binary(gateway: Gateway) -> None:
    tensors = [json_input(name, "FP32", [1, 4], VALUES) for name in "ab"]
    reply = infer_json(
        gateway.http,
        "add_and_subtract",
        *tensors,
        outputs=[
            {"name": "total", "parameters": {"binary_data": True}},
            {"name": "difference", "parameters": {"binary_data": False}},
        ],
    )
    length = int(reply.headers[HEADER_LENGTH.lower()])
    total, difference = json.loads(reply.body[:length])["outputs"]
    assert (total["parameters"], "data" in total) == ({"binary_data_size": 16}, False)
    assert (difference["data"], "parameters" in difference) == ([0, 0, 0, 0], False)
    assert reply.body[length:] == DOUBLED


def test_a_reply_without_one_binary_byte_is_plain_json(gateway: Gateway) -> None:
    reply = infer_binary(
        gateway.http,
        IDENTITY["FP32"],
        [("x", "FP32", [1, 0], b"")],
        parameters={"binary_data_output": True},
    )
    assert (reply.status, reply.headers["content-type"]) == (200, "application/json")
    assert HEADER_LENGTH.lower() not in reply.headers
    assert reply.json["outputs"][0]["parameters"] == {"binary_data_size": 0}


def test_blobs_follow_in_the_order_of_the_inputs_past_json_ones(gateway: Gateway) -> None:
    header = wire.json_body(
        json_input("b", "FP32", [1, 4], binary_data_size=16),
        json_input("a", "FP32", [1, 4], [10, 20, 30, 40]),
    )
    reply = wire.send(
        gateway.http,
        "POST",
        "/v2/models/add_and_subtract/infer",
        header + RAW,
        {HEADER_LENGTH: str(len(header))},
    )
    total, difference = reply.json["outputs"]
    assert total["data"] == [11, 22, 33, 44]
    assert difference["data"] == [9, 18, 27, 36]


def test_a_header_length_of_the_whole_body_is_plain_json(gateway: Gateway) -> None:
    body = wire.good_body()
    reply = wire.send(
        gateway.http, "POST", "/v2/models/x2/infer", body, {HEADER_LENGTH: str(len(body))}
    )
    assert reply.json["outputs"][0]["data"] == [2, 4, 6, 8]


@pytest.mark.parametrize(
    "content_type",
    ["application/json", "application/octet-stream", "text/plain", "nonsense", ""],
)
def test_the_content_type_decides_nothing(connection: KeptConnection, content_type: str) -> None:
    headers = {"Content-Type": content_type}
    reply = connection.send("POST", "/v2/models/x2/infer", wire.good_body(), headers)
    assert reply.json["outputs"][0]["data"] == [2, 4, 6, 8]


def test_a_chunked_body_is_a_body(connection: KeptConnection) -> None:
    body = wire.good_body()
    chunks = (body[i : i + 7] for i in range(0, len(body), 7))
    reply = connection.send("POST", "/v2/models/x2/infer", chunks)
    assert reply.json["outputs"][0]["data"] == [2, 4, 6, 8]


@pytest.mark.parametrize("protocol", ["h2c", "websocket", "nothing"])
def test_an_upgrade_that_is_not_taken_changes_nothing(
    connection: KeptConnection, protocol: str
) -> None:
    """Java's HttpClient and ``curl --http2`` offer h2c with every first request, body and all."""
    headers = {"Connection": "Upgrade, HTTP2-Settings", "Upgrade": protocol, "HTTP2-Settings": ""}
    reply = connection.send("POST", "/v2/models/x2/infer", wire.good_body(), headers)
    assert reply.status == 200, reply.body
    assert reply.json["outputs"][0]["data"] == [2, 4, 6, 8]
    wire.assert_serves(connection)


def test_data_may_be_nested_or_flat(gateway: Gateway) -> None:
    rows = [[1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0]]
    flat = [value for row in rows for value in row]
    for data in (rows, flat, [rows]):
        reply = infer_json(gateway.http, "x2", json_input("x", "FP32", [2, 4], data))
        assert reply.json["outputs"][0]["data"] == [2 * value for value in flat]


def test_nesting_to_the_limit_is_taken(gateway: Gateway) -> None:
    # The request, "inputs" and the input are three levels.
    data: Any = VALUES
    for _ in range(96):
        data = [data]
    reply = infer_json(gateway.http, "x2", json_input("x", "FP32", [1, 4], data))
    assert reply.json["outputs"][0]["data"] == [2, 4, 6, 8]
    reply = infer_json(gateway.http, "x2", json_input("x", "FP32", [1, 4], [data]))
    wire.assert_error(reply, 400)


def test_empty_outputs_and_parameters_are_as_good_as_none(gateway: Gateway) -> None:
    reply = infer_json(
        gateway.http, "x2", json_input("x", "FP32", [1, 4], VALUES), outputs=[], parameters={}
    )
    assert reply.json["outputs"][0]["data"] == [2, 4, 6, 8]


# -- raw binary requests -------------------------------------------------------------------------


def raw(gateway: Gateway, model: str, body: bytes) -> wire.WireReply:
    path = f"/v2/models/{model}/infer"
    return wire.send(gateway.http, "POST", path, body, {HEADER_LENGTH: "0"})


def test_a_body_that_is_a_tensor_is_answered_in_bytes(gateway: Gateway) -> None:
    reply = raw(gateway, "x2", RAW)
    assert reply.headers["content-type"] == "application/octet-stream"
    assert wire.binary_outputs(reply) == {"y": ("FP32", [1, 4], DOUBLED)}


def test_the_dynamic_dimension_of_a_raw_tensor_is_inferred_from_its_size(gateway: Gateway) -> None:
    reply = raw(gateway, IDENTITY["INT16"], b"\1\0\2\0\3\0")
    assert wire.binary_outputs(reply) == {"y": ("INT16", [1, 3], b"\1\0\2\0\3\0")}


def test_a_raw_string_has_no_length_before_it(gateway: Gateway) -> None:
    reply = raw(gateway, "pair", b"one\0string")
    assert wire.binary_outputs(reply) == {"y": ("BYTES", [1, 1], wire.pack([b"one\0string"]))}


def test_a_raw_tensor_for_a_model_without_batching(gateway: Gateway) -> None:
    data = np.arange(6, dtype=np.float32).tobytes()
    assert wire.binary_outputs(raw(gateway, "fixed", data)) == {"y": ("FP32", [2, 3], data)}


@pytest.mark.parametrize(
    ("model", "body", "begins"),
    [
        (
            "x2",
            RAW[:-1],
            "input byte size mismatch for input 'x' for model 'x2'. Expected 16, got 15",
        ),
        ("x2", RAW + b"\0", "input byte size mismatch"),
        ("x2", b"", "input byte size mismatch"),
        ("identity_int16", b"\1\0\2", "input byte size mismatch"),
        ("add_and_subtract", RAW, "Raw request must only have 1 input"),
        ("identity_bytes", b"text", "For BYTE datatype raw input 'x'"),
    ],
)
def test_a_raw_tensor_that_does_not_fit_is_refused(
    gateway: Gateway, model: str, body: bytes, begins: str
) -> None:
    assert wire.assert_error(raw(gateway, model, body), 400).startswith(begins)


def test_a_raw_tensor_for_nobody_is_not_found(gateway: Gateway) -> None:
    wire.assert_error(raw(gateway, "nobody", RAW), 404)


# -- content codings -----------------------------------------------------------------------------

CODINGS: dict[str, Callable[[bytes], bytes]] = {"gzip": gzip.compress, "deflate": zlib.compress}


@pytest.mark.parametrize("coding", ["gzip", "deflate", "GZIP", "Deflate"])
def test_the_header_length_is_that_before_compression(gateway: Gateway, coding: str) -> None:
    header = wire.json_body(json_input("x", "FP32", [1, 4], binary_data_size=16))
    reply = wire.send(
        gateway.http,
        "POST",
        "/v2/models/x2/infer",
        CODINGS[coding.lower()](header + RAW),
        {HEADER_LENGTH: str(len(header)), "Content-Encoding": coding},
    )
    assert reply.json["outputs"][0]["data"] == [2, 4, 6, 8]


@pytest.mark.parametrize("coding", ["gzip", "deflate"])
def test_a_raw_tensor_may_be_compressed(gateway: Gateway, coding: str) -> None:
    headers = {HEADER_LENGTH: "0", "Content-Encoding": coding}
    body = CODINGS[coding](RAW)
    reply = wire.send(gateway.http, "POST", "/v2/models/x2/infer", body, headers)
    assert wire.binary_outputs(reply)["y"][2] == DOUBLED


@pytest.mark.parametrize("coding", ["br", "zstd", "compress", "gzip, gzip", "x-nothing", "*"])
def test_an_unknown_coding_is_unsupported(connection: KeptConnection, coding: str) -> None:
    headers = {"Content-Encoding": coding}
    reply = connection.send("POST", "/v2/models/x2/infer", wire.good_body(), headers)
    wire.assert_error(reply, 501)


def test_identity_is_no_coding(connection: KeptConnection) -> None:
    headers = {"Content-Encoding": "identity"}
    reply = connection.send("POST", "/v2/models/x2/infer", wire.good_body(), headers)
    assert reply.status == 200


@pytest.mark.parametrize("binary", [True, False])
@pytest.mark.parametrize(
    ("accept", "chosen"),
    [
        ("gzip", "gzip"),
        ("deflate", "deflate"),
        ("gzip;q=0, deflate", "deflate"),
        ("deflate;q=0.5, gzip;q=0.2", "deflate"),
        ("br, gzip", "gzip"),
        ("identity", None),
        ("br", None),
        ("gzip;q=0", None),
        ("gzip;q=nonsense", None),
    ],
)
def test_a_large_reply_is_coded_as_the_client_accepts(
    gateway: Gateway, accept: str, chosen: str | None, binary: bool
) -> None:
    zeros = np.zeros((1, 2000), np.float32).tobytes()
    reply = infer_binary(
        gateway.http,
        IDENTITY["FP32"],
        [("x", "FP32", [1, 2000], zeros)],
        headers={"Accept-Encoding": accept},
        parameters={"binary_data_output": binary},
    )
    assert reply.headers.get("content-encoding") == chosen
    assert reply.headers["content-length"] == str(len(reply.body))
    body = reply.body
    if chosen:
        assert len(body) < 1000
        body = gzip.decompress(body) if chosen == "gzip" else zlib.decompress(body)
    plain = wire.WireReply(reply.status, reply.headers, body)
    if binary:
        assert wire.binary_outputs(plain)["y"][2] == zeros
    else:
        assert plain.json["outputs"][0]["data"] == [0.0] * 2000


# -- configuration, index, statistics, metrics ---------------------------------------------------


def test_the_configuration_has_json_types_and_proto_names(connection: KeptConnection) -> None:
    document = connection.send("GET", "/v2/models/x2/config").json
    assert document["max_batch_size"] == 8
    assert type(document["max_batch_size"]) is int
    (tensor,) = document["input"]
    assert tensor["data_type"] == "TYPE_FP32"
    assert tensor["dims"] == [4]
    assert type(tensor["dims"][0]) is int
    assert document["version_policy"] == {"latest": {"num_versions": 1}}
    assert type(document["version_policy"]["latest"]["num_versions"]) is int
    assert document["instance_group"][0]["kind"] == "KIND_CPU"
    assert not {"dynamic_batching", "sequence_batching", "ensemble_scheduling"} & set(document)
    assert "defaultModelFilename" not in document


def test_the_configuration_shows_the_dynamic_batching_that_it_states(
    connection: KeptConnection,
) -> None:
    document = connection.send("GET", "/v2/models/heavy/config").json
    assert document["dynamic_batching"]["default_queue_policy"]["max_queue_size"] == 1


def test_the_configuration_keeps_the_parameters(connection: KeptConnection) -> None:
    document = connection.send("GET", "/v2/models/failing/config").json
    assert document["parameters"]["error"] == {"string_value": "the model failed on purpose"}


@pytest.mark.parametrize("body", [b"", b"{}", b'{"ready": true}', b'{"ready": false}', b"  "])
def test_the_index_is_a_list_of_name_version_state_and_reason(
    connection: KeptConnection, body: bytes
) -> None:
    reply = connection.send("POST", "/v2/repository/index", body)
    assert (reply.status, reply.headers["content-type"]) == (200, "application/json")
    assert {"name": "x2", "version": "1", "state": "READY", "reason": ""} in reply.json
    assert all(set(row) == {"name", "version", "state", "reason"} for row in reply.json)


DURATIONS = (
    "success",
    "fail",
    "queue",
    "compute_input",
    "compute_infer",
    "compute_output",
    "cache_hit",
    "cache_miss",
)


@pytest.mark.parametrize(
    "path", ["/v2/models/x2/stats", "/v2/models/x2/versions/1/stats", "/v2/models/stats"]
)
def test_statistics_have_every_key(connection: KeptConnection, path: str) -> None:
    connection.send("POST", "/v2/models/x2/infer", wire.good_body())
    rows = connection.send("GET", path).json["model_stats"]
    (row,) = [row for row in rows if row["name"] == "x2"]
    assert row["version"] == "1"
    for key in ("last_inference", "inference_count", "execution_count"):
        assert type(row[key]) is int, key
    assert set(row["inference_stats"]) == set(DURATIONS)
    for entry in row["inference_stats"].values():
        assert set(entry) == {"count", "ns"}
        assert all(type(value) is int for value in entry.values())
    assert row["batch_stats"]
    for entry in row["batch_stats"]:
        assert {"batch_size", "compute_input", "compute_infer", "compute_output"} <= set(entry)
        for key in ("compute_input", "compute_infer", "compute_output"):
            assert set(entry[key]) == {"count", "ns"}


def test_statistics_have_every_key_before_the_first_request(connection: KeptConnection) -> None:
    (row,) = connection.send("GET", f"/v2/models/{IDENTITY['UINT8']}/stats").json["model_stats"]
    assert set(row["inference_stats"]) == set(DURATIONS)
    assert type(row["batch_stats"]) is list


def test_statistics_move_with_requests(connection: KeptConnection) -> None:
    def row() -> dict[str, Any]:
        rows = connection.send("GET", "/v2/models/x2/stats").json["model_stats"]
        found: dict[str, Any] = rows[0]
        return found

    before = row()
    body = wire.json_body(json_input("x", "FP32", [3, 4], VALUES * 3))
    for _ in range(4):
        assert connection.send("POST", "/v2/models/x2/infer", body).status == 200
    after = row()
    assert after["inference_count"] - before["inference_count"] == 12
    assert after["execution_count"] - before["execution_count"] == 4
    assert after["last_inference"] >= before["last_inference"] > 1_600_000_000_000
    for key in ("success", "queue", "compute_input", "compute_infer", "compute_output"):
        now, then = after["inference_stats"][key], before["inference_stats"][key]
        assert now["count"] - then["count"] == 4, key
        assert now["ns"] >= then["ns"], key
    for key in ("fail", "cache_hit", "cache_miss"):
        assert after["inference_stats"][key] == before["inference_stats"][key], key


METRICS = (
    "nv_inference_request_success",
    "nv_inference_request_failure",
    "nv_inference_count",
    "nv_inference_exec_count",
    "nv_inference_pending_request_count",
    "modelport_requests_in_flight",
    "nv_inference_request_duration_us",
    "nv_inference_queue_duration_us",
    "nv_inference_compute_input_duration_us",
    "nv_inference_compute_infer_duration_us",
    "nv_inference_compute_output_duration_us",
    "nv_inference_first_response_histogram_ms",
    "nv_inference_request_duration_histogram_us",
    "nv_inference_queue_duration_histogram_us",
    "nv_inference_compute_input_duration_histogram_us",
    "nv_inference_compute_infer_duration_histogram_us",
    "nv_inference_compute_output_duration_histogram_us",
)


#: name and labels → value
Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]
_SAMPLE = re.compile(r"(:?[\w:]+)(?:\{(.*)\})? (\S+)")
_LABEL = re.compile(r'(\w+)="([^"]*)"')


def scrape(gateway: Gateway) -> Samples:
    reply = wire.send(f"127.0.0.1:{gateway.metrics_port}", "GET", "/metrics")
    assert reply.status == 200
    assert reply.headers["content-type"].startswith("text/plain")
    samples: Samples = {}
    for line in reply.body.decode().splitlines():
        if not line.startswith("#"):
            match = _SAMPLE.fullmatch(line)
            assert match, line
            name, labels, value = match.groups()
            samples[name, frozenset(_LABEL.findall(labels or ""))] = float(value)
    return samples


def sample(samples: Samples, name: str, **labels: str) -> float:
    """The sample ``name`` of version 1 of ``x2``."""
    return samples[name, frozenset({"model": "x2", "version": "1", **labels}.items())]


@pytest.mark.parametrize("name", METRICS)
def test_a_metric_has_tritons_name_and_labels(gateway: Gateway, name: str) -> None:
    labels = {"model", "version"}
    if name == "nv_inference_request_failure":
        labels |= {"reason"}
    if "_histogram_" in name:
        name, labels = f"{name}_bucket", labels | {"le"}
    found = [dict(pairs) for known, pairs in scrape(gateway) if known == name]
    assert {"x2", "auto"} <= {row["model"] for row in found}
    assert all(set(row) == labels for row in found)


def test_no_metric_has_the_suffix_of_the_library(gateway: Gateway) -> None:
    names = {name for name, _ in scrape(gateway)}
    assert not [name for name in names if name.startswith("nv_") and name.endswith("_total")]


def test_the_types_of_the_metrics_are_declared_under_their_names(gateway: Gateway) -> None:
    text = wire.send(f"127.0.0.1:{gateway.metrics_port}", "GET", "/metrics").body.decode()
    for name in METRICS:
        kind = "gauge" if "pending" in name or "in_flight" in name else "counter"
        kind = "histogram" if "_histogram_" in name else kind
        assert f"# TYPE {name} {kind}\n" in text


def test_metrics_count_batch_elements_successes_and_failures(
    gateway: Gateway, connection: KeptConnection
) -> None:
    before = scrape(gateway)
    body = wire.json_body(json_input("x", "FP32", [2, 4], VALUES * 2))
    assert connection.send("POST", "/v2/models/x2/infer", body).status == 200
    assert connection.send("POST", "/v2/models/x2/infer", b'{"inputs": []}').status == 400
    timeout = wire.json_body(json_input("x", "FP32", [1, 4], VALUES), parameters={"timeout": 1})
    assert connection.send("POST", "/v2/models/x2/infer", timeout).status == 503
    after = scrape(gateway)
    for name, moved in (("count", 2), ("exec_count", 1), ("request_success", 1)):
        name = f"nv_inference_{name}"
        assert sample(after, name) - sample(before, name) == moved, name
    for reason, moved in (("OTHER", 1), ("REJECTED", 1), ("BACKEND", 0), ("CANCELED", 0)):
        name = "nv_inference_request_failure"
        then, now = (sample(samples, name, reason=reason) for samples in (before, after))
        assert now - then == moved, reason
    assert sample(after, "nv_inference_pending_request_count") == 0


def test_the_metrics_port_has_what_the_console_asks_for_and_nothing_else(gateway: Gateway) -> None:
    host = f"127.0.0.1:{gateway.metrics_port}"
    assert wire.send(host, "GET", "/v2/models/x2").json["name"] == "x2"
    for path in ("/", "/metrics/../v2", "/v1/models/x2", "/docs", "/models", "/console/../v2"):
        wire.assert_error(wire.send(host, "GET", path), 404)


# -- documents for people ------------------------------------------------------------------------


def test_every_route_is_documented(connection: KeptConnection) -> None:
    document = connection.send("GET", "/openapi.json").json
    routes = {
        (
            method.upper(),
            path.replace("{model}", "x2").replace("{region}", "r").replace("{version}", "1"),
        )
        for path, methods in document["paths"].items()
        if path.startswith("/v2")
        for method in methods
    }
    expected = {
        ("GET", path)
        for path in (*GET_ROUTES, *REGION_ROUTES, *CERTIFICATE_ROUTES, *SETTING_ROUTES)
    }
    expected |= {("POST", path) for path in (*POST_ROUTES, *SETTING_ROUTES)}
    assert routes == expected


def test_classification_over_json_is_strings(gateway: Gateway) -> None:
    reply = infer_json(
        gateway.http,
        "scores",
        json_input("x", "FP32", [1, 3], [0.5, 2.5, 1.5]),
        outputs=[{"name": "y", "parameters": {"classification": 2}}],
    )
    assert reply.json["outputs"] == [
        {
            "name": "y",
            "datatype": "BYTES",
            "shape": [1, 2],
            "data": [f"2.500000:1:{LABELS[1]}", f"1.500000:2:{LABELS[2]}"],
        }
    ]


def test_not_a_number_is_a_bare_token_both_ways(gateway: Gateway) -> None:
    body = (
        b'{"inputs":[{"name":"x","datatype":"FP32","shape":[1,4],'
        b'"data":[NaN,Infinity,-Infinity,1]}]}'
    )
    reply = wire.send(gateway.http, "POST", "/v2/models/x2/infer", body)
    assert reply.status == 200
    assert b'"data":[NaN,Infinity,-Infinity,2.0]' in reply.body


def test_null_is_what_is_left_out(connection: KeptConnection) -> None:
    tensor = json_input("x", "FP32", [1, 4], VALUES)
    body = {
        "id": None,
        "parameters": None,
        "inputs": [{**tensor, "parameters": None}],
        "outputs": None,
    }
    for given in (body, {**body, "outputs": [{"name": "y", "parameters": None}]}):
        reply = connection.send("POST", "/v2/models/x2/infer", json.dumps(given).encode())
        assert (reply.status, reply.json["outputs"][0]["data"]) == (200, [2, 4, 6, 8])
        assert "id" not in reply.json
    body["inputs"] = [{**tensor, "data": None}]
    wire.assert_error(
        connection.send("POST", "/v2/models/x2/infer", json.dumps(body).encode()), 400
    )
