"""Recorded traffic: one record for each sampled request, of any transport and however it ends."""

from __future__ import annotations

import asyncio
import json
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from modelport.gateway.errors import Unavailable, UsageError
from modelport.gateway.recording import record_files, record_reader, recorder
from modelport.gateway.recording.record_files import FolderSink, Written, folder_of
from modelport.gateway.recording.record_reader import RecordedRequest, read
from modelport.gateway.recording.recorder import Dropped, RequestRecorder
from modelport.gateway.settings import RecordSettings
from modelport.gateway.telemetry.request_record import RequestObserver, RequestRecord
from modelport.gateway.types import Datatype, InferRequest, InferResponse, Tensor
from modelport.gateway.wire.proto import grpc_service_pb2 as pb
from tests.gateway.telemetry.observed_gateway import (
    OIP,
    STREAM,
    ObservedGateway,
    message,
    repository,
    serving,
)

ALL = RecordSettings(Path(), sample=1.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return repository(tmp_path_factory.mktemp("recorded"))


def records(where: Path) -> list[RecordedRequest]:
    notes: list[str] = []
    found = [*read(where, notes.append)]
    assert notes == []
    return found


async def traffic(gateway: ObservedGateway) -> None:
    """Requests of several dialects, transports and endings."""
    await gateway.infer("x2")
    await gateway.call("x2")
    await gateway.http.post("/v1/models/x2:predict?a=b", json={"instances": [[1, 2, 3, 4]]})
    await asyncio.gather(gateway.infer("pairs"), gateway.infer("pairs"))
    await gateway.infer("nothing")
    call = gateway.channel.stream_stream(
        STREAM, pb.ModelInferRequest.SerializeToString, pb.ModelStreamInferResponse.FromString
    )
    sent = [message(name) for name in ("x2", "repeat", "nothing")]
    assert len([each async for each in call(iter(sent))]) >= 5
    await gateway.http.get("/v2/models/x2")  # no inference


async def test_requests_of_every_transport_and_ending_have_one_record_each(
    folder: Path, tmp_path: Path
) -> None:
    where = tmp_path / "records"
    async with serving(folder, record=ALL._replace(target=where)) as gateway:
        await traffic(gateway)
    found = records(where)
    assert [(r.model, r.protocol, r.is_failure) for r in found] == [
        ("x2", "HTTP/1.1", False), ("x2", "gRPC", False), ("x2", "HTTP/1.1", False),
        ("pairs", "HTTP/1.1", False), ("pairs", "HTTP/1.1", False), ("", "HTTP/1.1", True),
        *sorted([("x2", "gRPC", False), ("repeat", "gRPC", False), ("", "gRPC", True)],
                key=lambda each: [r.model for r in found[6:]].index(each[0])),
    ]  # fmt: skip
    first, second, third = found[:3]
    assert json.loads(first.request.body or b"") == OIP
    [[[given], [got]]] = first.inferences()
    assert (given.name, given.datatype) == ("x", Datatype.FP32)
    np.testing.assert_array_equal(given.data, [[1, 2, 3, 4]])  # type: ignore[arg-type]
    np.testing.assert_array_equal(got.data, [[2, 4, 6, 8]])  # type: ignore[arg-type]
    assert (
        second.request.body
        == b"\0" + (message("x2").ByteSize()).to_bytes(4, "big") + message("x2").SerializeToString()
    )
    assert third.target == "/v1/models/x2:predict?a=b"
    assert json.loads(third.response.body or b"") == {"predictions": [[2, 4, 6, 8]]}
    assert found[3].data["batch_size"] == 2
    assert (found[5].status, found[5].data["error"]) == (
        404, "Request for unknown model: 'nothing' is not found",
    )  # fmt: skip
    [repeated] = [each for each in found if each.model == "repeat"]
    [[_, outputs]] = repeated.inferences()
    assert [each.response for each in outputs] == [0, 1, 2]
    assert {(path.stat().st_mode, path.parent.stat().st_mode) for path in where.glob("*/*")} == {
        (stat.S_IFREG | 0o600, stat.S_IFDIR | 0o700)
    }
    assert sorted(path.name for path in where.iterdir()) == ["_", "pairs", "repeat", "x2"]
    event = json.loads(next((where / "x2").iterdir()).read_text().splitlines()[0])
    assert {name: event[name] for name in ("specversion", "type", "subject")} == {
        "specversion": "1.0", "type": "io.modelport.inference", "subject": "x2/1",
    }  # fmt: skip


async def test_a_rule_hides_a_tensor_with_the_bodies_that_hold_it(
    folder: Path, tmp_path: Path
) -> None:
    rules = ALL._replace(
        target=tmp_path / "records", redact=("pairs/x",), hashed=("y", "header:x-user"),
        hash_key=b"k" * 16, headers=("x-user", "authorization"),
    )  # fmt: skip
    async with serving(folder, record=rules) as gateway:
        await gateway.infer("x2", **{"x-user": "Ada", "authorization": "Bearer secret"})
        await asyncio.gather(gateway.infer("pairs"), gateway.infer("pairs"))
        await gateway.http.post("/v2/models/x2/infer", content=b'{"secret": "Lovelace"')
    one, two, _, undecoded = records(tmp_path / "records")
    assert one.request.body is one.response.body is None
    assert one.request.headers["x-user"] != "Ada"
    assert len(one.request.headers["x-user"]) == 64
    [[[x], [y]]] = one.inferences()
    assert x.data is not None
    assert y.data is None
    [[[x], _]] = two.inferences()
    assert x.data is None
    assert undecoded.request.body is undecoded.response.body is None
    assert "Lovelace" not in json.dumps(dict(undecoded.data))


@pytest.mark.parametrize(
    "rule", ["X", "m/X", "x[0]", "m/x[[]*", "header:X-User", "HEADER:x-u?er", "caller"]
)
def test_a_rule_matches_what_it_names(tmp_path: Path, rule: str) -> None:
    made = RequestRecorder(ALL._replace(target=tmp_path, redact=(rule,), headers=("X-User", "Y")))
    captured = made.capture()
    assert captured is not None
    tensors = [
        Tensor(name, Datatype.FP32, np.zeros((1,), np.float32)) for name in ("X", "x[0]", "x[[]y")
    ]
    captured.infers(InferRequest("m", tensors))
    captured.received(b"Ada, X")
    record = ended("m", None)
    record.fields, record.caller, record.error = (
        {b"x-user": b"Ada", b"y": b"z"},
        "Ada",
        "'Ada' may not",
    )
    made.record(record, captured)
    made.close()
    [found] = records(tmp_path)
    [[inputs, _]] = found.inferences()
    hidden = {each.name for each in inputs if each.data is None}
    hidden |= {"header"} - {"header" for name in found.request.headers if name == "x-user"}
    hidden |= {"caller"} - {"caller" for name in found.data if name == "caller"}
    assert len(hidden) == 1
    assert (found.request.body is None) == ("error" not in found.data) == (hidden != {"header"})
    assert found.request.headers["y"] == "z"


def ended(model: str, captured: Any, value: float = 1.0, path: bytes = b"/") -> RequestRecord:
    """A request that has ended."""
    made = RequestRecord(RequestObserver(), "HTTP/1.1", "POST", path, {}, "")
    made.captured = captured
    request = InferRequest(model, [Tensor("x", Datatype.FP32, np.full((1, 4), value, np.float32))])
    call = made.infers(model, 1, request)
    if call is not None:
        captured.inferred(call, InferResponse(model, 1, request.inputs))
    made.end(200)
    return made


def put(target: RequestRecorder, model: str = "m", **more: Any) -> None:
    captured = target.capture()
    if captured is not None:
        target.record(ended(model, captured, **more), captured)


def put_tensors(
    target: RequestRecorder, model: str, inputs: list[Tensor], outputs: list[Tensor]
) -> None:
    """Record a request with these tensors."""
    captured = target.capture()
    assert captured is not None
    call = captured.infers(InferRequest(model, inputs))
    captured.inferred(call, InferResponse(model, 1, outputs))
    target.record(ended(model, None), captured)


def test_the_share_of_a_model_replaces_that_of_all(tmp_path: Path) -> None:
    made = RequestRecorder(
        ALL._replace(target=tmp_path, sample=0.2, model_samples={"all": 1.0, "no": 0})
    )
    for model in ("all", "no", "some"):
        for _ in range(2000):
            put(made, model)
    made.close()
    counts = {path.name: len(records(path)) for path in tmp_path.iterdir()}
    assert counts.keys() == {"all", "some"}
    assert counts["all"] == 2000
    assert 300 < counts["some"] < 500  # 0.2 of 2,000, within 5 standard deviations
    assert made.sampled == made.written == sum(counts.values())


class FailingSink:
    """A sink that fails at random, or does not return until it is let go."""

    def __init__(self, fails: Callable[[], bool]) -> None:
        self.fails, self.kept = fails, 0

    def write(self, model: str, lines: list[bytes]) -> Written:
        if self.fails():
            if len(lines) % 2:
                raise RuntimeError("a defect")
            return Written(0, len(lines))
        self.kept += len(lines)
        return Written(len(lines))

    def tick(self, closing: bool = False) -> Written:
        return Written()


def test_a_full_queue_and_a_failing_sink_drop_and_count_and_never_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(recorder, "MAX_WAITING", 50)
    answers = iter([True, *[False] * 1000])
    sink = FailingSink(lambda: next(answers))
    made = RequestRecorder(ALL, sink=sink)
    for _ in range(500):
        put(made)
    made.close()
    assert made.sampled == 500
    assert made.dropped[Dropped.QUEUE_FULL] > 0
    assert made.dropped[Dropped.NOT_WRITTEN] > 0
    assert made.written == sink.kept
    assert made.sampled == made.written + sum(made.dropped.values())


def test_what_is_too_large_is_dropped_and_holds_no_memory() -> None:
    made = RequestRecorder(ALL._replace(max_record_bytes=1024), sink=FailingSink(lambda: False))
    captured = made.capture()
    assert captured is not None
    captured.received(b"x" * 2000)
    captured.sent(b"y" * 10)
    assert (captured.request, captured.response) == ([], [])
    made.record(ended("m", captured), captured)
    made.close()
    assert made.dropped[Dropped.TOO_LARGE] == 1


def test_what_waits_is_counted_whole_and_no_longer_changes() -> None:
    made = RequestRecorder(ALL, sink=FailingSink(lambda: False))
    captured = made.capture()
    assert captured is not None
    request = InferRequest("m", [Tensor("x", Datatype.FP32, np.zeros((1, 4), np.float32))])
    call = captured.infers(request)
    record = ended("m", None)
    record.fields = {b"content-type": b"x" * 500, b"cookie": b"y" * 60_000}
    made.record(record, captured)
    captured.inferred(call, InferResponse("m", 1, request.inputs))  # its client has gone before
    captured.sent(b"late" * 1000)
    made.close()
    assert captured.fields.keys() == {b"content-type"}
    assert (call.outputs, captured.response, captured.size) == ([], [], 516)
    assert made._put_bytes == made._taken_bytes == 516


def test_other_files_are_not_deleted_and_their_folders_fail_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "training" / "data.jsonl"
    for path in (other, tmp_path / "0.jsonl", tmp_path / "lost+found" / "x"):
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"x" * 10_000)
    listing = Path.iterdir

    def listed(folder: Path) -> Any:
        if folder.name == "lost+found":
            raise PermissionError(13, "Permission denied")
        return listing(folder)

    monkeypatch.setattr(Path, "iterdir", listed)
    sink = FolderSink(tmp_path, 100, 3600.0, 1000)
    for _ in range(50):
        assert sink.write("m", [b"x" * 99 + b"\n"]) == Written(1)
    assert other.exists()
    assert (tmp_path / "0.jsonl").exists()
    assert len([*(tmp_path / "m").iterdir()]) <= 11
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", lambda *_, **__: listed(tmp_path / "lost+found"))
        for _ in range(5):
            assert sink.write("m", [b"x" * 99 + b"\n"]) == Written(1)


