"""The same request in every form: bit-identical outputs, and errors of the same kind.

A request is stated once, as ``ConformanceCase``, and sent as JSON and as bytes over HTTP, raw and
typed over gRPC. A form that cannot carry a case (FP16 has no JSON, a lying length no typed form) is
left out.
"""

from __future__ import annotations

import json
import urllib.parse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
import numpy as np
import pytest

from tests.conformance import clients, wire
from tests.conformance.repository import IDENTITY
from tests.conformance.wire import HEADER_LENGTH, TIMEOUT_SECONDS
from tests.server import Gateway

FORMS = ("http-json", "http-binary", "grpc-raw", "grpc-typed")
WITHOUT_JSON = ("http-binary", "grpc-raw")
WITH_VALUES = ("http-json", "grpc-typed")
TYPED_FIELDS = {
    "BOOL": "bool_contents",
    "INT8": "int_contents",
    "INT16": "int_contents",
    "INT32": "int_contents",
    "INT64": "int64_contents",
    "UINT8": "uint_contents",
    "UINT16": "uint_contents",
    "UINT32": "uint_contents",
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
}
HTTP_KINDS = {400: "invalid", 404: "not found", 500: "internal", 501: "unsupported", 503: "later"}
GRPC_KINDS = {
    grpc.StatusCode.INVALID_ARGUMENT: "invalid",
    grpc.StatusCode.ALREADY_EXISTS: "invalid",
    grpc.StatusCode.CANCELLED: "invalid",
    grpc.StatusCode.UNKNOWN: "invalid",
    grpc.StatusCode.NOT_FOUND: "not found",
    grpc.StatusCode.INTERNAL: "internal",
    grpc.StatusCode.UNIMPLEMENTED: "unsupported",
    grpc.StatusCode.UNAVAILABLE: "later",
}


@dataclass(frozen=True)
class Input:
    """``values`` are Python's, flat; ``data`` their bytes, computed unless it is given."""

    name: str
    datatype: str
    shape: Sequence[int]
    values: Sequence[Any]
    data: bytes | None = None
    parameters: Mapping[str, Any] = field(default_factory=dict)

    @property
    def bytes(self) -> bytes:
        if self.data is not None:
            return self.data
        if self.datatype == "BYTES":
            return wire.pack(self.values)
        dtype = clients.samples()[self.datatype].dtype if self.datatype in IDENTITY else np.float32
        return np.array(self.values, dtype).tobytes()


@dataclass(frozen=True)
class ConformanceCase:
    model: str
    inputs: Sequence[Input]
    version: str = ""
    outputs: Sequence[tuple[str, Mapping[str, Any]]] = (("y", {}),)
    parameters: Mapping[str, Any] = field(default_factory=dict)
    id: str = ""
    forms: Sequence[str] = FORMS


@dataclass(frozen=True)
class ParityOutcome:
    """``kind`` "" and the outputs (datatype, shape, bytes), or the kind of error and its text."""

    kind: str
    outputs: Mapping[str, tuple[str, list[int], bytes]] = field(default_factory=dict)
    text: str = ""


