"""CloudEvents in and out, in both modes, over KServe's v1 and v2.

``make peer-suites`` (``kserve``) sends those of the CloudEvents SDK.
"""

from __future__ import annotations

import base64
import gzip
import json
import random
import uuid
from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Any

import pytest

from modelport.gateway.errors import InvalidArgument
from modelport.gateway.protocols import cloud_events
from tests.conformance.repository import IDENTITY
from tests.conformance.wire import (
    HEADER_LENGTH,
    TRANSPORTS,
    KeptConnection,
    WireReply,
    json_body,
    json_input,
)
from tests.server import Gateway

ROW = [1.0, 2.0, 3.0, 4.0]
ATTRIBUTES = {"specversion": "1.0", "id": "7", "source": "/camera", "type": "com.example.photo"}
STRUCTURED = "application/cloudevents+json"
OIP = json.loads(json_body(json_input("x", "FP32", [1, 4], ROW)))
#: Path → the data of a request, and the values in the data of its response.
DIALECTS: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "/v2/models/x2/infer": (OIP, lambda data: data["outputs"][0]["data"]),
    "/v2/models/x2/versions/1/infer": (OIP, lambda data: data["outputs"][0]["data"]),
    "/v1/models/x2:predict": ({"instances": [ROW]}, lambda data: data["predictions"][0]),
}


@pytest.fixture(params=TRANSPORTS)
def rest(gateway: Gateway, request: pytest.FixtureRequest) -> Iterator[KeptConnection]:
    connection = TRANSPORTS[request.param](gateway.http)
    yield connection
    connection.close()


def binary(attributes: dict[str, str], **headers: str) -> dict[str, str]:
    return {"content-type": "application/json", **headers} | {
        f"ce-{name}": value for name, value in attributes.items()
    }


def check(attributes: dict[str, str], model: str = "x2") -> None:
    assert attributes["specversion"] == "1.0"
    assert attributes["source"] == f"io.kserve.inference.{model}"
    assert attributes["type"] == "io.kserve.inference.response"
    assert uuid.UUID(attributes["id"])
    assert datetime.fromisoformat(attributes["time"]).tzinfo is not None


@pytest.mark.parametrize("path", DIALECTS)
def test_an_event_in_binary_mode_is_answered_by_one(rest: KeptConnection, path: str) -> None:
    data, values = DIALECTS[path]
    reply = rest.send("POST", path, json.dumps(data).encode(), binary(ATTRIBUTES))
    assert (reply.status, reply.headers["content-type"]) == (200, "application/json")
    check({name[3:]: each for name, each in reply.headers.items() if name.startswith("ce-")})
    assert values(reply.json) == [2, 4, 6, 8]


@pytest.mark.parametrize("data_as", ["data", "data_base64"])
@pytest.mark.parametrize("path", DIALECTS)
def test_an_event_in_structured_mode_is_answered_by_one(
    rest: KeptConnection, path: str, data_as: str
) -> None:
    data, values = DIALECTS[path]
    if data_as == "data_base64":
        data = base64.b64encode(json.dumps(data).encode()).decode()
    document = {**ATTRIBUTES, data_as: data, "extension": 5, "time": "2021-01-28T21:04:43Z"}
    body = gzip.compress(json.dumps(document, indent=1).encode())
    headers = {
        "content-type": f"{STRUCTURED}; charset=utf-8",
        "content-encoding": "gzip",
        "accept-encoding": "gzip",
    }
    reply = rest.send("POST", path, body, headers)
    assert (reply.status, reply.headers["content-type"]) == (200, STRUCTURED)
    event = reply.json
    assert values(event.pop("data")) == [2, 4, 6, 8]
    assert event.pop("datacontenttype") == "application/json"
    check(event)


def test_tensors_in_bytes_travel_in_events(rest: KeptConnection) -> None:
    asked = {**OIP, "parameters": {"binary_data_output": True}}
    document = {**ATTRIBUTES, "data": asked}
    path = "/v2/models/x2/infer"
    reply = rest.send("POST", path, json.dumps(document).encode(), {"content-type": STRUCTURED})
    content = base64.b64decode(reply.json["data_base64"])
    assert reply.json["datacontenttype"] == "application/octet-stream"
    size = int(reply.headers[HEADER_LENGTH.lower()])
    assert json.loads(content[:size])["outputs"][0]["name"] == "y"
    reply = rest.send("POST", path, json.dumps(asked).encode(), binary(ATTRIBUTES))
    assert reply.headers["ce-type"] == "io.kserve.inference.response"
    assert reply.headers["content-type"] == "application/octet-stream"


def test_a_large_event_is_one_too(rest: KeptConnection) -> None:
    row = [0.5] * 100_000
    body = json.dumps({"data": {"instances": [row]}, **ATTRIBUTES}).encode()
    path = f"/v1/models/{IDENTITY['FP32']}:predict"
    reply = rest.send("POST", path, body, {"content-type": STRUCTURED})
    assert reply.json["data"] == {"predictions": [row]}


def without(name: str) -> dict[str, str]:
    return {key: value for key, value in ATTRIBUTES.items() if key != name}


