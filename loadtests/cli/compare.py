"""``modelport compare``: a comparison of formats and backends on this machine."""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from modelport.gateway.cli.errors import EXIT_FAILURE, Failure, OneLineCommand, renamed_option
from modelport.gateway.cli.paths import EXISTING, WRITTEN, ExistingRepository, WrittenPath
from modelport.gateway.errors import UsageError, plain_reason
from modelport.gateway.extras import require_extra
from modelport.gateway.runtime.progress import Show, progress_bar
from modelport.loadtests.cli.options import (
    DurationParam,
    PositiveParam,
    check_writable,
    interruptible,
    seed_option,
)
from modelport.loadtests.load.target import LoadTestProtocol
from modelport.loadtests.system import environments, temporary_folders

if TYPE_CHECKING:
    from modelport.loadtests.compare.comparison_run import ComparisonRun
    from modelport.loadtests.compare.models_to_compare import ComparisonRequest, SelectedCandidates
    from modelport.loadtests.compare.result import Comparison
    from modelport.loadtests.compare.rounds import RoundSettings

#: Ten minutes in all, with time left for exporting and writing.
TIME_LIMIT_SECONDS = 570.0
#: Number of requests with known answers; a load repeats them in turn.
REQUESTS, QUICK_REQUESTS = 256, 64
#: ``--quick``: a rough look, without significant verdicts.
QUICK_SECONDS, QUICK_ROUNDS, QUICK_PROBES = 0.8, 1, 2
INTERRUPTED = 130


def _words(ctx: Any, param: Any, values: tuple[str, ...]) -> tuple[str, ...]:
    """Split values that are repeated, or joined by commas."""
    words = tuple(word.strip() for value in values for word in value.split(",") if word.strip())
    if values and not words:
        raise click.BadParameter("it is empty; omit it for the default", ctx, param)
    return words


