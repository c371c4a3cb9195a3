"""``make sight``: recorded traffic of all dialects is replayed, and a sink that fails is survived.

    python -m tests.sight [--requests N]

First, requests of every dialect, valid and refused ones, are recorded by a gateway and replayed to
another: all answers have to be equal bit by bit, and a gateway whose model differs has to be found.
Then a gateway records N requests, while its disk fails at random: all are answered, the counts add
up, and each record can be read.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from modelport.gateway.recording import record_files, record_reader
from modelport.gateway.settings import RecordSettings
from modelport.gateway.types import Datatype, ModelSignature, TensorSpec
from modelport.gateway.wire.proto import grpc_service_pb2 as pb
from tests import models, texts, verb
from tests.gateway.telemetry.observed_gateway import OIP, STREAM, message, repository, serving
from tests.matrix.dialects import Asked, Refused, dialects
from tests.server import Gateway

REQUESTS = 100_000
#: Share of the writes that fail, half of them after a part was written.
FAILING = 0.2
CONNECTIONS, PIPELINED = 8, 16
X2 = ModelSignature(
    (TensorSpec("x", Datatype.FP32, (4,)),), (TensorSpec("y", Datatype.FP32, (4,)),), 8
)
ASKED = (("x2", (1, 4)), ("x2", (3, 4)), ("x2", (1, 5)), ("nothing", (1, 4)))
TEXTS = (
    ("/v1/embeddings", {"model": "sentences", "input": ["hello world", "Berlin"]}),
    ("/v1/embeddings", {"model": "sentences", "input": "hello", "encoding_format": "base64"}),
    ("/rerank", {"query": "what", "texts": ["hello", "world"]}),
    ("/embed", {"inputs": "hello"}),
    ("/predict", {"inputs": "hello world"}),
    ("/v1/models/sentences:predict", {"instances": ["hello"]}),
    ("/v1/models/x2:predict", {"instances": [[1, 2, 3, 4]]}),
    ("/v1/models/x2:predict", {"instances": [["a"]]}),
    ("/v2/models/x2/infer", OIP),
    ("/v2/models/nothing/infer", OIP),
    ("/v2/models/repeat/generate_stream", {"x": [1, 2, 3, 4]}),
    ("/invocations", {"inputs": OIP["inputs"], "parameters": {}}),
)


def models_of(folder: Path) -> Path:
    """Models with tensors and with texts."""
    texts.repository(repository(folder))
    return folder


def post(gateway: Gateway, path: str, document: Any, **headers: str) -> None:
    body = json.dumps(document).encode()
    fields = {"content-type": "application/json", **headers}
    request = urllib.request.Request(f"http://{gateway.http}{path}", body, fields)
    with contextlib.suppress(urllib.error.HTTPError), urllib.request.urlopen(request) as response:
        response.read()


def ask_all(gateway: Gateway) -> None:
    """Send requests of every dialect."""
    with dialects(gateway.http, gateway.grpc) as columns:
        for column in columns.values():
            for model, shape in (
                ("x2", (1, 4)),
                ("x2", (3, 4)),
                ("x2", (1, 5)),
                ("nothing", (1, 4)),
            ):
                values = np.random.default_rng(1).normal(size=shape).astype(np.float32)
                with contextlib.suppress(Refused):
                    column.ask(Asked(model, X2, {"x": values}))
    for path, document in TEXTS:
        post(gateway, path, document)
    event = {"ce-id": "1", "ce-source": "s", "ce-specversion": "1.0", "ce-type": "t"}
    post(gateway, "/v1/models/x2:predict", {"instances": [[1, 2, 3, 4]]}, **event)
    compressed = {"accept-encoding": "gzip"}
    post(gateway, "/v2/models/x2/infer", OIP, **compressed)
    with grpc.insecure_channel(gateway.grpc) as channel:
        call = channel.stream_stream(
            STREAM, pb.ModelInferRequest.SerializeToString, pb.ModelStreamInferResponse.FromString
        )
        list(call(iter([message(name) for name in ("x2", "repeat", "nothing", "x2")])))
        for kind in (grpc.Compression.Gzip, grpc.Compression.Deflate):
            infer = channel.unary_unary(
                "/inference.GRPCInferenceService/ModelInfer",
                pb.ModelInferRequest.SerializeToString,
                pb.ModelInferResponse.FromString,
            )
            infer(message("x2"), compression=kind)


def modelport(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "modelport", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def replayed(gateway: Gateway, records: Path) -> tuple[int, dict[str, int]]:
    """The exit status of a replay, and its outcomes.

    A body that came after its request was refused is not recorded, so that it cannot be sent.
    """
    report = records.with_name("replay.json")
    done = modelport(
        *("replay", str(records), "--rate", "500", "--quiet", "--json-report", str(report)),
        *(f"--target=http://{gateway.http}", f"--target=grpc://{gateway.grpc}"),
    )
    print(done.stdout, done.stderr, flush=True)
    found: dict[str, int] = {}
    for row in json.loads(report.read_text())["counts"]:
        for outcome, count in row.items():
            if isinstance(count, int):
                found[outcome] = found.get(outcome, 0) + count
    unread = json.loads(report.read_text())["skipped"].get("its body was not read", 0)
    found["skipped"] = found.get("skipped", 0) - unread
    found["equal"] = found.get("equal", 0) + unread
    return done.returncode, {outcome: count for outcome, count in found.items() if count}


@contextlib.contextmanager
def running(folder: Path, *flags: str) -> Iterator[Gateway]:
    gateway = Gateway(folder, *flags)
    try:
        yield gateway
        gateway.terminate()  # records what waits
    finally:
        gateway.close()


def replay_all(root: Path) -> bool:
    """Record and replay all dialects."""
    folder, records = models_of(root / "models"), root / "records"
    with running(folder, "--record", str(records), "--record-sample", "1") as gateway:
        ask_all(gateway)
    found = list(record_reader.read(records, print))
    spoken = sorted({f"{r.data.get('dialect')} over {r.protocol}" for r in found})
    print(f"{len(found)} records of {', '.join(spoken)}", flush=True)
    with running(folder) as gateway:
        status, same = replayed(gateway, records)
    models.multiply(folder / "x2" / "1" / "model.onnx", 2.5)
    with running(folder) as gateway:
        changed_status, changed = replayed(gateway, records)
        loadtest = modelport(
            *("loadtest", gateway.http, "--model", "cached", "--duration", "1s", "--quiet"),
            *("--data", str(records / "x2")),
        )
    return all(
        (
            expect("a replay to the same models", status, 0),
            expect("its outcomes", same, {"equal": len(found)}),
            expect("a replay to another model", changed_status, 1),
            expect("whether it differs", changed.get("different", 0) > 10, True),
            expect("a load test of an unchanged model with these records", loadtest.returncode, 0),
        )
    )


def expect(what: str, found: object, wanted: object) -> bool:
    print(f"{what}: {found}" + ("" if found == wanted else f", NOT {wanted}"), flush=True)
    return found == wanted


class FailingDisk:
    """Fails at random, some writes after a part of them."""

    def __init__(self) -> None:
        self._write, self._chance = record_files.os.write, random.Random(0)
        self.failures = 0

    def __call__(self, descriptor: int, content: Any) -> int:
        drawn = self._chance.random()
        if drawn < FAILING:
            self.failures += 1
            if drawn < FAILING / 2:
                self._write(descriptor, content[: len(content) // 2])
            raise OSError(28, "No space left on device")
        return self._write(descriptor, content)


async def ask_many(port: int, count: int) -> tuple[int, float]:
    """Send pipelined requests; return the number of answers, and the longest wait for one."""
    body = json.dumps(OIP).encode()
    head = f"POST /v2/models/x2/infer HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
    request, longest, answers = head.encode() + body, 0.0, 0

    async def user(own: int) -> None:
        nonlocal longest, answers
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        while own:
            batch = min(own, PIPELINED)
            began = time.perf_counter()
            writer.write(request * batch)
            for _ in range(batch):
                found = await reader.readuntil(b"\r\n\r\n")
                fields = dict(line.split(b": ", 1) for line in found.split(b"\r\n")[1:-2])
                await reader.readexactly(int(fields[b"content-length"]))
                answers += found.startswith(b"HTTP/1.1 200")
            longest = max(longest, time.perf_counter() - began)
            own -= batch
        writer.close()

    async with asyncio.TaskGroup() as group:
        for number in range(CONNECTIONS):
            group.create_task(user(count // CONNECTIONS + (number < count % CONNECTIONS)))
    return answers, longest


async def survive(root: Path, count: int) -> bool:
    """Record ``count`` requests to a disk that fails at random."""
    folder, records = models.repository(root / "plain"), root / "failing"
    settings = RecordSettings(records, sample=1.0, rotate_bytes=8 << 20)
    disk = FailingDisk()
    write, record_files.os.write = record_files.os.write, disk  # type: ignore[assignment]
    try:
        async with serving(folder, record=settings) as gateway:
            recorder = gateway.server._recorder
            assert recorder is not None
            began = time.perf_counter()
            answers, longest = await ask_many(gateway.server.ports.http_port, count)
            seconds = time.perf_counter() - began
    finally:
        record_files.os.write = write
    dropped = sum(recorder.dropped.values())
    print(
        f"{count / seconds:.0f} requests/s, the longest batch {longest * 1e3:.0f} ms; "
        f"{disk.failures} writes failed; {recorder.written} recorded, dropped {recorder.dropped}",
        flush=True,
    )
    notes: list[str] = []
    ids = [each.id for each in record_reader.read(records, notes.append)]
    return all(
        (
            expect("answers", answers, count),
            expect("sampled", recorder.sampled, count),
            expect("recorded and dropped", recorder.written + dropped, count),
            expect("whether writes failed", disk.failures > 0, True),
            expect("records", len(ids), recorder.written),
            expect("different ids", len(set(ids)), recorder.written),
            expect("damaged records", notes, []),
            *read_by_others(records, recorder.written),
        )
    )


def read_by_others(records: Path, count: int) -> Iterator[bool]:
    """Read the files by pandas, pyarrow and DuckDB, those that are installed."""
    files = sorted(map(str, records.rglob("*.jsonl")))
    with contextlib.suppress(ImportError):
        import pandas as pd

        yield expect("rows in pandas", sum(len(pd.read_json(f, lines=True)) for f in files), count)
    with contextlib.suppress(ImportError):
        import pyarrow.json

        rows = sum(pyarrow.json.read_json(file).num_rows for file in files)
        yield expect("rows in pyarrow", rows, count)
    with contextlib.suppress(ImportError):
        import duckdb

        query = f"select count(*) from read_json('{records}/*/*.jsonl')"
        yield expect("rows in DuckDB", duckdb.sql(query).fetchone()[0], count)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=REQUESTS)
    count = parser.parse_args().requests
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        kept = replay_all(root)
        kept = asyncio.run(survive(root, count)) and kept
    print("kept" if kept else "NOT kept")
    return 0 if kept else 1


if __name__ == "__main__":
    verb.run(main)
