"""Archives made to harm: refused with exit code 5, nothing written, nothing run."""

from __future__ import annotations

import gzip
import io
import json
import os
import random
import struct
import tarfile
import time
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from modelport.exporters.migration import unpacking
from modelport.gateway.repository import config
from tests import processor
from tests.archives import MANIFEST, folder, manifest, mar, migrate, refused, tgz

#: What makes an archive hostile, and a word that the refusal must have.
CORPUS: dict[str, tuple[Callable[[Path], Path], str]] = {}
Maker = Callable[[Path], Path]


def attack(word: str) -> Callable[[Maker], Maker]:
    def add(make: Maker) -> Maker:
        CORPUS[make.__name__] = (make, word)
        return make

    return add


def zipped(path: Path, *members: tuple[zipfile.ZipInfo | str, bytes | str]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members:
            archive.writestr(name, content)
        archive.writestr(MANIFEST, manifest("m"))
    return path


def tarred(path: Path, *members: tuple[tarfile.TarInfo, bytes]) -> Path:
    with tarfile.open(path, "w:gz") as archive:
        for member, content in members:
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path


def entry(name: str, kind: int = 0o100644) -> zipfile.ZipInfo:
    info = zipfile.ZipInfo(name)
    info.external_attr = kind << 16
    return info


def member(name: str, kind: bytes = tarfile.REGTYPE, target: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


@attack("not safe")
def leaves_the_folder(path: Path) -> Path:
    return zipped(path / "m.mar", ("../escaped", "x"))


@attack("not safe")
def leaves_the_folder_in_the_middle(path: Path) -> Path:
    return zipped(path / "m.mar", ("a/../../escaped", "x"))


@attack("not safe")
def is_absolute(path: Path) -> Path:
    return zipped(path / "m.mar", ("/tmp/escaped", "x"))


@attack("not safe")
def has_backslashes(path: Path) -> Path:
    return zipped(path / "m.mar", ("..\\escaped", "x"))


@attack("not safe")
def has_a_drive(path: Path) -> Path:
    return zipped(path / "m.mar", ("c:escaped", "x"))


@attack("not safe")
def has_a_terminal_escape(path: Path) -> Path:
    return zipped(path / "m.mar", ("\x1b[31mred", "x"))


@attack("not safe")
def is_deep(path: Path) -> Path:
    return zipped(path / "m.mar", ("/".join("a" * 100), "x"))


@attack("not safe")
def has_a_name_of_a_megabyte(path: Path) -> Path:
    return zipped(path / "m.mar", ("a" * 60_000, "x"))


@attack("a link or a device")
def is_a_symlink(path: Path) -> Path:
    return zipped(path / "m.mar", (entry("model.pt", 0o120777), "/etc/passwd"))


@attack("a link or a device")
def is_a_device(path: Path) -> Path:
    return zipped(path / "m.mar", (entry("model.pt", 0o020666), ""))


@attack("one name")
def is_there_twice(path: Path) -> Path:
    with pytest.warns(UserWarning, match="Duplicate name"):
        return zipped(path / "m.mar", ("model.pt", "good"), ("model.pt", "bad"))


@attack("a file and a folder")
def is_file_and_folder(path: Path) -> Path:
    return zipped(path / "m.mar", ("model.pt", "x"), ("model.pt/x", "y"))


@attack("encrypted")
def is_encrypted(path: Path) -> Path:
    made = zipped(path / "m.mar", ("model.pt", "x"))
    content = bytearray(made.read_bytes())
    for signature, offset in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        content[content.index(signature) + offset] |= 1
    made.write_bytes(content)
    return made


@attack("more than")
def is_a_bomb(path: Path) -> Path:
    return zipped(path / "m.mar", ("model.pt", bytes(128 << 20)))


@attack("contradicts the directory")
def lies_about_its_size(path: Path) -> Path:
    """The directory says 1 byte, the data are more."""
    made = zipped(path / "m.mar", ("model.pt", bytes(1000)))
    content = bytearray(made.read_bytes())
    at = content.index(b"PK\x01\x02")
    content[at + 24 : at + 28] = struct.pack("<I", 1)
    made.write_bytes(content)
    return made


@attack("more than 10000 members")
def has_many_members(path: Path) -> Path:
    return zipped(path / "m.mar", *((f"f{n}", "") for n in range(10_001)))


@attack("damaged (File is not a zip file)")
def is_cut_off(path: Path) -> Path:
    made = mar(path / "m.mar", "m", {"model.pt": os.urandom(1000)})
    made.write_bytes(made.read_bytes()[:500])
    return made


@attack("damaged")
def is_no_archive(path: Path) -> Path:
    (path / "m.mar").write_bytes(b"no archive at all")
    return path / "m.mar"


@attack("damaged")
def is_empty(path: Path) -> Path:
    (path / "m.tar.gz").write_bytes(b"")
    return path / "m.tar.gz"


@attack("no MAR-INF/MANIFEST.json")
def has_no_manifest(path: Path) -> Path:
    with zipfile.ZipFile(path / "m.mar", "w") as archive:
        archive.writestr("model.pt", "x")
    return path / "m.mar"


@attack("is not JSON")
def has_a_deep_manifest(path: Path) -> Path:
    with zipfile.ZipFile(path / "m.mar", "w") as archive:
        archive.writestr(MANIFEST, "[" * 100_000)
    return path / "m.mar"


@attack("larger than")
def has_a_huge_manifest(path: Path) -> Path:
    with zipfile.ZipFile(path / "m.mar", "w") as archive:
        archive.writestr(MANIFEST, '{"model": {"modelName": "' + "a" * (2 << 20) + '"}}')
    return path / "m.mar"


@attack("is missing")
def names_a_file_outside(path: Path) -> Path:
    return mar(path / "m.mar", "m", {"x.pt": "x"}, serializedFile="../../etc/passwd")


@attack("is missing")
def names_an_absolute_file(path: Path) -> Path:
    return mar(path / "m.mar", "m", {"x.pt": "x"}, serializedFile="/etc/passwd")


@attack("not a string")
def has_an_object_for_a_name(path: Path) -> Path:
    document = json.loads(manifest("m"))
    document["model"]["modelName"] = {"a": 1}
    with zipfile.ZipFile(path / "m.mar", "w") as archive:
        archive.writestr(MANIFEST, json.dumps(document))
    return path / "m.mar"


@attack("not a plain file")
def is_a_tar_with_a_link(path: Path) -> Path:
    return tarred(path / "m.tar.gz", (member("m/model.pt", tarfile.SYMTYPE, "/etc/passwd"), b""))


@attack("not a plain file")
def is_a_tar_with_a_hard_link(path: Path) -> Path:
    return tarred(path / "m.tar.gz", (member("m/model.pt", tarfile.LNKTYPE, "/etc/passwd"), b""))


@attack("not a plain file")
def is_a_tar_with_a_fifo(path: Path) -> Path:
    return tarred(path / "m.tar.gz", (member("m/pipe", tarfile.FIFOTYPE), b""))


@attack("not safe")
def is_a_tar_that_leaves(path: Path) -> Path:
    return tarred(path / "m.tar.gz", (member("../escaped"), b"x"))


@attack("more than")
def is_a_tar_bomb(path: Path) -> Path:
    return tarred(path / "m.tar.gz", (member("m/model.pt"), bytes(128 << 20)))


@attack("header of")
def is_a_tar_with_a_huge_header(path: Path) -> Path:
    """An extended header of a gigabyte, which a reader would hold in memory."""
    header = member("x", tarfile.XHDTYPE)
    header.size = 1 << 30
    (path / "m.tar.gz").write_bytes(gzip.compress(header.tobuf(tarfile.USTAR_FORMAT)))
    return path / "m.tar.gz"


@attack("not a plain file")
def is_a_folder_with_a_link(path: Path) -> Path:
    made = folder(path / "m", "m", {"model.pt": "x"})
    (made / "model.pt").unlink()
    (made / "model.pt").symlink_to("/etc/passwd")
    return made


@attack("not a plain file")
def is_a_folder_whose_manifest_is_a_link(path: Path) -> Path:
    made = folder(path / "m", "m", {"model.pt": "x"})
    (made / MANIFEST).rename(path / "elsewhere")
    (made / MANIFEST).symlink_to(path / "elsewhere")
    return made


@attack("not YAML")
def has_settings_that_make_objects(path: Path) -> Path:
    files = {"model.pt": _torchscript(), "c.yaml": "!!python/object/apply:os.system [true]"}
    return mar(path / "m.mar", "m", files, configFile="c.yaml")


@attack("larger than")
def has_huge_settings(path: Path) -> Path:
    files = {"model.pt": _torchscript(), "c.yaml": "# " + "a" * (1 << 20)}
    return mar(path / "m.mar", "m", files, configFile="c.yaml")


@attack("must be a number")
def has_settings_that_are_no_numbers(path: Path) -> Path:
    files = {"model.pt": _torchscript(), "c.yaml": "batchSize: [1, 2]"}
    return mar(path / "m.mar", "m", files, configFile="c.yaml")


@attack("must be a number")
def has_settings_that_would_be_shown_at_endless_length(path: Path) -> Path:
    lines = ["a0: &a0 [x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12)]
    files = {"model.pt": _torchscript(), "c.yaml": "\n".join([*lines, "batchSize: *a11"])}
    return mar(path / "m.mar", "m", files, configFile="c.yaml")


@attack("damaged")
def has_a_pickle_that_is_damaged(path: Path) -> Path:
    return mar(path / "m.mar", "m", {"model.pt": _torchscript(b"\x80\x02]q\x00h\x01.")})


@attack("for another artifact")
def brings_the_configuration_of_another_artifact(path: Path) -> Path:
    text = 'backend: "tensorflow" max_batch_size: 1'
    files = {"model.pt": _torchscript(), f"modelport/{config.FILENAME}": text}
    return mar(path / "m.mar", "m", files)


@attack("which is missing")
def brings_a_configuration_that_names_another_version(path: Path) -> Path:
    text = (
        'backend: "pytorch" platform: "pytorch_libtorch" '
        'output { name: "y" data_type: TYPE_FP32 dims: 1 label_filename: "2/model.pt" }'
    )
    files = {"model.pt": _torchscript(), f"modelport/{config.FILENAME}": text}
    return mar(path / "m.mar", "m", {**files, "modelport/2/model.pt": "x"})


@attack("which is missing")
def brings_a_configuration_that_leaves_the_folder(path: Path) -> Path:
    text = (
        'backend: "pytorch" platform: "pytorch_libtorch" '
        'output { name: "y" data_type: TYPE_FP32 dims: 1 label_filename: "../../escaped" }'
    )
    return mar(
        path / "m.mar", "m", {"model.pt": _torchscript(), f"modelport/{config.FILENAME}": text}
    )


def _torchscript(pickle: bytes = b"\x80\x02N.") -> bytes:
    """A zip that has the records of a TorchScript archive."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("m/data.pkl", pickle)
        archive.writestr("m/constants.pkl", b"\x80\x02).")
        archive.writestr("m/code/__torch__.py", "class Net(Module):\n  pass\n")
        archive.writestr("m/version", "3\n")
    return buffer.getvalue()


@pytest.mark.parametrize("name", CORPUS)
def test_it_is_refused_and_leaves_nothing(name: str, tmp_path: Path) -> None:
    make, word = CORPUS[name]
    inside = tmp_path / "a" / "b"
    inside.mkdir(parents=True)
    archive = make(inside)
    before = sorted(tmp_path.rglob("*"))
    flags = ("--input", "x:FP32[4]", "--output-tensor", "y:FP32[2]") * (
        not name.startswith("brings")
    )
    refused(migrate(archive, inside / "repository", *flags), 5, word)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("name", ["is_a_bomb", "is_a_tar_bomb", "is_a_tar_with_a_huge_header"])
def test_a_bomb_is_refused_before_it_is_written_or_held(name: str, tmp_path: Path) -> None:
    archive = CORPUS[name][0](tmp_path)
    tracemalloc.start()
    started = time.process_time()
    result = migrate(archive, tmp_path / "repository")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    seconds = processor.seconds_since(started)
    assert result.exit_code == 5
    assert peak < 32 << 20
    assert seconds < 20


@pytest.mark.parametrize("make", [mar, tgz])
def test_the_limit_lets_honest_weights_pass(
    make: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The known-bad variant of the limit: at one byte less the same archive is a bomb."""
    content = os.urandom(100_000)
    suffix = ".mar" if make is mar else ".tar.gz"
    archive = make(tmp_path / f"m{suffix}", "m", {"model.pt": content})
    space = tmp_path / "space"
    monkeypatch.setattr(unpacking, "MAX_GROWTH", 0)
    total = len(content) + len(manifest("m"))
    monkeypatch.setattr(unpacking, "ALWAYS_ALLOWED_BYTES", total)
    space.mkdir()
    unpacking.unpack(archive, space)
    assert next(space.rglob("model.pt")).read_bytes() == content
    monkeypatch.setattr(unpacking, "ALWAYS_ALLOWED_BYTES", total - 1)
    refused(migrate(archive, tmp_path / "repository"), 5, "more than")


def test_mutated_archives_end_in_a_documented_way(tmp_path: Path) -> None:
    """Bytes of a good archive changed at random: some error of ours, never a traceback."""
    rng = random.Random(0)
    content = mar(tmp_path / "m.mar", "m", {"model.pt": _torchscript()}).read_bytes()
    packed = tgz(tmp_path / "m.tar.gz", "m", {"model.pt": _torchscript()}).read_bytes()
    for number in range(100):
        suffix, good = (".mar", content) if number % 2 else (".tar.gz", packed)
        data = bytearray(good if number % 2 else gzip.decompress(good))
        for _ in range(rng.randint(1, 8)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        archive = tmp_path / f"x{suffix}"
        archive.write_bytes(bytes(data) if number % 2 else gzip.compress(bytes(data), 1))
        result = migrate(archive, tmp_path / "repository")
        assert result.exit_code in (2, 4, 5), result.output
        assert not (tmp_path / "repository").exists()
