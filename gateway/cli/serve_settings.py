"""The settings of ``modelport serve``: option values, checked one by one and against each other."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from modelport.gateway.backend_registry import PYTHON
from modelport.gateway.cli.record_settings import record_settings
from modelport.gateway.errors import InvalidArgument
from modelport.gateway.repository import standalone_model
from modelport.gateway.repository.scan import is_model_name
from modelport.gateway.repository.storage.location import Location, Repository, is_url
from modelport.gateway.settings import (
    GROUPS,
    SAGEMAKER_TYPES,
    AccessLogSettings,
    AspiredVersionPolicy,
    HeaderRules,
    LogFormat,
    MetricsChoice,
    ModelControlMode,
    PythonModels,
    Restriction,
    Settings,
    TlsFiles,
    VertexAi,
    is_loopback,
    requires_certificates,
)
from modelport.gateway.telemetry import trace_settings

if TYPE_CHECKING:
    from modelport.gateway.repository.signing_keys import PublicKey


#: The port of SageMaker and Vertex AI; a container of SageMaker has one of the variables.
PLATFORM_PORT = 8080
SAGEMAKER_VARIABLES = ("SAGEMAKER_TRITON_DEFAULT_MODEL_NAME", "SAGEMAKER_MULTI_MODEL")
#: Values of ``--rate-limit``.
RATE_LIMITS = ("off", "execution_count")


class FiniteSeconds(click.FloatRange):
    """A finite number of seconds; click's bounds accept ``nan`` and ``inf``."""

    def convert(self, value: Any, param: Any, ctx: Any) -> float:
        seconds = float(super().convert(value, param, ctx))
        if not math.isfinite(seconds):
            self.fail(f"{value} is not a number of seconds", param, ctx)
        return seconds


def cache_sizes(ctx: Any, param: Any, values: tuple[str, ...]) -> tuple[int, ...]:
    """Parse Triton's ``<cache>,<setting>=<value>``; ``local`` has one setting, ``size``."""
    sizes = []
    for value in values:
        cache, _, setting = value.partition(",")
        key, _, size = setting.partition("=")
        if cache != "local":
            raise click.BadParameter(f"there is no cache '{cache}'; use local,size=BYTES")
        digits = size.lstrip("0")
        if key != "size" or not (digits.isascii() and digits.isdigit() and len(digits) <= 18):
            raise click.BadParameter(f"'{setting}' is not size=BYTES with a number above 0")
        sizes.append(int(digits))
    return tuple(sizes)


def rate_limit_resources(
    ctx: Any, param: Any, values: tuple[str, ...]
) -> dict[tuple[str, int | None], int]:
    """Parse Triton's ``NAME:COUNT[:DEVICE]``; as in Triton, the largest of several counts holds."""
    found: dict[tuple[str, int | None], int] = {}
    for value in values:
        match = re.fullmatch(r"([^:]+):(\d{1,9})(?::(\d{1,9}))?", value, re.ASCII)
        if match is None:
            raise click.BadParameter(
                f"'{value}' is not NAME:COUNT or NAME:COUNT:DEVICE, such as memory:4"
            )
        resource = match[1], int(match[3]) if match[3] else None
        found[resource] = max(int(match[2]), found.get(resource, 0))
    return found


def _rate_limits(
    mode: str, resources: Mapping[tuple[str, int | None], int], workers: int
) -> Mapping[tuple[str, int | None], int] | None:
    if mode == RATE_LIMITS[0]:
        if resources:
            raise click.UsageError(
                "--rate-limit-resource needs --rate-limit=execution_count as well"
            )
        return None
    if workers > 1:
        raise click.UsageError(
            "--rate-limit limits the executions of one process; use it with --workers 1"
        )
    return resources


def restrictions(ctx: Any, param: Any, values: tuple[str, ...]) -> dict[str, Restriction]:
    """Parse Triton's ``GROUP,…:KEY=VALUE``; over gRPC the field has a prefix."""
    kind = "protocol" if param.name == "grpc_restricted" else "api"
    prefix = "triton-grpc-protocol-" if kind == "protocol" else ""
    found: dict[str, Restriction] = {}
    for text in values:
        groups, colon, field = text.partition(":")
        key, equals, value = field.partition("=")
        if not (colon and equals and re.fullmatch(r"[\w!#$%&'*+.^`|~-]+", key, re.ASCII) and value):
            raise click.BadParameter(f"'{text}' is not GROUPS:KEY=VALUE, such as health:key=value")
        for group in groups.split(","):
            if group not in GROUPS:
                known = ", ".join(GROUPS)
                raise click.BadParameter(f"unknown restricted {kind} '{group}'; use: {known}")
            if group in found:
                raise click.BadParameter(
                    f"restricted {kind} '{group}' can not be specified in multiple config groups"
                )
            found[group] = Restriction((prefix + key).lower(), value)
    return found


