"""``manifest.json``: every file is as it was published, or the version is not served."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from modelport.gateway.errors import IntegrityError
from modelport.gateway.repository import manifest

CONTENT = bytes(range(256)) * 4


@pytest.fixture
def version(tmp_path: Path) -> Path:
    folder = tmp_path / "1"
    (folder / "variables").mkdir(parents=True)
    (folder / "model.onnx").write_bytes(CONTENT)
    (folder / "variables" / "weights.bin").write_bytes(b"weights")
    manifest.write(folder)
    return folder


def reason(version: Path) -> str:
    with pytest.raises(IntegrityError) as caught:
        manifest.verify(version)
    return str(caught.value)


def test_a_version_as_it_was_published_is_verified(version: Path) -> None:
    assert manifest.verify(version) is True


def test_the_manifest_lists_every_file_but_itself(version: Path) -> None:
    listed = json.loads((version / "manifest.json").read_text())
    assert listed["format"] == manifest.FORMAT
    assert sorted(listed["files"]) == ["model.onnx", "variables/weights.bin"]
    assert listed["files"]["model.onnx"]["size_bytes"] == len(CONTENT)


def test_a_version_without_a_manifest_is_not_verified_and_not_refused(version: Path) -> None:
    (version / "manifest.json").unlink()
    assert manifest.verify(version) is False


@given(position=st.integers(0, len(CONTENT) - 1), bit=st.integers(0, 7))
@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_one_flipped_bit_anywhere_is_found(version: Path, position: int, bit: int) -> None:
    damaged = bytearray(CONTENT)
    damaged[position] ^= 1 << bit
    (version / "model.onnx").write_bytes(damaged)
    assert reason(version) == "'model.onnx' does not match its SHA-256 in manifest.json"


def test_a_truncated_file_is_found_by_its_size(version: Path) -> None:
    (version / "model.onnx").write_bytes(CONTENT[:-1])
    assert reason(version) == "'model.onnx' has 1023 bytes, manifest.json says 1024"


def test_a_missing_file_is_named(version: Path) -> None:
    (version / "variables" / "weights.bin").unlink()
    assert reason(version) == "'variables/weights.bin' is listed in manifest.json but missing"


def test_a_file_that_is_not_listed_is_named(version: Path) -> None:
    (version / "variables" / "extra.so").write_bytes(b"")
    assert reason(version) == "'variables/extra.so' is not listed in manifest.json"


def test_a_symbolic_link_to_other_content_is_found(version: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.onnx"
    other.write_bytes(CONTENT[::-1])
    (version / "model.onnx").unlink()
    (version / "model.onnx").symlink_to(other)
    assert "does not match its SHA-256" in reason(version)


def test_a_linked_folder_is_not_a_way_to_bring_in_unlisted_files(
    version: Path, tmp_path: Path
) -> None:
    """Whether or not a link is followed: what lies behind it is not covered by the manifest."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "payload.bin").write_bytes(b"payload")
    (version / "extra").symlink_to(tmp_path / "elsewhere")
    assert "'extra" in reason(version)


def test_a_broken_link_is_named(version: Path, tmp_path: Path) -> None:
    (version / "model.onnx").unlink()
    (version / "model.onnx").symlink_to(tmp_path / "nowhere")
    assert "'model.onnx'" in reason(version)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        "{}",
        '{"files": []}',
        '{"files": {"model.onnx": {}}}',
        '{"files": {"model.onnx": {"sha256": "x", "size_bytes": "many"}}}',
        '{"files": {"model.onnx": 1}}',
        "\udcff",
        "[" * 100_000,
    ],
)
def test_an_invalid_manifest_is_refused(version: Path, text: str) -> None:
    (version / "manifest.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    assert reason(version) == "manifest.json is not a manifest; publish the version again"


def test_a_manifest_of_endless_size_is_refused_unread(version: Path) -> None:
    with (version / "manifest.json").open("wb") as file:
        file.truncate(manifest.MAX_MANIFEST_BYTES + 1)
    assert "is larger than" in reason(version)


def test_a_manifest_of_another_format_is_refused(version: Path) -> None:
    path = version / "manifest.json"
    path.write_text(path.read_text().replace(manifest.FORMAT, "modelport-manifest/2"))
    assert "manifest.json" in reason(version)
