"""Payloads: generated from declared ranges, or read from files; and the tolerance of answers."""

from __future__ import annotations

import base64
import json
import os
import re
from pathlib import Path

import numpy as np
import pytest

from modelport.loadtests.load import payloads
from modelport.loadtests.load.payloads import BadPayload, Payloads
from modelport.loadtests.load.samples import SAMPLE, LoadProfile, LoadRun, Outcome
from modelport.loadtests.load.summary import summarise, summary_of
from modelport.loadtests.load.target import LoadTestProtocol, LoadTestTarget, address, parse
from modelport.loadtests.users import random_requests, signature
from modelport.loadtests.users.answer_checker import Checker

CONFIG = """
name: "m" max_batch_size: 8
input { name: "tokens" data_type: TYPE_INT64 dims: -1 }
input { name: "seq_lens" data_type: TYPE_INT64 dims: 1 reshape { } }
input { name: "x" data_type: TYPE_FP32 dims: [ 2, 3 ] }
output { name: "y" data_type: TYPE_FP32 dims: 1 }
parameters { key: "axes.tokens" value { string_value: "sequence" } }
parameters { key: "axis.sequence" value { string_value: "3..9" } }
parameters { key: "range.tokens" value { string_value: "5..7" } }
parameters { key: "range.seq_lens" value { string_value: "1..sequence" } }
"""


@pytest.fixture
def told(tmp_path: Path) -> signature.RequestSignature:
    path = tmp_path / "config.pbtxt"
    path.write_text(CONFIG)
    return signature.read_file(path)


def test_drawn_requests_keep_to_the_declared_ranges_and_axes(
    told: signature.RequestSignature,
) -> None:
    made = random_requests.draw(told, batch_size=4, seed=1, count=200)
    widths = set()
    for request in made.requests:
        rows, width = request["tokens"].shape
        widths.add(width)
        assert rows == 4
        assert set(np.unique(request["tokens"])) <= {5, 6, 7}
        assert 1 <= request["seq_lens"].min() <= request["seq_lens"].max() <= width
        assert request["x"].shape == (4, 2, 3)
        assert request["x"].dtype == np.float32
    assert widths == set(range(3, 10))
    assert made.reshape == {"seq_lens": ()}


def test_drawn_masks_have_data_everywhere(tmp_path: Path) -> None:
    path = tmp_path / "config.pbtxt"
    dims = 'parameters { key: "mask.seq_lens" value { string_value: "right" } }\n'
    dims += 'parameters { key: "mask.tokens" value { string_value: "any" } }\n'
    path.write_text(CONFIG + dims)
    for request in random_requests.draw(signature.read_file(path), 4, seed=1, count=20).requests:
        assert (request["seq_lens"] == request["tokens"].shape[1]).all()
        assert (request["tokens"] == 1).all()


def test_one_seed_draws_one_set_of_requests(told: signature.RequestSignature) -> None:
    first, again, other = (random_requests.draw(told, 1, seed) for seed in (3, 3, 4))
    for one, two in zip(first.requests, again.requests, strict=True):
        assert all(np.array_equal(one[name], two[name]) for name in one)
    assert not np.array_equal(first.requests[0]["x"], other.requests[0]["x"])


def test_a_batch_above_the_models_is_refused(told: signature.RequestSignature) -> None:
    with pytest.raises(BadPayload, match="--batch-size 9: the model accepts 8 at most"):
        random_requests.draw(told, 9, 0)


def test_a_payload_file_comes_back_as_it_was_written(
    told: signature.RequestSignature, tmp_path: Path
) -> None:
    drawn = random_requests.draw(told, 2, 0, count=3)
    expected = tuple({"y": np.float32([[0.1], [np.nan]])} for _ in range(3))
    made = Payloads(drawn.requests, drawn.datatypes, expected, drawn.reshape, 1e-6, 1e-5)
    payloads.write(made, path := tmp_path / "requests.json")
    found = payloads.read(path)
    assert not payloads.needs_signature(path)
    assert (found.absolute_tolerance, found.relative_tolerance) == (1e-6, 1e-5)
    assert found.reshape == {"seq_lens": ()}
    assert found.expected is not None
    np.testing.assert_array_equal(found.expected[2]["y"], expected[2]["y"])
    for one, two in zip(made.requests, found.requests, strict=True):
        for name in one:
            np.testing.assert_array_equal(one[name], two[name])
            assert one[name].dtype == two[name].dtype


