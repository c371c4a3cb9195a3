"""Recorded traffic as the data of other commands."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from modelport.exporters.requests import input_files
from modelport.gateway.errors import UsageError
from modelport.gateway.recording import recorded_calls
from modelport.gateway.recording.record_reader import is_records
from modelport.gateway.recording.recorder import RequestRecorder
from modelport.gateway.types import Datatype, ModelSignature, Tensor, TensorSpec
from modelport.loadtests.load import payloads
from tests.gateway.recording.test_recorded_traffic import ALL, put, put_tensors

SIGNATURE = ModelSignature(
    (TensorSpec("x", Datatype.FP32, (4,)),), (TensorSpec("x", Datatype.FP32, (4,)),), 8
)


@pytest.fixture(scope="module")
def where(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("records")
    made = RequestRecorder(ALL._replace(target=folder))
    for number in range(50):
        put(made, "m", value=number)
    put(made, "other")
    made.close()
    return folder


def test_requests_and_expected_answers_come_from_the_folder_of_a_model(where: Path) -> None:
    found = payloads.read(where / "m")
    assert [each["x"][0, 0] for each in found.requests] == [*range(50)]
    assert found.expected is not None
    np.testing.assert_array_equal(found.expected[7]["x"], np.full((1, 4), 7.0, np.float32))
    assert found.datatypes == {"x": "FP32"}
    [file] = (where / "m").iterdir()
    assert len(payloads.read(file).requests) == 50
    assert is_records(file)
    assert payloads.needs_signature(where)
    inputs = input_files.recorded(where / "m", SIGNATURE, "--calibrate")
    assert len(inputs) == 50
    assert inputs[3]["x"].shape == (1, 4)
    assert len(input_files.digest(where / "m")) == 64


def test_a_sample_is_random_and_the_same_each_time(
    where: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    notes: list[str] = []
    first, second = (recorded_calls.sample(where / "m", None, 10, notes.append) for _ in "ab")
    values = [float(call.inputs["x"].data[0, 0]) for call in first]  # type: ignore[index]
    assert values == [float(call.inputs["x"].data[0, 0]) for call in second]  # type: ignore[index]
    assert values == sorted(values)
    assert len({*values}) == 10
    lengths = {len(recorded_calls.sample(where / "m", None, n, notes.append)) for n in (1, 2, 3)}
    assert lengths == {1, 2, 3}
    assert values != [*range(10)]
    assert notes[:2] == ["10 of 50 recorded requests are used, chosen at random"] * 2


def test_a_sample_of_texts_has_its_size_limited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = RequestRecorder(ALL._replace(target=tmp_path))
    for size in (1, 1000, 5000) * 10:
        text = np.empty((1,), object)
        text[0] = b"x" * size
        put_tensors(made, "m", [Tensor("x", Datatype.BYTES, text)], [])
    made.close()
    monkeypatch.setattr(recorded_calls, "MOST_SAMPLE_BYTES", 10_000)
    found = recorded_calls.sample(tmp_path, None, 20)
    assert 1 < len(found) < 20
    assert sum(call.size for call in found) <= 10_000


def test_notes_about_hostile_records_hold_no_commands_of_a_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = RequestRecorder(ALL._replace(target=tmp_path))
    put(made)
    made.close()
    [path] = (tmp_path / "m").iterdir()
    event = json.loads(path.read_text())
    event["data"]["inferences"][0]["inputs"][0] |= {"name": "\x07", "datatype": "X"}
    path.write_text(json.dumps(event) + "\n")
    with pytest.raises(UsageError, match="no answered requests"):
        recorded_calls.sample(tmp_path, None)
    said = capsys.readouterr().err
    assert "is damaged" in said
    assert "\x07" not in said


def test_what_cannot_be_used_is_refused_with_a_remedy(where: Path, tmp_path: Path) -> None:
    with pytest.raises(payloads.BadPayload, match=r"several models, 'm', 'other'; name the folder"):
        payloads.read(where)
    with pytest.raises(UsageError, match=r"no answered requests with the inputs tokens"):
        recorded_calls.sample(where, ["tokens"])
    with pytest.raises(payloads.BadPayload, match=r"holds no records"):
        payloads.read(tmp_path)
    plain = tmp_path / "requests.jsonl"
    plain.write_text(json.dumps({"inputs": []}) + "\n")
    assert not is_records(plain)
