"""Servers in a process that has work of its own: several, their ends, what they leave alone."""

from __future__ import annotations

import gc
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from click import Option

import modelport
from modelport.gateway.cli import serve as command
from modelport.server import PROCESS_OPTIONS, ServeOptions
from tests import models
from tests.thorough import thorough

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = models.repository(tmp_path_factory.mktemp("repository"))
    models.identity(root / "words" / "1" / "model.onnx", "BYTES")
    models.identity(root / "bits" / "1" / "model.onnx", "BF16")
    return root


@pytest.fixture(scope="module")
def server(repository: Path) -> Iterator[modelport.Server]:
    with modelport.testing.serve(repository) as running:
        yield running


def answer(server: modelport.Server, model: str = "x2") -> list[float]:
    with modelport.Client(server.http_url) as client:
        found: list[float] = client.infer(model, {"x": [[1.0, 2.0, 3.0, 4.0]]})["y"][0].tolist()
        return found


def test_two_servers_of_one_process_serve_different_models_and_stop_alone(
    server: modelport.Server, tmp_path: Path
) -> None:
    file = models.multiply(tmp_path / "triple.onnx", 3.0)
    with modelport.testing.serve(file) as other:
        assert set(other.ports) & set(server.ports) == set()
        assert answer(other, "triple") == [3.0, 6.0, 9.0, 12.0]
        assert answer(server) == [2.0, 4.0, 6.0, 8.0]
    assert answer(server) == [2.0, 4.0, 6.0, 8.0]
    with modelport.Client(other.http_url) as client, pytest.raises(modelport.Unavailable) as caught:
        client.ready()
    assert other.http_url in str(caught.value)


def test_signals_threads_and_the_programs_logging_are_left_alone(
    repository: Path, caplog: pytest.LogCaptureFixture
) -> None:
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    handlers = [signal.getsignal(number) for number in numbers]
    root = logging.getLogger().handlers.copy()
    caplog.set_level(logging.INFO, "modelport")
    with modelport.testing.serve(repository) as running:
        assert [signal.getsignal(number) for number in numbers] == handlers
        assert logging.getLogger().handlers == root
    assert running.wait(0)
    assert not [t for t in threading.enumerate() if t.name == "modelport-server" and running is t]
    assert any(
        record.name == "modelport.server" and record.getMessage().startswith("started ready=True")
        for record in caplog.records
    )


def test_words_and_bfloat16_are_converted(server: modelport.Server) -> None:
    for url in (server.http_url, server.grpc_url):
        with modelport.Client(url) as client:
            said = client.infer("words", {"x": [["grün", b"\x00", "", "x"]]})["y"]
            assert said.tolist() == [["grün".encode(), b"\x00", b"", b"x"]]
            values = client.infer("bits", {"x": np.array([[1.0, -2.5, 0.0, 8.0]])})["y"]
            assert values.tolist() == [[1.0, -2.5, 0.0, 8.0]]


def test_a_model_that_does_not_load_is_reported_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "broken.onnx").write_bytes(b"no model")
    with (
        pytest.raises(modelport.Unavailable, match=r"failed to load all models: broken \(.+\)"),
        modelport.testing.serve(tmp_path / "broken.onnx"),
    ):
        pass
    models.multiply(tmp_path / "good.onnx")
    paths = (tmp_path / "broken.onnx", tmp_path / "good.onnx")
    with (
        modelport.Server(*paths, exit_timeout_secs=1) as server,
        modelport.Client(server.http_url) as client,
    ):
        broken, good = client.models()
        assert (broken.state, good.state) == ("UNAVAILABLE", "READY")
        assert broken.reason


EXPLICIT: ServeOptions = {"model_control_mode": "explicit"}
POLL: ServeOptions = {"model_control_mode": "poll"}
EXIT: ServeOptions = {"exit_on_error": True}


