"""The models of a Python file are found without running it."""

from __future__ import annotations

import os
from pathlib import Path

import click
import pytest

from modelport.gateway.cli.serve import settings_of
from modelport.gateway.errors import InvalidArgument, ModelportError
from modelport.gateway.repository import python_file
from tests import models

SCORE = "@modelport.model\ndef score(x: float) -> float: return x\n"


def written(folder: Path, source: str) -> Path:
    file = folder / "app.py"
    file.write_text(source)
    return file


@pytest.mark.parametrize(
    ("source", "names"),
    [
        (f"import modelport\n{SCORE}", ["score"]),
        ("import modelport as mp\n@mp.model(batch=2)\nasync def score(): ...", ["score"]),
        ("from modelport import model\n@model\nclass Score: ...", ["Score"]),
        ("from modelport import model as m\n@m(name='a b')\n@other\ndef f(): ...", ["a b"]),
        (f"import modelport\n{SCORE}@modelport.model\ndef b(): ...", ["score", "b"]),
        ("class TritonPythonModel: ...", []),
        ("import modelport\n'\\d'\nraise SystemExit\n" + SCORE, ["score"]),
    ],
)
def test_declared_models_have_the_names_of_their_functions(
    tmp_path: Path, source: str, names: list[str]
) -> None:
    assert python_file.declared(written(tmp_path, source)) == names


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("def score(:", "line 1: invalid syntax"),
        ("", "declares no model; decorate a function"),
        ("x = 1\0", "null bytes"),
        (SCORE, "declares no model"),  # modelport is not imported
        ("from other import model\n@model\ndef f(): ...", "declares no model"),
        (f"import modelport\nif True:\n {SCORE.replace(chr(10), chr(10) + ' ')}", "of any block"),
        (f"import modelport\n{SCORE}{SCORE}", "two models 'score', in the lines 3 and 5; give one"),
        ("import modelport\n@modelport.model(name=n)\ndef f(): ...", "line 3: the name of a model"),
        ("import modelport\n@modelport.model(name='a/b')\ndef f(): ...", "without slashes"),
        (
            "import modelport\n@other\n@modelport.model\ndef f(): ...",
            "line 3: @modelport.model has",
        ),
        ("x = " + "(" * 5000, "app.py"),
        ("#" * (python_file.MAX_BYTES + 1), "is larger than"),
    ],
    ids=range(12),
)
def test_a_file_without_models_of_its_own_is_refused(
    tmp_path: Path, source: str, words: str
) -> None:
    with pytest.raises(ModelportError) as caught:
        python_file.declared(written(tmp_path, source))
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "app.py")
    with pytest.raises(InvalidArgument, match="cannot be read"):
        python_file.declared(tmp_path / "app.py")


def test_serve_has_a_model_for_each_declaration(tmp_path: Path) -> None:
    two = written(tmp_path, f"import modelport\n{SCORE}@modelport.model\ndef b(): ...")
    file = str(two)
    assert settings_of([file, "--allow-python"]).models == (("score", two), ("b", two))
    for arguments, words in (
        ([file], f"'{file}' is Python code, which can do anything; give --allow-python"),
        ([f"n={file}", "--allow-python"], "declares the models score, b, which have their names"),
        ([file, "--name", "n", "--allow-python"], "pass it without 'n'"),
    ):
        with pytest.raises(click.UsageError) as caught:
            settings_of(arguments)
        assert words in str(caught.value)


def test_a_file_stands_beside_other_models(tmp_path: Path) -> None:
    app = written(tmp_path, f"import modelport\n{SCORE}")
    (tmp_path / "models").mkdir()
    net = models.multiply(tmp_path / "net.onnx")
    settings = settings_of([str(tmp_path / "models"), str(net), str(app), "--allow-python"])
    assert settings.model_repositories == (tmp_path / "models",)
    assert settings.models == (("net", net), ("score", app))
    with pytest.raises(click.UsageError, match="are both named 'score'; name them: NAME=PATH"):
        settings_of([f"score={net}", str(app), "--allow-python"])


@pytest.mark.parametrize("source", [f"import modelport\n{SCORE}", "class TritonPythonModel: ..."])
def test_the_only_model_of_a_file_may_get_another_name(tmp_path: Path, source: str) -> None:
    file = written(tmp_path, source)
    for arguments in ([f"n={file}"], [str(file), "--name", "n"]):
        assert settings_of([*arguments, "--allow-python"]).models == (("n", file),)


def test_a_file_in_a_version_has_the_name_of_its_folder(tmp_path: Path) -> None:
    version = tmp_path / "words" / "1"
    version.mkdir(parents=True)
    file = written(version, f"import modelport\n{SCORE}").rename(version / "model.py")
    assert settings_of([str(file), "--allow-python"]).models == (("words", file),)