def test_rows_of_an_npz_are_cut_into_batches_with_their_answers(
    told: signature.RequestSignature, tmp_path: Path
) -> None:
    rows = np.arange(5 * 6, dtype=np.float64).reshape(5, 2, 3)
    path = tmp_path / "rows.npz"
    tokens = np.full((5, 3), 6, np.int32)
    np.savez(path, x=rows, tokens=tokens, seq_lens=np.ones((5, 1), np.int64), y=rows[:, 0, :1])
    found = payloads.read(path, told, batch_size=2)
    assert len(found.requests) == 2
    assert found.requests[1]["tokens"].dtype == np.int64
    np.testing.assert_array_equal(found.requests[1]["x"], rows[2:4])
    assert found.expected is not None
    np.testing.assert_array_equal(found.expected[1]["y"], rows[2:4, 0, :1])


def test_recorded_oip_requests_and_their_answers_are_read(tmp_path: Path) -> None:
    one = {
        "inputs": [{"name": "s", "datatype": "BYTES", "shape": [1, 2], "data": ["a", "ü"]}],
        "outputs": [{"name": "y", "datatype": "INT32", "shape": [1], "data": [7]}],
    }
    lines, listed = tmp_path / "recorded.jsonl", tmp_path / "recorded.json"
    lines.write_text(f"{json.dumps(one)}\n{json.dumps(one)}\n")
    listed.write_text(json.dumps([one, one]))
    for path in (lines, listed):
        found = payloads.read(path)
        assert len(found.requests) == 2
        assert found.requests[0]["s"].tolist() == [[b"a", "ü".encode()]]
        assert found.expected is not None
        assert found.expected[1]["y"].tolist() == [7]


#: Of a model that batches: an entry is a row, with or without its shape, flat or in bytes.
ANALYZED = {
    "data": [
        {"tokens": [5, 6, 7], "seq_lens": [3], "x": [1, 2, 3, 4, 5, 6]},
        {
            "tokens": {"content": [7, 6, 5], "shape": [3]},
            "seq_lens": {"b64": base64.b64encode(np.int64(2).tobytes()).decode()},
            "x": {"content": {"b64": base64.b64encode(np.zeros(6, "<f4")).decode()}},
        },
    ],
    "validation_data": [{"y": [1], "label": ["a"]}, {"y": [2], "label": {"b64": "AgAAAMO8"}}],
}
LABELLED = (
    CONFIG.replace("TYPE_FP32 dims: 1 }", "TYPE_INT64 dims: 1 }")
    + """
output { name: "label" data_type: TYPE_STRING dims: 1 }
"""
)


@pytest.mark.parametrize("batch_size", [1, 2])
def test_perf_analyzers_own_files_are_read_as_the_model_declares(
    tmp_path: Path, batch_size: int
) -> None:
    (tmp_path / "config.pbtxt").write_text(LABELLED)
    streams = [[one] for one in ANALYZED["data"]]
    for data in (ANALYZED["data"], streams):
        (tmp_path / "a.json").write_text(json.dumps(ANALYZED | {"data": data}))
        assert payloads.needs_signature(tmp_path / "a.json")
        told = signature.read_file(tmp_path / "config.pbtxt")
        found = payloads.read(tmp_path / "a.json", told, batch_size)
        assert found.expected is not None
        assert len(found.requests) == len(found.expected) == 2 // batch_size
        rows = {n: np.concatenate([one[n] for one in found.requests]) for n in found.datatypes}
        assert rows["tokens"].tolist() == [[5, 6, 7], [7, 6, 5]]
        assert rows["seq_lens"].tolist() == [[3], [2]]
        assert rows["x"].shape == (2, 2, 3)
        assert rows["x"].dtype == np.float32
        right = {n: np.concatenate([one[n] for one in found.expected]) for n in ("y", "label")}
        assert right["y"].dtype == np.int64
        assert right["y"].tolist() == [[1], [2]]
        assert right["label"].tolist() == [[b"a"], ["ü".encode()]]
        payloads.write(found, tmp_path / "again.json")
        again = payloads.read(tmp_path / "again.json")
        assert again.datatypes == found.datatypes
        assert again.requests[0]["x"].shape == (batch_size, 2, 3)


