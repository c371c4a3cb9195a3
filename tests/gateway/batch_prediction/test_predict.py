"""``modelport predict``: files of rows through models, row by row the same whatever happens."""

from __future__ import annotations

import csv
import json
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from decimal import Decimal
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

import modelport
from modelport.gateway.batch_prediction import batch_run, input_files, output_files
from modelport.gateway.errors import InvalidArgument, NotFound, Unavailable, UsageError
from tests import models
from tests.commands import modelport as command

ROWS = 50
X = np.random.default_rng(0).standard_normal((ROWS, 4)).astype(np.float32)
parquet = pytest.mark.skipif(find_spec("pyarrow") is None, reason="pyarrow is not installed")
FORMATS = ["npz", "npy", "jsonl", "csv", pytest.param("parquet", marks=parquet)]
OUTPUTS = ["jsonl", pytest.param("parquet", marks=parquet)]
COLUMNS = ["x=a,b,c,d"]


def look_up(path: Path) -> Path:
    """FP32 ``y = table[x]`` of INT64 ``x`` 0 to 3; another one fails the whole batch."""
    return models.save(
        path,
        helper.make_graph(
            [helper.make_node("Gather", ["table", "x"], ["y"])],
            "look_up",
            [helper.make_tensor_value_info("x", TensorProto.INT64, ["batch", 1])],
            [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 1])],
            [numpy_helper.from_array(np.array([10, 11, 12, 13], np.float32), "table")],
        ),
    )


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = models.repository(tmp_path_factory.mktemp("repository"))
    look_up(root / "table" / "1" / "model.onnx")
    words = models.identity(root / "words" / "1" / "model.onnx", "BYTES", ("batch", "length"))
    shutil.copytree(words.parents[1], root / "bytes")
    latin = 'parameters { key: "string_encoding" value { string_value: "latin-1" } }'
    (root / "bytes" / "config.pbtxt").write_text(
        models.config("bytes", ["x BYTES -1"], ["y BYTES -1"], extra=latin)
    )
    models.multiply(root / "single" / "1" / "model.onnx")
    (root / "single" / "config.pbtxt").write_text(
        models.config("single", ["x FP32 1,4"], ["y FP32 1,4"], max_batch_size=0)
    )
    return root


@pytest.fixture(scope="module")
def client(repository: Path) -> Iterator[modelport.Client]:
    with (
        modelport.testing.serve(repository) as server,
        modelport.Client(server.http_url) as connected,
    ):
        yield connected


def write(path: Path, kind: str, values: np.ndarray[Any, Any] = X) -> Path:
    """A file of rows of ``x``, for CSV of its elements ``a`` to ``d``."""
    path = path / f"rows.{kind}"
    if kind == "npz":
        np.savez_compressed(path, x=values)
    elif kind == "npy":
        np.save(path, values)
    elif kind == "jsonl":
        path.write_text("".join(json.dumps({"x": row.tolist()}) + "\n" for row in values))
    elif kind == "csv":
        with path.open("w", newline="") as file:
            csv.writer(file).writerows([["id", *"abcd"], *([0, *row] for row in values.tolist())])
    else:
        import pyarrow as pa
        from pyarrow import parquet

        table = pa.table({"id": range(len(values)), "x": list(values)})
        parquet.write_table(table, path, row_group_size=7)
    return path


def read(path: Path) -> list[dict[str, Any]]:
    """The rows of a file of answers; JSON Lines have no errors that are None."""
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in path.read_text().splitlines()]
    from pyarrow import parquet

    rows: list[dict[str, Any]] = parquet.read_table(path).to_pylist()
    return [{name: value for name, value in row.items() if value is not None} for row in rows]


