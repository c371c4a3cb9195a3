"""A request is checked against its model's signature before it reaches the backend."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from modelport.gateway.errors import InvalidArgument
from modelport.gateway.inference.validation import Validator
from modelport.gateway.types import (
    NUMPY_DTYPES,
    Axis,
    Datatype,
    InferRequest,
    InferResponse,
    ModelSignature,
    Tensor,
    TensorSpec,
)

Y = TensorSpec("y", Datatype.FP32, (4,))


def tensor(shape: Sequence[int], name: str = "x", datatype: Datatype = Datatype.FP32) -> Tensor:
    return Tensor(name, datatype, np.zeros(tuple(shape), NUMPY_DTYPES[datatype]))


def values(data: Any, name: str, datatype: Datatype = Datatype.INT64) -> Tensor:
    return Tensor(name, datatype, np.array(data, NUMPY_DTYPES[datatype]))


def signature(*inputs: TensorSpec, batch: int = 8, **axes: Axis) -> ModelSignature:
    return ModelSignature(inputs, (Y,), batch, axes)


def check(signed: ModelSignature, *tensors: Tensor, outputs: tuple[str, ...] = ()) -> InferRequest:
    request = InferRequest("m", list(tensors), outputs)
    Validator("m", signed).check(request)
    return request


def refused(signed: ModelSignature, *tensors: Tensor, outputs: tuple[str, ...] = ()) -> str:
    with pytest.raises(InvalidArgument) as caught:
        check(signed, *tensors, outputs=outputs)
    return str(caught.value)


X16 = signature(TensorSpec("x", Datatype.FP32, (16,)))
WHOLE = signature(TensorSpec("x", Datatype.FP32, (2, 3)), batch=0)
PAIR = signature(TensorSpec("a", Datatype.FP32, (2,)), TensorSpec("b", Datatype.FP32, (2,)))


# -- shapes ---------------------------------------------------------------------------------------


def test_a_batch_is_counted() -> None:
    assert Validator("m", X16).check(InferRequest("m", [tensor((3, 16))])) == 3


def test_a_model_that_does_not_batch_counts_one() -> None:
    assert Validator("m", WHOLE).check(InferRequest("m", [tensor((2, 3))])) == 1


def test_the_message_for_an_unexpected_shape_is_tritons() -> None:
    assert refused(X16, tensor((1, 15))).startswith(
        "unexpected shape for input 'x' for model 'm'. Expected [-1,16], got [1,15]"
    )


def test_a_missing_batch_dimension_is_explained() -> None:
    reason = refused(X16, tensor((8,)))
    assert "Expected [-1,16], got [8]. NOTE: Setting a non-zero max_batch_size" in reason


def test_a_whole_shape_is_compared_whole() -> None:
    assert "Expected [2,3], got [3,2]" in refused(WHOLE, tensor((3, 2)))


def test_a_batch_that_is_too_large_is_refused_in_tritons_words() -> None:
    assert refused(X16, tensor((9, 16))) == "inference request batch-size must be <= 8 for 'm'"


def test_an_empty_batch_is_refused() -> None:
    assert refused(X16, tensor((0, 16))) == "inference request batch-size must be >= 1 for 'm'"


def test_a_scalar_for_a_batching_model_is_refused() -> None:
    assert "input 'x' has no shape" in refused(X16, tensor(()))


def test_inputs_of_different_batch_sizes_are_refused() -> None:
    reason = refused(PAIR, tensor((2, 2), "a"), tensor((3, 2), "b"))
    assert reason == "input 'b' batch size does not match other inputs for 'm'"


def test_another_datatype_is_refused_in_tritons_words() -> None:
    assert refused(X16, tensor((1, 16), datatype=Datatype.FP64)) == (
        "inference input 'x' data-type is 'FP64', but model 'm' expects 'FP32'"
    )


# -- names ----------------------------------------------------------------------------------------


def test_an_unknown_input_is_named() -> None:
    assert refused(X16, tensor((1, 16), "z")) == "unexpected inference input 'z' for model 'm'"


def test_a_missing_input_is_named() -> None:
    reason = refused(PAIR, tensor((1, 2), "a"))
    assert "expected 2 inputs but got 1 inputs for model 'm'" in reason
    assert "missing required input(s) ['b']" in reason


def test_no_input_at_all_is_refused() -> None:
    assert "missing required input(s) ['x']" in refused(X16)


def test_an_input_given_twice_is_refused_even_where_the_count_is_right() -> None:
    reason = refused(PAIR, tensor((1, 2), "a"), tensor((1, 2), "a"))
    assert reason == "input 'a' already exists in request"


def test_an_optional_input_may_be_left_out_and_may_be_given() -> None:
    signed = signature(
        TensorSpec("a", Datatype.FP32, (2,)), TensorSpec("b", Datatype.FP32, (2,), optional=True)
    )
    check(signed, tensor((1, 2), "a"))
    check(signed, tensor((1, 2), "a"), tensor((1, 2), "b"))
    assert "missing required" in refused(signed, tensor((1, 2), "b"))


def test_an_unknown_output_is_named() -> None:
    reason = refused(X16, tensor((1, 16)), outputs=("z",))
    assert reason == "unexpected inference output 'z' for model 'm'"


def test_an_output_asked_for_twice_is_refused() -> None:
    reason = refused(X16, tensor((1, 16)), outputs=("y", "y"))
    assert reason == "output 'y' already exists in request"


# -- axes -----------------------------------------------------------------------------------------

TOKENS = signature(
    TensorSpec("tokens", Datatype.INT64, ("sequence",), 0, 511),
    TensorSpec("seq_lens", Datatype.INT64, (1,), 1, "sequence", reshape=()),
    sequence=Axis("sequence", 2, 6),
)


@pytest.mark.parametrize("size", [2, 4, 6])
def test_an_axis_may_have_every_size_within_its_bounds(size: int) -> None:
    check(TOKENS, values([[1] * size], "tokens"), values([[1]], "seq_lens"))


@pytest.mark.parametrize("size", [0, 1, 7])
def test_an_axis_outside_its_bounds_is_named_with_them(size: int) -> None:
    empty = Tensor("tokens", Datatype.INT64, np.zeros((1, size), np.int64))
    reason = refused(TOKENS, empty, values([[1]], "seq_lens"))
    assert reason.endswith(f"got [1,{size}]: 'sequence' must be >= 2 and <= 6")


def test_an_axis_has_one_size_in_a_request() -> None:
    signed = signature(
        TensorSpec("a", Datatype.FP32, ("n",)),
        TensorSpec("b", Datatype.FP32, ("n", 2)),
        n=Axis("n", 0, None),
    )
    check(signed, tensor((1, 3), "a"), tensor((1, 3, 2), "b"))
    reason = refused(signed, tensor((1, 3), "a"), tensor((1, 4, 2), "b"))
    assert "has 'n' of size 4, but another input has 3" in reason


def test_an_axis_within_one_input_has_one_size_too() -> None:
    signed = signature(TensorSpec("a", Datatype.FP32, ("n", "n")), n=Axis("n", 0, None))
    check(signed, tensor((1, 3, 3), "a"))
    assert "has 'n' of size 4" in refused(signed, tensor((1, 3, 4), "a"))


# -- values ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [0, 511])
def test_values_on_their_bounds_are_allowed(value: int) -> None:
    check(TOKENS, values([[1, value]], "tokens"), values([[1]], "seq_lens"))


@pytest.mark.parametrize("value", [-1, 512, 2**62])
def test_a_value_outside_its_bounds_is_refused_with_them(value: int) -> None:
    reason = refused(TOKENS, values([[1, value]], "tokens"), values([[1]], "seq_lens"))
    assert f"must lie in [0, 511], got {value}" in reason


@pytest.mark.parametrize("order", [1, -1])
def test_a_value_bound_by_an_axis_may_reach_that_requests_size(order: int) -> None:
    tensors = [values([[1, 2, 3]], "tokens"), values([[3]], "seq_lens")][::order]
    check(TOKENS, *tensors)


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("length", [0, 4, 6])
def test_a_value_bound_by_an_axis_is_refused_beyond_it_whatever_the_order(
    length: int, order: int
) -> None:
    tensors = [values([[1, 2, 3]], "tokens"), values([[length]], "seq_lens")][::order]
    assert f"must lie in [1, 3], got {length}" in refused(TOKENS, *tensors)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1.5])
def test_what_is_not_within_floating_bounds_is_refused(value: float) -> None:
    signed = signature(TensorSpec("x", Datatype.FP32, (2,), 0.0, 1.0))
    assert "must lie in [0.0, 1.0]" in refused(signed, values([[0, value]], "x", Datatype.FP32))


def test_not_a_number_is_allowed_where_nothing_is_bounded() -> None:
    signed = signature(TensorSpec("x", Datatype.FP32, (2,)))
    check(signed, values([[0, math.nan]], "x", Datatype.FP32))


def test_an_empty_tensor_is_within_every_bound() -> None:
    signed = signature(TensorSpec("x", Datatype.FP32, (-1,), 0.0, 1.0))
    check(signed, tensor((1, 0)))


# -- reshape --------------------------------------------------------------------------------------


def test_an_input_reaches_the_model_in_the_shape_that_it_wants() -> None:
    request = check(TOKENS, values([[1, 2]] * 3, "tokens"), values([[1]] * 3, "seq_lens"))
    assert request.inputs[1].data.shape == (3,)


def test_dynamic_dimensions_are_carried_over_in_order() -> None:
    signed = signature(TensorSpec("x", Datatype.FP32, (-1, 2, -1), reshape=(1, -1, -1, 2)))
    request = check(signed, tensor((5, 3, 2, 4)))
    assert request.inputs[0].data.shape == (5, 1, 3, 4, 2)


def test_reshaping_keeps_the_elements_in_row_major_order() -> None:
    signed = signature(TensorSpec("x", Datatype.INT64, (2, 3), reshape=(6,)), batch=0)
    request = check(signed, values([[1, 2, 3], [4, 5, 6]], "x"))
    assert request.inputs[0].data.tolist() == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(("batch", "model", "wire"), [(8, (3,), (3, 1)), (0, (), (1,))])
def test_an_output_gets_its_shape_on_the_wire_back(
    batch: int, model: tuple[int, ...], wire: tuple[int, ...]
) -> None:
    output = TensorSpec("y", Datatype.FP32, (1,), reshape=())
    validator = Validator("m", ModelSignature((), (output,), batch))
    response = InferResponse("m", 1, [tensor(model, "y")])
    validator.restore(response)
    assert response.outputs[0].data.shape == wire


# -- raw requests ---------------------------------------------------------------------------------


def raw(*inputs: TensorSpec, size: int, batch: int = 8) -> tuple[int, ...]:
    return Validator("m", signature(*inputs, batch=batch)).raw_input(size)[1]


def test_a_raw_request_is_one_batch_element() -> None:
    assert raw(TensorSpec("x", Datatype.FP32, (4,)), size=16) == (1, 4)
    assert raw(TensorSpec("x", Datatype.FP32, (4,)), size=16, batch=0) == (4,)


def test_one_dynamic_dimension_follows_from_the_size() -> None:
    assert raw(TensorSpec("x", Datatype.INT16, (2, -1)), size=24) == (1, 2, 6)
    assert raw(TensorSpec("x", Datatype.INT16, (-1,)), size=24) == (1, 12)


def test_two_dynamic_dimensions_cannot_be_inferred() -> None:
    with pytest.raises(InvalidArgument, match="more than one variable-sized dimension"):
        raw(TensorSpec("x", Datatype.FP32, (-1, -1)), size=16)


def test_two_inputs_cannot_share_a_raw_body() -> None:
    spec = TensorSpec("x", Datatype.FP32, (4,))
    with pytest.raises(InvalidArgument, match="Raw request must only have 1 input"):
        raw(spec, TensorSpec("z", Datatype.FP32, (4,)), size=16)


def test_a_raw_string_is_one_element() -> None:
    assert raw(TensorSpec("x", Datatype.BYTES, (1,)), size=99) == (1, 1)
    for dims in [(2,), (-1,)]:
        with pytest.raises(InvalidArgument, match="the model must have input shape"):
            raw(TensorSpec("x", Datatype.BYTES, dims), size=99)


# -- a property -----------------------------------------------------------------------------------


@given(
    dims=st.lists(st.one_of(st.integers(1, 3), st.just(-1)), min_size=1, max_size=3),
    shape=st.lists(st.integers(0, 4), max_size=5),
    batch=st.integers(0, 3),
)
def test_a_shape_is_accepted_exactly_when_it_fits(
    dims: list[int], shape: list[int], batch: int
) -> None:
    signed = signature(TensorSpec("x", Datatype.FP32, tuple(dims)), batch=batch)
    rest = shape[1:] if batch else shape
    fits = len(rest) == len(dims) and all(d in (-1, s) for d, s in zip(dims, rest, strict=True))
    if batch:
        fits = fits and bool(shape) and 1 <= shape[0] <= batch
    if fits:
        check(signed, tensor(shape))
    else:
        refused(signed, tensor(shape))
