"""TensorFlow Serving's codecs by themselves: what no model of the conformance suite answers."""

from __future__ import annotations

import contextlib
import gc
import json
import time
import weakref
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from modelport.gateway.errors import (
    Internal,
    InvalidArgument,
    NotFound,
    QueueFull,
    TimedOut,
    Unavailable,
    Unsupported,
)
from modelport.gateway.inference.validation import Validator
from modelport.gateway.protocols.tfserving import examples as tfserving_examples
from modelport.gateway.protocols.tfserving import examples_json, predict_json, results
from modelport.gateway.protocols.tfserving.http import STATUS
from modelport.gateway.protocols.tfserving.servable_lookup import Servables
from modelport.gateway.protocols.tfserving.servable_signatures import (
    Selected,
    ServableSignature,
    ServableVersion,
    code,
)
from modelport.gateway.repository import config as configuration
from modelport.gateway.types import NUMPY_DTYPES, Datatype, InferResponse, Tensor
from modelport.gateway.wire import json_writer
from modelport.gateway.wire.proto import serving_pb2 as pb
from tests import models, processor


def version(
    *inputs: str, outputs: tuple[str, ...] = ("y FP32 -1",), batch: int = 8
) -> ServableVersion:
    config = configuration.parse(models.config("m", inputs, outputs, batch))
    signature = configuration.signature(config)
    served: Any = SimpleNamespace(
        name="m", number=1, config=config, labels={}, signature=signature,
        signatures=SimpleNamespace(known={}, definitions=b""),
        validator=Validator("m", signature), text=None,
    )  # fmt: skip
    return ServableVersion(served)


def servable(
    *inputs: str, outputs: tuple[str, ...] = ("y FP32 -1",), batch: int = 8
) -> ServableSignature:
    return version(*inputs, outputs=outputs, batch=batch).servable("")


def tensor(name: str, datatype: Datatype, values: Any) -> Tensor:
    return Tensor(name, datatype, np.array(values, NUMPY_DTYPES[datatype]))


# -- replies --------------------------------------------------------------------------------------


def test_an_output_named_bytes_is_base64_by_row_and_column() -> None:
    output = tensor("image_bytes", Datatype.BYTES, [b"\xff", b""])
    assert predict_json.encode([output], True) == (b'{"predictions":[{"b64":"/w=="},{"b64":""}]}')
    assert predict_json.encode([output], False) == b'{"outputs":[{"b64":"/w=="},{"b64":""}]}'
    scalar = tensor("image_bytes", Datatype.BYTES, b"a")
    assert predict_json.encode([scalar], False) == b'{"outputs":{"b64":"YQ=="}}'


