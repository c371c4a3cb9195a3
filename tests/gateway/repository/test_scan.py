"""Tests of the repository scan: no content may make it fail or lead it outside."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from modelport.gateway.repository import untrusted_files
from modelport.gateway.repository.scan import ModelEntry, VersionEntry, scan, scan_folder


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "repository"
    add(folder, "m", "1")
    return folder


def add(root: Path, model: str, version: str, file: str = "model.onnx") -> Path:
    path = root / model / version / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"content")
    return path


def only(root: Path) -> ModelEntry:
    (entry,) = scan([root]).values()
    return entry


def version(root: Path, number: int = 1) -> VersionEntry:
    return only(root).versions[number]


def test_a_model_a_version_and_a_configuration_are_found(root: Path) -> None:
    (root / "m" / "config.pbtxt").write_text('name: "m"')
    entry = only(root)
    assert (entry.name, entry.problem, entry.config_text) == ("m", "", 'name: "m"')
    assert list(entry.versions) == [1]
    assert entry.versions[1].problem == ""


def test_the_text_of_a_pipeline_is_read_unless_its_version_is_refused(root: Path) -> None:
    file = add(root, "m", "1", "pipeline.toml")
    assert version(root).pipeline == "content"
    file.write_bytes(b"\xff")
    assert (version(root).pipeline, version(root).problem) == ("", "")  # loading it says so
    file.write_bytes(b"x" * (untrusted_files.MAX_CONFIG_BYTES + 1))
    assert (version(root).pipeline, version(root).problem) == ("", "")
    file.unlink()
    (root.parent / "secret").write_text("secret")
    file.symlink_to(root.parent / "secret")
    assert version(root).pipeline == ""


def test_without_a_configuration_its_text_is_none(root: Path) -> None:
    assert only(root).config_text is None


@pytest.mark.parametrize(
    "name", ["01", "v2", ".tmp", "0", "-1", "1.0", "1 ", "+1", "1_0", "\uff11", "", "9" * 19]
)
def test_only_canonical_positive_integers_are_versions(root: Path, name: str) -> None:
    if name:
        add(root, "m", name)
    assert list(only(root).versions) == [1]


def test_large_versions_are_versions(root: Path) -> None:
    add(root, "m", "1719830400")
    assert sorted(only(root).versions) == [1, 1719830400]


def test_a_file_named_like_a_version_is_ignored(root: Path) -> None:
    (root / "m" / "2").write_text("")
    assert list(only(root).versions) == [1]


@pytest.mark.parametrize("name", ["-x", "a b", "a,b", "a%2fb", "ä", "~", "x" * 255, "é" * 127])
def test_every_folder_with_a_safe_name_is_a_model(root: Path, name: str) -> None:
    add(root, name, "1")
    assert sorted(scan([root])) == sorted(["m", name])


@pytest.mark.parametrize("name", [".hidden", ".modelport-1"])
def test_hidden_names_are_passed_over(root: Path, name: str) -> None:
    add(root, name, "1")
    (root / ".file").touch()
    assert list(scan_folder(root)) == ["m"]


@pytest.mark.parametrize("name", ["a\nb", "a\x1b[2Jb", "a\\b", "\u202ea", "lost+found", "\udcff"])
def test_a_folder_that_cannot_be_a_model_has_a_reason_and_a_name_that_can_be_shown(
    root: Path, name: str
) -> None:
    (root / name / "1").mkdir(parents=True)
    assert list(scan([root])) == ["m"]
    (entry,) = (entry for entry in scan_folder(root).values() if not entry.is_model)
    assert entry.problem
    assert entry.name.isprintable()


def test_a_file_beside_the_models_has_a_reason(root: Path) -> None:
    (root / "net.onnx").touch()
    (root / "gone").symlink_to(root / "nowhere")
    assert list(scan([root])) == ["m"]
    found = scan_folder(root)
    for name in ("net.onnx", "gone"):
        assert "not a folder" in found[name].problem
        assert not found[name].is_model


def test_a_model_is_not_hidden_by_a_file_of_its_name_in_another_repository(
    root: Path, tmp_path: Path
) -> None:
    (tmp_path / "second").mkdir()
    (tmp_path / "second" / "m").touch()
    for repositories in ([root, tmp_path / "second"], [tmp_path / "second", root]):
        (entry,) = scan(repositories).values()
        assert entry.problem == ""


def test_folders_that_look_like_versions_are_listed(root: Path) -> None:
    for name in ("01", "v2", "1.0", "0", "assets"):
        (root / "m" / name).mkdir()
    assert sorted(only(root).ignored) == ["0", "01", "1.0", "v2"]


def test_a_model_without_versions_is_found(root: Path) -> None:
    (root / "empty").mkdir()
    assert scan([root])["empty"].versions == {}


def test_a_repository_that_is_not_there_cannot_be_scanned(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        scan([tmp_path / "nowhere"])


# -- fingerprints ---------------------------------------------------------------------------------


def test_nothing_changed_means_the_same_fingerprint(root: Path) -> None:
    assert version(root).fingerprint == version(root).fingerprint


def test_a_replaced_file_of_the_same_size_and_time_changes_the_fingerprint(root: Path) -> None:
    path = root / "m" / "1" / "model.onnx"
    before, stat = version(root).fingerprint, path.stat()
    other = root / "m" / "1.new"
    other.write_bytes(b"CONTENT")
    os.utime(other, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    os.replace(other, path)
    assert version(root).fingerprint != before


@pytest.mark.parametrize("change", ["write", "add", "remove", "nested"])
def test_every_change_of_a_file_changes_the_fingerprint(root: Path, change: str) -> None:
    path = root / "m" / "1" / "model.onnx"
    before = version(root).fingerprint
    if change == "write":
        path.write_bytes(b"other content")
    elif change == "add":
        add(root, "m", "1", "extra")
    elif change == "nested":
        add(root, "m", "1", "model.savedmodel/variables/x")
    else:
        path.unlink()
    assert version(root).fingerprint != before


# -- links ----------------------------------------------------------------------------------------


def test_a_file_linked_from_outside_is_refused(root: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("secret")
    (root / "m" / "1" / "model.onnx").unlink()
    (root / "m" / "1" / "model.onnx").symlink_to(secret)
    assert version(root).problem == "'model.onnx' is a symbolic link out of the repository"


def test_a_folder_linked_from_outside_is_refused(root: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (root / "m" / "1" / "data").symlink_to(tmp_path / "elsewhere")
    assert version(root).problem == "'data' is a symbolic link out of the repository"


def test_a_version_linked_from_outside_is_refused_and_the_others_are_not(
    root: Path, tmp_path: Path
) -> None:
    (tmp_path / "elsewhere").mkdir()
    (root / "m" / "2").symlink_to(tmp_path / "elsewhere")
    assert version(root, 2).problem == "version 2 is a symbolic link out of the repository"
    assert version(root, 1).problem == ""


def test_a_model_linked_from_outside_is_refused(root: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (root / "n").symlink_to(tmp_path / "elsewhere")
    found = scan([root])
    assert found["n"].problem == "'n' is a symbolic link out of the repository"
    assert found["m"].problem == ""


def test_a_configuration_linked_from_outside_is_refused(root: Path, tmp_path: Path) -> None:
    (tmp_path / "config.pbtxt").write_text('name: "m"')
    (root / "m" / "config.pbtxt").symlink_to(tmp_path / "config.pbtxt")
    entry = only(root)
    assert entry.problem == "'config.pbtxt' is a symbolic link out of the repository"
    assert entry.config_text is None


def test_a_sibling_whose_name_starts_like_the_repository_is_outside(root: Path) -> None:
    sibling = root.with_name("repository-2")
    sibling.mkdir()
    (sibling / "file").write_text("")
    (root / "m" / "1" / "file").symlink_to(sibling / "file")
    assert "out of the repository" in version(root).problem


def test_links_inside_the_repository_are_followed(root: Path) -> None:
    (root / "m" / "2").symlink_to("1")
    (root / "m" / "1" / "alias.onnx").symlink_to("model.onnx")
    entry = only(root)
    assert [v.problem for v in entry.versions.values()] == ["", ""]


def test_a_repository_that_is_itself_a_link_is_a_repository(root: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(root)
    assert version(tmp_path / "link").problem == ""


def test_a_broken_link_does_not_take_the_scan_down(root: Path) -> None:
    (root / "m" / "1" / "gone").symlink_to("nowhere")
    (root / "m" / "2").symlink_to("nowhere")
    (root / "gone").symlink_to("nowhere")
    assert list(only(root).versions) == [1]


@pytest.mark.parametrize("where", ["loop", "m/2", "m/1/model.onnx", "m/1/sub", "m/config.pbtxt"])
def test_a_link_to_itself_costs_nothing_but_what_it_stands_for(root: Path, where: str) -> None:
    add(root, "good", "1")
    path = root / where
    path.unlink(missing_ok=True)
    path.symlink_to(path.name)
    found = scan([root])
    assert found["good"].problem == ""
    assert found["good"].versions[1].problem == ""
    if where == "m/2":
        assert found["m"].problem == ""
        assert found["m"].versions[1].problem == ""
    elif where.startswith("m/1"):
        assert found["m"].versions[1].problem != ""
    elif where == "m/config.pbtxt":
        assert found["m"].problem != ""


# -- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["m.pkl", "M.PKL", "a.pickle", "w.h5", "w.HDF5", "c.joblib"])
def test_files_that_run_code_when_read_are_refused(root: Path, name: str) -> None:
    add(root, "m", "1", f"deep/{name}")
    add(root, "m", "2")
    assert version(root).problem.startswith(f"'deep/{name}' may run code when it is read")
    assert version(root, 2).problem == ""


def test_a_model_in_two_repositories_is_refused_and_named(root: Path, tmp_path: Path) -> None:
    add(tmp_path / "second", "m", "1")
    add(tmp_path / "second", "other", "1")
    found = scan([root, tmp_path / "second"])
    assert found["m"].problem == "model appears in two or more repositories"
    assert found["m"].versions == {}
    assert found["other"].problem == ""


def test_a_configuration_of_endless_size_is_refused_unread(root: Path) -> None:
    with (root / "m" / "config.pbtxt").open("wb") as file:
        file.truncate(untrusted_files.MAX_CONFIG_BYTES + 1)
    assert only(root).problem == "'config.pbtxt' is larger than 1048576 bytes"


def test_a_configuration_that_is_no_text_is_refused(root: Path) -> None:
    (root / "m" / "config.pbtxt").write_bytes(b"\xff\xfe")
    assert only(root).problem != ""


def test_a_configuration_that_is_a_folder_is_refused_without_its_path(root: Path) -> None:
    (root / "m" / "config.pbtxt").mkdir()
    assert only(root).problem == "'config.pbtxt' is not a file"


def test_a_configuration_that_is_a_pipe_does_not_hang_the_scan(root: Path) -> None:
    os.mkfifo(root / "m" / "config.pbtxt")
    # Someone on the other end, so that a reader that opens it is seen reading, not hanging.
    descriptor = os.open(root / "m" / "config.pbtxt", os.O_RDWR)
    os.write(descriptor, b'name: "m"')
    os.set_blocking(descriptor, False)
    try:
        scanned: list[ModelEntry] = []
        worker = threading.Thread(target=lambda: scanned.append(only(root)), daemon=True)
        worker.start()
        worker.join(60)
        assert scanned, "the scan hangs on a named pipe"
        assert scanned[0].problem != ""
    finally:
        os.close(descriptor)


# -- labels ---------------------------------------------------------------------------------------


def test_labels_are_the_lines_of_a_file_in_the_models_folder(root: Path) -> None:
    (root / "m" / "labels.txt").write_text("cat\ndog\n")
    assert only(root).labels("labels.txt") == ("cat", "dog")


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "..", ".", "1/x", ""])
def test_a_label_file_that_is_a_path_is_refused(root: Path, name: str) -> None:
    (root / "secret").write_text("secret")
    with pytest.raises(OSError):  # noqa: PT011  # whichever the system says
        only(root).labels(name)


def test_a_label_file_linked_from_outside_is_refused(root: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("root:x:0:0")
    (root / "m" / "labels.txt").symlink_to(tmp_path / "secret")
    with pytest.raises((OSError, ValueError)):
        only(root).labels("labels.txt")


def test_a_configuration_of_another_name_replaces_the_models_own(root: Path) -> None:
    folder = root / "m"
    (folder / "config.pbtxt").write_text("own")
    (folder / "configs").mkdir()
    (folder / "configs" / "gpu.pbtxt").write_text("named")
    found = {name: scan_folder(root, name)["m"] for name in ("", "gpu", "cpu")}
    texts = {name: entry.config_text for name, entry in found.items()}
    assert texts == {"": "own", "gpu": "named", "cpu": "own"}
    assert found["gpu"].content != found["cpu"].content == found[""].content
    assert not found["gpu"].ignored


def test_a_configuration_of_another_name_may_not_come_from_outside(
    root: Path, tmp_path: Path
) -> None:
    (tmp_path / "gpu.pbtxt").write_text("outside")
    (root / "m" / "configs").symlink_to(tmp_path)
    assert "symbolic link out of the repository" in scan_folder(root, "gpu")["m"].problem
    assert not scan_folder(root)["m"].problem