@pytest.mark.parametrize("output", OUTPUTS)
@pytest.mark.parametrize("kind", FORMATS)
def test_every_row_has_its_answer_in_the_order_of_the_file(
    client: modelport.Client, tmp_path: Path, kind: str, output: str
) -> None:
    done = tmp_path / f"answers.{output}"
    made = modelport.predict(
        write(tmp_path, kind), model="x2", output=done, client=client, batch_size=3,
        column=COLUMNS if kind == "csv" else (),
    )  # fmt: skip
    assert made == (done, ROWS, 0, 0)
    found = np.array([row["y"] for row in read(done)], np.float32)
    np.testing.assert_array_equal(found, X * 2)
    assert not done.with_name(done.name + ".part").exists()


@pytest.mark.parametrize("output", OUTPUTS)
def test_only_the_rows_at_fault_fail(client: modelport.Client, tmp_path: Path, output: str) -> None:
    values = [0, 1, "two", 3, 9, 2, None, -9, 1, [1, 2], 3]
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(f"{json.dumps({'x': each})}\n" for each in values) + "{\n" + "[]\n")
    done = tmp_path / f"answers.{output}"
    made = modelport.predict(rows, model="table", output=done, client=client)
    assert (made.rows, made.failed) == (13, 7)
    found = read(done)
    assert [row.get("y") for row in found] == [
        10, 11, None, 13, None, 12, None, None, 11, None, 13, None, None,
    ]  # fmt: skip
    said = [row.get("error", "") for row in found]
    assert said[2] == "input 'x', INT64 [1]: 'two' is not a number"
    assert "indices element out of data bounds, idx=9" in said[4]
    assert said[6] == "input 'x', INT64 [1] has no value"
    assert said[9] == "input 'x', INT64 [1]: the shape is [2]"
    assert said[12] == "it is not a row: not an object of values by name"


@pytest.mark.parametrize(
    "place", ["gateway", "folder", pytest.param("file", marks=pytest.mark.thorough)]
)
def test_the_command_ends_with_1_if_a_row_fails(
    client: modelport.Client, repository: Path, tmp_path: Path, place: str
) -> None:
    rows, done = tmp_path / "rows.csv", tmp_path / "a.jsonl"
    rows.write_text("x\n1\n7\n")
    folder = repository / "table"
    model = {"gateway": "table", "folder": folder, "file": folder / "1" / "model.onnx"}[place]
    url = ("--url", client._client._url.removeprefix("http://")) if place == "gateway" else ()
    ended = command("predict", str(rows), "--model", str(model), "-o", str(done), "-q", *url)
    assert ended.returncode == 1, ended.stderr
    assert ended.stdout == f"{done}: 2 rows, 1 failed\n"


@pytest.mark.parametrize("output", OUTPUTS)
def test_a_file_without_rows_has_no_answers(
    client: modelport.Client, tmp_path: Path, output: str
) -> None:
    rows = write(tmp_path, "npz", X[:0])
    done = tmp_path / f"answers.{output}"
    assert modelport.predict(rows, model="x2", output=done, client=client).rows == 0
    assert read(done) == []


@parquet
def test_values_of_parquet_are_numbers_and_texts_or_missing(
    client: modelport.Client, tmp_path: Path
) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    rows = tmp_path / "rows.parquet"
    columns = {
        "x": pa.array([[1, 2, 3, 4], None, [1, 2, 3]], pa.list_(pa.float64())),
        "price": pa.array([Decimal("1.5")] * 3),
        "words": pa.array(["a", None, "a"]).dictionary_encode(),
        "day": pa.array([datetime(2026, 1, 9)] * 3),
    }
    parquet.write_table(pa.table(columns), rows)

    def answers(name: str, model: str, column: str) -> list[Any]:
        done = tmp_path / f"{name}.jsonl"
        modelport.predict(rows, model=model, output=done, client=client, column=[f"x={column}"])
        return [row.get("y") for row in read(done)]

    assert answers("x", "x2", "x") == [[2, 4, 6, 8], None, None]
    assert answers("price", "x2", "price,price,price,price") == [[3.0] * 4] * 3
    assert answers("words", "words", "words") == [["a"], None, ["a"]]
    with pytest.raises(UsageError, match=r"'day'.* does not fit input 'x', FP32"):
        answers("day", "x2", "day,day,day,day")


