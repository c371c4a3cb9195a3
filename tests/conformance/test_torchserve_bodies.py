"""The bodies that TorchServe's clients send: unmodified ``curl``, and the wire."""

from __future__ import annotations

import base64
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from tests.conformance import repository, wire
from tests.conformance.torchserve import (
    LABELS,
    ROW,
    ask,
    call,
    curl,
    error,
    fractions,
    picture,
    predict,
)
from tests.conformance.wire import HEADER_LENGTH, json_body, json_input
from tests.server import Gateway

# -- predictions ----------------------------------------------------------------------------------


def test_curl_uploads_a_file(served: Gateway, tmp_path: Path) -> None:
    """``curl -T`` is PUT, without a content type."""
    file = tmp_path / "row.json"
    file.write_bytes(ROW)
    answers = [
        curl(served, "-T", str(file), "/predictions/x2"),
        curl(served, "-T", str(file), "/predictions/x2/1"),
        curl(served, "-T", str(file), "/predictions/x2/1.0"),
        curl(served, "-F", f"data=@{file}", "/predictions/x2"),
        curl(served, "-F", f"body=@{file}", "/predictions/x2"),
        curl(served, "--data-urlencode", f"data@{file}", "/predictions/x2"),
        curl(served, "-H", "Content-Type: application/json", "-d", f"@{file}", "/predictions/x2"),
    ]
    assert {json.loads(answer)["outputs"][0]["data"][3] for answer in answers} == {8.0}


def test_the_field_of_a_form_is_looked_for(served: Gateway, tmp_path: Path) -> None:
    answer = json.loads(curl(served, "-F", "other=1", "/predictions/x2"))
    assert (answer["code"], answer["type"]) == (400, "BadRequestException")
    assert "no field 'data'" in answer["message"]


