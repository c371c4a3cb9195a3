"""The whole stack of ``compose.yaml`` as far as programs can be had.

What ``prepare.sh`` makes is read by a real TorchServe and a real Triton, behind a gateway with the
stack's own routes. Triton's program is that of the wheel ``nvidia-pytriton``, which has the Python
backend only: its core reads the packaged configuration, and that backend runs the packaged ONNX
file in ONNX Runtime. TensorFlow Serving's cannot be had: its configuration is parsed by its own
protobuf messages, its SavedModel is run by TensorFlow, and a second gateway speaks its protocol.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import tritonclient.http

from modelport.loadtests.serving import pytriton
from modelport.loadtests.system import environments
from modelport.loadtests.system.processes import HOST, free_ports, running
from tests.deploy import DEPLOY, thorough, tools
from tests.deploy.test_compose import FOLDER, GATEWAY, ROUTES, SERVICES, mounts
from tests.server import serving
from tests.tfserving_clients.__main__ import VERSION as TFSERVING_API
from tests.torchserve.server import REQUIREMENTS as TORCHSERVE
from tests.triton_package import tritonserver, use_python_backend

pytestmark = thorough
TORCHSERVE_UNIT = DEPLOY / "systemd" / "torchserve.service"
#: Run where TensorFlow Serving's messages are installed: parses what its server would.
PARSE = """
import sys
from google.protobuf import text_format
from tensorflow_serving.config import model_server_config_pb2 as pb
config = text_format.Parse(open(sys.argv[1]).read(), pb.ModelServerConfig())
print(*(f"{m.name} {m.base_path} {m.model_platform}" for m in config.model_config_list.config))
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``prepare.sh``, run for real."""
    folder = tmp_path_factory.mktemp("compose") / "models"
    checkpoint = DEPLOY.parent / "checkpoints" / "fraud.pt"
    if not checkpoint.is_file():
        tools.check(sys.executable, "-m", "modelport", "demo", cwd=DEPLOY.parent)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    status, said = tools.said(
        FOLDER / "prepare.sh", checkpoint, folder, cwd=DEPLOY.parent, env={"PATH": path}
    )
    assert status == 0, said
    return folder


def test_every_service_finds_the_folder_that_it_mounts(made: Path) -> None:
    for service in SERVICES.values():
        for source in mounts(service).values():
            if source.startswith("./models/"):
                assert (made / source.removeprefix("./models/")).is_dir()


def test_preparing_twice_destroys_nothing(made: Path) -> None:
    status, said = tools.said(FOLDER / "prepare.sh", "checkpoints/fraud.pt", made)
    assert (status, said) == (
        2, f"prepare.sh: {made} already exists; remove it, or give another directory\n",
    )  # fmt: skip


def test_tensorflow_serving_reads_its_configuration(made: Path) -> None:
    python = environments.venv("tfserving_clients", f"tensorflow-serving-api=={TFSERVING_API}")
    said = tools.check(python / "python", "-c", PARSE, made / "tfserving" / "models.config")
    assert said.splitlines()[-1] == "fraud-savedmodel /models/fraud-savedmodel tensorflow"
    assert (made / "tfserving" / "fraud-savedmodel" / "1" / "saved_model.pb").is_file()


def test_triton_has_the_flags_that_it_is_given() -> None:
    python = environments.venv("triton", *pytriton.REQUIREMENTS) / "python"
    find = "import sysconfig as s; print(s.get_path('purelib')); print(s.get_config_var('LIBDIR'))"
    packages, libraries = tools.check(python, "-c", find).split()
    program = Path(packages) / "pytriton" / "tritonserver" / "bin" / "tritonserver"
    paths = f"{libraries}:{packages}/nvidia_pytriton.libs"
    _, said = tools.said(program, "--help", env={"LD_LIBRARY_PATH": paths})
    name, *flags = SERVICES["triton"]["command"]
    assert name == program.name
    for flag in flags:
        assert flag.partition("=")[0] in said, said[:2000]


@contextlib.contextmanager
def torchserve(work: Path, command: Sequence[str], settings: str = "") -> Iterator[tuple[str, str]]:
    """A real one with this command and these properties, at free ports of this machine.

    Yields its addresses for gRPC and for management.
    """
    if shutil.which("java") is None:
        raise environments.Missing("java is missing: install Java 17")
    programs = environments.venv("torchserve", *TORCHSERVE)
    inference, management, metrics, grpc, grpc_management = free_ports(5)
    own = {
        "inference_address": f"http://{HOST}:{inference}",
        "management_address": f"http://{HOST}:{management}",
        "metrics_address": f"http://{HOST}:{metrics}",
        "grpc_inference_port": grpc,
        "grpc_management_port": grpc_management,
    }
    properties = work / "config.properties"
    # Of a repeated key, the last line counts.
    properties.write_text("\n".join([settings, *(f"{key}={value}" for key, value in own.items())]))
    places = dict.fromkeys(("TMPDIR", "TEMP", "LOG_LOCATION", "METRICS_LOCATION"), str(work))
    program, *words = command
    with running(
        [str(programs / Path(program).name), *words],
        log=work / "torchserve.log",
        ready=f"http://{HOST}:{inference}/ping",
        env={
            **places,
            "PATH": f"{programs}:{os.environ['PATH']}",
            "TS_CONFIG_FILE": str(properties),
        },
        cwd=work,
    ):
        yield f"{HOST}:{grpc}", f"{HOST}:{management}"


def compose_command(made: Path) -> list[str]:
    """Compose's, without the properties file, whose place is another one."""
    words = [w for w in SERVICES["torchserve"]["command"] if not w.startswith("--ts-config")]
    return [word.replace("/models", str(made / "torchserve")) for word in words]


