"""TorchServe's management registers a model of the repository under any other name, or several."""

from __future__ import annotations

import contextlib
import json
import re
import urllib.request
from collections.abc import Iterator

import grpc
import numpy as np
import pytest

from modelport.gateway.protocols.torchserve.grpc import MANAGEMENT_SERVICE
from modelport.gateway.wire.proto import torchserve_management_pb2 as management
from tests.conformance.clients import CALLERS, Ask
from tests.conformance.conftest import Callers
from tests.conformance.torchserve import ROW, ask, call, error, predict, rpc
from tests.conformance.wire import WireReply
from tests.server import Gateway

NAMES = ("scoring", "rater")
JSON_ROW = b'{"instances": [[1, 2, 3, 4]]}'
#: What each dialect says about a model, and its answers.
OPERATIONS = [
    ("GET", "/v2/models/NAME", b""),
    ("GET", "/v2/models/NAME/config", b""),
    ("GET", "/v2/models/NAME/ready", b""),
    ("GET", "/v2/models/NAME/versions/1/ready", b""),
    ("POST", "/v2/models/NAME/infer", ROW),
    ("POST", "/v2/models/NAME/versions/1/infer", ROW),
    ("POST", "/models/NAME/invoke", ROW),
    ("GET", "/v1/models/NAME", b""),
    ("GET", "/v1/models/NAME/metadata", b""),
    ("POST", "/v1/models/NAME:predict", JSON_ROW),
    ("POST", "/v1/models/NAME/versions/1:predict", JSON_ROW),
    ("GET", "/models/NAME/all", b""),
    ("GET", "/models/NAME?customized=true", b""),
    ("PUT", "/models/NAME?min_worker=1&synchronous=true", b""),
    ("PUT", "/models/NAME/1/set-default", b""),
    ("POST", "/predictions/NAME", ROW),
    ("PUT", "/predictions/NAME/1", b"[1, 2, 3, 4]"),
    ("OPTIONS", "/predictions/NAME", b""),
]


def register(gateway: Gateway, query: str) -> WireReply:
    return ask(gateway, "POST", f"/models?url={query}")


@contextlib.contextmanager
def registered(gateway: Gateway, *names: str, url: str = "x2") -> Iterator[None]:
    for name in names:
        reply = register(gateway, f"{url}.mar&model_name={name}&initial_workers=1")
        text = f'Model "{name}" Version: 1 registered with 1 initial workers'
        assert (reply.status, reply.json) == (200, {"status": text})
    yield
    for name in names:
        reply = ask(gateway, "DELETE", f"/models/{name}")
        assert reply.json == {"status": f'Model "{name}" unregistered'}


@pytest.fixture(scope="module")
def renamed(explicit: Gateway) -> Iterator[Gateway]:
    with registered(explicit, *NAMES):
        yield explicit


def without_name(reply: WireReply, name: str) -> tuple[int, str]:
    """The answer without the model's name; the archive's stays."""
    text = reply.body.decode().replace('"modelUrl": "x2.mar"', '"modelUrl": ""')
    return reply.status, re.sub(rf"(?<![a-z0-9]){name}(?![a-z0-9])", "NAME", text)


@pytest.mark.parametrize(("method", "path", "body"), OPERATIONS)
def test_every_operation_on_a_new_name_answers_as_on_the_models_own(
    renamed: Gateway, method: str, path: str, body: bytes
) -> None:
    replies = {
        name: ask(renamed, method, path.replace("NAME", name), body) for name in ("x2", *NAMES)
    }
    answers = {name: without_name(reply, name) for name, reply in replies.items()}
    assert answers["scoring"] == answers["rater"] == answers["x2"]
    assert answers["x2"][0] == 200


def test_the_comparison_finds_an_answer_in_the_name_of_the_archive(renamed: Gateway) -> None:
    for path in ("/v2/models/NAME", "/v2/models/NAME/config", "/models/NAME/all"):
        reply = ask(renamed, "GET", path.replace("NAME", "x2"))
        assert without_name(reply, "scoring") != without_name(reply, "x2")


@pytest.mark.parametrize("way", CALLERS)
def test_tritons_clients_get_answers_under_a_new_name(
    renamed: Gateway, runner: object, way: str
) -> None:
    callers = Callers(renamed, runner)  # type: ignore[arg-type]
    with contextlib.closing(callers):
        result = callers[way].infer(Ask("scoring", [("x", np.float32([[1, 2, 3, 4]]))]))
    assert result.model == "scoring"
    assert result.arrays["y"].tolist() == [[2, 4, 6, 8]]


