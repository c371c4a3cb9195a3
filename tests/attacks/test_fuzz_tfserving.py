"""Mutated requests of TensorFlow Serving's dialect: ``ModelportError`` or nothing at all.

The cases and their limits are those of ``test_fuzz``.
"""

from __future__ import annotations

import contextlib
import gc
import json
import random
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from google.protobuf.message import DecodeError

from modelport.gateway.errors import InvalidArgument
from modelport.gateway.inference.validation import Validator
from modelport.gateway.protocols.tfserving import examples as tfserving_examples
from modelport.gateway.protocols.tfserving import examples_json as tfserving_examples_json
from modelport.gateway.protocols.tfserving import predict_json
from modelport.gateway.protocols.tfserving.json_errors import quoted
from modelport.gateway.protocols.tfserving.servable_signatures import ServableVersion
from modelport.gateway.repository import config as configuration
from modelport.gateway.types import Datatype
from modelport.gateway.wire import tensor_proto
from modelport.gateway.wire.proto import serving_pb2 as pb
from tests import models, processor
from tests.attacks.test_fuzz import (
    CASES,
    VALUES,
    WIRE_CASES,
    Finds,
    _check,
    dump,
    mutate_bytes,
    mutate_value,
)
from tests.conformance import wire
from tests.conformance.wire import KeptConnection
from tests.server import Gateway

SHARE = CASES // 10
WIRE_SHARE = WIRE_CASES
IN_JSON = [d for d in Datatype if d not in (Datatype.FP16, Datatype.BF16)]
ODD: tuple[Any, ...] = (*VALUES, {"b64": "YQ=="}, {"b64": "Y"}, {"b64": 1}, {"b64": "é"}, [[], [1]])


def servable(*tensors: str, batch: int = 8) -> ServableVersion:
    config = configuration.parse(
        models.config(
            "m", tensors, [t.replace("x", "y", 1) for t in tensors], batch, extra=models.PICTURES
        )
    )
    signature = configuration.signature(config)
    served: Any = SimpleNamespace(
        name="m", number=1, config=config, labels={}, signature=signature,
        signatures=SimpleNamespace(known={}, definitions=b""),
        validator=Validator("m", signature), text=None,
    )  # fmt: skip
    return ServableVersion(served)


SERVABLES = [
    *(servable(f"x {datatype} -1") for datatype in Datatype),
    servable("x FP32 2", "xa INT8 1", "xb BYTES 1"),
    servable("x FP32 1 reshape { shape: [] }"),
    servable("x FP32 3,2,2"),  # a picture
    servable("x INT32 2,2", batch=0),
]
PREDICTS: list[Any] = [
    {"instances": [[1, 2], [3, 4]]},
    {"inputs": [[1.5, float("nan")]], "signature_name": "serving_default"},
    {"instances": [{"x": [1, 2], "xa": [1], "xb": ["a"]}, {"x": [1, 2], "xa": [1], "xb": ["b"]}]},
    {"inputs": {"x": [[1, 2]], "xa": [[1]], "xb": [[{"b64": "YQ=="}]]}},
    {"instances": [1.0, 2.0]},
    {"instances": [[True, False]]},
    {"instances": [["a", {"b64": "YQ=="}]]},
    {"instances": [{"b64": "iVBORw0KGgo="}]},
]
EXAMPLES: list[Any] = [
    {"examples": [{"x": [1.0, 2.0]}, {"x": [3.0, 4.0]}]},
    {"context": {"x": 1}, "examples": [{}, {"x": [2]}]},
    {"examples": [{"x": [1, 2], "xa": 3, "xb": "b"}]},
    {"examples": [{"x": {"b64": "YQ=="}}]},
    {"examples": [{"x": [1.0, 2.0, 3.0]}]},
]


def mutated(chance: random.Random, seeds: list[Any]) -> bytes:
    value = chance.choice(seeds)
    for _ in range(chance.choice((0, 1, 1, 2, 4))):
        value = mutate_value(chance, value)
        if chance.random() < 0.2 and isinstance(value, dict) and value:
            value = {**value, chance.choice(list(value)): chance.choice(ODD)}
    body = dump(value)
    return mutate_bytes(chance, body) if chance.random() < 0.3 else body


