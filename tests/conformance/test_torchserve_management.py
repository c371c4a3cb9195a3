"""TorchServe's management: what is served changes on request, in explicit mode alone."""

from __future__ import annotations

import json
import re
import urllib.request

import pytest

from tests.conformance.torchserve import (
    ROW,
    ask,
    error,
    predict,
)
from tests.server import Gateway

# -- management -----------------------------------------------------------------------------------


def test_models_are_listed_in_pages(served: Gateway) -> None:
    names, token = [], "0"
    while token:
        page = ask(served, "GET", f"/models?limit=7&next_page_token={token}").json
        names += [row["modelName"] for row in page["models"]]
        assert all(row["modelUrl"] == f"{row['modelName']}.mar" for row in page["models"])
        token = page.get("nextPageToken", "") if page["models"] else ""
    assert names == sorted(set(names))
    assert {"x2", "classes"} <= set(names)
    strange_ones = ("-1", "x", "999", "--5", "-", "1e2", "%D9%A3")
    for strange in (f"{key}={n}" for key in ("limit", "next_page_token") for n in strange_ones):
        if strange == "next_page_token=999":
            continue
        assert len(ask(served, "GET", f"/models?{strange}").json["models"]) == len(names)


def test_a_model_is_described(served: Gateway) -> None:
    (row,) = ask(served, "GET", "/models/two_versions").json
    assert (row["modelName"], row["modelVersion"]) == ("two_versions", "2")
    assert row["batchSize"] == 8
    assert [worker["status"] for worker in row["workers"]] == ["READY"]
    (row,) = ask(served, "GET", "/models/two_versions/1").json
    assert row["modelVersion"] == "1"
    rows = ask(served, "GET", "/models/two_versions/all").json
    assert [row["modelVersion"] for row in rows] == ["1", "2"]
    (row,) = ask(served, "GET", "/models/x2?customized=true").json
    assert row["customizedMetadata"]["inputs"][0]["shape"] == [-1, 4]


def test_scaling_is_accepted_where_it_is_true(served: Gateway) -> None:
    reply = ask(served, "PUT", "/models/x2")
    assert (reply.status, reply.json) == (202, {"status": "Processing worker updates..."})
    reply = ask(served, "PUT", "/models/x2?min_worker=1&synchronous=true")
    assert (reply.status, reply.json) == (200, {"status": "Workers scaled to 1 for model: x2"})
    reply = ask(served, "PUT", "/models/x2/1?synchronous=true")
    assert reply.json == {"status": "Workers scaled to 1 for model: x2, version: 1"}
    assert ask(served, "PUT", "/models/x2?min_worker=0&max_worker=4").status == 202
    status, kind, text = error(ask(served, "PUT", "/models/x2?min_worker=2"))
    assert (status, kind) == (405, "MethodNotAllowedException")
    assert "--model-control-mode=explicit" in text
    for asked, said in (
        ("min_worker=0", "DELETE unregisters the model"),
        ("min_worker=-3", "DELETE unregisters the model"),
        ("min_worker=2&max_worker=1", "max_worker cannot be less than min_worker."),
    ):
        status, kind, text = error(ask(served, "PUT", f"/models/x2?{asked}"))
        assert (status, kind, said in text) == (400, "BadRequestException", True)


def test_a_model_is_scaled_by_a_request(explicit: Gateway) -> None:
    """A number of workers other than that of ``config.pbtxt`` was refused."""

    def workers() -> int:
        (row,) = ask(explicit, "GET", "/models/three").json
        return len(row["workers"])

    path = "/models?url=three.mar&initial_workers=2&synchronous=true"
    status = ask(explicit, "POST", path).json["status"]
    assert status.endswith(" registered with 2 initial workers")
    assert ask(explicit, "PUT", "/models/three/2/set-default").status == 200
    assert workers() == 2
    for asked, number in (("min_worker=3", 3), ("min_worker=1&max_worker=2", 2)):
        reply = ask(explicit, "PUT", f"/models/three?{asked}&synchronous=true")
        assert reply.json == {"status": f"Workers scaled to {number} for model: three"}
        assert workers() == number
        assert predict(explicit, "three", ROW).json["outputs"][0]["data"] == [2, 4, 6, 8]
    text = error(ask(explicit, "PUT", "/models/three/1?min_worker=5"))[2]
    assert "scale the model without a version" in text
    status, _, text = error(ask(explicit, "PUT", "/models/three?min_worker=1000000"))
    assert (status, workers()) == (400, 2), text
    assert ask(explicit, "PUT", "/models/three?min_worker=1").status == 202
    assert workers() == 1
    assert ask(explicit, "DELETE", "/models/three/1").status == 200
    assert ask(explicit, "DELETE", "/models/three").status == 200


def test_models_change_on_request_only_in_explicit_mode(served: Gateway) -> None:
    for method, path in (
        ("POST", "/models?url=x2"),
        ("DELETE", "/models/x2"),
        ("DELETE", "/models/x2/1"),
        ("PUT", "/models/x2/1/set-default"),
    ):
        status, kind, text = error(ask(served, method, path))
        assert (status, kind) == (405, "MethodNotAllowedException")
        assert "--model-control-mode=explicit" in text
    assert predict(served, "x2", ROW).status == 200