@click.command(cls=OneLineCommand)
@click.argument("subjects", metavar="CHECKPOINT | MODEL...", nargs=-1, required=True)
@click.option(
    "--model",
    metavar="NAME|package.module:factory",
    help="The checkpoint's model, as for 'modelport export'.  [default: the file's name]",
)
@click.option(
    "--model-kwargs", metavar="JSON", help="Hyper-parameters; they override the checkpoint's."
)
@click.option(
    "--data",
    type=EXISTING,
    metavar="FILE.npz",
    help="Held-out rows, on which int8 artifacts are verified; with 'labels', accuracy (or AUC) is "
    "measured.  [default: CHECKPOINT-held-out.npz beside the checkpoint, if it exists]",
)
@click.option(
    "--format",
    "formats",
    multiple=True,
    callback=_words,
    metavar="FORMAT[:PRECISION][:LEVEL],...",
    help="onnx, onnx:int4, onnx:O2, onnx:int8:O2, ...  [default: onnx, onnx:int8, torchscript, "
    "savedmodel, tflite, tflite:int8, openvino, pt2]",
)
@click.option(
    "--backend",
    "backends",
    multiple=True,
    callback=_words,
    metavar="BACKEND,...",
    help="onnxruntime, pytorch, tensorflow, tflite, openvino, executorch (in the gateway); "
    "torchserve, triton, tfserving (at their own ports).  [default: all]",
)
@click.option(
    "--protocol",
    "protocols",
    multiple=True,
    type=click.Choice([protocol.value for protocol in LoadTestProtocol]),
    help="Protocol of the requests; a server that lacks it gets requests in its own protocol. "
    "Repeatable: the first counts.  [default: oip-http]",
)
@click.option(
    "--rounds",
    type=click.IntRange(1, 1000),
    default=3,
    show_default=True,
    help="Rounds of loads; each round loads every candidate.",
)
@click.option(
    "--duration",
    "duration_seconds",
    type=DurationParam(least=0.2),
    default=1.2,
    show_default=True,
    help="Duration of one load, in seconds or with a unit: 1.2, 5s, 1m.",
)
@click.option(
    "--users",
    type=click.IntRange(2, 10_000),
    default=16,
    show_default=True,
    help="Requests in flight in the second closed loop; the first has one.",
)
@click.option(
    "--rate",
    "rates",
    type=PositiveParam(),
    multiple=True,
    help="Add an open loop at this many requests per second. Repeatable.",
)
@click.option(
    "--slo-p99-ms",
    type=PositiveParam(),
    default=20.0,
    show_default=True,
    help="Limit on p99 latency, in milliseconds, in the search for the highest rate.",
)
@click.option(
    "--price-per-hour",
    type=PositiveParam(),
    help="Price of a machine like this one; gives the cost of a million inferences.",
)
@click.option("--currency", default="USD", show_default=True, help="Currency of the price.")
@click.option(
    "--repository",
    type=ExistingRepository(),
    default=Path("model_repository"),
    show_default=True,
    help="Repository of the published models: a folder, or s3://, gs:// or az://BUCKET/PREFIX.",
)
@click.option(
    "--cache",
    type=WrittenPath(),
    help="Cache of exported artifacts, by the checkpoint's SHA-256.  [default: "
    "modelport/compare in XDG_CACHE_HOME or ~/.cache]",
)
@click.option(
    "--html",
    "output",
    type=WRITTEN,
    metavar="FILE.html",
    default=Path("comparison.html"),
    show_default=True,
    help="File for the report, one self-contained HTML page.",
)
@click.option(
    "--json-report", "json_file", type=WRITTEN, metavar="FILE", help="Write all figures as JSON."
)
@click.option(
    "--time-limit",
    "time_limit_seconds",
    type=DurationParam(least=1),
    default=TIME_LIMIT_SECONDS,
    show_default=True,
    help="Time limit; a round that would exceed it is not started.",
)
@click.option(
    "--quick",
    is_flag=True,
    help="Run one round of short loads, regardless of --rounds and --duration.",
)
@seed_option
@click.option("--quiet", "-q", is_flag=True, help="Do not show progress.")
@renamed_option("--formats", "--format")
@renamed_option("--backends", "--backend")
@renamed_option("--output", "--html")
@renamed_option("--json", "--json-report")
@click.pass_context
def compare(context: click.Context, /, subjects: tuple[str, ...], **options: Any) -> None:
    """Compare formats and backends on this machine, and show the best one by each criterion.

    CHECKPOINT is exported to every missing format, proven, and served by every backend that
    this machine has. MODEL... are published models, NAME, NAME:VERSION or a folder, with one
    signature.

    Each round restarts every server, in a rotating order: cold start, one request at a
    time, many in flight, then the highest rate whose p99 stays within the limit. Every answer is
    checked; a candidate with wrong answers is disqualified, however fast.

    Exit codes: 0 done, 1 no candidate qualified, 2 usage, 4 the extra 'load' is not installed, 130
    interrupted (the results so far are written). A disqualified candidate is information,
    not a failure: 'modelport gate' decides.
    """
    started = time.monotonic()
    require_extra("load")
    check_writable((options["output"], options["json_file"]))
    with interruptible():
        try:
            result, stopped = _measure(subjects, options, started)
        except OSError as error:  # this machine's own, such as a full disk
            raise Failure(
                RuntimeError(f"cannot prepare the comparison: {plain_reason(error)}")
            ) from error
    unwritten = print_and_write(result, options["output"], options["json_file"])
    if stopped:
        click.echo(f"modelport: error: {stopped}; the report has the results so far", err=True)
    if unwritten:
        click.echo(f"modelport: error: {unwritten}", err=True)
    if stopped == "interrupted":
        context.exit(INTERRUPTED)
    if stopped or unwritten:
        context.exit(EXIT_FAILURE)
    if all(candidate.disqualified for candidate in result.candidates):
        context.exit(EXIT_FAILURE)


def _measure(
    subjects: Sequence[str], options: dict[str, Any], started: float
) -> tuple[Comparison, str]:
    """Measure; return the results, and the reason for stopping early, or an empty string."""
    with (
        temporary_folders.folder("modelport-compare-") as work,
        progress_bar(options["quiet"]) as show,
    ):
        tell = _told(show, options["quiet"])
        lineup = _lineup(subjects, options, work, lambda what: tell(what, 0, 0))
        if not lineup.contenders:
            why = "; ".join(f"{one.name}: {one.why}" for one in lineup.absent)
            raise UsageError(f"there is nothing to measure: {why}")
        shootout = _shootout(lineup, options, work, started)
        stopped = _run(shootout, tell)
    return shootout.result(*([f"{stopped}: not complete"] if stopped else [])), stopped


