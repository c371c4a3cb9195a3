"""Streams through a gateway in front of another: over Triton's protocol and over TorchServe's."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import grpc
import httpx
import pytest

from tests import models
from tests.conformance import decoupled, wire
from tests.conformance.clients import TIMEOUT_SECONDS
from tests.conformance.decoupled import BROKEN, POLICY
from tests.conformance.test_decoupled import VALUES, message, statistics
from tests.polling import PROMPT_SECONDS, eventually
from tests.server import Gateway, serving
from tests.upstream import fronting, table

RAW = models.config("", ["data BYTES 1"], ["output BYTES 1"], 0, "torchserve").replace(
    'name: ""\n', ""
)
ROUTED = ("repeat", "trickle", "endless", "wide", "silent", "breaking", "once", "staged")


@pytest.fixture(scope="module")
def hop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Gateway, Gateway]]:
    """The front, and the one behind it, of these tests alone: one of them kills it."""
    work = tmp_path_factory.mktemp("hop")
    raw = work / "raw.pbtxt"
    raw.write_text(RAW + POLICY)
    with serving(decoupled.build(work / "models")) as behind:
        tables = [table(name, [behind.grpc], protocol="grpc") for name in ROUTED]
        tables.append(table("patient", [behind.grpc], model="endless", timeout_seconds=0.5))
        tables.append(table("late", [behind.grpc], model="late", timeout_seconds=0.2))
        for protocol, address in (("grpc", behind.grpc), ("http", behind.http)):
            keys = {"backend": "torchserve", "protocol": protocol, "config": str(raw)}
            tables += [
                table(f"{protocol}_{model}", [address], model=model, **keys)
                for model in ("talker", "babbler", "gossip")
            ]
        tables.append(table("unary", [behind.http], model="repeat", protocol="http"))
        flags = ("--strict-readiness", "false")
        with fronting(work / "front", *tables, flags=flags) as front:
            yield front, behind


@pytest.fixture(scope="module")
def front(hop: tuple[Gateway, Gateway]) -> Gateway:
    return hop[0]


@pytest.fixture(scope="module")
def behind(hop: tuple[Gateway, Gateway]) -> Gateway:
    return hop[1]


def ask(gateway: Gateway, *messages: Any, timeout: float = TIMEOUT_SECONDS) -> list[Any]:
    with wire.stub(gateway.grpc) as stub:
        return list(stub.ModelStreamInfer(iter(messages), timeout=timeout))


def events(gateway: Gateway, model: str, **body: Any) -> list[Any]:
    url = f"http://{gateway.http}/v2/models/{model}/generate_stream"
    text = httpx.post(url, json=body, timeout=30).text
    return [json.loads(part.removeprefix("data: ")) for part in text.split("\n\n") if part]


def test_responses_are_the_same_through_the_hop(front: Gateway, behind: Gateway) -> None:
    for model in ("repeat", "silent", "breaking", "staged"):
        asked = message(model, "7")
        asked.parameters["triton_enable_empty_final_response"].bool_param = True
        assert ask(front, asked) == ask(behind, asked), model
    said = ask(front, message("breaking"))[-1].error_message
    assert said == BROKEN
    assert [event["y"] for event in events(front, "repeat", x=VALUES)] == [VALUES] * 3


def test_the_policy_of_the_server_behind_is_known(front: Gateway) -> None:
    url = f"http://{front.http}/v2/models"
    config = httpx.get(f"{url}/repeat/config").json()
    assert config["model_transaction_policy"] == {"decoupled": True}
    refused = httpx.post(f"{url}/repeat/generate", json={"x": VALUES})
    assert refused.json()["error"].startswith("generate expects model to produce exactly 1")


def test_the_first_response_does_not_wait_for_the_last(front: Gateway) -> None:
    with wire.stub(front.grpc) as stub:
        answers = stub.ModelStreamInfer(iter([message("trickle")]), timeout=TIMEOUT_SECONDS)
        assert next(answers).error_message == ""
        answers.cancel()


def failures(gateway: Gateway, model: str) -> int:
    return int(statistics(gateway, model)["inference_stats"]["fail"]["count"])


def test_a_client_that_goes_stops_the_work_behind(front: Gateway, behind: Gateway) -> None:
    before = failures(behind, "endless")
    with wire.stub(front.grpc) as stub:
        call = stub.ModelStreamInfer(iter([message("endless")]), timeout=TIMEOUT_SECONDS)
        next(call)
        call.cancel()
    eventually(lambda: failures(behind, "endless") == before + 1, seconds=PROMPT_SECONDS)
    url = f"http://{front.http}/v2/models/endless/generate_stream"
    with httpx.stream("POST", url, json={"x": VALUES}) as reply:
        next(reply.iter_lines())
    eventually(lambda: failures(behind, "endless") == before + 2, seconds=PROMPT_SECONDS)


def test_the_deadline_reaches_the_server_behind(front: Gateway, behind: Gateway) -> None:
    before = failures(behind, "endless")
    answers = ask(front, message("endless", timeout=200_000))
    assert answers[-1].error_message == "Request timeout expired"
    eventually(lambda: failures(behind, "endless") == before + 1, seconds=PROMPT_SECONDS)


def test_a_slow_reader_holds_up_the_server_behind(front: Gateway, behind: Gateway) -> None:
    with wire.stub(front.grpc) as stub:
        asked = message("wide", width=250_000)  # a megabyte each, a gigabyte in all
        call = stub.ModelStreamInfer(iter([asked]), timeout=TIMEOUT_SECONDS)
        next(call)
        for _ in range(50):  # exchanges, while nothing is read
            made = len(statistics(behind, "wide")["response_stats"])
        assert made < 150
        call.cancel()


def test_the_routes_timeout_is_for_each_response(front: Gateway) -> None:
    """A stream that goes on is longer than that; one that stands still is not."""
    with wire.stub(front.grpc) as stub:
        call = stub.ModelStreamInfer(iter([message("patient")]), timeout=1.2)
        answers: list[Any] = []
        with pytest.raises(grpc.RpcError, match="DEADLINE_EXCEEDED"):
            answers.extend(call)
        assert [answer.error_message for answer in answers] == [""] * len(answers)
    (answer,) = ask(front, message("late"))
    assert answer.error_message == "Request timeout expired"


def test_a_protocol_without_streams_does_not_load_a_decoupled_model(front: Gateway) -> None:
    url = f"http://{front.http}/v2/repository/index"
    (row,) = [row for row in httpx.post(url).json() if row["name"] == "unary"]
    assert row["state"] == "UNAVAILABLE"
    assert 'set protocol = "grpc" in its route' in row["reason"]


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_torchserves_streams_come_part_by_part(front: Gateway, protocol: str) -> None:
    assert [e["output"] for e in events(front, f"{protocol}_talker", data="hi")] == ["hi"] * 3
    reply = httpx.post(f"http://{front.http}/predictions/{protocol}_talker", content=b"\x00\xff")
    assert reply.content == b"\x00\xff" * 3


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_torchserves_streams_are_cancelled_behind(
    front: Gateway, behind: Gateway, protocol: str
) -> None:
    before = failures(behind, "babbler")
    url = f"http://{front.http}/v2/models/{protocol}_babbler/generate_stream"
    with httpx.stream("POST", url, json={"data": "x"}) as reply:
        next(reply.iter_lines())
    eventually(lambda: failures(behind, "babbler") == before + 1, seconds=PROMPT_SECONDS)


@pytest.mark.parametrize(
    ("protocol", "said"),
    [("grpc", BROKEN), ("http", "returned an invalid response: it is truncated")],
)
def test_a_stream_of_torchserves_that_fails_is_no_whole_one(
    front: Gateway, protocol: str, said: str
) -> None:
    *good, last = events(front, f"{protocol}_gossip", data="x")
    assert [event["output"] for event in good] == ["x", "x"]
    assert said in last["error"]


def test_a_server_that_dies_ends_its_streams(front: Gateway, behind: Gateway) -> None:
    with wire.stub(front.grpc) as stub:
        call = stub.ModelStreamInfer(iter([message("endless")]), timeout=TIMEOUT_SECONDS)
        next(call)
        behind.process.kill()
        *_, last = call
    assert "the server that runs 'endless'" in last.error_message