def test_what_perf_analyzer_is_given_has_an_entry_for_each_row_in_shapes_without_the_batch(
    told: signature.RequestSignature, tmp_path: Path
) -> None:
    payloads.write(random_requests.draw(told, 4, 0, count=3), tmp_path / "a.json")
    entries = json.loads((tmp_path / "a.json").read_text())["data"]
    assert len(entries) == 12
    assert all(entry["x"]["shape"] == [2, 3] for entry in entries)
    assert all(len(entry["tokens"]["shape"]) == 1 for entry in entries)


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ({"z": [1]}, "the model has no 'z'; it has tokens, seq_lens, x"),
        ({"x": [1, 2]}, "cannot reshape"),
        ({"tokens": {"b64": "!"}}, "not requests"),
    ],
)
def test_an_entry_that_does_not_fit_the_model_is_named(
    told: signature.RequestSignature, tmp_path: Path, entry: dict[str, object], said: str
) -> None:
    (tmp_path / "a.json").write_text(json.dumps({"data": [entry]}))
    with pytest.raises(BadPayload, match=said):
        payloads.read(tmp_path / "a.json", told)


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.json", "{", "a.json"),
        ("a.json", '{"data": [], "modelport": {"inputs": {}, "outputs": {}}}', "no 'batch_size'"),
        ("a.json", "{}", "no 'inputs'"),
        ("a.json", '{"data": []}', "it has no datatypes"),
        ("a.jsonl", "", "it holds no requests"),
        ("a.npz", "PK", "not requests"),
    ],
)
def test_a_file_that_holds_no_requests_is_refused_in_one_line(
    tmp_path: Path, name: str, text: str, said: str
) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(BadPayload) as caught:
        payloads.read(path)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_answer_is_right_within_the_tolerance_and_wrong_beyond_it() -> None:
    made = Payloads(
        ({"x": np.zeros(1)},), {"x": "FP64"}, ({"y": np.float32([1.0, np.nan])},), {}, 0.1, 0.0
    )
    answers = {
        b"near": {"y": np.float32([1.05, np.nan])},
        b"far": {"y": np.float32([1.2, np.nan])},
        b"short": {"y": np.float32([1.0])},
        b"other": {"z": np.float32([1.0, np.nan])},
        b"nameless": {"": np.float32([1.0, np.nan])},
    }
    checker = Checker(made, lambda body, _: answers[body])
    assert checker.problem(0, b"near", None) is None
    assert checker.problem(0, b"nameless", None) is None
    assert checker.problem(0, b"far", None) == "output 'y' is off by 0.1 or more"
    assert checker.problem(0, b"short", None) == "output 'y' has 1 values, not 2"
    assert checker.problem(0, b"other", None) == "output 'y' is missing"
    assert "unreadable" in str(checker.problem(0, b"unknown", None))


def run_of(latencies: list[float], outcomes: list[Outcome]) -> LoadRun:
    samples = np.zeros(len(latencies), SAMPLE)
    samples["intended"] = np.arange(len(latencies)) / 10
    samples["sent"] = samples["intended"] + 0.001
    samples["first_byte"] = samples["sent"] + 0.002
    samples["done"] = samples["intended"] + latencies
    samples["outcome"] = outcomes
    load = LoadProfile(rate=10, duration_seconds=len(latencies) / 10, warmup_seconds=0)
    return LoadRun(LoadTestTarget(LoadTestProtocol.OIP_HTTP, "h:1", "m"), load, samples, {"bad": 2})


def test_percentiles_are_of_right_answers_and_count_from_the_intended_sending() -> None:
    run = run_of([0.01] * 98 + [0.5, 9.0], [Outcome.OK] * 99 + [Outcome.WRONG])
    summary = summarise(run)
    assert (summary.requests, summary.ok, summary.wrong, summary.bad) == (100, 99, 1, 1)
    assert summary.latency.p50 == pytest.approx(10, rel=1e-3)
    assert summary.latency.maximum == pytest.approx(500, rel=1e-3)
    assert summary.first_byte.p99 == pytest.approx(2, rel=1e-3)


def test_runs_merge_into_the_percentiles_of_all_their_answers() -> None:
    fast, slow = run_of([0.01] * 90, [Outcome.OK] * 90), run_of([1.0] * 10, [Outcome.OK] * 10)
    both = summary_of([fast, slow])
    assert both.ok == 100
    assert both.latency.p90 == pytest.approx(10, rel=1e-3)
    assert both.latency.p95 == pytest.approx(1000, rel=1e-3)
    assert both.errors == {"bad": 4}


def test_a_target_is_written_and_read_in_one_line() -> None:
    target = LoadTestTarget(LoadTestProtocol.TFSERVING_GRPC, "[::1]:8500", "a/b", "3")
    assert parse(target.url) == target
    assert address("http://localhost:8000/") == "localhost:8000"
    for bad in ("localhost", "ftp://h:1", "h:0", "h:99999", "http://h:1/v2"):
        with pytest.raises(ValueError, match=bad.partition("://")[0]):
            address(bad)
    with pytest.raises(ValueError, match="MODEL"):
        parse("oip-http://h:1")


