"""Files that cannot be written: the message has the folder, the reason and the remedy for it."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result

from modelport.exporters.formats import torchscript
from modelport.exporters.runtime.file_errors import STAGING_PREFIX, explained
from modelport.gateway.repository.storage import location
from tests import commands

Invoke = Callable[..., Result]


def failed(number: int, path: Path | None = None) -> OSError:
    return OSError(number, os.strerror(number), *([] if path is None else [str(path)]))


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.EROFS, "Read-only file system; mount it for writing, or choose another --place"),
        (errno.EACCES, "Permission denied; let user"),
        (errno.EPERM, "Operation not permitted; let user"),
        (errno.ENOSPC, "No space left on device; free space there, or"),
        (errno.EDQUOT, "; free some of the quota there, or"),
        (errno.EFBIG, "File too large; raise the limit of file sizes (ulimit -f), or"),
        (errno.EEXIST, "File exists; move that file away, or"),
        (errno.EIO, "Input/output error; choose another --place"),
    ],
)
def test_each_reason_has_a_remedy_of_its_own(tmp_path: Path, number: int, remedy: str) -> None:
    said = str(explained(tmp_path, failed(number), "choose another --place"))
    assert said.startswith(f"cannot write to '{tmp_path}': ")
    assert remedy in said


def test_the_folder_that_refuses_is_named_and_no_temporary_one(tmp_path: Path) -> None:
    wanted = tmp_path / "data" / "models"
    said = str(explained(wanted, failed(errno.EACCES, wanted), "choose another --repository"))
    assert f"cannot write to '{wanted}': Permission denied in '{tmp_path}'; let user" in said
    staged = tmp_path / f"{STAGING_PREFIX}x1" / "model" / "1" / "model.onnx"
    staged.parent.mkdir(parents=True)
    said = str(explained(tmp_path, failed(errno.ENOSPC, staged), "choose another --repository"))
    assert said.startswith(f"cannot write to '{tmp_path}': No space left on device; free space")


def test_a_temporary_folder_elsewhere_has_the_remedy_tmpdir(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    elsewhere = tmp_path / "elsewhere" / "draft"
    for place in (tmp_path / "repository", location.parse("s3://bucket/models")):
        said = str(explained(place, failed(errno.ENOSPC, elsewhere), "choose another --repository"))
        assert said.startswith(f"cannot write to '{elsewhere.parent}': No space left")
        assert said.endswith("or set TMPDIR to another folder")


def test_a_file_that_cannot_be_read_is_not_called_unwritable(tmp_path: Path) -> None:
    (tmp_path / "model.mar").touch()
    error = failed(errno.EACCES, tmp_path / "model.mar")
    assert str(explained(tmp_path / "repository", error, "")) == (
        f"'{tmp_path / 'model.mar'}' cannot be read: Permission denied"
    )


def test_a_read_only_repository_is_not_called_full(
    invoke: Invoke, fraud_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: Any, dir: Path, **__: Any) -> str:
        raise failed(errno.EROFS, dir / ".modelport-x")

    (tmp_path / "repository").mkdir()
    monkeypatch.setattr(tempfile, "mkdtemp", refused)
    done = invoke(fraud_checkpoint)
    assert done.exit_code == 2
    assert done.stderr == (
        f"modelport: error: cannot write to '{tmp_path / 'repository'}': Read-only file system; "
        "mount it for writing, or choose another --repository or --output\n"
    )


def test_a_model_whose_folder_cannot_be_written_is_refused_before_the_work(
    invoke: Invoke, fraud_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert invoke(fraud_checkpoint, "--format", "torchscript").exit_code == 0

    def refused(*_: Any, dir: Path) -> None:
        raise failed(errno.EACCES, dir / "tmp")

    monkeypatch.setattr(tempfile, "TemporaryFile", refused)
    monkeypatch.setattr(torchscript, "export", lambda *_: pytest.fail("it was converted"))
    done = invoke(fraud_checkpoint, "--format", "torchscript")
    assert done.exit_code == 2
    assert f"Permission denied in '{tmp_path / 'repository' / 'fraud'}'; let user" in done.stderr


#: No process may write there, not even root's.
NOWHERE = "/proc/modelport"


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="there is no such folder")
def test_every_command_that_writes_names_the_folder_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save(torch.nn.PReLU().state_dict(), "net.pt")
    model = ("net.pt", "--model", "torch.nn:PReLU", "--input", "x:FP32[2]")
    export = ("export", *model, "--format", "onnx", "--name", "net", "--quiet")
    assert commands.modelport(*export, "--repository", "models").returncode == 0
    for arguments, option in (
        ((*export, "--repository", NOWHERE), "--repository or --output"),
        (("publish", "models/net", "--repository", NOWHERE), "--repository"),
        (("package", "models/net", "--for", "triton", "--output", NOWHERE), "--output"),
        (("sample", "models/net", "--output", f"{NOWHERE}.json"), "--output"),
        (("keygen", "--output", NOWHERE), "--output"),
    ):
        done = commands.modelport(*arguments)
        assert done.returncode == 2, done.stderr
        said = done.stderr.splitlines()[-1]
        assert said.startswith("modelport: error: cannot write to '/proc"), said
        assert said.endswith(f"; choose another {option}"), said