@pytest.mark.parametrize(
    ("place", "options", "reason"),
    [
        ("broken.onnx", {}, r"failed to load all models: broken \(.+\)"),
        thorough(
            "broken.onnx", {"model_load_retry_count": 2, "load_retry_interval_secs": 0.1}, "broken"
        ),
        ("models", {**EXPLICIT, "load_model": ["broken", "none"]}, r"broken \(.+\), none"),
        ("empty", EXIT, "no model is served, because the model repositories hold none"),
        thorough("empty", {**EXPLICIT, **EXIT, "load_model": "*"}, "repositories hold none"),
    ],
)
def test_a_server_that_serves_nothing_it_has_to_ends(
    tmp_path: Path, place: str, options: ServeOptions, reason: str
) -> None:
    useless(tmp_path)
    with pytest.raises(modelport.Unavailable, match=reason):
        modelport.Server(tmp_path / place, **options).start()


@pytest.mark.parametrize(
    ("place", "options"),
    [
        ("empty", {}),
        thorough("empty", {**POLL, **EXIT}),
        thorough("empty", {**EXPLICIT, **EXIT}),
        ("models", {}),
        thorough("models", EXPLICIT),
        ("broken.onnx", POLL),
    ],
)
def test_a_server_that_may_serve_later_goes_on(
    tmp_path: Path, place: str, options: ServeOptions
) -> None:
    useless(tmp_path)
    with modelport.Server(tmp_path / place, **options, exit_timeout_secs=1) as server:
        assert server.ports.http_port


def useless(folder: Path) -> None:
    """Places without a model that loads."""
    (folder / "empty").mkdir()
    (folder / "models" / "broken" / "1").mkdir(parents=True)
    for file in (folder / "broken.onnx", folder / "models" / "broken" / "1" / "model.onnx"):
        file.write_bytes(b"no model")


def test_a_port_that_is_taken_is_an_error_of_the_start(
    server: modelport.Server, repository: Path
) -> None:
    for kind in ("http", "grpc", "metrics"):
        port = getattr(server.ports, f"{kind}_port")
        options: ServeOptions = {f"{kind}_port": port}  # type: ignore[misc]
        with pytest.raises(modelport.Unavailable, match=f"choose another with --{kind}-port"):
            modelport.Server(repository, **options).start()
        gc.collect()  # a socket that was left open warns now


def test_options_are_checked_before_anything_starts(repository: Path) -> None:
    for wrong, words in (
        ({"http_prt": 1}, "there is no option 'http_prt'; did you mean 'http_port'?"),
        ({"http_port": 70000}, "'--http-port': 70000 is not in the range"),
        ({"workers": 2}, "option 'workers' is only for the command line"),
        ({"model_control_mode": "sometimes"}, "'sometimes' is not one of"),
        ({"load_model": "x2"}, "--load-model requires --model-control-mode=explicit"),
    ):
        with pytest.raises(modelport.InvalidArgument) as caught:
            modelport.Server(repository, **wrong)  # type: ignore[arg-type]
        assert words in str(caught.value)
    with pytest.raises(modelport.InvalidArgument, match="nothing to serve"):
        modelport.Server()
    with pytest.raises(modelport.Unavailable, match="has not started"):
        print(modelport.Server(repository).http_url)