def metrics_choice(ctx: Any, param: Any, values: tuple[str, ...]) -> MetricsChoice:
    """Parse Triton's ``SETTING=VALUE``; of a quantile, the error that it may have is not read."""
    given: dict[str, Any] = {}
    for text in values:
        setting, _, value = text.partition("=")
        if setting == "summary_quantiles":
            given[setting] = tuple(_quantile(part) for part in value.split(","))
        elif setting not in MetricsChoice._fields:
            known = ", ".join(MetricsChoice._fields)
            raise click.BadParameter(f"there is no setting '{setting}'; use one of: {known}")
        elif value not in ("true", "false"):
            raise click.BadParameter(f"'{text}': the value is not true or false")
        else:
            given[setting] = value == "true"
    return MetricsChoice(**given)


def _quantile(text: str) -> float:
    found = re.fullmatch(r"(0(?:\.\d+)?|1(?:\.0+)?):[0-9.]+", text, re.ASCII)
    if found is None:
        raise click.BadParameter(
            f"'{text}' is not QUANTILE:ERROR with two numbers from 0 to 1, such as 0.99:0.001"
        )
    return float(found[1])


def header_pattern(ctx: Any, param: Any, value: str | None) -> re.Pattern[str] | None:
    """Compile a pattern of names; as in Triton, only one that begins with ``(?-i)`` minds case."""
    if value is None:
        return None
    sensitive = value.startswith("(?-i)")
    try:
        return re.compile(value.removeprefix("(?-i)"), re.NOFLAG if sensitive else re.IGNORECASE)
    except re.error as error:
        raise click.BadParameter(f"'{value}' is not a regular expression: {error}") from error


def file_mode(ctx: Any, param: Any, value: str) -> int:
    """Parse permissions in octal digits."""
    if re.fullmatch("0?[0-7]{3}", value, re.ASCII) is None:
        raise click.BadParameter(f"'{value}' is not three octal digits, such as 660")
    return int(value, 8)


def read_monitoring_config(ctx: Any, param: Any, value: str | None) -> str:
    from modelport.gateway.server.admin.metrics_port import prometheus_path

    return prometheus_path(Path(value)) if value else ""


def cache_size(configured: tuple[int, ...], deprecated: int | None) -> int:
    if len(configured) + (deprecated is not None) > 1:
        raise click.UsageError(
            "--cache-config and the deprecated --response-cache-byte-size set the same size; use "
            "one of them, once"
        )
    return configured[0] if configured else deprecated or 0


def on_vertex_ai() -> bool:
    return os.environ.get("AIP_MODE") == "PREDICTION"


def http_port() -> int | str:
    """The port that the platform's variables ask for, as in Triton's container; else the default.

    SageMaker and Vertex AI send requests to 8080 unless they say otherwise.
    """
    if on_vertex_ai():
        return os.environ.get("AIP_HTTP_PORT") or PLATFORM_PORT
    bound = os.environ.get("SAGEMAKER_BIND_TO_PORT")
    if bound or any(map(os.environ.get, SAGEMAKER_VARIABLES)):
        return bound or PLATFORM_PORT
    return Settings(model_repositories=()).http_port


def _sagemaker_type() -> str:
    """SageMaker's variable for the form of ``/invocations``."""
    variable = "SAGEMAKER_TRITON_INFERENCE_TYPE"
    value = os.environ.get(variable) or SAGEMAKER_TYPES[0]
    if value not in SAGEMAKER_TYPES:
        known = ", ".join(SAGEMAKER_TYPES)
        raise click.UsageError(f"{variable} is '{value}'; it must be one of: {known}")
    return value


def _sagemaker_models(control_mode: str, allowed: bool) -> str:
    """The folder of the models of a SageMaker multi-model endpoint; empty: this is none."""
    variable = "SAGEMAKER_MULTI_MODEL"
    wanted = allowed and os.environ.get(variable, "").lower() == "true"
    if wanted and control_mode != ModelControlMode.EXPLICIT:
        raise click.UsageError(
            f"{variable}=true loads and unloads models on request; give "
            "--model-control-mode=explicit"
        )
    folder = os.environ.get("SAGEMAKER_MODELS_FOLDER") or "/opt/ml/models"
    return os.path.normpath(folder) if wanted else ""


