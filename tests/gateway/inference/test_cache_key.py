"""Tests of the response cache's keys: the content they depend on, and the rest they ignore."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modelport.gateway.inference.cache import CachedInfer
from modelport.gateway.types import NUMPY_DTYPES, Array, Datatype, InferRequest, Parameter, Tensor
from tests.gateway.inference.cached_requests import copied, keyed, subject


def array(datatype: Datatype, shape: tuple[int, ...], data: bytes) -> Array:
    """Arbitrary content: ``data`` as the elements."""
    count = int(np.prod(shape))
    if datatype is Datatype.BYTES:
        items = np.empty(count, object)
        items[:] = [data[i : i + 1 + i % 3] for i in range(count)]
        return items.reshape(shape)
    dtype = NUMPY_DTYPES[datatype]
    raw = np.frombuffer((data * (count * dtype.itemsize + 1))[: count * dtype.itemsize], np.uint8)
    return (raw % 2 if datatype is Datatype.BOOL else raw).copy().view(dtype).reshape(shape)


tensors = st.builds(
    lambda name, datatype, shape, data: Tensor(name, datatype, array(datatype, shape, data)),
    st.text(max_size=4),
    st.sampled_from(Datatype),
    st.lists(st.integers(0, 3), max_size=3).map(tuple),
    st.binary(min_size=1, max_size=8),
)
values: st.SearchStrategy[Parameter] = st.one_of(
    st.booleans(), st.integers(-2, 2), st.floats(allow_nan=False), st.text(max_size=2)
)
requests = st.builds(
    lambda inputs, outputs, parameters: InferRequest("m", inputs, outputs, parameters=parameters),
    st.lists(tensors, min_size=1, max_size=3, unique_by=lambda t: t.name),
    st.lists(st.text(max_size=3), max_size=2, unique=True).map(tuple),
    st.dictionaries(st.text("ab", max_size=2), values, max_size=2),
)


def content(request: InferRequest) -> Any:
    """The content of a request that its key must depend on, without a hash."""
    rows = []
    for tensor in sorted(request.inputs, key=lambda t: t.name):
        data = tensor.data
        bits = data.reshape(-1).tolist() if data.dtype == object else data.tobytes()
        rows.append((tensor.name, tensor.datatype, data.shape, bits))
    parameters = sorted((k, type(v).__name__, repr(v)) for k, v in request.parameters.items())
    return rows, request.outputs, parameters


# -- the key --------------------------------------------------------------------------------------


def check_keys(cached: CachedInfer, one: InferRequest, other: InferRequest) -> None:
    assert cached.key(one) == cached.key(copied(one))
    assert (cached.key(one) == cached.key(other)) == (content(one) == content(other))


@settings(max_examples=60)
@given(requests, requests)
def test_keys_are_equal_exactly_where_content_is(one: InferRequest, other: InferRequest) -> None:
    check_keys(keyed(), one, other)


def changes(request: InferRequest) -> dict[str, InferRequest]:
    """Requests that differ from ``request``, which has inputs a and b, in one thing."""
    a, b = request.inputs

    def with_a(**fields: Any) -> InferRequest:
        return replace(request, inputs=[replace(a, **fields), b])

    data = a.data.copy()
    data.reshape(-1).view(np.uint8)[-1] ^= 1
    return {
        "one bit": with_a(data=data),
        "shape": with_a(data=a.data.reshape(a.data.shape[::-1])),
        "rank": with_a(data=a.data[np.newaxis]),
        "datatype": with_a(datatype=Datatype.INT32, data=a.data.view(np.int32)),
        "datatype with the same dtype": replace(
            request, inputs=[a, replace(b, datatype=Datatype.UINT16)]
        ),
        "name": with_a(name="c"),
        "names swapped": replace(request, inputs=[replace(a, name="b"), replace(b, name="a")]),
        "an input less": replace(request, inputs=[a]),
        "outputs": replace(request, outputs=("y",)),
        "outputs in another order": replace(request, outputs=("z", "y")),
        "a parameter": replace(request, parameters={"k": 1}),
        "a parameter's type": replace(request, parameters={"k": True}),
    }


def mixed_up(kind: type[CachedInfer]) -> set[str]:
    """The changes that a kind of key does not see."""
    cached, request = keyed(kind), subject()
    others = changes(request)
    keys = {name: cached.key(other) for name, other in others.items()}
    seen: dict[bytes, str] = {cached.key(request): "the request itself"}
    wrong = set()
    for name, key in keys.items():
        if key in seen:
            wrong.add(name)
        seen[key] = name
    return wrong


class Concatenating(CachedInfer):
    """Known bad: the inputs' bytes and nothing around them, as Triton's own hash has it."""

    def key(self, request: InferRequest) -> bytes:
        state = self._prefix.copy()
        for tensor in sorted(request.inputs, key=lambda t: t.name):
            state.update(tensor.name.encode() + tensor.data.tobytes())
        return state.digest()


def test_a_change_of_any_one_thing_misses() -> None:
    assert mixed_up(CachedInfer) == set()


def test_a_key_of_concatenated_bytes_is_caught() -> None:
    assert {"shape", "rank", "datatype", "outputs", "a parameter"} <= mixed_up(Concatenating)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ([b"ab", b"c"], [b"a", b"bc"]),
        ([b"", b"a"], [b"a", b""]),
        ([b"\x01\x00\x00\x00a", b""], [b"", b"\x01\x00\x00\x00a"]),
    ],
)
def test_different_bytes_elements_have_different_keys(one: list[bytes], other: list[bytes]) -> None:
    cached = keyed()
    made = [
        InferRequest("m", [Tensor("x", Datatype.BYTES, np.array(items, object))])
        for items in (one, other)
    ]
    assert cached.key(made[0]) != cached.key(made[1])


@pytest.mark.parametrize("key", ["timeout", "priority", "binary_data_output"])
def test_how_and_when_to_answer_is_no_content(key: str) -> None:
    cached = keyed()
    assert cached.key(subject()) == cached.key(replace(subject(), parameters={key: 7}))


def test_the_layout_in_memory_is_no_content() -> None:
    request = subject()
    turned = replace(request.inputs[0], data=np.asfortranarray(request.inputs[0].data))
    cached = keyed()
    assert cached.key(request) == cached.key(replace(request, inputs=[turned, request.inputs[1]]))
