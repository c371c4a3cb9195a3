"""``modelport serve``: its options, and the settings they make."""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from modelport.gateway.cli import option_sources
from modelport.gateway.repository import standalone
from modelport.gateway.repository.storage.location import Location, Repository
from modelport.gateway.settings import (
    AspiredVersionPolicy,
    LogFormat,
    ModelControlMode,
    Settings,
    VertexAi,
)

if TYPE_CHECKING:
    from modelport.gateway.repository.signing import PublicKey

#: More processes than any machine has use for.
MAX_WORKERS = 256


class FiniteSeconds(click.FloatRange):
    """``nan`` passes every bound, and nothing can wait for ``inf``."""

    def convert(self, value: Any, param: Any, ctx: Any) -> float:
        seconds = float(super().convert(value, param, ctx))
        if not math.isfinite(seconds):
            self.fail(f"{value} is not a number of seconds", param, ctx)
        return seconds


def _cache_sizes(ctx: Any, param: Any, values: tuple[str, ...]) -> tuple[int, ...]:
    """Triton's ``<cache>,<setting>=<value>``; ``local`` has one setting, its size in bytes."""
    sizes = []
    for value in values:
        cache, _, setting = value.partition(",")
        key, _, size = setting.partition("=")
        if cache != "local":
            raise click.BadParameter(f"there is no cache '{cache}'; use local,size=BYTES")
        digits = size.lstrip("0")
        if key != "size" or not (digits.isascii() and digits.isdigit() and len(digits) <= 18):
            raise click.BadParameter(f"'{setting}' is not size=BYTES, a number above 0")
        sizes.append(int(digits))
    return tuple(sizes)


def _prometheus_path(ctx: Any, param: Any, value: str | None) -> str:
    from modelport.gateway.server.admin.monitoring import prometheus_path

    return prometheus_path(Path(value)) if value else ""


def _cache_bytes(configured: tuple[int, ...], deprecated: int | None) -> int:
    if len(configured) + (deprecated is not None) > 1:
        raise click.UsageError(
            "--cache-config and the deprecated --response-cache-byte-size set the same size; give "
            "one of them, once"
        )
    return configured[0] if configured else deprecated or 0


def _on_vertex_ai() -> bool:
    return os.environ.get("AIP_MODE") == "PREDICTION"


def _vertex_ai(default_model: str) -> VertexAi:
    """What the platform says in the environment."""
    variables = ("AIP_PREDICT_ROUTE", "AIP_HEALTH_ROUTE")
    for variable in variables:
        if not os.environ.get(variable, "").startswith("/"):
            raise click.UsageError(
                f"Vertex AI's routes are wanted, and {variable} is not a path; set it, or give "
                "--allow-vertex-ai=false"
            )
    predict_route, health_route = (os.environ[variable] for variable in variables)
    return VertexAi(predict_route, health_route, default_model)


class Serve(click.Command):
    """Remembers its arguments: worker processes parse the very same."""

    ARGUMENTS = "modelport.serve.arguments"

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        given = tuple(args)
        rest = super().parse_args(ctx, args)
        ctx.meta[self.ARGUMENTS] = (*option_sources.as_arguments(ctx), *given)
        return rest


