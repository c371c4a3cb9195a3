"""Long JSON in pieces: what the whole would give, in a fraction of the memory."""

from __future__ import annotations

import json
import random
import time
import tracemalloc
from typing import Any

import numpy as np
import orjson
import pytest

from modelport.gateway.errors import InvalidArgument
from modelport.gateway.types import Datatype
from modelport.gateway.wire import incremental_json, json_tensors, json_text, json_window
from modelport.gateway.wire.long_array import LongArray
from tests import processor

LIMITS = incremental_json.JsonLimits(100, 10**9, 10**9)
#: What is refused only because pieces of this test are so small.
TINY = ("the rows of an array", "or a long one", "is too long")


def plain(value: Any) -> Any:
    if isinstance(value, LongArray):
        return value.tolist()
    if type(value) is list:
        return [plain(item) for item in value]
    if type(value) is dict:
        return {key: plain(item) for key, item in value.items()}
    return value


def some(chance: random.Random, depth: int = 0) -> Any:
    kind = chance.random() if depth < 4 else 1
    if kind < 0.3:
        return [some(chance, depth + 1) for _ in range(chance.randrange(6))]
    if kind < 0.4:
        width = chance.randrange(1, 4)
        return [[chance.random() for _ in range(width)] for _ in range(chance.randrange(8))]
    if kind < 0.5:
        return [chance.choice([1, 2**40, -3]) for _ in range(chance.randrange(20))]
    if kind < 0.7:
        letters = 'abcdé"\\,[]{}:'
        keys = [chance.choice(letters) * chance.randrange(1, 3) for _ in range(chance.randrange(5))]
        return {key: some(chance, depth + 1) for key in keys}
    return chance.choice([1, 2.5, True, None, "x", "a,b[", '\\"', '"', "", "é{", 10**15])


def mutated(chance: random.Random, text: bytes) -> bytes:
    found = bytearray(text)
    for _ in range(chance.randrange(1, 3)):
        place = chance.randrange(len(found))
        letter = chance.choice(b'[]{},:"\\1 ')
        how = chance.random()
        if how < 0.4 and len(found) > 1:
            del found[place]
        elif how < 0.8:
            found.insert(place, letter)
        else:
            found[place] = letter
    return bytes(found)


def read(text: bytes) -> tuple[Any, str]:
    try:
        return plain(incremental_json.loads(text, LIMITS, orjson.loads)), ""
    except (InvalidArgument, orjson.JSONDecodeError) as error:
        return None, str(error)