def test_a_number_that_is_too_large_fails_its_row_and_infinity_does_not(
    client: modelport.Client, tmp_path: Path
) -> None:
    rows, done = tmp_path / "rows.csv", tmp_path / "done.jsonl"
    rows.write_text("x\n1e300\n1e400\n-inf\n2\n")
    modelport.predict(rows, model="x2", output=done, client=client, column=["x=x,x,x,x"])
    assert ["error" in row for row in read(done)] == [True, True, False, False]


def test_rows_of_different_lengths_and_texts_are_predicted(
    client: modelport.Client, tmp_path: Path
) -> None:
    given = [["a"], ["b", "c"], ["[d"], [], ["ü"]]
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"x": each}) + "\n" for each in given))
    modelport.predict(rows, model="words", output=tmp_path / "a.jsonl", client=client)
    assert [row["y"] for row in read(tmp_path / "a.jsonl")] == given


@pytest.mark.parametrize("output", OUTPUTS)
def test_an_output_that_is_not_text_fails_its_row_alone(
    client: modelport.Client, tmp_path: Path, output: str
) -> None:
    rows, done = tmp_path / "rows.npz", tmp_path / f"answers.{output}"
    np.savez(rows, x=np.array([[b"a"], [b"\xff"], ["ü".encode()]]))
    modelport.predict(rows, model="bytes", output=done, client=client)
    assert read(done) == [
        {"y": ["a"]}, {"error": "output 'y' is not text in UTF-8"}, {"y": ["ü"]},
    ]  # fmt: skip


def test_a_model_without_a_batch_gets_single_rows(client: modelport.Client, tmp_path: Path) -> None:
    rows = write(tmp_path, "npz", X[:3, np.newaxis])
    modelport.predict(rows, model="single", output=tmp_path / "a.jsonl", client=client)
    found = [row["y"] for row in read(tmp_path / "a.jsonl")]
    np.testing.assert_array_equal(np.array(found, np.float32), X[:3, np.newaxis] * 2)


def test_numbers_that_are_not_finite_are_texts_in_json(
    client: modelport.Client, tmp_path: Path
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"x": [NaN, Infinity, -Infinity, 1]}\n{"x": [1e39, 0, 0, 0]}\n')
    modelport.predict(rows, model="x2", output=tmp_path / "a.jsonl", client=client)
    assert read(tmp_path / "a.jsonl") == [
        {"y": ["NaN", "Infinity", "-Infinity", 2.0]},
        {"error": "input 'x', FP32 [4]: overflow encountered in cast"},
    ]


def resumes(client: modelport.Client, folder: Path, output: str, step: int) -> None:
    """Fail unless a run that is cut off anywhere goes on to the same file."""
    rows, done = write(folder, "jsonl", X[:12]), folder / f"answers.{output}"

    def predict() -> modelport.PredictedFile:
        return modelport.predict(rows, model="x2", output=done, client=client)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(input_files, "MOST_BLOCK_BYTES", 150)
        patch.setattr(output_files.KINDS[done.suffix], "finish", interrupt)
        with pytest.raises(KeyboardInterrupt):
            predict()
        part, kept = done.with_name(done.name + ".part"), folder / "kept"
        shutil.copytree(part, kept)
        patch.undo()
        predict()
        expected, resumed = read(done), set()
        for cut in range(0, (kept / "rows").stat().st_size, step):
            done.unlink()
            shutil.copytree(kept, part)
            with (part / "rows").open("r+b") as file:
                file.truncate(cut)
            resumed.add(predict().resumed)
            assert read(done) == expected, f"cut off at {cut}"
    assert len(expected) == 12
    assert len(resumed) > 2  # most runs went on, and did not begin again


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("output", OUTPUTS)
def test_a_run_that_was_cut_off_anywhere_goes_on(
    client: modelport.Client, tmp_path: Path, output: str
) -> None:
    resumes(client, tmp_path, output, 23 if output == "jsonl" else 199)