def _vertex_ai(default_model: str) -> VertexAi:
    """The routes in the environment that Vertex AI sets."""
    variables = ("AIP_PREDICT_ROUTE", "AIP_HEALTH_ROUTE")
    for variable in variables:
        if not os.environ.get(variable, "").startswith("/"):
            raise click.UsageError(
                f"Vertex AI's routes are enabled, but {variable} is not a path; set it, or use "
                "--allow-vertex-ai=false"
            )
    predict_route, health_route = (os.environ[variable] for variable in variables)
    return VertexAi(predict_route, health_route, default_model)


def _public_keys(files: Sequence[Path]) -> tuple[PublicKey, ...]:
    if not files:
        return ()
    from modelport.gateway.repository import signing_keys

    return tuple(signing_keys.load_public_key(file) for file in files)


def _check_repository(repository: Path | Location) -> None:
    if not isinstance(repository, Path):
        return
    if not repository.is_dir():
        raise click.UsageError(
            f"--model-repository '{repository}' is not a folder; 'modelport demo' or "
            "'modelport export' makes one"
        )
    if standalone_model.is_model(repository):
        raise click.UsageError(
            f"--model-repository '{repository}' is a model; pass its parent "
            f"'{repository.parent}', or serve it alone: modelport serve {repository}"
        )


class ServedPath(Repository):
    """An argument's value: the path of a repository or a model, and NAME of NAME=PATH or ''."""

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        if isinstance(value, tuple):  # converted already
            return value
        name, equals, path = str(value).partition("=")
        if not equals or is_url(value) or Path(value).exists():
            return "", super().convert(value, param, ctx)
        if not is_model_name(name):
            self.fail(f"'{name}' is not a model's name; write NAME=PATH", param, ctx)
        if is_url(path):
            self.fail(f"NAME=PATH names a single model, and '{path}' is a repository", param, ctx)
        return name, super().convert(path, param, ctx)


def _separate(
    paths: Sequence[tuple[str, Path | Location]], only_name: str | None
) -> tuple[tuple[Path | Location, ...], tuple[tuple[str, Path], ...]]:
    """Separate ``paths`` into repositories and single models, with their names."""
    repositories: list[Path | Location] = []
    models: dict[str, Path] = {}
    for name, path in paths:
        if isinstance(path, Path) and not path.exists():
            raise click.UsageError(f"'{path}' does not exist")
        if not isinstance(path, Path) or not standalone_model.is_model(path):
            if name or only_name:
                raise click.UsageError(f"'{path}' is a repository; only a single model has a name")
            if isinstance(path, Path):
                _check_folders(path)
            repositories.append(path)
            continue
        name = name or only_name or ""
        for each in _names(path, name):
            if each in models and models[each].resolve() != path.resolve():
                raise click.UsageError(
                    f"'{models[each]}' and '{path}' are both named '{each}'; name them: NAME=PATH"
                )
            models[each] = path
    if only_name is not None and len(models) != 1:
        raise click.UsageError("--name needs one PATH; name several models with NAME=PATH")
    if only_name is not None and not is_model_name(only_name):
        raise click.UsageError(f"--name '{only_name}' is not a model's name")
    return tuple(repositories), tuple(models.items())


def _names(path: Path, name: str) -> list[str]:
    """The names of the models in ``path``; a single one may have been given ``name``."""
    if standalone_model.check(path) is not PYTHON:
        return [name or standalone_model.names_of(path)[0]]
    found = standalone_model.names_of(path)
    if name and len(found) > 1:
        raise click.UsageError(
            f"'{path}' declares the models {', '.join(found)}, which have their names in the file; "
            f"pass it without '{name}'"
        )
    return [name] if name else found


def _check_python(options: Mapping[str, Any], signed: bool) -> None:
    """Raise if a Python file is to be served and Python models are not allowed."""
    for _, path in options["models"]:
        if not options["allow_python"] and not signed and standalone_model.check(path) is PYTHON:
            raise click.UsageError(
                f"'{path}' is Python code, which can do anything; give --allow-python to serve it"
            )


