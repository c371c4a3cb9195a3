"""A second gateway as the TensorFlow Serving server, over PredictionService and REST."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from tests.conformance import repository
from tests.conformance.clients import CALLERS, Ask, InferCaller, Output, bits, samples
from tests.server import Gateway, serving
from tests.upstream import fronting, table

HOPS = ("grpc", "http")
#: Not in TensorFlow Serving's JSON.
GRPC_ONLY = ("FP16", "BF16", "UINT16")
MODELS = ("add_and_subtract", "fixed", "scalar", "failing", "two_versions", "slow")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = repository.build(tmp_path_factory.mktemp("tfserving") / "models")
    label = 'parameters { key: "version_label.stable" value { string_value: "1" } }'
    with (root / "two_versions" / "config.pbtxt").open("a") as file:
        file.write(f"\n{label}\n")
    return root


@pytest.fixture(scope="module")
def upstream(root: Path) -> Iterator[Gateway]:
    with serving(root) as gateway:
        yield gateway


def address(upstream: Gateway, hop: str) -> list[str]:
    return [upstream.grpc if hop == "grpc" else upstream.http]


@pytest.fixture(scope="module")
def front(upstream: Gateway, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    folder = tmp_path_factory.mktemp("front")
    scalar = folder / "scalar.pbtxt"
    scalar.write_text(
        "max_batch_size: 8 "
        "input { name: 'x' data_type: TYPE_FP32 dims: 1 reshape { shape: [] } } "
        "output { name: 'y' data_type: TYPE_FP32 dims: 1 reshape { shape: [] } }"
    )
    tables = []
    for hop in HOPS:
        for model in (*repository.IDENTITY.values(), *MODELS):
            if hop == "http" and model.removeprefix("identity_").upper() in GRPC_ONLY:
                continue
            keys = {"config": str(scalar)} if model == "scalar" else {}
            tables.append(
                table(
                    f"{hop}_{model}",
                    address(upstream, hop),
                    backend="tfserving",
                    protocol=hop,
                    model=model,
                    **keys,
                )
            )
        keys = {"backend": "tfserving", "protocol": hop, "model": "two_versions"}
        tables.append(table(f"{hop}_pinned", address(upstream, hop), version="1", **keys))
        tables.append(table(f"{hop}_stable", address(upstream, hop), label="stable", **keys))
    with fronting(folder, *tables) as gateway:
        yield gateway


@pytest.fixture(scope="module")
def caller(front: Gateway) -> Iterator[InferCaller]:
    with asyncio.Runner() as runner:
        opened = CALLERS["grpc"](front, runner)
        yield opened
        opened.close()


CASES = [
    (hop, d) for hop in HOPS for d in repository.IDENTITY if hop == "grpc" or d not in GRPC_ONLY
]


@pytest.mark.parametrize(("hop", "datatype"), CASES)
def test_every_datatype_arrives_bit_by_bit(caller: InferCaller, hop: str, datatype: str) -> None:
    x = samples()[datatype]
    if datatype in ("FP32", "FP64"):
        wild = np.array([[np.nan, np.inf], [-np.inf, 1e-30]], x.dtype)
        result = caller.infer(Ask(f"{hop}_{repository.IDENTITY[datatype]}", [("x", wild)]))
        np.testing.assert_array_equal(result.arrays["y"], wild)
    result = caller.infer(Ask(f"{hop}_{repository.IDENTITY[datatype]}", [("x", x)]))
    assert result.datatypes == {"y": datatype}
    assert bits(result.arrays["y"]) == bits(x)


@pytest.mark.parametrize("hop", HOPS)
def test_random_floats_arrive_bit_by_bit(caller: InferCaller, hop: str) -> None:
    chance = np.random.default_rng(2)
    x = chance.integers(0, 2**32, (2, 20_000), np.uint32).view(np.float32)
    x[~np.isfinite(x)] = 0.5
    result = caller.infer(Ask(f"{hop}_identity_fp32", [("x", x)]))
    assert bits(result.arrays["y"]) == bits(x)


@pytest.mark.parametrize("hop", HOPS)
def test_outputs_come_in_the_order_asked_and_only_those(caller: InferCaller, hop: str) -> None:
    a, b = np.full((1, 2), 3, np.float32), np.full((1, 2), 1, np.float32)
    for names in (["difference", "total"], ["difference"], ["total"]):
        outputs = [Output(name) for name in names]
        result = caller.infer(Ask(f"{hop}_add_and_subtract", [("b", b), ("a", a)], outputs=outputs))
        assert list(result.arrays) == names
        assert all(result.arrays[n].max() == {"total": 4, "difference": 2}[n] for n in names)


@pytest.mark.parametrize("hop", HOPS)
@pytest.mark.parametrize(("model", "shape"), [("scalar", (3, 1)), ("fixed", (2, 3))])
def test_shapes_of_the_model_are_sent_where_the_wires_differ(
    caller: InferCaller, hop: str, model: str, shape: tuple[int, ...]
) -> None:
    x = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    assert bits(caller.infer(Ask(f"{hop}_{model}", [("x", x)])).arrays["y"]) == bits(x)


@pytest.mark.parametrize("hop", HOPS)
def test_every_version_that_is_available_is_served(caller: InferCaller, hop: str) -> None:
    x = np.ones((1, 4), np.float32)
    for number, factor in repository.FACTORS.items():
        result = caller.infer(Ask(f"{hop}_two_versions", [("x", x)], version=str(number)))
        assert (result.version, result.arrays["y"].max()) == (str(number), factor)


@pytest.mark.parametrize("hop", HOPS)
@pytest.mark.parametrize("kind", ["pinned", "stable"])
def test_the_routes_version_or_label_is_the_one_asked(
    caller: InferCaller, hop: str, kind: str
) -> None:
    result = caller.infer(Ask(f"{hop}_{kind}", [("x", np.ones((1, 4), np.float32))]))
    assert (result.version, result.arrays["y"].max()) == ("1", repository.FACTORS[1])


@pytest.mark.parametrize("hop", HOPS)
def test_an_error_of_the_model_arrives_as_one(caller: InferCaller, hop: str) -> None:
    error = caller.refusal(Ask(f"{hop}_failing", [("x", np.ones((1, 4), np.float32))]))
    assert "the model failed on purpose" in str(error.message())
    assert "INTERNAL" in str(error.status())


@pytest.mark.parametrize("hop", HOPS)
def test_a_clients_timeout_ends_the_request_at_its_time(caller: InferCaller, hop: str) -> None:
    ask = Ask(f"{hop}_slow", [("x", np.ones((1, 1), np.int64))], timeout_microseconds=100_000)
    assert "Request timeout expired" in str(caller.refusal(ask).message())


def test_metadata_is_the_signatures(front: Gateway) -> None:
    for hop in HOPS:
        document = httpx.get(f"http://{front.http}/v2/models/{hop}_add_and_subtract").json()
        assert {t["name"]: (t["datatype"], t["shape"]) for t in document["inputs"]} == {
            "a": ("FP32", [-1, -1]),
            "b": ("FP32", [-1, -1]),
        }


def test_what_json_lacks_is_refused_when_the_model_loads(upstream: Gateway, tmp_path: Path) -> None:
    keys = {"backend": "tfserving", "protocol": "http"}
    routes = [table(f"identity_{d.lower()}", [upstream.http], **keys) for d in GRPC_ONLY]
    with fronting(tmp_path, *routes) as gateway:
        index = httpx.post(f"http://{gateway.http}/v2/repository/index").json()
    assert all('set protocol = "grpc"' in row["reason"] for row in index), index


def test_a_model_that_is_not_there_says_so(upstream: Gateway, tmp_path: Path) -> None:
    routes = [
        table(hop, address(upstream, hop), backend="tfserving", protocol=hop, model="nobody")
        for hop in HOPS
    ]
    with fronting(tmp_path, *routes) as gateway:
        for hop in HOPS:
            answer = httpx.post(f"http://{gateway.http}/v2/models/{hop}/infer", json={"inputs": []})
            assert answer.status_code >= 400, answer.text


@pytest.mark.parametrize("hop", HOPS)
def test_a_server_that_is_killed_is_503_with_the_reason_at_once(
    root: Path, tmp_path: Path, hop: str
) -> None:
    with serving(root) as upstream:
        keys = {"backend": "tfserving", "protocol": hop}
        with fronting(tmp_path, table("fixed", address(upstream, hop), **keys)) as front:
            url = f"http://{front.http}/v2/models/fixed/infer"
            data = {"name": "x", "datatype": "FP32", "shape": [2, 3], "data": [0.5] * 6}
            assert httpx.post(url, json={"inputs": [data]}).status_code == 200
            upstream.process.kill()
            upstream.process.wait()
            answer = httpx.post(url, json={"inputs": [data]})
            assert answer.status_code == 503, answer.text
            assert "the server that runs 'fixed'" in answer.json()["error"]


def test_what_the_signature_forbids_never_reaches_the_server(caller: InferCaller) -> None:
    with pytest.raises(InferenceServerException, match="data-type"):
        caller.infer(Ask("grpc_fixed", [("x", np.ones((2, 3), np.int64))]))
