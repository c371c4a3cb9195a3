"""TensorFlow Serving's REST dialect, byte for byte: rows, columns, errors, state, metadata."""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from modelport.gateway.types import NUMPY_DTYPES, Datatype
from tests.conformance.repository import IDENTITY, LABELS
from tests.conformance.wire import (
    TRANSPORTS,
    KeptConnection,
    WireReply,
    infer_json,
    json_input,
    send,
)
from tests.server import Gateway

X2 = "/v1/models/x2"
ROW = [1.0, 2.0, 3.0, 4.0]
IN_JSON = [d for d in Datatype if d not in (Datatype.FP16, Datatype.BF16)]


@pytest.fixture(params=TRANSPORTS)
def connection(gateway: Gateway, request: pytest.FixtureRequest) -> Iterator[KeptConnection]:
    opened = TRANSPORTS[request.param](gateway.http)
    yield opened
    opened.close()


def post(connection: KeptConnection, path: str, document: Any) -> WireReply:
    body = document if isinstance(document, bytes) else json.dumps(document).encode()
    return connection.send("POST", path, body)


def predict(connection: KeptConnection, model: str, document: Any) -> WireReply:
    return post(connection, f"/v1/models/{model}:predict", document)


def values_of(datatype: Datatype) -> list[Any]:
    """Two values that no other type, and no careless conversion, would bring back."""
    if datatype is Datatype.BOOL:
        return [True, False]
    if datatype is Datatype.BYTES:
        return ["é", ""]
    if datatype in (Datatype.FP32, Datatype.FP64):
        return [0.1, -1e-30]
    limits = np.iinfo(NUMPY_DTYPES[datatype])
    return [int(limits.max), int(limits.min)]


# -- rows and columns -----------------------------------------------------------------------------


@pytest.mark.parametrize("datatype", IN_JSON)
def test_every_datatype_comes_back_as_it_went_by_row_and_by_column(
    connection: KeptConnection, datatype: Datatype
) -> None:
    model, rows = IDENTITY[datatype.value], [values_of(datatype), values_of(datatype)[::-1]]
    assert predict(connection, model, {"instances": rows}).json == {"predictions": rows}
    assert predict(connection, model, {"inputs": rows}).json == {"outputs": rows}


@pytest.mark.parametrize("datatype", [Datatype.FP16, Datatype.BF16])
def test_types_without_a_form_in_json_are_refused(
    connection: KeptConnection, datatype: Datatype
) -> None:
    reply = predict(connection, IDENTITY[datatype.value], {"instances": [[1.0, 2.0]]})
    assert reply.status == 501
    assert reply.json["error"].startswith("Conversion of JSON Value: [[1.0,2.0]] to type: ")


def test_named_inputs_and_outputs_keep_their_names(connection: KeptConnection) -> None:
    rows = {"instances": [{"a": [1, 2], "b": [3, 5]}, {"b": [1, 1], "a": [0, 0]}]}
    assert predict(connection, "add_and_subtract", rows).json == {
        "predictions": [
            {"total": [4.0, 7.0], "difference": [-2.0, -3.0]},
            {"total": [1.0, 1.0], "difference": [-1.0, -1.0]},
        ]
    }
    columns = {"inputs": {"a": [[1, 2]], "b": [[3, 5]]}}
    assert predict(connection, "add_and_subtract", columns).json == {
        "outputs": {"total": [[4.0, 7.0]], "difference": [[-2.0, -3.0]]}
    }


def test_a_single_named_input_may_be_named(connection: KeptConnection) -> None:
    doubled = [[2.0, 4.0, 6.0, 8.0]]
    assert predict(connection, "x2", {"instances": [{"x": ROW}]}).json == {"predictions": doubled}
    assert predict(connection, "x2", {"inputs": {"x": [ROW]}}).json == {"outputs": doubled}


def test_the_models_own_shape_is_spoken_and_the_wires_understood(
    connection: KeptConnection,
) -> None:
    for values in ([1.0, 2.5], [[1.0], [2.5]]):
        reply = predict(connection, "scalar", {"instances": values})
        assert reply.json == {"predictions": [1.0, 2.5]}