def _check_backends(directory: Path, allowed: bool) -> None:
    """Raise if Python-based backends cannot be used, or may not."""
    if not directory.is_dir():
        raise click.UsageError(
            f"--backend-directory '{directory}' is not a folder; name the one with NAME/model.py"
        )
    if not allowed:
        raise click.UsageError(
            "--backend-directory has backends in Python, which can do anything; give "
            "--allow-python to serve their models"
        )


def _check_folders(repository: Path) -> None:
    """Raise if ``repository`` has files of models, and no folder that may be one."""
    entries = sorted(repository.iterdir())
    if any(map(Path.is_dir, entries)):
        return
    for file in filter(Path.is_file, entries):
        try:
            standalone_model.check(file)
        except InvalidArgument:
            continue
        raise click.UsageError(
            f"'{repository}' is not a model repository; serve its file: modelport serve {file}"
        )


def _check_listeners(options: Mapping[str, Any]) -> None:
    taken: dict[int, str] = {}
    for kind in ("http", "grpc", "metrics"):
        if not options[f"{kind}_address"]:  # a socket would listen on every interface
            raise click.UsageError(f"--{kind}-address is empty; 0.0.0.0 is every interface")
        port = options[f"{kind}_port"]
        if port in taken:
            raise click.UsageError(
                f"--{taken[port]}-port and --{kind}-port are both {port}; give them different ports"
            )
        if port:
            taken[port] = kind
    if options["http_socket"] is not None and options["http_socket"] == options["grpc_socket"]:
        raise click.UsageError("--http-socket and --grpc-socket are the same; give two paths")


def _tls_files(
    cert: Path | None, key: Path | None, client_ca: Path | None, client_auth: str | None
) -> TlsFiles | None:
    if client_auth is not None and client_ca is None:
        raise click.UsageError("--tls-client-auth needs --tls-client-ca FILE")
    if cert is None and key is None:
        if client_ca is not None:
            raise click.UsageError("--tls-client-ca needs --tls-cert FILE and --tls-key FILE")
        return None
    if cert is None or key is None:
        given, missing = (
            ("--tls-key", "--tls-cert") if cert is None else ("--tls-cert", "--tls-key")
        )
        raise click.UsageError(f"{given} needs {missing} FILE")
    return TlsFiles(cert, key, client_ca, client_auth != "optional")


def _check_metrics(options: Mapping[str, Any]) -> None:
    """Raise for quantiles of several processes, which nobody can add."""
    if options["metrics"].summary_latencies and options["workers"] > 1:
        raise click.UsageError(
            "--metrics-config summary_latencies=true needs --workers 1, because the quantiles of "
            "several processes cannot be added; use histogram_latencies"
        )


def _check_exposure(options: Mapping[str, Any], tls: TlsFiles | None) -> None:
    """Require access, mutual TLS or ``--insecure`` for addresses that other machines reach."""
    if options["access"] is not None or options["insecure"] or requires_certificates(tls):
        return
    for kind in ("http", "grpc", "metrics"):
        address = options[f"{kind}_address"]
        if not is_loopback(address):
            raise click.UsageError(
                f"--{kind}-address {address} lets everyone who can reach it use, load and unload "
                "models; limit it with --access FILE or --tls-client-ca FILE, or allow it with "
                "--insecure"
            )


def _check_model_config(options: Mapping[str, Any], model_control_mode: str) -> None:
    """Check TensorFlow Serving's file of models, and that it can be polled if it is to be."""
    name = options["model_config_name"]
    if name and not is_model_name(name):
        raise click.UsageError(f"--model-config-name '{name}' is not the name of a file")
    repositories = options["model_repositories"]
    if name and not (repositories and all(isinstance(each, Path) for each in repositories)):
        raise click.UsageError(
            "--model-config-name needs --model-repository FOLDER, and no object storage"
        )
    if options["model_config_file"] is not None:
        from modelport.gateway.repository import model_server_config

        model_server_config.read(options["model_config_file"])
    if not options["model_config_poll_seconds"]:
        return
    if options["model_config_file"] is None:
        raise click.UsageError(
            "--model-config-file-poll-wait-seconds needs --model-config-file FILE"
        )
    if model_control_mode != ModelControlMode.POLL:
        raise click.UsageError(
            "--model-config-file-poll-wait-seconds needs --model-control-mode poll"
        )


