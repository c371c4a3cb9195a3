"""Recurrent layers over packed sequences, computed on the padded ones.

``torch`` packs by the values of the lengths, which a graph cannot; a state that stays as it is at
padding gives the same results.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._higher_order_ops.scan import scan
from torch.nn import functional
from torch.nn.utils import rnn
from torch.utils._pytree import tree_leaves

from modelport.gateway.errors import Unsupported

_LAYERS = (nn.LSTM, nn.GRU, nn.RNN)


class PaddedSequence(NamedTuple):
    """Sequences, time first, and how many of the steps of each hold data."""

    steps: Tensor
    lengths: Tensor


@contextlib.contextmanager
def padded(places: Sequence[ModuleType]) -> Iterator[None]:
    """Trace packed sequences as padded ones; ``places`` are the modules that may import them."""
    functions: dict[Any, Any] = {rnn.pack_padded_sequence: _pack, rnn.pad_packed_sequence: _pad}
    attributes: list[tuple[Any, str, Any, Any]] = [
        (place, name, value, functions[value])
        for place in (rnn, *places)
        for name, value in vars(place).items()
        if isinstance(value, FunctionType) and value in functions
    ]
    attributes += [(each, "forward", each.forward, _layer(each.forward)) for each in _LAYERS]
    for place, name, _, new in attributes:
        setattr(place, name, new)
    try:
        yield
    finally:
        for place, name, function, _ in attributes:
            setattr(place, name, function)


def _pack(
    sequences: Tensor, lengths: Any, batch_first: bool = False, enforce_sorted: bool = True
) -> PaddedSequence:
    steps = sequences.transpose(0, 1) if batch_first else sequences
    return PaddedSequence(steps, torch.as_tensor(lengths, device=steps.device))


def _pad(
    sequence: PaddedSequence,
    batch_first: bool = False,
    padding_value: float = 0.0,
    total_length: Any = None,
) -> tuple[Tensor, Tensor]:
    if total_length is None:
        raise Unsupported(
            "pad_packed_sequence() makes an output as long as the longest sequence, which depends "
            "on values; give it total_length, such as x.size(1)"
        )
    found = torch.where(_alive(sequence)[..., None], sequence.steps, padding_value)
    return found.transpose(0, 1) if batch_first else found, sequence.lengths


def _alive(sequence: PaddedSequence) -> Tensor:
    return torch.arange(sequence.steps.shape[0])[:, None] < sequence.lengths


def _layer(original: Any) -> Any:
    def forward(self: nn.RNNBase, input: Any, hx: Any = None) -> Any:
        if isinstance(input, PaddedSequence):
            return _recurrent(self, input, hx)
        return original(self, input, hx)

    return forward


def _recurrent(layers: nn.RNNBase, sequence: PaddedSequence, hx: Any) -> tuple[Any, Any]:
    directions, size = 2 if layers.bidirectional else 1, sequence.lengths.shape[0]
    if hx is None:
        widths = [layers.proj_size or layers.hidden_size, layers.hidden_size]
        count = layers.num_layers * directions
        states = [sequence.steps.new_zeros(count, size, width) for width in widths]
    else:
        states = list(hx) if isinstance(hx, tuple) else [hx]
    states = states if layers.mode == "LSTM" else states[:1]
    steps, alive, finals = sequence.steps, _alive(sequence), []
    for level in range(layers.num_layers):
        results = []
        for direction in range(directions):
            place = level * directions + direction
            weights = layers.all_weights[place]
            state = [each[place] for each in states]
            *final, found = _scanned(layers, weights, state, steps, alive, direction == 1)
            finals.append(final)
            results.append(found)
        steps = torch.cat(results, -1)
    last = tuple(torch.stack(each) for each in zip(*finals, strict=True))
    return PaddedSequence(steps, sequence.lengths), last if len(last) > 1 else last[0]


def _scanned(
    layers: nn.RNNBase,
    weights: Any,
    state: list[Tensor],
    steps: Tensor,
    alive: Tensor,
    reverse: bool,
) -> list[Tensor]:
    def step(known: list[Tensor], given: tuple[Tensor, Tensor]) -> tuple[list[Tensor], Tensor]:
        x, is_alive = given
        new = _cell(layers, x, known, weights)
        kept = [torch.where(is_alive[:, None], a, b) for a, b in zip(new, known, strict=True)]
        return kept, kept[0].clone()

    found = scan(step, [each.clone() for each in state], (steps, alive), reverse=reverse)
    return list(tree_leaves(found))


def _cell(layers: nn.RNNBase, x: Tensor, state: list[Tensor], weights: Any) -> list[Tensor]:
    count = 4 if layers.bias else 2
    inner, projection = weights[:count], weights[count:]
    if layers.mode == "LSTM":
        biases = inner[2:] or [None, None]
        gates = functional.linear(x, inner[0], biases[0])
        gates = gates + functional.linear(state[0], inner[1], biases[1])
        i, f, g, o = gates.chunk(4, -1)
        c = f.sigmoid() * state[1] + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
        return [h @ projection[0].T if projection else h, c]
    cells = {
        "GRU": torch.gru_cell,
        "RNN_TANH": torch.rnn_tanh_cell,
        "RNN_RELU": torch.rnn_relu_cell,
    }
    return [cells[layers.mode](x, state[0], *inner)]
