"""Triton's own tests (``qa/``), each with the models and flags that its ``test.sh`` gives it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple
from unittest import mock

from tests.peer_suites import triton_models
from tests.peer_suites import triton_repositories as models
from tests.peer_suites.suite import Bench, Outcome, Suite, Verdict, declared_tests
from tests.peer_suites.triton_examples import REQUIREMENTS
from tests.peer_suites.triton_models import SERVER
from tests.peer_suites.triton_repositories import Build

#: They take half of the time, and are a suite of their own.
_INFER_TESTS = "L0_infer"
#: The gateway is told to go on where a model of a shared repository does not load.
_LENIENT = ("--strict-readiness", "false")


class Stage(NamedTuple):
    """A gateway, and the tests that run against it.

    Attributes:
        file: below ``qa/``.
        models: fills the gateway's repository.
        select: pytest's ``-k``.
        label: tells apart the runs of one file.
        alone: every test of this class has a gateway of its own, as in ``test.sh``.
        environment: of the tests; ``settings`` is the gateway's.
    """

    file: str
    models: Build
    flags: tuple[str, ...] = ()
    select: str = ""
    label: str = ""
    environment: Mapping[str, str] = {}
    settings: Mapping[str, str] = {}
    alone: str = ""


def run(bench: Bench, infers: bool) -> Iterator[Outcome]:
    """``infers``: those of every datatype and shape, or all others."""
    qa = bench.copy(SERVER, "qa") / "qa"
    for number, stage in enumerate(STAGES):
        if stage.file.startswith(_INFER_TESTS) is not infers or not bench.wanted(stage.file):
            continue
        root = bench.work / "models" / str(number)
        root.mkdir(parents=True)
        stage.models(bench, root)
        triton_models.without_commas(root)
        tests = [""]
        if stage.alone:
            found = declared_tests(qa / stage.file, stage.file)
            tests = [t.partition("::")[2] for t in found if stage.alone in t]
        for test in tests:
            yield from _run(bench, stage, root, qa / stage.file, test)


def _run(bench: Bench, stage: Stage, root: Path, file: Path, test: str) -> Iterator[Outcome]:
    try:
        with (
            mock.patch.dict(os.environ, stage.settings),
            bench.gateway(root, *_LENIENT, *stage.flags),
        ):
            yield from bench.pytest(
                file,
                stage.file,
                label=stage.label,
                select=stage.select,
                test=test,
                environment=stage.environment,
            )
    except AssertionError as error:
        yield Outcome(f"{stage.file} [{stage.label}]", Verdict.FAIL, str(error)[-1000:])


def declared(bench: Bench, infers: bool) -> Iterator[str]:
    qa = bench.source(SERVER) / "qa"
    for file in sorted(qa.glob("*/*.py")):
        name = str(file.relative_to(qa))
        if name.startswith(_INFER_TESTS) is infers:
            yield from declared_tests(file, name)


# -- stages ---------------------------------------------------------------------------------------

_SHARED = ("--allow-client-shm", "true")
_EXPLICIT = ("--model-control-mode", "explicit")
_INFER = {"BACKENDS": "onnx", "ENSEMBLES": "1", "BATCH": "1", "NOBATCH": "1"}
_SIZES = "L0_http/http_input_size_limit_test.py"
_VALIDATION = "L0_input_validation/input_validation_test.py"
_SHM, _NOT = "L0_shared_memory/shared_memory_test.py", "not disabled_by_default"
_VERTEX = {"AIP_HEALTH_ROUTE": "/health", "AIP_PREDICT_ROUTE": "/predict"}
_CLASSES = "L0_parameters/class_count_test.py"
_PARAMETERS = "L0_parameters/parameters_test.py"
_CACHE = "L0_response_cache/ensemble_cache_test.py"
_BATCHER, _ONNX = "L0_batcher/batcher_test.py", {"BACKENDS": "onnx"}
_LIFE = "L0_lifecycle/lifecycle_test.py"
_POLL = ("--model-control-mode", "poll", "--repository-poll-secs", "1")


def _cache_of(size: int) -> tuple[str, str]:
    return "--cache-config", f"local,size={size}"


STAGES = (
    Stage("L0_http/http_test.py", models.http, (*_EXPLICIT, "--load-model", "*")),
    Stage("L0_http/python_http_aio_test.py", models.examples, _SHARED),
    Stage("L0_http/http_client_plugin_test.py", models.examples),
    Stage(_SIZES, models.sizes, select="not large_input"),
    Stage(_SIZES, models.sizes, ("--http-max-input-size", str(2**27)), select="large_input"),
    Stage("L0_grpc/python_unit_test.py", models.grpc, select="GrpcTest"),
    Stage("L0_grpc/python_grpc_aio_test.py", models.grpc_examples, _SHARED),
    Stage("L0_infer/infer_test.py", models.infer, environment=_INFER),
    Stage(
        *("L0_infer/infer_test.py", models.infer, _SHARED),
        label="system shared memory",
        environment={**_INFER, "TEST_SYSTEM_SHARED_MEMORY": "1"},
    ),
    Stage("L0_infer_reshape/infer_reshape_test.py", models.reshape),
    Stage("L0_infer_variable/infer_variable_test.py", models.variable),
    Stage("L0_infer_zero/infer_zero_test.py", models.zero),
    Stage(_VALIDATION, models.own("L0_input_validation/models"), select="InputValTest"),
    Stage(_VALIDATION, models.shapes, _SHARED, select="InputShapeTest"),
    Stage(_VALIDATION, models.nothing, _EXPLICIT, select="ModelNameValidationTest"),
    Stage(_CLASSES, models.class_counts, label="http", environment={"CLIENT_TYPE": "http"}),
    Stage(_CLASSES, models.class_counts, label="grpc", environment={"CLIENT_TYPE": "grpc"}),
    Stage(
        *(_PARAMETERS, models.parameters),
        select="test_params",
    ),
    Stage("L0_string_io/string_client_test.py", models.strings),
    Stage("L0_scalar_io/scalar_test.py", models.scalars),
    Stage(
        *("L0_optional_input/optional_input_test.py", models.own("L0_optional_input/models")),
        alone="::OptionalInputTest::",
    ),
    Stage("L0_output_name/output_name_test.py", models.output_names),
    Stage("L0_client_nobatch/client_test.py", models.status),
    Stage(
        _SHM, models.simple, _SHARED, _NOT, "http", {"CLIENT_TYPE": "http"}, alone="::SharedMemory"
    ),
    Stage(
        _SHM, models.simple, _SHARED, _NOT, "grpc", {"CLIENT_TYPE": "grpc"}, alone="::SharedMemory"
    ),
    Stage(_SHM, models.simple, (), "disabled_by_default", "http", {"CLIENT_TYPE": "http"}),
    Stage(_SHM, models.simple, (), "disabled_by_default", "grpc", {"CLIENT_TYPE": "grpc"}),
    Stage("L0_client_timeout/client_infer_timeout_test.py", models.own("L0_client_timeout/models")),
    Stage("L0_decoupled/decoupled_test.py", models.repeating, select="no_streaming"),
    Stage(_CACHE, models.cached, (*_EXPLICIT, *_cache_of(10840)), "not insertion", alone="::"),
    Stage(_CACHE, models.cached, (*_EXPLICIT, *_cache_of(200)), "insertion_failure"),
    Stage("L0_batcher/queue_timeout_test.py", models.slow_queue),
    *(
        Stage(_BATCHER, build, environment=_ONNX, alone=f"::BatcherTest::test_{tests}")
        for build, tests in (
            (models.batching, "static_"),
            (models.batching, "multi_same_"),
            (models.batching, "multi_different_"),
            (models.batching, "multi_batch_sum_"),
            (models.batching, "multi_batch_gt_"),
            (models.batching_shapes, "multi_batch_different_shape"),
            (models.batching_shapes, "multi_batch_preferred_"),
        )
    ),
    Stage(
        *(_BATCHER, models.batching, (), "not different_shape"),
        environment=_ONNX,
        alone="::BatcherTest::test_multi_batch_not_",
    ),
    *(
        Stage(f"{_LIFE}", build, flags, f"{test} and not {test}_")
        for test, build, flags in (
            ("test_parse_ignore_zero_prefixed_version", models.version_named("003"), ()),
            ("test_parse_ignore_non_intergral_version", models.version_named("abc"), ()),
            ("test_dynamic_model_load_unload", models.changing, _POLL),
            ("test_dynamic_model_load_unload_disabled", models.changing, ()),
            ("test_dynamic_version_load_unload", models.changing_versions, _POLL),
            ("test_dynamic_version_load_unload_disabled", models.changing_versions, ()),
            ("test_model_control", models.controlled, _EXPLICIT),
            ("test_model_control_ensemble", models.controlled, _EXPLICIT),
        )
    ),
    Stage("L0_http/generate_endpoint_test.py", models.generating),
    Stage(
        *("L0_sagemaker/sagemaker_test.py", models.add_and_subtract("sm_model")),
        ("--http-port", "8080", "--allow-sagemaker", "true"),
        settings={"SAGEMAKER_TRITON_DEFAULT_MODEL_NAME": "sm_model"},
    ),
    Stage(
        *("L0_vertex_ai/vertex_ai_test.py", models.add_and_subtract("addsub", "subadd")),
        ("--http-port", "8080", "--allow-vertex-ai", "true", "--vertex-ai-default-model", "addsub"),
        environment=_VERTEX,
        settings=_VERTEX,
    ),
)

_NAME = "wants the server's name to be 'triton'"
_PRIVATE = "sets a delay in the server by an environment variable of Triton's own"
_TENSORRT = "TensorRT"
_TRACE = "trace settings come with tracing"
_SIZE, _HTTP = f"{_SIZES}::InferSizeLimitTest", "L0_http/http_test.py::HttpTest"
_HTTP_AIO = "L0_http/python_http_aio_test.py::TestHttpAioClient"
_GRPC_AIO = "L0_grpc/python_grpc_aio_test.py::TestGrpcAioClient"
_GPU = "GPU"
_PROCESS = "reads the memory of Triton's own process"
#: By a test's id or the beginning of it.
NOT_APPLICABLE = {
    f"{_SIZE}::test_no_leak": _PROCESS,
    f"{_HTTP}::test_loading_large_invalid_model": "sends 2.8 GB, which the header refuses",
    f"{_HTTP_AIO}::test_get_server_metadata": _NAME,
    f"{_GRPC_AIO}::test_get_server_metadata": _NAME,
    f"{_GRPC_AIO}::test_register_cuda_shared_memory": f"{_GPU}: CUDA shared memory",
    f"{_VALIDATION}::InputShapeTest::test_wrong_input_shape_tensor_size": _TENSORRT,
    f"{_SHM}::SharedMemoryTest::test_python_client_leak": "watches the client's own memory",
    "L0_client_timeout/client_non_infer_timeout_test.py": _PRIVATE,
    "L0_http/http_basic_auth_test.py": "asks nginx for a password",
    "L0_grpc/grpc_basic_auth_test.py": "asks nginx for a password",
    "common/": "helpers of other tests",
    "python_models/": "code of models for Triton's Python backend",
    **dict.fromkeys(
        (
            *("L0_async_work_queue", "L0_backend_bls", "L0_backend_config", "L0_backend_python"),
            *("L0_backend_identity", "L0_backend_fastertransformer", "L0_backend_onnxruntime"),
            *("L0_backend_output_detail", "L0_backend_tutorial", "L0_custom_ops", "L0_query"),
            *("L0_passive_instance", "L0_python_api", "L0_pytorch_python_runtime", "L0_register"),
            *("L0_triton_repo_agent", "L0_repoagent_checksum", "L0_rate_limiter", "L0_mlflow"),
            *("L0_additional_dependency_dirs", "L0_buffer_attributes", "L0_openai", "L0_orca"),
        ),
        "Triton's backends, agents and in-process API",
    ),
    **dict.fromkeys(
        (
            *("L0_cuda_graph", "L0_cuda_shared_memory", "L0_dlpack_multi_gpu", "L0_compute"),
            *("L0_device_memory_tracker", "L0_parallel_copy", "L0_pinned_memory", "L0_torch_aoti"),
            "L0_libtorch",
        ),
        _GPU,
    ),
    "L0_trt": _TENSORRT,
}
_REPEAT = "L0_decoupled/decoupled_test.py"
_GENERATE = "L0_http/generate_endpoint_test.py::GenerateEndpointTest"
_DELAYED = "sets a delay in the scheduler by an environment variable of Triton's own"
NOT_APPLICABLE |= {
    **dict.fromkeys(
        (f"{_REPEAT}::DecoupledTest::test_{name}" for name in ("one_", "response", "wrong")),
        "repeat_int32 and square_int32 are code of Triton's backends",
    ),
    **dict.fromkeys(
        (
            f"{_BATCHER}::BatcherTest::test_{name}"
            for name in ("multi_batch_delayed", "multi_batch_use", "preferred_batch_only")
        ),
        _DELAYED,
    ),
    f"{_BATCHER}::BatcherTest::test_multi_batch_different_shape_allow": "ragged batches are not "
    "implemented",
    f"{_REPEAT}::NonDecoupledTest": "repeat_int32 is code of one of Triton's backends",
    **dict.fromkeys(
        (
            f"{_GENERATE}::test_{name}"
            for name in ("0_dimension", "generate_stream", "parameters", "streaming")
        ),
        "asks the Python code of mock_llm for repetitions, delays, errors or other shapes",
    ),
    **dict.fromkeys(
        (
            f"{_PARAMETERS}::InferenceParametersTest::test_{name}"
            for name in ("headers", "grpc_header")
        ),
        "headers are not forwarded to models",
    ),
}
_SEQUENCES = dict.fromkeys(
    (
        *("L0_sequence_batcher", "L0_sequence_corrid_batcher", "L0_sequence_stress"),
        *("L0_dyna_sequence_batcher", "L0_dyna_implicit_state", "L0_implicit_state"),
        "L0_iterative_sequence",
    ),
    "sequence batching is not implemented",
)
NOT_APPLICABLE |= dict.fromkeys(("L0_perf", "L0_long"), "measures, and tests nothing")
NOT_APPLICABLE |= dict.fromkeys(("L0_java", "L0_simple_go", "L0_simple_nodejs"), "other languages")
_UNKNOWN = "no record is kept of what has gone from the disk: it is 'not found'"
_UNCACHED = "an ensemble is not cached: its answers would outlive the models of its steps"
_ECHO = "its model answers with its parameters, by Python code"
_MIX = "a request of other inputs or shapes ends no batch that waits: it waits for its own kind"
EXPECTED_FAILURES = {
    **_SEQUENCES,
    f"{_PARAMETERS}::InferenceParametersTest::test_params": _ECHO,
    f"{_LIFE}::LifeCycleTest::test_dynamic_model_load_unload": _UNKNOWN,
    f"{_LIFE}::LifeCycleTest::test_dynamic_version_load_unload": _UNKNOWN,
    f"{_BATCHER}::BatcherTest::test_multi_batch_different_shape": _MIX,
    f"{_BATCHER}::BatcherTest::test_multi_batch_preferred_different_shape": _MIX,
    f"{_CACHE}::EnsembleCacheTest::test_ensemble_top_level": _UNCACHED,
    f"{_CACHE}::EnsembleCacheTest::test_ensemble_all_models": _UNCACHED,
    f"{_CACHE}::EnsembleCacheTest::test_ensemble_cache_insertion": _UNCACHED,
    f"{_SIZE}::test_large_input_js": "128 MiB of JSON take longer than a test may",
    "L0_optional_input/optional_input_test.py::OptionalInputTest::test_": _MIX,
    "L0_infer_variable/infer_variable_test.py::InferVariableTest::test_raw_ooo": "TorchScript has "
    "no strings",
    "L0_infer_reshape/infer_reshape_test.py::InferReshapeTest::test_oo": "TorchScript has no "
    "strings",
    "L0_infer_reshape/infer_reshape_test.py::InferReshapeTest::test_ff": "asks models of TensorRT, "
    "too",
    f"{_SHM}::SharedMemoryTest::test_register_reserved_names": "names that only Triton's Python "
    "backend reserves",
    f"{_SHM}::SharedMemoryTest::test_large_shm": "its model is one of TensorRT or OpenVINO",
    f"{_HTTP}::test_negative_dimensions": "wants 500 for what the client does wrong; it is 400",
    f"{_HTTP}::test_repository_index_deeply_nested_json": "the nesting is refused before 'ready' "
    "is looked at",
    f"{_HTTP}::test_content_encoding_chunked_manually": "has both Content-Length and "
    "Transfer-Encoding, as smuggled requests have",
    f"{_SIZE}::test_json_dtype_size": "sends /generate a header that it does not have",
    f"{_SIZE}::test_default_limit_compressed": "a body of 1000 times its size is refused",
    f"{_SIZE}::test_large_input_compressed": "a body of 1000 times its size is refused",
    f"{_VALIDATION}::InputShapeTest::test_input_string": "names the other one of two wrong inputs",
    f"{_GRPC_AIO}::test_register_system_shared_memory": "wants INTERNAL for a region that is not "
    "there; it is INVALID_ARGUMENT",
    f"{_HTTP_AIO}::test_get_trace_settings": _TRACE,
    f"{_HTTP_AIO}::test_update_trace_settings": _TRACE,
    f"{_GRPC_AIO}::test_get_trace_settings": _TRACE,
    f"{_GRPC_AIO}::test_update_trace_settings": _TRACE,
    f"{_GRPC_AIO}::test_get_log_settings": "log settings come with logging",
    f"{_GRPC_AIO}::test_update_log_settings": "log settings come with logging",
}


def _suite(name: str, title: str, infers: bool) -> Suite:
    return Suite(
        name=name,
        title=title,
        sources=(SERVER,),
        requirements=REQUIREMENTS,
        run=partial(run, infers=infers),
        not_applicable=NOT_APPLICABLE,
        expected_failures=EXPECTED_FAILURES,
        declared=partial(declared, infers=infers),
    )


SUITE = _suite("triton-qa", "Triton 26.09's own tests (qa/)", False)
INFER = _suite("triton-infer", "Triton 26.09's tests of every datatype and shape", True)
