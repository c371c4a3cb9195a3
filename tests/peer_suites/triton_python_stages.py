"""Gateways of Triton's tests of its Python backend, and what ``test.sh`` looks for in their log."""

from __future__ import annotations

import signal
import urllib.request
from collections.abc import Callable

import psutil

from tests.peer_suites import triton_python_models as models
from tests.peer_suites.triton_repositories import Build, own
from tests.peer_suites.triton_stages import EXPLICIT, SHARED, Stage
from tests.server import Gateway

_TESTS = "L0_backend_python"
_IO = f"{_TESTS}/io/io_test.py"
_READY = f"{_TESTS}/model_readiness/test_model_readiness.py"
_LOADED = ("--exit-on-error", "true")
#: At least one line; other numbers are exact.
_SOME = -1
_MESSAGES = ("Specific Msg!", "Info Msg!", "Warning Msg!", "Error Msg!")
_BLS_ONLY = "BLS is only supported during the 'execute' function."
_UNDEFINED = "name 'undefined_variable' is not defined"
_NO_GPU = "needs a GPU; it passes without the models and tests of one"


def _leak(
    build: Build,
    model: str,
    label: str = "",
    flags: tuple[str, ...] = (),
    changed: str = "",
    before: Callable[[Gateway], None] | None = None,
    **settings: str,
) -> Stage:
    """``test_infer_shm_leak.py`` asks ``model``, whose own tests run inside of it."""
    return Stage(
        *(f"{_TESTS}/test_infer_shm_leak.py", build, flags),
        label=label or model,
        environment={"MODEL_NAME": model, "PYTHONPATH": "{folder}/../common"},
        settings=settings,
        changed=changed,
        before=before,
        seconds=300,
    )


def _shell(folder: str, label: str, build: Build, says: str = "", **fields: object) -> Stage:
    """A look of ``test.sh`` at the gateway's log, after its end."""
    file = f"{_TESTS}/{folder}/test.sh".replace("//", "/")
    told = ((says, _SOME),) if says else ()
    return Stage(file, build, label=label, **{"says": told, **fields})  # type: ignore[arg-type]


def _fails(folder: str, label: str, build: Build, says: str, *flags: str) -> Stage:
    """A gateway that does not start, and its reason."""
    return _shell(folder, label, build, says, starts=False, flags=(*_LOADED, *flags))


def _posts(path: str, *bodies: bytes) -> Callable[[Gateway], None]:
    def post(gateway: Gateway) -> None:
        for body in bodies:
            with urllib.request.urlopen(f"http://{gateway.http}{path}", body):
                pass

    return post


def _kills_workers(number: int) -> Callable[[Gateway], None]:
    def kill(gateway: Gateway) -> None:
        for process in psutil.Process(gateway.process.pid).children():
            process.send_signal(number)

    return kill