def test_the_gateway_gives_the_same_answer_from_every_server(made: Path, tmp_path: Path) -> None:
    packaged = tmp_path / "triton"
    shutil.copytree(made / "triton", packaged)
    use_python_backend(packaged, "fraud-onnx")
    saved = tmp_path / "tfserving" / "fraud-savedmodel" / "1" / "model.savedmodel"
    shutil.copytree(made / "tfserving" / "fraud-savedmodel" / "1", saved)
    with (
        torchserve(
            tmp_path, compose_command(made), (FOLDER / "torchserve.properties").read_text()
        ) as (asked, management),
        tritonserver(tmp_path, packaged) as ports,
        serving(tmp_path / "tfserving") as tfserving,
    ):
        places = {
            "torchserve:7070": asked,
            "torchserve:8081": management,
            "triton:8001": f"{HOST}:{ports.grpc}",
            "tfserving:8500": tfserving.grpc,
        }
        text = re.sub(r'"(\w+:\d+)"', lambda found: f'"{places[found[1]]}"', ROUTES)
        (tmp_path / "routes.toml").write_text(text)
        flags = [word for word in GATEWAY["command"] if "control-mode" in word or "-secs" in word]
        flags += ["--routes", str(tmp_path / "routes.toml"), "--strict-readiness", "false"]
        with serving(made / "onnx", *flags) as gateway:
            # TorchServe is healthy before its worker is: the gateway asks until it is.
            gateway.wait_for("model version is ready", model="fraud-torchscript")
            names = ("fraud-onnx", "fraud-torchscript", "fraud-savedmodel", "fraud-triton")
            answers = [ask(gateway.http, name) for name in names]
    for name, answer in zip(names, answers, strict=True):
        np.testing.assert_allclose(answer, answers[0], atol=1e-5, err_msg=name)


def test_the_unit_for_torchserve_starts_one_that_a_route_reaches(
    made: Path, tmp_path: Path
) -> None:
    (line,) = re.findall(r"^ExecStart=(.*)$", TORCHSERVE_UNIT.read_text(), re.MULTILINE)
    words = line.replace("/var/lib/torchserve/models", str(made / "torchserve")).split()
    with torchserve(tmp_path, words) as (asked, management):
        (tmp_path / "routes.toml").write_text(
            '[models.fraud-torchscript]\nbackend = "torchserve"\n'
            f'endpoints = ["{asked}"]\nmanagement = "{management}"\n'
        )
        flags = ("--routes", str(tmp_path / "routes.toml"), "--strict-readiness", "false")
        with serving(made / "onnx", *flags) as gateway:
            gateway.wait_for("model version is ready", model="fraud-torchscript")
            routed, own = (ask(gateway.http, f"fraud-{name}") for name in ("torchscript", "onnx"))
    np.testing.assert_allclose(routed, own, atol=1e-5)


def ask(address: str, name: str) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    client = tritonclient.http.InferenceServerClient(address)
    tokens = tritonclient.http.InferInput("tokens", [1, 3], "INT64")
    tokens.set_data_from_numpy(np.array([[7, 99, 3]], np.int64))
    lengths = tritonclient.http.InferInput("seq_lens", [1, 1], "INT64")
    lengths.set_data_from_numpy(np.array([[3]], np.int64))
    output = client.get_model_metadata(name)["outputs"][0]["name"]
    answer: np.ndarray[tuple[int, ...], np.dtype[np.float32]] = client.infer(
        name, [tokens, lengths]
    ).as_numpy(output)
    client.close()
    return answer