def test_new_names_are_listed_counted_and_indexed(renamed: Gateway) -> None:
    rows = {
        row["modelName"]: row["modelUrl"] for row in ask(renamed, "GET", "/models").json["models"]
    }
    assert {name: rows[name] for name in ("x2", *NAMES)} == dict.fromkeys(("x2", *NAMES), "x2.mar")
    index = ask(renamed, "POST", "/v2/repository/index", b"{}").json
    states = {row["name"]: row.get("state") for row in index}
    assert {states[name] for name in NAMES} == {"READY"}

    def count() -> int:
        document = ask(renamed, "GET", "/v2/models/rater/stats").json["model_stats"][0]
        return int(document["inference_stats"]["success"]["count"])

    before = count()
    assert predict(renamed, "rater", ROW).status == 200
    assert predict(renamed, "scoring", ROW).status == 200
    assert count() == before + 1
    with urllib.request.urlopen(renamed.metrics) as reply:
        assert 'model="rater"' in reply.read().decode()


@pytest.mark.parametrize(
    ("query", "said"),
    [
        ("x2&model_name=scoring", "Model version 1 is already registered for model scoring"),
        ("two&model_name=scoring", "the name 'scoring' is taken by another model"),
        ("x2&model_name=two", "the name 'two' is that of a model of the repository"),
        ("two&model_name=x2", "the name 'x2' is that of a model of the repository"),
    ],
)
def test_a_taken_name_is_a_conflict(renamed: Gateway, query: str, said: str) -> None:
    status, kind, text = error(register(renamed, query))
    assert (status, kind) == (409, "ConflictStatusException")
    assert said in text
    assert predict(renamed, "scoring", ROW).json["outputs"][0]["data"] == [2, 4, 6, 8]


@pytest.mark.parametrize("name", [".hidden", "a/b", "..", "a%5Cb", "a%00b", "n" * 256])
def test_a_name_that_no_model_can_have_is_refused(explicit: Gateway, name: str) -> None:
    status, _, text = error(register(explicit, f"x2&model_name={name}"))
    assert (status, "cannot be a model's name" in text) == (400, True), text


@pytest.mark.parametrize("name", ["a b", "mod%C3%A8le", "x2.mar"])
def test_any_other_name_is_served(explicit: Gateway, name: str) -> None:
    name = name.replace(" ", "%20")
    assert register(explicit, f"x2&model_name={name}").status == 200
    assert predict(explicit, name, ROW).status == 200
    assert ask(explicit, "DELETE", f"/models/{name}").status == 200


def test_a_name_ends_without_the_others(explicit: Gateway) -> None:
    """Its end is that of a model which is not in the repository."""
    for end in (("DELETE", "/models/first"), ("POST", "/v2/repository/models/first/unload")):
        with registered(explicit, "second"):
            assert register(explicit, "x2&model_name=first").status == 200
            assert ask(explicit, *end).status == 200
            for name in ("second", "x2"):
                assert predict(explicit, name, ROW).json["outputs"][0]["data"] == [2, 4, 6, 8]
        assert error(predict(explicit, "first", ROW))[:2] == (404, "ModelNotFoundException")
        assert ask(explicit, "POST", "/v2/repository/models/first/load").status == 404
        index = ask(explicit, "POST", "/v2/repository/index", b"{}").json
        assert "first" not in {row["name"] for row in index}
    assert error(register(explicit, "second&model_name=first"))[2] == "Model not found at: second"


def test_a_name_serves_a_model_that_is_not_loaded_itself_and_outlives_its_end(
    explicit: Gateway,
) -> None:
    assert error(predict(explicit, "classes", b""))[0] == 404
    with registered(explicit, "sorter", url="classes"):
        assert error(predict(explicit, "classes", b""))[0] == 404
        assert ask(explicit, "GET", "/models/sorter").json[0]["modelUrl"] == "classes.mar"
        assert register(explicit, "classes").status == 200
        assert ask(explicit, "DELETE", "/models/classes").status == 200
        assert ask(explicit, "GET", "/v2/models/sorter/ready").status == 200


