"""``modelport loadtest``: one load on one target."""

from __future__ import annotations

import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from modelport.gateway.cli.errors import Failure, OneLineCommand, annotate, renamed_option
from modelport.gateway.cli.paths import EXISTING, WRITTEN
from modelport.gateway.cli.server_credentials import credential_options
from modelport.gateway.errors import UsageError
from modelport.gateway.extras import require_extra
from modelport.loadtests.cli.options import (
    DurationParam,
    PositiveParam,
    check_writable,
    interruptible,
    seed_option,
)
from modelport.loadtests.load import load_shapes, locust_arguments, payloads
from modelport.loadtests.load.run import INTERRUPTED, NotMeasured, measure_mix
from modelport.loadtests.load.samples import LoadProfile, LoadRun
from modelport.loadtests.load.target import (
    PROTOCOL_SCHEMES,
    SCHEMES,
    LoadTestProtocol,
    LoadTestTarget,
    address,
    is_tls,
    parse,
)
from modelport.loadtests.loadtest import objectives
from modelport.loadtests.loadtest.objectives import Objective
from modelport.loadtests.users.authentication import authenticated

if TYPE_CHECKING:
    from rich.console import Console

EXIT_MISSED, EXIT_INTERRUPTED = 1, 130
#: Output files: --json-report, ...
FILES = ("json", "html", "junit", "samples")
#: Default durations: of a soak, and of other shapes.
SOAK_SECONDS, DEFAULT_SECONDS = 3600.0, 10.0


class SloParam(click.ParamType[Objective]):
    """An objective, such as ``p99=25ms``."""

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


@click.command(cls=OneLineCommand)
@click.argument("target_url")
@click.option("--model", "-m", help="Name of the model, unless TARGET_URL contains it.")
@click.option("--model-version", default="", help="The version.  [default: the server's choice]")
@click.option(
    "--protocol",
    type=click.Choice([one.value for one in LoadTestProtocol]),
    default=None,
    help="Protocol of the requests.  [default: oip-http]",
)
@click.option(
    "--users",
    "--concurrency",
    type=click.IntRange(min=1),
    default=None,
    help="Requests in flight; with --rate, the maximum.  [default: 1; 64 with --rate]",
)
@click.option(
    "--rate",
    type=PositiveParam(),
    default=None,
    help="Open loop: intended requests per second; latency counts from the intended sending.",
)
@click.option(
    "--duration",
    type=DurationParam(),
    default=None,
    help="Duration after the warm-up: 30s, 5m, 1h.  [default: 10s]",
)
@click.option(
    "--warmup", type=DurationParam(), default=1.0, help="Warm-up, not counted.  [default: 1s]"
)
@click.option(
    "--shape",
    type=click.Choice(load_shapes.SHAPES),
    default="constant",
    show_default=True,
    help="Shape of the load over time; users or rate are its maximum.",
)
@click.option(
    "--batch-size",
    "-b",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Rows of a request.",
)
@click.option(
    "--data",
    type=EXISTING,
    help="Requests with expected answers: a folder of 'serve --record', .npz by tensor names, OIP "
    "requests as .json or .jsonl, perf_analyzer's JSON, or a file of 'modelport sample'.  "
    "[default: random, from the model's declared ranges]",
)
@click.option(
    "--model-config",
    "config",
    type=EXISTING,
    help="The model's config.pbtxt, if the server has no metadata.",
)
@seed_option
@click.option(
    "--timeout", type=DurationParam(), default=30.0, help="Time limit of a request.  [default: 30s]"
)
@click.option(
    "--objective",
    "slos",
    type=SloParam(),
    multiple=True,
    metavar="NAME=VALUE",
    help="Objective: p99=25ms, ttfb-p50=5ms, throughput=200, errors=0.1%. Repeatable.  "
    "[default: errors=0]",
)
@click.option(
    "--processes",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Processes of the load generator.",
)
@click.option("--json-report", "json_file", type=WRITTEN, help="Write the results as JSON.")
@click.option("--html", "html_file", type=WRITTEN, help="Write a report with plots.")
@click.option("--junit", "junit_file", type=WRITTEN, help="Write the objectives as JUnit XML.")
@click.option(
    "--samples-file", "samples_file", type=WRITTEN, help="Write every request's times as .npy."
)
@click.option("--quiet", "-q", is_flag=True, help="Do not show progress.")
@renamed_option("-u", "--users")
@renamed_option("--config", "--model-config")
@renamed_option("--slo", "--objective")
@renamed_option("--json", "--json-report")
@renamed_option("--samples", "--samples-file")
@credential_options
def loadtest(target_url: str, **options: Any) -> None:
    """Put a load on a model server and measure its latencies.

    TARGET_URL is HOST:PORT, or includes the rest: oip-grpc://HOST:PORT/MODEL[/VERSION] (any
    protocol), http://HOST:PORT/v2/models/MODEL[/versions/VERSION] or grpc://HOST:PORT/MODEL[/VERSION].
    Over TLS it begins with https://, grpcs://, oip-grpcs:// and so on.

    \b
    modelport loadtest localhost:8000 --model fraud --users 8
    modelport loadtest localhost:8001 -m fraud --protocol oip-grpc --rate 200 --objective p99=25ms
    modelport loadtest localhost:8000 -m vit --shape ramp --rate 500 --duration 1m --html run.html

    Every answer is compared with --data's, or with the server's own first ones; a wrong one is
    an error. Exit status: 0; 1 if no request could be sent, an answer was missing or wrong, or
    an objective is missed; 2 usage; 4 the extra 'load' is not installed; 130 interrupted.
    """
    require_extra("load")
    from rich.console import Console

    target = _target(target_url, options)
    load = _load(options)
    check_writable(options[f"{kind}_file"] for kind in FILES)
    console = Console(stderr=True)
    with interruptible():  # Locust is in a session of its own, and ends with this block
        run = _measure(target, load, options, console)
    _finish(run, options)


