"""Auto-complete: fields that a configuration omits come from the artifact; others must match it."""

from __future__ import annotations

import pytest

from modelport.gateway.errors import InvalidArgument
from modelport.gateway.repository import config
from modelport.gateway.repository.autocomplete import (
    DEFAULT_MAX_BATCH_SIZE,
    ArtifactTensor,
    complete,
)
from modelport.gateway.types import Datatype

X = ArtifactTensor("x", Datatype.FP32, (-1, 4))
Y = ArtifactTensor("y", Datatype.FP32, (-1, 4))
FIXED = ArtifactTensor("x", Datatype.FP32, (2, 4))
SCALAR = ArtifactTensor("s", Datatype.INT64, ())
PER_ELEMENT = ArtifactTensor("s", Datatype.INT64, (-1,))
DECLARED = 'input { name: "x" data_type: TYPE_FP32 dims: 4 }'


def refused(text: str, inputs: list[ArtifactTensor], outputs: list[ArtifactTensor]) -> str:
    with pytest.raises(InvalidArgument) as caught:
        complete(config.parse(text), inputs, outputs)
    return str(caught.value)


def test_without_a_configuration_inputs_outputs_and_batching_come_from_the_artifact() -> None:
    done = complete(config.parse(""), [X], [Y])
    assert done.max_batch_size == DEFAULT_MAX_BATCH_SIZE == 4
    assert [(t.name, list(t.dims), t.data_type) for t in (*done.input, *done.output)] == [
        ("x", [4], config.data_type(Datatype.FP32)),
        ("y", [4], config.data_type(Datatype.FP32)),
    ]


def test_a_fixed_first_dimension_anywhere_means_no_batching() -> None:
    done = complete(config.parse(""), [X], [ArtifactTensor("y", Datatype.FP32, (1, 4))])
    assert done.max_batch_size == 0
    assert list(done.input[0].dims) == [-1, 4]


def test_the_batch_size_that_is_configured_is_kept() -> None:
    done = complete(config.parse("max_batch_size: 32"), [X], [Y])
    assert done.max_batch_size == 32
    assert list(done.input[0].dims) == [4]


def test_declared_inputs_stand_and_only_outputs_are_filled_in() -> None:
    done = complete(config.parse("max_batch_size: 2 " + DECLARED), [X], [Y])
    assert list(done.input[0].dims) == [4]
    assert [t.name for t in done.output] == ["y"]


def test_declared_inputs_with_batch_size_zero_are_used_unchanged() -> None:
    done = complete(
        config.parse('input { name: "x" data_type: TYPE_FP32 dims: [ -1, 4 ] }'), [X], [Y]
    )
    assert done.max_batch_size == 0
    assert list(done.output[0].dims) == [-1, 4]


def test_a_scalar_travels_as_one_element() -> None:
    done = complete(config.parse(""), [SCALAR], [SCALAR])
    assert list(done.input[0].dims) == [1]
    assert done.input[0].HasField("reshape")
    assert list(done.input[0].reshape.shape) == []


def test_a_scalar_per_batch_element_travels_as_one_element() -> None:
    done = complete(config.parse("max_batch_size: 3"), [PER_ELEMENT], [PER_ELEMENT])
    assert list(done.input[0].dims) == [1]
    assert config.signature(done).inputs[0].reshape == ()


def test_an_input_that_the_model_does_not_have_is_refused_with_those_it_has() -> None:
    reason = refused('max_batch_size: 1 input { name: "z" data_type: TYPE_FP32 dims: 4 }', [X], [Y])
    assert "declares input 'z'" in reason
    assert "'x'" in reason


def test_an_input_that_is_not_declared_is_refused() -> None:
    second = ArtifactTensor("x2", Datatype.FP32, (-1, 4))
    assert "takes input 'x2'" in refused("max_batch_size: 1 " + DECLARED, [X, second], [Y])


def test_another_datatype_is_refused_with_both() -> None:
    text = 'max_batch_size: 1 input { name: "x" data_type: TYPE_INT32 dims: 4 }'
    reason = refused(text, [X], [Y])
    assert "TYPE_INT32" in reason
    assert "TYPE_FP32" in reason


def test_strings_are_called_type_string() -> None:
    text = 'max_batch_size: 1 input { name: "x" data_type: TYPE_INT32 dims: 4 }'
    assert "TYPE_STRING" in refused(text, [ArtifactTensor("x", Datatype.BYTES, (-1, 4))], [Y])


@pytest.mark.parametrize("dims", ["5", "[ 4, 1 ]", "[ 2, 2 ]"])
def test_another_shape_is_refused_with_both(dims: str) -> None:
    text = f'max_batch_size: 1 input {{ name: "x" data_type: TYPE_FP32 dims: {dims} }}'
    assert "but the model has [-1, 4]" in refused(text, [X], [Y])


def test_a_dynamic_size_is_refused_where_the_model_has_a_fixed_one() -> None:
    text = 'max_batch_size: 1 input { name: "x" data_type: TYPE_FP32 dims: -1 }'
    assert "but the model has [-1, 4]" in refused(text, [X], [Y])


def test_a_fixed_size_where_the_model_is_dynamic_is_allowed() -> None:
    dynamic = ArtifactTensor("x", Datatype.FP32, (-1, -1))
    done = complete(config.parse("max_batch_size: 1 " + DECLARED), [dynamic], [Y])
    assert list(done.input[0].dims) == [4]


def test_batching_over_a_fixed_batch_is_refused_with_the_remedy() -> None:
    reason = refused("max_batch_size: 8 " + DECLARED, [FIXED], [Y])
    assert "fixed first dimension of 2" in reason
    assert "set max_batch_size to 0" in reason


def test_reshape_is_what_is_compared_with_the_model() -> None:
    text = 'max_batch_size: 1 input { name: "x" data_type: TYPE_FP32 dims: [ 2, 2 ] %s }'
    done = complete(config.parse(text % "reshape { shape: [ 4 ] }"), [X], [Y])
    assert list(done.input[0].dims) == [2, 2]
    assert "with shape [-1, 2, 2]" in refused(text % "", [X], [Y])
