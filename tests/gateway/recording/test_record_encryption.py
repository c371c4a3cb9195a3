"""Records that are encrypted at rest."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import numpy as np
import pytest

from modelport.gateway.errors import UsageError
from modelport.gateway.recording import record_encryption
from modelport.gateway.recording.record_encryption import KEY_VARIABLE, RecordCipher, decrypt
from modelport.gateway.recording.record_reader import is_records, read
from modelport.gateway.recording.recorder import RequestRecorder
from modelport.gateway.types import Datatype, Tensor
from tests.commands import modelport
from tests.gateway.recording.test_recorded_traffic import ALL, put_tensors

SECRET = "a customer's name"
ROWS = 150


@pytest.fixture(scope="module")
def key(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("keys") / "key.txt"
    file.write_text("5f" * 32)
    return file


@pytest.fixture(scope="module")
def where(tmp_path_factory: pytest.TempPathFactory, key: Path) -> Path:
    folder = tmp_path_factory.mktemp("encrypted")
    made = RequestRecorder(ALL._replace(target=folder, key=key.read_bytes()))
    chance = np.random.default_rng(0)
    for _ in range(ROWS):
        name = np.array([SECRET.encode()], object)
        x = chance.normal(size=(1,)).astype(np.float32)
        inputs = [Tensor("name", Datatype.BYTES, name), Tensor("x", Datatype.FP32, x)]
        put_tensors(made, "m", inputs, [Tensor("y", Datatype.FP32, x)])
    made.close()
    assert made.written == ROWS
    return folder


def test_the_files_hold_no_content_and_every_line_is_json(where: Path) -> None:
    [file] = (where / "m").iterdir()
    content = file.read_text()
    assert SECRET not in content
    lines = [json.loads(line) for line in content.splitlines()]
    assert all(line.keys() == {"encrypted"} for line in lines)
    nonces = {base64.b64decode(line["encrypted"])[:28] for line in lines}
    assert len(nonces) == ROWS
    assert is_records(file)


def test_the_key_opens_them(where: Path, key: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = ("--record-key", str(key))
    shown = modelport("records", "show", str(where), "--limit", "3", "--json", *given)
    assert shown.returncode == 0, shown.stderr
    assert SECRET in shown.stdout
    monkeypatch.setenv(KEY_VARIABLE, str(key))
    assert len([*read(where, pytest.fail)]) == ROWS


@pytest.mark.thorough
def test_the_key_opens_them_for_drift_and_replay(where: Path, key: Path) -> None:
    given, own = ("--record-key", str(key)), str(where / "m")
    alike = modelport("drift", own, "--baseline", own, *given)
    assert (alike.returncode, "0 of 3 features have drifted" in alike.stdout) == (0, True)
    replayed = modelport("replay", own, "--target", "http://127.0.0.1:1", "-q", *given)
    assert "encrypted" not in replayed.stdout + replayed.stderr
    assert str(ROWS) in replayed.stdout


def test_without_the_key_or_with_another_nothing_is_read(where: Path, tmp_path: Path) -> None:
    refused = modelport("records", "show", str(where), "--limit", "1")
    assert (refused.returncode, "the records are encrypted" in refused.stderr) == (2, True)
    other = tmp_path / "other.txt"
    other.write_text("0" * 32)
    shown = modelport("records", "show", str(where), "--limit", "1", "--record-key", str(other))
    assert "record 1 is skipped: it has another key, or was changed" in shown.stderr
    assert SECRET not in shown.stdout
    other.write_text("short")
    refused = modelport("records", "show", str(where), "--limit", "1", "--record-key", str(other))
    assert "has 5 bytes, and needs 16" in refused.stderr


def test_a_line_that_is_changed_anywhere_is_damaged() -> None:
    key = bytes(32)
    line = RecordCipher(key).encrypt(b"a  record\n")
    assert decrypt(line, key) == b"a  record\n"
    assert decrypt(b"a clear record\n", None) == b"a clear record\n"
    begin, end = len(record_encryption.BEGIN), len(line) - len(record_encryption.END)
    for at in range(begin, end):  # 54 bytes, so that no bit of base64 is spare
        changed = bytearray(line)
        changed[at] = ord("A") if line[at] != ord("A") else ord("B")
        with pytest.raises(ValueError, match=r"another key, or was changed|padding|base64|data"):
            decrypt(bytes(changed), key)
    for cut in range(begin, end):
        with pytest.raises((ValueError, UsageError)):
            decrypt(line[:cut] + record_encryption.END, key)


def test_two_processes_with_one_key_share_no_nonce() -> None:
    key = bytes(32)
    first, second = (RecordCipher(key).encrypt(b"same\n") for _ in "ab")
    assert first != second
