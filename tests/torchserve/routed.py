"""A gateway in front of the real TorchServe 0.12.0, over both of its protocols.

    python -m tests.torchserve.routed

Archives of ``modelport package --for torchserve`` and one with a handler that takes and gives bytes
are served; the gateway knows their signatures from TorchServe's management API alone. Prints a
table of what was asked; exits with 1 if anything is not as it must be.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
import time
import zipfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import httpx
import numpy as np
import tritonclient.http
from rich.console import Console
from rich.table import Table
from tritonclient.utils import InferenceServerException

from modelport.exporters.loaded_model import Source
from modelport.exporters.packaging.package import package
from modelport.gateway.protocols.torchserve.grpc import INFERENCE_SERVICE
from modelport.gateway.types import Array
from modelport.gateway.wire.proto import torchserve_inference_pb2 as inference
from modelport.loadtests.system.processes import HOST
from tests import verb
from tests.server import Gateway
from tests.torchserve.__main__ import BATCHES, LENGTHS
from tests.torchserve.clients import as_tensors
from tests.torchserve.comparison import ComparisonRow, compare, inputs_of, wire
from tests.torchserve.server import VERSION, TorchServePorts, publish, sources, torchserve
from tests.upstream import fronting, table

HOPS = ("grpc", "http")
MODELS = ("fraud", "vit")
CONCURRENT, CLIENTS = 96, 24
#: A handler of somebody else: it turns the bytes around, or takes its time.
HANDLER = """
import time

def handle(data, context):
    if data is None:
        return None
    bodies = [bytes(row.get("body") or row.get("data")) for row in data]
    if b"slow" in bodies:
        time.sleep(2)
    return [body[::-1] for body in bodies]
"""
#: One that answers as it goes: ``body 0``, ``body 1``, ``body 2``, ``body end``.
STREAMER = """
import time
from ts.handler_utils.utils import send_intermediate_predict_response

def handle(data, context):
    if data is None:
        return None
    bodies = [bytes(row.get("body") or row.get("data")) for row in data]
    for index in range(3):
        parts = [b"%b %d" % (body, index) for body in bodies]
        send_intermediate_predict_response(parts, context.request_ids, "ok", 200, context)
        time.sleep(0.2)
    return [body + b" end" for body in bodies]
