"""Recurrent layers over a time axis of any length."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from modelport.exporters.lowering import loops
from modelport.exporters.lowering.registry import lowers
from modelport.exporters.lowering.sizes import rank
from modelport.exporters.runtime.tensorflow_runtime import tf
from modelport.gateway.errors import Unsupported

#: One step of a cell: its inputs' and its state's products with the weights, and its state.
Cell = Callable[[Any, Any, list[Any]], list[Any]]


def _lstm_cell(given: Any, recurrent: Any, state: list[Any]) -> list[Any]:
    i, f, g, o = tf.split(given + recurrent, 4, -1)
    cell = tf.sigmoid(f) * state[1] + tf.sigmoid(i) * tf.tanh(g)
    return [tf.sigmoid(o) * tf.tanh(cell), cell]


def _gru_cell(given: Any, recurrent: Any, state: list[Any]) -> list[Any]:
    (r, z, n), (hr, hz, hn) = tf.split(given, 3, -1), tf.split(recurrent, 3, -1)
    update = tf.sigmoid(z + hz)
    new = tf.tanh(n + tf.sigmoid(r + hr) * hn)
    return [new + update * (state[0] - new)]


def _plain_cell(activation: Callable[[Any], Any]) -> Cell:
    return lambda given, recurrent, state: [activation(given + recurrent)]


def _layer(
    cell: Cell, x: Any, state: list[Any], weights: Sequence[Any], has_biases: bool, reverse: bool
) -> tuple[Any, list[Any]]:
    """One direction of one layer over a time-major ``x``."""
    w_input, w_state, *others = weights
    b_input, b_state = others[:2] if has_biases else (None, None)
    projection = others[2 * has_biases] if len(others) > 2 * has_biases else None

    def linear(y: Any, weight: Any, bias: Any) -> Any:
        product = tf.matmul(y, weight, transpose_b=True)
        return product if bias is None else product + bias

    def step(state: list[Any], slices: list[Any]) -> tuple[list[Any], list[Any]]:
        new = cell(slices[0], linear(state[0], w_state, b_state), state)
        if projection is not None:
            new[0] = tf.matmul(new[0], projection, transpose_b=True)
        return new, [new[0]]

    given = linear(x, w_input, b_input)
    final, (y,) = loops.scan(step, state, [given], [state[0]], reverse)
    return y, final


def _recurrent(
    cell: Cell,
    x: Any,
    states: Sequence[Any],
    params: Sequence[Any],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Any, ...]:
    """All layers of a recurrent module; the last states follow the output."""
    if train and dropout:
        raise Unsupported("it applies dropout, as in training; call eval() first")
    directions = 2 if bidirectional else 1
    batched = rank(x) == 3
    if not batched:
        x, states = tf.expand_dims(x, 1), [tf.expand_dims(s, 1) for s in states]
    elif batch_first:
        x = tf.transpose(x, [1, 0, 2])
    per_cell = len(params) // (num_layers * directions)
    finals: list[list[Any]] = []
    for layer in range(num_layers):
        outputs = []
        for direction in range(directions):
            number = layer * directions + direction
            weights = params[number * per_cell : (number + 1) * per_cell]
            state = [s[number] for s in states]
            y, final = _layer(cell, x, state, weights, has_biases, bool(direction))
            outputs.append(y)
            finals.append(final)
        x = tf.concat(outputs, -1) if bidirectional else outputs[0]
    last = [tf.stack(parts) for parts in zip(*finals, strict=True)]
    if not batched:
        return tf.squeeze(x, 1), *(tf.squeeze(s, 1) for s in last)
    return (tf.transpose(x, [1, 0, 2]) if batch_first else x), *last


@lowers("lstm.input")
def lstm(x: Any, hx: Sequence[Any], params: Sequence[Any], *settings: Any) -> tuple[Any, ...]:
    return _recurrent(_lstm_cell, x, hx, params, *settings)


@lowers("gru.input")
def gru(x: Any, hx: Any, params: Sequence[Any], *settings: Any) -> tuple[Any, ...]:
    return _recurrent(_gru_cell, x, [hx], params, *settings)


@lowers("rnn_tanh.input")
def rnn_tanh(x: Any, hx: Any, params: Sequence[Any], *settings: Any) -> tuple[Any, ...]:
    return _recurrent(_plain_cell(tf.tanh), x, [hx], params, *settings)


@lowers("rnn_relu.input")
def rnn_relu(x: Any, hx: Any, params: Sequence[Any], *settings: Any) -> tuple[Any, ...]:
    return _recurrent(_plain_cell(tf.nn.relu), x, [hx], params, *settings)


@lowers("lstm.data", "gru.data", "rnn_tanh.data", "rnn_relu.data", "_pack_padded_sequence")
def packed(*arguments: Any) -> Any:
    raise Unsupported("a packed sequence has no equivalent; pass the padded tensor")