def test_a_model_that_does_not_batch_answers_columns(connection: KeptConnection) -> None:
    table = [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]
    assert predict(connection, "fixed", {"inputs": table}).json == {"outputs": table}


def test_nan_and_the_infinities_travel_as_bare_tokens(connection: KeptConnection) -> None:
    body = b'{"instances": [[NaN, Infinity, -Infinity, 0.1]]}'
    reply = predict(connection, "x2", body)
    assert reply.body == b'{"predictions":[[NaN,Infinity,-Infinity,0.2]]}'
    body = b'{"inputs": {"a": [[NaN, 1]], "b": [[0.1, 0.2]]}}'
    text = predict(connection, "add_and_subtract", body).body
    assert text == b'{"outputs":{"total":[[NaN,1.2]],"difference":[[NaN,0.8]]}}'
    body = b'{"instances": [{"a": [NaN], "b": [1]}, {"a": [0.1], "b": [0]}]}'
    text = predict(connection, "add_and_subtract", body).body
    assert text == (
        b'{"predictions":[{"total":[NaN],"difference":[NaN]},{"total":[0.1],"difference":[0.1]}]}'
    )
    assert predict(connection, "scalar", b'{"instances": [NaN, 1]}').body == (
        b'{"predictions":[NaN,1.0]}'
    )


def test_floats_are_as_short_as_they_can_be_and_read_back_to_the_same_bits(
    connection: KeptConnection,
) -> None:
    chance = np.random.default_rng(7)
    values = chance.integers(0, 2**32, 400, np.uint32).view(np.float32).reshape(4, 100)
    values = np.where(np.isfinite(values), values, np.float32(0.1))
    reply = predict(connection, "identity_fp32", {"instances": values.tolist()})
    back = np.array(reply.json["predictions"], np.float32)
    assert back.tobytes() == values.tobytes()
    oip = infer_json(
        connection.address,
        "identity_fp32",
        json_input("x", "FP32", [4, 100], values.reshape(-1).tolist()),
    )
    texts = json.loads(oip.body, parse_float=str)["outputs"][0]["data"]
    rows = json.loads(reply.body, parse_float=str)["predictions"]
    assert [text for row in rows for text in row] == texts
    assert max(map(len, texts)) <= 16


def test_base64_comes_in_and_goes_out_of_outputs_named_so(connection: KeptConnection) -> None:
    data = base64.b64encode(b"abc").decode()
    rows = {"instances": [[{"b64": data}], ["abc"]]}
    assert predict(connection, "pair", rows).json == {"predictions": [["abc"], ["abc"]]}
    short = {"inputs": [[{"b64": base64.b64encode(b"a").decode().rstrip("=")}]]}
    assert predict(connection, "pair", short).json == {"outputs": [["a"]]}
    for bad in ("YQ=", "Y?==", "=", "YWJjé"):
        reply = predict(connection, "pair", {"instances": [[{"b64": bad}]]})
        assert (reply.status, "Unable to base64 decode" in reply.json["error"]) == (400, True)
    reply = predict(connection, "echo_bytes", {"instances": [[{"b64": "//79"}]]})
    assert reply.status == 400
    assert "output 'y' holds bytes that are not UTF-8" in reply.json["error"]