def _target(url: str, options: dict[str, Any]) -> LoadTestTarget:
    """The target from ``TARGET_URL``, with or without the model in it, and the options."""
    scheme, _, rest = url.rpartition("://")
    try:
        if scheme in PROTOCOL_SCHEMES or "/" in rest.strip("/"):
            found = parse(url)
        else:
            spoken = SCHEMES.get(scheme, LoadTestProtocol.OIP_HTTP)
            found = LoadTestTarget(spoken, address(url), "", tls=is_tls(scheme))
    except ValueError as error:
        raise UsageError(f"TARGET_URL: {error}") from error
    protocol = _protocol(url, scheme, found, options["protocol"])
    for name, value, told in (
        ("--model", options["model"], found.model),
        ("--model-version", options["model_version"], found.version),
    ):
        if value and told and value != told:
            raise UsageError(f"{name} {value} contradicts '{url}'; give one of them")
    model = found.model or options["model"]
    if not model:
        raise UsageError("--model is missing: the name of the model")
    version = found.version or options["model_version"]
    return authenticated(replace(found, protocol=protocol, model=model, version=version), url)


def _protocol(url: str, scheme: str, found: LoadTestTarget, given: str | None) -> LoadTestProtocol:
    """``--protocol`` if ``TARGET_URL`` leaves it open, as only ``http://HOST:PORT`` does."""
    if given is None:
        return found.protocol
    wanted = LoadTestProtocol(given)
    if scheme in PROTOCOL_SCHEMES:
        fits = wanted is found.protocol
    else:
        is_open = scheme not in ("grpc", "grpcs") and not found.model
        fits = wanted.is_grpc == found.protocol.is_grpc or is_open
    if not fits:
        raise UsageError(f"--protocol {given} contradicts '{url}'; give one of them")
    return wanted


def _load(options: dict[str, Any]) -> LoadProfile:
    shape, rate = options["shape"], options["rate"]
    default = SOAK_SECONDS if shape == "soak" else DEFAULT_SECONDS
    load = LoadProfile(
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
        locust_arguments.check(load)
    except ValueError as error:
        raise UsageError(str(error)) from error
    return load


def _measure(
    target: LoadTestTarget, load: LoadProfile, options: dict[str, Any], console: Console
) -> LoadRun:
    """Measure; the run may be incomplete."""
    from modelport.loadtests.loadtest.progress_display import live

    data = () if options["data"] is None else (options["data"],)
    _check_readable(options["data"], options["config"])
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
    except (NotMeasured, OSError) as error:  # this machine's own, such as a full disk
        raise Failure(error) from error
    return run


def _check_readable(data: Path | None, config: Path | None) -> None:
    """Check the files before the load; content that needs the signature is checked later."""
    from modelport.loadtests.users import signature

    try:
        told = None if config is None else signature.read_file(config)
    except signature.SignatureUnknown as error:
        raise UsageError(f"--model-config: {error}") from error
    try:
        if data is not None and (told is not None or not payloads.needs_signature(data)):
            payloads.read(data, told)
    except payloads.BadPayload as error:
        raise UsageError(f"--data: {error}") from error


def _finish(run: LoadRun, options: dict[str, Any]) -> None:
    """Print tables, write files, set the exit status."""
    from modelport.loadtests.load.summary import summarise
    from modelport.loadtests.loadtest import output_files
    from modelport.loadtests.report import console as tables

    summary = summarise(run)
    checks = objectives.judge(run, summary, list(options["slos"]))
    tables.run(run, checks, tables.standard())
    command = shlex.join(["modelport", *sys.argv[1:]])
    files = {f"{kind}_file": options[f"{kind}_file"] for kind in FILES}
    written, problem = output_files.write_all(run, summary, checks, command, **files)
    for path in written:
        click.echo(f"wrote {path}", err=True)
    if problem:
        raise Failure(RuntimeError(problem))
    if run.failure == INTERRUPTED:
        click.echo("modelport: interrupted; these are the results so far", err=True)
        sys.exit(EXIT_INTERRUPTED)
    if run.failure:
        said = " ".join(run.failure.split())
        click.echo(f"modelport: error: {said}; these are the results so far", err=True)
        sys.exit(EXIT_MISSED)
    missed = [check for check in checks if check.status != "pass"]
    for check in missed:
        annotate(f"{check.name}: {check.observed}, {check.bound}", "modelport loadtest")
    if missed:
        sys.exit(EXIT_MISSED)
