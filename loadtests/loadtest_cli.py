"""``modelport loadtest``: one target, one run."""

from __future__ import annotations

import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from exporters.errors import Failure, OneLineCommand, UsageError
from loadtests import objectives, payloads, plan, shapes
from loadtests.arguments import Positive, Seconds, check_writable, interruptible
from loadtests.live import live
from loadtests.objectives import Objective
from loadtests.run import INTERRUPTED, NotMeasured, measure_mix
from loadtests.samples import Load, Run
from loadtests.target import Protocol, Target, address, parse

EXIT_MISSED, EXIT_INTERRUPTED = 1, 130
#: Of a soak without ``--duration``, and of everything else.
SOAK_SECONDS, DEFAULT_SECONDS = 3600.0, 10.0


class Slo(click.ParamType[Objective]):
    """``p99=25ms``."""

    name = "slo"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> Objective:
        if isinstance(value, Objective):
            return value
        try:
            return objectives.parse(str(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)


EXISTING = click.Path(exists=True, dir_okay=False, path_type=Path)
WRITTEN = click.Path(dir_okay=False, path_type=Path)


@click.command(cls=OneLineCommand)
@click.argument("target_url")
@click.option("--model", "-m", help="Name of the model; may stand in TARGET_URL instead.")
@click.option("--model-version", default="", help="Its version. Default: the server's choice.")
@click.option(
    "--protocol",
    type=click.Choice([one.value for one in Protocol]),
    default=None,
    help="How it is asked.  [default: oip-http]",
)
@click.option(
    "--users",
    "--concurrency",
    "-u",
    type=click.IntRange(min=1),
    default=None,
    help="Requests in flight: always, or at most with --rate.  [default: 1; 64 with --rate]",
)
@click.option(
    "--rate",
    type=Positive(),
    default=None,
    help="Open loop: intended requests a second; latency counts from the intended sending.",
)
@click.option("--duration", type=Seconds(), default=None, help="30s, 5m, 1h.  [default: 10s]")
@click.option(
    "--warmup", type=Seconds(), default=1.0, help="Asked before, not counted.  [default: 1s]"
)
@click.option(
    "--shape",
    type=click.Choice(shapes.SHAPES),
    default="constant",
    show_default=True,
    help="Of the load over time: users or rate are its top.",
)
@click.option(
    "--batch-size", "-b", type=click.IntRange(min=1), default=1, show_default=True, help="Rows."
)
@click.option(
    "--data",
    type=EXISTING,
    help="Requests, and what must come back: .npz by tensor names, OIP requests as .json or "
    ".jsonl, perf_analyzer's JSON, or what `modelport sample` writes. Default: drawn from the "
    "model's declared ranges.",
)
@click.option("--config", type=EXISTING, help="The model's config.pbtxt, if the server tells none.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
@click.option("--timeout", type=Seconds(), default=30.0, help="Of a request.  [default: 30s]")
@click.option(
    "--slo",
    "slos",
    type=Slo(),
    multiple=True,
    metavar="NAME=VALUE",
    help="p99=25ms, ttfb-p50=5ms, throughput=200, errors=0.1% (none are allowed unless said); "
    "may be repeated.",
)
@click.option(
    "--processes",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Of the generator.",
)
@click.option("--json", "json_file", type=WRITTEN, help="Write everything but the samples.")
@click.option("--html", "html_file", type=WRITTEN, help="Write a report with plots.")
@click.option("--junit", "junit_file", type=WRITTEN, help="Write the objectives as JUnit XML.")
@click.option("--samples", "samples_file", type=WRITTEN, help="Write every request's times: .npy.")
@click.option("--quiet", "-q", is_flag=True, help="No progress.")
def loadtest(target_url: str, **options: Any) -> None:
    """Put a load on a model server and tell its latencies.

    TARGET_URL is HOST:PORT or http://HOST:PORT, or all in one: oip-grpc://HOST:PORT/MODEL[/VERSION].

    \b
    modelport loadtest localhost:8000 --model fraud --users 8
    modelport loadtest localhost:8001 -m fraud --protocol oip-grpc --rate 200 --slo p99=25ms
    modelport loadtest localhost:8000 -m vit --shape ramp --rate 500 --duration 1m --html run.html

    Every answer is checked against --data's, or against the server's own first ones; a wrong one is
    an error. Exit status: 0; 1 when nothing could be asked, something was not answered rightly, or
    an objective is missed; 2 usage; 130 interrupted.
    """
    target = _target(target_url, options)
    load = _load(options)
    check_writable(options[f"{name}_file"] for name in ("json", "html", "junit", "samples"))
    console = Console(stderr=True)
    with interruptible():  # Locust is in a session of its own, and ends with this block
        run = _measure(target, load, options, console)
    _finish(run, options)


def _target(url: str, options: dict[str, Any]) -> Target:
    """From ``TARGET_URL``, with or without everything in it."""
    scheme = url.partition("://")[0]
    try:
        if "://" in url and scheme in list(Protocol):
            found = parse(url)
            version = options["model_version"]
            for name, value, told in (
                ("--model", options["model"], found.model),
                ("--protocol", options["protocol"], found.protocol.value),
                ("--model-version", version, found.version or version),
            ):
                if value and value != told:
                    raise UsageError(f"{name} {value} contradicts '{url}'; give one of them")
            return replace(found, version=found.version or version)
        where = address(url)
    except ValueError as error:
        raise UsageError(f"TARGET_URL: {error}") from error
    if not options["model"]:
        raise UsageError("--model is missing: the name of the model to ask")
    protocol = Protocol(options["protocol"] or Protocol.OIP_HTTP)
    return Target(protocol, where, options["model"], options["model_version"])


def _load(options: dict[str, Any]) -> Load:
    shape, rate = options["shape"], options["rate"]
    default = SOAK_SECONDS if shape == "soak" else DEFAULT_SECONDS
    load = Load(
        shape=shape,
        users=options["users"] or (1 if rate is None else 64),
        rate=rate,
        duration_seconds=default if options["duration"] is None else options["duration"],
        warmup_seconds=options["warmup"],
        batch_size=options["batch_size"],
        seed=options["seed"],
        timeout_seconds=options["timeout"],
    )
    try:
        plan.check(load)
    except ValueError as error:
        raise UsageError(str(error)) from error
    return load


def _measure(target: Target, load: Load, options: dict[str, Any], console: Console) -> Run:
    """The run, whole or not."""
    data = () if options["data"] is None else (options["data"],)
    for path in data:
        _readable(path)
    try:
        with live(target, load, console, quiet=options["quiet"]) as progress:
            (run,) = measure_mix(
                [(target, 1)],
                load,
                data,
                config=options["config"],
                processes=options["processes"],
                progress=progress,
                keep_partial=True,
            )
    except NotMeasured as error:
        raise Failure(error) from error
    return run


def _readable(path: Path) -> None:
    """Known before the load; what needs the model's signature is looked at there."""
    try:
        if not payloads.needs_signature(path):
            payloads.read(path)
    except payloads.BadPayload as error:
        raise UsageError(f"--data: {error}") from error


def _finish(run: Run, options: dict[str, Any]) -> None:
    """Tables, files, exit status."""
    from loadtests import document  # matplotlib, jinja: not before the load
    from loadtests.report import console as tables
    from loadtests.summary import summarise

    summary = summarise(run)
    checks = objectives.judge(run, summary, list(options["slos"]))
    tables.run(run, checks, Console())
    command = shlex.join(["modelport", *sys.argv[1:]])
    try:
        written = document.write_all(
            run,
            summary,
            checks,
            command,
            json_file=options["json_file"],
            html_file=options["html_file"],
            junit_file=options["junit_file"],
            samples_file=options["samples_file"],
        )
    except OSError as error:
        raise Failure(RuntimeError(f"the report cannot be written: {error}")) from error
    for path in written:
        click.echo(f"wrote {path}", err=True)
    if run.failure == INTERRUPTED:
        click.echo("modelport: interrupted; this is what came until then", err=True)
        sys.exit(EXIT_INTERRUPTED)
    if run.failure:
        click.echo(f"modelport: error: {run.failure}; this is what came until then", err=True)
        sys.exit(EXIT_MISSED)
    if any(check.status != "pass" for check in checks):
        sys.exit(EXIT_MISSED)