def test_files_are_opened_when_it_is_their_turn(tmp_path: Path) -> None:
    made = RequestRecorder(ALL._replace(target=tmp_path))
    for _ in range(3):
        put(made)
    made.close()
    [path] = (tmp_path / "m").iterdir()
    event = json.loads(path.read_text().splitlines()[0])
    path.unlink()
    for minute in range(10):
        at = f"2026-01-01T00:{minute:02}:"
        lines = [json.dumps(event | {"time": f"{at}0{second}Z"}) + "\n" for second in range(3)]
        name = f"20260101T00{minute:02}00.000000Z-1.jsonl"
        (tmp_path / "m" / name).write_text("".join(lines))
    notes: list[str] = []
    found = read(tmp_path, notes.append)
    next(found)
    for later in sorted((tmp_path / "m").iterdir())[2:]:
        later.unlink()
    assert len([*found]) == 5
    assert len(notes) == 6  # of 8, the first ones


def test_files_are_rotated_and_the_oldest_are_deleted(tmp_path: Path) -> None:
    sink = FolderSink(tmp_path, 1000, 3600.0, 3000)
    for number in range(100):
        assert sink.write("m", [b'{"n":%04d}\n' % number * 10]) == Written(1)
    sink.tick(closing=True)
    files = sorted((tmp_path / "m").iterdir())
    assert {path.suffix for path in files} == {".jsonl"}
    assert sum(path.stat().st_size for path in files) <= 4000
    assert b"0099" in files[-1].read_bytes()


