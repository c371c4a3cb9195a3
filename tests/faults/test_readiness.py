"""Tests of readiness and of the models that load at start."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading

import httpx
import numpy as np
import pytest
import tritonclient.grpc
from tritonclient.utils import InferenceServerException

from modelport.loadtests.system.processes import free_ports
from tests.faults import probes
from tests.faults.probes import EXPLICIT, POLL, ChangingRepository
from tests.polling import eventually
from tests.server import serving


def broken(repository: ChangingRepository, model: str = "bad") -> None:
    probes.flip(repository.version(2.0, 1, model=model) / "model.onnx")


def serve(repository: ChangingRepository, *flags: str) -> subprocess.CompletedProcess[str]:
    """``modelport serve`` that is expected to end by itself."""
    ports = ("--http-port", "0", "--grpc-port", "0", "--metrics-port", "0")
    return subprocess.run(
        [
            *(sys.executable, "-m", "modelport", "serve", "--model-repository"),
            *(str(repository.root), *ports, *flags),
        ],
        capture_output=True,
        text=True,
        timeout=60,
    )


# -- readiness ------------------------------------------------------------------------------------


def test_strict_readiness_is_off_while_a_model_does_not_serve_and_on_once_it_does(
    repository: ChangingRepository,
) -> None:
    repository.version(2.0)
    broken(repository)
    with serving(repository.root, *POLL) as gateway:
        assert probes.live(gateway)
        assert not probes.ready(gateway)
        assert probes.answer(gateway) == ("1", 2.0)
        assert probes.status(gateway, "/v2/models/m/ready") == 200
        assert probes.status(gateway, "/v2/models/bad/ready") == 400
        repository.version(3.0, 2, model="bad")
        eventually(lambda: probes.ready(gateway), "repaired")


def test_without_strict_readiness_a_gateway_is_ready_whatever_its_models_are(
    repository: ChangingRepository,
) -> None:
    broken(repository)
    with serving(repository.root, "--strict-readiness", "false") as gateway:
        assert probes.ready(gateway)
        assert probes.state(gateway, 1, "bad") == "UNAVAILABLE"


def test_an_empty_repository_is_ready(repository: ChangingRepository) -> None:
    with serving(repository.root) as gateway:
        assert probes.ready(gateway)
        assert probes.post(gateway, "/v2/repository/index").json() == []


def test_a_bad_newest_version_with_an_older_good_one_is_ready(
    repository: ChangingRepository,
) -> None:
    repository.version(2.0)
    probes.flip(repository.version(3.0, 2) / "model.onnx")
    with serving(repository.root) as gateway:
        assert probes.ready(gateway)


def test_unloading_a_model_on_request_leaves_the_gateway_ready(
    repository: ChangingRepository,
) -> None:
    repository.version(2.0)
    with serving(repository.root, *EXPLICIT, "--load-model", "m") as gateway:
        assert probes.unload(gateway).status_code == 200
        assert probes.state(gateway) == "UNAVAILABLE"
        assert probes.ready(gateway)


def test_unloading_a_model_whose_newest_version_is_bad_leaves_the_gateway_ready(
    repository: ChangingRepository,
) -> None:
    repository.version(2.0)
    probes.flip(repository.version(3.0, 2) / "model.onnx")
    with serving(repository.root, *EXPLICIT, "--load-model", "m") as gateway:
        assert probes.ready(gateway)
        assert probes.unload(gateway).status_code == 200
        assert probes.ready(gateway)


def test_a_policy_that_asks_for_a_version_not_on_disk_is_not_ready_and_says_why(
    repository: ChangingRepository,
) -> None:
    repository.version(2.0, config="version_policy { specific { versions: 7 } }")
    with serving(repository.root, *POLL) as gateway:
        assert not probes.ready(gateway)
        assert "version_policy" in probes.reason(gateway, "")
        assert probes.state(gateway, "") == "UNAVAILABLE"
        assert probes.ask(gateway).status_code == 404
        repository.version(3.0, 7)
        eventually(lambda: probes.state(gateway, 7) == "READY", "version 7 is published")
        assert probes.ready(gateway)
        assert probes.answer(gateway) == ("7", 3.0)


def test_a_model_to_load_that_is_not_there_is_not_ready_until_it_is_published_and_loaded(
    repository: ChangingRepository,
) -> None:
    repository.version(2.0)
    flags = (*EXPLICIT, "--load-model", "m", "--load-model", "late")
    with serving(repository.root, *flags) as gateway:
        assert probes.answer(gateway) == ("1", 2.0)
        assert not probes.ready(gateway)
        assert probes.load(gateway, "late").status_code == 404
        assert not probes.ready(gateway)
        repository.version(3.0, model="late")
        assert not probes.ready(gateway)
        assert probes.load(gateway, "late").status_code == 200
        assert probes.ready(gateway)
        assert probes.answer(gateway, "late") == ("1", 3.0)


# -- exit on error --------------------------------------------------------------------------------


def test_exit_on_error_ends_with_status_1_and_names_the_model(
    repository: ChangingRepository,
) -> None:
    repository.version(2.0)
    broken(repository)
    run = serve(repository, "--exit-on-error", "true")
    assert run.returncode == 1
    last = run.stderr.splitlines()[-1]
    assert last.startswith("modelport: error: failed to load all models: bad (")


def test_a_version_is_ready_only_after_its_warm_up_samples(repository: ChangingRepository) -> None:
    """With the mistakes of the report: a wrong name, and a file that is not there."""
    wrong = """
