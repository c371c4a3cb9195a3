"""Mutated bodies of predictions, forms and pictures: ``ModelportError`` or nothing at all.

``MODELPORT_FUZZ_CASES`` and ``MODELPORT_FUZZ_WIRE_CASES`` as in ``test_fuzz``.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import http.client
import io
import json
import random
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from urllib.parse import unquote_to_bytes

import grpc
import numpy as np
import pytest
from google.protobuf.message import DecodeError
from PIL import Image

from modelport.gateway.errors import InvalidArgument
from modelport.gateway.inference.validation import Validator
from modelport.gateway.protocols.prediction import form_body
from modelport.gateway.protocols.prediction.predictor import PredictionCall, _BodyDecoder
from modelport.gateway.protocols.torchserve.grpc import INFERENCE_SERVICE
from modelport.gateway.repository import config as configuration
from modelport.gateway.types import InferResponse, Tensor
from modelport.gateway.wire.proto import torchserve_inference_pb2 as inference
from tests import models, processor
from tests.attacks.test_fuzz import CASES, WIRE_CASES, Finds, dump, mutate_bytes, mutate_value
from tests.conformance import wire
from tests.conformance.repository import add
from tests.conformance.wire import KeptConnection, json_body, json_input
from tests.server import Gateway, serving

SHARE = CASES // 5
BOUNDARY = "----fuzz"


def picture(form: str) -> bytes:
    stream = io.BytesIO()
    pixels = np.random.default_rng(0).integers(0, 256, (8, 8, 3), np.uint8)
    Image.fromarray(pixels).save(stream, form)
    return stream.getvalue()


#: name → inputs and outputs: every kind of model that bodies are told apart for.
MODELS: dict[str, tuple[list[str], list[str], int]] = {
    "numbers": (["x FP32 4"], ["y FP32 4"], 8),
    "open": (["x INT64 -1,2"], ["y INT64 -1,2"], 0),
    "halves": (["x FP16 -1"], ["y FP16 -1"], 4),
    "pictures": (["x FP32 3,4,4"], ["y FP32 3,4,4"], 4),
    "texts": (["x BYTES 1"], ["y BYTES 1"], 8),
    "words": (["x BYTES -1"], ["y BYTES -1"], 8),
    "pair": (["a FP32 2", "b BYTES 1"], ["c FP32 2", "d BYTES 1"], 2),
}


def forms(name: str) -> Any:
    """The prediction formats of one of the models."""
    inputs, outputs, most = MODELS[name]
    text = models.config(name, inputs, outputs, max_batch_size=most, extra=models.PICTURES)
    config = configuration.parse(text)
    signature = configuration.signature(config)
    served: Any = SimpleNamespace(
        name=name,
        config=config,
        signature=signature,
        validator=Validator(name, signature),
        labels={},
        text=None,
    )
    return _BodyDecoder(served)


FORMS = {name: forms(name) for name in MODELS}


def seeds() -> list[Any]:
    """Documents that are good for some model."""
    b64 = {"b64": base64.b64encode(picture("PNG")).decode()}
    return [
        {"instances": [[1, 2, 3, 4], [5, 6, 7, 8]]},
        {"instances": [{"x": [1, 2, 3, 4]}]},
        {"instances": [b64, b64]},
        {"instances": [["text"], [{"b64": "/w=="}]]},
        {"instances": [{"a": [1.5, 2], "b": ["x"]}, {"a": [1, 2], "b": ["y"]}]},
        {"data": {"a": [1, 2], "b": ["x"]}},
        {"data": [[1, 2], [3, 4]]},
        {"data": b64},
        [[1, 2], [3, 4]],
        [1.0, 2.5, float("nan"), 4],
        "text",
        json.loads(json_body(json_input("x", "FP32", [1, 4], [1, 2, 3, 4]), id="a")),
        json.loads(json_body(json_input("x", "BYTES", [1, 1], ["text"]))),
    ]


SEEDS = seeds()
BINARY = json_body(json_input("x", "FP32", [1, 4], binary_data_size=16)) + b"\1\2\3\4" * 4
PICTURES = (picture("PNG"), picture("JPEG"))


def body(chance: random.Random) -> bytes:
    kind = chance.randrange(8)
    if kind == 0:
        return mutate_bytes(chance, chance.choice(PICTURES))
    if kind == 1:
        return mutate_bytes(chance, BINARY)
    document = chance.choice(SEEDS)
    for _ in range(chance.choice((0, 1, 1, 2))):
        document = mutate_value(chance, document)
    text = dump(document)
    return mutate_bytes(chance, text) if kind == 2 else text


def answerable(found: Any, call: PredictionCall) -> None:
    """Check that accepted inputs can be encoded as outputs, which have the same types."""
    request, encode = found.decode(call)
    signature = found._signature
    names = {
        spec.name: out.name for spec, out in zip(signature.inputs, signature.outputs, strict=True)
    }
    outputs = []
    for tensor in request.inputs:
        expected = {spec.name: spec for spec in signature.inputs}.get(tensor.name)
        assert tensor.data.nbytes < 1 << 24
        if expected is None or tensor.datatype is not expected.datatype:
            return  # which validation refuses
        rank = len(expected.dims) + (signature.max_batch_size > 0)
        if tensor.data.ndim != rank or not tensor.data.size:
            return
        outputs.append(Tensor(names[tensor.name], tensor.datatype, tensor.data))
    if len({len(tensor.data) for tensor in outputs}) != 1:
        return
    encode(InferResponse("model", 1, outputs, request.id))


def test_bodies_of_predictions_raise_nothing_unforeseen() -> None:
    finds = Finds()
    for number in range(SHARE):
        chance = random.Random(f"prediction {number}")
        content = body(chance)
        found = FORMS[chance.choice(list(FORMS))]
        kind = chance.choice((b"", b"", b"application/json", b"image/png", b"text/plain"))
        length = chance.randrange(len(content) + 1) if chance.random() < 0.05 else None
        call = PredictionCall("model", 1, content, kind, length)
        finds.run(number, content, functools.partial(answerable, found, call))
    finds.assert_none()
    assert SHARE * 0.05 < finds.passed < SHARE * 0.9, "mutations that are too mild, or too wild"


def multipart(content: bytes) -> bytes:
    head = f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="data"; filename="a"\r\n'
    return (
        f"{head}Content-Type: image/png\r\n\r\n".encode()
        + content
        + f"\r\n--{BOUNDARY}--\r\n".encode()
    )


def test_forms_raise_nothing_unforeseen() -> None:
    finds = Finds()
    kinds = (f"multipart/form-data; boundary={BOUNDARY}".encode(), form_body.URLENCODED)
    for number in range(SHARE):
        chance = random.Random(f"form {number}")
        header = chance.choice(kinds)
        whole = (
            multipart(b"content\r\n--") if b"multipart" in header else b"a=1&data=%7b%7D+x&data=2"
        )
        content = mutate_bytes(chance, whole)
        if chance.random() < 0.1:
            header = mutate_bytes(chance, header)
        finds.run(number, content, functools.partial(form_body.data_field, content, header))
    finds.assert_none()
    assert SHARE * 0.1 < finds.passed < SHARE * 0.95, "mutations that are too mild, or too wild"


@pytest.mark.parametrize(
    "hostile",
    [
        b'{"a":"' + b'\\"' * 2_000_000,
        b'"' * 4_000_000,
        b'{"a":[' + b"[]," * 2_000_000,
        b"[" + b'"",' * 2_000_000 + b"x",
        b'{"a":1' + b" " * 8_000_000,
        b"{" * 4_000_000,
        b'{"instances":[' + b"[[]]," * 200_000 + b"[[]]]}",
        b" " * 8_000_000,
    ],
)
def test_a_hostile_body_costs_no_more_than_its_size(hostile: bytes) -> None:
    started = time.process_time()
    with contextlib.suppress(InvalidArgument):
        FORMS["numbers"].decode(PredictionCall("numbers", 1, hostile))
    assert processor.seconds_since(started) < 3


def test_a_hostile_form_costs_no_more_than_its_size() -> None:
    header = f"multipart/form-data; boundary={BOUNDARY}".encode()
    for filling in (
        b"\r\n-",
        f"\r\n--{BOUNDARY[:-1]}".encode(),
        f"\r\n--{BOUNDARY}\r\n\r\n".encode(),
    ):
        started = time.process_time()
        with contextlib.suppress(InvalidArgument):
            form_body.data_field(multipart(filling * (4_000_000 // len(filling))), header)
        assert processor.seconds_since(started) < 3
    with pytest.raises(InvalidArgument):
        form_body.data_field(multipart(f"\r\n--{BOUNDARY}\r\n\r\n".encode() * 500), header)


@pytest.mark.parametrize("name", ["%41" * 1_000_000, "a" * 4_000_000])
def test_a_long_name_in_a_form_is_not_read(name: str) -> None:
    started = time.process_time()
    with pytest.raises(InvalidArgument, match="no field 'data'"):
        form_body.data_field(name.encode() + b"=1", form_body.URLENCODED)
    assert processor.seconds_since(started) < 0.1


def test_a_part_of_line_ends_costs_no_call_for_each() -> None:
    """The parser's calls for every one took 23 s for what gzip makes of 65 KB."""
    content = b"\r\n" * 4_000_000
    header = f"multipart/form-data; boundary={BOUNDARY}".encode()
    started = time.process_time()
    assert form_body.data_field(multipart(content), header).content == content
    assert processor.seconds_since(started) < 1


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    root = models.repository(tmp_path_factory.mktemp("fuzz") / "models")
    text = models.config("pictures", ["x FP32 3,2,2"], ["y FP32 12"], extra=models.PICTURES)
    models.flatten(add(root, "pictures", text))
    models.fake(root, "words", "BYTES", "-1")
    with serving(root) as gateway:
        yield gateway