# -- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("document", "message"),
    [
        (b"", "JSON Parse error: The document is empty"),
        (b"{", "JSON Parse error: "),
        (b"[1]", "JSON Value: [1] Is not object"),
        (b"{}", "Missing 'inputs' or 'instances' key"),
        (b'{"instances": 1}', "Expecting 'instances' to be an list/array"),
        (b'{"instances": []}', "No values in 'instances' array"),
        (b'{"instances": [1], "inputs": [1]}', "expecting only one of 'inputs' or 'instances'"),
        (b'{"signature_name": 1, "instances": [1]}', "'signature_name' key must be a string value"),
        (
            b'{"signature_name": "s", "instances": [1]}',
            'Serving signature name: "s" not found in signature def',
        ),
        (b'{"instances": [{"z": 1}]}', "key: z of 'instances' list. Error: INVALID_ARGUMENT: JSON"),
        (b'{"inputs": {"z": 1}}', "Missing named input: x in 'inputs' object."),
        (b'{"instances": [[1,2],[1,2,3]]}', "Expecting shape [2] but got: [3]"),
        (b'{"instances": [[1,[2]]]}', "Encountered list at unexpected level: 1 expected < 1"),
        (b'{"instances": [[[1],2]]}', "found at incorrect level: 2 in the JSON DOM. Expected at"),
        (b'{"inputs": [[1,2],[1]]}', "Encountered list at unexpected size: 1 at level: 1 expected"),
        (b'{"instances": [["1",2,3,4]]}', 'Value: "1" Type: String is not of expected type: float'),
        (b'{"instances": [[true,2,3,4]]}', "Type: True is not of expected type: float"),
        (b'{"instances": [[null,2,3,4]]}', "Type: Null is not of expected type: float"),
        (b'{"instances": [[{"b64":"YQ=="},2,3,4]]}', "Type: Object is not of expected type: float"),
        (b'{"instances": [[1,2,3,4], {"x": [1,2,3,4]}]}', "got object at item 1 of input list"),
        (
            b'{"instances": [{"x": [1,2,3,4]}, [1,2,3,4]]}',
            "Expecting object but got list at item 1",
        ),
        (b'{"instances": [[1,2,3]]}', "unexpected shape for input 'x' for model 'x2'"),
        (b'{"inputs": 1}', "has no shape but model requires batch dimension"),
        (
            b'{"instances": ' + b"[" * 150 + b"]" * 150 + b"}",
            "JSON nesting depth exceeds maximum allowed limit (100)",
        ),
    ],
)
def test_a_malformed_request_gets_the_message_of_tensorflow_serving(
    connection: KeptConnection, document: bytes, message: str
) -> None:
    reply = predict(connection, "x2", document)
    assert (reply.status, list(reply.json)) == (400, ["error"])
    assert message in reply.json["error"]


@pytest.mark.parametrize(
    ("model", "value", "kind"),
    [("identity_int8", "300", "int8"), ("identity_uint8", "-1", "uint8")],
)
def test_a_whole_number_that_does_not_fit_is_refused(
    connection: KeptConnection, model: str, value: str, kind: str
) -> None:
    reply = predict(connection, model, f'{{"instances": [[{value}]]}}'.encode())
    assert reply.status == 400
    assert f"{value} Type: Number is not of expected type: {kind}" in reply.json["error"]


@pytest.mark.parametrize(
    ("path", "status", "message"),
    [
        ("/v1/models/nope:predict", 404, "Servable not found for request: Latest(nope)"),
        (f"{X2}/versions/3:predict", 404, "Servable not found for request: Specific(x2, 3)"),
        (f"{X2}/versions/0:predict", 404, "Servable not found for request: Specific(x2, 0)"),
        (f"{X2}/labels/stable:predict", 400, "Unrecognized servable version label: stable"),
        (f"{X2}/versions/{2**63}:predict", 400, f"Failed to convert version: {2**63} to numeric."),
        (f"{X2}:generate", 400, f"Malformed request: POST {X2}:generate"),
        (f"{X2}/versions/x:predict", 400, f"Malformed request: POST {X2}/versions/x:predict"),
        (X2, 400, f"Malformed request: POST {X2}"),
    ],
)
def test_a_missing_model_gets_the_message_of_tensorflow_serving(
    connection: KeptConnection, path: str, status: int, message: str
) -> None:
    reply = post(connection, path, {"instances": [ROW]})
    assert (reply.status, reply.json) == (status, {"error": message})


