"""TorchServe 0.12.0, the real one: archives of ``modelport package``, and its dialect beside ours.

    python -m tests.torchserve

Needs Java 17; the environment is made once, in ``.peers/``. Prints a table of what was asked and
how far the answers are from the eager model; exits with 1 if anything is not as it must be.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import tritonclient.http
from rich.console import Console
from rich.table import Table

from modelport.exporters.loaded_model import Source
from modelport.exporters.packaging.package import package
from modelport.loadtests.system.processes import HOST
from tests import verb
from tests.torchserve.clients import Ask, as_tensors, callers, document, post, read
from tests.torchserve.comparison import ComparisonRow, compare, inputs_of, wire
from tests.torchserve.dialect import check_dialect
from tests.torchserve.server import (
    MAX_LENGTH,
    VERSION,
    TorchServePorts,
    publish,
    sources,
    torchserve,
)

BATCHES = (1, 2, 8)
LENGTHS = (1, 17, MAX_LENGTH)
#: Requests at once, and how many clients send them.
CONCURRENT, CLIENTS = 96, 24


def check_answers(model: str, source: Source, asks: Mapping[str, Ask]) -> Iterator[ComparisonRow]:
    """Every way of asking at every batch size and length, one request at a time."""
    lengths = LENGTHS if source.signature.axes else (0,)
    for way, ask in asks.items():
        check = ComparisonRow(f"{model}, {way}: {len(BATCHES)} batch sizes, {len(lengths)} lengths")
        for batch in BATCHES:
            for length in lengths:
                inputs = inputs_of(source, batch, length, seed=batch * 100 + length)
                answer = ask(model, wire(source.signature.inputs, inputs))
                check.note(*compare(source, inputs, *answer))
        yield check


def check_concurrent(
    model: str, source: Source, asks: Mapping[str, Ask], work: Path
) -> ComparisonRow:
    """Mixed lengths, sizes and forms at once, every eighth with an id that has no embedding."""
    check = ComparisonRow(f"{model}, {CONCURRENT} at once, mixed")
    forms = list(asks.values())[:2]
    status = 400 if source.signature.inputs[0].maximum is not None else 500
    before = _batches(work)

    def one(number: int) -> tuple[str | None, float]:
        length = LENGTHS[number % 3] if source.signature.axes else 0
        inputs = inputs_of(source, 1 + number % 3, length, seed=number)
        bad = number % 8 == 5 and "tokens" in inputs
        sent = wire(source.signature.inputs, inputs)
        if bad:
            sent["tokens"] = sent["tokens"].copy()
            sent["tokens"][0, 0] = 10**6
        answer = forms[number % len(forms)](model, sent)
        if not bad:
            return compare(source, inputs, *answer)
        return (None if answer[0] == status else f"a bad row was answered {answer}"), 0.0

    with ThreadPoolExecutor(CLIENTS) as pool:
        for problem, error in pool.map(one, range(CONCURRENT)):
            check.note(problem, error)
    batches = _batches(work) - before
    check.what += f", in {batches} batches"
    if not 0 < batches < CONCURRENT // 2:
        check.note(f"{CONCURRENT} requests came to the worker in {batches} batches")
    return check


def _batches(work: Path) -> int:
    """Count the batches that reached workers; each logs one line."""
    return (work / "model_log.log").read_text().count("Backend received inference")


def bad_requests() -> Iterator[tuple[str, bytes, dict[str, str], str]]:
    """Bad requests to ``fraud``: the fault, body, headers and expected error."""
    good = {
        "tokens": np.arange(8, dtype=np.int64).reshape(2, 4),
        "seq_lens": np.array([[4], [2]]),
    }
    json_type = {"Content-Type": "application/json"}

    def changed(name: str, /, **members: Any) -> bytes:
        body = document(good)
        next(each for each in body["inputs"] if each["name"] == name).update(members)
        return json.dumps(body).encode()

    client = tritonclient.http.InferenceServerClient
    binary, length = client.generate_request_body(as_tensors(good))
    binary_type = {"Content-Type": "application/octet-stream"}
    header = {**binary_type, "Inference-Header-Content-Length": str(length)}
    wrong_header = {**binary_type, "Inference-Header-Content-Length": "99999"}
    only = json.dumps({"inputs": document(good)["inputs"][:1]}).encode()
    yield "no JSON", b"{", json_type, "does not start with JSON"
    yield "a form", only, {}, "send application/json"
    yield "no inputs", b"{}", json_type, "'inputs' must be"
    yield "missing input", only, json_type, "missing input 'seq_lens'"
    yield "other name", changed("tokens", name="token"), json_type, "unexpected input 'token'"
    yield "datatype", changed("tokens", datatype="INT32"), json_type, "must be INT64"
    yield "rank", changed("tokens", shape=[2, 2, 2]), json_type, "must have shape"
    yield "fraction", changed("tokens", data=[0.5] * 8), json_type, "holds float"
    yield "out of range", changed("tokens", data=[512] * 8), json_type, "[0, 511], got 512"
    yield "beyond length", changed("seq_lens", data=[5, 1]), json_type, "[1, 4], got 5"
    yield "batch", changed("seq_lens", shape=[1, 1], data=[1]), json_type, "different batch sizes"
    long = {"tokens": np.zeros((1, 65), np.int64), "seq_lens": np.ones((1, 1), np.int64)}
    yield "too long", json.dumps(document(long)).encode(), json_type, "from 1 to 64, not 65"
    large = {name: np.repeat(array, 5, axis=0) for name, array in good.items()}
    yield "too large", json.dumps(document(large)).encode(), json_type, "from 1 to 8, not 10"
    yield "truncated", bytes(binary)[:-1], header, "bytes are left"
    yield "too many bytes", bytes(binary) + b"x", header, "1 bytes follow"
    yield "header", bytes(binary), wrong_header, "is 99999"


def check_refusals(ports: TorchServePorts) -> ComparisonRow:
    check = ComparisonRow("fraud, malformed requests are refused with 400 and the reason")
    for what, body, headers, expected in bad_requests():
        status, text = read(*post(ports, "/predictions/fraud", body, headers))
        clear = status == 400 and isinstance(text, str) and expected in text
        check.note(None if clear else f"{what}: {status} {text}")
    return check


def run(work: Path) -> list[ComparisonRow]:
    """Package, serve and ask; ``work`` is an empty folder."""
    found, archives = sources(), []
    (work / "store").mkdir()
    for name, source in found.items():
        folder = publish(work / "repository", name, source)
        archives.append(work / "store" / f"{name}.mar")
        package(folder, "torchserve", archives[-1])
    with (
        torchserve(work, archives) as ports,
        grpc.insecure_channel(f"{HOST}:{ports.grpc}") as channel,
    ):
        asks = callers(ports, channel)
        checks = [
            check for name in ("fraud", "vit") for check in check_answers(name, found[name], asks)
        ]
        checks += [check_concurrent(name, found[name], asks, work) for name in found]
        checks.append(check_refusals(ports))
        checks += check_dialect(ports, work / "repository", found)
    return checks


def main() -> int:
    with tempfile.TemporaryDirectory() as work:
        checks = run(Path(work))
    table = Table("check", "requests", "max error", "verdict", title=f"TorchServe {VERSION}")
    for check in checks:
        verdict = "; ".join(check.wrong[:3] or ["as it must be"])
        table.add_row(check.what, str(check.requests), f"{check.error:.1e}", verdict)
    Console(width=140).print(table)
    return int(any(check.wrong for check in checks))


if __name__ == "__main__":
    verb.run(main)