def test_no_mutated_request_is_answered_with_a_fault_of_the_server(served: Gateway) -> None:
    connection = KeptConnection(served.http)
    paths = ("/predictions/x2", "/predictions/pictures", "/predictions/words", "/models/x2/invoke")
    kinds = (
        *("application/json", "image/png", "", "application/x-www-form-urlencoded"),
        f"multipart/form-data; boundary={BOUNDARY}",
        "application/vnd.sagemaker-triton.binary+json;json-header-size=9",
    )
    statuses: dict[int, int] = {}
    for number in range(WIRE_CASES // 4):
        chance = random.Random(f"predictions wire {number}")
        kind = chance.choice(kinds)
        content = body(chance)
        if kind.startswith("multipart"):
            content = multipart(content)
        path = chance.choice(paths)
        if chance.random() < 0.1:
            path += chance.choice(
                ("/1", "/0", "/99", "/%2e%2e", "/1.0", "/-1", "/" + "9" * 40, "//")
            )
        headers = {"Content-Type": kind} if kind else {}
        try:
            reply = connection.send("POST", path, content, headers)
        except (http.client.HTTPException, ConnectionError):
            connection.close()
            connection = KeptConnection(served.http)
            continue
        assert reply.status < 500, f"case {number}: {path} {kind}: {reply}"
        statuses[reply.status] = statuses.get(reply.status, 0) + 1
        if reply.status != 200:
            assert "x-request-id" in reply.headers or path.startswith("/models/x2/invoke")
    connection.close()
    assert statuses[200] > 50, statuses
    assert statuses[400] > 50, statuses
    good = wire.send(served.http, "POST", "/predictions/x2", b"[1, 2, 3, 4]")
    assert good.json == [2, 4, 6, 8]


def test_mutated_messages_do_no_harm_over_grpc(served: Gateway) -> None:
    statuses: dict[str, int] = {}
    with wire.channel(served.grpc) as channel:
        call = channel.unary_unary(f"/{INFERENCE_SERVICE}/Predictions")
        for number in range(WIRE_CASES // 10):
            chance = random.Random(f"predictions grpc {number}")
            message = inference.PredictionsRequest(
                model_name=chance.choice(("x2", "pictures", "words"))
            )
            message.input[chance.choice(("data", "body", "x"))] = body(chance)
            sent = message.SerializeToString()
            sent = mutate_bytes(chance, sent) if chance.random() < 0.3 else sent
            try:
                call(sent, timeout=20)
                status = "OK"
            except grpc.RpcError as error:
                status = error.code().name
                # INTERNAL is TorchServe's for a model that is not found.
                unknown = ("not found", "does not exist")
                if status == "INTERNAL" and not any(t in error.details() for t in unknown):
                    status = f"INTERNAL: {error.details()}"
            statuses[status] = statuses.get(status, 0) + 1
            with contextlib.suppress(DecodeError):
                inference.PredictionsRequest.FromString(sent)
    assert statuses.keys() <= {"OK", "INVALID_ARGUMENT", "INTERNAL"}, statuses
    assert statuses["OK"] > 10, statuses


def test_escapes_of_a_form_are_read_as_the_standard_library_reads_them() -> None:
    for number in range(CASES // 10):
        chance = random.Random(f"escapes {number}")
        text = bytes(chance.choices(b"%%%%0aAfFgz+&", k=chance.randrange(12)))
        expected = unquote_to_bytes(text.replace(b"+", b" "))
        assert form_body._unquote(text) == expected, text
    for size in range(4):
        assert form_body._unquote(b"%" * size) == b"%" * size
    long = bytes(random.Random("long").choices(b"%%%%0aAfFgz+&", k=300_000))
    assert form_body._unquote(long) == unquote_to_bytes(long.replace(b"+", b" "))


def test_millions_of_escapes_in_a_form_do_not_hold_up_everybody_else() -> None:
    """The standard library's list of what is between them took six seconds and a gigabyte."""
    form = b"data=" + b"%41" * 4_000_000

    def seconds() -> float:
        started = time.process_time()
        assert len(form_body.data_field(form, form_body.URLENCODED).content) == 4_000_000
        return processor.seconds_since(started)

    assert min(seconds() for _ in range(3)) < 0.5


def test_a_picture_is_decoded_in_a_thread_however_its_key_is_written() -> None:
    data = base64.b64encode(picture("PNG"))
    for key in (rb"b64", rb"\u006264", rb"b\u00364", rb"b6\u0034"):
        call = PredictionCall("pictures", 1, b'{"instances": [{"%b": "%b"}]}' % (key, data))
        assert json.loads(call.body)["instances"][0].keys() == {"b64"}
        assert FORMS["pictures"].slow(call)
    assert not FORMS["pictures"].slow(PredictionCall("pictures", 1, b'{"instances": [[1, 2]]}'))
