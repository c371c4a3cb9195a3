"""The command ``modelport``. Subcommands are imported when they run: ``--help`` stays fast."""

from __future__ import annotations

import importlib
import math
import os
from pathlib import Path
from typing import Any

import click

from exporters.errors import OneLineCommand
from gateway import __version__
from gateway.settings import (
    AspiredVersionPolicy,
    LogFormat,
    ModelControlMode,
    Settings,
    VertexAi,
)

#: name → where the command is, and the line that ``modelport --help`` shows.
COMMANDS = {
    "demo": ("exporters.demo:demo", "Train, export, serve and call two small models."),
    "export": ("exporters.cli:export", "Export a checkpoint, prove it, publish it."),
    "verify": ("exporters.verify_cli:verify", "Check a published version, or prove it again."),
    "keygen": ("exporters.keygen_cli:keygen", "Make a pair of keys to sign exports with."),
    "convert": ("exporters.convert_cli:convert", "Convert weights between Keras and PyTorch."),
    "inspect": ("exporters.inspect_cli:inspect", "Show what is in an artifact, of any format."),
    "migrate": ("exporters.migrate_cli:migrate", "Move models from another server over here."),
    "package": ("exporters.package_cli:package_command", "Package models for other servers."),
    "serve": ("gateway.cli:serve", "Serve a model repository over HTTP and gRPC."),
    "doctor": ("gateway.doctor:doctor", "Tell which backends this machine can run."),
    "models": ("gateway.client:models", "List the models of a running gateway."),
    "infer": ("gateway.client:infer", "Send a file to a model of a running gateway."),
}


class LazyGroup(OneLineCommand, click.Group):
    """A group whose commands are imported on first use."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, _, attribute = COMMANDS[cmd_name][0].partition(":")
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])


class Seconds(click.FloatRange):
    """``nan`` passes every bound, and nothing can wait for ``inf``."""

    def convert(self, value: Any, param: Any, ctx: Any) -> float:
        seconds = float(super().convert(value, param, ctx))
        if not math.isfinite(seconds):
            self.fail(f"{value} is not a number of seconds", param, ctx)
        return seconds


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


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="modelport")
def modelport() -> None:
    """Export a trained model once, prove it, serve it behind the Open Inference Protocol."""


@click.command()
@click.option(
    "--model-repository",
    "--model-store",
    "model_repositories",
    type=click.Path(path_type=Path),
    multiple=True,
    help="Folder of models; give it more than once for more folders.",
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
    type=Seconds(min=0, min_open=True),
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
    type=Seconds(min=0),
    default=1.0,
    show_default=True,
    help="Seconds between those.",
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
    help="Largest HTTP request body, in bytes, after decompression.",
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
    "--exit-timeout-secs",
    "exit_timeout_seconds",
    type=Seconds(min=0),
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
def serve(
    model_control_mode: str,
    aspired_version_policy: str,
    log_format: str,
    require_signature: tuple[Path, ...],
    routes_file: Path | None,
    allow_vertex_ai: bool,
    vertex_ai_default_model: str,
    **options: Any,
) -> None:
    """Serve a model repository over HTTP and gRPC (Open Inference Protocol, Triton's flag names).

    Port 0 takes a free port; the line "listening" on stderr tells which.
    """
    if options["load_models"] and model_control_mode != ModelControlMode.EXPLICIT:
        raise click.UsageError("--load-model requires --model-control-mode=explicit as well")
    for repository in options["model_repositories"]:
        if not repository.is_dir():
            raise click.UsageError(
                f"--model-repository '{repository}' is not a folder; 'modelport demo' or "
                "'modelport export' makes one"
            )
    from gateway import routes
    from gateway.repository import signing

    found = routes.load(routes_file) if routes_file is not None else routes.Routes()
    if not options["model_repositories"] and not found.models:
        raise click.UsageError("nothing to serve; give --model-repository, or --routes with models")
    keys = tuple(signing.load_public_key(path) for path in require_signature)
    # gRPC reads this when it is imported; its failures reach us as exceptions.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    # Servers that are started are programs of their own: gRPC has nothing to do when we fork.
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
    from gateway import server

    server.run(
        Settings(
            model_control_mode=ModelControlMode(model_control_mode),
            aspired_version_policy=AspiredVersionPolicy(aspired_version_policy),
            log_format=LogFormat(log_format),
            require_signature=keys,
            routes=found,
            sagemaker_default_model=os.environ.get("SAGEMAKER_TRITON_DEFAULT_MODEL_NAME", ""),
            vertex_ai=_vertex_ai(vertex_ai_default_model) if allow_vertex_ai else None,
            **options,
        )
    )


def main() -> None:
    """Run the command; errors are one line and an exit status, never a traceback."""
    modelport(prog_name="modelport")


if __name__ == "__main__":
    main()
