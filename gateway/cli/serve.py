"""``modelport serve``: the command and its options."""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Callable, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any

import click

from modelport.gateway.cli import option_sources
from modelport.gateway.cli.errors import OneLineCommand
from modelport.gateway.cli.paths import WrittenPath
from modelport.gateway.cli.serve_settings import (
    FiniteSeconds,
    ServedPath,
    cache_sizes,
    file_mode,
    on_vertex_ai,
    read_monitoring_config,
    settings_from,
)
from modelport.gateway.cli.server_credentials import CommandT
from modelport.gateway.repository.storage.location import Repository
from modelport.gateway.runtime import collector
from modelport.gateway.settings import Settings

DEFAULTS = Settings(model_repositories=())
#: More processes than any machine needs.
MAX_WORKERS = 256
PORT = click.IntRange(0, 65535)

_file = functools.partial(click.option, metavar="FILE", type=click.Path(path_type=Path))


def _setting(*names: str, **attributes: Any) -> Callable[[CommandT], CommandT]:
    """An option with the type and the default of its field in ``Settings``.

    The values of an enum are choices.
    """
    default = getattr(DEFAULTS, names[-1].lstrip("-").replace("-", "_"))
    kind: Any = type(default)
    if isinstance(default, StrEnum):
        kind, default = click.Choice(list(map(str, kind))), str(default)
    return click.option(*names, **{"type": kind, "default": default, **attributes})


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
@click.option("--name", metavar="NAME", help="Name of the model in the only PATH.")
@click.option(
    "--model-repository",
    "--model-store",
    "model_repositories",
    type=Repository(),
    multiple=True,
    help="Folder of models, or s3://, gs:// or az://BUCKET/PREFIX. Repeatable.",
)
@click.option(
    "--repository-cache",
    metavar="DIR",
    type=WrittenPath(),
    help="Folder for copies of models in object storage.  [default: the user's cache folder]",
)
@_file(
    "--routes",
    "routes_file",
    help="File of models on other servers and their addresses: TOML or YAML.",
)
@_setting(
    "--model-control-mode",
    help="none: load all models at start; poll: poll the repository; explicit: load on request.",
)
@click.option(
    "--load-model",
    "load_models",
    multiple=True,
    help="A model to load at start with explicit control ('*': all). Repeatable.",
)
@_setting(
    "--repository-poll-secs",
    "repository_poll_seconds",
    type=FiniteSeconds(min=0, min_open=True),
    help="Seconds between polls of the repository with poll control.",
)
@_file(
    "--model-config-file",
    help="File of models and their base paths, as in TensorFlow Serving.",
)
@_setting(
    "--model-config-file-poll-wait-seconds",
    "model_config_poll_seconds",
    type=FiniteSeconds(min=0),
    help="Seconds between readings of --model-config-file with poll control; 0: at start only.",
)
@_setting(
    "--aspired-version-policy",
    help="Load new versions before unloading old ones, or unload old ones first.",
)
@_setting(
    "--model-load-retry-count",
    type=click.IntRange(min=0),
    help="Retries of a failed load. Loads waiting for an unavailable server retry indefinitely.",
)
@_setting(
    "--load-retry-interval-secs",
    "load_retry_interval_seconds",
    type=FiniteSeconds(min=0),
    help="Seconds between retries of a load.",
)
@_setting(
    "--model-load-timeout-secs",
    "model_load_timeout_seconds",
    type=FiniteSeconds(min=0, min_open=True),
    help="Time limit of a load, in seconds.",
)
@click.option("--require-manifest", is_flag=True, help="Serve only versions with a manifest.")
@_file(
    "--require-signature",
    metavar="PUBKEY",
    multiple=True,
    help="Serve only versions signed with this key (PEM file). Repeatable: any of the keys.",
)
@click.option(
    "--allow-native-code",
    is_flag=True,
    help="Serve unsigned versions that run native code (AOTInductor, custom operators and classes) "
    "or access files. By default only versions signed with a --require-signature key may.",
)
@_setting(
    "--strict-readiness",
    help="Report ready only while every model has a version that serves.",
)
@_setting(
    "--exit-on-error",
    help="Exit with status 1 if a model does not load at start; answer no request before.",
)
@_setting("--http-address", help="Address to serve HTTP on.")
@click.option(
    "--http-port",
    type=PORT,
    default=lambda: (on_vertex_ai() and os.environ.get("AIP_HTTP_PORT")) or DEFAULTS.http_port,
    show_default=f"{DEFAULTS.http_port}; on Vertex AI, AIP_HTTP_PORT",
    help="Port to serve HTTP on.",
)
@_setting(
    "--http-max-input-size",
    "http_max_input_bytes",
    type=click.IntRange(min=1),
    help="Largest HTTP request body or gRPC message in bytes, after decompression.",
)
@_setting(
    "--json-nan-as-null",
    is_flag=True,
    help="Write null for NaN and the infinities in JSON, in place of the tokens NaN and Infinity.",
)
@click.option(
    "--allowed-host",
    "allowed_hosts",
    metavar="NAME",
    multiple=True,
    help="Host name of web pages that may load, unload and configure models; '*': any. Repeatable.",
)
@click.option(
    "--max-request-memory",
    "max_request_memory_bytes",
    type=click.IntRange(min=1),
    show_default="a quarter of the usable memory",
    help="Memory for all requests and unread responses together, in bytes; a single connection may "
    "use half of it.",
)
@click.option(
    "--dialect",
    "dialects",
    multiple=True,
    metavar="NAME",
    help="Also serve this protocol of an installed package (modelport.dialects). Repeatable.",
)
@_setting(
    "--allow-sagemaker",
    help="Serve SageMaker's /invocations (SAGEMAKER_TRITON_DEFAULT_MODEL_NAME).",
)
@click.option(
    "--allow-vertex-ai",
    type=bool,
    default=on_vertex_ai,
    show_default="true if AIP_MODE is PREDICTION",
    help="Serve Vertex AI's AIP_PREDICT_ROUTE and AIP_HEALTH_ROUTE.",
)
@click.option(
    "--vertex-ai-default-model",
    default="",
    metavar="MODEL",
    show_default="the only one",
    help="The model that answers Vertex AI requests.",
)
@_setting("--grpc-address", help="Address to serve gRPC on.")
@_setting("--grpc-port", type=PORT, help="Port to serve gRPC on.")
@_setting("--metrics-address", help="Address to serve metrics and rollouts on.")
@_setting("--metrics-port", type=PORT, help="Port to serve metrics and rollouts on.")
@_file(
    "--http-socket",
    metavar="PATH",
    help="Serve HTTP on a UNIX domain socket as well, in clear text.",
)
@_file(
    "--grpc-socket",
    metavar="PATH",
    help="Serve gRPC on a UNIX domain socket as well, in clear text (unix:PATH).",
)
@click.option(
    "--socket-mode",
    metavar="MODE",
    default=f"{DEFAULTS.socket_mode:o}",
    callback=file_mode,
    help="Permissions of the socket files, in octal digits as for chmod.",
)
@_file(
    "--tls-cert",
    help="Serve TLS 1.2 and 1.3 on all ports, with this certificate and its chain (PEM). The files "
    "are read again when they change.",
)
@_file("--tls-key", help="The certificate's private key (PEM).")
@_file(
    "--tls-client-ca",
    help="Verify the certificates of clients with these authorities (PEM): mutual TLS.",
)
@click.option(
    "--tls-client-auth",
    type=click.Choice(["required", "optional"]),
    show_default="required",
    help="Refuse clients without a certificate, or accept them.",
)
@_file(
    "--access",
    help="File of rules that authorize clients (access.toml), read again when it changes.",
)
@click.option(
    "--audit-log",
    metavar="FILE",
    help="Append a line of JSON for each refusal and each control operation; '-' is stdout. "
    "Needs --access.",
)
@click.option(
    "--audit-log-max-size",
    "audit_log_max_bytes",
    type=click.IntRange(4096),
    metavar="BYTES",
    help="Size at which the audit log is renamed and a new one begun.",
)
@click.option(
    "--insecure",
    is_flag=True,
    help="Serve everyone on addresses other than loopback, without --access and client "
    "certificates.",
)
@click.option(
    "--monitoring-config-file",
    "prometheus_path",
    callback=read_monitoring_config,
    metavar="FILE",
    help="As in TensorFlow Serving: prometheus_config { enable: true } adds metrics to HTTP.",
)
@_file(
    "--rollout-webhook-secret",
    help="File with the secret that signs webhook calls of rollouts (x-modelport-signature-256).",
)
@_setting(
    "--workers",
    type=click.IntRange(1, MAX_WORKERS),
    help="Processes that share the ports, each serving every model; at most one per core.",
)
@click.option(
    "--cache-config",
    "cache_configs",
    callback=cache_sizes,
    multiple=True,
    metavar="local,size=BYTES",
    help="Cache for models with response_cache { enable: true }.  [default: no cache]",
)
@click.option(
    "--response-cache-byte-size",
    "cache_bytes",
    type=click.IntRange(min=0),
    help="Deprecated, as in Triton: --cache-config local,size=BYTES.",
)
@_setting(
    "--allow-client-shm",
    help="Let clients on this machine pass tensors in system shared memory.",
)
@click.option(
    "--max-request-timeout-secs",
    "max_request_timeout_seconds",
    type=FiniteSeconds(min=0, min_open=True),
    help="Upper limit of every request's deadline, in seconds.  [default: no limit]",
)
@_setting(
    "--exit-timeout-secs",
    "exit_timeout_seconds",
    type=FiniteSeconds(min=0),
    help="Seconds for requests in flight to finish after SIGTERM.",
)
# Eager, so that an error of another option has the format.
@_setting("--log-format", is_eager=True, help="Format of the log on standard error.")
@_setting("--log-verbose", type=click.IntRange(min=0), help="1: log every request with its id.")
@click.pass_context
def serve(context: click.Context, /, **options: Any) -> None:
    """Serve a model repository over HTTP and gRPC (Open Inference Protocol, Triton's flag names).

    PATH is a model repository, a model's folder, or a model's file. The model in iris/model.onnx is
    named iris, that in resnet50.onnx resnet50; NAME=PATH names it otherwise.

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
