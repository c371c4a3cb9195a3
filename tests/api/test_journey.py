"""The public interface from a checkpoint to answers: export, verify, serve, ask, stop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import modelport
from tests.api.linear import Linear


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Linear]:
    folder = tmp_path_factory.mktemp("journey")
    torch.manual_seed(0)
    net = Linear().eval()
    torch.save(net.state_dict(), folder / "net.pt")
    stages: list[str] = []
    [result] = modelport.export(
        folder / "net.pt",
        model="tests.api.linear:Linear",
        input=["x:FP32[4]"],
        output_name=["y"],
        name="linear",
        repository=str(folder / "models"),
        samples=20,
        progress=lambda stage, done, total: stages.append(stage),
    )
    assert (result.name, result.format, result.version) == ("linear", "onnx", 1)
    assert result.path == folder / "models" / "linear" / "1"
    assert result.proof.report.max_abs_error < 1e-5
    assert "onnx: proving" in stages
    return folder, net


@pytest.fixture(scope="module")
def server(exported: tuple[Path, Linear]) -> Iterator[modelport.Server]:
    with modelport.testing.serve(exported[0] / "models") as running:
        yield running


@pytest.fixture(params=["http", "grpc"])
def url(request: pytest.FixtureRequest, server: modelport.Server) -> str:
    return server.http_url if request.param == "http" else server.grpc_url


def test_a_published_version_is_verified_and_proven_again(exported: tuple[Path, Linear]) -> None:
    folder, _ = exported
    found = modelport.verify(
        folder / "models" / "linear", checkpoint=folder / "net.pt", model="tests.api.linear:Linear"
    )
    assert (found.checked.model, found.checked.number) == ("linear", 1)
    assert found.proven is not None
    assert found.proven.report.samples >= 20
    assert modelport.verify(folder / "models" / "linear" / "1", integrity=True).proven is None


def test_what_was_changed_after_publishing_is_an_integrity_error(
    exported: tuple[Path, Linear], tmp_path: Path
) -> None:
    version = tmp_path / "linear" / "1"
    version.mkdir(parents=True)
    for file in (exported[0] / "models" / "linear" / "1").iterdir():
        (version / file.name).write_bytes(file.read_bytes())
    (version / "model.onnx").write_bytes(b"another")
    with pytest.raises(modelport.IntegrityError, match=r"model\.onnx"):
        modelport.verify(version, integrity=True)


def test_a_wrong_argument_is_an_error_that_names_it(exported: tuple[Path, Linear]) -> None:
    folder, _ = exported
    for wrong, words in (
        ({"atol": float("nan")}, "--atol must be a finite number"),
        ({"samples": 0}, "--samples must be at least 1, not 0"),
        ({"model_version": "01"}, "--model-version '01' is not a version"),
        ({"formats": "onnx"}, "the argument 'formats' is 'format' now"),
        ({"format": "coreml"}, "--format 'coreml' is not supported"),
        ({"repository": "ftp://host/models"}, "'ftp://' is not supported"),
    ):
        with pytest.raises(modelport.ModelportError, match=words):
            modelport.export(folder / "net.pt", **wrong)  # type: ignore[arg-type]
    with pytest.raises(modelport.InvalidArgument, match="does not exist"):
        modelport.export(folder / "absent.pt")
    with pytest.raises(modelport.InvalidArgument, match="--integrity does not repeat the proof"):
        modelport.verify(folder, integrity=True, trust=True)


def test_a_client_gets_the_models_own_answers(
    exported: tuple[Path, Linear], server: modelport.Server, url: str
) -> None:
    x = np.arange(8, dtype=np.float32).reshape(2, 4)
    expected = exported[1](torch.from_numpy(x)).detach().numpy()
    with modelport.Client(url) as client:
        assert client.live()
        assert client.ready()
        assert client.ready("linear", 1)
        assert not client.ready("another")
        assert client.models() == [modelport.ModelStatus("linear", "1", "READY", "")]
        described = client.metadata("linear")
        assert described.versions == ("1",)
        assert [tuple(tensor) for tensor in described.inputs] == [("x", "FP32", (-1, 4))]
        assert client.config("linear")["name"] == "linear"
        for given in (x, x.tolist(), x.astype(np.float64)):
            answer = client.infer("linear", {"x": given}, outputs=["y"], request_id="7")
            assert list(answer) == ["y"]
            np.testing.assert_allclose(answer["y"], expected, rtol=1e-5)
        top = client.infer("linear", {"x": x}, class_count=1)["y"]
        assert top.shape == (2, 1)
        assert top[0, 0].endswith(b":%d" % expected[0].argmax())


def test_an_asynchronous_client_has_many_requests_under_way(
    exported: tuple[Path, Linear], server: modelport.Server, url: str
) -> None:
    inputs = [np.full((1, 4), i, np.float32) for i in range(20)]

    async def main() -> list[dict[str, Any]]:
        async with modelport.AsyncClient(url) as client:
            assert await client.ready("linear")
            assert (await client.metadata("linear")).name == "linear"
            assert (await client.config("linear"))["max_batch_size"] in (8, "8")
            assert [status.state for status in await client.models()] == ["READY"]
            with pytest.raises(modelport.NotFound, match="'another'"):
                await client.infer("another", {"x": inputs[0]})
            return await asyncio.gather(*(client.infer("linear", {"x": x}) for x in inputs))

    for x, answer in zip(inputs, asyncio.run(main()), strict=True):
        expected = exported[1](torch.from_numpy(x)).detach().numpy()
        np.testing.assert_allclose(answer["y"], expected, rtol=1e-5, atol=1e-6)


def test_what_the_server_refuses_is_an_error_of_its_kind(
    server: modelport.Server, url: str
) -> None:
    with modelport.Client(url) as client:
        with pytest.raises(modelport.NotFound, match="'another'"):
            client.metadata("another")
        with pytest.raises(modelport.InvalidArgument, match="has no input 'z'; its inputs are x"):
            client.infer("linear", {"z": [1.0]})
        with pytest.raises(modelport.InvalidArgument, match="input 'x' is not FP32"):
            client.infer("linear", {"x": ["word"]})
        with pytest.raises(modelport.InvalidArgument, match=r"Expected \[-1,4\], got \[1,5\]"):
            client.infer("linear", {"x": np.ones((1, 5), np.float32)})
        assert client.infer("linear", {"x": np.ones((1, 4))})["y"].shape == (1, 2)


def test_a_client_may_be_used_on_another_thread_than_the_server_was_started_on(
    server: modelport.Server,
) -> None:
    answers: list[bool] = []

    def ask() -> None:
        with modelport.Client(server.http_url) as client:
            answers.append(client.ready("linear"))

    asking = threading.Thread(target=ask)
    asking.start()
    asking.join()
    assert answers == [True]
