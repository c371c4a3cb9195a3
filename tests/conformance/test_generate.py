"""The generate extension, as ``httpx`` and ``curl`` meet it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.conformance import decoupled
from tests.conformance.decoupled import BROKEN
from tests.conformance.test_decoupled import VALUES, statistics
from tests.polling import PROMPT_SECONDS, eventually
from tests.server import Gateway, serving

EXACTLY_ONE = (
    "generate expects model to produce exactly 1 response, use generate stream for model that "
    "generates various number of responses"
)


@pytest.fixture(scope="module")
def client(streaming: Gateway) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"http://{streaming.http}/v2/models", timeout=30) as opened:
        yield opened


def events(reply: httpx.Response) -> list[Any]:
    assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
    parts = reply.text.split("\n\n")
    assert parts.pop() == ""
    assert all(part.startswith("data: ") for part in parts)
    return [json.loads(part.removeprefix("data: ")) for part in parts]


def test_a_model_that_answers_once_generates(client: httpx.Client) -> None:
    for path in ("/once/generate", "/once/versions/1/generate"):
        reply = client.post(path, json={"x": VALUES, "id": "42"})
        assert reply.status_code == 200
        assert reply.headers["content-type"] == "application/json"
        assert reply.json() == {
            "id": "42",
            "model_name": "once",
            "model_version": "1",
            "y": VALUES,
        }
        assert list(reply.json()) == sorted(reply.json())  # as Triton writes it


def test_a_scalar_and_text_travel_as_themselves(client: httpx.Client) -> None:
    reply = client.post("/talker/generate_stream", json={"x": "héllo"})
    assert [event["y"] for event in events(reply)] == ["héllo"] * 3


def test_a_stream_is_one_event_for_each_response(client: httpx.Client) -> None:
    for path in ("/repeat/generate_stream", "/repeat/versions/1/generate_stream"):
        reply = client.post(path, json={"x": VALUES})
        assert reply.status_code == 200
        expected = {"model_name": "repeat", "model_version": "1", "y": VALUES}
        assert events(reply) == [expected] * 3
    assert len(events(client.post("/once/generate_stream", json={"x": VALUES}))) == 1
    assert events(client.post("/silent/generate_stream", json={"x": VALUES})) == []


def test_what_names_no_input_is_a_parameter_at_the_top_or_nested(client: httpx.Client) -> None:
    for body in ({"x": VALUES, "responses": 2}, {"x": VALUES, "parameters": {"responses": 2}}):
        assert len(events(client.post("/repeat/generate_stream", json=body))) == 2
    one = client.post("/repeat/generate", json={"x": VALUES, "responses": 1})
    assert (one.status_code, one.json()["y"]) == (200, VALUES)
    nested = client.post("/once/generate", json={"parameters": {"x": VALUES}})
    assert nested.json()["y"] == VALUES


@pytest.mark.parametrize("model", ["repeat", "silent"])
def test_generate_wants_exactly_one_response(client: httpx.Client, model: str) -> None:
    reply = client.post(f"/{model}/generate", json={"x": VALUES})
    assert (reply.status_code, reply.json()) == (500, {"error": EXACTLY_ONE})


@pytest.mark.parametrize("ending", ["generate", "generate_stream"])
@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({}, "expected 1 inputs but got 0 inputs for model 'once'"),
        ({"x": "text" * 2}, "x' to tensor with proper shape"),
        ({"x": ["a", "b", "c", "d"]}, "input 'x' is FP32, but its 'data' holds strings"),
        ({"x": [1, 2, 3]}, "The schema can not convert input 'x' to tensor with proper shape"),
        ({"x": {"USER": 1}}, "to tensor with proper shape"),
        ({"x": VALUES, "p": {"q": 1}}, "parameter 'p' has invalid type. It should be either"),
        ({"x": VALUES, "parameters": 1}, "Expected JSON object for keyword: 'parameters'"),
        (
            {"x": VALUES, "parameters": {"p": {"q": 1}}},
            "Converting keyword: 'parameters': parameter 'p' has invalid type.",
        ),
        ({"x": VALUES, "parameters": {"x": VALUES}}, "input 'x' already exists in request"),
        ({"x": VALUES, "id": 7}, "'id'"),
        ([], "the request must be a JSON object"),
    ],
)
def test_a_bad_request_gets_a_json_error_before_anything_runs(
    client: httpx.Client, ending: str, body: Any, said: str
) -> None:
    reply = client.post(f"/once/{ending}", json=body)
    assert reply.status_code == 400
    assert reply.headers["content-type"] == "application/json"
    assert said in reply.json()["error"]


@pytest.mark.parametrize("ending", ["generate", "generate_stream"])
@pytest.mark.parametrize(
    ("text", "key"),
    [
        ('{"x": [1, 2, 3, 4], "x": [1, 2, 3, 4]}', "x"),
        ('{"x": [1, 2, 3, 4], "p": "a:b", "p": 1, "x": 1}', "p"),
        ('{"x": [1, 2, 3, 4], "parameters": {"q": 1, "q": 2}}', "q"),
        ('{"x": [1, 2, 3, 4], "\\u0078": [1, 2, 3, 4]}', "x"),
    ],
)
def test_a_key_that_is_there_twice_is_refused(
    client: httpx.Client, ending: str, text: str, key: str
) -> None:
    reply = client.post(f"/once/{ending}", content=text)
    assert (reply.status_code, reply.json()) == (
        400,
        {"error": f"input '{key}' already exists in request"},
    )


def test_a_key_twice_in_a_long_request_is_refused_and_colons_in_its_strings_are_none(
    client: httpx.Client,
) -> None:
    long = ":" * 300_000
    good = {"x": VALUES, "p": long}
    assert client.post("/once/generate", json=good).json()["y"] == VALUES
    twice = f'{{"x": [1, 2, 3, 4], "p": "{long}", "p": 1}}'
    reply = client.post("/once/generate", content=twice)
    assert reply.json() == {"error": "an input or a parameter already exists in request"}


def test_colons_in_strings_are_no_keys(client: httpx.Client) -> None:
    body = {"x": VALUES, "p": "a:b:c", "q": ":", "parameters": {"r": "::"}}
    assert client.post("/once/generate", json=body).json()["y"] == VALUES


def test_unknown_models_paths_and_methods(client: httpx.Client) -> None:
    assert client.post("/nobody/generate", json={}).status_code == 404
    assert client.post("/once/versions/9/generate_stream", json={"x": VALUES}).status_code == 404
    assert client.post("/once/versions/x/generate", json={}).status_code == 404
    assert client.get("/once/generate").status_code == 405
    assert client.post("/once/generated", json={}).status_code == 404


def test_an_error_behind_a_response_is_the_last_event(client: httpx.Client) -> None:
    reply = client.post("/breaking/generate_stream", json={"x": VALUES})
    assert reply.status_code == 200
    found = events(reply)
    assert [event.get("y") for event in found] == [VALUES, VALUES, None]
    assert found[-1] == {"error": BROKEN}


def test_an_error_of_the_model_in_place_of_the_first_response_has_a_status(
    client: httpx.Client,
) -> None:
    reply = client.post("/broken/generate_stream", json={"x": VALUES})
    assert reply.status_code == 500
    assert events(reply) == [{"error": BROKEN}]
    reply = client.post("/broken/generate", json={"x": VALUES})
    assert (reply.status_code, reply.json()) == (500, {"error": BROKEN})


def test_the_first_event_does_not_wait_for_the_last(client: httpx.Client) -> None:
    with client.stream("POST", "/trickle/generate_stream", json={"x": VALUES}) as reply:
        assert next(reply.iter_lines()).startswith("data: ")


def test_the_proxys_timeout_ends_a_stream_with_an_event(client: httpx.Client) -> None:
    headers = {"x-envoy-expected-rq-timeout-ms": "150"}
    reply = client.post("/endless/generate_stream", json={"x": VALUES}, headers=headers)
    assert events(reply)[-1] == {"error": "Request timeout expired"}


def test_a_client_that_goes_stops_the_work(client: httpx.Client, streaming: Gateway) -> None:
    before = statistics(streaming, "endless")["inference_stats"]["fail"]["count"]
    with client.stream("POST", "/endless/generate_stream", json={"x": VALUES}) as reply:
        next(reply.iter_lines())
    eventually(
        lambda: statistics(streaming, "endless")["inference_stats"]["fail"]["count"] == before + 1,
        seconds=PROMPT_SECONDS,
    )


def test_a_server_that_stops_ends_its_streams(tmp_path: Any) -> None:
    with serving(decoupled.build(tmp_path), "--exit-timeout-secs", "1") as gateway:
        url = f"http://{gateway.http}/v2/models/endless/generate_stream"
        with httpx.stream("POST", url, json={"x": VALUES}, timeout=30) as reply:
            lines = reply.iter_lines()
            next(lines)
            gateway.process.terminate()
            *_, last = [line for line in lines if line]
        assert json.loads(last.removeprefix("data: ")) == {"error": "the server is shutting down"}
        assert gateway.process.wait(25) == 0
