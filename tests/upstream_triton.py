"""A real Triton 2.51 behind the gateway, over both protocols, and its streams.

    python -m tests.upstream_triton

Its Python backend echoes, adds, fails and notes request parameters; every answer through the
gateway is compared bit by bit with the one that Triton gives the same client. Exits with 1 if
anything is wrong. A stream ends this Triton by a segmentation fault now and then, whoever asks it;
such a run says nothing, and is repeated.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np

from modelport.loadtests.system.processes import HOST
from tests import models, verb
from tests.conformance import wire
from tests.conformance.clients import (
    CALLERS,
    TIMEOUT_SECONDS,
    Ask,
    InferCaller,
    Result,
    bits,
    samples,
)
from tests.server import Gateway
from tests.triton_package import TritonPorts, tritonserver
from tests.upstream import fronting, table

ATTEMPTS = 5
#: Triton's Python backend has no BF16 in numpy.
DATATYPES = tuple(name for name in models.ONNX_TYPES if name != "BF16")
ECHO = """
import json, os, sys
sys.path[:0] = os.environ["PYTHONPATH"].split(os.pathsep)  # numpy 1, which the stub is built for
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        self.config = json.loads(args["model_config"])
        self.name = self.config["name"]

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        if self.name == "failing":
            return pb_utils.InferenceResponse(error=pb_utils.TritonError("it fails on purpose"))
        x = pb_utils.get_input_tensor_by_name(request, "x").as_numpy()
        if self.name == "parameters":
            said = [request.parameters(), request.request_id(), str(request.correlation_id()),
                    sorted(request.requested_output_names())]
            x = np.full(x.shape, json.dumps(said).encode(), object)
        if self.name == "lying":
            x = x[:, :2]
        return pb_utils.InferenceResponse([pb_utils.Tensor("y", x)])
"""
#: Answers ``y = x + index`` as often as the parameter ``responses`` says, and then maybe fails.
REPEAT = """
import os, sys, time
sys.path[:0] = os.environ["PYTHONPATH"].split(os.pathsep)
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            self.answer(request, json_parameters(request))

    def answer(self, request, asked):
        x = pb_utils.get_input_tensor_by_name(request, "x").as_numpy()
        sender = request.get_response_sender()
        for index in range(asked.get("responses", 3)):
            if sender.is_cancelled():
                break
            time.sleep(asked.get("milliseconds", 0) / 1000)
            sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("y", x + index)]))
        if asked.get("fails"):
            error = pb_utils.TritonError("it fails on purpose")
            sender.send(pb_utils.InferenceResponse(error=error))
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

def json_parameters(request):
    import json
    return json.loads(request.parameters())
"""
ROW = np.array([1, 2, 3, 4], np.float32)
DECOUPLED = "model_transaction_policy { decoupled: true }"
SHAPES = {"scalar": "1 reshape { shape: [] }", "column": "4 reshape { shape: [2,2] }"}


def publish(root: Path) -> Path:
    """Every model of the checks, for Triton's Python backend."""

    def add(name: str, x: str, y: str, batch: int = 8, extra: str = "", version: int = 1) -> None:
        folder = root / name
        (folder / str(version)).mkdir(parents=True)
        text = models.config(name, [f"x {x}"], [f"y {y}"], batch, "python", extra)
        (folder / "config.pbtxt").write_text(text)
        (folder / str(version) / "model.py").write_text(ECHO)

    for datatype in DATATYPES:
        add(f"echo_{datatype.lower()}", f"{datatype} -1", f"{datatype} -1")
    for name, dims in SHAPES.items():
        add(name, f"FP32 {dims}", f"FP32 {dims}")
    add("fixed", "FP32 2,3", "FP32 2,3", 0)
    add("failing", "FP32 4", "FP32 4")
    add("lying", "FP32 4", "FP32 4")
    add("parameters", "BYTES 1", "BYTES 1")
    add("repeat", "FP32 4", "FP32 4", extra=DECOUPLED)
    (root / "repeat" / "1" / "model.py").write_text(REPEAT)
    (root / "fixed" / "3").mkdir()
    (root / "fixed" / "3" / "model.py").write_text(ECHO)
    with (root / "fixed" / "config.pbtxt").open("a") as config:
        config.write("version_policy { all {} }\n")
    return root