"""
MANIFEST = """{"runtime": "python", "model": {"modelName": "NAME", "handler": "NAME.py",
"modelVersion": "1.0"}, "archiverVersion": "0.12.0"}"""
#: Bytes in, any number of bytes out.
STREAMING = """
input { name: "data" data_type: TYPE_STRING dims: 1 }
output { name: "output" data_type: TYPE_STRING dims: 1 }
model_transaction_policy { decoupled: true }
"""


def archived(store: Path, name: str, handler: str) -> Path:
    archive = store / f"{name}.mar"
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("MAR-INF/MANIFEST.json", MANIFEST.replace("NAME", name))
        file.writestr(f"{name}.py", handler)
    return archive


def tables(ports: TorchServePorts, repository: Path) -> Iterator[str]:
    for hop in HOPS:
        endpoint = f"{HOST}:{ports.grpc if hop == 'grpc' else ports.inference}"
        keys = {"backend": "torchserve", "protocol": hop}
        managed = {**keys, "management": f"{HOST}:{ports.management}"}
        for model in (*MODELS, "unchecked"):
            yield table(f"{hop}_{model}", [endpoint], model=model, **managed)
        text = (repository / "fraud" / "config.pbtxt").read_text()
        config = repository.parent / "declared.pbtxt"
        config.write_text(text.replace('name: "fraud"\n', "", 1))  # it has another name here
        yield table(f"{hop}_declared", [endpoint], model="fraud", config=str(config), **keys)
        yield table(f"{hop}_reverse", [endpoint], model="reverse", **managed)
        yield table(f"{hop}_bare", [endpoint], model="reverse", **keys)
        streaming = repository.parent / "streaming.pbtxt"
        streaming.write_text(STREAMING)
        yield table(f"{hop}_stream", [endpoint], model="stream", config=str(streaming), **keys)
        yield table(f"{hop}_quick", [endpoint], model="reverse", timeout_seconds=0.5, **keys)


def ask(
    gateway: Gateway, model: str, inputs: Mapping[str, Array]
) -> tuple[int, Mapping[str, Array] | str]:
    with contextlib.closing(tritonclient.http.InferenceServerClient(gateway.http)) as client:
        try:
            result = client.infer(model, as_tensors(inputs))
        except InferenceServerException as error:
            return int(error.status() or 0), error.message()
    names = [output["name"] for output in result.get_response()["outputs"]]
    return 200, {name: result.as_numpy(name) for name in names}


def bits(answer: tuple[int, Mapping[str, Array] | str]) -> object:
    status, outputs = answer
    if isinstance(outputs, str):
        return status, outputs
    return {name: (x.dtype, x.shape, x.tobytes()) for name, x in outputs.items()}


def check_answers(gateway: Gateway, model: str, source: Source) -> ComparisonRow:
    lengths = LENGTHS if source.signature.axes else (0,)
    check = ComparisonRow(
        f"{model}: {len(BATCHES)} batch sizes, {len(lengths)} lengths, both protocols"
    )
    for batch in BATCHES:
        for length in lengths:
            inputs = inputs_of(source, batch, length, seed=batch * 100 + length)
            sent = wire(source.signature.inputs, inputs)
            answers = [ask(gateway, f"{hop}_{model}", sent) for hop in HOPS]
            for answer in answers:
                check.note(*compare(source, inputs, *answer))
            if bits(answers[0]) != bits(answers[1]):
                check.note("gRPC and HTTP differ")
    return check


def check_concurrent(gateway: Gateway, model: str, source: Source) -> ComparisonRow:
    check = ComparisonRow(f"{model}: {CONCURRENT} at once, both protocols, mixed sizes")

    def one(number: int) -> tuple[str | None, float]:
        length = LENGTHS[number % 3] if source.signature.axes else 0
        inputs = inputs_of(source, 1 + number % 3, length, seed=number)
        answer = ask(gateway, f"{HOPS[number % 2]}_{model}", wire(source.signature.inputs, inputs))
        return compare(source, inputs, *answer)

    with ThreadPoolExecutor(CLIENTS) as pool:
        for problem, error in pool.map(one, range(CONCURRENT)):
            check.note(problem, error)
    return check


def check_errors(gateway: Gateway) -> Iterator[ComparisonRow]:
    """Check the errors for requests that the gateway accepts and TorchServe's handler refuses."""
    check = ComparisonRow("unchecked: the model fails, on both protocols alike")
    bad = {"tokens": np.full((1, 4), 10**6, np.int64), "seq_lens": np.array([[4]], np.int64)}
    for hop in HOPS:
        status, said = ask(gateway, f"{hop}_unchecked", bad)
        clear = status == 500 and isinstance(said, str) and "the model failed" in said
        check.note(None if clear else f"{hop}: {status} {said}")
    yield check
    check = ComparisonRow("fraud: ranges of values come from the archive, and hold in the gateway")
    for hop in HOPS:
        status, said = ask(gateway, f"{hop}_fraud", bad)
        clear = status == 400 and isinstance(said, str) and "[0, 511]" in said
        check.note(None if clear else f"{hop}: {status} {said}")
    yield check


def check_bytes(gateway: Gateway) -> Iterator[ComparisonRow]:
    check = ComparisonRow(
        "somebody else's handler: any bytes, both protocols, with management and without"
    )
    for body in (b"", b"abc", bytes(range(256)) * 50):
        if not body:
            continue  # TorchServe's own parser gives a handler no row without a body
        for name in (f"{hop}_{kind}" for hop in HOPS for kind in ("reverse", "bare")):
            status, outputs = ask(gateway, name, {"data": np.array([body], object)})
            good = not isinstance(outputs, str) and outputs["output"].tolist() == [body[::-1]]
            check.note(None if good else f"{name}: {status} {str(outputs)[:200]}")
    yield check
    check = ComparisonRow("a handler that takes 2 s with 0.5 s to go: 503 in time")
    for hop in HOPS:
        started = time.monotonic()
        status, said = ask(gateway, f"{hop}_quick", {"data": np.array([b"slow"], object)})
        seconds = time.monotonic() - started
        good = status == 503 and "timeout" in str(said) and seconds < 0.8
        check.note(None if good else f"{hop}: {status} {said} after {seconds:.2f} s")
    yield check


