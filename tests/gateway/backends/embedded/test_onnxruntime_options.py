"""ONNX Runtime's options and providers in Triton's words, and GPUs that are not there."""

from __future__ import annotations

from pathlib import Path

import onnxruntime as ort
import pytest

from modelport.gateway.backends.base import Artifact
from modelport.gateway.backends.embedded import onnxruntime_options
from modelport.gateway.backends.embedded.onnxruntime import load
from modelport.gateway.errors import InvalidArgument, ModelportError
from modelport.gateway.repository import config as configuration
from tests import models


def artifact(version: Path, text: str) -> Artifact:
    config = configuration.complete(configuration.parse('backend: "onnxruntime"' + text), "m")
    return Artifact("m", 1, version, config, 1)


def refused(version: Path, text: str) -> str:
    with pytest.raises(ModelportError) as caught:
        load(artifact(version, text))
    return str(caught.value)


def options(text: str) -> ort.SessionOptions:
    return onnxruntime_options.session_options(artifact(Path(), text))


def parameter(key: str, value: object) -> str:
    return f' parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}'


def test_parameters_are_those_of_tritons_backend() -> None:
    default = options("")
    assert (default.intra_op_num_threads, default.inter_op_num_threads) == (1, 1)
    assert default.execution_mode == ort.ExecutionMode.ORT_SEQUENTIAL
    assert default.graph_optimization_level == ort.GraphOptimizationLevel.ORT_ENABLE_ALL
    assert default.enable_cpu_mem_arena
    set_ = options(
        parameter("intra_op_thread_count", 3)
        + parameter("inter_op_thread_count", 2)
        + parameter("execution_mode", 1)
        + parameter("enable_mem_arena", 0)
        + " optimization { graph { level: 1 } }"
    )
    assert (set_.intra_op_num_threads, set_.inter_op_num_threads) == (3, 2)
    assert set_.execution_mode == ort.ExecutionMode.ORT_PARALLEL
    assert set_.graph_optimization_level == ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    assert not set_.enable_cpu_mem_arena


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (parameter("intra_op_thread_count", "many"), "must be a whole number of at least 0"),
        (parameter("intra_op_thread_count", 1505), "'intra_op_thread_count' must be at most"),
        (
            parameter("execution_mode", 1) + parameter("inter_op_thread_count", 1505),
            "'inter_op_thread_count' must be at most",
        ),
        (parameter("execution_mode", 2), "'execution_mode' must be 0 or 1"),
        (parameter("enable_mem_arena", "perhaps"), "must be true or false"),
        (" optimization { graph { level: 7 } }", "level must be -1, 0, 1 or 2"),
    ],
)
def test_a_parameter_that_is_not_understood_is_refused(text: str, reason: str) -> None:
    with pytest.raises(InvalidArgument, match=reason):
        options(text)


def accelerated(kind: str, name: str, *parameters: str) -> str:
    given = " ".join(f'parameters {{ key: "{key}" value: "1" }}' for key in parameters)
    return (
        f" optimization {{ execution_accelerators {{ {kind}_execution_accelerator "
        f'{{ name: "{name}" {given} }} }} }}'
    )


def test_an_accelerator_that_is_unknown_or_not_there_is_refused(tmp_path: Path) -> None:
    models.multiply(tmp_path / "model.onnx")
    reason = refused(tmp_path, accelerated("cpu", "magic"))
    assert reason == "unknown Execution Accelerator 'magic' is requested"
    reason = refused(tmp_path, accelerated("cpu", "openvino"))
    assert "'openvino' is not in this build of ONNX Runtime" in reason


ALL = ["TensorrtExecutionProvider", "CUDAExecutionProvider", "CPUExecutionProvider"]
GPU = " instance_group { kind: KIND_GPU gpus: 1 }"


def test_a_gpus_providers_come_in_tritons_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ort, "get_available_providers", lambda: ALL)
    text = GPU + accelerated("gpu", "tensorrt", "max_workspace_size_bytes")
    gpu, providers = onnxruntime_options.providers(artifact(Path(), text))
    assert gpu == 1
    assert providers == [
        ("TensorrtExecutionProvider", {"trt_max_workspace_size": "1", "device_id": "1"}),
        ("CUDAExecutionProvider", {"use_tf32": "0", "device_id": "1"}),
        ("CPUExecutionProvider", {}),
    ]


def test_a_gpu_keeps_the_precision_of_fp32_unless_the_configuration_asks_for_less(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ort, "get_available_providers", lambda: ALL)
    for text, tf32 in ((GPU, "0"), (GPU + accelerated("gpu", "cuda", "use_tf32"), "1")):
        _, providers = onnxruntime_options.providers(artifact(Path(), text))
        assert dict(providers)["CUDAExecutionProvider"]["use_tf32"] == tf32


@pytest.mark.parametrize("key", ["trt_extra_plugin_lib_paths", "trt_engine_cache_path"])
def test_a_configuration_cannot_pass_files_to_an_accelerator(
    key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ort, "get_available_providers", lambda: ALL)
    with pytest.raises(
        InvalidArgument, match=f"unknown parameter '{key}' is provided for tensorrt"
    ):
        onnxruntime_options.providers(artifact(Path(), GPU + accelerated("gpu", "tensorrt", key)))


@pytest.mark.parametrize("kind", ["KIND_GPU", "KIND_AUTO"])
def test_a_build_for_gpus_on_a_machine_without_one_is_said_plainly(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The runtime then falls back to the CPU without a word: only the session tells."""
    models.multiply(tmp_path / "model.onnx")
    real = ort.InferenceSession
    monkeypatch.setattr(ort, "get_available_providers", lambda: ALL)
    monkeypatch.setattr(
        ort,
        "InferenceSession",
        lambda file, options, providers, **_: real(
            file, options, providers=["CPUExecutionProvider"]
        ),
    )
    text = f" instance_group {{ kind: {kind} }}"
    if kind == "KIND_GPU":
        assert "ONNX Runtime could not use CUDAExecutionProvider" in refused(tmp_path, text)
        return
    backend = load(artifact(tmp_path, text))
    assert backend.config.instance_group[0].kind == 2  # KIND_CPU
    assert "served on the CPU" in "".join(capfd.readouterr())


def test_a_damaged_name_is_refused_and_the_runtime_prints_nothing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """ONNX Runtime prints to stdout before it tries once more, for what is no error of its own."""
    models.multiply(tmp_path / "model.onnx")
    content = (tmp_path / "model.onnx").read_bytes()
    damaged = content.replace(b"\n\x01x", b"\n\x01\xff")
    assert damaged != content
    (tmp_path / "model.onnx").write_bytes(damaged)
    assert "does not load" in refused(tmp_path, "")
    assert "EP Error" not in "".join(capfd.readouterr())