def test_a_name_has_workers_versions_and_a_default_of_its_own(explicit: Gateway) -> None:
    def factor(path: str) -> float:
        return float(predict(explicit, path, b"[1, 1, 1, 1]").json[0])

    reply = register(explicit, "two&model_name=pair&initial_workers=2").json["status"]
    assert reply == 'Model "pair" Version: 2 registered with 2 initial workers'
    assert register(explicit, "two&model_name=other").status == 200
    assert ask(explicit, "PUT", "/models/pair/1/set-default").status == 200
    assert (factor("pair"), factor("other"), factor("pair/2")) == (1, 2, 2)
    assert ask(explicit, "PUT", "/models/pair?min_worker=3").status == 202
    rows = {name: ask(explicit, "GET", f"/models/{name}").json for name in ("pair", "other")}
    assert [len(rows[name][0]["workers"]) for name in ("pair", "other")] == [3, 1]
    assert ask(explicit, "DELETE", "/models/other/1").status == 200
    assert ask(explicit, "DELETE", "/models/other").status == 200
    assert factor("pair") == 1
    assert ask(explicit, "DELETE", "/models/pair/2").status == 200
    assert ask(explicit, "DELETE", "/models/pair").status == 200


def test_grpc_registers_a_name_as_rest_does(explicit: Gateway) -> None:
    def manage(method: str, message: object) -> str:
        return str(
            rpc(explicit, MANAGEMENT_SERVICE, method, message, management.ManagementResponse).msg
        )

    asked = management.RegisterModelRequest(
        url="x2.mar", model_name="remote", initial_workers=1, batch_size=2, max_batch_delay=5
    )
    expected = 'Model "remote" Version: 1 registered with 1 initial workers'
    assert manage("RegisterModel", asked) == expected
    with pytest.raises(grpc.RpcError) as refused:
        manage("RegisterModel", management.RegisterModelRequest(url="two", model_name="remote"))
    assert refused.value.code() is grpc.StatusCode.ALREADY_EXISTS  # type: ignore[attr-defined]
    (row,) = json.loads(
        manage("DescribeModel", management.DescribeModelRequest(model_name="remote"))
    )
    assert (row["modelUrl"], row["batchSize"], row["maxBatchDelay"]) == ("x2.mar", 2, 5)
    assert (
        json.loads(call(explicit, "Predictions", "remote", ROW).prediction)["model_name"]
        == "remote"
    )
    gone = manage("UnregisterModel", management.UnregisterModelRequest(model_name="remote"))
    assert gone == 'Model "remote" unregistered'


# -- the other parameters ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("query", "size", "delay"),
    [
        ("", 8, 0),
        ("batch_size=4&max_batch_delay=20", 4, 20),
        ("batch_size=1", 1, 100),
        ("max_batch_delay=7", 8, 7),
        ("batch_size=4&initial_workers=2", 4, 100),
        ("batch_size=no", 8, 0),
    ],
)
def test_a_registration_sets_batches_until_its_end(
    explicit: Gateway, query: str, size: int, delay: int
) -> None:
    assert register(explicit, f"x2&model_name=batched&{query}").status == 200
    (row,) = ask(explicit, "GET", "/models/batched").json
    assert (row["batchSize"], row["maxBatchDelay"]) == (size, delay)
    assert len(row["workers"]) == (2 if "initial_workers=2" in query else 1)
    config = ask(explicit, "GET", "/v2/models/batched/config").json
    assert config["max_batch_size"] == 8, "clients may send as much as before"
    assert predict(explicit, "batched", ROW).json["outputs"][0]["data"] == [2, 4, 6, 8]
    assert ask(explicit, "DELETE", "/models/batched").status == 200
    assert ask(explicit, "GET", "/models/x2").json[0]["batchSize"] == 8


@pytest.mark.parametrize(
    ("query", "said"),
    [
        ("batch_size=9", "batch_size 9 is more than the largest batch of model NAME, 8; set max_"),
        ("batch_size=0", "batch_size must be at least 1, not 0"),
        ("max_batch_delay=-1", "max_batch_delay must not be negative: -1"),
        ("handler=image_classifier", "Parameter handler must be empty"),
        ("initial_workers=1000000", "instance"),
    ],
)
@pytest.mark.parametrize(("url", "name"), [("x2", "failing"), ("three", "three")])
def test_a_registration_that_cannot_be_obeyed_leaves_no_model(
    explicit: Gateway, query: str, said: str, url: str, name: str
) -> None:
    ask(explicit, "DELETE", f"/models/{name}")  # tests of another file may have loaded it
    status, kind, text = error(register(explicit, f"{url}&model_name={name}&{query}"))
    assert (status, kind) == (400, "BadRequestException"), text
    assert said.replace("NAME", name) in text
    assert error(predict(explicit, name, ROW))[0] == 404


def test_a_time_limit_that_has_no_effect_is_noted(explicit: Gateway) -> None:
    reply = register(explicit, "x2&model_name=slow&response_timeout=5").json["status"]
    assert reply.startswith('Model "slow" Version: 1 registered with 1 initial workers; response_')
    assert ask(explicit, "DELETE", "/models/slow").status == 200
