"""Triton's own tests (``qa/``), each with the models and flags that its ``test.sh`` gives it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple
from unittest import mock

from tests.peer_suites import triton_examples, triton_models
from tests.peer_suites.suite import Bench, Outcome, Suite, Verdict, declared_tests
from tests.peer_suites.triton_examples import REQUIREMENTS
from tests.peer_suites.triton_models import SERVER

#: They take half of the time, and are a suite of their own.
_INFER_TESTS = "L0_infer"
Build = Callable[[Bench, Path], None]
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


# -- models ---------------------------------------------------------------------------------------


def _examples(bench: Bench, root: Path) -> None:
    shutil.copytree(triton_examples.repository(bench), root, dirs_exist_ok=True)


def _grpc_examples(bench: Bench, root: Path) -> None:
    _examples(bench, root)
    triton_models.renamed(root, "simple_dyna_sequence", "simple_string_dyna_sequence")


def _python(bench: Bench, root: Path, *names: str) -> None:
    triton_models.copy(bench.source(SERVER) / "qa" / "python_models", root, *names)


def _own(folder: str, *names: str) -> Build:
    """The repository beside the test."""

    def build(bench: Bench, root: Path) -> None:
        triton_models.copy(bench.source(SERVER) / "qa" / folder, root, *(names or ("*",)))

    return build


def _identity(bench: Bench) -> Path:
    return triton_models.generated(bench, "gen_qa_identity_models", "--onnx")


def _http(bench: Bench, root: Path) -> None:
    one, many = "onnx_zero_1_float32", "onnx_zero_1_object"
    names = (one, many, "onnx_zero_1_float16", "onnx_zero_3_float32")
    triton_models.copy(_identity(bench), root, *names)
    triton_models.renamed(root, many, f"{many}_1_element", ("-1", "1"))
    triton_models.renamed(
        *(root, one, f"{one}_queue"),
        append="dynamic_batching { max_queue_delay_microseconds: 1000000 "
        "preferred_batch_size: [ 8 ] default_queue_policy { max_queue_size: 1 } }",
    )
    triton_models.copy(bench.source(SERVER) / triton_models.EXAMPLES, root, "simple_identity")
    string = ("TYPE_STRING", "TYPE_INT64")
    triton_models.renamed(root, "simple_identity", "simple_identity_int64", string)


def _sizes(bench: Bench, root: Path) -> None:
    triton_models.copy(_identity(bench), root, "onnx_zero_1_float32")
    triton_models.copy(bench.source(SERVER) / triton_models.EXAMPLES, root, "simple_identity")


def _grpc(bench: Bench, root: Path) -> None:
    triton_models.copy(bench.source(SERVER) / triton_models.EXAMPLES, root, "simple")
    _python(bench, root, "string_identity")
    triton_models.edit(root, "string_identity", (r"dims: \[ 1 \]", "dims: [ -1 ]"))


def _torch(bench: Bench, root: Path, generator: str, *flags: str) -> None:
    """The generator's TorchScript models, beside the ONNX ones that are there already."""
    made = triton_models.generated(bench, generator, "--libtorch", *flags)
    triton_models.copy(made, root, "libtorch_*")


def _kinds(root: Path) -> None:
    for config in root.glob("onnx*/config.pbtxt"):
        config.write_text(config.read_text() + "\ninstance_group [ { kind: KIND_CPU }]\n")


def _infer(bench: Bench, root: Path) -> None:
    triton_models.copy(triton_models.generated(bench, "gen_qa_models", "--onnx"), root, "onnx_*")
    ensembles = triton_models.generated(bench, "gen_qa_models", "--ensemble")
    triton_models.copy(ensembles, root, "*_onnx_*", "nop_*")
    triton_models.copy(
        *(bench.source(SERVER) / "qa" / "ensemble_models", root),
        *("wrong_label_*", "label_override_*", "mix_type_*", "batch_to_*", "nobatch_to_*"),
        "mix_nobatch_*",
    )
    custom = bench.source(SERVER) / "qa" / "custom_models"
    triton_models.copy(custom, root, "custom_zero_1_float32")
    dims = r"dims: \[ 1 \]"
    triton_models.renamed(
        *(root, "custom_zero_1_float32", "custom_nobatch_zero_1_float32"),
        *(("max_batch_size: 1", "max_batch_size: 0"), (dims, "dims: [ -1, -1 ]")),
    )
    triton_models.edit(
        *(root, "custom_zero_1_float32"),
        *(("max_batch_size: 1", "max_batch_size: 8"), (dims, "dims: [ -1 ]")),
    )
    _kinds(root)