def test_a_full_queue_is_429_and_a_failed_model_500(
    connection: KeptConnection, gateway: Gateway
) -> None:
    reply = predict(connection, "failing", {"instances": [ROW]})
    assert (reply.status, reply.json) == (500, {"error": "the model failed on purpose"})
    path, body = "/v1/models/heavy:predict", b'{"inputs": [1]}'
    with ThreadPoolExecutor(12) as pool:
        replies = list(pool.map(lambda _: send(gateway.http, "POST", path, body), range(12)))
    assert {reply.status for reply in replies} == {200, 429}
    full = next(reply for reply in replies if reply.status == 429)
    assert full.json == {"error": "Exceeds maximum queue size"}
    assert full.headers["retry-after"] == "1"


# -- paths, codings, parity -----------------------------------------------------------------------


def test_paths_are_taken_in_any_case_and_with_versions(connection: KeptConnection) -> None:
    document = {"instances": [ROW]}
    for path in ("/V1/MODELS/x2:PREDICT", f"{X2}/Versions/1:Predict", "/v1/models/x%32:predict"):
        assert post(connection, path, document).json == {"predictions": [[2.0, 4.0, 6.0, 8.0]]}
    for version, factor in ((1, 2.0), (2, 3.0)):
        reply = post(connection, f"/v1/models/two_versions/versions/{version}:predict", document)
        assert reply.json == {"predictions": [[v * factor for v in ROW]]}
    assert predict(connection, "two_versions", document).json["predictions"][0][0] == 3.0


def test_bodies_may_be_compressed_both_ways(connection: KeptConnection) -> None:
    rows = np.arange(800, dtype=np.float32).reshape(8, 100).tolist()
    body = gzip.compress(json.dumps({"instances": rows}).encode())
    headers = {"Content-Encoding": "gzip", "Accept-Encoding": "gzip"}
    reply = connection.send("POST", "/v1/models/identity_fp32:predict", body, headers)
    assert reply.headers["content-encoding"] == "gzip"
    assert json.loads(gzip.decompress(reply.body)) == {"predictions": rows}


# -- classify and regress -------------------------------------------------------------------------


def test_examples_are_classified_with_the_labels_of_the_configuration(
    connection: KeptConnection,
) -> None:
    document = {"context": {"x": [9.0, 9, 9]}, "examples": [{"x": [0.25, 0.5, 0.125]}, {}]}
    reply = post(connection, "/v1/models/scores:classify", {"examples": document["examples"][:1]})
    assert reply.json == {"results": [[list(pair) for pair in zip(LABELS, [0.25, 0.5, 0.125])]]}  # noqa: B905
    document["context"] = {"x": [1.0, 2.0, 3.0]}
    results = post(connection, "/v1/models/scores:classify", document).json["results"]
    assert [[score for _, score in row] for row in results] == [[0.25, 0.5, 0.125], [1.0, 2.0, 3.0]]


def test_examples_are_regressed(connection: KeptConnection) -> None:
    document = {"examples": [{"x": 0.1}, {"x": [2]}]}
    reply = post(connection, "/v1/models/scalar:regress", document)
    assert reply.json == {"results": [0.1, 2.0]}


@pytest.mark.parametrize(
    ("method", "document", "message"),
    [
        ("regress", {}, "key 'examples' is expected and was not found"),
        ("regress", {"examples": {}}, "Expecting 'examples' value to be an list/array"),
        ("regress", {"examples": []}, "'examples' value is an empty array"),
        ("regress", {"examples": [1]}, "Example must be JSON object but got JSON Number"),
        ("regress", {"examples": [{"x": [1, 1.5]}]}, "feature: x expecting type: int64"),
        ("regress", {"examples": [{"x": None}]}, "unexpected JSON type: Null"),
        ("regress", {"examples": [{"x": [2**63]}]}, "Only int64_t is supported."),
        ("regress", {"examples": [{"z": 1.0}]}, "Feature: x (data type: float) is required"),
        ("regress", {"examples": [{"x": "a"}]}, "Data type: string but expected type: float"),
        ("regress", {"examples": [{"x": [1.0, 2.0]}]}, "has 2 values in example 0, expected 1"),
        ("regress", {"signature_name": "s", "examples": [{"x": 1.0}]}, "No signature was found"),
        ("classify", {"examples": [{"x": 1.0}]}, "Expected classification signature outputs"),
    ],
)
def test_examples_that_do_not_fit_are_refused(
    connection: KeptConnection, method: str, document: Any, message: str
) -> None:
    reply = post(connection, f"/v1/models/scalar:{method}", document)
    assert (reply.status, message in reply.json["error"]) == (400, True), reply.json