def test_variables_of_the_command_do_not_reach_a_server(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MODELPORT_SERVE_ALLOW_NATIVE_CODE", "true")
    assert command.settings_of([str(repository)]).allow_native_code
    assert not modelport.server.settings_of([repository], {}).allow_native_code


def test_every_option_of_the_command_is_an_option_of_a_server() -> None:
    flags = {
        flag.removeprefix("--").replace("-", "_")
        for option in command.serve.params
        if isinstance(option, Option)
        for flag in option.opts
    }
    aliases = {"model_store"}
    assert set(ServeOptions.__annotations__) == flags - PROCESS_OPTIONS - aliases


def test_a_server_starts_once_and_stops_as_often_as_asked(repository: Path) -> None:
    server = modelport.Server(repository, exit_timeout_secs=1, load_model=["x2"],
                              model_control_mode="explicit")  # fmt: skip
    server.stop()
    server.start()
    with pytest.raises(modelport.InvalidArgument, match="can start only once"):
        server.start()
    assert answer(server) == [2.0, 4.0, 6.0, 8.0]
    server.stop()
    server.stop()
    assert server.wait(0)


SERVE = """
import logging, signal, sys
import modelport

logging.basicConfig(level=logging.INFO)
before = signal.getsignal(signal.SIGTERM)
modelport.serve(sys.argv[1], http_port=0, grpc_port=0, metrics_port=0,
                exit_timeout_secs=1)
print("returned", signal.getsignal(signal.SIGTERM) is before)
"""


@pytest.mark.thorough
def test_serve_returns_after_a_signal_and_restores_its_handlers(repository: Path) -> None:
    command = [sys.executable, "-W", "error", "-c", SERVE, str(repository)]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        log = next(line for line in process.stderr if "started" in line)
        process.terminate()
        out, rest = process.communicate(timeout=120)
    assert (out, process.returncode) == ("returned True\n", 0), log + rest


#: libc's sleep keeps the process for as many seconds as its exit status says, the interpreter gone.
LEFT = """
import ctypes, sys
import modelport

left = modelport.Server(sys.argv[1])
left.start()
libc = ctypes.CDLL(None)
libc.on_exit(libc.sleep, None)
sys.exit(2)
"""


def test_a_process_ends_orderly_with_a_server_left_running(repository: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", LEFT, str(repository)],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
    )
    assert done.returncode == 2, done.stderr


def test_serve_outside_the_main_thread_is_refused(repository: Path) -> None:
    errors: list[BaseException] = []

    def call() -> None:
        try:
            modelport.serve(repository)
        except modelport.InvalidArgument as error:
            errors.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    assert "needs the main thread; use Server" in str(errors[0])


PLUGIN = """
import modelport

def ask(server):
    with modelport.Client(server.http_url) as client:
        return client.infer("x2", {"x": [[1, 2, 3, 4]]})["y"].tolist()

def test_one(modelport_serve):
    assert ask(modelport_serve("%(root)s")) == [[2, 4, 6, 8]]

def test_another_has_the_same_server(modelport_serve):
    server = modelport_serve("%(root)s")
    assert server is modelport_serve("%(root)s")
    assert server is not modelport_serve("%(root)s", strict_readiness=False)
"""


def test_the_pytest_fixture_serves_a_repository(repository: Path, tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(PLUGIN % {"root": repository})
    (tmp_path / "pytest.ini").write_text("[pytest]\nfilterwarnings = error\n")
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:asyncio",
            "-p",
            "modelport.pytest_plugin",
            str(tmp_path),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 passed" in done.stdout


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("ftp://127.0.0.1:1", "'ftp://' is not a protocol"),
        ("grpc://127.0.0.1", "is not grpc://HOST:PORT"),
        ("http://:80", "is not http://HOST:PORT"),
        ("http://127.0.0.1:port", "is not http://HOST:PORT"),
    ],
)
def test_an_invalid_address_is_refused(url: str, words: str) -> None:
    with pytest.raises(modelport.InvalidArgument, match=words):
        modelport.Client(url)
    with pytest.raises(modelport.InvalidArgument, match=words):
        modelport.AsyncClient(url)


def test_importing_the_package_imports_no_library() -> None:
    code = (
        "import sys; before = set(sys.modules); import modelport; "
        "names = {n.partition('.')[0] for n in set(sys.modules) - before}; "
        "assert not names & {'numpy', 'click', 'asyncio', 'logging', 'structlog'}, names; "
        "assert set(dir(modelport)) >= {'Client', 'export', 'serve', 'testing', '__version__'}; "
        "[getattr(modelport, name) for name in modelport.__all__]; "
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    with pytest.raises(AttributeError, match="no attribute 'sever'"):
        modelport.sever  # noqa: B018