def _reshape(bench: Bench, root: Path) -> None:
    onnx = triton_models.generated(bench, "gen_qa_reshape_models", "--onnx", "--variable")
    ensembles = triton_models.generated(bench, "gen_qa_reshape_models", "--ensemble")
    triton_models.copy(onnx, root, "*")
    _torch(bench, root, "gen_qa_reshape_models", "--variable")
    triton_models.copy(ensembles, root, "*")
    for folder in sorted(root.glob("onnx_*")):
        new = folder.name.replace("onnx_", "custom_")
        platform = (r"^platform:.*", 'backend: "fake"')
        triton_models.renamed(root, folder.name, new, platform)


def _variable(bench: Bench, root: Path) -> None:
    onnx = triton_models.generated(bench, "gen_qa_models", "--onnx", "--variable")
    ensembles = triton_models.generated(bench, "gen_qa_models", "--ensemble", "--variable")
    triton_models.copy(onnx, root, "onnx_*")
    _torch(bench, root, "gen_qa_models", "--variable")
    triton_models.copy(ensembles, root, "*_onnx_*", "*_libtorch_*", "nop_*")
    _kinds(root)


def _zero(bench: Bench, root: Path) -> None:
    triton_models.copy(_identity(bench), root, "*")
    _torch(bench, root, "gen_qa_identity_models")
    ensembles = triton_models.generated(bench, "gen_qa_identity_models", "--ensemble")
    triton_models.copy(ensembles, root, "*")


def _class_counts(bench: Bench, root: Path) -> None:
    _python(bench, root, "identity_fp32")
    floats = ("TYPE_FP32", "TYPE_STRING")
    triton_models.renamed(root, "identity_fp32", "identity_bytes", floats)


def _shapes(bench: Bench, root: Path) -> None:
    """``pt_identity`` echoes; here it needs no TorchScript for that."""
    onnx = triton_models.generated(bench, "gen_qa_models", "--onnx")
    triton_models.copy(onnx, root, "onnx_object_int32_int32")
    _python(bench, root, "identity_fp32")
    (root / "identity_fp32").rename(root / "pt_identity")
    triton_models.edit(
        root, "pt_identity", ("identity_fp32", "pt_identity"), (r"dims: \[.*\]", "dims: [ 8 ]")
    )


def _nothing(bench: Bench, root: Path) -> None:
    """Models are loaded by the tests, or none is there."""


def _strings(bench: Bench, root: Path) -> None:
    triton_models.copy(_identity(bench), root, "onnx_zero_1_object")
    _python(bench, root, "string_identity")
    triton_models.edit(root, "string_identity", (r"\[ 1 \]", "[ 8 ]"))


def _scalars(bench: Bench, root: Path) -> None:
    triton_models.copy(triton_models.generated(bench, "gen_qa_ort_scalar_models"), root, "*")


def _output_names(bench: Bench, root: Path) -> None:
    onnx = "onnx_nobatch_zero_1_float32"
    triton_models.copy(_identity(bench), root, onnx)
    for platform in ("libtorch", "plan"):  # the test is of names alone
        triton_models.renamed(root, onnx, onnx.replace("onnx", platform))


def _status(bench: Bench, root: Path) -> None:
    triton_models.copy(triton_models.generated(bench, "gen_qa_models", "--onnx"), root, "*")


def _simple(bench: Bench, root: Path) -> None:
    triton_models.copy(bench.source(SERVER) / triton_models.EXAMPLES, root, "simple")


def _add_and_subtract(*names: str) -> Build:
    def build(bench: Bench, root: Path) -> None:
        name = "onnx_int32_int32_int32"
        onnx = triton_models.generated(bench, "gen_qa_models", "--onnx")
        triton_models.copy(onnx, root, name)
        for version in ("2", "3"):
            shutil.rmtree(root / name / version)
        for new in names:
            triton_models.renamed(root, name, new)
        (root / name).rename(root.parent / f"{root.name}.unused")

    return build


# -- stages ---------------------------------------------------------------------------------------

_SHARED = ("--allow-client-shm", "true")
_EXPLICIT = ("--model-control-mode", "explicit")
_INFER = {"BACKENDS": "onnx", "ENSEMBLES": "1", "BATCH": "1", "NOBATCH": "1"}
_SIZES = "L0_http/http_input_size_limit_test.py"
_VALIDATION = "L0_input_validation/input_validation_test.py"
_SHM, _NOT = "L0_shared_memory/shared_memory_test.py", "not disabled_by_default"
_VERTEX = {"AIP_HEALTH_ROUTE": "/health", "AIP_PREDICT_ROUTE": "/predict"}
_CLASSES = "L0_parameters/class_count_test.py"

