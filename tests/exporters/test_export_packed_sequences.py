"""Recurrent layers over packed sequences are exported, whose lengths are an input."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from modelport.exporters.formats.base import ExportTarget
from modelport.exporters.formats.registry import find_format
from modelport.gateway.errors import Unsupported
from modelport.gateway.types import Array, Datatype, ModelSignature, TensorSpec
from tests.torch_subjects import fp32, subject, worst

STEPS = 5
LENGTHS = TensorSpec("lengths", Datatype.INT64, (1,), 1, STEPS, reshape=())
OUTPUTS = (fp32("a", STEPS, 3), fp32("b", 12), fp32("c", 20), fp32("d", 3))


class Packed(nn.Module):
    """Every kind of layer: deep, bidirectional, projected, time first or batch first, by two ways
    to import the functions."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lstm = nn.LSTM(4, 5, 2, bidirectional=True, batch_first=True, proj_size=3)
        self.gru = nn.GRU(6, 4, batch_first=True, bias=False)
        self.rnn = nn.RNN(4, 3, nonlinearity="relu")

    def forward(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, ...]:
        packed: Any = pack_padded_sequence(x, lengths.cpu(), True, enforce_sorted=False)
        middle, (h, c) = self.lstm(packed)
        start = x.sum((1, 2)).expand(1, 4, -1).mT
        hidden, _ = pad_packed_sequence(self.gru(middle, start)[0], True, -1.0, STEPS)
        packed = nn.utils.rnn.pack_padded_sequence(
            hidden.mT.permute(2, 0, 1), lengths, False, False
        )
        y, last = self.rnn(packed)
        y, found = nn.utils.rnn.pad_packed_sequence(y, total_length=x.shape[1])
        flat = (h.transpose(0, 1).flatten(1), c.transpose(0, 1).flatten(1))
        return (y.transpose(0, 1) * found[:, None, None], *flat, last[0])


class AsLongAsTheLongest(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.RNN(4, 3, batch_first=True)

    def forward(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, ...]:
        packed: Any = pack_padded_sequence(x, lengths, True, False)
        return pad_packed_sequence(self.rnn(packed)[0], True)


def convert(module: nn.Module, format_name: str, folder: Path) -> float:
    signature = ModelSignature((fp32("x", STEPS, 4), LENGTHS), OUTPUTS, 4)
    model, row = subject(module.eval(), signature), find_format(format_name)
    path = folder / row.platform.default_filename
    row.export(model, path, ExportTarget())
    session = row.open_session(path)

    def in_order(inputs: Mapping[str, Array]) -> dict[str, Array]:
        found = session(inputs)
        return {spec.name: found[spec.name] for spec in OUTPUTS}

    return worst(model, in_order)


@pytest.mark.parametrize(
    "format_name",
    [
        "pt2",
        *(pytest.param(f, marks=pytest.mark.thorough) for f in ("onnx", "savedmodel", "tflite")),
    ],
)
def test_layers_over_packed_sequences_are_exported(tmp_path: Path, format_name: str) -> None:
    forward, pack = nn.LSTM.forward, pack_padded_sequence
    assert convert(Packed(), format_name, tmp_path) < 1e-5
    assert nn.LSTM.forward is forward
    assert pack_padded_sequence is pack is nn.utils.rnn.pack_padded_sequence


def test_an_output_as_long_as_the_longest_sequence_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match=r"give it total_length, such as x\.size\(1\)"):
        convert(AsLongAsTheLongest(), "pt2", tmp_path)
