"""``Client.stream`` and ``Client.statistics``, over HTTP and gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import numpy as np
import pytest

import modelport
from modelport import client_streams
from tests.conformance import decoupled

X = np.arange(4, dtype=np.float32)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[modelport.Server]:
    with modelport.testing.serve(decoupled.build(tmp_path_factory.mktemp("models"))) as running:
        yield running


@pytest.fixture(params=["http", "grpc"])
def url(request: pytest.FixtureRequest, server: modelport.Server) -> str:
    return server.http_url if request.param == "http" else server.grpc_url


def test_a_stream_has_every_response_of_a_decoupled_model(url: str) -> None:
    with modelport.Client(url) as client:
        [shape] = [tensor.shape for tensor in client.metadata("repeat").inputs]
        x = X.reshape([1 if size == -1 else size for size in shape])
        [output] = [tensor.name for tensor in client.metadata("repeat").outputs]
        [name] = [tensor.name for tensor in client.metadata("repeat").inputs]
        found = list(client.stream("repeat", {name: x}))
        assert len(found) == 3
        for response in found:
            assert response[output].dtype == np.float32
            assert response[output].tolist() == x.tolist()
        five = client.stream("repeat", {name: x}, parameters={"responses": 5}, request_id="r")
        assert len(list(five)) == 5
        assert list(client.stream("silent", {name: x})) == []
        assert [r[output].tolist() for r in client.stream("once", {name: x})] == [x.tolist()]
        words = np.array(["é\n\n"]).reshape([1 if s == -1 else s for s in _shape(client, "talker")])
        told = [r[output].ravel().tolist() for r in client.stream("talker", {name: words})]
        assert told == [["é\n\n".encode()]] * 3


def _shape(client: modelport.Client, model: str) -> tuple[int, ...]:
    return client.metadata(model).inputs[0].shape


def test_responses_arrive_while_the_model_goes_on_and_leaving_the_loop_cancels_it(
    url: str,
) -> None:
    """A client that collected the responses first would never return."""
    with modelport.Client(url) as client:
        x = X.reshape([1 if size == -1 else size for size in _shape(client, "endless")])
        name = client.metadata("endless").inputs[0].name
        for number, _ in enumerate(client.stream("endless", {name: x})):
            if number == 5:
                break
        running = client.stream("endless", {name: x})
        next(running)
        running.close()
        assert client.ready("endless")
        left = client.stream("endless", {name: x})
        next(left)
    with pytest.raises(modelport.InvalidArgument, match="closed"):
        next(left)


def test_an_error_ends_a_stream_after_the_responses_before_it(url: str) -> None:
    with modelport.Client(url) as client:
        x = X.reshape([1 if size == -1 else size for size in _shape(client, "breaking")])
        name = client.metadata("breaking").inputs[0].name
        found = client.stream("breaking", {name: x})
        assert len([next(found), next(found)]) == 2
        with pytest.raises(modelport.ModelportError, match=decoupled.BROKEN):
            next(found)
        with pytest.raises(modelport.ModelportError, match=decoupled.BROKEN):
            list(client.stream("broken", {name: x}))
        with pytest.raises(modelport.InvalidArgument, match="has no input 'z'"):
            next(client.stream("repeat", {"z": x}))
        with pytest.raises(modelport.NotFound, match="'another'"):
            next(client.stream("another", {name: x}))
    impatient = modelport.Client(url, timeout_seconds=0.5)
    with impatient, pytest.raises(modelport.TimedOut, match=r"within 0\.5 s"):
        list(impatient.stream("late", {name: x}))
    lonely = modelport.Client(url.partition("://")[0] + "://127.0.0.1:1")
    with lonely, pytest.raises(modelport.Unavailable, match="no server responds"):
        next(lonely.stream("repeat", {name: x}))


def test_an_asynchronous_client_has_several_streams_under_way(url: str) -> None:
    async def main() -> list[int]:
        async with modelport.AsyncClient(url) as client:
            [tensor] = (await client.metadata("repeat")).inputs
            x = X.reshape([1 if size == -1 else size for size in tensor.shape])

            async def count(responses: int) -> int:
                parameters = {"responses": responses}
                stream = client.stream("repeat", {tensor.name: x}, parameters=parameters)
                return len([response async for response in stream])

            return await asyncio.gather(*map(count, range(1, 8)))

    assert asyncio.run(main()) == list(range(1, 8))


def test_statistics_count_requests_rows_and_times_alike_in_both_protocols(
    server: modelport.Server, url: str
) -> None:
    with modelport.Client(url) as client:
        x = X.reshape([1 if size == -1 else size for size in _shape(client, "once")])
        name = client.metadata("once").inputs[0].name
        [before] = client.statistics("once")
        for _ in range(3):
            client.infer("once", {name: x})
        [after] = client.statistics("once", 1)
        assert (after.name, after.version) == ("once", "1")
        assert after.execution_count - before.execution_count == 3
        counts = [s.inference_stats["success"].count for s in (before, after)]
        assert counts[1] - counts[0] == 3
        assert after.inference_stats["success"].ns > 0
        assert set(after.inference_stats) >= {"success", "fail", "queue", "cache_hit"}
        assert {row.name for row in client.statistics()} >= {"once", "repeat", "endless"}
        with pytest.raises(modelport.NotFound, match="'another'"):
            client.statistics("another")
        with modelport.Client(server.http_url) as other:
            assert other.statistics("once") == client.statistics("once")


class Pieces:
    """A response whose bytes arrive in these pieces."""

    def __init__(self, content: bytes, size: int) -> None:
        self._pieces = [content[i : i + size] for i in range(0, len(content), size)]

    async def readany(self) -> bytes:
        return self._pieces.pop(0) if self._pieces else b""


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
async def test_events_are_whole_however_they_arrive(size: int) -> None:
    content = b': comment\n\ndata: {"a": 1}\n\nid: 7\ndata:{}\n\ndata: 1\ndata: 2\n\n'
    found = [event async for event in client_streams.events(Pieces(content, size))]
    assert found == [b'{"a": 1}', b"{}", b"1\n2"]
    with pytest.raises(modelport.ModelportError, match="ends within an event"):
        async for _ in client_streams.events(Pieces(content + b"data: {", size)):
            pass
