"""The load of Python models: what they complete, the reasons of failures, who may have them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import click
import pytest

from modelport.gateway.backends.python import backend
from modelport.gateway.cli.serve import settings_of
from modelport.gateway.repository import config as configuration
from tests.gateway.backends.python import python_models
from tests.gateway.backends.python.asking import ask, control
from tests.server import Gateway, serving

COMPLETES = """
import triton_python_backend_utils as pb_utils
from . import helper
import beside

class TritonPythonModel:
    @staticmethod
    def auto_complete_config(c):
        c.add_input({"name": "x", "data_type": "TYPE_FP32", "dims": [2]})
        c.add_output({"name": "y", "data_type": "TYPE_FP32", "dims": [2]})
        c.set_max_batch_size(helper.SIZE + beside.MORE)
        c.set_dynamic_batching()
        return c

    def execute(self, requests):
        found = [pb_utils.get_input_tensor_by_name(r, "x").as_numpy() for r in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", x)]) for x in found]
"""
BODY = "import os, sys, time\nimport triton_python_backend_utils as pb_utils\n{}"
CLASS = "class TritonPythonModel:\n    def execute(self, requests): pass\n"
INITIALIZES = CLASS + "    def initialize(self, args):\n        {}\n"
COMPLETING = (
    f"{CLASS}    @staticmethod\n    def auto_complete_config(c):\n        {{}}\n        return c\n"
)
INPUT = 'c.add_input({{"name": "{}", "data_type": "TYPE_FP32", "dims": [1]{}}})'
#: Source, and the reason of the failed load after ``Internal:``.
FAILS = {
    "raises": (
        INITIALIZES.format("raise ValueError('no weights')"),
        "ValueError: no weights\n\nAt:\n  model.py(6): initialize\n",
    ),
    "sys.exit": (INITIALIZES.format("sys.exit(2)"), "SystemExit: 2\n\nAt:\n"),
    "os._exit": (
        INITIALIZES.format("os._exit(2)"),
        "Stub process 'm_0' is not healthy. it has ended with status 2",
    ),
    "calls": (
        INITIALIZES.format("pb_utils.InferenceRequest('', 0, [], ['y'], 'm').exec()"),
        "TritonModelException: BLS is only supported during the 'execute' function.",
    ),
    "syntax": ("def", "SyntaxError: invalid syntax (model.py, line 3)"),
    "import": ("import no_such", "ModuleNotFoundError: No module named 'no_such'"),
    "no class": ("", "AttributeError: module '1.model' has no attribute 'TritonPythonModel'"),
    "none": (
        COMPLETING.format("return None"),
        "auto_complete_config function in model 'm' must return a valid pb.ModelConfig object.",
    ),
    "datatype": (
        COMPLETING.format(INPUT.format("code", "")),
        "ValueError: unable to load model 'm', configuration expects datatype TYPE_STRING for "
        "input 'code', model provides TYPE_FP32",
    ),
    "batch": (
        COMPLETING.format("c.set_max_batch_size(4)"),
        "ValueError: configuration specified max_batch_size 16, but in auto-complete-config "
        "function for model 'm' specified max_batch_size 4",
    ),
    "property": (
        COMPLETING.format(INPUT.format("a", ', "b": 1')),
        "ValueError: input 'a' in auto-complete-config function for model 'm' contains property "
        "other than 'name', 'data_type', 'dims' and 'optional'.",
    ),
}


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("repository")


@pytest.fixture(scope="module")
def gateway(repository: Path) -> Iterator[Gateway]:
    flags = ("--allow-python", "--model-control-mode", "explicit")
    backends = ("--backend-directory", str(backends_in(repository)))
    with serving(repository, *flags, *backends, "--strict-readiness=false") as gateway:
        yield gateway


def get(gateway: Gateway, path: str) -> Any:
    with urllib.request.urlopen(f"http://{gateway.http}/v2/{path}") as answer:
        return json.loads(answer.read() or b"null")


def test_a_model_without_a_configuration_completes_it(gateway: Gateway, repository: Path) -> None:
    folder = python_models.model(repository, "own", COMPLETES, None)
    (folder / "helper.py").write_text("SIZE = 3")
    (folder.parent / "beside.py").write_text("MORE = 1")
    assert control(gateway, "own") == ""
    config = get(gateway, "models/own/config")
    assert (config["backend"], config["max_batch_size"]) == ("python", 4)
    assert config["dynamic_batching"] is not None
    assert [each["dims"] for each in (*config["input"], *config["output"])] == [[2], [2]]
    assert not (folder / "__pycache__").exists()


@pytest.mark.parametrize("cause", FAILS)
def test_a_failed_load_has_tritons_reason(gateway: Gateway, repository: Path, cause: str) -> None:
    source, reason = FAILS[cause]
    python_models.model(
        repository, "m", BODY.format(source), python_models.TENSORS + "max_batch_size: 16\n"
    )
    try:
        error = control(gateway, "m")
        start = "load failed for model 'm': version 1 is at UNAVAILABLE state: "
        assert error.startswith(f"{start}Internal: {reason}")
        assert str(repository) not in error
        row = next(row for row in get_index(gateway) if row["name"] == "m")
        assert row["reason"].startswith(f"Internal: {reason}")
    finally:
        shutil.rmtree(repository / "m")


def get_index(gateway: Gateway) -> Any:
    url = f"http://{gateway.http}/v2/repository/index"
    with urllib.request.urlopen(urllib.request.Request(url, b"{}")) as answer:
        return json.load(answer)


def test_a_version_without_its_file_fails_at_once(gateway: Gateway, repository: Path) -> None:
    folder = python_models.coded(repository, "empty")
    (folder / "model.py").unlink()
    (folder / "other.py").touch()
    assert "'model.py' is missing from version 1" in control(gateway, "empty")


def test_a_model_may_say_that_it_is_not_ready(gateway: Gateway, repository: Path) -> None:
    source = python_models.MODEL.format(prefix="", awaited="").replace(
        "    def finalize", "    def is_ready(self): return not self.calls\n\n    def finalize"
    )
    python_models.model(repository, "shy", source, python_models.TENSORS)
    assert control(gateway, "shy") == ""
    get(gateway, "models/shy/ready")
    assert ask(gateway, "return [reply(1)]", "shy")[0] == 200
    with pytest.raises(urllib.error.HTTPError) as caught:
        get(gateway, "models/shy/ready")
    caught.value.close()
    assert caught.value.code == 400
    assert ask(gateway, "return [reply(1)]", "shy")[0] == 200


@pytest.mark.parametrize(("kind", "prefix"), [("sync", ""), ("async", "async ")])
def test_requests_are_answered_while_a_model_checks_itself(
    gateway: Gateway, repository: Path, kind: str, prefix: str
) -> None:
    """The check waits for a request."""
    name, awaited = f"checks-{kind}", "await " * bool(prefix)
    source = python_models.MODEL.format(prefix=prefix, awaited=awaited).replace(
        "    def finalize",
        "    def is_ready(self):\n"
        f"        print('{name} is asked')\n"
        "        for _ in range(300):\n"
        "            if self.calls: return True\n"
        "            time.sleep(0.01)\n\n"
        "    def finalize",
    )
    python_models.model(repository, name, source, python_models.TENSORS)
    assert control(gateway, name) == ""
    with ThreadPoolExecutor(1) as pool:
        ready = pool.submit(get, gateway, f"models/{name}/ready")
        gateway.wait_for("model output", line=f"{name} is asked")
        assert ask(gateway, "return [reply(1)]", name)[0] == 200
        ready.result()


# -- Python-based backends ------------------------------------------------------------------------


def backends_in(repository: Path) -> Path:
    """A folder of Python-based backends beside ``repository``."""
    directory = repository.parent / f"{repository.name}-beside" / "backends"
    directory.mkdir(parents=True, exist_ok=True)
    return directory


def test_models_of_a_python_based_backend_share_its_code(
    gateway: Gateway, repository: Path
) -> None:
    folder = backends_in(repository) / "shared"
    folder.mkdir()
    source = COMPLETES.replace('"x").as_numpy()', '"x").as_numpy() * beside.factor()')
    (folder / "model.py").write_text(source)
    (folder / "helper.py").write_text("SIZE = 3")
    (folder / "beside.py").write_text(
        "import os, triton_python_backend_utils as pb_utils\nMORE = 1\n"
        "def factor():\n"
        "    with open(os.path.join(pb_utils.get_model_dir(), 'factor')) as file:\n"
        "        return int(file.read())\n"
    )
    for factor in (2, 3):
        version = repository / f"times{factor}" / "1"
        version.mkdir(parents=True)
        (version / "factor").write_text(str(factor))
        # Its file is not the code: that is the backend's.
        (version / "model.py").write_text("raise AssertionError")
        (version.parent / "config.pbtxt").write_text('backend: "shared"')
        assert control(gateway, f"times{factor}") == ""
        document = {"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [1, 5]}
        url = f"http://{gateway.http}/v2/models/times{factor}/infer"
        body = json.dumps({"inputs": [document]}).encode()
        with urllib.request.urlopen(urllib.request.Request(url, body), timeout=30) as answer:
            assert json.load(answer)["outputs"][0]["data"] == [factor, 5 * factor]
    assert get(gateway, "models/times2/config")["backend"] == "shared"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('backend: "absent"', "backend 'absent' is not supported; this gateway has: "),
        ('backend: "../outside"', "backend '../outside' is not supported"),
        ('backend: "empty"', "backend 'empty' is not supported"),
        ('backend: "wrong"', "SyntaxError: invalid syntax (model.py, line 1)"),
        (
            'backend: "wrong" default_model_filename: "other.py"',
            "the code of backend 'wrong' is its own model.py; remove",
        ),
        ('backend: "python"', "'model.py' is missing from version 1"),
    ],
)
def test_a_backend_that_cannot_be_used_is_refused(
    gateway: Gateway, repository: Path, text: str, reason: str
) -> None:
    directory = backends_in(repository)
    for name, source in (("wrong", "def"), ("../outside", CLASS), ("python", CLASS)):
        (directory / name).mkdir(exist_ok=True)
        (directory / name / "model.py").write_text(source)
    (directory / "empty").mkdir(exist_ok=True)
    version = repository / "m" / "1"
    version.mkdir(parents=True)
    (version.parent / "config.pbtxt").write_text(text + python_models.TENSORS)
    try:
        assert reason in control(gateway, "m")
    finally:
        shutil.rmtree(repository / "m")


@pytest.mark.parametrize(
    ("folder", "flags", "reason"),
    [
        ("no-such-folder", ["--allow-python"], "is not a folder; name the one with NAME/model.py"),
        ("", [], "give --allow-python to serve their models"),
    ],
)
def test_a_folder_of_backends_that_cannot_be_used_is_refused(
    tmp_path: Path, folder: str, flags: list[str], reason: str
) -> None:
    arguments = [str(tmp_path), "--backend-directory", str(tmp_path / folder), *flags]
    with pytest.raises(click.UsageError, match=reason):
        settings_of(arguments, environment=False)


@pytest.mark.parametrize(
    ("groups", "names"),
    [
        ("", ["m_0"]),
        ("instance_group {}", ["m_0_0"]),
        ("instance_group { count: 2 } instance_group { name: 'g' }", ["m_0_0", "m_0_1", "g_0"]),
    ],
)
def test_instances_have_tritons_names(groups: str, names: list[str]) -> None:
    config = configuration.complete(configuration.parse(f'backend: "python" {groups}'), "m")
    assert [name for name, _ in backend.instance_names(config.instance_group)] == names


def test_instances_are_processes_that_run_at_the_same_time(
    gateway: Gateway, repository: Path
) -> None:
    python_models.coded(repository, "two", "instance_group { count: 2 }\n")
    assert control(gateway, "two") == ""
    code = "return [Response(error=Error(self.args['model_instance_name']))]"
    names = {ask(gateway, code, "two")[1] for _ in range(4)}
    assert names == {"two_0_0", "two_0_1"}


def test_unloading_waits_for_finalize_and_ends_the_process(
    gateway: Gateway, repository: Path
) -> None:
    python_models.coded(repository, "gone")
    assert control(gateway, "gone") == ""
    pid = int(ask(gateway, "return [Response(error=Error(str(os.getpid())))]", "gone")[1])
    assert control(gateway, "gone", "unload") == ""
    assert not Path(f"/proc/{pid}").exists()
    assert {"event": "model output", "line": "finalized"}.items() <= gateway.wait_for(
        "model output", line="finalized"
    ).items()


def test_an_environment_is_a_folder_or_an_archive(gateway: Gateway, repository: Path) -> None:
    folder = python_models.coded(
        repository, "env",
        'parameters { key: "EXECUTION_ENV_PATH" '
        'value { string_value: "$$TRITON_MODEL_DIRECTORY/env.tar.gz" } }\n',
    )  # fmt: skip
    environment = folder.parent / "env"
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", "--system-site-packages", environment],
        check=True,
    )
    site = next((environment / "lib").glob("python*")) / "site-packages"
    (site / "own_module.py").write_text("VALUE = 42")
    import numpy

    (site / "numpy.pth").write_text(str(Path(numpy.__file__).parents[1]))
    shutil.make_archive(str(folder.parent / "env"), "gztar", folder.parent, "env")
    shutil.rmtree(environment)
    assert control(gateway, "env") == ""
    code = "import own_module\nreturn [reply(own_module.VALUE)]"
    assert ask(gateway, code, "env")[1]["outputs"][0]["data"] == [42.0]
    (folder.parent / "env.tar.gz").unlink()
    assert control(gateway, "env", "unload") == ""
    assert "names no environment: 'env.tar.gz' has no bin/python3" in control(gateway, "env")


def test_python_models_are_refused_unless_they_are_allowed(tmp_path: Path) -> None:
    folder = python_models.coded(tmp_path, "act")
    marker = tmp_path / "ran"
    (folder / "model.py").write_text(f"open({str(marker)!r}, 'w')")
    with serving(tmp_path, wait_for="model version is not served", may_fork=True) as gateway:
        row = gateway.wait_for("model version is not served")
        assert "--allow-python" in str(row)
    assert not marker.exists()
    assert os.listdir(folder) == ["model.py"]
