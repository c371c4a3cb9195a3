"""Tests of Triton's ``qa/`` that do not apply, are not supported, or are known to fail, and why.

Keys are the ids of tests, or the beginnings of such ids; the longest one counts. One that ends in
``$`` is a whole id.
"""

from __future__ import annotations

_SIZE = "L0_http/http_input_size_limit_test.py::InferSizeLimitTest"
_HTTP = "L0_http/http_test.py::HttpTest"
_HTTP_AIO = "L0_http/python_http_aio_test.py::TestHttpAioClient"
_GRPC_AIO = "L0_grpc/python_grpc_aio_test.py::TestGrpcAioClient"
_GENERATE = "L0_http/generate_endpoint_test.py::GenerateEndpointTest"
_VALIDATION = "L0_input_validation/input_validation_test.py"
_SHM = "L0_shared_memory/shared_memory_test.py"
_PARAMETERS = "L0_parameters/parameters_test.py::InferenceParametersTest"
_BATCHER = "L0_batcher/batcher_test.py::BatcherTest"
_REPEAT = "L0_decoupled/decoupled_test.py"
_LIFE = "L0_lifecycle/lifecycle_test.py::LifeCycleTest"
_CLEANUP = "L0_grpc_state_cleanup/cleanup_test.py::CleanUpTest"
_CANCEL = "L0_request_cancellation/grpc_cancellation_test.py::GrpcCancellationTest"
_PYTHON_TEST = "L0_backend_python/python_test.py::PythonTest"
_DECOUPLED_PYTHON = "L0_backend_python/decoupled/decoupled_test.py::DecoupledTest"
_PY_LIFE = "L0_backend_python/lifecycle/lifecycle_test.py::LifecycleTest"
_READINESS = "L0_backend_python/model_readiness/test_model_readiness.py"
_SCHEDULERS = "L0_request_cancellation/scheduler_test.py::TestScheduler"
_QUEUE = "L0_model_queue/model_queue_test.py::ModelQueueTest"
_METRICS = "L0_metrics/metrics_config_test.py::MetricsConfigTest"
_SEQUENCE = "L0_sequence_batcher/sequence_batcher_test.py::SequenceBatcherTest"
_LIMITER = "L0_rate_limiter/rate_limiter_test.py::RateLimiterTest"
_ENSEMBLE = "L0_simple_ensemble/ensemble_test.py::EnsembleTest"


def _each(reason: str, prefix: str, *names: str) -> dict[str, str]:
    return dict.fromkeys((prefix + name for name in names), reason)


_NAME = "wants the server's name to be 'triton'"
_DELAYED = "a private setting: a delay by an environment variable of Triton's own tests"
_TENSORRT = "TensorRT"
_GPU = "GPU"
_CODE = "its model is native code"
_DATA = "needs models of NVIDIA's own repository, which are not public"
_LOG = "reads the texts of Triton's own log"