def streamed(address: str, model: str, body: bytes) -> list[bytes]:
    """The responses of ``StreamPredictions``."""
    message = inference.PredictionsRequest(model_name=model, input={"body": body})
    with grpc.insecure_channel(address) as channel:
        call = channel.unary_stream(
            f"/{INFERENCE_SERVICE}/StreamPredictions",
            inference.PredictionsRequest.SerializeToString,
            inference.PredictionResponse.FromString,
        )
        return [reply.prediction for reply in call(message, timeout=30)]


def chunked(address: str, model: str, body: bytes) -> tuple[list[bytes], float]:
    """The parts of a prediction, and after what share of its time the first one came."""
    started = time.monotonic()
    found, times = [], []
    with httpx.stream("POST", f"http://{address}/predictions/{model}", content=body) as reply:
        for part in reply.iter_raw():
            found.append(part)
            times.append(time.monotonic() - started)
    return found, times[0] / times[-1]


def check_streams(gateway: Gateway, ports: TorchServePorts) -> ComparisonRow:
    check = ComparisonRow(
        "a handler that streams: parts, events and StreamPredictions, both protocols"
    )
    body, expected = b"abc", [b"abc 0", b"abc 1", b"abc 2", b"abc end"]
    direct = streamed(f"{HOST}:{ports.grpc}", "stream", body)
    check.note(None if direct == expected else f"TorchServe's own StreamPredictions: {direct}")
    parts, _ = chunked(f"{HOST}:{ports.inference}", "stream", body)
    check.note(None if parts == expected else f"TorchServe's own parts: {parts}")
    for hop in HOPS:
        model = f"{hop}_stream"
        found = streamed(gateway.grpc, model, body)
        check.note(None if found == expected else f"{hop}, StreamPredictions: {found}")
        parts, share = chunked(gateway.http, model, body)
        check.note(None if parts == expected and share < 0.5 else f"{hop}: {parts}, {share:.2f}")
        url = f"http://{gateway.http}/v2/models/{model}/generate_stream"
        text = httpx.post(url, json={"data": "abc"}, timeout=30).text
        events = [json.loads(line.removeprefix("data: ")) for line in text.split("\n\n") if line]
        good = [event.get("output") for event in events] == [part.decode() for part in expected]
        check.note(None if good else f"{hop}, events: {text[:200]}")
    return check


def check_metadata(gateway: Gateway) -> ComparisonRow:
    check = ComparisonRow("versions and signatures are TorchServe's")
    for hop in HOPS:
        url = f"http://{gateway.http}/v2/models/{hop}"
        fraud = httpx.get(f"{url}_fraud").json()
        shapes = {t["name"]: t["shape"] for t in fraud.get("inputs", [])}
        wanted = {"tokens": [-1, -1], "seq_lens": [-1, 1]}
        check.note(None if shapes == wanted and fraud["versions"] == ["1"] else f"{hop}: {fraud}")
        other = httpx.get(f"{url}_reverse").json()
        check.note(None if other.get("versions") == ["1"] else f"{hop}: {other}")
    return check


def run(work: Path) -> list[ComparisonRow]:
    """Package, serve, route and ask; ``work`` is an empty folder."""
    found, archives = sources(), []
    (work / "store").mkdir()
    for name, source in found.items():
        folder = publish(work / "repository", name, source)
        archives.append(work / "store" / f"{name}.mar")
        package(folder, "torchserve", archives[-1])
    archives.append(archived(work / "store", "reverse", HANDLER))
    archives.append(archived(work / "store", "stream", STREAMER))
    with (
        torchserve(work, archives) as ports,
        fronting(work / "front", *tables(ports, work / "repository")) as gateway,
    ):
        checks = [check_metadata(gateway)]
        checks += [check_answers(gateway, name, found[name]) for name in MODELS]
        checks.append(check_answers(gateway, "declared", found["fraud"]))
        checks += [check_concurrent(gateway, name, found[name]) for name in MODELS]
        checks += [*check_errors(gateway), *check_bytes(gateway), check_streams(gateway, ports)]
    return checks


def main() -> int:
    with tempfile.TemporaryDirectory() as work:
        checks = run(Path(work))
    title = f"The gateway in front of TorchServe {VERSION}"
    rows = Table("check", "requests", "max error", "verdict", title=title)
    for check in checks:
        verdict = "; ".join(check.wrong[:3] or ["as it must be"])
        rows.add_row(check.what, str(check.requests), f"{check.error:.1e}", verdict)
    Console(width=140).print(rows)
    return int(any(check.wrong for check in checks))


if __name__ == "__main__":
    verb.run(main)