STAGES = (
    Stage("L0_http/http_test.py", _http, (*_EXPLICIT, "--load-model", "*")),
    Stage("L0_http/python_http_aio_test.py", _examples, _SHARED),
    Stage("L0_http/http_client_plugin_test.py", _examples),
    Stage(_SIZES, _sizes, select="not large_input"),
    Stage(_SIZES, _sizes, ("--http-max-input-size", str(2**27)), select="large_input"),
    Stage("L0_grpc/python_unit_test.py", _grpc, select="GrpcTest"),
    Stage("L0_grpc/python_grpc_aio_test.py", _grpc_examples, _SHARED),
    Stage("L0_infer/infer_test.py", _infer, environment=_INFER),
    Stage(
        *("L0_infer/infer_test.py", _infer, _SHARED),
        label="system shared memory",
        environment={**_INFER, "TEST_SYSTEM_SHARED_MEMORY": "1"},
    ),
    Stage("L0_infer_reshape/infer_reshape_test.py", _reshape),
    Stage("L0_infer_variable/infer_variable_test.py", _variable),
    Stage("L0_infer_zero/infer_zero_test.py", _zero),
    Stage(_VALIDATION, _own("L0_input_validation/models"), select="InputValTest"),
    Stage(_VALIDATION, _shapes, _SHARED, select="InputShapeTest"),
    Stage(_VALIDATION, _nothing, _EXPLICIT, select="ModelNameValidationTest"),
    Stage(_CLASSES, _class_counts, label="http", environment={"CLIENT_TYPE": "http"}),
    Stage(_CLASSES, _class_counts, label="grpc", environment={"CLIENT_TYPE": "grpc"}),
    Stage("L0_string_io/string_client_test.py", _strings),
    Stage("L0_scalar_io/scalar_test.py", _scalars),
    Stage(
        *("L0_optional_input/optional_input_test.py", _own("L0_optional_input/models")),
        alone="::OptionalInputTest::",
    ),
    Stage("L0_output_name/output_name_test.py", _output_names),
    Stage("L0_client_nobatch/client_test.py", _status),
    Stage(_SHM, _simple, _SHARED, _NOT, "http", {"CLIENT_TYPE": "http"}, alone="::SharedMemory"),
    Stage(_SHM, _simple, _SHARED, _NOT, "grpc", {"CLIENT_TYPE": "grpc"}, alone="::SharedMemory"),
    Stage(_SHM, _simple, (), "disabled_by_default", "http", {"CLIENT_TYPE": "http"}),
    Stage(_SHM, _simple, (), "disabled_by_default", "grpc", {"CLIENT_TYPE": "grpc"}),
    Stage("L0_client_timeout/client_infer_timeout_test.py", _own("L0_client_timeout/models")),
    Stage(
        *("L0_sagemaker/sagemaker_test.py", _add_and_subtract("sm_model")),
        ("--http-port", "8080", "--allow-sagemaker", "true"),
        settings={"SAGEMAKER_TRITON_DEFAULT_MODEL_NAME": "sm_model"},
    ),
    Stage(
        *("L0_vertex_ai/vertex_ai_test.py", _add_and_subtract("addsub", "subadd")),
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
_LABELS = "an ensemble's outputs do not take the labels of its steps' models"
_MIX = "a request of other inputs ends no batch that waits: it waits for its own kind"
EXPECTED_FAILURES = {
    **_SEQUENCES,
    "L0_infer/infer_test.py::InferTest::test_class": _LABELS,
    "L0_infer/infer_test.py::InferTest::test_mix": _LABELS,
    f"{_SIZE}::test_large_input_js": "128 MiB of JSON take longer than a test may",
    "L0_optional_input/optional_input_test.py::OptionalInputTest::test_": _MIX,
    "L0_infer_variable/infer_variable_test.py::InferVariableTest::test_raw_ooo": "TorchScript has "
    "no strings",
    "L0_infer_reshape/infer_reshape_test.py::InferReshapeTest::test_oo": "TorchScript has no "
    "strings",
    "L0_client_timeout/client_infer_timeout_test.py::ClientInferTimeoutTest::test_grpc": "the "
    "gateway's own text may come before the client's",
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