def test_a_disk_that_is_full_leaves_whole_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = FolderSink(tmp_path, 1 << 20, 3600.0, 1 << 30)
    assert sink.write("m", [b"first\n"]) == Written(1)
    write = record_files.os.write
    left = [4]

    def torn(descriptor: int, content: memoryview) -> int:
        if not left[0]:
            raise OSError(28, "No space left on device")
        size, left[0] = write(descriptor, content[: left[0]]), 0
        return size

    monkeypatch.setattr(record_files.os, "write", torn)
    assert sink.write("m", [b"second\n"]) == Written(0, 1)
    monkeypatch.undo()
    assert sink.write("m", [b"third\n"]) == Written(1)
    assert next((tmp_path / "m").iterdir()).read_text() == "first\nthird\n"


@pytest.mark.parametrize(
    "name",
    ["..", ".", "", "a/b", "../../etc", "/etc/passwd", ".hidden", "a\0b", "ü" * 200, "x" * 999],
)
def test_no_name_of_a_model_leads_out_of_the_folder(tmp_path: Path, name: str) -> None:
    FolderSink(tmp_path / "r", 1, 3600.0, 1 << 30).write(name, [b"{}\n"])
    [made] = (tmp_path / "r").iterdir()
    assert made.parent == tmp_path / "r"
    assert not folder_of(name).startswith(".")
    assert [path for path in tmp_path.rglob("*.part") if path.parent != made] == []


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(Unavailable, match=r"--record .* cannot be written"):
        RequestRecorder(ALL._replace(target=tmp_path / "file" / "x"))