@pytest.mark.parametrize("datatype", ["FP32", "FP16", "BOOL", "INT64", "UINT8", "BF16", "BYTES"])
def test_oip_bodies_get_the_bits_that_the_oip_route_gives(served: Gateway, datatype: str) -> None:
    item = {"FP16": 2, "BOOL": 1, "INT64": 8, "UINT8": 1, "BF16": 2}.get(datatype, 4)
    data = b"\1\0" * (item * 3 // 2 + 1)
    data = wire.pack([b"a\0", b"", b"\xff"]) if datatype == "BYTES" else data[: item * 3]
    head = json_body(
        json_input("x", datatype, [1, 3], binary_data_size=len(data)),
        parameters={"binary_data_output": True},
    )
    model = "echo_bytes" if datatype == "BYTES" else repository.IDENTITY[datatype]
    asked = {HEADER_LENGTH.replace("-", "_"): str(len(head))}
    oip = ask(served, "POST", f"/v2/models/{model}/infer", head + data, **asked)
    for headers in (asked, {}):  # without the header, the JSON part ends where its object does
        reply = ask(served, "POST", f"/predictions/{model}", head + data, **headers)
        assert reply.status == 200, reply.body
        assert wire.binary_outputs(reply) == wire.binary_outputs(oip)
        assert reply.headers["content-type"] == "application/octet-stream"
    answer = call(served, "Predictions", model, head + data)
    assert answer.prediction == oip.body


def test_one_raw_tensor_is_a_body_as_with_oip(served: Gateway) -> None:
    row = np.arange(4, dtype="<f4")
    reply = wire.send(served.http, "POST", "/predictions/x2", row.tobytes(), {HEADER_LENGTH: "0"})
    assert wire.binary_outputs(reply)["y"][2] == (2 * row).tobytes()


@pytest.mark.parametrize(
    ("model", "body", "expected"),
    [
        (
            "x2",
            {"instances": [[1, 2, 3, 4], [0, 0, 0, 1]]},
            {"predictions": [[2, 4, 6, 8], [0, 0, 0, 2]]},
        ),
        ("x2", {"data": [[1, 2, 3, 4]]}, {"predictions": [[2, 4, 6, 8]]}),
        ("x2", {"data": [1, 2, 3, 4]}, {"predictions": [2, 4, 6, 8]}),
        ("x2", [[1, 2, 3, 4]], [[2, 4, 6, 8]]),
        ("x2", [1, 2, 3, 4], [2, 4, 6, 8]),
        ("fixed", [[1, 2, 3], [4, 5, 6]], [[1, 2, 3], [4, 5, 6]]),
        (
            "fixed",
            {"instances": [[[1, 2, 3], [4, 5, 6]]]},
            {"predictions": [[[1, 2, 3], [4, 5, 6]]]},
        ),
        ("identity_fp16", {"instances": [[0.5, 2]]}, {"predictions": [[0.5, 2]]}),
        ("identity_int64", {"instances": [[2**62]]}, {"predictions": [[2**62]]}),
        (
            "echo_bytes",
            {"instances": [["é", {"b64": "/w=="}]]},
            {"predictions": [["é", {"b64": "/w=="}]]},
        ),
        (
            "add_and_subtract",
            {"instances": [{"a": [3], "b": [1]}, {"a": [5], "b": [7]}]},
            {
                "predictions": [
                    {"total": [4], "difference": [2]},
                    {"total": [12], "difference": [-2]},
                ]
            },
        ),
        (
            "add_and_subtract",
            {"data": {"a": [[3]], "b": [[1]]}},
            {"predictions": [{"total": [4], "difference": [2]}]},
        ),
        (
            "add_and_subtract",
            {"data": {"a": [3], "b": [1]}},
            {"predictions": {"total": [4], "difference": [2]}},
        ),
    ],
)
def test_plain_json_is_answered_in_like_form(
    served: Gateway, model: str, body: Any, expected: Any
) -> None:
    content = json.dumps(body).encode()
    reply = predict(served, model, content, "application/json")
    assert (reply.status, reply.json) == (200, expected)
    assert json.loads(call(served, "Predictions", model, content).prediction) == expected


def test_infinities_are_bare_tokens(served: Gateway) -> None:
    reply = predict(served, "x2", b"[[NaN, Infinity, -Infinity, 1]]")
    assert reply.body == b"[[NaN,Infinity,-Infinity,2.0]]"


def test_bytes_of_a_bytes_model_are_taken_and_given_as_they_are(served: Gateway) -> None:
    for text in (b"anything \xff\0", b"{not json", b"[1, 2]", b'{"other": 1}'):
        assert predict(served, "echo_bytes", text).body == text
        assert call(served, "Predictions", "echo_bytes", text).prediction == text
    as_json = predict(served, "pair", b'{"instances": [["a"]]}')
    assert as_json.json == {"predictions": [["a"]]}
    assert predict(served, "pair", b'[["a"]]', "application/json").json == [["a"]]


@pytest.mark.parametrize(
    ("model", "body", "message"),
    [
        ("x2", b"", "the body is empty"),
        ("x2", b"{", "JSON"),
        ("x2", b"nothing", "failed to parse the request JSON"),
        ("x2", b"{}", "must have 'inputs', 'instances' or 'data'"),
        ("x2", b'{"instances": []}', "at least one element"),
        ("x2", b'{"instances": {"x": 1}}', "at least one element"),
        ("x2", b'{"instances": [[1, 2], [3]]}', "different lengths"),
        ("x2", b'{"instances": [["1", "2", "3", "4"]]}', "holds strings"),
        ("x2", b'{"instances": [[true, 2, 3, 4]]}', "holds booleans"),
        ("x2", b'{"instances": [[1, 2, 3]]}', "unexpected shape for input 'x'"),
        ("x2", b'{"instances": [{"y": [1, 2, 3, 4]}]}', "unexpected input 'y'"),
        ("x2", b'{"instances": [{"x": [1, 2, 3, 4]}, [1, 2, 3, 4]]}', "same inputs, or values"),
        ("x2", b'{"data": [[1, 2, 3, 4]]} behind', "7 bytes follow the JSON value"),
        ("x2", b"[[1, 2, 3, 4]]x", "1 bytes follow"),
        ("x2", b"[" * 200, "nesting depth|is not found|JSON"),
        ("add_and_subtract", b"[[1]]", "the inputs 'a', 'b': give an object"),
        (
            "add_and_subtract",
            b'{"data": {"a": [[1]], "b": [1]}}',
            "unexpected shape|no shape|batch",
        ),
        ("identity_int64", b'{"instances": [[1.5]]}', "numbers with a fraction"),
        ("identity_bytes", b'{"instances": [[{"b64": "!"}]]}', "not base64"),
        ("identity_bytes", b'{"instances": [[{"b64": 3}]]}', "not base64"),
        ("x2", ROW + b"1", "unexpected additional input data"),
        ("x2", picture(), "the body is an image, but the model's input 'x' takes none"),
        ("fixed", b'{"instances": [1, 2]}', "takes no batch"),
        ("lettered", picture(), "'image.mean' must be one number, or 3, not 'no'"),
    ],
)
def test_what_is_wrong_is_said(served: Gateway, model: str, body: bytes, message: str) -> None:
    status, kind, text = error(predict(served, model, body))
    assert (status, kind) == (400, "BadRequestException")
    assert any(part in text for part in message.split("|")), text
    with pytest.raises(grpc.RpcError) as caught:
        call(served, "Predictions", model, body)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert caught.value.details() == text


def test_a_failing_model_and_a_full_queue_have_torchserves_names(served: Gateway) -> None:
    status, kind, _ = error(predict(served, "failing", b"[[1, 2, 3, 4]]"))
    assert (status, kind) == (500, "InternalServerException")


# -- pictures -------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["PNG", "JPEG"])
def test_a_picture_is_answered_with_the_five_likeliest_classes(
    served: Gateway, tmp_path: Path, form: str
) -> None:
    data = picture(form=form)
    file = tmp_path / "picture"
    file.write_bytes(data)
    logits = fractions(data).astype(np.float64)
    chances = np.exp(logits) / np.exp(logits).sum()
    top = np.argsort(-chances, kind="stable")[:5]
    expected = {LABELS[index]: np.float32(chances[index]).item() for index in top}
    answers = [
        curl(served, "-T", str(file), "/predictions/classes"),
        curl(served, "-F", f"data=@{file}", "/predictions/classes"),
        predict(served, "classes", data, f"image/{form.lower()}").body,
        call(served, "Predictions", "classes", data).prediction,
        call(served, "Predictions", "classes", data, key="body").prediction,
    ]
    for answer in answers:
        found = json.loads(answer)
        assert list(found) == list(expected)
        assert found == pytest.approx(expected, rel=1e-6)
    assert len(set(answers)) == 1
    assert answers[0].startswith(b'{\n  "label ')


def test_declared_probabilities_are_taken_as_they_are_and_named_by_index(served: Gateway) -> None:
    data = picture()
    values = fractions(data)
    found = predict(served, "chances", data).json
    assert found == {str(i): values[i].item() for i in np.argsort(-values, kind="stable")[:5]}


def test_an_output_that_is_no_classification_is_a_list(served: Gateway) -> None:
    data = picture()
    assert predict(served, "features", data).json == fractions(data).tolist()


def test_pictures_travel_in_plain_json_too(served: Gateway) -> None:
    data = [picture(seed) for seed in range(2)]
    rows = [{"b64": base64.b64encode(item).decode()} for item in data]
    expected = [fractions(item).tolist() for item in data]
    for body in ({"instances": rows}, {"data": rows}, {"instances": [{"x": row} for row in rows]}):
        reply = predict(served, "classes", json.dumps(body).encode())
        assert (reply.status, reply.json) == (200, {"predictions": expected})
    single = predict(served, "classes", json.dumps({"data": rows[0]}).encode())
    assert single.json == {"predictions": expected[0]}
    many = predict(served, "classes", json.dumps({"instances": rows * 5}).encode())
    assert "10 images, at most 8" in error(many)[2]


def test_a_bad_image_configuration_does_not_affect_requests_without_images(served: Gateway) -> None:
    """``image.mean`` of this model is wrong."""
    rows = json.dumps({"instances": [[[[1.5] * 2] * 2] * 3]}).encode()
    for path in ("/v1/models/lettered:predict", "/predictions/lettered"):
        assert ask(served, "POST", path, rows).json == {"predictions": [[1.5] * 12]}
    b64 = base64.b64encode(picture()).decode()
    refused = ask(
        served,
        "POST",
        "/v1/models/lettered:predict",
        json.dumps({"instances": [{"b64": b64}]}).encode(),
    )
    assert refused.status == 400
    assert "'image.mean' must be one number" in refused.json["error"]


def test_invalid_image_data_is_refused(served: Gateway) -> None:
    for data, kind in ((b"no picture", "image/png"), (picture(size=(64, 64))[:-900], "")):
        status, _, text = error(predict(served, "classes", data, kind))
        assert status == 400
        assert text.startswith("input 'x': the data is not a JPEG or PNG image")


def test_a_reload_while_pictures_are_decoded_fails_no_request(explicit: Gateway) -> None:
    """Each reload gives another configuration; the one who asks must not notice."""
    data, stop = picture(size=(600, 800)), threading.Event()
    statuses: set[tuple[int, bytes]] = set()

    def send() -> None:
        while not stop.is_set():
            reply = predict(explicit, "classes", data)
            statuses.add((reply.status, b"" if reply.status == 200 else reply.body))

    load = "/v2/repository/models/classes/load"
    assert ask(explicit, "POST", load).status == 200
    with ThreadPoolExecutor(4) as pool:
        senders = [pool.submit(send) for _ in range(4)]
        try:
            for mean in range(30):
                parameters = {"classification.y": {"string_value": "logits"}}
                parameters["image.mean"] = {"string_value": str(mean)}
                config = {"backend": "onnxruntime", "max_batch_size": 8, "parameters": parameters}
                config["input"] = [{"name": "x", "data_type": "TYPE_FP32", "dims": [3, 2, 2]}]
                config["output"] = [{"name": "y", "data_type": "TYPE_FP32", "dims": [12]}]
                body = json.dumps({"parameters": {"config": json.dumps(config)}}).encode()
                assert ask(explicit, "POST", load, body).status == 200
        finally:
            stop.set()
        for sender in senders:
            sender.result()
    assert statuses == {(200, b"")}
    assert ask(explicit, "DELETE", "/models/classes").status == 200
