"""Gateways that Triton's tests (``qa/``) run against: models, flags and variables of each."""

from __future__ import annotations

import urllib.request
from collections.abc import Callable, Mapping
from typing import NamedTuple

from tests.peer_suites import triton_lifecycle as lifecycle
from tests.peer_suites import triton_repositories as models
from tests.peer_suites import triton_schedules as schedules
from tests.peer_suites.triton_repositories import Build
from tests.server import Gateway


class Stage(NamedTuple):
    """A gateway, and the tests that run against it.

    Attributes:
        file: below ``qa/``.
        models: fills the gateway's repository.
        flags: of the gateway.
        select: pytest's ``-k``.
        label: tells apart the runs of one file.
        alone: every test of this class has a gateway of its own, as in ``test.sh``.
        environment: of the tests; ``settings`` is the gateway's.
        changed: what differs from the set-up of ``test.sh``; a pass is then none.
        log: a file beside the test that the gateway's log goes to.
        says: texts of the log and their counts when the gateway has ended; -1: at least one. Of a
            ``test.sh``, this is the test.
        starts: the gateway does.
        before: ``test.sh`` does this to the gateway before its tests.
        seconds: the limit of each test; 0 is the usual one.

    ``{folder}`` is the test's and ``{server}`` that of Triton's files, in flags and variables.
    """

    file: str
    models: Build
    flags: tuple[str, ...] = ()
    select: str = ""
    label: str = ""
    environment: Mapping[str, str] = {}
    settings: Mapping[str, str] = {}
    alone: str = ""
    changed: str = ""
    log: str = ""
    says: tuple[tuple[str, int], ...] = ()
    starts: bool = True
    before: Callable[[Gateway], None] | None = None
    seconds: float = 0


def _plain_log(gateway: Gateway) -> None:
    """Have the log in the format that Triton's has at first; these gateways start with JSON."""
    url = f"http://{gateway.http}/v2/logging"
    with urllib.request.urlopen(url, b'{"log_format": "default"}'):
        pass


def _resources(*explicit: str) -> tuple[str, ...]:
    flags = (part for resource in explicit for part in ("--rate-limit-resource", resource))
    return ("--rate-limit", "execution_count", *flags)


def _too_few(count: int) -> str:
    """Without the name, whose quotes the log escapes."""
    return (
        f" is limited to {count} which will prevent scheduling of one or more model instances, the "
        "minimum required count is 4"
    )


_BOTH = " is present as both global and device-specific resource in the model configuration."
_SINGLE = "test_single_model and not batching"
_EXITS = ("--exit-on-error", "true")
_NO_GPU = "needs a GPU: its models' instances are KIND_GPU; it passes with KIND_CPU"
_PLANS = "needs TensorRT; it passes with models of ONNX under the names of TensorRT's"
_NO_BFLOATS = f"{_PLANS}, and without those that do not batch or are of BF16, which need a GPU"
#: No model of TensorRT takes strings.
_STRINGS = "ooo or oii or ooi or oio"
SHARED = ("--allow-client-shm", "true")
EXPLICIT = ("--model-control-mode", "explicit")
_THREE = {"BACKENDS": "onnx libtorch openvino"}
_INFER = {"BACKENDS": "onnx", "ENSEMBLES": "1", "BATCH": "1", "NOBATCH": "1"}
_SIZES = "L0_http/http_input_size_limit_test.py"
_VALIDATION = "L0_input_validation/input_validation_test.py"
_SHM, _NOT = "L0_shared_memory/shared_memory_test.py", "not disabled_by_default"
_VERTEX = {
    **{"AIP_MODE": "PREDICTION", "AIP_HEALTH_ROUTE": "/health", "AIP_PREDICT_ROUTE": "/predict"},
}
#: Of Triton's script ``serve``.
_SAGEMAKER = ("--allow-sagemaker", "true", *EXPLICIT, "--model-namespacing", "true")
_TRACED = tuple(
    flag
    for setting in ("triton,file=global_unittest.log", "level=TIMESTAMPS", "rate=1")
    for flag in ("--trace-config", setting)
)
_CLASSES = "L0_parameters/class_count_test.py"
_CACHE = "L0_response_cache/ensemble_cache_test.py"
_BATCHER, _ONNX = "L0_batcher/batcher_test.py", {"BACKENDS": "onnx"}
_LIFE = "L0_lifecycle/lifecycle_test.py"
_POLL = ("--model-control-mode", "poll", "--repository-poll-secs", "1")
_UNCACHED = (*EXPLICIT, "--load-model", "identity_cache_off")
_DECOUPLED = (*EXPLICIT, "--load-model", "async_execute_decouple")
_QUANTILES = "0.1:0.0.1,0.7:0.01,0.75:0.01"
_CUSTOM = ("--model-config-name", "custom")
_STRICT, _LENIENT = ("--strict-readiness", "true"), ("--strict-readiness", "false")
_LENIENTLY = (*EXPLICIT, *_LENIENT)
_TWO = ("--model-repository", "{folder}/models_0")
_RELOADED = (*_LENIENTLY, "--load-model", "identity_zero_1_int32")
_BY_GRPC = {"TRITONSERVER_USE_GRPC": "1"}
_TYPE_HTTP, _TYPE_GRPC = {"CLIENT_TYPE": "http"}, {"CLIENT_TYPE": "grpc"}
ON_CPU = "needs a GPU: its models' instances are KIND_GPU; it passes with KIND_CPU"
_STATUS = "L0_server_status/server_status_test.py"
_QUEUE = "L0_model_queue/model_queue_test.py"
_FOURS, _WAITING = "preferred_batch_size: [ 4, 8 ]", "max_queue_delay_microseconds: 10000000"
_POLICY = "allow_timeout_override: true default_timeout_microseconds: 11000000"
_PRIORITIES = f"""preferred_batch_size: [ 4, 8, 32 ] priority_levels: 2 default_priority_level: 2
default_queue_policy {{ timeout_action: DELAY {_POLICY} }}
priority_queue_policy {{ key: 2 value {{ timeout_action: REJECT {_POLICY} }} }}"""