def test_damaged_records_are_skipped_with_a_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record_reader, "MOST_LINE_BYTES", 4096)
    made = RequestRecorder(ALL._replace(target=tmp_path))
    put(made)
    made.close()
    [path] = (tmp_path / "m").iterdir()
    line = path.read_bytes()
    event = json.loads(line)
    long = b'{"x":"' + b"x" * 9000 + b'"}\n'
    tensor = event["data"]["inferences"][0]["inputs"][0]
    for time in ("0001-01-01T00:00:00+23:59", "9999-12-31T23:59:59-23:59", "0001-01-01T00:00:00"):
        path.write_text(json.dumps(event | {"time": time}) + "\n")
        assert [*read(tmp_path, print)] == []
    for damage in (b"[]\n", b"{}\n", b"\xff\n", b"[" * 10_000 + b"\n", long, line[:-1]):
        path.write_bytes(line + damage if damage == line[:-1] else damage + line)
        notes: list[str] = []
        assert len([*read(tmp_path, notes.append)]) == 1, damage[:20]
        [note] = notes
        assert "is skipped" in note
    for change in (
        {"shape": [2**40, 2**40]}, {"shape": [-1]}, {"shape": [3]}, {"datatype": "X"}, {"name": 1},
        {"data": [1, 2, 3, "a"]}, {"data": [[1], [1, 2], 3, 4]}, {"data_base64": "!"},
    ):  # fmt: skip
        tensor_before = dict(tensor)
        tensor.update(change)
        path.write_text(json.dumps(event) + "\n")
        [record] = records(tmp_path)
        with pytest.raises(ValueError, match=r"a field is|damaged|values do not"):
            [*record.inferences()]
        tensor.clear()
        tensor.update(tensor_before)