MALFORMED = {
    **{
        f"no {name}": (json.dumps({**without(name), "data": OIP}), f"no attribute '{name}'")
        for name in ATTRIBUTES
    },
    "an empty id": (json.dumps({**ATTRIBUTES, "id": "", "data": OIP}), "no attribute 'id'"),
    "a number as type": (json.dumps({**ATTRIBUTES, "type": 1, "data": OIP}), "attribute 'type'"),
    "an old version": (
        json.dumps({**ATTRIBUTES, "specversion": "0.3", "data": OIP}),
        "specversion is '0.3'; send one of 1.0",
    ),
    "no data": (json.dumps(ATTRIBUTES), "one of 'data' and 'data_base64'"),
    "data twice": (
        json.dumps({**ATTRIBUTES, "data": OIP, "data_base64": ""}),
        "one of 'data' and 'data_base64'",
    ),
    "no base64": (json.dumps({**ATTRIBUTES, "data_base64": "?"}), "is not base64"),
    "base64 of a list": (json.dumps({**ATTRIBUTES, "data_base64": []}), "is not base64"),
    "an attribute twice": ('{"id":"1","id":"1"}', "not one JSON object"),
    "a list": ("[]", "not one JSON object"),
    "nothing": ("", "not one JSON object"),
    "cut short": (json.dumps({**ATTRIBUTES, "data": OIP})[:-1], "not one JSON object"),
    "data cut short": ('{"data":{"a":[1,2', "not one JSON object"),
    "a string cut short": ('{"data":"abc\\"', "not one JSON object"),
    "more behind": (json.dumps({**ATTRIBUTES, "data": OIP}) + "x", "not one JSON object"),
    "no JSON": ("{'id':1}", "not one JSON object"),
    "a long attribute": (
        json.dumps({**ATTRIBUTES, "x": "y" * 70_000, "data": OIP}),
        "exceeds 65536 bytes",
    ),
    "data of another kind": (json.dumps({**ATTRIBUTES, "data": [1]}), ""),
    "data that is text": (json.dumps({**ATTRIBUTES, "data": "text"}), ""),
}


@pytest.mark.parametrize("path", DIALECTS)
@pytest.mark.parametrize("case", MALFORMED)
def test_a_malformed_event_is_refused_with_its_reason(
    gateway: Gateway, path: str, case: str
) -> None:
    body, reason = MALFORMED[case]
    connection = KeptConnection(gateway.http)
    reply = connection.send("POST", path, body.encode(), {"content-type": STRUCTURED})
    connection.close()
    assert reply.status == 400, reply
    assert reason in reply.json["error"]
    assert "\n" not in reply.json["error"]


@pytest.mark.parametrize(
    ("headers", "reason"),
    [
        *((binary(without(name)), f"no attribute '{name}'") for name in ("id", "source", "type")),
        (binary({**ATTRIBUTES, "specversion": "9"}), "specversion is '9'"),
        ({"content-type": "application/cloudevents-batch+json"}, "send one event"),
        ({"content-type": "application/cloudevents+avro"}, "send one event"),
    ],
)
def test_a_mode_that_is_not_supported_is_refused(
    rest: KeptConnection, headers: dict[str, str], reason: str
) -> None:
    for path, (data, _) in DIALECTS.items():
        reply: WireReply = rest.send("POST", path, json.dumps(data).encode(), headers)
        assert (reply.status, reason in reply.json["error"]) == (400, True), reply


def test_an_error_of_the_model_is_no_event(rest: KeptConnection) -> None:
    for headers in (binary(ATTRIBUTES), {"content-type": STRUCTURED}):
        reply = rest.send("POST", "/v2/models/nope/infer", b"{}", headers)
        assert (reply.status, list(reply.json)) == (404, ["error"])
        assert "ce-id" not in reply.headers


def test_data_is_cut_out_of_random_events_as_it_is() -> None:
    """Texts of all kinds at all places of the pieces in which a value's end is sought."""
    generator = random.Random(5)

    def value(depth: int) -> Any:
        kinds: list[Callable[[], Any]] = [
            lambda: generator.choice([None, True, -1.5e-7, 3, float("nan")]),
            lambda: "".join(generator.choices('\\"{}[],:\u00e9 a', k=generator.choice([0, 3, 40]))),
            lambda: "\\" * generator.choice([1, 65_530, 65_536]),
        ]
        if depth:
            kinds += [
                lambda: [value(depth - 1) for _ in range(generator.randrange(4))],
                lambda: {str(n): value(depth - 1) for n in range(generator.randrange(4))},
            ]
        return generator.choice(kinds)()

    for _ in range(60):
        data = json.dumps(value(4), ensure_ascii=generator.random() < 0.5)
        members = [f'"{name}" : {json.dumps(each)}' for name, each in ATTRIBUTES.items()]
        members.insert(generator.randrange(5), f'"data":{data}')
        body = (" { " + " ,\n".join(members) + "\t} ").encode()
        assert cloud_events._opened(body) == data.encode()
        for cut in generator.sample(range(len(body.rstrip())), 3):
            with pytest.raises(InvalidArgument):
                cloud_events._opened(body[:cut])