NOT_APPLICABLE = {
    f"{_HTTP_AIO}::test_get_server_metadata": _NAME,
    f"{_GRPC_AIO}::test_get_server_metadata": _NAME,
    f"{_GRPC_AIO}::test_register_cuda_shared_memory": f"{_GPU}: CUDA shared memory",
    f"{_VALIDATION}::InputShapeTest::test_wrong_input_shape_tensor_size": _TENSORRT,
    "L0_client_timeout/client_non_infer_timeout_test.py": _DELAYED,
    "L0_http/http_basic_auth_test.py": "tests nginx, which asks for the password",
    **_each(
        _GPU,
        "L0_model_update/instance_update_test.py::TestInstanceUpdate::test_",
        *("gpu_instance_update", "gpu_cpu_instance_update"),
    ),
    "L0_buffer_attributes": f"{_GPU}: CUDA shared memory",
    "L0_grpc/grpc_basic_auth_test.py": "tests nginx, which asks for the password",
    "common/": "helpers of other tests",
    **_each(
        f"{_GPU}: CUDA shared memory",
        *(f"{_PYTHON_TEST}::test_", "gpu_tensor_error", "dlpack_tensor_error"),
    ),
    "L0_backend_python/restart/restart_test.py": "its model reads memory of Triton's own workers",
    f"{_PYTHON_TEST}::test_growth_error": "fills the shared memory of Triton's own workers",
    "L0_backend_python/ensemble/ensemble_test.py::EnsembleTest::test_ensemble_gpu": _GPU,
    **_each(
        _GPU,
        *("L0_backend_python/io/io_test.py::IOTest::test_", "variable_gpu_output"),
        *("ensemble_io", "empty_gpu_output", "requested_output_decoupled$"),
    ),
    f"{_DECOUPLED_PYTHON}::test_decoupled_bls$": _GPU,
    **_each(
        _CODE,
        *(
            "L0_",
            "backend_bls",
            "backend_tutorial",
            "backend_config",
            "backend_identity",
            "backend_fastertransformer",
            "custom_ops",
        ),
        *("backend_output_detail", "query", "passive_instance", "register", "batch_custom"),
        *("triton_repo_agent", "repoagent_checksum", "async_work_queue", "response_statistics"),
    ),
    "L0_iterative_sequence": _CODE,
    "L0_python_api": "Triton's in-process API",
    **_each(
        _GPU,
        *("L0_", "cuda_graph", "cuda_shared_memory", "dlpack_multi_gpu", "compute"),
        *("device_memory_tracker", "parallel_copy", "pinned_memory", "libtorch_instance"),
        "metrics/pinned_memory_metrics_test.py",
    ),
    **_each(
        _TENSORRT,
        *("L0_infer_reshape/infer_reshape_test.py::InferReshapeTest::", "test_ff2", "test_ff4"),
    ),
    "L0_trt": _TENSORRT,
    "L0_backend_onnxruntime/test.py": f"{_GPU}: ONNX Runtime adds no BF16 on a CPU",
    **_each("measures, and tests nothing", "L0_", "perf", "long"),
    **_each("other languages", "L0_", "java", "simple_go", "simple_nodejs"),
    "L2_build_presets": "Triton's own build",
    "L0_pytorch_python_runtime": "tests the code of Triton's PyTorch backend",
    "L0_orca": f"{_TENSORRT}: TensorRT-LLM",
    "L0_memory": "looks for leaks of Triton's process by valgrind",
    "L0_storage_swiftstack": "wants a store of NVIDIA's own",
    "L0_logging/log_format_test.py": _LOG,
    "L0_server_status/server_status_test.py::ServerMetadataTest::test_basic": _NAME,
    "L0_server_status/server_status_test.py::ServerMetadataTest::test_unknown_model": _NAME,
    **_each(_CODE, f"{_REPEAT}::DecoupledTest::test_", "one_", "response", "wrong"),
    f"{_REPEAT}::NonDecoupledTest": _CODE,
    **_each(_CODE, f"{_CLEANUP}::test_", "decoupled", "non_decoupled"),
    **_each(
        _DELAYED,
        *(f"{_BATCHER}::test_", "multi_batch_delayed", "multi_batch_use", "preferred_batch_only"),
        "multi_batch_preserve_ordering",
    ),
    **_each(
        _DELAYED,
        *(f"{_CANCEL}::test_grpc_async_infer_", "cancellation", "response_complete"),
    ),
    "L0_large_payload/large_payload_test.py::LargePayLoadTest::test_plan": _TENSORRT,
    "L0_large_payload": "sends 1.9 GB with the default --http-max-input-size, 64 MB, which L0_http "
    "wants refused; with a higher one they are served",
    "L0_output_validation": _DATA,
    f"{_LIFE}::test_parse_error_noexit": _NAME,
    f"{_LIFE}::test_model_reload_fail": f"{_GPU}: a kind of instance that fails to load",
    f"{_LIFE}::test_load_gpu_limit": _GPU,
    "L0_metrics/cpu_metrics_test.py::TestCpuMetrics::test_cpu_metrics_during_inference": f"{_GPU}: "
    "its model's instances are KIND_GPU",
    f"{_BATCHER}::test_max_queue_delay_only": f"{_GPU}: its models' instances are KIND_GPU",
    f"{_LIFE}::test_concurrent_model_instance_load_sanity": f"{_GPU}: one of its four models "
    "is ONNX of KIND_GPU; the others pass",
    f"{_METRICS}::test_pinned_memory_metrics_exist": f"{_GPU}: pinned memory",
    f"{_LIFE}::test_load_same_model_different_platform": f"{_TENSORRT}: the platform's name",
    "L0_server_status/server_status_test.py::ModelMetadataTest::test_infer_stats_no_model$": (
        _DATA
    ),
    "L0_server_status/server_status_test.py::ServerMetadataTest::test_model_latest_infer": (
        f"{_TENSORRT}: the platform's name"
    ),
    f"{_LIFE}::test_shutdown_with_live_connection": _LOG,
    f"{_LIFE}::test_load_new_model_version": _LOG,
    f"{_LIMITER}::test_single_model_dynamic_batching": _DELAYED,
    f"{_LIMITER}::test_single_model_sequence_batching": _CODE,
    **_each(
        _CODE,
        *("L0_", "sequence_stress", "dyna_implicit_state"),
        *("lifecycle/lifecycle_test.py::LifeCycleTest::test_shutdown_sequence",),
        "batcher/batcher_test.py::BatcherTest::test_multi_batch_different_shape_allow",
        "dyna_sequence_batcher/dyna_sequence_batcher_test.py::DynaSequenceBatcherTest"
        "::test_multi_sequence_different_shape_allow",
        "implicit_state/implicit_state.py::ImplicitStateTest::test_implicit",
        *(
            f"implicit_state/implicit_state.py::ImplicitStateTest::test_{name}"
            for name in ("no_implicit_state", "no_update", "wrong_implicit_state_name")
        ),
    ),
    "L0_request_cancellation/implicit_state_test.py": _DATA,
    **_each(
        _DELAYED,
        *(f"{_SEQUENCE}::test_", "backlog", "half_batch", "skip_batch", "full_batch", "ragged"),
        "queue_delay",
    ),
    "L0_sequence_corrid_batcher/sequence_corrid_batcher_test.py::SequenceCorrIDBatcherTest"
    "::test_skip_batch": _DELAYED,
}

