"""Calls of layers that PyTorch's samples do not reach."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from tests.exporters.lowering.oracle import OperatorCall, direct_call

#: Operators that are refused with a reason, whatever they are given.
REFUSED = frozenset(
    (
        *("lstm.data", "gru.data", "rnn_tanh.data", "rnn_relu.data", "_pack_padded_sequence"),
        *("unique_consecutive", "unique_dim", "_unique2"),
    )
)

#: Operators that PyTorch's samples call as in training.
TRAINED = frozenset(("native_batch_norm", "_native_batch_norm_legit", "rrelu_with_noise"))

#: Dims that no program leaves unknown: channels and the sizes of heads.
STATIC: dict[str, dict[int, tuple[int, ...] | None]] = {
    "convolution": {0: (1,), 1: None, 2: None},
    "scaled_dot_product_attention": {0: (-1, -3), 1: (-3,), 2: (-3,)},
    "_scaled_dot_product_flash_attention_for_cpu": {0: (-1, -3), 1: (-3,), 2: (-3,)},
    **{f"{kind}.input": dict.fromkeys(range(1, 20)) for kind in ("gru", "rnn_relu", "rnn_tanh")},
    "lstm.input": dict.fromkeys(range(1, 20)),
}


def _random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def _convolutions() -> Iterator[OperatorCall]:
    """Grouped, depthwise, dilated, strided and transposed, in one to three dimensions."""
    for dims in (1, 2, 3):
        for groups, multiplier in ((1, 5), (4, 1), (4, 3), (2, 2)):
            for stride, padding, dilation in ((1, 1, 1), (2, 0, 1), (1, 2, 2), (2, 3, 2)):
                x = _random(2, 4, *(7, 8, 6)[:dims])
                shared = [stride] * dims, [padding] * dims, [dilation] * dims
                out = groups * multiplier
                weight, bias = _random(out, 4 // groups, *[3] * dims), _random(out)
                yield direct_call(
                    "convolution", x, weight, bias, *shared, False, [0] * dims, groups
                )
                weight = _random(4, multiplier, *[3] * dims)
                more = [max(stride, dilation) - 1] * dims
                yield direct_call("convolution", x, weight, bias, *shared, True, more, groups)


def _attention() -> Iterator[OperatorCall]:
    """Masks of both kinds, causal ones, rows that may see nothing, and shared heads."""
    q, k, v = _random(2, 4, 3, 8), _random(2, 4, 5, 8), _random(2, 4, 5, 6)
    mask = torch.ones(2, 1, 3, 5, dtype=torch.bool)
    mask[0, :, 1] = False
    mask[1, :, :, 3:] = False
    bias = torch.zeros(2, 1, 3, 5).masked_fill(~mask, float("-inf"))
    name = "scaled_dot_product_attention"
    for attended in (None, mask, bias):
        yield direct_call(name, q, k, v, attended)
    yield direct_call(name, q, k, v, None, 0.0, True, scale=0.3)
    shared = k[:, :2].contiguous(), v[:, :2].contiguous()
    yield direct_call(name, q, *shared, mask, enable_gqa=True)
    flash = "_scaled_dot_product_flash_attention_for_cpu"
    yield direct_call(flash, q, k, k, 0.0, False, attn_mask=bias)
    yield direct_call(flash, q, k, k, 0.0, True)


def _recurrent() -> Iterator[OperatorCall]:
    """One and two layers, both directions, both orders of axes, with projections and without."""
    for name, gates in (("lstm", 4), ("gru", 3), ("rnn_tanh", 1), ("rnn_relu", 1)):
        for layers, directions, biases in ((1, 1, True), (2, 2, True), (1, 1, False)):
            weights = []
            for layer in range(layers):
                for _ in range(directions):
                    given = 3 if layer == 0 else 4 * directions
                    weights += [_random(4 * gates, given), _random(4 * gates, 4)]
                    weights += [_random(4 * gates), _random(4 * gates)] if biases else []
            state = _random(layers * directions, 2, 4)
            states = [state, 2 * state] if name == "lstm" else state
            settings = biases, layers, 0.0, False, directions == 2, layers == 2
            yield direct_call(f"{name}.input", _random(2, 2, 3), states, weights, *settings)
    weights = [_random(16, 3), _random(16, 2), _random(16), _random(16), _random(2, 4)]
    states = [_random(1, 2, 2), _random(1, 2, 4)]
    settings = True, 1, 0.0, False, False, False
    yield direct_call("lstm.input", _random(5, 2, 3), states, weights, *settings)


def _resizing() -> Iterator[OperatorCall]:
    """Sizes and factors, up and down."""
    image, line, volume = _random(2, 3, 5, 6), _random(2, 3, 7), _random(1, 2, 3, 4, 5)
    for x, word in ((line, "linear1d"), (image, "bilinear2d"), (volume, "trilinear3d")):
        dims = x.ndim - 2
        for wanted, factors in (([4] * dims, None), (None, [2.0] * dims), (None, [1.7] * dims)):
            yield direct_call(f"upsample_nearest{dims}d.vec", x, wanted, factors)
            yield direct_call(f"_upsample_nearest_exact{dims}d.vec", x, wanted, factors)
            for corners in (False, True):
                yield direct_call(f"upsample_{word}.vec", x, wanted, corners, factors)
        yield direct_call(f"_upsample_nearest_exact{dims}d", x, [8] * dims)
    for name in ("upsample_bicubic2d", "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa"):
        for corners in (False, True):
            yield direct_call(f"{name}.vec", image, [3, 9], corners, None)
            yield direct_call(f"{name}.vec", image, None, corners, [0.6, 2.0])
    yield direct_call("_upsample_bicubic2d_aa", image, [3, 9], False)
    for corners in (False, True):
        yield direct_call("affine_grid_generator", _random(2, 2, 3), [2, 3, 4, 5], corners)
        yield direct_call("affine_grid_generator", _random(2, 3, 4), [2, 3, 4, 5, 2], corners)


def _pooling() -> Iterator[OperatorCall]:
    line = _random(2, 3, 9)
    yield direct_call("avg_pool1d", line, [3], [2], [1], True, False)
    for name in ("max_pool1d", "max_pool1d_with_indices"):
        yield direct_call(name, line, [3], [2], [1], [2], True)
    for dims in (2, 3):
        x = _random(2, 3, *(9, 8, 7)[:dims])
        yield direct_call(f"max_pool{dims}d", x, [3] * dims, [2] * dims, [1] * dims)
        yield direct_call(f"max_pool{dims}d", x, [2] * dims, [2] * dims, [0] * dims, [2] * dims)
    for wanted in (1, 3, 4):
        yield direct_call("adaptive_avg_pool1d", line, [wanted])
        yield direct_call("adaptive_max_pool1d", line, [wanted])
        for dims in (2, 3):
            x = _random(2, 3, *(9, 8, 7)[:dims])
            yield direct_call(f"adaptive_avg_pool{dims}d", x, [wanted] * dims)


def _normalization() -> Iterator[OperatorCall]:
    x, w, b = _random(3, 4, 5), _random(4), _random(1, 4)[0]
    mean, variance = _random(2, 4)[0], _random(4, 4)[0].abs()
    yield direct_call("_native_batch_norm_legit_no_training", x, w, b, mean, variance, 0.1, 1e-5)
    for name in ("native_batch_norm", "_native_batch_norm_legit"):
        yield direct_call(name, x, w, b, mean, variance, False, 0.1, 1e-5)
    yield direct_call("_native_batch_norm_legit.no_stats", x, w, b, True, 0.1, 1e-5)
    yield direct_call("layer_norm", x, [5], _random(5), _random(1, 5)[0])
    yield direct_call("group_norm", x, 2, w, b)
    yield direct_call("rms_norm", x, [5], _random(5))
    yield direct_call("_fused_rms_norm", x, [5], _random(5), 1e-3)


def _activations() -> Iterator[OperatorCall]:
    x = 3 * _random(3, 8)
    for name in ("relu6", "selu", "log_sigmoid"):
        yield direct_call(name, x)
    yield direct_call("rrelu_with_noise", x, torch.zeros(3, 8), 0.1, 0.3, False)
    for name in ("softmax.int", "log_softmax.int", "special_softmax", "special_log_softmax"):
        yield direct_call(name, x, 0)
        if not name.startswith("special"):
            yield direct_call(name, x.to(torch.int64), -1, torch.float32)


def _indexing() -> Iterator[OperatorCall]:
    x, index = _random(3, 4), torch.tensor([[2, 0], [1, 2]])
    yield direct_call("scatter.value", x, 0, index, 1.5)
    yield direct_call("scatter.value", x, 1, index, -1.0)
    yield direct_call("scatter.value_reduce", x, 0, index, 1.5, reduce="add")
    yield direct_call("scatter.value_reduce", x, 0, index, 1.5, reduce="multiply")
    for places in ([None, index], [index], [index, index.flip(0)], [index[0], None]):
        value = torch.tensor(7.0)
        yield direct_call("index_put", x, places, value)
        yield direct_call("_unsafe_index_put", x, places, value)
    # The same place twice: the last value stays, or all are added.
    twice = [torch.tensor([1, 1, 0])]
    yield direct_call("index_put", x, twice, _random(3, 4), False)
    yield direct_call("index_put", x, twice, _random(3, 4), True)
    yield direct_call("index_put", x, [x > 0], torch.tensor(0.0))
    yield direct_call("take_along_dim", x, index[:1, :1], 1)
    yield direct_call("one_hot", index, 4)
    for name in ("tril_indices", "triu_indices"):
        yield direct_call(name, 3, 4, -1)
    yield direct_call("_embedding_bag", x, index.flatten(), torch.tensor([0, 0, 3, 4]), False, 1)
    yield direct_call("col2im", _random(2, 12, 6), [4, 5], [2, 2], [1, 2], [0, 1], [2, 2])
    yield direct_call("col2im", _random(2, 12, 12), [4, 5], [2, 2], [1, 1], [0, 0], [1, 1])


def _sorting() -> Iterator[OperatorCall]:
    x = _random(4, 5)
    steps = torch.tensor([-1.0, 0.0, 0.5])
    yield direct_call("searchsorted.Scalar", steps, 0.0)
    yield direct_call("searchsorted.Scalar", steps, 0.0, right=True)
    yield direct_call("bucketize.Scalar", 0.3, steps)
    yield direct_call("argsort", x, 0, True)
    yield direct_call("argsort.stable", x, stable=True, dim=1)
    yield direct_call("msort", x)
    low = torch.tensor([3, torch.iinfo(torch.int64).min, 3, -1, torch.iinfo(torch.int64).max])
    for descending in (False, True):
        yield direct_call("sort.stable", low, stable=True, dim=0, descending=descending)
    yield direct_call("argmax", low)
    yield direct_call("argmin", low, 0, True)


def _complex() -> Iterator[OperatorCall]:
    x = torch.complex(_random(2, 3), _random(3, 2).T.contiguous())
    for name in ("real", "imag"):
        call = direct_call(name, x)
        yield OperatorCall(name, call.args, {}, call.result.contiguous())
    for name in ("resolve_conj", "resolve_neg", "view_as_complex_copy", "view_as_real_copy"):
        yield direct_call(name, _random(2, 3, 2) if name == "view_as_complex_copy" else x)
    for name in ("conj", "_conj", "_conj_copy", "conj_physical", "_conj_physical"):
        call = direct_call(name, x)
        yield OperatorCall(name, call.args, {}, call.result.resolve_conj())
    wave, window = _random(2, 40), torch.hann_window(8)
    yield direct_call("stft", wave, 8, 4, 8, window, False, True, True)
    yield direct_call("stft", wave, 16, 4, 8, window, True, False, True)


def layer_calls() -> Iterator[OperatorCall]:
    """All calls of this module."""
    for calls in (
        *(_convolutions, _attention, _recurrent, _resizing, _pooling, _normalization),
        *(_activations, _indexing, _sorting, _complex),
    ):
        yield from calls()