@click.command(cls=Serve)
@click.argument("paths", type=Repository(), nargs=-1, metavar="[PATH]...")
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
    type=click.Path(path_type=Path, file_okay=False),
    help="Where models of object storage are kept.  [default: the user's cache folder]",
)
@click.option(
    "--routes",
    "routes_file",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Which models other servers run, and where: TOML or YAML.",
)
@click.option(
    "--model-control-mode",
    type=click.Choice([mode.value for mode in ModelControlMode]),
    default=ModelControlMode.NONE.value,
    show_default=True,
    help="none: load all at start; poll: follow the repository; explicit: load on request.",
)
@click.option(
    "--load-model",
    "load_models",
    multiple=True,
    help="With explicit control, a model to load at start ('*' for all). Repeatable.",
)
@click.option(
    "--repository-poll-secs",
    "repository_poll_seconds",
    type=FiniteSeconds(min=0, min_open=True),
    default=15.0,
    show_default=True,
    help="Seconds between looks at the repository with poll control.",
)
@click.option(
    "--aspired-version-policy",
    type=click.Choice([policy.value for policy in AspiredVersionPolicy]),
    default=AspiredVersionPolicy.AVAILABILITY_PRESERVING.value,
    show_default=True,
    help="Load new versions before old ones go, or free what old ones hold first.",
)
@click.option(
    "--model-load-retry-count",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="How often a load that fails is tried again; what waits for a server always is.",
)
@click.option(
    "--load-retry-interval-secs",
    "load_retry_interval_seconds",
    type=FiniteSeconds(min=0),
    default=1.0,
    show_default=True,
    help="Seconds between those.",
)
@click.option(
    "--model-load-timeout-secs",
    "model_load_timeout_seconds",
    type=FiniteSeconds(min=0, min_open=True),
    default=1200.0,
    show_default=True,
    help="A load that takes longer has failed.",
)
@click.option("--require-manifest", is_flag=True, help="Serve only versions with a manifest.")
@click.option(
    "--require-signature",
    metavar="PUBKEY",
    type=click.Path(path_type=Path),
    multiple=True,
    help="Serve only versions signed with this key, a PEM file. Repeatable: any one of the keys.",
)
@click.option(
    "--allow-native-code",
    is_flag=True,
    help="Serve unsigned versions that run native code (AOTInductor, custom operators and classes) "
    "or reach files. Without it only what is signed with a key of --require-signature may.",
)
@click.option(
    "--strict-readiness",
    type=bool,
    default=True,
    show_default=True,
    help="Ready only while every model has a version that serves.",
)
@click.option(
    "--exit-on-error",
    type=bool,
    default=False,
    show_default=True,
    help="Exit with status 1 when a model does not load at start.",
)
@click.option("--http-address", default="127.0.0.1", show_default=True)
@click.option(
    "--http-port",
    type=click.IntRange(0, 65535),
    default=lambda: os.environ.get("AIP_HTTP_PORT", 8000) if _on_vertex_ai() else 8000,
    show_default="8000; on Vertex AI, AIP_HTTP_PORT",
)
@click.option(
    "--http-max-input-size",
    "http_max_input_bytes",
    type=click.IntRange(min=1),
    default=64 * 1024 * 1024,
    show_default=True,
    help="Largest HTTP request body, and gRPC message, in bytes, after decompression.",
)
@click.option(
    "--allowed-host",
    "allowed_hosts",
    metavar="NAME",
    multiple=True,
    help="Host name whose web pages may load, unload and configure; '*': any. Repeatable.",
)
@click.option(
    "--max-request-memory",
    "max_request_memory_bytes",
    type=click.IntRange(min=1),
    show_default="a quarter of the usable memory",
    help="Memory that requests may hold together, in bytes; one connection, half of it.",
)
@click.option(
    "--allow-sagemaker",
    type=bool,
    default=True,
    show_default=True,
    help="Serve SageMaker's /invocations (SAGEMAKER_TRITON_DEFAULT_MODEL_NAME).",
)
@click.option(
    "--allow-vertex-ai",
    type=bool,
    default=lambda: _on_vertex_ai(),
    show_default="true where AIP_MODE is PREDICTION",
    help="Serve Vertex AI's AIP_PREDICT_ROUTE and AIP_HEALTH_ROUTE.",
)
@click.option(
    "--vertex-ai-default-model",
    default="",
    metavar="MODEL",
    help="The model of Vertex AI's requests.  [default: the only one]",
)
@click.option("--grpc-address", default="127.0.0.1", show_default=True)
@click.option("--grpc-port", type=click.IntRange(0, 65535), default=8001, show_default=True)
@click.option("--metrics-address", default="127.0.0.1", show_default=True)
@click.option("--metrics-port", type=click.IntRange(0, 65535), default=8002, show_default=True)
@click.option(
    "--monitoring-config-file",
    "prometheus_path",
    callback=_prometheus_path,
    metavar="FILE",
    help="TensorFlow Serving's: with prometheus_config { enable: true } metrics on the HTTP port.",
)
@click.option(
    "--workers",
    type=click.IntRange(1, MAX_WORKERS),
    default=1,
    show_default=True,
    help="Processes that share the ports and serve every model each; one for a core.",
)
@click.option(
    "--cache-config",
    "cache_configs",
    callback=_cache_sizes,
    multiple=True,
    metavar="local,size=BYTES",
    help="Keep answers of models with response_cache { enable: true }.  [default: no cache]",
)
@click.option(
    "--response-cache-byte-size",
    "cache_bytes",
    type=click.IntRange(min=0),
    help="Deprecated, as in Triton: --cache-config local,size=BYTES.",
)
@click.option(
    "--allow-client-shm",
    type=bool,
    default=False,
    show_default=True,
    help="Let clients on this machine pass tensors in system shared memory.",
)
@click.option(
    "--max-request-timeout-secs",
    "max_request_timeout_seconds",
    type=FiniteSeconds(min=0, min_open=True),
    default=None,
    help="No request takes longer, whatever its own deadline.  [default: as long as it says]",
)
@click.option(
    "--exit-timeout-secs",
    "exit_timeout_seconds",
    type=FiniteSeconds(min=0),
    default=30.0,
    show_default=True,
    help="How long requests in flight may take to finish after SIGTERM.",
)
@click.option(
    "--log-format",
    type=click.Choice([form.value for form in LogFormat]),
    default=LogFormat.DEFAULT.value,
    show_default=True,
)
@click.option(
    "--log-verbose",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="1: log every request with its id.",
)
@click.pass_context
def serve(context: click.Context, /, **options: Any) -> None:
    """Serve a model repository over HTTP and gRPC (Open Inference Protocol, Triton's flag names).

    PATH is a model repository, a model's own folder, or a model's file (model.onnx).

    Port 0 takes a free port; the line "listening" on stderr tells which.
    """
    settings = _settings(**options)
    if settings.workers == 1:
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
    return _settings(**command.make_context("serve", list(arguments)).params)