_LOADS_BLS = _posts("/v2/repository/models/bls_model_loading/load", b"")
STAGES = (
    Stage(
        *(f"{_TESTS}/python_test.py", models.main, SHARED),
        settings={"TRITON_DIR": "{server}"},
    ),
    _shell("", "multi_file", models.multi_file, flags=_LOADED),
    _shell(
        "", "model_env", models.python("model_env"), flags=_LOADED, settings={"MY_ENV": "MY_ENV"}
    ),
    _fails(
        *("", "init_exit", models.python("init_exit")),
        "Stub process 'init_exit_0_0' is not healthy.",
    ),
    _fails("", "non_existent_model", models.without_code, "failed to load 'non_existent_model'"),
    Stage(f"{_TESTS}/ensemble/ensemble_test.py", models.ensemble),
    Stage(
        *(f"{_TESTS}/python_based_backends/python_based_backends_test.py", models.python_based),
        (*EXPLICIT, "--backend-directory", "{folder}/backends", "--log-verbose", "1"),
    ),
    *(
        _leak(models.bls, model, f"{model} {kind}", changed=_NO_GPU, BLS_KIND=kind)
        for kind in ("non_decoupled", "decoupled")
        for model in ("bls", "bls_memory", "bls_memory_async", "bls_async")
    ),
    _fails("bls", "bls_init_error", models.python("bls_init_error"), _BLS_ONLY),
    _shell("bls", "bls_finalize_error", models.python("bls_finalize_error"), _BLS_ONLY),
    _leak(
        models.bls_loading,
        "bls_model_loading",
        flags=EXPLICIT,
        before=_LOADS_BLS,
    ),
    _shell(
        *("bls", "bls_model_loading with a warm-up", models.bls_warmup),
        flags=EXPLICIT,
        before=_LOADS_BLS,
    ),
    Stage(f"{_TESTS}/bls/bls_parameters_test.py", models.python("bls_parameters")),
    Stage(
        *(f"{_TESTS}/decoupled/decoupled_test.py", models.decoupled),
        log="decoupled_server.log",
        says=(
            *((text, _SOME) for text in _MESSAGES),
            *(("Finalize invoked", 3), ("Finalize complete...", 3)),
        ),
    ),
    Stage(
        *(f"{_TESTS}/response_sender/response_sender_test.py", models.response_sender),
        log="server.log",
    ),
    Stage(
        f"{_TESTS}/response_sender/response_sender_complete_final_test.py",
        models.python("response_sender_complete_final"),
        log="server.log",
    ),
    *(
        Stage(_IO, models.io(kind), select="ensemble_io", label=trial, environment={"TRIAL": trial})
        for trial, kind in (
            ("default", "dlpack_io_identity"),
            ("decoupled", "dlpack_io_identity_decoupled"),
        )
    ),
    Stage(_IO, models.python("dlpack_empty_output"), select="empty_gpu_output"),
    Stage(_IO, models.python("variable_gpu_output"), select="variable_gpu_output"),
    Stage(
        *(_IO, models.python("add_sub", "dlpack_io_identity_decoupled")),
        select="requested_output and not crash",
    ),
    Stage(_IO, models.requested_output, select="prior_crash"),
    Stage(
        f"{_TESTS}/async_execute/concurrency_test.py",
        models.python("async_execute_decouple", "async_execute_decouple_bls"),
        log="concurrency_test.server.log",
    ),
    Stage(
        *(f"{_TESTS}/lifecycle/lifecycle_test.py", models.lifecycle),
        log="lifecycle_server.log",
    ),
    _fails(
        *("lifecycle", "init_error", models.python("init_error")),
        "name 'lorem_ipsum' is not defined",
    ),
    _shell("lifecycle", "fini_error", models.python("fini_error"), _UNDEFINED),
    _fails("lifecycle", "auto_complete_error", models.auto_complete_error, _UNDEFINED),
    _leak(own(f"{_TESTS}/argument_validation/models"), "argument_validation"),
    Stage(
        *(f"{_TESTS}/logging/logging_test.py", models.python("identity_fp32_logging")),
        label="default",
        says=(*((text, 4) for text in _MESSAGES), ("Verbose Msg!", 0)),
    ),
    Stage(
        *(f"{_TESTS}/logging/logging_test.py", models.python("identity_fp32_logging")),
        label="verbose",
        before=_posts("/v2/logging", b'{"log_verbose_level": 1}'),
        says=(*((text, 4) for text in _MESSAGES), ("Verbose Msg!", 3)),
    ),
    Stage(
        *(f"{_TESTS}/logging/logging_test.py", models.python("identity_fp32_logging")),
        label="disabled",
        before=_posts(
            "/v2/logging",
            *(b'{"log_%b": false}' % word for word in (b"info", b"warning", b"error")),
        ),
        says=(*((text, 1) for text in _MESSAGES), ("Verbose Msg!", 0)),
    ),
    _leak(models.python("custom_metrics"), "custom_metrics"),
    Stage(
        f"{_TESTS}/parameters/response_parameters_test.py",
        models.python(
            "response_parameters", "response_parameters_decoupled", "response_parameters_bls"
        ),
    ),
    Stage(f"{_TESTS}/model_control/model_control_test.py", models.model_control, EXPLICIT),
    *(
        stage
        for name in ("11", "9")
        for stage in (
            Stage(
                *(_READY, models.python("identity_fp32")),
                select="test_model_ready",
                label=f"signal {name}",
            ),
            Stage(
                *(_READY, models.python("identity_fp32")),
                select="test_model_not_ready",
                label=f"signal {name}",
                before=_kills_workers(signal.Signals(int(name))),
            ),
        )
    ),
    Stage(
        *(_READY, models.readiness, ("--strict-readiness", "false")),
        select="TestUserDefinedModelReadinessFunction",
        seconds=300,
    ),
    _leak(
        models.python(
            *("bls_request_rescheduling", "request_rescheduling_addsub", "iterative_sequence"),
            "wrong_return_type",
        ),
        "bls_request_rescheduling",
        flags=(*EXPLICIT, "--load-model", "*"),
    ),
    Stage(
        f"{_TESTS}/request_rescheduling/grpc_endpoint_test.py",
        models.python(
            *("bls_request_rescheduling", "request_rescheduling_addsub", "iterative_sequence"),
            "wrong_return_type",
        ),
        (*EXPLICIT, "--load-model", "*"),
    ),
)