def test_scalars_and_empty_outputs_are_written() -> None:
    assert predict_json.encode([tensor("y", Datatype.FP32, 0.1)], False) == b'{"outputs":0.1}'
    nan = tensor("y", Datatype.FP64, float("nan"))
    assert predict_json.encode([nan], False) == b'{"outputs":NaN}'
    empty = Tensor("y", Datatype.FP32, np.zeros((2, 0), np.float32))
    assert predict_json.encode([empty], True) == b'{"predictions":[[],[]]}'
    strided = Tensor("y", Datatype.INT32, np.arange(6, dtype=np.int32).reshape(2, 3).T)
    assert predict_json.encode([strided], True) == b'{"predictions":[[0,3],[1,4],[2,5]]}'


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        ([tensor("y", Datatype.FP32, 1.0)], "Tensor name: y has no shape information "),
        (
            [tensor("y", Datatype.FP32, [1.0]), tensor("z", Datatype.FP32, [1.0, 2.0])],
            "Tensor name: z has inconsistent batch size: 2 expecting: 1",
        ),
        ([tensor("y", Datatype.FP16, [1.0])], "Failed to write JSON value for tensor type: half"),
    ],
)
def test_what_makes_no_rows_is_refused(outputs: list[Tensor], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        predict_json.encode(outputs, True)


# -- requests -------------------------------------------------------------------------------------


def test_optional_inputs_may_be_left_out() -> None:
    model = version("a FP32 1", "b FP32 1 optional: true")
    for body in (b'{"instances": [{"a": [1]}]}', b'{"inputs": {"a": [[1]]}}'):
        tensors = predict_json.decode(body, model).inputs
        assert [t.name for t in tensors] == ["a"]
    with pytest.raises(InvalidArgument, match="keys must be equal to: a,b"):
        predict_json.decode(b'{"instances": [{"b": [1]}]}', model)


def test_both_shapes_of_a_reshaped_input_become_the_wires() -> None:
    model = version("x FP32 6 reshape { shape: 2,3 }".replace("2,3", "[2, 3]"))
    for values in ([[[1, 2, 3], [4, 5, 6]]], [[1, 2, 3, 4, 5, 6]]):
        decoded = predict_json.decode(f'{{"inputs": {values}}}'.encode(), model)
        request = decoded.servable.request(decoded.inputs, (), "")
        assert request.inputs[0].data.tolist() == [[1, 2, 3, 4, 5, 6]]
    response = InferResponse("m", 1, [tensor("y", Datatype.FP32, [[1.0]])])
    assert decoded.servable.outputs_of(request, response)[0].data.shape == (1, 1)


def decode_examples(message: pb.Input, model: ServableSignature) -> list[Tensor]:
    return tfserving_examples.decode(message, model, message.ByteSize())


def test_serialized_examples_go_to_a_model_that_parses_them_itself() -> None:
    model = servable("inputs BYTES 1 reshape { shape: [] }")
    message = pb.Input()
    listed = message.example_list_with_context
    listed.context.features.feature["a"].int64_list.value.append(1)
    listed.examples.add().features.feature["b"].int64_list.value.append(2)
    (found,) = decode_examples(message, model)
    merged = type(listed.context).FromString(found.data.reshape(-1)[0])
    assert set(merged.features.feature) == {"a", "b"}


def test_a_dynamic_dimension_has_as_many_values_as_the_examples() -> None:
    message = pb.Input()
    for length in (3, 3):
        example = message.example_list.examples.add()
        example.features.feature["x"].int64_list.value.extend(range(length))
    (found,) = decode_examples(message, servable("x INT64 -1"))
    assert found.data.tolist() == [[0, 1, 2], [0, 1, 2]]
    message.example_list.examples[1].features.feature["x"].int64_list.value.append(3)
    with pytest.raises(InvalidArgument, match="has 4 values in example 1, expected 3"):
        decode_examples(message, servable("x INT64 -1"))
    with pytest.raises(InvalidArgument, match="more than one dynamic dimension"):
        decode_examples(message, servable("x INT64 -1,-1"))


def classified(classes: results.Classes) -> Any:
    content = b"".join(results.classification_fields(classes))
    return pb.ClassificationResult.FromString(content).classifications


def test_classes_and_scores_are_those_of_the_outputs_of_that_name() -> None:
    model = servable("x FP32 1", outputs=("classes BYTES -1", "scores FP32 -1", "z FP32 -1"))
    assert tfserving_examples.classification_outputs(model) == ("classes", "scores")
    outputs = [
        tensor("classes", Datatype.BYTES, [[b"a", b"b"]]),
        tensor("scores", Datatype.FP32, [[0.5, 0.25]]),
    ]
    (row,) = classified(tfserving_examples.classify(outputs, model, 1))
    assert [(c.label, c.score) for c in row.classes] == [("a", 0.5), ("b", 0.25)]
    (row,) = classified(tfserving_examples.classify(outputs[:1], model, 1))
    assert [(c.label, c.score) for c in row.classes] == [("a", 0.0), ("b", 0.0)]
    (row,) = classified(tfserving_examples.classify(outputs[1:], model, 1))
    assert [(c.label, c.score) for c in row.classes] == [("", 0.5), ("", 0.25)]
    outputs[1].data = outputs[1].data[:, :1]
    with pytest.raises(InvalidArgument, match=r"should match in dim_size\(1\). Got 2 vs. 1"):
        tfserving_examples.classify(outputs, model, 1)
    with pytest.raises(InvalidArgument, match=r"Expected scores output batch size of 2\. Got: 1"):
        tfserving_examples.classify(outputs[1:], model, 2)


def test_one_value_an_example_is_a_regression() -> None:
    model = servable("x FP32 1", outputs=("outputs FP32 1", "more FP32 1"))
    assert tfserving_examples.regression_output(model) == ("outputs",)
    values = tfserving_examples.regress([tensor("y", Datatype.FP32, [[1.0], [2.0]])], model, 2)
    result = pb.RegressionResult.FromString(b"".join(results.regression_fields(values)))
    assert [regression.value for regression in result.regressions] == [1.0, 2.0]
    for wrong in ([[1.0, 2.0]], 1.0):
        with pytest.raises(InvalidArgument, match="Expected output Tensor shape to be either"):
            tfserving_examples.regress([tensor("y", Datatype.FP32, wrong)], model, 1)


# -- names ----------------------------------------------------------------------------------------


def test_every_error_has_tensorflow_servings_code_and_http_status() -> None:
    assert {type(e): (code(e), STATUS[code(e)]) for e in (
        InvalidArgument(), NotFound(), Unsupported(), Unavailable(), QueueFull(), TimedOut(),
        Internal(),
    )} == {
        InvalidArgument: ("INVALID_ARGUMENT", 400),
        NotFound: ("NOT_FOUND", 404),
        Unsupported: ("UNIMPLEMENTED", 501),
        Unavailable: ("UNAVAILABLE", 503),
        QueueFull: ("RESOURCE_EXHAUSTED", 429),
        TimedOut: ("DEADLINE_EXCEEDED", 504),
        Internal: ("INTERNAL", 500),
    }  # fmt: skip


def test_what_was_computed_for_a_version_goes_with_it() -> None:
    class Version:
        name, number, labels = "m", 1, {}
        config = configuration.parse(models.config("m", ["x FP32 1"], ["y FP32 1"]))
        signature = configuration.signature(config)
        signatures = SimpleNamespace(known={}, definitions=b"")
        validator = SimpleNamespace(max_bytes=None)
        text = None

    version: Version | None = Version()
    manager: Any = SimpleNamespace(get=lambda *_: version)
    servables = Servables(manager, control=manager)
    found = servables.find(Selected("m"))
    assert servables.find(Selected("m", 1)) is found
    gone, kept = weakref.ref(version), weakref.ref(found)
    del found
    version = None
    gc.collect()
    assert (gone(), kept()) == (None, None)


def test_a_wrong_value_at_the_end_of_a_large_body_costs_little_more_than_a_good_one() -> None:
    model = version("x INT32 -1")
    good = b'{"instances": [[' + b"1," * 2_000_000 + b"1]]}"

    def seconds(body: bytes) -> float:
        started = time.process_time()
        with contextlib.suppress(InvalidArgument):
            predict_json.decode(body, model)
        return processor.seconds_since(started)

    bad = good[:-4] + b'"1"]]}'
    with pytest.raises(InvalidArgument, match="array of more than 500000 elements must hold only"):
        predict_json.decode(bad, model)
    assert seconds(bad) < 3 * seconds(good) + 0.5


# -- a context that all examples share -------------------------------------------------------------


def with_context(features: int, examples: int) -> pb.Input:
    message = pb.Input()
    shared = message.example_list_with_context
    shared.context.features.feature["x"].float_list.value.extend([0.5] * features)
    for _ in range(examples):
        shared.examples.add()
    return message


def test_a_context_is_every_example_s_that_has_no_feature_of_its_own() -> None:
    message = with_context(2, 3)
    own = message.example_list_with_context.examples[1].features.feature["x"].float_list
    own.value.extend([1, 2])
    (found,) = decode_examples(message, servable("x FP32 2"))
    assert found.data.tolist() == [[0.5, 0.5], [1, 2], [0.5, 0.5]]


@pytest.mark.parametrize("inputs", ["x FP32 -1", "inputs BYTES 1 reshape { shape: [] }"])
def test_copies_of_a_context_are_limited(inputs: str) -> None:
    message = with_context(8000, 16_000)
    model = servable(inputs, batch=100_000)
    with pytest.raises(InvalidArgument, match="the context, repeated for every example"):
        decode_examples(message, model)
    assert decode_examples(with_context(8000, 100), model)[0].data.shape[0] == 100


def test_more_examples_than_the_model_takes_are_refused_before_they_are_looked_at() -> None:
    with pytest.raises(InvalidArgument, match="batch-size must be <= 8 for 'm'"):
        decode_examples(with_context(1, 9), servable("x FP32 1"))


# -- large replies ---------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(40,), (1, 40), (40, 1), (3, 5, 2), (2, 0), (0, 2), ()])
@pytest.mark.parametrize("datatype", [Datatype.FP32, Datatype.INT64, Datatype.BYTES])
def test_a_reply_in_pieces_is_the_reply_at_once(
    shape: tuple[int, ...], datatype: Datatype, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = int(np.prod(shape))
    flat: Any = [b"t%d" % index for index in range(count)]
    if datatype is Datatype.BYTES:
        data = np.empty(count, object)
        data[:] = flat
    else:
        data = np.arange(count).astype(NUMPY_DTYPES[datatype])
        if datatype is Datatype.FP32:
            data[::3] = [np.nan, np.inf, -np.inf, 0.1][count % 4]
    one = Tensor("a", datatype, data.reshape(shape))
    outputs = [one, Tensor("b", datatype, one.data)]
    rows = (True, False) if shape else (False,)
    replies = []
    for piece in (1 << 20, 1, 7):
        monkeypatch.setattr(json_writer, "PIECE", piece)
        replies.append(
            [bytes(predict_json.encode(o, r)) for o in (outputs, outputs[:1]) for r in rows]
        )
    assert replies[0] == replies[1] == replies[2]


def test_results_in_pieces_are_the_results_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    scores = np.linspace(0, 1, 20, dtype=np.float32).reshape(2, 10)
    names = [[f"l{index}" for index in range(10)]] * 2
    found = []
    for piece in (100, 3):
        monkeypatch.setattr(results, "PIECE", piece)
        classes = [results.Classes(a, b) for a, b in ((names, scores), (None, scores))]
        classes.append(results.Classes(names, None))
        found.append(
            [
                *(b"".join(results.classification_fields(each)) for each in classes),
                *(bytes(results.classification_json(each)) for each in classes),
                b"".join(results.regression_fields(scores.reshape(-1))),
            ]
        )
    assert found[0] == found[1]


def test_the_values_of_a_feature_are_added_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call with millions would hold the interpreter lock for 70 ms."""
    sizes: list[int] = []
    extend = examples_json._extend

    def noted(feature: Any, name: str, values: list[Any]) -> None:
        sizes.append(len(values))
        extend(feature, name, values)

    monkeypatch.setattr(examples_json, "_extend", noted)
    values = list(range(10_000))
    message, _ = examples_json.decode(json.dumps({"examples": [{"x": values}]}).encode())
    (example,) = message.example_list.examples
    assert list(example.features.feature["x"].int64_list.value) == values
    assert sum(sizes) == 10_000
    assert max(sizes) <= examples_json.PIECE
    with pytest.raises(InvalidArgument, match="expecting type: int64"):
        examples_json.decode(json.dumps({"examples": [{"x": [*values, 0.5]}]}).encode())