# -- state and metadata ---------------------------------------------------------------------------


def test_the_state_of_versions(connection: KeptConnection) -> None:
    def row(version: int) -> dict[str, Any]:
        status = {"error_code": "OK", "error_message": ""}
        return {"version": str(version), "state": "AVAILABLE", "status": status}

    reply = connection.send("GET", "/v1/models/two_versions")
    kserve = {"name": "two_versions", "ready": True}
    assert reply.json == {"model_version_status": [row(1), row(2)], **kserve}
    reply = connection.send("GET", "/v1/models/two_versions/versions/2")
    assert reply.json == {"model_version_status": [row(2)]}
    for path, message in (
        ("/v1/models/nope", "Could not find any versions of model nope"),
        (f"{X2}/versions/7", "Could not find version 7 of model x2"),
        ("/v1/models/nope/metadata", "Servable not found for request: Latest(nope)"),
    ):
        reply = connection.send("GET", path)
        assert (reply.status, reply.json) == (404, {"error": message})
    assert "x2" in connection.send("GET", "/v1/models").json["models"]
    refused = connection.send("PUT", X2)
    assert (refused.status, refused.headers["allow"]) == (405, "GET")


def test_the_metadata_is_the_signature_in_the_models_shapes(connection: KeptConnection) -> None:
    document = connection.send("GET", "/v1/models/scalar/metadata").json
    assert document["model_spec"] == {"name": "scalar", "signature_name": "", "version": "1"}
    signature = document["metadata"]["signature_def"]["signature_def"]["serving_default"]
    assert (signature["method_name"], signature["defaults"]) == ("tensorflow/serving/predict", {})
    assert signature["inputs"]["x"] == {
        "dtype": "DT_FLOAT",
        "name": "serving_default_x:0",
        "tensor_shape": {"dim": [{"size": "-1", "name": ""}], "unknown_rank": False},
    }
    document = connection.send("GET", f"{X2}/versions/1/METADATA").json
    signature = document["metadata"]["signature_def"]["signature_def"]["serving_default"]
    sizes = [dim["size"] for dim in signature["outputs"]["y"]["tensor_shape"]["dim"]]
    assert sizes == ["-1", "4"]


def test_the_routes_are_documented(connection: KeptConnection) -> None:
    paths = connection.send("GET", "/openapi.json").json["paths"]
    assert "post" in paths["/v1/models/{model}/labels/{label}:classify"]
    assert "get" in paths["/v1/models/{model}/metadata"]


def test_requests_are_counted_under_tensorflow_servings_names_at_its_path(
    connection: KeptConnection, gateway: Gateway
) -> None:
    predict(connection, "x2", {"instances": [ROW]})
    predict(connection, "x2", b"{")
    predict(connection, "a_name_that_somebody_made_up", b"{")
    host = f"127.0.0.1:{gateway.metrics_port}"
    text = send(host, "GET", "/monitoring/prometheus/metrics").body.decode()
    count = ":tensorflow:serving:request_count"
    assert f"# TYPE {count} counter" in text
    assert f'{count}{{model_name="x2",status="OK"}} ' in text
    assert f'{count}{{model_name="x2",status="INVALID_ARGUMENT"}} ' in text
    assert f'{count}{{model_name="",status="NOT_FOUND"}} ' in text
    assert "somebody_made_up" not in text
    latency = ":tensorflow:serving:request_latency"
    assert f'{latency}_count{{API="predict",entrypoint="REST",model_name="x2"}} ' in text
    assert f'{latency}_bucket{{API="predict",entrypoint="REST",le="10",model_name="x2"}}' in text
    for name in ("inference_requests_total", "inference_latency_microseconds"):
        assert f"# TYPE ts_{name} counter" in text
    assert '{model_name="x2",model_version="1",hostname="' in text.partition("ts_queue_latency")[2]