def _run(shootout: ComparisonRun, tell: Show) -> str:
    """Run the comparison; return the reason for stopping early, or an empty string."""
    try:
        shootout.run(tell)
    except KeyboardInterrupt:
        return "interrupted"
    except OSError as error:  # this machine's own, such as a full disk
        return plain_reason(error)
    return ""


def _lineup(
    names: Sequence[str], options: dict[str, Any], work: Path, tell: Callable[[str], None]
) -> SelectedCandidates:
    from modelport.loadtests.compare import models_to_compare as subjects
    from modelport.loadtests.system.environments import Missing
    from modelport.loadtests.system.modelport_command import Failed

    wanted = _wanted(options)
    try:
        if not subjects.is_checkpoint(names):
            return subjects.from_published(
                names, options["repository"], wanted, work, tell, options["data"]
            )
        given = subjects.checkpoint(
            Path(names[0]), options["model"], options["data"], options["model_kwargs"]
        )
        return subjects.from_checkpoint(given, wanted, _cache(options["cache"]), work, tell)
    except (Failed, Missing) as error:
        raise UsageError(str(error)) from error


def _wanted(options: dict[str, Any]) -> ComparisonRequest:
    from modelport.loadtests.compare.models_to_compare import ComparisonRequest

    return ComparisonRequest(
        formats=options["formats"],
        backends=options["backends"],
        requests=QUICK_REQUESTS if options["quick"] else REQUESTS,
        seed=options["seed"],
    )


def _cache(given: Path | None) -> Path:
    return (given or environments.cache() / "compare").absolute()


def _settings(options: dict[str, Any]) -> RoundSettings:
    from modelport.loadtests.compare.rounds import RoundSettings

    quick = options["quick"]
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    apart = len(cores) > 1
    return RoundSettings(
        protocols=tuple(map(LoadTestProtocol, options["protocols"]))
        or (LoadTestProtocol.OIP_HTTP,),
        users=(1, options["users"]),
        rates=options["rates"],
        duration_seconds=QUICK_SECONDS if quick else options["duration_seconds"],
        probes=QUICK_PROBES if quick else RoundSettings.probes,
        slo_p99_ms=options["slo_p99_ms"],
        seed=options["seed"],
        server_cores=tuple(cores[:-1]) if apart else (),
        client_core=cores[-1] if apart else None,
    )


def _shootout(
    lineup: SelectedCandidates, options: dict[str, Any], work: Path, started: float
) -> ComparisonRun:
    from modelport.loadtests.compare.comparison_run import ComparisonRun, ComparisonSubject

    price = options["price_per_hour"]
    return ComparisonRun(
        subject=ComparisonSubject(
            model=lineup.model,
            source=lineup.source,
            command=shlex.join(["modelport", *sys.argv[1:]]),
            price_per_hour=price,
            currency=options["currency"] if price else "",
        ),
        contenders=lineup.contenders,
        absent=lineup.absent,
        settings=_settings(options),
        rounds=QUICK_ROUNDS if options["quick"] else options["rounds"],
        work=work,
        ends_at=started + options["time_limit_seconds"],
        began=started,
    )


def _told(show: Show, quiet: bool) -> Show:
    """``show``, which also writes each candidate in a log, once."""
    if quiet or sys.stderr.isatty():
        return show
    said = ""

    def tell(what: str, done: int, total: int) -> None:
        nonlocal said
        show(what, done, total)
        if (candidate := what.rpartition(" · ")[0] or what) != said:
            said = candidate
            click.echo(candidate, err=True)

    return tell


def print_and_write(result: Comparison, output: Path, json_file: Path | None) -> str:
    """Print the results and write the files; return the first problem in writing, if any."""
    from modelport.loadtests.compare import json_document
    from modelport.loadtests.report import console as printed
    from modelport.loadtests.report import html

    console = printed.standard()
    printed.comparison(result, console)
    problem = ""
    for path, write in ((json_file, json_document.write), (output, html.write_comparison)):
        if path is None:
            continue
        try:
            write(result, path)
            console.print(f"written: {path}", highlight=False)
        except OSError as error:
            problem = problem or f"'{path}' cannot be written: {error.strerror}"
    return problem
