"""Inputs drawn from a signature keep to it and reach its corners."""

from __future__ import annotations

import numpy as np
import pytest

from modelport.exporters.requests.random_inputs import Fill, corners, draw, name_axes, sizes_of
from modelport.gateway.errors import Unsupported
from modelport.gateway.types import NUMPY_DTYPES, Axis, Datatype, ModelSignature, TensorSpec

SIGNATURE = ModelSignature(
    inputs=(
        TensorSpec("ids", Datatype.INT32, ("length",), 3, 9),
        TensorSpec("lens", Datatype.INT64, (1,), 1, "length", reshape=()),
        TensorSpec("free", Datatype.FP32, (2, -1)),
    ),
    outputs=(),
    max_batch_size=4,
    axes={"length": Axis("length", 2, 10)},
)


def test_values_lie_in_their_ranges_and_reach_both_ends() -> None:
    rng = np.random.default_rng(0)
    inputs = draw(name_axes(SIGNATURE), 400, {"length": 5, "free_dim1": 3}, rng)
    assert inputs["ids"].dtype == np.int32
    assert set(np.unique(inputs["ids"])) == set(range(3, 10))
    assert set(np.unique(inputs["lens"])) == set(range(1, 6)), "'length' bounds the values"
    assert inputs["ids"].shape == (400, 5)
    assert inputs["lens"].shape == (400,), "the model's own shape, not the wire's"
    assert inputs["free"].shape == (400, 2, 3)


def test_the_same_seed_draws_the_same_inputs() -> None:
    def once(seed: int) -> dict[str, np.ndarray]:
        sizes = {"length": 5, "free_dim1": 3}
        return draw(name_axes(SIGNATURE), 2, sizes, np.random.default_rng(seed))

    assert all(np.array_equal(once(1)[name], once(1)[name]) for name in once(1))
    assert not np.array_equal(once(1)["free"], once(2)["free"])


def test_corners_are_shortest_and_longest_with_every_bound() -> None:
    signature = name_axes(SIGNATURE)
    seen = set()
    for sizes, fills in corners(signature):
        inputs = draw(signature, 1, sizes, np.random.default_rng(0), fills)
        if fills.get("ids") in (Fill.MINIMUM, Fill.MAXIMUM):
            seen.add((sizes["length"], int(inputs["ids"].min()), int(inputs["ids"].max())))
        if fills.get("lens") is Fill.MAXIMUM:
            assert int(inputs["lens"][0]) == sizes["length"]
    assert seen == {(2, 3, 3), (2, 9, 9), (10, 3, 3), (10, 9, 9)}


def test_an_axis_is_tried_at_its_ends_and_its_middle() -> None:
    assert sizes_of(Axis("a", 1, 64)) == (1, 32, 64)
    assert sizes_of(Axis("a", 5, 5)) == (5,)
    assert len(sizes_of(Axis("a", 1, None))) == 3


@pytest.mark.parametrize("datatype", sorted(set(Datatype) - {Datatype.BF16, Datatype.BYTES}))
@pytest.mark.parametrize("bounds", [(None, None), (2, None), (None, 5), (2, 5)])
def test_every_numeric_datatype_is_drawn_within_one_or_two_bounds(
    datatype: Datatype, bounds: tuple[float | None, float | None]
) -> None:
    low, high = bounds
    spec = TensorSpec("x", datatype, (64,), low, high)
    signature = ModelSignature((spec,), (), 1)
    for fill in Fill:
        values = draw(signature, 1, {}, np.random.default_rng(0), {"x": fill})["x"]
        assert values.dtype == NUMPY_DTYPES[datatype]
        if datatype is not Datatype.BOOL and not np.isnan(values).any():
            assert low is None or values.min() >= low
            assert high is None or values.max() <= high


def test_brain_floats_cannot_be_drawn() -> None:
    signature = ModelSignature((TensorSpec("s", Datatype.BF16, (1,)),), (), 1)
    with pytest.raises(Unsupported, match="'s' has datatype BF16"):
        draw(signature, 1, {}, np.random.default_rng(0))
