"""``modelport check``: models of a Python file in this process."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from modelport.gateway.backends.python import in_process
from tests.commands import modelport
from tests.gateway.backends.python import python_models

DECLARED = """
import asyncio
from collections.abc import AsyncIterator

import modelport
import numpy as np

@modelport.model(batch=4)
def score(text: list[str]) -> modelport.Array["FP32", 2]:
    return np.array([[len(each), len(text)] for each in text], np.float32)

@modelport.model
class Power:
    def load(self): self.loaded = True
    def unload(self): print("unloaded")
    async def predict(self, x: float, exponent: int = 2) -> float:
        await asyncio.sleep(0)
        return x ** exponent

@modelport.model
async def letters(text: str) -> AsyncIterator[str]:
    for each in text:
        yield each
"""


@pytest.fixture(autouse=True)
def own_modules() -> Iterator[None]:
    """Forget the modules of files, which have the same names."""
    modules, path = dict(sys.modules), list(sys.path)
    yield
    for name in sys.modules.keys() - modules.keys():
        if name.split(".")[0] in ("modelport_models", "1"):
            del sys.modules[name]
    sys.path[:] = path


@pytest.fixture
def app(tmp_path: Path) -> Path:
    file = tmp_path / "app.py"
    file.write_text(DECLARED)
    return file


def test_each_model_gets_random_inputs(app: Path) -> None:
    done = modelport("check", str(app))
    assert done.returncode == 0, done.stderr
    printed = done.stdout.splitlines()
    assert printed[0] == "score: text BYTES [-1,1] -> output FP32 [-1,2]"
    assert printed[1:4] == ["output float32 2x2", "[[18.  2.]", " [11.  2.]]"]
    assert printed[4] == "Power: x FP64 [1], exponent INT64 [1] -> output FP64 [1]"
    assert done.stdout.count("output float64 1") == 2  # with the optional input and without
    assert printed.count("unloaded") == 1
    assert done.stdout.count("output object 1") == len("to be or not to be")


def test_requests_are_files_as_for_infer(app: Path, tmp_path: Path) -> None:
    (tmp_path / "r.json").write_text('{"x": 3.0, "exponent": 3}')
    np.savez(tmp_path / "r.npz", x=np.array([2.0]))
    files = [str(tmp_path / name) for name in ("r.json", "r.npz")]
    done = modelport("check", str(app), *files, "--model", "Power", "--json")
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert rows == [{"output": [27.0]}, {"output": [4.0]}]


def test_tritons_models_are_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_process, "SENDER_SECONDS", 0.5)
    folder = python_models.coded(tmp_path, "act")
    request = tmp_path / "r.json"
    for code, words in (
        ("return [reply(1, 2)]", ""),
        ("requests[0].get_response_sender().send(reply(1, 2), 1)", ""),
        (
            "sender = requests[0].get_response_sender()\n"
            "threading.Timer(0.1, sender.send, (reply(1, 2), 1)).start()",
            "",
        ),
        ("requests[0].get_response_sender()", "has not sent the end of its responses within"),
        ("return []", "InferenceResponse(s) size is:0"),
        ("return [reply(1, name='z')]", "output 'y' is missing in the model's response"),
        (
            "return [Response([Tensor('y', np.array([1]))])]",
            "output 'y' must be FP32, but the model returns INT64",
        ),
        ("return [Response([], Error('no', Error.NOT_FOUND))]", "model 'act': no"),
        ("sys.exit(3)", "SystemExit: 3; at request.py(2): run"),
    ):
        request.write_text(json.dumps({"code": [code]}))
        done = modelport("check", str(folder / "model.py"), str(request))
        assert done.returncode == (1 if words else 0) or words.endswith("no"), done.stderr
        assert words in done.stderr
        assert done.stderr.count("\n") == bool(words)


@pytest.mark.parametrize(
    ("source", "arguments", "code", "words"),
    [
        ("x = (", [], 2, "line 1: '(' was never closed"),
        ("", [], 2, "declares no model"),
        ("import nothing_here\nclass TritonPythonModel: ...", [], 1,
         "model 'app': ModuleNotFoundError: No module named 'nothing_here'; at app.py(1)"),
        ("import modelport\n@modelport.model\ndef f(x): ...", [], 2,
         "error: model 'f' has no type hint for its input 'x'"),
        ("import modelport\n@modelport.model\ndef f(x: float) -> float: return None", [], 1,
         "model 'f': output 'output' must be FP64, but the model returns NoneType"),
        ("import modelport\n@modelport.model\ndef f(x: float) -> float: return 1 / 0", [], 1,
         "model 'f': ZeroDivisionError: division by zero; at app.py(3): f"),
        ("import modelport\n@modelport.model\ndef f(x: float) -> float: ...", ["--model", "g"], 2,
         "declares f, and no 'g'"),
        (DECLARED, ["R"], 2, "declares the models score, Power, letters; choose that of the"),
    ],
    ids=range(8),
)  # fmt: skip
def test_what_is_wrong_is_one_line(
    tmp_path: Path, source: str, arguments: list[str], code: int, words: str
) -> None:
    (tmp_path / "app.py").write_text(source)
    (tmp_path / "r.json").write_text("{}")
    rest = [str(tmp_path / "r.json") if each == "R" else each for each in arguments]
    done = modelport("check", str(tmp_path / "app.py"), *rest)
    assert (done.returncode, done.stderr.count("\n")) == (code, 1), done.stderr
    assert words in done.stderr


def test_a_file_of_weights_is_not_checked(tmp_path: Path) -> None:
    (tmp_path / "m.onnx").touch()
    done = modelport("check", str(tmp_path / "m.onnx"))
    assert (done.returncode, "is not a Python file; serve it" in done.stderr) == (2, True)