def test_an_empty_folder_is_refused_with_a_remedy(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="holds no records; 'modelport serve --record DIR'"):
        [*read(tmp_path, lambda note: None)]


def test_records_of_all_files_come_in_the_order_of_time(tmp_path: Path) -> None:
    made = RequestRecorder(ALL._replace(target=tmp_path))
    for number in range(40):
        put(made, f"m{number % 4}", value=number)
    made.close()
    values = [
        float(inputs[0].data[0, 0])  # type: ignore[index]
        for record in records(tmp_path)
        for inputs, _ in record.inferences()
    ]
    assert values == sorted(values)


def test_a_folder_that_is_deleted_is_made_again(tmp_path: Path) -> None:
    sink = FolderSink(tmp_path, 1 << 20, 3600.0, 1 << 30)
    sink.write("m", [b"first\n"])
    shutil.rmtree(tmp_path / "m")
    assert sink.write("m", [b"second\n"]) == Written(0, 1)
    assert sink.write("m", [b"third\n"]) == Written(1)
    sink.tick(closing=True)
    assert [path.read_text() for path in tmp_path.glob("*/*.jsonl")] == ["third\n"]


async def test_nothing_of_a_stranger_s_request_is_kept(folder: Path, tmp_path: Path) -> None:
    rules = tmp_path / "access.toml"
    rules.write_text('[[rules]]\nprincipals = ["ci"]\noperations = ["infer"]\n')
    async with serving(
        folder, record=ALL._replace(target=tmp_path / "records"), access=rules
    ) as gateway:
        assert (await gateway.infer("x2")).status_code == 401
    [record] = records(tmp_path / "records")
    assert (record.status, record.request.body) == (401, None)


def test_what_is_recorded_while_records_are_read_is_left_for_the_next_time(tmp_path: Path) -> None:
    """Else a replay to the gateway that records would never end."""
    made = RequestRecorder(ALL._replace(target=tmp_path))
    for _ in range(3):
        put(made)
    made.close()
    [path] = tmp_path.glob("*/*")
    line = path.read_bytes().splitlines(keepends=True)[0]
    seen = 0
    for _ in read(tmp_path, print):
        seen += 1
        with path.open("ab") as file:
            file.write(line)
        assert seen <= 3
    assert seen == 3
