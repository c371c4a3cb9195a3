"""A second gateway as the upstream, over both of its protocols: every value arrives bit by bit.

``make upstream`` runs the conformance suite through such a hop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest

from tests.conformance import repository
from tests.conformance.clients import CALLERS, Ask, InferCaller, Output, bits, samples
from tests.server import Gateway, serving
from tests.upstream import fronting, table

MODELS = (*repository.IDENTITY.values(), "add_and_subtract", "fixed", "scalar", "failing",
          "two_versions", "slow", "scores")  # fmt: skip
HOPS = ("grpc", "http")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return repository.build(tmp_path_factory.mktemp("triton") / "models")


@pytest.fixture(scope="module")
def upstream(root: Path) -> Iterator[Gateway]:
    with serving(root) as gateway:
        yield gateway


def tables(upstream: Gateway, prefix: str = "") -> list[str]:
    return [
        table(
            f"{prefix}{hop}_{model}",
            [upstream.grpc if hop == "grpc" else upstream.http],
            protocol=hop,
            model=model,
        )
        for model in MODELS
        for hop in HOPS
    ]


@pytest.fixture(scope="module")
def front(upstream: Gateway, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    with fronting(tmp_path_factory.mktemp("front"), *tables(upstream)) as gateway:
        yield gateway


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as created:
        yield created


@pytest.fixture(scope="module", params=["http", "grpc"])
def caller(
    request: pytest.FixtureRequest, front: Gateway, runner: asyncio.Runner
) -> Iterator[InferCaller]:
    opened = CALLERS[request.param](front, runner)
    yield opened
    opened.close()


@pytest.mark.parametrize("hop", HOPS)
@pytest.mark.parametrize("datatype", repository.IDENTITY)
def test_every_datatype_arrives_bit_by_bit(caller: InferCaller, hop: str, datatype: str) -> None:
    x = samples()[datatype]
    result = caller.infer(Ask(f"{hop}_{repository.IDENTITY[datatype]}", [("x", x)]))
    assert result.datatypes == {"y": datatype}
    assert bits(result.arrays["y"]) == bits(x)


@pytest.mark.parametrize("hop", HOPS)
def test_a_tensor_without_elements_and_one_of_megabytes_arrive(
    caller: InferCaller, hop: str
) -> None:
    for columns in (0, 1_500_000):
        x = np.random.default_rng(1).random((2, columns), np.float32)
        result = caller.infer(Ask(f"{hop}_identity_fp32", [("x", x)]))
        assert bits(result.arrays["y"]) == bits(x)


@pytest.mark.parametrize("hop", HOPS)
def test_outputs_come_in_the_order_asked_and_only_those(caller: InferCaller, hop: str) -> None:
    a, b = np.full((1, 2), 3, np.float32), np.full((1, 2), 1, np.float32)
    for names in (["difference", "total"], ["difference"], ["total"]):
        ask = Ask(
            f"{hop}_add_and_subtract", [("b", b), ("a", a)],
            outputs=[Output(name) for name in names], request_id="42",
        )  # fmt: skip
        result = caller.infer(ask)
        assert list(result.arrays) == names
        assert all(result.arrays[n].max() == {"total": 4, "difference": 2}[n] for n in names)
        assert (result.id, result.model) == ("42", f"{hop}_add_and_subtract")


@pytest.mark.parametrize("hop", HOPS)
@pytest.mark.parametrize(("model", "shape"), [("scalar", (3, 1)), ("fixed", (2, 3))])
def test_the_servers_own_reshape_and_a_model_without_batches(
    caller: InferCaller, hop: str, model: str, shape: tuple[int, ...]
) -> None:
    x = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    assert bits(caller.infer(Ask(f"{hop}_{model}", [("x", x)])).arrays["y"]) == bits(x)


@pytest.mark.parametrize("hop", HOPS)
def test_every_version_that_the_server_has_is_served(caller: InferCaller, hop: str) -> None:
    x = np.ones((1, 4), np.float32)
    for number, factor in repository.FACTORS.items():
        result = caller.infer(Ask(f"{hop}_two_versions", [("x", x)], version=str(number)))
        assert (result.version, result.arrays["y"].max()) == (str(number), factor)


@pytest.mark.parametrize("hop", HOPS)
def test_an_error_of_the_model_keeps_its_code_and_text(
    caller: InferCaller, upstream: Gateway, runner: asyncio.Runner, hop: str
) -> None:
    direct = CALLERS["http" if caller.transport == "http" else "grpc"](upstream, runner)
    x = np.ones((1, 4), np.float32)
    wanted, got = (
        direct.refusal(Ask("failing", [("x", x)])),
        caller.refusal(Ask(f"{hop}_failing", [("x", x)])),
    )
    direct.close()
    assert (got.status(), got.message()) == (wanted.status(), wanted.message())


@pytest.mark.parametrize("hop", HOPS)
def test_a_clients_timeout_ends_the_request_at_its_time(caller: InferCaller, hop: str) -> None:
    ask = Ask(f"{hop}_slow", [("x", np.ones((1, 1), np.int64))], timeout_microseconds=100_000)
    assert "Request timeout expired" in str(caller.refusal(ask).message())


@pytest.mark.parametrize("hop", HOPS)
def test_what_the_signature_forbids_never_reaches_the_server(caller: InferCaller, hop: str) -> None:
    too_many = Ask(f"{hop}_identity_fp32", [("x", np.ones((9, 1), np.float32))])
    assert "batch-size must be <= 8" in str(caller.refusal(too_many).message())


def test_the_front_describes_the_model_as_its_server_does(
    front: Gateway, upstream: Gateway
) -> None:
    for model in ("add_and_subtract", "scalar", "fixed"):
        for path in ("", "/config"):
            theirs = httpx.get(f"http://{upstream.http}/v2/models/{model}{path}").json()
            for hop in HOPS:
                ours = httpx.get(f"http://{front.http}/v2/models/{hop}_{model}{path}").json()
                for key in ("inputs", "outputs", "platform", "versions", "input", "output",
                            "max_batch_size"):  # fmt: skip
                    assert ours.get(key) == theirs.get(key), (model, key)


# -- where the repository and the server both speak ------------------------------------------------

SCALAR = """
backend: "{backend}"
max_batch_size: {batch}
input {{ name: "x" data_type: TYPE_{datatype} dims: 1 reshape {{ shape: [] }} }}
output {{ name: "y" data_type: TYPE_{datatype} dims: 1 reshape {{ shape: [] }} }}
"""


@pytest.mark.parametrize(
    ("batch", "datatype", "served"),
    [
        (8, "FP32", True),
        (2, "FP32", True),
        (0, "FP32", False),
        (16, "FP32", False),
        (8, "INT32", False),
    ],
)
def test_the_repositorys_configuration_and_the_server_must_agree(
    upstream: Gateway, tmp_path: Path, batch: int, datatype: str, served: bool
) -> None:
    """The configuration reshapes, and so does the server: what travels is the wire's shape."""
    own = tmp_path / "own"
    (own / "scalar" / "1").mkdir(parents=True)
    text = SCALAR.format(backend="onnxruntime", batch=batch, datatype=datatype)
    (own / "scalar" / "config.pbtxt").write_text(text)
    routes = [table("scalar", [upstream.grpc])]
    with fronting(tmp_path / "front", *routes, repository=own) as front:
        rows = httpx.post(f"http://{front.http}/v2/repository/index").json()
        assert (rows[0]["state"] == "READY") is served, rows
        if not served:
            assert rows[0]["reason"]
            return
        body = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [2, 1], "data": [1, 2]}]}
        reply = httpx.post(f"http://{front.http}/v2/models/scalar/infer", json=body).json()
        assert reply["outputs"][0]["shape"] == [2, 1]
        assert reply["outputs"][0]["data"] == [1, 2]