@pytest.mark.thorough
@pytest.mark.parametrize("output", OUTPUTS)
def test_a_torn_row_that_is_kept_would_be_found(
    client: modelport.Client, tmp_path: Path, output: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = output_files.KINDS[f".{output}"]
    begin: Callable[..., None] = kind.__init__

    def keeps_all(self: Any, path: Path, rows: Any, outputs: Any) -> None:
        content = Path(rows.name).read_bytes()
        begin(self, path, rows, outputs)
        if self.done:
            Path(rows.name).write_bytes(content)

    monkeypatch.setattr(kind, "__init__", keeps_all)
    with pytest.raises((AssertionError, ValueError, Unavailable)):
        resumes(client, tmp_path, output, 23 if output == "jsonl" else 199)


@pytest.mark.thorough
def test_killed_processes_lose_no_row_and_write_none_twice(tmp_path: Path) -> None:
    models.fake(tmp_path / "models", "slow", "FP32", "4", delay_seconds="0.01")
    rows = write(tmp_path, "npz", np.repeat(X, 8, axis=0))
    done, kills = tmp_path / "answers.jsonl", 0
    arguments = ["predict", str(rows), "--model", str(tmp_path / "models" / "slow"), "-q"]
    chance = random.Random(0)
    while not done.exists():
        process = subprocess.Popen(
            [sys.executable, "-m", "modelport", *arguments, "-o", str(done), "--batch-size", "2"],
            stderr=subprocess.DEVNULL,
        )
        grown = done.with_name("answers.jsonl.part") / "rows"
        before = grown.stat().st_size if grown.exists() else 0
        while process.poll() is None and (
            not grown.exists() or grown.stat().st_size <= before + chance.randrange(4096)
        ):
            time.sleep(0.001)
        process.send_signal(signal.SIGKILL)
        kills += process.wait() == -signal.SIGKILL
    assert kills > 1
    found = np.array([row["y"] for row in read(done)], np.float32)
    np.testing.assert_array_equal(found, np.repeat(X, 8, axis=0))


def test_a_server_that_goes_leaves_the_rows_before(
    client: modelport.Client,
    repository: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(batch_run, "RETRY_SECONDS", (0.0,))
    monkeypatch.setattr(input_files, "MOST_BLOCK_BYTES", 600)
    rows, done = write(tmp_path, "jsonl"), tmp_path / "answers.jsonl"
    server = modelport.Server(repository / "x2", exit_timeout_secs=0.5)
    server.start()

    def stop(stage: str, finished: int, total: int) -> None:
        server.stop()

    with (
        modelport.Client(server.http_url) as gone,
        pytest.raises(Unavailable, match="rows are written: run the same command to go on"),
    ):
        modelport.predict(rows, model="x2", output=done, client=gone, concurrency=1, progress=stop)
    before = (tmp_path / "answers.jsonl.part" / "rows").read_text().count("\n")
    made = modelport.predict(rows, model="x2", output=done, client=client)
    assert 0 < made.resumed == before < ROWS
    np.testing.assert_array_equal(np.array([r["y"] for r in read(done)], np.float32), X * 2)


def test_unfinished_rows_of_another_run_are_not_continued(
    client: modelport.Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, done = write(tmp_path, "npz"), tmp_path / "answers.jsonl"
    with monkeypatch.context() as patch:
        patch.setattr(output_files.JsonLinesOutput, "finish", interrupt)
        with pytest.raises(KeyboardInterrupt):
            modelport.predict(rows, model="x2", output=done, client=client)
    write(tmp_path, "npz", X + 1)
    with pytest.raises(UsageError, match=r"holds rows of another run \(not the same: input\)"):
        modelport.predict(rows, model="x2", output=done, client=client)
    modelport.predict(rows, model="x2", output=done, client=client, overwrite=True)
    np.testing.assert_allclose([row["y"] for row in read(done)], (X + 1) * 2)
    with pytest.raises(UsageError, match="exists; name another file, or give --overwrite"):
        modelport.predict(rows, model="x2", output=done, client=client)


def test_two_processes_do_not_write_one_file(tmp_path: Path) -> None:
    done = tmp_path / "answers.jsonl"
    with output_files.opened(done, (), {}, False):
        with (
            pytest.raises(UsageError, match="another process writes"),
            output_files.opened(done, (), {}, False),
        ):
            pass
        assert (tmp_path / "answers.jsonl.part" / "run.json").exists()


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("rows.txt", b"", "has no suffix of .parquet, .jsonl, .csv"),
        ("rows.npz", b"PK\x03\x04", "rows.npz' cannot be read: File is not a zip file"),
        ("rows.npy", b"\x93NUMPY", "rows.npy' cannot be read: EOF"),
        ("rows.csv", b"", "it is empty; its first row has the names"),
        ("rows.csv", b"y\n1\n", r"has no column 'x' for the input 'x'; it has 'y'; name its col"),
        ("rows.csv", b"x,x\n1\n", "two columns have the same name"),
        ("rows.csv", b"\xff\n1\n", "rows.csv' cannot be read: 'utf-8' codec"),
        ("rows.csv", b'x\n"1\n', "rows.csv' cannot be read: unexpected end of data"),
    ],
)  # fmt: skip
def test_a_file_that_is_no_rows_is_refused_in_one_line(
    client: modelport.Client, tmp_path: Path, name: str, content: bytes, said: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InvalidArgument, match=said):
        modelport.predict(tmp_path / name, model="x2", output=tmp_path / "a.jsonl", client=client)
    assert [each.name for each in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (np.zeros((3, 5), np.float32), r"column 'x' of '.*' does not fit input 'x', FP32 \[4\]: "),
        (np.zeros((3, 4), np.complex64), "Cannot cast array data"),
        (np.zeros((3, 4), "U3"), "does not fit input 'x'"),
        (np.array([[None]]), "an array of Python objects"),
        (np.asfortranarray(np.zeros((3, 4))), "save numpy.ascontiguousarray"),
    ],
)
def test_arrays_that_never_fit_are_refused_before_the_first_request(
    client: modelport.Client, tmp_path: Path, values: np.ndarray[Any, Any], said: str
) -> None:
    rows = write(tmp_path, "npz", values)
    with pytest.raises(InvalidArgument, match=said):
        modelport.predict(rows, model="x2", output=tmp_path / "a.jsonl", client=client)
    assert [*tmp_path.iterdir()] == [rows]


