"""``modelport serve``: the command and its options."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, TypedDict

import click

from modelport.gateway.cli import option_sources
from modelport.gateway.cli.declared_options import declared_by, option
from modelport.gateway.cli.errors import OneLineCommand
from modelport.gateway.cli.paths import WrittenPath
from modelport.gateway.cli.record_settings import record_shares
from modelport.gateway.cli.serve_settings import (
    PLATFORM_PORT,
    RATE_LIMITS,
    FiniteSeconds,
    ServedPath,
    cache_sizes,
    file_mode,
    header_pattern,
    http_port,
    metrics_choice,
    on_vertex_ai,
    rate_limit_resources,
    read_monitoring_config,
    restrictions,
    settings_from,
)
from modelport.gateway.repository.storage.location import Repository
from modelport.gateway.runtime import collector
from modelport.gateway.settings import GROUPS, AccessLogSettings, RecordSettings, Settings

RECORD = RecordSettings(Path())
DEFAULTS = Settings(model_repositories=())
#: More processes than any machine needs.
MAX_WORKERS = 256
PORT = click.IntRange(0, 65535)

AnyPath = Path | str


class ServeOptions(TypedDict, total=False):
    """Options of ``modelport serve``, ``modelport.serve`` and ``modelport.Server``.

    Sizes are in bytes, times in seconds.
    """

    name: Annotated[str, "Name of the model in the only PATH.", option(metavar="NAME")]
    model_repository: Annotated[
        AnyPath | Sequence[AnyPath],
        "Folder of models, or s3://, gs:// or az://BUCKET/PREFIX. Repeatable.",
        Repository(),
        option("--model-store", "model_repositories"),
    ]
    repository_cache: Annotated[
        AnyPath,
        "Folder for copies of models in object storage.  [default: the user's cache folder]",
        WrittenPath(),
        option(metavar="DIR"),
    ]
    routes: Annotated[
        AnyPath,
        "File of models on other servers and their addresses: TOML or YAML.",
        option("routes_file", metavar="FILE"),
    ]
    model_control_mode: Annotated[
        str,
        "none: load all models at start; poll: poll the repository; explicit: load on request.",
    ]
    load_model: Annotated[
        str | Sequence[str],
        "A model to load at start with explicit control ('*': all). Repeatable.",
        option("load_models"),
    ]
    repository_poll_secs: Annotated[
        float,
        "Seconds between polls of the repository with poll control.",
        FiniteSeconds(min=0, min_open=True),
        option("repository_poll_seconds"),
    ]
    model_config_name: Annotated[
        str,
        "Configure models by configs/NAME.pbtxt of their folders, where there is one, in place of "
        "config.pbtxt. Folders of models only.",
        option(metavar="NAME", default=""),
    ]
    model_namespacing: Annotated[
        bool,
        "Serve models of the same name in several repositories: an ensemble calls those of its own "
        "repository.",
    ]
    disable_auto_complete_config: Annotated[
        bool,
        "Take nothing of a configuration from the model's file, or from auto_complete_config of a "
        "Python model: each model needs a config.pbtxt with its inputs and outputs.",
        option(is_flag=True),
    ]
    strict_model_config: Annotated[
        bool,
        "Deprecated, as in Triton: true is --disable-auto-complete-config.",
        option(default=False),
    ]
    model_config_file: Annotated[
        AnyPath,
        "File of models and their base paths, as in TensorFlow Serving.",
        option(metavar="FILE"),
    ]
    model_config_file_poll_wait_seconds: Annotated[
        float,
        "Seconds between readings of --model-config-file with poll control; 0: at start only.",
        FiniteSeconds(min=0),
        option("model_config_poll_seconds"),
    ]
    aspired_version_policy: Annotated[
        str,
        "Load new versions before unloading old ones, or unload old ones first.",
    ]
    model_load_retry_count: Annotated[
        int,
        "Retries of a failed load. Loads waiting for an unavailable server retry indefinitely.",
        click.IntRange(min=0),
    ]
    load_retry_interval_secs: Annotated[
        float,
        "Seconds between retries of a load.",
        FiniteSeconds(min=0),
        option("load_retry_interval_seconds"),
    ]
    model_load_timeout_secs: Annotated[
        float,
        "Time limit of a load, in seconds.",
        FiniteSeconds(min=0, min_open=True),
        option("model_load_timeout_seconds"),
    ]
    require_manifest: Annotated[bool, "Serve only versions with a manifest.", option(is_flag=True)]
    require_signature: Annotated[
        AnyPath | Sequence[AnyPath],
        "Serve only versions signed with this key (PEM file). Repeatable: any of the keys.",
        option(metavar="PUBKEY"),
    ]
    allow_native_code: Annotated[
        bool,
        "Serve unsigned versions that run native code (AOTInductor, custom operators and "
        "classes) or access files. By default only versions signed with a --require-signature "
        "key may.",
        option(is_flag=True),
    ]
    allow_python: Annotated[
        bool,
        "Serve unsigned Python models, which are code and can do anything, also those of load "
        "requests. By default only versions signed with a --require-signature key may be Python.",
        option(is_flag=True),
    ]
    python_max_seconds: Annotated[
        float,
        "Longest execution of a Python model, in seconds: its worker is ended then, and started "
        "again. 0: no limit.",
        FiniteSeconds(min=0),
        option(default=DEFAULTS.python_models.max_seconds),
    ]
    python_max_memory: Annotated[
        int,
        "Resident memory in bytes at which the worker of a Python model is ended, and started "
        "again. 0: no limit.",
        click.IntRange(min=0),
        option(default=0),
    ]
    python_max_data: Annotated[
        int,
        "RLIMIT_DATA of the worker of a Python model, in bytes: what it allocates beyond raises "
        "MemoryError. 0: no limit.",
        click.IntRange(min=0),
        option(default=0),
    ]
    python_environments: Annotated[
        AnyPath,
        "Folder of the environments that lock files of Python models pin ('modelport install').  "
        "[default: in the user's cache folder]",
        WrittenPath(),
        option(metavar="DIR"),
    ]
    backend_directory: Annotated[
        AnyPath,
        "Folder of Python-based backends: models of backend NAME run its NAME/model.py.",
        option(metavar="DIR"),
    ]
    strict_readiness: Annotated[
        bool,
        "Report ready only while every model has a version that serves.",
    ]
    exit_on_error: Annotated[
        bool,
        "Exit with status 1 if a model does not load at start; answer no request before.",
    ]
    http_address: Annotated[str, "Address to serve HTTP on."]
    http_port: Annotated[
        int,
        "Port to serve HTTP on.",
        PORT,
        option(
            default=http_port,
            show_default=f"{DEFAULTS.http_port}; on Vertex AI, AIP_HTTP_PORT or {PLATFORM_PORT}; "
            f"on SageMaker, SAGEMAKER_BIND_TO_PORT or {PLATFORM_PORT}",
        ),
    ]
    http_max_input_size: Annotated[
        int,
        "Largest HTTP request body or gRPC message in bytes, after decompression.",
        click.IntRange(min=1),
        option("http_max_input_bytes"),
    ]
    http_restricted_api: Annotated[
        str | Sequence[str],
        "Refuse these groups of the HTTP API, with commas between them, to requests without this "
        f"header field: {', '.join(GROUPS)}. Repeatable.",
        option("http_restricted", callback=restrictions, metavar="APIS:KEY=VALUE"),
    ]
    http_header_forward_pattern: Annotated[
        str,
        "Pass the header fields of HTTP requests to the model as parameters, if this regular "
        "expression matches in their names.",
        option("http_forwarded", callback=header_pattern, metavar="REGEX"),
    ]
    json_nan_as_null: Annotated[
        bool,
        "Write null for NaN and the infinities in JSON, in place of the tokens NaN and Infinity.",
        option(is_flag=True),
    ]
    allowed_host: Annotated[
        str | Sequence[str],
        "Host name of web pages that may load, unload and configure models; '*': any. Repeatable.",
        option("allowed_hosts", metavar="NAME"),
    ]
    max_request_memory: Annotated[
        int,
        "Memory for all requests and unread responses together, in bytes; a single connection "
        "may use half of it.",
        click.IntRange(min=1),
        option("max_request_memory_bytes", show_default="a quarter of the usable memory"),
    ]
    dialect: Annotated[
        str | Sequence[str],
        "Also serve this protocol of an installed package (modelport.dialects). Repeatable.",
        option("dialects", metavar="NAME"),
    ]
    allow_sagemaker: Annotated[
        bool,
        "Serve SageMaker's /invocations (SAGEMAKER_TRITON_DEFAULT_MODEL_NAME, "
        "SAGEMAKER_TRITON_INFERENCE_TYPE) and, with SAGEMAKER_MULTI_MODEL=true, its multi-model "
        "endpoint's /models.",
    ]
    allow_vertex_ai: Annotated[
        bool,
        "Serve Vertex AI's AIP_PREDICT_ROUTE and AIP_HEALTH_ROUTE.",
        bool,
        option(default=on_vertex_ai, show_default="true if AIP_MODE is PREDICTION"),
    ]
    vertex_ai_default_model: Annotated[
        str,
        "The model that answers Vertex AI requests.",
        option(default="", metavar="MODEL", show_default="the only one"),
    ]
    grpc_address: Annotated[str, "Address to serve gRPC on."]
    grpc_port: Annotated[int, "Port to serve gRPC on.", PORT]
    grpc_restricted_protocol: Annotated[
        str | Sequence[str],
        "As --http-restricted-api, for gRPC: the field is triton-grpc-protocol-KEY.",
        option("grpc_restricted", callback=restrictions, metavar="PROTOCOLS:KEY=VALUE"),
    ]
    grpc_header_forward_pattern: Annotated[
        str,
        "As --http-header-forward-pattern, for the metadata of gRPC calls.",
        option("grpc_forwarded", callback=header_pattern, metavar="REGEX"),
    ]
    metrics_address: Annotated[str, "Address to serve metrics, rollouts and the console on."]
    metrics_port: Annotated[int, "Port to serve metrics, rollouts and the console on.", PORT]
    allow_console: Annotated[
        bool | None,
        "Serve the console, a web page at /console, and the API that it uses on the metrics port.  "
        "[default: unless --insecure opens that port to everyone on the network]",
    ]
    metrics_config: Annotated[
        str | Sequence[str],
        "Publish latencies as counters (counter_latencies, true), as a histogram "
        "(histogram_latencies, true), as summaries (summary_latencies, false) of summary_quantiles "
        "(QUANTILE:ERROR,...). Repeatable.",
        option("metrics", callback=metrics_choice, metavar="SETTING=VALUE"),
    ]
    http_socket: Annotated[
        AnyPath,
        "Serve HTTP on a UNIX domain socket as well, in clear text.",
        option(metavar="PATH"),
    ]
    grpc_socket: Annotated[
        AnyPath,
        "Serve gRPC on a UNIX domain socket as well, in clear text (unix:PATH).",
        option(metavar="PATH"),
    ]
    socket_mode: Annotated[
        str,
        "Permissions of the socket files, in octal digits as for chmod.",
        option(metavar="MODE", default=f"{DEFAULTS.socket_mode:o}", callback=file_mode),
    ]
    tls_cert: Annotated[
        AnyPath,
        "Serve TLS 1.2 and 1.3 on all ports, with this certificate and its chain (PEM). The "
        "files are read again when they change.",
        option(metavar="FILE"),
    ]
    tls_key: Annotated[AnyPath, "The certificate's private key (PEM).", option(metavar="FILE")]
    tls_client_ca: Annotated[
        AnyPath,
        "Verify the certificates of clients with these authorities (PEM): mutual TLS.",
        option(metavar="FILE"),
    ]
    tls_client_auth: Annotated[
        str,
        "Refuse clients without a certificate, or accept them.",
        click.Choice(["required", "optional"]),
        option(show_default="required"),
    ]
    access: Annotated[
        AnyPath,
        "File of rules that authorize clients (access.toml), read again when it changes.",
        option(metavar="FILE"),
    ]
    audit_log: Annotated[
        str,
        "Append a line of JSON for each refusal and each control operation; '-' is stdout. "
        "Needs --access.",
        option(metavar="FILE"),
    ]
    audit_log_max_size: Annotated[
        int,
        "Size at which the audit log is renamed and a new one begun.",
        click.IntRange(4096),
        option("audit_log_max_bytes", metavar="BYTES"),
    ]
    access_log: Annotated[
        str,
        "Append a line of JSON for each request; '-' is stdout. Responses then have x-request-id.",
        option(metavar="FILE", default=None),
    ]
    access_log_sample: Annotated[
        float,
        "Share of the requests that have a line; failures and slow requests always have one.",
        click.FloatRange(0.0, 1.0),
        option(default=AccessLogSettings("").sample, metavar="SHARE"),
    ]
    access_log_slow_secs: Annotated[
        float,
        "Duration from which a request is slow, in seconds.",
        FiniteSeconds(min=0),
        option("access_log_slow_seconds", default=AccessLogSettings("").slow_seconds),
    ]
    record: Annotated[
        AnyPath,
        "Record inference requests and their answers as JSON Lines in this folder, or in s3://, "
        "gs:// or az://BUCKET/PREFIX.",
        Repository(),
        option(default=None),
    ]
    record_sample: Annotated[
        str | Sequence[str],
        "Share of the requests that are recorded, or of a model's.  [default: "
        f"{RECORD.sample}] Repeatable.",
        option("record_samples", callback=record_shares, metavar="[MODEL=]SHARE"),
    ]
    record_redact: Annotated[
        str | Sequence[str],
        "Leave out of records: a tensor by its name or MODEL/TENSOR, 'header:NAME' or 'caller'; "
        "'*' stands for any characters. Repeatable.",
        option(metavar="RULE"),
    ]
    record_hash: Annotated[
        str | Sequence[str],
        "Record a keyed hash in place of the value; needs --record-hash-key. Repeatable.",
        option(metavar="RULE"),
    ]
    record_hash_key: Annotated[
        AnyPath,
        "File with the key of these hashes, of 16 bytes or more.",
        option(metavar="FILE"),
    ]
    record_key: Annotated[
        AnyPath,
        "Encrypt records by AES-256-GCM with the key in this file; 'replay', 'drift' and 'records "
        "show' take it, too.",
        option(metavar="FILE"),
    ]
    record_header: Annotated[
        str | Sequence[str],
        "Record this header field of requests, too. Repeatable.",
        option("record_headers", metavar="NAME"),
    ]
    record_max_request_size: Annotated[
        int,
        "Size of a request with its answer and tensors that is still recorded.",
        click.IntRange(1024),
        option("record_max_request_bytes", default=RECORD.max_record_bytes, metavar="BYTES"),
    ]
    record_rotate_size: Annotated[
        int,
        "Size at which a file of records is complete.",
        click.IntRange(1024),
        option("record_rotate_bytes", default=RECORD.rotate_bytes, metavar="BYTES"),
    ]
    record_rotate_secs: Annotated[
        float,
        "Age at which it is complete, in seconds.",
        FiniteSeconds(min=1),
        option("record_rotate_seconds", default=RECORD.rotate_seconds),
    ]
    record_max_size: Annotated[
        int,
        "Size of all records in a folder; the oldest are deleted. Buckets have rules of their own.",
        click.IntRange(1024),
        option("record_max_bytes", default=RECORD.max_bytes, metavar="BYTES"),
    ]
    trace_config: Annotated[
        str | Sequence[str],
        "Traces, as in Triton: mode=triton|opentelemetry, level=TIMESTAMPS, rate=N, count=N, "
        "triton,file=FILE, opentelemetry,url=URL ... Repeatable.",
        option(metavar="[MODE,]SETTING=VALUE"),
    ]
    insecure: Annotated[
        bool,
        "Serve everyone on addresses other than loopback, without --access and client "
        "certificates.",
        option(is_flag=True),
    ]
    monitoring_config_file: Annotated[
        AnyPath,
        "As in TensorFlow Serving: prometheus_config { enable: true } adds metrics to HTTP.",
        option(
            "prometheus_path",
            type=str,
            callback=read_monitoring_config,
            metavar="FILE",
            default=None,
        ),
    ]
    rollout_webhook_secret: Annotated[
        AnyPath,
        "File with the secret that signs webhook calls of rollouts (x-modelport-signature-256).",
        option(metavar="FILE"),
    ]
    cache_config: Annotated[
        str | Sequence[str],
        "Cache for models with response_cache { enable: true }.  [default: no cache]",
        option("cache_configs", callback=cache_sizes, metavar="local,size=BYTES"),
    ]
    response_cache_byte_size: Annotated[
        int,
        "Deprecated, as in Triton: --cache-config local,size=BYTES.",
        click.IntRange(min=0),
        option("cache_bytes", default=None),
    ]
    rate_limit: Annotated[
        str,
        "execution_count: instances wait for the resources of their rate_limiter, and those of "
        "lower priority numbers run more often.",
        option("rate_limit", type=click.Choice(RATE_LIMITS), default=RATE_LIMITS[0]),
    ]
    rate_limit_resource: Annotated[
        str | Sequence[str],
        "Count of a resource for --rate-limit; others then have none. Repeatable.  [default: of "
        "each, the most that an instance needs]",
        option(
            "rate_limit_resources", callback=rate_limit_resources, metavar="NAME:COUNT[:DEVICE]"
        ),
    ]
    allow_client_shm: Annotated[
        bool,
        "Let clients on this machine pass tensors in system shared memory.",
    ]
    max_request_timeout_secs: Annotated[
        float,
        "Upper limit of every request's deadline, in seconds.  [default: no limit]",
        FiniteSeconds(min=0, min_open=True),
        option("max_request_timeout_seconds"),
    ]
    exit_timeout_secs: Annotated[
        float,
        "Seconds for requests in flight to finish after SIGTERM.",
        FiniteSeconds(min=0),
        option("exit_timeout_seconds"),
    ]


class ProcessOptions(TypedDict, total=False):
    """Options of the command that concern its process; in Python it belongs to the caller."""

    workers: Annotated[
        int,
        "Processes that share the ports, each serving every model; at most one per core.",
        click.IntRange(1, MAX_WORKERS),
    ]
    # Eager, so that an error of another option has the format.
    log_format: Annotated[str, "Format of the log on standard error.", option(is_eager=True)]
    log_verbose: Annotated[int, "1: log every request with its id.", click.IntRange(min=0)]


class Serve(OneLineCommand):
    """The command; it keeps its arguments for worker processes, which parse them again."""

    ARGUMENTS = "modelport.serve.arguments"
    make_context = click.Command.make_context  # ``settings_of`` lets its callers handle errors

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        given = tuple(args)
        try:
            rest = super().parse_args(ctx, args)
        except click.UsageError as error:
            # No option has been read yet if the parser fails, and its errors have a format, too.
            if not ctx.params and {"json", "--log-format=json"} & set(given):
                ctx.params["log_format"] = "json"
            error.ctx = ctx
            raise
        ctx.meta[self.ARGUMENTS] = (*option_sources.as_arguments(ctx), *given)
        return rest


@click.command(cls=Serve, context_settings={"show_default": True})
@click.argument("paths", type=ServedPath(), nargs=-1, metavar="[[NAME=]PATH]...")
@declared_by(ServeOptions, defaults=DEFAULTS)
@declared_by(ProcessOptions, defaults=DEFAULTS)
@click.pass_context
def serve(context: click.Context, /, **options: Any) -> None:
    """Serve a model repository over HTTP and gRPC (Open Inference Protocol, Triton's flag names).

    PATH is a model repository, a model's folder, or a model's file. A file's model has its name in
    the certificate beside it; without one, that in iris/model.onnx is named iris, and that in
    resnet50.onnx resnet50. NAME=PATH names it otherwise. A Python file has a model for each
    function or class with @modelport.model.

    Without any of the named models, the command ends with status 1.

    Port 0 chooses a free port; the log line "listening" on stderr has it.
    """
    settings = settings_from(**options)
    if settings.workers == 1:
        with collector.paused():
            from modelport.gateway.server import app

        app.run(settings)
    else:
        from modelport.gateway.server.workers import supervisor

        supervisor.run(settings, context.meta[Serve.ARGUMENTS], "modelport.gateway.cli.worker")


def settings_of(arguments: Sequence[str], environment: bool = True) -> Settings:
    """The settings of ``modelport serve`` with ``arguments``.

    Args:
        environment: variables such as ``MODELPORT_SERVE_HTTP_PORT`` set what no argument does.

    Raises:
        click.UsageError, ModelportError: as ``serve``.
    """
    command = copy.copy(serve)
    command.params = [copy.copy(option) for option in serve.params]
    if environment:
        option_sources.name_variables(command, "MODELPORT_SERVE")
    else:
        for option in command.params:
            option.envvar = None
    return settings_from(**command.make_context("serve", list(arguments)).params)