class Wires:
    """Sends cases in each form."""

    def __init__(self, gateway: Gateway, stub: Any) -> None:
        self._gateway, self._stub = gateway, stub

    def send(self, case: ConformanceCase, form: str) -> ParityOutcome:
        if form.startswith("http"):
            return self._http(case, binary=form == "http-binary")
        return self._grpc(case, typed=form == "grpc-typed")

    def _http(self, case: ConformanceCase, binary: bool) -> ParityOutcome:
        inputs, blobs = [], b""
        for item in case.inputs:
            document: dict[str, Any] = {
                "name": item.name,
                "datatype": item.datatype,
                "shape": list(item.shape),
            }
            parameters = dict(item.parameters)
            if "shared_memory_region" in parameters:
                pass
            elif binary:
                parameters["binary_data_size"] = len(item.bytes)
                blobs += item.bytes
            else:
                document["data"] = [v.decode() if type(v) is bytes else v for v in item.values]
            inputs.append({**document, "parameters": parameters} if parameters else document)
        body: dict[str, Any] = {"inputs": inputs, "parameters": dict(case.parameters)}
        body["outputs"] = [
            {"name": name, "parameters": {"binary_data": binary, **parameters}}
            for name, parameters in case.outputs
        ]
        if case.id:
            body["id"] = case.id
        header = json.dumps(body).encode()
        reply = wire.send(
            self._gateway.http,
            "POST",
            wire.infer_path(urllib.parse.quote(case.model, safe=""), case.version),
            header + blobs,
            {HEADER_LENGTH: str(len(header))},
        )
        if reply.status != 200:
            return ParityOutcome(HTTP_KINDS[reply.status], text=reply.json["error"])
        if binary and HEADER_LENGTH.lower() in reply.headers:
            return ParityOutcome("", wire.binary_outputs(reply))
        return ParityOutcome("", {o["name"]: _of_json(o) for o in reply.json["outputs"]})

    def _grpc(self, case: ConformanceCase, typed: bool) -> ParityOutcome:
        request = wire.message(
            case.model,
            *((item.name, item.datatype, item.shape) for item in case.inputs),
            version=case.version,
            request_id=case.id,
        )
        for item, message in zip(case.inputs, request.inputs, strict=True):
            _parameters(message.parameters, item.parameters)
            if "shared_memory_region" in item.parameters:
                pass
            elif not typed:
                request.raw_input_contents.append(item.bytes)
            elif item.values:
                fields = TYPED_FIELDS.get(item.datatype, "fp32_contents")
                getattr(message.contents, fields).extend(item.values)
        for name, parameters in case.outputs:
            _parameters(request.outputs.add(name=name).parameters, parameters)
        _parameters(request.parameters, case.parameters)
        try:
            reply = self._stub.ModelInfer(request, timeout=TIMEOUT_SECONDS)
        except grpc.RpcError as error:
            return ParityOutcome(GRPC_KINDS[error.code()], text=error.details() or "")
        outputs = zip(reply.outputs, reply.raw_output_contents, strict=True)
        return ParityOutcome("", {o.name: (o.datatype, list(o.shape), data) for o, data in outputs})


def _of_json(output: Mapping[str, Any]) -> tuple[str, list[int], bytes]:
    if "data" not in output:  # binary, and empty
        return output["datatype"], output["shape"], b""
    values = [v.encode() if isinstance(v, str) else v for v in output["data"]]
    item = Input(output["name"], output["datatype"], output["shape"], values)
    return item.datatype, list(item.shape), item.bytes


def _parameters(target: Any, parameters: Mapping[str, Any]) -> None:
    for key, value in parameters.items():
        kind = {bool: "bool", int: "int64", float: "double", str: "string"}[type(value)]
        if kind == "int64" and value >= 2**63:
            kind = "uint64"
        setattr(target[key], f"{kind}_param", value)


@pytest.fixture(scope="module")
def wires(gateway: Gateway) -> Iterator[Wires]:
    with wire.stub(gateway.grpc) as stub:
        yield Wires(gateway, stub)


def same(wires: Wires, case: ConformanceCase) -> ParityOutcome:
    """The outcome of ``case``, which is the same in every form."""
    outcomes = {form: wires.send(case, form) for form in case.forms}
    kinds = {form: (outcome.kind, outcome.text) for form, outcome in outcomes.items()}
    assert len({kind for kind, _ in kinds.values()}) == 1, kinds
    first, *rest = outcomes.values()
    for other in rest:
        assert other.outputs == first.outputs
    return first


X = Input("x", "FP32", [1, 4], [1.0, 2.0, 3.0, 4.0])
A, B = (Input(name, "FP32", [1, 2], [1.0, 2.0]) for name in "ab")


# -- good requests -------------------------------------------------------------------------------

VALUES: Mapping[str, Sequence[Sequence[Any]]] = {
    datatype: [array.reshape(-1).tolist(), array.reshape(-1)[:1].tolist(), []]
    for datatype, array in clients.samples().items()
}