def test_options_that_do_not_fit_the_model_are_refused(
    client: modelport.Client, tmp_path: Path
) -> None:
    rows, done = write(tmp_path, "npz"), tmp_path / "a.jsonl"
    for options, said in (
        ({"column": ["z=x"]}, "--column z: the model's inputs are x"),
        ({"column": ["x"]}, "is not INPUT=COLUMN"),
        ({"output_name": ["z"]}, "--output-name z: the model's outputs are y"),
        ({"batch_size": 9}, "max_batch_size, 8; give at most 8"),
        ({"output": tmp_path / "a.csv"}, "has no suffix of .parquet, .jsonl"),
    ):
        given: dict[str, Any] = {"output": done, **options}
        with pytest.raises(UsageError, match=said):
            modelport.predict(rows, model="x2", client=client, **given)
    lines = write(tmp_path, "jsonl")
    with pytest.raises(UsageError, match="is the file of the rows"):
        modelport.predict(lines, model="x2", output=lines, client=client, overwrite=True)
    lines.unlink()
    with pytest.raises(NotFound, match="did you mean 'table'"):
        modelport.predict(rows, model="tabel", output=done, client=client)
    (tmp_path / "m" / "1").mkdir(parents=True)
    with pytest.raises(UsageError, match=r"is a version; give the model's folder, .*-version 1"):
        modelport.predict(rows, model=tmp_path / "m" / "1", output=done)
    shutil.rmtree(tmp_path / "m")
    with pytest.raises(UsageError, match="does not exist; name a model's folder or file, or"):
        modelport.predict(rows, model="x2", output=done)
    assert [*tmp_path.iterdir()] == [rows]
