"""``modelport.Client``: values, threads, event loops, and servers that misbehave."""

from __future__ import annotations

import asyncio
import gc
import json
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import modelport
from modelport import client_models
from tests import models


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[modelport.Server]:
    root = models.repository(tmp_path_factory.mktemp("repository"))
    models.identity(root / "bits" / "1" / "model.onnx", "BF16")
    models.identity(root / "words" / "1" / "model.onnx", "BYTES")
    options: modelport.server.ServeOptions = {"load_model": ["*"]}
    with modelport.testing.serve(root, model_control_mode="explicit", **options) as running:
        yield running


@pytest.fixture(params=["http", "grpc"])
def url(request: pytest.FixtureRequest, server: modelport.Server) -> str:
    return server.http_url if request.param == "http" else server.grpc_url


def test_bfloat16_is_rounded_as_ml_dtypes_rounds_it() -> None:
    chosen = np.random.default_rng(0).integers(0, 2**32, 100_000, dtype=np.uint32)
    special = [0, 0x80000000, 0x7F800000, 0xFF800000, 0x7F7FFFFF, 0x7F800001, 0xFFFFFFFF, 0x18000]
    values = np.concatenate([chosen, np.array(special, np.uint32)]).view(np.float32)
    with np.errstate(all="ignore"):
        expected = values.astype(ml_dtypes.bfloat16)
    bits = client_models._bfloat16(values)
    numbers = ~np.isnan(values)
    assert (bits[numbers] == expected.view(np.uint16)[numbers]).all()
    back = client_models.plain(client_models.Datatype.BF16, bits)
    assert np.isnan(back[~numbers]).all()
    assert np.array_equal(back[numbers], expected.astype(np.float32)[numbers])


def test_values_of_every_kind_come_back(url: str) -> None:
    with modelport.Client(url, headers={"X-Caller": "test"}) as client:
        told = client.infer("bits", {"x": [[1, -2.5, 0.1, 8]]})["y"]
        assert told.tolist() == [[1, -2.5, 0.10009765625, 8]]
        assert told.dtype == np.float32
        words = client.infer("words", {"x": [["a", b"\x00b", "", "é"]]})["y"]
        assert words.tolist() == [[b"a", b"\x00b", b"", "é".encode()]]
        parameters = {"flag": True, "number": 7, "text": "t"}
        x = np.zeros((1, 4), np.float32)
        assert client.infer("x2", {"x": x}, parameters=parameters)["y"].tolist() == x.tolist()


def test_threads_and_a_running_event_loop_may_share_a_client(url: str) -> None:
    with modelport.Client(url) as client:

        def ask(number: int) -> float:
            return float(client.infer("x2", {"x": [[number] * 4]})["y"][0, 0])

        async def main() -> float:
            return ask(7)

        with ThreadPoolExecutor(4) as threads:
            assert list(threads.map(ask, range(20))) == [2.0 * n for n in range(20)]
        assert asyncio.run(main()) == 14.0


def test_models_are_loaded_and_unloaded(url: str) -> None:
    with modelport.Client(url) as client:
        config = client.config("x2")
        client.unload("x2")
        assert not client.ready("x2")
        client.load("x2", config=json.dumps({**config, "max_batch_size": 3}))
        assert int(client.config("x2")["max_batch_size"]) == 3
        client.load("x2")
        assert client.ready("x2")
        with pytest.raises(modelport.NotFound, match="absent"):
            client.load("absent")


def test_a_closed_client_says_so_and_a_forgotten_one_ends_its_thread(url: str) -> None:
    client = modelport.Client(url)
    assert client.live()
    client.close()
    client.close()
    with pytest.raises(modelport.InvalidArgument, match="the client is closed"):
        client.live()
    modelport.Client(url)  # it never connects
    before = threading.active_count()
    forgotten = modelport.Client(url)
    assert forgotten.live()
    assert threading.active_count() == before + 1
    del forgotten
    gc.collect()
    assert threading.active_count() == before


