"""The classification extension: the top k in place of the values."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from modelport.gateway.errors import InvalidArgument
from modelport.gateway.inference.classification import classify, largest
from modelport.gateway.types import NUMPY_DTYPES, Datatype, Tensor


def top(
    data: Any,
    count: int,
    labels: tuple[str, ...] = (),
    batched: bool = True,
    datatype: Datatype = Datatype.FP32,
) -> Tensor:
    return classify(
        Tensor("y", datatype, np.array(data, NUMPY_DTYPES[datatype])), count, labels, batched
    )


def test_the_largest_come_first_with_six_decimals_and_their_index() -> None:
    assert top([[0.1, 0.75, 0.15]], 2).data.tolist() == [[b"0.750000:1", b"0.150000:2"]]


def test_the_reply_is_strings() -> None:
    assert top([[0.5]], 1).datatype is Datatype.BYTES


def test_every_batch_element_has_its_own() -> None:
    assert top([[1, 2], [4, 3]], 1).data.tolist() == [[b"2.000000:1"], [b"4.000000:0"]]


def test_without_a_batch_there_is_one_row() -> None:
    assert top([1, 3, 2], 2, batched=False).data.tolist() == [b"3.000000:1", b"2.000000:2"]


def test_labels_are_added_where_there_are_any() -> None:
    labels = ("cat", "dog")
    assert top([[1, 3, 2]], 3, labels).data.tolist() == [
        [b"3.000000:1:dog", b"2.000000:2", b"1.000000:0:cat"]
    ]


def test_labels_may_be_any_text() -> None:
    assert top([[1]], 1, ("Zürich:ö",)).data.tolist() == [["1.000000:0:Zürich:ö".encode()]]


def test_more_than_there_are_is_all_there_are() -> None:
    assert top([[1, 2]], 99).data.shape == (1, 2)


def test_of_equal_values_the_lower_index_comes_first() -> None:
    assert top([[5, 7, 5, 7]], 4).data.tolist() == [
        [b"7.000000:1", b"7.000000:3", b"5.000000:0", b"5.000000:2"]
    ]


def test_integers_are_printed_as_integers() -> None:
    assert top([[3, 250]], 1, datatype=Datatype.UINT8).data.tolist() == [[b"250:1"]]


def test_large_integers_keep_their_order() -> None:
    """2^53 and 2^53 + 1 are the same as floating point numbers."""
    data = [[2**53, 2**53 + 1]]
    assert top(data, 1, datatype=Datatype.INT64).data.tolist() == [[b"9007199254740993:1"]]


def test_the_most_negative_integer_is_the_smallest() -> None:
    data = [[-(2**63), 0]]
    assert top(data, 1, datatype=Datatype.INT64).data.tolist() == [[b"0:1"]]


def test_half_precision_is_printed_like_the_others() -> None:
    assert top([[0.5, 0.25]], 1, datatype=Datatype.FP16).data.tolist() == [[b"0.500000:0"]]


def test_not_a_number_is_never_the_largest() -> None:
    assert top([[np.nan, 1.0]], 1).data.tolist() == [[b"1.000000:1"]]


def test_an_output_of_many_dimensions_is_flattened_per_batch_element() -> None:
    assert top([[[1, 2], [4, 3]]], 1).data.tolist() == [[b"4.000000:2"]]


@pytest.mark.parametrize("datatype", [Datatype.BYTES, Datatype.BOOL, Datatype.BF16])
def test_outputs_that_are_not_numbers_cannot_be_classified(datatype: Datatype) -> None:
    with pytest.raises(InvalidArgument, match=f"unsupported type '{datatype}': 'y'"):
        top([[1]], 1, datatype=datatype)


@given(st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=8), st.integers(1, 9))
def test_the_top_k_are_the_head_of_the_sorted_values(row: list[float], count: int) -> None:
    (texts,) = top([row], count).data.tolist()
    values = [row[int(text.split(b":")[1])] for text in texts]
    assert values == sorted(row, reverse=True)[:count]


@given(
    st.lists(st.sampled_from([0.0, -1.5, 2.0, 2.5, float("nan"), float("inf")]), min_size=1),
    st.integers(1, 30),
)
def test_the_largest_are_those_of_a_whole_sort(values: list[float], count: int) -> None:
    array = np.array(values, np.float32)
    count = min(count, len(values))
    assert largest(array, count).tolist() == np.argsort(-array, kind="stable")[:count].tolist()


def test_a_few_classes_of_a_million_values_cost_no_sort() -> None:
    data = np.random.default_rng(0).random((1, 1_000_000), dtype=np.float32)
    started = time.process_time()
    sorted(data[0, :100_000].tolist())
    sort_of_a_tenth = time.process_time() - started
    started = time.process_time()
    top(data, 5)
    assert time.process_time() - started < 5 * sort_of_a_tenth


def test_an_output_of_more_values_than_triton_classifies_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="classification output tensor too large"):
        top(np.zeros((1, 1_000_001), np.float32), 5)