model_warmup { name: "s" batch_size: 2 count: 2
               inputs { key: "%s" value { data_type: TYPE_FP32 dims: 4 %s } } }
"""
    repository.version(2.0, model="good", config=wrong % ("x", "random_data: true"))
    repository.version(2.0, model="named", config=wrong % ("y", "zero_data: true"))
    repository.version(2.0, model="filed", config=wrong % ("x", 'input_data_file: "gone"'))
    with serving(repository.root) as gateway:
        index = httpx.post(f"http://{gateway.http}/v2/repository/index").json()
        rows = {row["name"]: (row["state"], row["reason"]) for row in index}
        assert rows["good"] == ("READY", "")
        assert probes.answer(gateway, "good") == ("1", 2.0)
        for name, told in (("named", "input 'y'"), ("filed", "'warmup/gone' of input 'x'")):
            state, reason = rows[name]
            assert state == "UNAVAILABLE"
            assert "failed to run warmup sample 's'" in reason
            assert told in reason


def test_exit_on_error_serves_when_every_model_loads(repository: ChangingRepository) -> None:
    repository.version(2.0)
    with serving(repository.root, "--exit-on-error", "true") as gateway:
        assert probes.answer(gateway) == ("1", 2.0)


@pytest.mark.parametrize(
    ("exits", "workers"),
    [("true", 1), ("false", 1), pytest.param("true", 2, marks=pytest.mark.thorough)],
)
def test_with_exit_on_error_the_first_answer_is_that_of_a_model(
    exits: str, workers: int, repository: ChangingRepository
) -> None:
    """Tests of Triton and TensorFlow Serving wait for a port, not for readiness."""
    late = exits == "true"
    repository.slow_to_load(1 if late else 30, "slow")
    http, grpc = free_ports(2)
    first: dict[str, bool] = {}
    tensor = tritonclient.grpc.InferInput("INPUT0", [1, 4], "FP32")
    tensor.set_data_from_numpy(np.ones((1, 4), np.float32))
    body = {"inputs": [{"name": "INPUT0", "datatype": "FP32", "shape": [1, 4], "data": [1] * 4}]}

    def ask_http() -> None:
        while "http" not in first:
            with contextlib.suppress(httpx.TransportError):
                url = f"http://127.0.0.1:{http}/v2/models/slow/infer"
                first["http"] = httpx.post(url, json=body, timeout=30).status_code == 200

    def ask_grpc() -> None:
        with tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{grpc}") as client:
            while "grpc" not in first:
                try:
                    first["grpc"] = bool(client.infer("slow", [tensor]))
                except InferenceServerException as error:
                    if "failed to connect" not in error.message().lower():
                        first["grpc"] = False

    asking = [threading.Thread(target=ask, daemon=True) for ask in (ask_http, ask_grpc)]
    for thread in asking:
        thread.start()
    ports = ("--http-port", str(http), "--grpc-port", str(grpc), "--workers", str(workers))
    flags = ("--exit-on-error", exits, *ports)
    with serving(repository.root, *flags, wait_for="started" if late else "listening"):
        for thread in asking:
            thread.join(30)
    assert first == dict.fromkeys(("http", "grpc"), late)


@pytest.mark.thorough
def test_exit_on_error_counts_a_model_to_load_that_is_not_there(
    repository: ChangingRepository,
) -> None:
    repository.version(2.0)
    flags = (*EXPLICIT, "--load-model", "m", "--load-model", "nowhere", "--exit-on-error", "true")
    try:
        run = serve(repository, *flags)
    except subprocess.TimeoutExpired:
        pytest.fail("the gateway serves although --load-model nowhere did not load")
    assert run.returncode == 1
    assert "nowhere" in run.stderr.splitlines()[-1]


# -- explicit control -----------------------------------------------------------------------------


def test_explicit_control_starts_with_nothing(repository: ChangingRepository) -> None:
    repository.version(2.0)
    with serving(repository.root, *EXPLICIT) as gateway:
        assert probes.ready(gateway)
        rows = probes.post(gateway, "/v2/repository/index").json()
        assert rows == [{"name": "m"}]
        assert probes.ask(gateway).status_code == 404
        assert probes.load(gateway).status_code == 200
        assert probes.answer(gateway) == ("1", 2.0)


def test_load_model_loads_the_models_that_are_named(repository: ChangingRepository) -> None:
    for model in ("a", "b", "c"):
        repository.version(2.0, model=model)
    flags = (*EXPLICIT, "--load-model", "a", "--load-model", "c")
    with serving(repository.root, *flags) as gateway:
        states = {model: probes.state(gateway, 1, model) for model in ("a", "b", "c")}
        assert states == {"a": "READY", "b": "", "c": "READY"}


def test_a_star_loads_every_model(repository: ChangingRepository) -> None:
    for model in ("a", "b"):
        repository.version(2.0, model=model)
    with serving(repository.root, *EXPLICIT, "--load-model", "*") as gateway:
        assert [probes.state(gateway, 1, model) for model in ("a", "b")] == ["READY", "READY"]


def test_a_model_to_load_that_is_not_there_is_logged_and_costs_nothing_else(
    repository: ChangingRepository,
) -> None:
    repository.version(2.0)
    flags = (*EXPLICIT, "--load-model", "nowhere", "--load-model", "m")
    with serving(repository.root, *flags) as gateway:
        gateway.wait_for("--load-model names no model of the repository", model="nowhere")
        assert probes.answer(gateway) == ("1", 2.0)


def test_loading_what_is_not_there_is_not_found(repository: ChangingRepository) -> None:
    with serving(repository.root, *EXPLICIT) as gateway:
        for model in ("nowhere", "..", "%2e%2e", "a%2Fb"):
            assert probes.load(gateway, model).status_code in (404, 400)
        reply = probes.load(gateway, "nowhere")
        assert reply.json()["error"].startswith("failed to load 'nowhere'")


def test_loading_what_was_taken_from_disk_is_refused_and_it_serves_on(
    repository: ChangingRepository,
) -> None:
    repository.version(2.0)
    with serving(repository.root, *EXPLICIT, "--load-model", "m") as gateway:
        (repository.root / "m").rename(repository.root / ".gone")
        assert probes.load(gateway).status_code == 404
        assert probes.answer(gateway) == ("1", 2.0)


def test_loading_twice_changes_nothing(repository: ChangingRepository) -> None:
    repository.version(2.0)
    with serving(repository.root, *EXPLICIT, "--load-model", "m") as gateway:
        assert probes.load(gateway).status_code == 200
        assert probes.answer(gateway) == ("1", 2.0)
        loads = [e for e in gateway.logs if e.get("event") == "model version is ready"]
        assert len(loads) == 1


def test_a_configuration_in_the_request_overrides_the_file_until_the_model_is_unloaded(
    repository: ChangingRepository,
) -> None:
    repository.version(2.0)
    override = '{"backend":"onnxruntime","max_batch_size":2}'
    with serving(repository.root, *EXPLICIT) as gateway:

        def batch() -> int:
            document = httpx.get(f"http://{gateway.http}/v2/models/m/config").json()
            return int(document["max_batch_size"])

        assert probes.load(gateway, config=override).status_code == 200
        assert batch() == 2
        assert probes.load(gateway).status_code == 200
        assert batch() == 2
        assert probes.load(gateway, config="{").status_code == 400
        assert probes.load(gateway, config='{"max_batch_size": -1}').status_code == 400
        assert probes.load(gateway).status_code == 200
        assert batch() == 2
        assert probes.unload(gateway).status_code == 200
        assert probes.load(gateway).status_code == 200
        assert batch() == 8
        assert probes.answer(gateway) == ("1", 2.0)


@pytest.mark.parametrize("flags", [(), POLL], ids=["none", "poll"])
def test_loading_on_request_needs_explicit_control(
    flags: tuple[str, ...], repository: ChangingRepository
) -> None:
    repository.version(2.0)
    with serving(repository.root, *flags) as gateway:
        for reply in (probes.load(gateway), probes.unload(gateway)):
            assert reply.status_code == 503
            assert "--model-control-mode=explicit" in reply.json()["error"]
        assert probes.answer(gateway) == ("1", 2.0)