def test_a_program_that_closes_nothing_ends_in_silence(url: str) -> None:
    program = (
        "import logging, modelport\n"
        # Of a step that took long on a busy machine asyncio's development mode warns too.
        "logging.getLogger('asyncio').setLevel(logging.ERROR)\n"
        f"client = modelport.Client({url!r}); assert client.live()"
    )
    done = subprocess.run(
        [sys.executable, "-X", "dev", "-W", "error", "-c", program],
        capture_output=True, text=True, timeout=60, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


class Misbehaving(BaseHTTPRequestHandler):
    """Answers with what ``answers`` has for the path."""

    answers: dict[str, tuple[int, dict[str, str], bytes]] = {}  # noqa: RUF012

    def do_GET(self) -> None:
        length = int(self.headers.get("content-length", 0))
        self.rfile.read(length)
        status, headers, body = self.answers[self.path]
        self.send_response(status)
        for name, value in {"content-length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    do_POST = do_GET  # noqa: N815

    def log_message(self, *_: object) -> None:
        pass


METADATA = {"name": "m", "inputs": [{"name": "x", "datatype": "FP32", "shape": [1]}]}
LENGTH = "Inference-Header-Content-Length"


@pytest.mark.parametrize(
    ("headers", "body"),
    [
        ({}, b"no JSON"),
        ({}, b"[]"),
        ({}, b"{}"),
        ({}, b'{"outputs":[{"name":"y"}]}'),
        ({}, b'{"outputs":[{"name":"y","datatype":"FP1","shape":[1],"data":[1]}]}'),
        ({}, b'{"outputs":[{"name":"y","datatype":"FP32","shape":[-1],"data":[1]}]}'),
        ({}, b'{"outputs":[{"name":"y","datatype":"FP32","shape":[2],"data":[1]}]}'),
        ({LENGTH: "x"}, b"{}"),
        (
            {LENGTH: "92"},
            b'{"outputs":[{"name":"y","datatype":"FP32","shape":[9],"parameters":'
            b'{"binary_data_size":36}}]}\0\0',
        ),
    ],
)
def test_a_damaged_answer_is_the_servers_fault(headers: dict[str, str], body: bytes) -> None:
    Misbehaving.answers = {
        "/v2/models/m": (200, {}, json.dumps(METADATA).encode()),
        "/v2/models/m/infer": (200, headers, body),
    }
    with ThreadingHTTPServer(("127.0.0.1", 0), Misbehaving) as fake:
        threading.Thread(target=fake.serve_forever).start()
        with modelport.Client(f"http://127.0.0.1:{fake.server_port}") as client:
            with pytest.raises(modelport.ModelportError, match="violates the protocol") as caught:
                client.infer("m", {"x": [1.0]})
            assert not isinstance(caught.value, modelport.InvalidArgument)
            assert "request" not in str(caught.value)
        fake.shutdown()


def test_a_redirect_is_not_followed() -> None:
    asked: list[str] = []

    class Other(Misbehaving):
        def do_GET(self) -> None:
            asked.append(self.path)

        do_POST = do_GET  # noqa: N815

    with (
        ThreadingHTTPServer(("127.0.0.1", 0), Misbehaving) as fake,
        ThreadingHTTPServer(("127.0.0.1", 0), Other) as other,
    ):
        for server in (fake, other):
            threading.Thread(target=server.serve_forever).start()
        there = {"Location": f"http://127.0.0.1:{other.server_port}/v2/models/m"}
        Misbehaving.answers = {"/v2/models/m": (307, there, b"")}
        with (
            modelport.Client(f"http://127.0.0.1:{fake.server_port}") as client,
            pytest.raises(modelport.ModelportError, match="give the other server's URL"),
        ):
            client.metadata("m")
        fake.shutdown()
        other.shutdown()
    assert asked == []


def test_statuses_become_errors_of_their_kind() -> None:
    Misbehaving.answers = {
        f"/v2/models/{status}": (status, {}, body)
        for status, body in (
            *(
                (400, b'{"error":"bad"}'),
                (404, b"{}"),
                (503, b'{"error":"Request timeout expired"}'),
            ),
            *((501, b'{"error":"no"}'), (500, b"<html>"), (504, b"")),
        )
    }
    expected = {
        400: (modelport.InvalidArgument, "bad"),
        404: (modelport.NotFound, "does not have this operation"),
        503: (modelport.TimedOut, "timeout expired"),
        501: (modelport.Unsupported, "no"),
        500: (modelport.ModelportError, "status 500 with a page"),
        504: (modelport.TimedOut, "HTTP status 504"),
    }
    with ThreadingHTTPServer(("127.0.0.1", 0), Misbehaving) as fake:
        threading.Thread(target=fake.serve_forever).start()
        with modelport.Client(f"http://127.0.0.1:{fake.server_port}") as client:
            for status, (kind, words) in expected.items():
                with pytest.raises(kind, match=words):
                    client.metadata(str(status))
        fake.shutdown()


@pytest.mark.parametrize("scheme", ["http", "grpc"])
def test_a_server_that_never_answers_is_given_up_on(scheme: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"{scheme}://127.0.0.1:{silent.getsockname()[1]}"
        with (
            modelport.Client(address, timeout_seconds=0.2) as client,
            pytest.raises(modelport.Unavailable, match=address),
        ):
            client.live()
