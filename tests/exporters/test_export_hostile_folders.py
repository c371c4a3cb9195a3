"""Hugging Face folders that were made to harm: a line and an exit code each, at little cost."""

from __future__ import annotations

import json
import os
import resource
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from modelport.exporters.cli.export import export
from modelport.exporters.sources import SourceRequest
from modelport.exporters.sources.huggingface import companions
from modelport.exporters.sources.huggingface.folder import MOST_LEVELS
from modelport.exporters.sources.reader_selection import load
from modelport.gateway.cli.errors import exit_code
from modelport.gateway.errors import IntegrityError, ModelportError
from tests.exporters.huggingface_folders import write


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write("bert", tmp_path_factory.mktemp("folders"))


@pytest.fixture
def folder(written: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(written, tmp_path / "bert"))


def refused(folder: Path, code: int) -> str:
    """The message of the refusal, which is one line."""
    with pytest.raises(ModelportError) as caught:
        load(SourceRequest(folder))
    assert exit_code(caught.value) == code, caught.value
    assert str(caught.value).isprintable()
    return str(caught.value)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json"])
def test_a_file_may_not_be_nested_deeply(folder: Path, name: str) -> None:
    """JSON's reader takes almost 1,000 levels; code that walks the result by recursion, fewer."""
    for opening, closing in (("[", "]"), ('{"a":', "}")):
        nested = opening * 700 + "1" + closing * 700
        (folder / name).write_text('{"a": ' + nested + "}")
        assert f"nested more than {MOST_LEVELS} levels deep" in refused(folder, 5)


def test_a_file_of_the_folder_is_answered_with_the_folder(folder: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        assert f"give the folder, '{folder}'" in refused(folder / name, 2)


def test_a_file_of_gigabytes_is_not_read(folder: Path) -> None:
    for name in ("tokenizer.json", "config.json", "modules.json"):
        with (folder / name).open("ab") as file:
            file.truncate(8 << 30)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        assert "has more than 64 MiB" in refused(folder, 5)
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 20  # KiB


@pytest.mark.parametrize(
    "replace",
    [os.mkfifo, lambda path: path.symlink_to("/dev/zero"), lambda path: path.mkdir()],
    ids=["a pipe", "a device", "a folder"],
)
def test_only_regular_files_are_read(folder: Path, replace: Callable[[Path], None]) -> None:
    (folder / "config.json").unlink()
    replace(folder / "config.json")
    refused(folder, 2)


def test_entries_with_code_are_left_out_wherever_they_are(folder: Path) -> None:
    kept = {"a": [{"b": "\ud800"}], "é": 1}
    inner = {"auto_map": {"AutoTokenizer": "code.Tokenizer"}, "b": "\ud800"}
    document = {"a": [inner], "é": 1, "chat_template": "{{ 1 }}"}
    (folder / "tokenizer.json").write_text(json.dumps(document))
    assert json.loads(companions.read(folder)["tokenizer.json"]) == kept
    untouched = '{"é":   1, "a": [NaN]}'.encode()
    (folder / "tokenizer.json").write_bytes(untouched)
    assert companions.read(folder)["tokenizer.json"] == untouched
    (folder / "tokenizer.json").write_text("[]")
    with pytest.raises(IntegrityError, match="is not a JSON object"):
        companions.read(folder)


@pytest.mark.parametrize(
    ("dtype", "reason"),
    [(torch.int8, "as in a quantised model"), (torch.complex64, "and the model's is real")],
)
def test_weights_that_are_no_real_numbers_are_refused(
    folder: Path, dtype: torch.dtype, reason: str
) -> None:
    path = folder / "model.safetensors"
    state = load_file(path)
    state["classifier.weight"] = state["classifier.weight"].to(dtype)
    save_file(state, path, {"format": "pt"})
    name = str(dtype).removeprefix("torch.")
    expected = f"the weight 'classifier.weight' is {name}, {reason}"
    assert expected in refused(folder, 4)


def test_labels_that_are_no_text_are_published_as_text(folder: Path, tmp_path: Path) -> None:
    path = folder / "config.json"
    named = {"0": "\ud800", "1": "b\n", "2": "\u00e9"}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"id2label": named}))
    repository = tmp_path / "repository"
    options = ["--format", "torchscript", "--samples", "20", "--repository", str(repository)]
    done = CliRunner().invoke(export, [str(folder), *options])
    assert done.exit_code == 0, done.output
    assert (repository / "bert" / "labels.txt").read_text() == "?\nb\né\n"
