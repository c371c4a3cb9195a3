"""Encoding of the results of Classify and Regress, as protobuf fields and as REST's JSON.

A message is the concatenation of its fields, so a large result is encoded in pieces.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from modelport.gateway.runtime import offload
from modelport.gateway.types import Array
from modelport.gateway.wire import json_text, json_writer
from modelport.gateway.wire.proto import serving_pb2 as pb
from modelport.gateway.wire.protobuf import nested, tag
from modelport.gateway.wire.raw_tensors import Buffer

#: Classes or values in a piece.
PIECE = 2048

_ROW = tag(pb.ClassificationResult, "classifications")


class Classes(NamedTuple):
    """Labels and scores of the classes of every example; either may be missing."""

    labels: Sequence[Sequence[str]] | None
    scores: Array | None

    def pieces(self) -> Iterator[Iterator[list[tuple[str, np.float32]]]]:
        """Yield the classes of each example, in lists of at most ``PIECE``."""
        rows = self.labels if self.labels is not None else self.scores
        assert rows is not None
        for index, row in enumerate(rows):
            yield map(partial(self._piece, index, len(row)), range(0, len(row), PIECE))

    def _piece(self, index: int, count: int, start: int) -> list[tuple[str, np.float32]]:
        stop = min(start + PIECE, count)
        labels: Sequence[str] = ("",) * (stop - start)
        scores: Sequence[np.float32] = (np.float32(0),) * (stop - start)
        if self.labels is not None:
            labels = self.labels[index][start:stop]
        if self.scores is not None:
            scores = list(self.scores[index][start:stop])
        offload.checkpoint()
        return list(zip(labels, scores, strict=True))


def classification_fields(classes: Classes) -> list[Buffer]:
    """Encode a ``ClassificationResult``."""
    fields: list[Buffer] = []
    for pieces in classes.pieces():
        fields += nested(_ROW, [_classes(piece) for piece in pieces])
    return fields


def _classes(piece: Sequence[tuple[str, np.float32]]) -> bytes:
    message = pb.Classifications()
    for label, score in piece:
        message.classes.add(label=label, score=score)
    return bytes(message.SerializeToString())


def regression_fields(values: Array) -> list[Buffer]:
    """Encode a ``RegressionResult``."""
    fields: list[Buffer] = []
    for start in range(0, len(values), PIECE):
        message = pb.RegressionResult()
        for value in values[start : start + PIECE].tolist():
            message.regressions.add(value=value)
        fields.append(message.SerializeToString())
        offload.checkpoint()
    return fields


def classification_json(classes: Classes) -> Buffer:
    """Encode ``results``: a list of ``[label, score]`` for each example."""
    parts, before = [], b'{"results":['
    for pieces in classes.pieces():
        texts = [json_text.dumps(_written(piece))[1:-1] for piece in pieces]
        parts.append(b"%b[%b]" % (before, b",".join(texts)))
        before = b","
    return json_writer.join((*parts, b"]}"))


def _written(piece: list[tuple[str, np.float32]]) -> list[Any]:
    if np.isfinite([score for _, score in piece]).all():
        return piece
    return [(label, json_text.numbers(np.asarray(score))) for label, score in piece]


def regression_json(values: Array) -> Buffer:
    """Encode ``results``: a value for each example."""
    return json_writer.dumps({"results": values})