def _access_log(target: str | None, sample: float, slow_seconds: float) -> AccessLogSettings | None:
    made = AccessLogSettings(target or "", sample, slow_seconds)
    if target:
        return made
    if made != AccessLogSettings(""):
        raise click.UsageError(
            "--access-log-sample and --access-log-slow-secs need --access-log FILE"
        )
    return None


def settings_from(
    model_control_mode: str,
    aspired_version_policy: str,
    log_format: str,
    require_signature: tuple[Path, ...],
    routes_file: Path | None,
    allow_vertex_ai: bool,
    vertex_ai_default_model: str,
    tls_cert: Path | None,
    tls_key: Path | None,
    tls_client_ca: Path | None,
    tls_client_auth: str | None,
    python_max_seconds: float,
    python_max_memory: int,
    python_max_data: int,
    python_environments: Path | None,
    backend_directory: Path | None,
    access_log: str | None,
    access_log_sample: float,
    access_log_slow_seconds: float,
    trace_config: tuple[str, ...],
    **options: Any,
) -> Settings:
    """Check the options of ``serve`` against each other and make the settings."""
    if options["load_models"] and model_control_mode != ModelControlMode.EXPLICIT:
        raise click.UsageError("--load-model requires --model-control-mode=explicit as well")
    for repository in options["model_repositories"]:
        _check_repository(repository)
    repositories, options["models"] = _separate(options.pop("paths"), options.pop("name"))
    options["model_repositories"] += repositories
    _check_python(options, signed=bool(require_signature))
    if backend_directory is not None:
        _check_backends(backend_directory, options["allow_python"])
    _check_listeners(options)
    options["disable_auto_complete_config"] |= options.pop("strict_model_config")
    tls = _tls_files(tls_cert, tls_key, tls_client_ca, tls_client_auth)
    _check_exposure(options, tls)
    _check_metrics(options)
    if options["audit_log"] is not None and options["access"] is None:
        raise click.UsageError("--audit-log needs --access FILE")
    if options["audit_log_max_bytes"] is not None and options["audit_log"] in (None, "-"):
        raise click.UsageError("--audit-log-max-size needs --audit-log FILE")
    if options["access"] is not None:
        from modelport.gateway.access import access

        access.check(options["access"], tls)
    if options["rollout_webhook_secret"] is not None:
        from modelport.gateway.rollout import webhooks

        webhooks.check_secret(options["rollout_webhook_secret"])
    from modelport.gateway.repository import routes_file as routes

    found = routes.load(routes_file) if routes_file is not None else {}
    _check_model_config(options, model_control_mode)
    listed = options["models"] or options["model_config_file"]
    if not (options["model_repositories"] or listed or found):
        raise click.UsageError(
            "nothing to serve; pass a model's file, --model-repository, or --routes with models"
        )
    python_models = PythonModels(
        python_max_seconds or None, python_max_memory or None, python_max_data or None,
        python_environments, backends=backend_directory and backend_directory.resolve(),
    )  # fmt: skip
    # gRPC reads this on import; its failures are raised as exceptions anyway.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    # Child processes run other programs, so gRPC needs no fork handlers.
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
    record = record_settings(options)
    cache_bytes = cache_size(options.pop("cache_configs"), options.pop("cache_bytes"))
    rate_limits = _rate_limits(
        options.pop("rate_limit"), options.pop("rate_limit_resources"), options["workers"]
    )
    return Settings(
        cache_bytes=cache_bytes,
        rate_limits=rate_limits,
        record=record,
        model_control_mode=ModelControlMode(model_control_mode),
        aspired_version_policy=AspiredVersionPolicy(aspired_version_policy),
        log_format=LogFormat(log_format),
        require_signature=_public_keys(require_signature),
        python_models=python_models,
        traces=trace_settings.parse_config(trace_config),
        access_log=_access_log(access_log, access_log_sample, access_log_slow_seconds),
        tls=tls,
        http_headers=HeaderRules(options.pop("http_restricted"), options.pop("http_forwarded")),
        grpc_headers=HeaderRules(options.pop("grpc_restricted"), options.pop("grpc_forwarded")),
        routes=found,
        sagemaker_inference_type=_sagemaker_type(),
        sagemaker_models=_sagemaker_models(model_control_mode, options["allow_sagemaker"]),
        sagemaker_default_model=os.environ.get("SAGEMAKER_TRITON_DEFAULT_MODEL_NAME", ""),
        vertex_ai=_vertex_ai(vertex_ai_default_model) if allow_vertex_ai else None,
        **options,
    )