@contextlib.contextmanager
def quoting() -> Iterator[None]:
    """Errors that quote the client's value, written anew, are not searched for private words."""
    try:
        yield
    except InvalidArgument as error:
        if any(words in str(error) for words in ("JSON Value: ", "named input: ", "name: ")):
            raise InvalidArgument("a quotation") from error
        raise


def test_the_predict_decoder_raises_nothing_unforeseen_and_its_tensors_are_answerable() -> None:
    finds = Finds()
    for number in range(SHARE):
        chance = random.Random(f"tfserving predict {number}")
        model, body = chance.choice(SERVABLES), mutated(chance, PREDICTS)

        def run(model: ServableVersion = model, body: bytes = body) -> None:
            with quoting():
                decoded = predict_json.decode(body, model)
            for tensor in decoded.inputs:
                _check(tensor)
            text = predict_json.encode(decoded.inputs, decoded.by_row)
            assert type(json.loads(text)) is dict

        finds.run(number, body, run)
    finds.assert_none()
    assert SHARE * 0.01 < finds.passed < SHARE * 0.9, "mutations that are too mild, or too wild"


def test_the_examples_decoder_raises_nothing_unforeseen() -> None:
    finds = Finds()
    for number in range(SHARE):
        chance = random.Random(f"tfserving examples {number}")
        model, body = chance.choice(SERVABLES), mutated(chance, EXAMPLES)

        def run(model: ServableVersion = model, body: bytes = body) -> None:
            with quoting():
                message, _ = tfserving_examples_json.decode(body)
            for tensor in tfserving_examples.decode(
                message, model.servable(""), message.ByteSize()
            ):
                _check(tensor)

        finds.run(number, body, run)
    finds.assert_none()
    assert SHARE * 0.01 < finds.passed < SHARE * 0.9, "mutations that are too mild, or too wild"


def grpc_seeds() -> list[bytes]:
    seeds = []
    for model in SERVABLES[:-4]:
        request = pb.PredictRequest(model_spec=pb.ModelSpec(name="x2"))
        tensor = request.inputs["x"]
        tensor.dtype = tensor_proto.DTYPES[model.servable("").inputs["x"].datatype]
        for size in (1, 4):
            tensor.tensor_shape.dim.add(size=size)
        if model.servable("").inputs["x"].datatype is Datatype.BYTES:
            tensor.string_val.extend([b"a", b"b"])
        else:
            tensor.tensor_content = bytes(8 * 4)
        seeds.append(request.SerializeToString())
    request = pb.PredictRequest(model_spec=pb.ModelSpec(name="x2", version={"value": 1}))
    request.inputs["x"].dtype = 1
    request.inputs["x"].float_val.append(1.0)
    request.inputs["x"].tensor_shape.dim.add(size=1)
    request.inputs["x"].tensor_shape.dim.add(size=4)
    request.output_filter.append("y")
    return [*seeds, request.SerializeToString()]


