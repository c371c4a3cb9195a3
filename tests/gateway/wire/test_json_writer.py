"""JSON of large arrays and long strings in pieces."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest

from modelport.gateway.wire import json_text, json_writer
from modelport.gateway.wire.json_writer import Rows
from tests.attacks import holds


def texts(chance: random.Random, shape: tuple[int, ...]) -> Any:
    array = np.empty(shape, object)
    for place in np.ndindex(*shape):
        length = chance.choice((0, 1, 5, 300))
        array[place] = "".join(chance.choices('a"\\\n\u00e9\u20ac\U0001d11e', k=length))
    return array


def plain(document: Any) -> Any:
    if isinstance(document, np.ndarray):
        return document.tolist()
    if type(document) is dict:
        return {key: plain(value) for key, value in document.items()}
    if type(document) is Rows:
        columns = {name: column.tolist() for name, column in document.columns.items()}
        return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    return document


@pytest.mark.parametrize("seed", range(100))
def test_pieces_are_what_the_whole_document_is(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    chance = random.Random(f"writer {seed}")
    monkeypatch.setattr(json_writer, "PIECE", chance.randrange(1, 40))
    monkeypatch.setattr(json_writer, "SLICE", chance.randrange(1, 40))
    rows = chance.randrange(1, 5)
    columns = {
        "text": texts(chance, (rows, chance.randrange(1, 4))),
        "one": texts(chance, (rows,)),
        "numbers": np.arange(rows * 6).reshape(rows, 2, 3),
    }
    document = {"rows": Rows(columns), "single": texts(chance, ()), **columns, "plain": "a"}
    assert json.loads(bytes(json_writer.dumps(document))) == plain(document)


@pytest.mark.parametrize("constant", ["PIECE", "SLICE"])
def test_a_long_string_is_written_in_pieces(constant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    document = {"y": np.array("\\" * 4_000_000, object)}
    assert json_writer.is_large(document["y"])

    def write_as_one_piece() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(json_writer, constant, 1 << 40)
            json_writer.dumps(document)

    assert holds.in_pieces(lambda: json_writer.dumps(document), write_as_one_piece) == ""
    assert json_text.loads(json_writer.dumps({"y": np.array("ab", object)})) == {"y": "ab"}