def test_models_are_registered_made_default_and_unregistered(explicit: Gateway) -> None:
    def factor(version: str = "") -> float:
        return float(predict(explicit, f"two{version}", b"[1, 1, 1, 1]").json[0])

    assert error(predict(explicit, "two", ROW))[0] == 404
    reply = ask(explicit, "POST", "/models?url=two.mar&initial_workers=1&synchronous=true")
    expected = 'Model "two" Version: 2 registered with 1 initial workers'
    assert (reply.status, reply.json) == (200, {"status": expected})
    status, kind, text = error(ask(explicit, "POST", "/models?url=two"))
    assert (status, kind) == (409, "ConflictStatusException")
    assert text == "Model version 2 is already registered for model two"
    assert (factor(), factor("/1"), factor("/2")) == (2, 1, 2)
    reply = ask(explicit, "PUT", "/models/two/1/set-default")
    assert reply.json == {"status": 'Default version successfully updated for model "two" to "1"'}
    assert factor() == 1
    for path in ("/models/two", "/models/two/1"):
        status, kind, text = error(ask(explicit, "DELETE", path))
        assert (status, kind) == (400, "InvalidModelVersionException")
        assert text.startswith("Cannot remove default version for model two")
    gone = {"status": 'Model "two" unregistered'}
    assert ask(explicit, "DELETE", "/models/two/2").json == gone
    assert error(predict(explicit, "two/2", ROW))[0] in (404, 503)
    assert factor() == 1
    assert ask(explicit, "DELETE", "/models/two").json == gone
    names = [row["modelName"] for row in ask(explicit, "GET", "/models").json["models"]]
    assert "two" not in names
    assert error(ask(explicit, "DELETE", "/models/two"))[:2] == (404, "ModelNotFoundException")
    body = json.dumps({"url": "two", "model_name": "two"}).encode()
    assert (
        ask(explicit, "POST", "/models", body, **{"Content_Type": "application/json"}).status == 200
    )


@pytest.mark.parametrize(
    ("url", "status", "message"),
    [
        ("", 404, "empty url"),
        ("http://example.com/x2.mar", 404, "does not match any allowed URL(s)"),
        ("FILE:x2", 404, "does not match any allowed URL(s)"),
        ("s3:x2", 404, "does not match any allowed URL(s)"),
        ("../x2", 404, "Relative path is not allowed in url: ../x2"),
        ("/x2", 404, "Model not found at: /x2"),
        ("x2%2f", 404, "Model not found at: x2/"),
        ("%5cx2", 404, "Model not found at:"),
        ("nope.mar", 404, "Model not found at: nope.mar"),
    ],
)
def test_a_url_names_a_model_of_the_repository_or_nothing(
    explicit: Gateway, url: str, status: int, message: str
) -> None:
    found, _, text = error(ask(explicit, "POST", f"/models?url={url}"))
    assert (found, message in text) == (status, True), text


def test_a_registration_without_a_url_is_no_empty_one(explicit: Gateway) -> None:
    for body in (b"{}", b'{"url": null}'):
        reply = ask(explicit, "POST", "/models", body, Content_Type="application/json")
        assert error(reply) == (400, "BadRequestException", "Parameter url is required.")
    assert error(ask(explicit, "POST", "/models"))[2] == "Parameter url is required."
    reply = ask(explicit, "POST", "/models", b'{"url": ""}', Content_Type="application/json")
    assert error(reply) == (404, "ModelNotFoundException", "empty url")


def test_a_slash_may_stand_before_the_query(explicit: Gateway) -> None:
    assert ask(explicit, "POST", "/models/?url=classes.mar&model_name=classes").status == 200
    assert ask(explicit, "GET", "/models/?limit=1").json["models"] != []
    assert ask(explicit, "GET", "/models/classes/").json[0]["modelName"] == "classes"
    gone = {"status": 'Model "classes" unregistered'}
    assert ask(explicit, "DELETE", "/models/classes/?synchronous=true").json == gone


def test_a_runtime_and_a_time_to_start_are_held_to(explicit: Gateway) -> None:
    reply = error(ask(explicit, "POST", "/models?url=classes&runtime=python4"))
    assert reply == (400, "BadRequestException", "Invalid RuntimeType value: python4")
    path = "/models?url=classes&initial_workers=3&startup_timeout=0"
    status, kind, text = error(ask(explicit, "POST", path))
    assert (status, kind) == (500, "InternalServerException")
    assert text == "Failed to start workers for model classes within its startup_timeout"
    for rest in ("startup_timeout=0", "initial_workers=1&startup_timeout=60&runtime=python3"):
        assert ask(explicit, "POST", f"/models?url=classes&{rest}").status == 200
        assert ask(explicit, "DELETE", "/models/classes").status == 200


def test_requests_are_counted_by_status_under_torchserves_names(served: Gateway) -> None:
    before = by_status(served)
    assert predict(served, "x2", ROW).status == 200
    assert predict(served, "x2", b"[1]").status == 400
    after = by_status(served)
    assert [after[name] - before[name] for name in sorted(after)] == [1, 1, 0]


def by_status(gateway: Gateway) -> dict[str, float]:
    with urllib.request.urlopen(gateway.metrics) as reply:
        text = reply.read().decode()
    found = dict(re.findall(r'^(Requests.XX)\{Level="Host",Hostname="[^"]+"\} (\S+)$', text, re.M))
    assert sorted(found) == ["Requests2XX", "Requests4XX", "Requests5XX"]
    return {name: float(count) for name, count in found.items()}


@pytest.mark.parametrize("body", [b"", b"[]", b'"x2"', b'{"url": 1}', b'{"url": null}', b"\xff"])
def test_a_registration_that_is_no_object_of_strings_is_refused(
    explicit: Gateway, body: bytes
) -> None:
    reply = ask(explicit, "POST", "/models", body, Content_Type="application/json")
    assert error(reply)[:2] == (400, "BadRequestException")