@pytest.mark.parametrize(
    ("datatype", "values"),
    [(datatype, values) for datatype, rows in VALUES.items() for values in rows],
)
def test_every_datatype_is_answered_with_the_same_bits(
    wires: Wires, datatype: str, values: Sequence[Any]
) -> None:
    forms = WITHOUT_JSON if datatype in ("FP16", "BF16") else FORMS
    item = Input("x", datatype, [1, len(values)], values)
    outcome = same(wires, ConformanceCase(IDENTITY[datatype], [item], forms=forms))
    assert outcome.outputs == {"y": (datatype, [1, len(values)], item.bytes)}


@pytest.mark.parametrize("datatype", ["FP32", "FP64"])
@pytest.mark.parametrize("seed", range(5))
def test_random_floats_are_the_same_to_the_last_bit(wires: Wires, datatype: str, seed: int) -> None:
    """JSON prints each so that it reads back as itself."""
    dtype = clients.samples()[datatype].dtype
    random = np.random.default_rng(seed)
    whole = random.integers(0, 256, 200 * dtype.itemsize, np.uint8).tobytes()
    array = np.frombuffer(whole, dtype)
    values = array[np.isfinite(array)].tolist()
    item = Input("x", datatype, [1, len(values)], values)
    outcome = same(wires, ConformanceCase(IDENTITY[datatype], [item]))
    assert outcome.outputs["y"][2] == item.bytes


@pytest.mark.parametrize("datatype", ["FP32", "FP64"])
def test_infinities_are_the_same(wires: Wires, datatype: str) -> None:
    item = Input("x", datatype, [1, 3], [float("inf"), float("-inf"), 1.0])
    outcome = same(wires, ConformanceCase(IDENTITY[datatype], [item]))
    assert outcome.outputs["y"][2] == item.bytes


@pytest.mark.parametrize("datatype", ["FP32", "FP64"])
def test_not_a_number_is_not_a_number_everywhere(wires: Wires, datatype: str) -> None:
    item = Input("x", datatype, [1, 2], [float("nan"), 1.0])
    for form in FORMS:
        outcome = wires.send(ConformanceCase(IDENTITY[datatype], [item]), form)
        dtype = clients.samples()[datatype].dtype
        values = np.frombuffer(outcome.outputs["y"][2], dtype)
        assert np.isnan(values[0]), form
        assert values[1] == 1.0, form


GOOD = {
    "one row": ConformanceCase("x2", [X]),
    "a version": ConformanceCase("two_versions", [X], version="1"),
    "the newest version": ConformanceCase("two_versions", [X]),
    "a version with a zero before it": ConformanceCase("two_versions", [X], version="01"),
    "two inputs": ConformanceCase(
        "add_and_subtract", [A, B], outputs=[("difference", {}), ("total", {})]
    ),
    "inputs in another order": ConformanceCase("add_and_subtract", [B, A], outputs=[("total", {})]),
    "all outputs": ConformanceCase("add_and_subtract", [A, B], outputs=[]),
    "a fixed shape": ConformanceCase(
        "fixed", [Input("x", "FP32", [2, 3], [1.0, 2.0, 3.0, 4.0, 5.0, 6.0])]
    ),
    "a reshaped scalar": ConformanceCase("scalar", [Input("x", "FP32", [2, 1], [1.0, 2.0])]),
    "a model without a configuration": ConformanceCase("auto", [X]),
    "a classification": ConformanceCase(
        "scores",
        [Input("x", "FP32", [1, 3], [0.5, 2.0, 1.0])],
        outputs=[("y", {"classification": 2})],
    ),
    "parameters": ConformanceCase("x2", [X], parameters={"a": 1, "b": "text", "c": True, "d": 0.5}),
    "a generous timeout": ConformanceCase("x2", [X], parameters={"timeout": 20_000_000}),
    "the largest timeout": ConformanceCase("x2", [X], parameters={"timeout": 2**64 - 1}),
    "a timeout of zero, which is none": ConformanceCase("x2", [X], parameters={"timeout": 0}),
    "a priority": ConformanceCase("x2", [X], parameters={"priority": 2**64 - 1}),
    "a sequence that nobody keeps": ConformanceCase(
        "x2", [X], parameters={"sequence_id": 5, "sequence_start": True, "sequence_end": False}
    ),
    "a sequence by name": ConformanceCase("x2", [X], parameters={"sequence_id": "name"}),
    "an id": ConformanceCase("x2", [X], id="ключ"),
    "an FP32 that JSON has as an integer": ConformanceCase(
        "x2", [Input("x", "FP32", [1, 4], [1, 2, 3, 2**24])]
    ),
}