#: Tests that apply, and that this project does not run yet.
NOT_RUN = {
    "L0_trace/opentelemetry_unittest.py::OpenTelemetryTest::test_trace_context_exposed": "it needs "
    "the program otelcol, which no package index has",
    f"{_HTTP}::test_loading_large_invalid_model": "its client needs 16 GB of memory; the gateway "
    "refuses the same 2.8 GB, and says so in other words",
    "L0_http_fuzz": "takes an hour; tests/attacks/test_fuzz.py fuzzes the same routes",
    "L0_mlflow": "MLflow takes a gigabyte; its tests of deployments pass by hand with MLflow 2.22, "
    "which refuses the names of test_model_name",
    "L0_torch_aoti": "its models take more than ten minutes to compile",
}

NOT_SUPPORTED = {
    f"{_METRICS}::test_model_namespacing_label_with_namespace_on": "wants the repositories to be "
    "below /opt/tritonserver/qa, by name; tests/conformance/test_namespaces.py has its label",
    **_each(
        "Triton's own spans and events (InferRequest, HTTP_RECV_START); the gateway's have the "
        "names of OpenTelemetry's conventions",
        "L0_trace/opentelemetry_unittest.py::OpenTelemetryTest::test_",
        *("custom", "grpc", "http", "non_decoupled", "sagemaker", "streaming"),
    ),
}

_ENDED = "requests on their way when the signal comes are answered, or refused with a message"
EXPECTED_FAILURES = {
    "L0_backend_python/bls/test.sh [bls_model_loading with a warm-up]": "its warm-up has inputs "
    "that the model does not declare, which fails its load",
    "L0_backend_python/model_control/model_control_test.py::ModelIDValidationTest"
    "::test_valid_model_names": "code in a load request runs only with --access, as anybody may "
    "send it",
    "L0_backend_python/model_control/model_control_test.py::ModelIDValidationTest"
    "::test_invalid_character_model_names": "a name may have any printable characters: no shell "
    "reads it",
    "L0_model_update/instance_update_test.py::TestInstanceUpdate::test_instance_resource_decrease "
    "[execution_count]$": _LOG,
    f"{_READINESS}::TestModelReadiness::test_model_not_ready": "a killed worker has been started "
    "again before the test asks",
    "L0_backend_python/test_infer_shm_leak.py::TestInferShmLeak::test_shm_leak [custom_metrics]": ""
    "/metrics has the observations of a histogram when execute has returned",
    f"{_METRICS}::test_inf_histograms_missing": "the histogram is there without a choice, too",
    f"{_PARAMETERS}::test_headers$": "a field's value has no space at its end (RFC 9113, 8.2.1)",
    f"{_DECOUPLED_PYTHON}::test_decoupled_bls_ignore_cancel": "a call that has been cancelled has "
    "no further responses",
    "L0_backend_python/test_infer_shm_leak.py::TestInferShmLeak::test_shm_leak [bls non_decoupled]"
    "": "processes that a model forks cannot call models",
    **_each(
        "does not start, and its log says why in other words",
        *("L0_backend_python/test.sh::", "non_existent_model"),
    ),
    **_each(
        "version 1 is served although version 3 has no file: each version loads by itself, as in "
        "TensorFlow Serving",
        *(f"{_LIFE}::test_parse_error_", "modelfail"),
    ),
    f"{_LIFE}::test_multiple_model_repository_polling": "what serves stays when another repository "
    "gets a model of its name",
    f"{_LIFE}::test_shutdown_dynamic": _ENDED,
    f"{_LIFE}::test_shutdown_ensemble": _ENDED,
    **_each(_ENDED, f"{_CLEANUP}::test_", "simple_infer_shutdown", "streaming_infer_shutdown"),
    f"{_QUEUE}::test_policy_reject": "an ensemble's failure has the reason of its step, not OTHER",
    f"{_QUEUE}::test_priority_with_policy": "a batch of a "
    "preferred size is filled with any requests that make it up, so that fewer wait",
    f"{_HTTP}::test_negative_dimensions": "wants 500 for an error of the client; it is 400",
    f"{_HTTP}::test_repository_index_deeply_nested_json": "the nesting is refused before 'ready' "
    "is looked at",
    f"{_HTTP}::test_content_encoding_chunked_manually": "has both Content-Length and "
    "Transfer-Encoding, as smuggled requests have",
    f"{_VALIDATION}::InputShapeTest::test_input_string": "names the other one of two wrong inputs",
    "L0_sagemaker/sagemaker_request_many_chunks.py::SagemakerRequestManyChunksTest"
    "::test_chunked_at_max_chunks": "POST /models is TorchServe's without SAGEMAKER_MULTI_MODEL",
    "L0_http/http_request_many_chunks.py::HTTPRequestManyChunksTest"
    "::test_chunked_infer_over_max_chunks_reject_with_bounded_rss_growth": "the process grows by 2 "
    "MB in its first hundred requests, not by 1 MB, and then stays so",
}