def _public_keys(files: Sequence[Path]) -> tuple[PublicKey, ...]:
    if not files:
        return ()
    from modelport.gateway.repository import signing

    return tuple(signing.load_public_key(file) for file in files)


def _check_repository(repository: Path | Location) -> None:
    if not isinstance(repository, Path):
        return
    if not repository.is_dir():
        raise click.UsageError(
            f"--model-repository '{repository}' is not a folder; 'modelport demo' or "
            "'modelport export' makes one"
        )
    if standalone.is_model(repository):
        raise click.UsageError(
            f"--model-repository '{repository}' is a model; pass its parent "
            f"'{repository.parent}', or serve it alone: modelport serve {repository}"
        )


def _sorted_out(
    paths: Sequence[Path | Location],
) -> tuple[tuple[Path | Location, ...], tuple[Path, ...]]:
    """The repositories among ``paths``, and the models outside of one."""
    for path in paths:
        if isinstance(path, Path) and not path.exists():
            raise click.UsageError(f"'{path}' does not exist")
    models = tuple(path for path in paths if isinstance(path, Path) and standalone.is_model(path))
    for model in models:
        standalone.scan(model)  # raises what is wrong with it
    return tuple(path for path in paths if path not in models), models


def _check_listeners(options: Mapping[str, Any]) -> None:
    taken: dict[int, str] = {}
    for kind in ("http", "grpc", "metrics"):
        if not options[f"{kind}_address"]:  # to a socket it means every interface
            raise click.UsageError(f"--{kind}-address is empty; 0.0.0.0 is every interface")
        port = options[f"{kind}_port"]
        if port in taken:
            raise click.UsageError(
                f"--{taken[port]}-port and --{kind}-port are both {port}; give them different ports"
            )
        if port:
            taken[port] = kind


def _settings(
    model_control_mode: str,
    aspired_version_policy: str,
    log_format: str,
    require_signature: tuple[Path, ...],
    routes_file: Path | None,
    allow_vertex_ai: bool,
    vertex_ai_default_model: str,
    **options: Any,
) -> Settings:
    """The options of ``serve``, checked together."""
    if options["load_models"] and model_control_mode != ModelControlMode.EXPLICIT:
        raise click.UsageError("--load-model requires --model-control-mode=explicit as well")
    for repository in options["model_repositories"]:
        _check_repository(repository)
    repositories, options["models"] = _sorted_out(options.pop("paths"))
    options["model_repositories"] += repositories
    _check_listeners(options)
    from modelport.gateway.repository import routes

    found = routes.load(routes_file) if routes_file is not None else routes.Routes()
    if not (options["model_repositories"] or options["models"] or found.models):
        raise click.UsageError(
            "nothing to serve; give a model's file or --model-repository, or --routes with models"
        )
    # gRPC reads this when it is imported; its failures reach us as exceptions.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    # Servers that are started are programs of their own: gRPC has nothing to do when we fork.
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
    cache_bytes = _cache_bytes(options.pop("cache_configs"), options.pop("cache_bytes"))
    return Settings(
        cache_bytes=cache_bytes,
        model_control_mode=ModelControlMode(model_control_mode),
        aspired_version_policy=AspiredVersionPolicy(aspired_version_policy),
        log_format=LogFormat(log_format),
        require_signature=_public_keys(require_signature),
        routes=found,
        sagemaker_default_model=os.environ.get("SAGEMAKER_TRITON_DEFAULT_MODEL_NAME", ""),
        vertex_ai=_vertex_ai(vertex_ai_default_model) if allow_vertex_ai else None,
        **options,
    )