#: Of lifecycle tests, what differs.
_LIFE_CHANGED = {
    **dict.fromkeys(
        (
            *("test_dynamic_model_load_unload", "test_dynamic_model_load_unload_disabled"),
            *("test_dynamic_model_modify", "test_dynamic_file_delete"),
            *("test_parse_error_modelfail", "test_parse_error_modelfail_nostrict"),
            "test_multiple_model_repository_control_startup_models",
            *("test_model_repository_index", "test_parse_error_model_no_version"),
        ),
        _PLANS,
    ),
}


def _load(*prefixes: str) -> tuple[str, ...]:
    """Flags that load these models of floats at start."""
    names = (f"{prefix}_float32_float32_float32" for prefix in prefixes)
    return tuple(flag for name in names for flag in ("--load-model", name))


def _cache_of(size: int) -> tuple[str, str]:
    return "--cache-config", f"local,size={size}"


STAGES = (
    Stage(
        *("L0_http/http_test.py", models.http, (*EXPLICIT, "--load-model", "*")),
        select="not loading_large",
    ),
    Stage("L0_http/python_http_aio_test.py", models.examples, SHARED),
    Stage("L0_http/http_client_plugin_test.py", models.examples),
    Stage(
        *("L0_http/http_restricted_api_test.py", models.examples),
        (
            *("--http-restricted-api", "model-repository:admin-key=admin-value"),
            *("--http-restricted-api", "inference,metadata:infer-key=infer-value"),
        ),
    ),
    Stage(_SIZES, models.sizes, select="not large_input", seconds=300),
    Stage(
        *(_SIZES, models.sizes, ("--http-max-input-size", str(2**27)), "large_input"),
        seconds=300,
    ),
    # Its own request has 120 seconds.
    Stage("L0_grpc/python_unit_test.py", models.grpc, select="GrpcTest", seconds=180),
    Stage(
        *("L0_grpc/python_unit_test.py", models.grpc_examples),
        (
            *("--grpc-restricted-protocol", "model-repository:admin-key=admin-value"),
            *("--grpc-restricted-protocol", "inference,health:infer-key=infer-value"),
        ),
        select="RestrictedProtocolTest",
    ),
    Stage(
        *("L0_grpc/grpc_client_plugin_test.py", models.own("L0_grpc/client_plugin_models")),
        ("--http-header-forward-pattern=.*", "--grpc-header-forward-pattern=.*"),
    ),
    Stage("L0_grpc/python_grpc_aio_test.py", models.grpc_examples, SHARED),
    Stage("L0_trace/trace_endpoint_test.py", models.examples, _TRACED),
    Stage("L0_logging/logging_endpoint_test.py", models.examples, before=_plain_log),
    Stage("L0_infer/infer_test.py", models.infer, environment=_INFER),
    Stage(
        *("L0_infer/infer_test.py", models.infer, SHARED),
        label="system shared memory",
        environment={**_INFER, "TEST_SYSTEM_SHARED_MEMORY": "1"},
    ),
    Stage("L0_infer_reshape/infer_reshape_test.py", models.reshape),
    Stage(
        *("L0_infer_variable/infer_variable_test.py", models.variable, (), f"not ({_STRINGS})"),
        changed=_PLANS,
    ),
    Stage("L0_infer_variable/infer_variable_test.py", models.variable, select=_STRINGS),
    Stage("L0_infer_zero/infer_zero_test.py", models.zero),
    Stage(_VALIDATION, models.own("L0_input_validation/models"), select="InputValTest"),
    Stage(_VALIDATION, models.shapes, SHARED, select="InputShapeTest"),
    Stage(_VALIDATION, models.nothing, EXPLICIT, select="ModelNameValidationTest"),
    *(
        Stage(
            *("L0_parameters/parameters_test.py", models.own("L0_parameters/model_repository")),
            tuple(f"--{port}-header-forward-pattern={pattern}" for port in ports),
            select=test,
        )
        for test, pattern, ports in (
            ("test_params", "", ()),
            ("test_headers and not reserved", "MY_HEADER.*", ("grpc", "http")),
            ("case_sensitive", "(?-i)MY_HEADER.*", ("grpc",)),
            ("test_headers_reserved_rejected", ".*", ("grpc", "http")),
        )
    ),
    Stage(_CLASSES, models.class_counts, label="http", environment={"CLIENT_TYPE": "http"}),
    Stage(_CLASSES, models.class_counts, label="grpc", environment={"CLIENT_TYPE": "grpc"}),
    Stage("L0_string_io/string_client_test.py", models.strings),
    Stage("L0_scalar_io/scalar_test.py", models.scalars),
    Stage(
        *("L0_optional_input/optional_input_test.py", models.own("L0_optional_input/models")),
        alone="::OptionalInputTest::",
    ),
    Stage("L0_output_name/output_name_test.py", models.output_names, changed=_PLANS),
    Stage("L0_libtorch_io_names/io_names_client.py", models.io_names),
    Stage("L0_libtorch_shared_weights/libtorch_shared_weights_test.py", models.shared_weights),
    Stage("L0_client_nobatch/client_test.py", models.status),
    Stage(
        *(_SHM, models.simple, SHARED, f"{_NOT} and not large_shm", "http", _TYPE_HTTP),
        alone="::SharedMemory",
    ),
    Stage(
        *(_SHM, models.simple, SHARED, f"{_NOT} and not large_shm", "grpc", _TYPE_GRPC),
        alone="::SharedMemory",
    ),
    *(
        Stage(_SHM, models.integers, SHARED, "large_shm", kind["CLIENT_TYPE"], {**_THREE, **kind})
        for kind in (_TYPE_HTTP, _TYPE_GRPC)
    ),
    Stage(_SHM, models.simple, (), "disabled_by_default", "http", {"CLIENT_TYPE": "http"}),
    Stage(_SHM, models.simple, (), "disabled_by_default", "grpc", {"CLIENT_TYPE": "grpc"}),
    Stage("L0_client_timeout/client_infer_timeout_test.py", models.own("L0_client_timeout/models")),
    Stage(
        *("L0_decoupled/decoupled_test.py", models.repeating),
        select="no_streaming",
        changed="needs the native code of repeat_int32; it passes with a decoupled echo",
    ),
    Stage(_CACHE, models.cached, (*EXPLICIT, *_cache_of(10840)), "not insertion", alone="::"),
    Stage(_CACHE, models.cached, (*EXPLICIT, *_cache_of(200)), "insertion_failure"),
    Stage("L0_batcher/queue_timeout_test.py", models.slow_queue),
    *(
        Stage(
            *(_BATCHER, build, (), "not different_shape"),
            environment=_ONNX,
            alone=f"::BatcherTest::test_{tests}",
        )
        for build in (models.batching, models.batching_shapes)
        for tests in (
            *("static_", "multi_same_", "multi_different_", "multi_batch_sum_", "multi_batch_gt_"),
            "multi_batch_not_",
        )
    ),
    *(
        Stage(
            *(_BATCHER, models.batching_shapes),
            environment=_ONNX,
            alone=f"::BatcherTest::test_{tests}",
        )
        for tests in ("multi_batch_different_shape", "multi_batch_preferred_")
    ),
    Stage(
        *(_BATCHER, models.batching_shapes, ()),
        environment=_ONNX,
        alone="::BatcherTest::test_multi_batch_not_preferred_different",
    ),
    *(
        Stage(
            *(_LIFE, build, flags, f"{test} and not {test}_"),
            changed=_LIFE_CHANGED.get(test, ""),
            seconds=900 if "stress" in test else 0,  # 65,536 loads and unloads
        )
        for test, build, flags in (
            ("test_parse_error_modelfail", lifecycle.two_of_them_broken, (*_TWO, *_STRICT)),
            (
                "test_parse_error_modelfail_nostrict",
                lifecycle.two_of_them_broken,
                (*_TWO, *_LENIENT),
            ),
            (
                "test_parse_error_no_model_config",
                *(lifecycle.unconfigured, (*_TWO, "--strict-model-config", "true")),
            ),
            ("test_init_error_modelfail", lifecycle.wrong_outputs, (*_TWO, *_STRICT)),
            ("test_parse_error_model_no_version", lifecycle.without_versions, _STRICT),
            ("test_parse_ignore_zero_prefixed_version", lifecycle.version_named("003"), ()),
            ("test_parse_ignore_non_intergral_version", lifecycle.version_named("abc"), ()),
            ("test_dynamic_model_load_unload", lifecycle.changing, _POLL),
            ("test_dynamic_model_load_unload_disabled", lifecycle.changing, ()),
            ("test_dynamic_version_load_unload", lifecycle.changing_versions, _POLL),
            ("test_dynamic_version_load_unload_disabled", lifecycle.changing_versions, ()),
            ("test_dynamic_model_modify", lifecycle.modified, _POLL),
            ("test_dynamic_file_delete", lifecycle.deleted, _POLL),
            ("test_multiple_model_repository_polling", lifecycle.two_repositories, (*_TWO, *_POLL)),
            (
                "test_multiple_model_repository_control",
                *(lifecycle.two_repositories, (*_TWO, *EXPLICIT)),
            ),
            (
                "test_multiple_model_repository_control_startup_models",
                *(
                    lifecycle.loaded_at_start,
                    (*_TWO, *_LENIENTLY, *_load("libtorch", "plan", "simple_onnx")),
                ),
            ),
            (
                "test_model_repository_index",
                *(
                    lifecycle.indexed,
                    (*_TWO, *_LENIENTLY, *_load("onnx", "plan", "simple_libtorch")),
                ),
            ),
            ("test_model_control", lifecycle.controlled, _LENIENTLY),
            ("test_model_control_fail", lifecycle.files_gone, _LENIENTLY),
            ("test_model_control_ensemble", lifecycle.controlled, _LENIENTLY),
            ("test_model_availability_on_reload", lifecycle.reloaded, _RELOADED),
            ("test_model_availability_on_reload_2", lifecycle.reloaded_by_policy, _RELOADED),
            ("test_model_availability_on_reload_3", lifecycle.reloaded_by_policy, _RELOADED),
            ("test_add_custom_config", lifecycle.custom_configured(False), (*_POLL, *_CUSTOM)),
            ("test_delete_custom_config", lifecycle.custom_configured(True), (*_POLL, *_CUSTOM)),
            ("test_config_override", lifecycle.overridden, EXPLICIT),
            ("test_file_override", lifecycle.files_overridden, (*EXPLICIT, *_load("onnx"))),
            (
                "test_file_override_security",
                *(lifecycle.files_overridden, (*EXPLICIT, *_load("onnx"))),
            ),
            ("test_shutdown_dynamic", lifecycle.slow, ()),
            ("test_shutdown_ensemble", lifecycle.slow, ()),
            ("test_concurrent_model_load_speedup", lifecycle.slow_to_load, EXPLICIT),
            ("test_concurrent_model_load_unload", lifecycle.loading, EXPLICIT),
            ("test_concurrent_same_model_load_unload_stress", lifecycle.stressed, EXPLICIT),
            (
                "test_model_config_overwite",
                *(lifecycle.slow_to_initialize(5), (*EXPLICIT, "--load-model", "identity_fp32")),
            ),
            (
                "test_concurrent_model_load",
                *(lifecycle.another_backend, ("--model-repository", "{folder}/models", *EXPLICIT)),
            ),
            (
                "test_concurrent_model_instance_load_speedup",
                *(lifecycle.slow_to_initialize(10), EXPLICIT),
            ),
            (
                "test_shutdown_while_background_unloading",
                *(lifecycle.slow_to_finalize, (*EXPLICIT, "--load-model", "identity_fp32")),
            ),
            (
                "test_shutdown_while_loading",
                *(lifecycle.slow_to_initialize(10, True), EXPLICIT),
            ),
        )
    ),
    *(
        Stage(_LIFE, build, _RELOADED, f"{test} and not {test}_", "grpc", _BY_GRPC)
        for test, build in (
            ("test_model_availability_on_reload", lifecycle.reloaded),
            ("test_model_availability_on_reload_2", lifecycle.reloaded_by_policy),
            ("test_model_availability_on_reload_3", lifecycle.reloaded_by_policy),
        )
    ),
    Stage(
        *(_LIFE, lifecycle.without_configurations, EXPLICIT, "instance_load_sanity"),
        environment={"PARALLEL_BACKENDS": "python onnx"},
    ),
    Stage(
        *(_LIFE, lifecycle.loading_each_version, (*EXPLICIT, "--load-model=*")),
        select="test_load_new_model_version",
        settings={"PYTHONDONTWRITEBYTECODE": "True"},
    ),
    Stage(
        *("L0_model_update/instance_update_test.py", lifecycle.with_instances),
        (*EXPLICIT, "--log-verbose", "2"),
        select="not instance_resource",
        environment={"MODEL_LOG_DIR": "{folder}", "RATE_LIMIT_MODE": "off"},
        settings={"MODEL_LOG_DIR": "{folder}", "PYTHONDONTWRITEBYTECODE": "True"},
        seconds=120,
    ),
    *(
        Stage(
            *("L0_simple_ensemble/ensemble_backpressure_test.py", schedules.decoupled_steps(*made)),
            select=tests,
            seconds=400,
        )
        for tests, *made in (
            ("BackpressureTest", "ensemble_backpressure_test_models", 425, 520),
            ("StepMaxQueueSizeTest", "max_queue_size_test_models", 153, 209),
            ("ParallelFailed", "parallel_failed_enqueue_test_models", 245, 375),
        )
    ),
    *(
        Stage(
            *("L0_rate_limiter/test.sh", schedules.rate_limited(**made), (*_EXITS, *limits)),
            label=label,
            changed=_NO_GPU,
            says=((text, -1),),
            starts=False,
        )
        for label, text, made, limits in (
            ("resource1:1", _too_few(1), {}, _resources("resource1:1")),
            ("resource1:3", _too_few(3), {}, _resources("resource1:3", "resource2:2")),
            ("resource1:10:10", _too_few(0), {}, _resources("resource1:10:10", "resource2:2")),
            ("conflict", _BOTH, {"conflict": True}, _resources()),
            (
                "resource1:3, instances",
                _too_few(3),
                {"instances": True},
                _resources("resource1:3", "resource2:2"),
            ),
        )
    ),
    *(
        Stage(
            *("L0_rate_limiter/rate_limiter_test.py", schedules.rate_limited(**made)),
            *(_resources(*limits), test),
            label=label,
            changed=_NO_GPU,
        )
        for test, label, made, limits in (
            ("limited_resource", "explicit", {}, ("resource1:4", "resource2:2")),
            ("limited_resource", "implicit", {}, ()),
            ("plenty_resource", "", {}, ("resource1:6", "resource2:2")),
            (_SINGLE, "limited", {"instances": True}, ()),
            (_SINGLE, "plenty", {"instances": True}, ("resource1:6", "resource2:2")),
        )
    ),
    *(
        Stage(
            *("L0_model_update/instance_update_test.py", lifecycle.with_instances),
            (*EXPLICIT, "--log-verbose", "2", *limits),
            select="instance_resource",
            label=mode,
            environment={"MODEL_LOG_DIR": "{folder}", "RATE_LIMIT_MODE": mode},
            settings={"MODEL_LOG_DIR": "{folder}", "PYTHONDONTWRITEBYTECODE": "True"},
            log=f"instance_update_test.rate_limit_{mode}.server.log",
        )
        for mode, limits in (
            ("execution_count", _resources()),
            ("execution_count_with_explicit_resource", _resources("R1:10")),
        )
    ),
    Stage(
        *(_LIFE, lifecycle.another_platform, (*EXPLICIT, *_load("simple"))),
        select="different_platform",
    ),
    Stage(
        *("L0_nan_inf/nan_inf_test.py", models.special_floats),
        changed="np.NINF of its model, which NumPy 2 does not have, is -np.inf",
    ),
    Stage("L0_initializer_as_input/test.py", models.own("L0_initializer_as_input/models")),
    *(
        Stage(_QUEUE, schedules.queue(batching, delayed), select=test)
        for test, batching, delayed in (
            ("max_queue_size", f"{_FOURS} default_queue_policy {{ max_queue_size: 8 }}", True),
            (
                "policy_delay",
                f"{_FOURS} {_WAITING} default_queue_policy {{ timeout_action: DELAY "
                "default_timeout_microseconds: 100000 }",
                False,
            ),
            (
                "policy_reject",
                f"{_FOURS} {_WAITING} default_queue_policy {{ "
                "default_timeout_microseconds: 100000 }",
                False,
            ),
            (
                "timeout_override",
                f"{_FOURS} {_WAITING} default_queue_policy {{ "
                "allow_timeout_override: true default_timeout_microseconds: 1000000 }",
                False,
            ),
            (
                "test_priority_levels",
                f"{_FOURS} {_WAITING} priority_levels: 2 default_priority_level: 2",
                False,
            ),
            (
                "max_priority_levels",
                f"{_FOURS} {_WAITING} priority_levels: {2**64 - 1} default_priority_level: {2**32}",
                False,
            ),
            ("priority_with_policy", f"{_PRIORITIES} {_WAITING}", False),
        )
    ),
    Stage(
        *("L0_request_cancellation/grpc_cancellation_test.py", schedules.slow_integers),
        alone="::GrpcCancellationTest::",
    ),
    Stage("L0_request_cancellation/scheduler_test.py", schedules.slow_batches),
    Stage(
        *("L0_grpc_state_cleanup/cleanup_test.py", schedules.slow_floats),
        select="not error_status",
        alone="::CleanUpTest::test_s",
    ),
    Stage(
        *("L0_grpc_state_cleanup/cleanup_test.py", schedules.slow_floats),
        ("--grpc-restricted-protocol=inference:infer-key=infer-value",),
        select="test_simple_infer_error_status or test_streaming_error_status",
    ),
    Stage(_STATUS, schedules.status, _POLL, "ServerMetadataTest", changed=_NO_BFLOATS),
    Stage(_STATUS, schedules.status_changed, _POLL, "ModelMetadataTest", changed=_NO_BFLOATS),
    Stage(
        *("L0_simple_ensemble/ensemble_test.py", schedules.ensembles, (), "not partial"),
        alone="::EnsembleTest::",
    ),
    Stage(
        *("L0_simple_ensemble/ensemble_test.py", schedules.ensembles, ("--log-verbose", "1")),
        select="partial",
    ),
    *(
        Stage(
            *("L0_metrics/metrics_config_test.py", schedules.counted),
            (*_UNCACHED, *(part for one in chosen for part in ("--metrics-config", one))),
            select=tests,
            environment={"SUMMARY_QUANTILES": _QUANTILES},
        )
        for tests, *chosen in (
            ("inf_counters_exist or missing and not inf_counters",),
            (
                "inf_counters_exist or inf_histograms_exist or summaries_missing or "
                "cache_counters_missing",
                "histogram_latencies=true",
            ),
            (
                "inf_counters_exist or inf_summaries_exist and not with_cache or "
                "cache_counters_missing or cache_summaries_missing",
                "summary_latencies=true",
            ),
            (
                "inf_counters_missing or inf_summaries_exist and not with_cache or "
                "cache_counters_missing or cache_summaries_missing",
                *("summary_latencies=true", "counter_latencies=false"),
            ),
            ("quantiles", "summary_latencies=true", f"summary_quantiles={_QUANTILES}"),
        )
    ),
    Stage(
        *("L0_metrics/metrics_config_test.py", schedules.counted),
        (
            *(*_cache_of(1048576), *EXPLICIT, "--load-model", "identity_cache_on"),
            *("--metrics-config", "summary_latencies=true"),
            *("--metrics-config", "counter_latencies=true"),
        ),
        select="cache_counters_exist or cache_summaries_exist or with_cache or inf_counters_exist",
    ),
    Stage(
        *("L0_metrics/metrics_config_test.py", schedules.one_model),
        select="namespace_off",
    ),
    *(
        Stage(
            *("L0_model_namespacing/test.py", models.namespaced(test)),
            (
                *(
                    "--model-repository",
                    "{folder}/test_dir/subadd_repo",
                    "--model-namespacing",
                    "true",
                ),
                *mode,
            ),
            f"{suite} and {test}",
            settings={"TRITON_QA_PYTHON_MODEL_DIR": "{folder}", "PYTHONDONTWRITEBYTECODE": "1"},
            environment={
                "NAMESPACE_TESTING_DIRCTORY": "{folder}/test_dir",
                "TRITON_QA_ROOT_DIR": "{folder}/..",
            },
        )
        for suite, mode in (
            ("ModelNamespacePoll", ("--model-control-mode", "poll", "--repository-poll-secs", "2")),
            ("ModelNamespaceExplicit", EXPLICIT),
        )
        for test in (
            "test_duplication",
            "test_dynamic_resolution",
            "test_ensemble_duplication",
            "test_no_duplication",
        )
    ),
    Stage("L0_metrics/cpu_metrics_test.py", schedules.torch_floats, changed=ON_CPU),
    Stage(
        *("L0_metrics/histogram_metrics_test.py", schedules.decoupled_ensemble),
        ("--metrics-config", "histogram_latencies=true"),
        select="ensemble_decoupled",
    ),
    *(
        Stage(
            *(f"L0_metrics/{file}_test.py", schedules.with_buckets),
            (*_DECOUPLED, "--metrics-config", f"histogram_latencies={shown}"),
            select=test,
            environment={"OVERRIDE_BUCKETS": "-1,0,1,2.5,+Inf"},
        )
        for file, test, shown in (
            ("histogram_metrics", "buckets_override", "true"),
            ("metrics_config", "histograms_missing", "false"),
        )
    ),
    Stage("L0_metrics/metrics_queue_size_test.py", schedules.pending),
    *(
        Stage(
            *(_SHM, schedules.slow_simple, SHARED, f"Unregister and {kind['CLIENT_TYPE']}"),
            environment=kind,
            alone="::",
            seconds=180,
        )
        for kind in (_TYPE_HTTP, _TYPE_GRPC)
    ),
    Stage(
        *("L0_http/http_request_many_chunks.py", models.simple),
        (*SHARED, "--log-verbose", "1", *EXPLICIT, "--load-model", "simple"),
        seconds=600,  # 101 million chunks
    ),
    Stage("L0_http/generate_endpoint_test.py", models.generating),
    *(
        Stage(
            *(f"L0_sagemaker/{file}.py", models.sagemaker),
            (*_SAGEMAKER, "--load-model", "sm_model"),
            settings={"SAGEMAKER_TRITON_DEFAULT_MODEL_NAME": "sm_model"},
            seconds=600,  # 101 million chunks
        )
        for file in ("sagemaker_test", "sagemaker_request_many_chunks")
    ),
    Stage(
        *("L0_sagemaker/sagemaker_multi_model_test.py", models.unpacked_archives),
        _SAGEMAKER,
        environment={"SAGEMAKER_MULTI_MODEL": "true"},
        settings={"SAGEMAKER_MULTI_MODEL": "true"},
    ),
    *(
        Stage(
            *(f"L0_sagemaker/sagemaker_{kind}_test.py", models.sagemaker),
            (*_SAGEMAKER, "--load-model", "mock_llm"),
            settings={
                "SAGEMAKER_TRITON_DEFAULT_MODEL_NAME": "mock_llm",
                "SAGEMAKER_TRITON_INFERENCE_TYPE": kind,
            },
        )
        for kind in ("generate", "generate_stream")
    ),
    Stage(
        *("L0_vertex_ai/vertex_ai_test.py", models.add_and_subtract(addsub="1", subadd="3")),
        ("--vertex-ai-default-model", "addsub"),
        environment=_VERTEX,
        settings=_VERTEX,
    ),
)