# -- on the wire ----------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["predict", "classify", "regress"])
def test_no_mutated_rest_request_is_the_servers_fault(
    gateway: Gateway, connection: KeptConnection, method: str
) -> None:
    seeds = PREDICTS if method == "predict" else EXAMPLES
    statuses = set()
    for number in range(WIRE_SHARE // 3):
        chance = random.Random(f"tfserving {method} {number}")
        model = chance.choice(("x2", "identity_int8", "identity_bytes", "scalar", "scores"))
        body = mutated(chance, seeds)
        reply = connection.send("POST", f"/v1/models/{model}:{method}", body)
        assert reply.status < 500, (number, body[:1500], reply.body)
        statuses.add(reply.status)
        if reply.status != 200:
            private = wire.private(reply.json["error"], body.decode("latin-1") + ascii(body))
            assert not private, (number, private)
    assert statuses == {200, 400}


def test_no_mutated_rest_path_is_the_servers_fault(connection: KeptConnection) -> None:
    seeds = [b"/v1/models/x2:predict", b"/v1/models/x2/versions/1/metadata", b"/v1/models/x2"]
    for number in range(WIRE_SHARE // 10):
        chance = random.Random(f"tfserving path {number}")
        path = mutate_bytes(chance, chance.choice(seeds)).decode("latin-1")
        path = "".join(c for c in path[:500] if "!" <= c <= "~") or "/"
        path = path if path.startswith("/v1") else "/v1" + path
        reply = connection.send(chance.choice(("GET", "POST", "HEAD")), path, b"")
        assert reply.status < 500, (number, path, reply.body)


def test_no_mutated_grpc_request_is_the_servers_fault(gateway: Gateway) -> None:
    seeds, codes = grpc_seeds(), set()
    with grpc.insecure_channel(gateway.grpc) as channel:
        call = channel.unary_unary("/tensorflow.serving.PredictionService/Predict")
        for number in range(WIRE_SHARE // 2):
            chance = random.Random(f"tfserving grpc {number}")
            data = chance.choice(seeds)
            if chance.random() < 0.9:
                data = mutate_bytes(chance, data)
            try:
                pb.PredictResponse.FromString(call(data, timeout=30))
                codes.add("OK")
            except grpc.RpcError as error:
                code = error.code().name
                codes.add(code if code not in ("INTERNAL", "UNKNOWN") else f"{code}: {number}")
            except DecodeError:
                pytest.fail(f"case {number}: a reply that does not parse")
    assert {"OK", "INVALID_ARGUMENT"} <= codes
    assert not [code for code in codes if ":" in code], "cases that are the server's fault"


# -- time and memory ------------------------------------------------------------------------------

EXAMPLE_BOMBS = {
    "values": b'{"examples": [{"x": [' + b"1," * 2_000_000 + b"1]}]}",
    "values of two kinds": b'{"examples": [{"x": [' + b"1," * 2_000_000 + b"1.5]}]}",
    "features": b'{"examples": [{' + b",".join(b'"%d":1' % n for n in range(400_000)) + b"}]}",
    "examples": b'{"examples": [' + b"{}," * 1_000_000 + b"{}]}",
}


@pytest.mark.thorough
@pytest.mark.parametrize("what", EXAMPLE_BOMBS)
def test_millions_of_them_do_not_hold_up_everybody_else(what: str) -> None:
    """One by one they took seconds."""

    def seconds() -> float:
        started = time.process_time()
        with contextlib.suppress(InvalidArgument):
            tfserving_examples_json.decode(EXAMPLE_BOMBS[what])
        return processor.seconds_since(started)

    assert min(seconds() for _ in range(3)) < 0.6


@pytest.mark.parametrize(
    ("values", "kind", "held"),
    [
        ("[true, 2]", "int64_list", [1, 2]),
        ("[true, false]", "int64_list", [1, 0]),
        ("1.5", "float_list", [1.5]),
        ('["a", {"b64": "/w=="}]', "bytes_list", [b"a", b"\xff"]),
        ("[]", None, []),
    ],
)
def test_values_of_a_feature_are_of_one_kind(
    values: str, kind: str | None, held: list[Any]
) -> None:
    body = f'{{"examples": [{{"x": {values}}}]}}'.encode()
    message, _ = tfserving_examples_json.decode(body)
    feature = message.example_list.examples[0].features.feature["x"]
    assert feature.WhichOneof("kind") == kind
    assert list(getattr(feature, kind).value if kind else ()) == held


class Kept(list[int]):
    """A list that counts how many there are."""

    alive = 0

    def __init__(self, values: Any) -> None:
        super().__init__(values)
        Kept.alive += 1

    def __del__(self) -> None:
        Kept.alive -= 1


@contextlib.contextmanager
def gc_paused() -> Iterator[None]:
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def test_a_quotation_does_not_keep_what_it_quotes() -> None:
    """A generator that looked for circles did, and with it every document that was refused."""
    document = {"x": Kept([1])}
    with gc_paused():
        assert quoted(document) == '{"x":[1]}'
        assert quoted({"x": Kept(range(1000))}).startswith('{"x":[0,1,2')
        assert Kept.alive == 1
    del document