@pytest.mark.parametrize("small", [0, 3])
def test_pieces_give_what_the_whole_gives_or_refuse_it(
    small: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(incremental_json, "SMALL", small)
    read_at_all = 0
    for number in range(400):
        chance = random.Random(f"pieces {number}")
        monkeypatch.setattr(incremental_json, "PIECE_BYTES", chance.randrange(1, 40))
        monkeypatch.setattr(json_window, "SLICE_BYTES", chance.randrange(16, 40))
        separators = chance.choice([(",", ":"), (", ", ": "), (" ,\n", " :\t")])
        ascii_only = chance.random() < 0.5
        good = json.dumps(some(chance), ensure_ascii=ascii_only, separators=separators).encode()
        for text in (good, mutated(chance, good)):
            try:
                expected, wrong = orjson.loads(text), False
            except orjson.JSONDecodeError:
                expected, wrong = None, True
            found, error = read(text)
            if not any(tiny in error for tiny in TINY):
                assert bool(error) == wrong, (number, text, error)
                assert found == expected, (number, text)
                read_at_all += not wrong
    assert read_at_all > 320


LONG: dict[str, bytes] = {
    "whole numbers": b"[" + b"0," * 300_000 + b"7]",
    "fractions": b"[" + b"1.5," * 300_000 + b"7]",
    "rows": b"[" + b"[1.5,2,-3]," * 100_000 + b"[1,2,3]]",
    "long rows": b"[" + b",".join([b"[" + b"1," * 200_000 + b"2]"] * 3) + b"]",
    "booleans": b"[" + b"true," * 200_000 + b"false]",
    "strings": b"[" + '"aé",'.encode() * 200_000 + b'"x"]',
    "not numbers": b"[" + b"NaN,-Infinity," * 50_000 + b"1.5]",
    "empty rows": b"[" + b"[]," * 300_000 + b"[]]",
    "space": b"[1," + b" \n" * 500_000 + b"2]",
    "a long string": b'["' + b"x\\\\\\n" * 200_000 + b'", "y"]',
    "long strings": b"[" + b",".join([b'"' + b"y" * 300_000 + b'\\""'] * 3) + b"]",
    "objects": b'[{"a":"' + b"z" * 300_000 + b'","b":[' + b"1," * 200_000 + b'2]},{"a":"","b":[]}]',
}


@pytest.mark.parametrize("what", LONG)
def test_long_arrays_are_what_they_were(what: str) -> None:
    text = LONG[what]
    assert len(text) > incremental_json.LONG_BYTES
    expected = json.loads(text)
    found = plain(json_text.loads(text))
    assert repr(found) == repr(expected) if "not" in what else found == expected


@pytest.mark.parametrize("what", ["whole numbers", "fractions", "rows", "booleans", "empty rows"])
def test_long_arrays_take_a_fraction_of_the_memory_of_lists(what: str) -> None:
    text = LONG[what]
    tracemalloc.start()
    try:
        value = json_text.loads(text)
        taken = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert isinstance(value, LongArray)
    assert taken < 4 * len(text) + 2**20, taken / len(text)


@pytest.mark.parametrize(
    ("datatype", "text"),
    [
        (Datatype.INT8, b"[" + b"1," * 200_000 + b"128]"),
        (Datatype.UINT64, b"[" + b"1," * 200_000 + b"-1]"),
        (Datatype.INT64, b"[" + b"1," * 200_000 + b"9223372036854775808]"),
    ],
)
def test_a_value_that_does_not_fit_is_found_among_many(datatype: Datatype, text: bytes) -> None:
    with pytest.raises(InvalidArgument, match=f"does not fit {datatype}|mixes negative integers"):
        json_tensors.decode("x", datatype, (200_001,), json_text.loads(text))


@pytest.mark.parametrize(
    ("datatype", "text", "message"),
    [
        (Datatype.FP32, b"[" + b"1," * 200_000 + b'"x"]', "holds strings"),
        (Datatype.INT32, b"[" + b"1," * 200_000 + b"1.5]", "holds numbers with a fraction"),
        (Datatype.FP32, b"[" + b"true," * 200_000 + b"true]", "holds booleans"),
        (Datatype.FP32, b"[" + b"1," * 200_001 + b"1]", "needs 200001, got 200002"),
        (Datatype.FP32, b"[" + b"null," * 200_000 + b"1]", "holds null"),
    ],
)
def test_an_error_in_many_values_is_reported(datatype: Datatype, text: bytes, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        json_tensors.decode("x", datatype, (200_001,), json_text.loads(text))


def test_every_bit_is_the_one_that_the_short_way_gives() -> None:
    chance = np.random.default_rng(0)
    values = [*chance.standard_normal(100000).tolist(), 1e39, -1e39, 5e-324, 2**53 + 1, -0.0]
    text = orjson.dumps(values)
    for datatype in (Datatype.FP32, Datatype.FP64):
        long = json_tensors.decode("x", datatype, (len(values),), json_text.loads(text))
        short = json_tensors.decode("x", datatype, (len(values),), orjson.loads(text))
        assert long.tobytes() == short.tobytes()


@pytest.mark.parametrize(
    "text",
    [
        b"[" + b"{}," * 300_000 + b"{}]",
        b"[" + b'{"a":1},' * 300_000 + b"{}]",
        b"[" + b"[[]]," * 2_000_001 + b"[]]",
        b"[" * 1_000_000,
        b"[1," * 1_000_000,
        b"1" * 3_000_000,
        b"[" + b"1" * 3_000_000 + b",2]",
        b"[1,2" + b"]" * 1_000_000,
        b"1," * 1_000_000,
        b'{"' + b"k" * 1_000_000 + b'":[1,2' + b",3" * 100_000 + b"]}",
    ],
    ids=range(10),
)
def test_a_long_json_bomb_is_refused_in_time_linear_in_its_size(text: bytes) -> None:
    started = time.process_time()
    with pytest.raises(InvalidArgument):
        json_text.loads(text)
    assert processor.seconds_since(started) < 400e-9 * len(text) + 0.1


@pytest.mark.parametrize("end", [b"", b',"', b',{"x":1}' * 20_000 + b"]"])
def test_what_was_read_of_an_invalid_text_is_freed_in_pieces(
    end: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends too early, or has too many keys."""
    freed: list[Any] = []
    monkeypatch.setattr(incremental_json, "discard", freed.append)
    limits = incremental_json.JsonLimits(depth=10, keys=60_000, containers=10**6)
    with pytest.raises(InvalidArgument):
        incremental_json.loads(
            b"[" + b",".join([b'{"x":1}'] * 50_000) + end, limits, json_text._parse
        )
    assert sum(map(len, freed)) > 40_000


def test_a_large_document_is_emptied_in_pieces_and_a_small_one_is_left() -> None:
    rows: list[Any] = [{"x": 1}] * 50_000
    inner: list[Any] = [2] * 50_000
    incremental_json.discard({"instances": rows, "signature_name": "a", "few": [1, inner]})
    assert len(rows) <= incremental_json.SMALL
    assert len(inner) <= incremental_json.SMALL


def test_a_long_string_in_slices_is_the_whole_string_or_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chars = ["a", '"', "\\", "\n", "é", "€", "\U0001d11e", "\\u", "u00e9"]
    refused = 0
    for number in range(1000):
        chance = random.Random(f"slices {number}")
        monkeypatch.setattr(json_window, "SLICE_BYTES", chance.randrange(13, 40))
        halves = ["\ud83d", "\ude00"] if chance.random() < 0.2 else []
        text = "".join(chance.choices(chars + halves, k=chance.randrange(60)))
        surrogates = any("\ud800" <= char <= "\udfff" for char in text)
        content = json.dumps(text, ensure_ascii=surrogates or chance.random() < 0.5).encode()[1:-1]
        if chance.random() < 0.3:
            content = mutated(chance, content or b"x")
        try:
            expected = orjson.loads(b'"%b"' % content)
        except orjson.JSONDecodeError:
            refused += 1
            with pytest.raises(orjson.JSONDecodeError):
                json_window.string(content, 0, len(content), orjson.loads)
        else:
            assert json_window.string(content, 0, len(content), orjson.loads) == expected
    assert 160 < refused < 840


def test_a_long_key_and_a_long_array_of_mixed_types_are_refused() -> None:
    key = b'{"' + b"k" * incremental_json.LONG_BYTES + b'":1}'
    with pytest.raises(InvalidArgument, match="a key of the request JSON is too long"):
        json_text.loads(key)
    mixed = b"[" + b'"ab",' * (incremental_json.MAX_PLAIN + 1) + b"0]"
    with pytest.raises(InvalidArgument, match="of more than 500000 elements must hold only"):
        json_text.loads(mixed)


@pytest.mark.parametrize("seed", range(200))
def test_the_end_of_a_value_is_found_without_parsing_it(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance = random.Random(f"end {seed}")
    monkeypatch.setattr(json_text, "_FIRST_BYTES", chance.randrange(1, 9))
    monkeypatch.setattr(json_text, "_CHUNK_BYTES", chance.randrange(1, 30))
    text = json.dumps([some(chance)], ensure_ascii=False).encode()
    assert json_text.end(text + chance.choice([b"", b'"]', b"\x00\\", b"]}"])) == len(text)
    assert json_text.end(text[:-1]) is None