def asks() -> Iterator[Ask]:
    arrays = samples()
    for datatype in DATATYPES:
        yield Ask(f"echo_{datatype.lower()}", [("x", arrays[datatype])], request_id="7")
    yield Ask("scalar", [("x", np.array([[1.5], [-0.0]], np.float32))])
    yield Ask("column", [("x", np.arange(8, dtype=np.float32).reshape(2, 4))])
    fixed = [("x", np.arange(6, dtype=np.float32).reshape(2, 3))]
    yield Ask("fixed", fixed)
    yield Ask("fixed", fixed, version="1")
    yield Ask("echo_fp32", [("x", np.random.default_rng(0).random((8, 500_000), np.float32))])
    text = [("x", np.array([[b"?"]], object))]
    yield Ask("parameters", text, request_id="abc", parameters={"mine": "1"})
    yield Ask("parameters", text, priority=5, timeout_microseconds=0)


def outcome(caller: InferCaller, ask: Ask) -> Result | str:
    try:
        return caller.infer(ask)
    except Exception as error:  # what the client raises, for whatever reason, is the outcome
        return f"{type(error).__name__}: {error}"


def same(direct: Result | str, routed: Result | str) -> bool:
    if isinstance(direct, str) or isinstance(routed, str):
        return False
    return (direct.version, direct.id, dict(direct.datatypes)) == (
        routed.version,
        routed.id,
        dict(routed.datatypes),
    ) and {n: bits(a) for n, a in direct.arrays.items()} == {
        n: bits(a) for n, a in routed.arrays.items()
    }


def check(direct: InferCaller, front: InferCaller, hop: str) -> Iterator[str]:
    """Problems of what comes through the hop ``hop``."""
    count = 0
    for ask in asks():
        expected, got = outcome(direct, ask), outcome(front, _renamed(ask, hop))
        count += 1
        if not same(expected, got):
            yield f"{hop}, {ask.model} {ask.version}: {got}, but Triton itself {expected}"
    x = np.ones((1, 4), np.float32)
    for model, status, said in (
        ("failing", ("500", "INTERNAL"), "it fails on purpose"),
        ("lying", ("500", "INTERNAL"), "output 'y' does not have shape [1, 4]"),
    ):
        error = front.refusal(_renamed(Ask(model, [("x", x)]), hop))
        count += 1
        if said not in str(error.message()) or not str(error.status()).endswith(status):
            yield f"{hop}, {model}: {error.status()} {error.message()}"
    print(f"{type(front).__name__} client, {hop} hop: {count} requests compared with Triton's own")


def streamed(address: str, model: str, asked: Mapping[str, int], empty: bool) -> list[Any]:
    """The responses to one request: values, flag and error of each."""
    message = wire.message(model, ("x", "FP32", [1, 4]), raw=[ROW.tobytes()], request_id="7")
    for key, value in asked.items():
        message.parameters[key].int64_param = value
    message.parameters["triton_enable_empty_final_response"].bool_param = empty
    found = []
    with wire.stub(address) as stub:
        for answer in stub.ModelStreamInfer(iter([message]), timeout=TIMEOUT_SECONDS):
            response = answer.infer_response
            final = response.parameters["triton_final_response"].bool_param
            values = [list(blob) for blob in response.raw_output_contents]
            found.append((response.id, values, final, answer.error_message))
    return found