def test_the_open_inference_protocols_own_urls_name_a_target_too() -> None:
    for url, told in {
        "http://h:1/v2/models/a%2Fb": "oip-http://h:1/a%2Fb",
        "http://[::1]:8000/v2/models/m/versions/3/": "oip-http://[::1]:8000/m/3",
        "grpc://h:1/m": "oip-grpc://h:1/m",
        "grpc://h:1/m/3": "oip-grpc://h:1/m/3",
        "https://h:1/v2/models/m": "oip-https://h:1/m",
        "grpcs://h:1/m": "oip-grpcs://h:1/m",
        "oip-https-binary://h:1/m": "oip-https-binary://h:1/m",
        "tfserving-grpcs://h:1/m": "tfserving-grpcs://h:1/m",
    }.items():
        assert parse(url).url == told
    for bad in (
        "http://h:1/m",
        "http://h:1/v2/models/m/infer",
        "grpc://h:1",
        "h:1/m",
        "http://[:1",
        "wss://h:1/m",
    ):
        with pytest.raises(ValueError, match=re.escape(bad)):
            parse(bad)


def test_texts_and_whole_numbers_have_no_tolerance_and_a_number_must_be_finite() -> None:
    right = {
        "label": np.array([[50_000]]),
        "text": np.array([[b"yes"]], np.object_),
        "score": np.float32([[0.5]]),
    }
    answers = {
        b"same": right,
        b"label": right | {"label": np.array([[50_001]])},
        b"text": right | {"text": np.array([[b"no"]], np.object_)},
        b"score": right | {"score": np.float32([[np.nan]])},
    }
    made = Payloads(({"x": np.zeros(1)},), {"x": "FP64"}, (right,), {}, 1.0, 1.0)
    checker = Checker(made, lambda body, _: answers[body])
    assert checker.problem(0, b"same", None) is None
    assert checker.problem(0, b"label", None) == "output 'label' is not what was expected"
    assert checker.problem(0, b"text", None) == "output 'text' is not what was expected"
    assert checker.problem(0, b"score", None) == "output 'score' is not finite"


def test_a_transposed_answer_is_wrong_and_one_without_its_ones_is_not() -> None:
    ones = np.ones((2, 3), np.float32)
    made = Payloads(({"x": ones},), {"x": "FP32"}, ({"y": ones},))
    answers = {b"same": ones, b"nested": ones[:, None], b"turned": ones.T, b"flat": ones.ravel()}
    checker = Checker(made, lambda body, _: {"y": answers[body]})
    assert checker.problem(0, b"same", None) is None
    assert checker.problem(0, b"nested", None) is None
    assert checker.problem(0, b"turned", None) == "output 'y' has shape (3, 2), not (2, 3)"
    assert checker.problem(0, b"flat", None) == "output 'y' has shape (6,), not (2, 3)"
    row = np.ones((1, 3), np.float32)
    batched = Payloads(({"x": row},), {"x": "FP32"}, ({"y": row},), batch_size=1)
    checker = Checker(batched, lambda body, _: {"y": row.T})
    assert checker.problem(0, b"rows", None) == "output 'y' has shape (3, 1), not (1, 3)"


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 cut off"])
def test_a_damaged_npz_gets_a_one_line_error(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "rows.npz"
    path.write_bytes(content)
    with pytest.raises(BadPayload, match=r"rows\.npz: not requests"):
        payloads.read(path)


def test_rows_and_answers_of_an_npz_must_be_as_many(tmp_path: Path) -> None:
    (tmp_path / "config.pbtxt").write_text(
        'max_batch_size: 4 input { name: "x" data_type: TYPE_FP32 dims: [1] } '
        'output { name: "y" data_type: TYPE_FP32 dims: [1] }'
    )
    np.savez(tmp_path / "rows.npz", x=np.zeros((4, 1), "f4"), y=np.zeros((3, 1), "f4"))
    with pytest.raises(BadPayload, match="different numbers of rows"):
        payloads.read(tmp_path / "rows.npz", signature.read_file(tmp_path / "config.pbtxt"))


@pytest.mark.parametrize("name", ["requests.json", "requests.jsonl", "rows.npz"])
def test_a_pipe_or_a_file_of_gigabytes_holds_no_requests(name: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / name)
    with pytest.raises(BadPayload, match="it is not a regular file"):
        payloads.read(tmp_path / name, None, 1)
    (tmp_path / name).unlink()
    with (tmp_path / name).open("wb") as file:
        file.truncate(64 << 30)
    with pytest.raises(BadPayload, match=r"it is larger than|File is not a zip file"):
        payloads.read(tmp_path / name, None, 1)