@pytest.mark.parametrize("what", GOOD)
def test_a_good_request_is_answered_the_same(wires: Wires, what: str) -> None:
    outcome = same(wires, GOOD[what])
    assert outcome.kind == "", outcome.text
    assert outcome.outputs


# -- bad requests --------------------------------------------------------------------------------

BAD = {
    "an unknown model": ("not found", ConformanceCase("nobody", [X])),
    "a model without a name": ("not found", ConformanceCase("", [X])),
    "a name with a slash": ("not found", ConformanceCase("x2/versions/1", [X])),
    "a name that climbs": ("not found", ConformanceCase("../x2", [X])),
    "two dots": ("not found", ConformanceCase("..", [X])),
    "a name with a NUL": ("not found", ConformanceCase("x2\0", [X])),
    "a name with a line feed": ("not found", ConformanceCase("x2\n", [X])),
    "a name of 300 characters": ("not found", ConformanceCase("n" * 300, [X])),
    "a name of 4000 characters": ("not found", ConformanceCase("n" * 4000, [X])),
    "a name in Cyrillic": ("not found", ConformanceCase("модель", [X])),
    "a name in another case": ("not found", ConformanceCase("X2", [X])),
    "an unknown version": ("not found", ConformanceCase("x2", [X], version="2")),
    "version zero": ("not found", ConformanceCase("x2", [X], version="0")),
    "a version of many zeros": ("not found", ConformanceCase("x2", [X], version="0" * 40)),
    "a version beyond 64 bits": ("invalid", ConformanceCase("x2", [X], version=str(2**64))),
    "another datatype": (
        "invalid",
        ConformanceCase("x2", [Input("x", "FP64", [1, 4], [1.0, 2.0, 3.0, 4.0])]),
    ),
    "an unknown datatype": (
        "invalid",
        ConformanceCase("x2", [Input("x", "FP33", [1, 4], X.values)]),
    ),
    "no datatype": ("invalid", ConformanceCase("x2", [Input("x", "", [1, 4], X.values)])),
    "a datatype in small letters": (
        "invalid",
        ConformanceCase("x2", [Input("x", "fp32", [1, 4], X.values)]),
    ),
    "the configuration's word for a datatype": (
        "invalid",
        ConformanceCase("x2", [Input("x", "TYPE_FP32", [1, 4], X.values)]),
    ),
    "a fixed dimension of another size": (
        "invalid",
        ConformanceCase("x2", [Input("x", "FP32", [1, 3], [1.0, 2.0, 3.0])]),
    ),
    "a rank too few": ("invalid", ConformanceCase("x2", [Input("x", "FP32", [4], X.values)])),
    "a rank too many": (
        "invalid",
        ConformanceCase("x2", [Input("x", "FP32", [1, 1, 4], X.values)]),
    ),
    "no shape": ("invalid", ConformanceCase("x2", [Input("x", "FP32", [], [1.0])])),
    "a batch too large": (
        "invalid",
        ConformanceCase("x2", [Input("x", "FP32", [9, 4], [0.0] * 36)]),
    ),
    "a batch of nothing": ("invalid", ConformanceCase("x2", [Input("x", "FP32", [0, 4], [])])),
    "batches that differ": (
        "invalid",
        ConformanceCase("add_and_subtract", [A, Input("b", "FP32", [2, 2], [0.0] * 4)], outputs=[]),
    ),
    "fewer elements than the shape": (
        "invalid",
        ConformanceCase("x2", [Input("x", "FP32", [1, 4], [1.0, 2.0, 3.0])]),
    ),
    "more elements than the shape": (
        "invalid",
        ConformanceCase("x2", [Input("x", "FP32", [1, 4], [1.0] * 5)]),
    ),
    "no elements": ("invalid", ConformanceCase("x2", [Input("x", "FP32", [1, 4], [])])),
    "fewer strings than the shape": (
        "invalid",
        ConformanceCase(IDENTITY["BYTES"], [Input("x", "BYTES", [1, 2], [b"a"])]),
    ),
    "a negative dimension": (
        "invalid",
        ConformanceCase("x2", [Input("x", "FP32", [-1, 4], X.values)]),
    ),
    "two negative dimensions": (
        "invalid",
        ConformanceCase("x2", [Input("x", "FP32", [-1, -4], X.values)]),
    ),
    "the least dimension": (
        "invalid",
        ConformanceCase("x2", [Input("x", "FP32", [-(2**63)], X.values)]),
    ),
    "a shape that overflows": (
        "invalid",
        ConformanceCase("x2", [Input("x", "FP32", [16, 2**60], X.values)]),
    ),
    "a shape that overflows to zero": (
        "invalid",
        ConformanceCase("x2", [Input("x", "FP32", [2**32, 2**32], [])]),
    ),
    "a shape that overflows to four": (
        "invalid",
        ConformanceCase("x2", [Input("x", "FP32", [2**62 + 1, 4], X.values)]),
    ),
    "an overflow hidden by a zero": (
        "invalid",
        ConformanceCase(IDENTITY["FP32"], [Input("x", "FP32", [2**62, 0, 2**62], [])]),
    ),
    "a rank of 1000": ("invalid", ConformanceCase("x2", [Input("x", "FP32", [1] * 1000, [1.0])])),
    "a huge shape of strings": (
        "invalid",
        ConformanceCase(IDENTITY["BYTES"], [Input("x", "BYTES", [1, 2**40], [b"a"])]),
    ),
    "an unknown input": ("invalid", ConformanceCase("x2", [Input("z", "FP32", [1, 4], X.values)])),
    "an input without a name": (
        "invalid",
        ConformanceCase("x2", [Input("", "FP32", [1, 4], X.values)]),
    ),
    "an unknown input beside": (
        "invalid",
        ConformanceCase("x2", [X, Input("z", "FP32", [1, 4], X.values)]),
    ),
    "a missing input": ("invalid", ConformanceCase("add_and_subtract", [A], outputs=[])),
    "no inputs": ("invalid", ConformanceCase("x2", [])),
    "an input given twice": ("invalid", ConformanceCase("x2", [X, X])),
    "an input given twice for another": (
        "invalid",
        ConformanceCase("add_and_subtract", [A, A], outputs=[]),
    ),
    "an unknown output": ("invalid", ConformanceCase("x2", [X], outputs=[("z", {})])),
    "an output without a name": ("invalid", ConformanceCase("x2", [X], outputs=[("", {})])),
    "an input's name as an output": ("invalid", ConformanceCase("x2", [X], outputs=[("x", {})])),
    "an output asked for twice": (
        "invalid",
        ConformanceCase("x2", [X], outputs=[("y", {}), ("y", {})]),
    ),
    "a timeout that has passed": ("later", ConformanceCase("x2", [X], parameters={"timeout": 1})),
    "a negative timeout": ("invalid", ConformanceCase("x2", [X], parameters={"timeout": -1})),
    "a timeout in words": ("invalid", ConformanceCase("x2", [X], parameters={"timeout": "1"})),
    "a timeout that is a flag": (
        "invalid",
        ConformanceCase("x2", [X], parameters={"timeout": True}),
    ),
    "a timeout that is a fraction": (
        "invalid",
        ConformanceCase("x2", [X], parameters={"timeout": 1.5}),
    ),
    "a negative priority": ("invalid", ConformanceCase("x2", [X], parameters={"priority": -1})),
    "a priority in words": ("invalid", ConformanceCase("x2", [X], parameters={"priority": "high"})),
    "a sequence start in words": (
        "invalid",
        ConformanceCase("x2", [X], parameters={"sequence_start": "yes"}),
    ),
    "a sequence end that is a number": (
        "invalid",
        ConformanceCase("x2", [X], parameters={"sequence_end": 1}),
    ),
    "a sequence id that is a flag": (
        "invalid",
        ConformanceCase("x2", [X], parameters={"sequence_id": True}),
    ),
    "a negative sequence id": (
        "invalid",
        ConformanceCase("x2", [X], parameters={"sequence_id": -1}),
    ),
    "a reserved parameter": (
        "invalid",
        ConformanceCase("x2", [X], parameters={"triton_secret": 1}),
    ),
    "a classification of nothing": (
        "invalid",
        ConformanceCase("x2", [X], outputs=[("y", {"classification": 0})]),
    ),
    "a negative classification": (
        "invalid",
        ConformanceCase("x2", [X], outputs=[("y", {"classification": -1})]),
    ),
    "a classification in words": (
        "invalid",
        ConformanceCase("x2", [X], outputs=[("y", {"classification": "2"})]),
    ),
    "a classification of strings": (
        "invalid",
        ConformanceCase(
            IDENTITY["BYTES"],
            [Input("x", "BYTES", [1, 1], [b"a"])],
            outputs=[("y", {"classification": 1})],
        ),
    ),
    "shared memory in": (
        "unsupported",
        ConformanceCase(
            "x2",
            [
                Input(
                    "x",
                    "FP32",
                    [1, 4],
                    [],
                    b"",
                    {"shared_memory_region": "r", "shared_memory_byte_size": 16},
                )
            ],
        ),
    ),
    "shared memory out": (
        "unsupported",
        ConformanceCase(
            "x2",
            [X],
            outputs=[("y", {"shared_memory_region": "r", "shared_memory_byte_size": 16})],
        ),
    ),
    "a model that fails": ("internal", ConformanceCase("failing", [X])),
    "a boolean that is neither": (
        "invalid",
        ConformanceCase(
            IDENTITY["BOOL"], [Input("x", "BOOL", [1, 1], [], b"\2")], forms=WITHOUT_JSON
        ),
    ),
    "bytes that are not text": (
        "invalid",
        ConformanceCase(
            IDENTITY["BYTES"],
            [Input("x", "BYTES", [1, 1], [], wire.pack([b"\xff"]))],
            forms=WITHOUT_JSON,
        ),
    ),
    "a string longer than its data": (
        "invalid",
        ConformanceCase(
            IDENTITY["BYTES"],
            [Input("x", "BYTES", [1, 1], [], b"\xff\xff\xff\xffa")],
            forms=WITHOUT_JSON,
        ),
    ),
    "half a length": (
        "invalid",
        ConformanceCase(
            IDENTITY["BYTES"], [Input("x", "BYTES", [1, 1], [], b"\1\0")], forms=WITHOUT_JSON
        ),
    ),
    "a value too large for UINT8": (
        "invalid",
        ConformanceCase(IDENTITY["UINT8"], [Input("x", "UINT8", [1, 1], [256])], forms=WITH_VALUES),
    ),
    "a value too small for INT16": (
        "invalid",
        ConformanceCase(
            IDENTITY["INT16"], [Input("x", "INT16", [1, 1], [-32769])], forms=WITH_VALUES
        ),
    ),
}


@pytest.mark.parametrize("what", BAD)
def test_a_bad_request_is_refused_with_the_same_kind(wires: Wires, what: str) -> None:
    kind, case = BAD[what]
    outcome = same(wires, case)
    assert outcome.kind == kind, outcome.text
    wire.assert_public(outcome.text)


@pytest.mark.parametrize("what", BAD)
def test_a_bad_request_leaves_the_next_one_unharmed(wires: Wires, what: str) -> None:
    _, case = BAD[what]
    for form in case.forms:
        wires.send(case, form)
        assert wires.send(ConformanceCase("x2", [X]), form).kind == ""
