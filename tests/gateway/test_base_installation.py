"""The base installation, with the packages of every extra hidden: all that is left must work."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

from tests import models

ROOT = Path(__file__).parents[2]
#: Hides every package but those that the base requirements bring, and runs the rest of the program.
HIDE = """
import sys

ALLOWED = frozenset({allowed!r})

class Visible:
    def __init__(self, finder):
        self._finder = finder

    def __getattr__(self, name):
        return getattr(self._finder, name)

    def find_spec(self, name, path=None, target=None):
        root = name.partition(".")[0]
        visible = root in ALLOWED or root in sys.stdlib_module_names or root.startswith("_")
        return self._finder.find_spec(name, path, target) if visible else None

sys.meta_path[:] = map(Visible, sys.meta_path)
"""
#: Imported with the first model that needs it; ``gateway.backends`` names the extra otherwise.
GATED = {
    "modelport.gateway.backends.embedded.pytorch": "torch",
    "modelport.gateway.backends.embedded.pytorch_archives": "torch",
    "modelport.gateway.backends.embedded.pytorch_graphs": "torch",
    "modelport.gateway.backends.embedded.tensorflow": "tensorflow",
    "modelport.gateway.backends.embedded.tensorflow_state": "tensorflow",
    "modelport.gateway.backends.embedded.tflite": "litert",
    "modelport.gateway.backends.embedded.openvino": "openvino",
    "modelport.gateway.backends.embedded.executorch": "torch",
    "modelport.gateway.runtime.openvino_import": "openvino",
}


def base_modules() -> set[str]:
    """The top-level modules that the base requirements bring, theirs included."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted, seen = list(project["dependencies"]), set()
    while wanted:
        requirement = wanted.pop()
        name = re.split(r"[\s<>=!~;\[(]", requirement, maxsplit=1)[0].lower().replace("_", "-")
        if name in seen or "extra ==" in requirement:
            continue
        try:
            wanted += metadata.requires(name) or ()
        except metadata.PackageNotFoundError:  # for another Python or system
            continue
        seen.add(name)
    distributions = metadata.packages_distributions().items()
    tops = {
        top
        for top, names in distributions
        if seen & {name.lower().replace("_", "-") for name in names}
    }
    return tops | {"modelport", "triton_python_backend_utils"}  # the packages of this project


def run(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    code = HIDE.format(allowed=sorted(base_modules())) + program
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=120,
    )


def test_every_module_of_the_gateway_and_every_command_is_imported() -> None:
    names = sorted(
        ".".join(("modelport", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(
            ".__init__"
        )
        for path in (ROOT / "gateway").rglob("*.py")
        if path.name != "__main__.py"
    )
    done = run(
        """
import importlib, json
from modelport.cli import COMMANDS
missing = {}
public = ["modelport.client", "modelport.server", "modelport.testing", "modelport.exporters.api"]
commands = [place.partition(":")[0] for place, _ in COMMANDS.values()]
for name in [*json.loads(sys.argv[1]), *public, *commands]:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing[name] = error.name
print(json.dumps(missing))
""",
        json.dumps(names),
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout).keys() == GATED.keys(), done.stdout


#: What needs an extra, by extra.
NEEDS = [
    ("images", "from modelport.gateway.inference import image_decoding; image_decoding._pillow()"),
    *(
        (extra, f"from modelport.gateway import backend_registry as r; r.find_loader({name!r})")
        for name, extra in (
            ("pytorch", "torch"),
            ("tensorflow", "tensorflow"),
            ("tflite", "litert"),
            ("openvino", "openvino"),
        )
    ),
    *(
        (
            extra,
            "from modelport.gateway.repository.storage import location, objects\n"
            f"objects._connect(location.parse({url!r}))",
        )
        for extra, url in (("s3", "s3://one/b"), ("gcs", "gs://one/b"), ("azure", "az://one/b"))
    ),
    *(
        (extra, f"from modelport.cli import main; sys.argv = {command.split()}; main()")
        for extra, command in (
            ("load", "modelport loadtest localhost:1 --model x"),
            ("load", "modelport gate a b --slo net.pt"),
            ("load", "modelport compare net.pt"),
            ("torch", "modelport demo"),
            ("torch", "modelport export net.pt --format onnx --model net"),
            ("torch", "modelport sample net.pt --model net --output requests.json"),
        )
    ),
]


def test_what_needs_an_extra_says_which_one_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "net.pt").touch()
    done = run(
        """
import contextlib, io, json, os
os.chdir(sys.argv[1])
told = []
for _, statement in json.loads(sys.argv[2]):
    with contextlib.redirect_stderr(io.StringIO()) as printed:
        try:
            exec(statement)
        except SystemExit as error:
            told.append(printed.getvalue())
        except Exception as error:
            told.append(str(error))
print(json.dumps(told))
""",
        str(tmp_path),
        json.dumps(NEEDS),
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])  # after log lines
    for (extra, statement), text in zip(NEEDS, told, strict=True):
        [line] = text.strip().splitlines()
        assert f"pip install '.[{extra}]'" in line, (statement, text)


@pytest.mark.thorough
def test_a_model_with_images_is_served_without_pillow_and_its_images_are_refused(
    tmp_path: Path,
) -> None:
    models.identity(tmp_path / "picture" / "1" / "model.onnx", "FP32", ("batch", 1, 4, 4))
    (tmp_path / "picture" / "config.pbtxt").write_text(
        'backend: "onnxruntime" max_batch_size: 2 '
        'parameters { key: "image.mean" value { string_value: "0.5" } } '
        'input { name: "x" data_type: TYPE_FP32 dims: [1, 4, 4] } '
        'output { name: "y" data_type: TYPE_FP32 dims: [1, 4, 4] }'
    )
    done = run(
        """
import urllib.error, urllib.request
import modelport
x = [[[[1.0] * 4] * 4]]
with modelport.testing.serve(sys.argv[1]) as server:
    for url in (server.http_url, server.grpc_url):
        with modelport.Client(url) as client:
            assert client.infer("picture", {"x": x})["y"].tolist() == x
    try:
        request = urllib.request.Request(
            server.http_url + "/predictions/picture",
            b"\\x89PNG\\r\\n\\x1a\\n",
            {"content-type": "image/png"},
        )
        urllib.request.urlopen(request)
    except urllib.error.HTTPError as error:
        print(error.code, error.read().decode())
""",
        str(tmp_path),
    )
    assert done.returncode == 0, done.stderr
    assert "pip install '.[images]'" in done.stdout
    assert "requests with images will be refused" in done.stderr
