"""Session options and execution providers, from the fields and parameters of Triton's ONNX Runtime
backend: ``instance_group``, ``optimization`` and ``parameters``.
"""

from __future__ import annotations

import functools
from typing import Any

import onnxruntime as ort

from modelport.gateway.backends import parameters
from modelport.gateway.backends.base import Artifact
from modelport.gateway.backends.embedded import placement
from modelport.gateway.errors import InvalidArgument, Unsupported
from modelport.gateway.repository.config import ModelConfig
from modelport.gateway.repository.config_schema import CUDA_OPTIONS

CPU, CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"

#: Name of an ``execution_accelerators`` entry → provider; for the CPU, and for a GPU.
CPU_ACCELERATORS = {"openvino": "OpenVINOExecutionProvider"}
GPU_ACCELERATORS = {"tensorrt": "TensorrtExecutionProvider", "cuda": CUDA}

#: ``optimization.graph.level`` in Triton's numbers; 0 is its default.
GRAPH_LEVELS = {
    0: ort.GraphOptimizationLevel.ORT_ENABLE_ALL,
    -1: ort.GraphOptimizationLevel.ORT_ENABLE_BASIC,
    1: ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED,
    2: ort.GraphOptimizationLevel.ORT_DISABLE_ALL,
}

#: Options of accelerators. None is the path of a file or library, because a configuration may come
#: from a request.
_OPTIONS = {
    "tensorrt": (
        "max_workspace_size_bytes", "trt_max_partition_iterations", "trt_min_subgraph_size",
        "trt_dla_enable", "trt_dla_core", "trt_force_sequential_engine_build",
        "trt_cuda_graph_enable", "trt_context_memory_sharing_enable",
        "trt_layer_norm_fp32_fallback", "trt_build_heuristics_enable", "trt_sparsity_enable",
        "trt_builder_optimization_level", "trt_auxiliary_streams", "trt_profile_min_shapes",
        "trt_profile_max_shapes", "trt_profile_opt_shapes",
    ),
    "cuda": CUDA_OPTIONS,
    "openvino": ("num_of_threads", "num_streams", "precision"),
}  # fmt: skip
#: Triton's key → the provider's option, where they differ.
_RENAMED = {"max_workspace_size_bytes": "trt_max_workspace_size"}
_PRECISIONS = {"FP32": {}, "FP16": {"trt_fp16_enable": "1"}, "INT8": {"trt_int8_enable": "1"}}

#: A model has the precision that its certificate states: TF32 has fp16's ten bits. A configuration
#: may ask for it.
_EXACT = {"use_tf32": "0"}

Provider = tuple[str, dict[str, str]]


def session_options(artifact: Artifact) -> ort.SessionOptions:
    """Read the session's options; raises ``InvalidArgument`` for an invalid parameter."""
    config = artifact.config
    options = ort.SessionOptions()
    options.log_severity_level = 3
    # The format that was checked, regardless of the file's name and first bytes.
    options.add_session_config_entry("session.load_model_format", "ONNX")
    # A spinning pool takes the cores from the event loop and the pools of other models.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.add_session_config_entry("session.inter_op.allow_spinning", "0")
    options.intra_op_num_threads = (
        parameters.threads(config, "intra_op_thread_count", 0) or artifact.threads
    )
    mode = parameters.integer(config, "execution_mode", 0)
    if mode > 1:
        raise InvalidArgument(f"parameter 'execution_mode' must be 0 or 1, not '{mode}'")
    inter = parameters.threads(config, "inter_op_thread_count", 0)
    options.inter_op_num_threads = (inter or artifact.threads) if mode else 1
    if mode:
        options.execution_mode = ort.ExecutionMode.ORT_PARALLEL
    options.enable_cpu_mem_arena = parameters.boolean(config, "enable_mem_arena", True)
    options.enable_mem_pattern = parameters.boolean(config, "enable_mem_pattern", not mode)
    level = config.optimization.graph.level
    if level not in GRAPH_LEVELS:
        raise InvalidArgument(f"optimization.graph.level must be -1, 0, 1 or 2, not {level}")
    options.graph_optimization_level = GRAPH_LEVELS[level]
    return options


def providers(artifact: Artifact) -> tuple[int | None, list[Provider]]:
    """The index of the model's GPU, if it runs on one, and the providers in order.

    Raises:
        Unsupported: this build of ONNX Runtime lacks a requested provider.
        InvalidArgument: an accelerator is unknown.
    """
    gpu = placement.gpu_of(artifact, _why_no_gpu)
    accelerators = artifact.config.optimization.execution_accelerators
    chosen: list[Provider] = []
    if gpu is not None:
        found = _accelerators(accelerators.gpu_execution_accelerator, GPU_ACCELERATORS)
        _preload()
        device = {"device_id": str(gpu)}
        cuda = _EXACT | _deprecated_cuda(artifact.config) | dict(found).get(CUDA, {})
        chosen = [(name, options | device) for name, options in found if name != CUDA]
        chosen.append((CUDA, cuda | device))
    chosen += _accelerators(accelerators.cpu_execution_accelerator, CPU_ACCELERATORS)
    return gpu, [*chosen, (CPU, {})]


@functools.cache
def _preload() -> None:
    """Load CUDA's libraries from the wheels of NVIDIA, where pip has installed them; they are in no
    folder that the system searches."""
    ort.preload_dlls()


def _why_no_gpu(index: int) -> str:
    """The reason, known before a session is created, that no GPU can be used; empty if one can."""
    if CUDA in ort.get_available_providers():
        return ""
    return (
        "this build of ONNX Runtime has no CUDA; install onnxruntime-gpu: pip install "
        "--force-reinstall --no-deps 'onnxruntime-gpu>=1.24'"
    )


def _accelerators(wanted: Any, known: dict[str, str]) -> list[Provider]:
    found = []
    for accelerator in wanted:
        if accelerator.name not in known:
            raise InvalidArgument(
                f"unknown Execution Accelerator '{accelerator.name}' is requested"
            )
        provider = known[accelerator.name]
        if provider not in ort.get_available_providers():
            raise Unsupported(
                f"Execution Accelerator '{accelerator.name}' is not in this build of ONNX Runtime; "
                "install a build that has it, or remove it from 'execution_accelerators'"
            )
        found.append((provider, _options(accelerator.name, dict(accelerator.parameters))))
    return found


def _options(accelerator: str, given: dict[str, str]) -> dict[str, str]:
    options: dict[str, str] = {}
    if accelerator == "tensorrt" and "precision_mode" in given:
        precision = given.pop("precision_mode")
        if precision not in _PRECISIONS:
            raise InvalidArgument(f"precision_mode must be FP32, FP16 or INT8, not '{precision}'")
        options |= _PRECISIONS[precision]
    for key, value in given.items():
        if key not in _OPTIONS[accelerator]:
            raise InvalidArgument(
                f"unknown parameter '{key}' is provided for {accelerator} execution accelerator"
            )
        options[_RENAMED.get(key, key)] = value
    return options


def _deprecated_cuda(config: ModelConfig) -> dict[str, str]:
    """Provider options that older configurations have among their ``parameters``."""
    return {key: parameters.text(config, key) for key in CUDA_OPTIONS if key in config.parameters}


def check_providers(session: ort.InferenceSession, wanted: list[Provider]) -> str:
    """The problem if ONNX Runtime has silently fallen back to other providers; else empty."""
    missing = [name for name, _ in wanted if name not in session.get_providers()]
    if not missing:
        return ""
    return (
        f"ONNX Runtime could not use {', '.join(missing)}: the device is missing, or a library "
        "or driver is missing or has the wrong version"
    )