def check_streams(ports: TritonPorts, front: Gateway) -> Iterator[str]:
    """Problems of decoupled answers, beside Triton's own."""
    model, direct = "grpc_repeat", f"{HOST}:{ports.grpc}"
    cases: list[tuple[dict[str, int], bool]] = [
        ({"responses": count, **more}, empty)
        for count in (0, 1, 3, 100)
        for more in ({}, {"fails": 1})
        for empty in (False, True)
    ]
    for asked, empty in cases:
        expected = streamed(direct, "repeat", asked, empty)
        got = streamed(front.grpc, model, asked, empty)
        if asked.get("fails"):  # an error ends a stream here; Triton's end follows it
            expected = [each[:2] + each[3:] for each in expected if each[1] or each[3]]
            got = [each[:2] + each[3:] for each in got]
        if got != expected:
            yield f"{model} {asked}, {empty}: {got[-3:]}, but Triton itself {expected[-3:]}"
    for ending in ("generate", "generate_stream"):
        body = {"x": ROW.tolist(), "responses": 1}
        theirs, ours = (
            httpx.post(f"http://{address}/v2/models/{name}/{ending}", json=body)
            for address, name in ((f"{HOST}:{ports.http}", "repeat"), (front.http, model))
        )
        said = ours.content.replace(model.encode(), b"repeat")
        if (ours.status_code, ours.headers["content-type"]) != (
            theirs.status_code,
            theirs.headers["content-type"],
        ) or said.replace(b" ", b"") != theirs.content.replace(b" ", b""):
            yield f"{ending}: {said!r}, but Triton itself {theirs.content!r}"
    yield from check_cancelled(front, model)
    print(f"decoupled, grpc hop: {len(cases)} streams compared with Triton's own")


def check_cancelled(front: Gateway, model: str) -> Iterator[str]:
    """A stream of a minute that is left: the next request must not wait for its end."""
    message = wire.message(model, ("x", "FP32", [1, 4]), raw=[ROW.tobytes()])
    message.parameters["responses"].int64_param = 600
    message.parameters["milliseconds"].int64_param = 100
    with wire.stub(front.grpc) as stub:
        call = stub.ModelStreamInfer(iter([message]), timeout=60)
        started = time.monotonic()
        next(call)
        first = time.monotonic() - started
        call.cancel()
    print(f"decoupled, grpc hop: the first of 600 responses came after {first * 1000:.0f} ms")
    started = time.monotonic()
    streamed(front.grpc, model, {"responses": 1}, False)
    if first > 5 or time.monotonic() - started > 5:
        yield "a stream that is cancelled goes on in Triton"


def _renamed(ask: Ask, hop: str) -> Ask:
    return Ask(**{**ask.__dict__, "model": f"{hop}_{ask.model}"})


def tables(root: Path, ports: TritonPorts) -> list[str]:
    return [
        table(f"{hop}_{model.name}", [f"{HOST}:{port}"], protocol=hop, model=model.name)
        for model in sorted(root.iterdir())
        for hop, port in (("grpc", ports.grpc), ("http", ports.http))
        if (model.name, hop) != ("repeat", "http")  # its protocol has no streams
    ]


class Direct:
    """The addresses of a server called without a gateway."""

    def __init__(self, ports: TritonPorts) -> None:
        self.http, self.grpc = f"{HOST}:{ports.http}", f"{HOST}:{ports.grpc}"


def check_all(front: Gateway, ports: TritonPorts) -> Iterator[str]:
    with asyncio.Runner() as runner:
        for client in ("http", "grpc"):
            direct = CALLERS[client](Direct(ports), runner)
            caller = CALLERS[client](front, runner)
            for hop in ("grpc", "http"):
                yield from check(direct, caller, hop)
            direct.close()
            caller.close()
    yield from check_streams(ports, front)


def compare(work: Path) -> list[str] | None:
    """The problems found beside a Triton of its own; None: Triton crashed."""
    root = publish(work / "models")
    with (
        tritonserver(work, root) as ports,
        fronting(work / "front", *tables(root, ports)) as front,
    ):
        problems = []
        try:
            problems += check_all(front, ports)
        except grpc.RpcError as error:
            problems.append(f"Triton itself: {error}")
        try:
            httpx.get(f"http://{HOST}:{ports.http}/v2/health/live")
        except httpx.TransportError:
            return None
    return problems


def main() -> int:
    for _ in range(ATTEMPTS):
        with tempfile.TemporaryDirectory() as folder:
            problems = compare(Path(folder))
        if problems is not None:
            break
        print("Triton itself crashed; once more", file=sys.stderr)
    else:
        problems = [f"Triton itself crashed in each of {ATTEMPTS} attempts"]
    for problem in problems:
        print(f"wrong: {problem}", file=sys.stderr)
    return int(bool(problems))


if __name__ == "__main__":
    verb.run(main)
