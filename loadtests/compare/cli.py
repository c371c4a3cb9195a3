"""``modelport compare``: the shoot-out."""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from modelport.exporters.progress import Heartbeat, heartbeat
from modelport.gateway.cli.errors import (
    EXIT_FAILURE,
    Failure,
    OneLineCommand,
    UsageError,
    require_extra,
)
from modelport.loadtests import environments, temporary
from modelport.loadtests.arguments import Positive, Seconds, check_writable, interruptible
from modelport.loadtests.target import Protocol

if TYPE_CHECKING:
    from rich.console import Console

    from modelport.loadtests.compare.comparison import Comparison
    from modelport.loadtests.compare.rounds import Settings
    from modelport.loadtests.compare.shootout import Shootout, Step
    from modelport.loadtests.compare.subjects import Lineup, Wanted

_FILE = click.Path(path_type=Path)
#: So that everything is over within ten minutes, what is exported and written included.
TIME_LIMIT_SECONDS = 570.0
#: Requests whose answers are known; a load asks them in turn.
REQUESTS, QUICK_REQUESTS = 256, 64
#: ``--quick``: a look, no verdict beyond the noise.
QUICK_SECONDS, QUICK_ROUNDS, QUICK_PROBES = 0.8, 1, 2
INTERRUPTED = 130


def _words(ctx: Any, param: Any, values: tuple[str, ...]) -> tuple[str, ...]:
    """Repeated, or with commas in one."""
    words = tuple(word.strip() for value in values for word in value.split(",") if word.strip())
    if values and not words:
        raise click.BadParameter("it names nothing; leave it out for the default", ctx, param)
    return words


@click.command(cls=OneLineCommand)
@click.argument("subjects", metavar="CHECKPOINT | MODEL...", nargs=-1, required=True)
@click.option(
    "--model",
    metavar="NAME|package.module:factory",
    help="What the checkpoint is of, as for 'modelport export'.  [default: the file's name]",
)
@click.option("--model-kwargs", metavar="JSON", help="Hyper-parameters; win over the checkpoint's.")
@click.option(
    "--data",
    type=_FILE,
    metavar="FILE.npz",
    help="Held-out rows: int8 is proven by the metric, and with 'labels' accuracy (or AUC) is "
    "measured.  [default: CHECKPOINT-held-out.npz beside the checkpoint, where it is there]",
)
@click.option(
    "--formats",
    multiple=True,
    callback=_words,
    metavar="FORMAT[:PRECISION],...",
    help="[default: onnx, onnx:int8, torchscript, savedmodel, tflite, tflite:int8, pt2]",
)
@click.option(
    "--backends",
    multiple=True,
    callback=_words,
    metavar="BACKEND,...",
    help="onnxruntime, pytorch, tensorflow, tflite (in the gateway); torchserve, triton, tfserving "
    "(at their own ports); managed-torchserve, managed-triton, managed-tfserving (behind the "
    "gateway).  [default: all but the managed]",
)
@click.option(
    "--protocol",
    "protocols",
    multiple=True,
    type=click.Choice([protocol.value for protocol in Protocol]),
    help="How they are asked; a server that does not speak it is asked in its own dialect. "
    "Repeatable: the first decides.  [default: oip-http]",
)
@click.option("--rounds", type=click.IntRange(1, 1000), default=3, show_default=True)
@click.option(
    "--duration",
    "duration_seconds",
    type=Seconds(least=0.2),
    default=1.2,
    show_default=True,
    help="Of one load: 1.2, 5s, 1m.",
)
@click.option(
    "--users",
    type=click.IntRange(2, 10_000),
    default=16,
    show_default=True,
    help="Requests in flight of the closed loop, besides one alone.",
)
@click.option(
    "--rate",
    "rates",
    type=Positive(),
    multiple=True,
    help="An open loop at this many requests a second too. Repeatable.",
)
@click.option(
    "--slo-p99-ms",
    type=Positive(),
    default=20.0,
    show_default=True,
    help="The bound of the search for the highest rate.",
)
@click.option(
    "--price-per-hour",
    type=Positive(),
    help="Of a machine like this one; gives the cost of a million inferences.",
)
@click.option("--currency", default="USD", show_default=True, help="Of the price.")
@click.option(
    "--repository",
    type=_FILE,
    default=Path("model_repository"),
    show_default=True,
    help="Where MODEL... are published.",
)
@click.option(
    "--cache",
    type=_FILE,
    help="Where exported artifacts are kept, by the checkpoint's SHA-256.  [default: "
    "modelport/compare in XDG_CACHE_HOME or ~/.cache]",
)
@click.option(
    "--output",
    type=_FILE,
    metavar="FILE.html",
    default=Path("comparison.html"),
    show_default=True,
    help="The report, one file that needs nothing else.",
)
@click.option("--json", "json_file", type=_FILE, metavar="FILE", help="All figures, as JSON.")
@click.option(
    "--time-limit",
    "time_limit_seconds",
    type=Seconds(least=1),
    default=TIME_LIMIT_SECONDS,
    show_default=True,
    help="No round begins that would not be over by then.",
)
@click.option(
    "--quick",
    is_flag=True,
    help="One round of short loads, whatever --rounds and --duration say: a look, not a verdict.",
)
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True)
@click.option("--quiet", "-q", is_flag=True, help="No progress.")
@click.pass_context
def compare(context: click.Context, /, subjects: tuple[str, ...], **options: Any) -> None:
    """Compare formats and backends on this machine, and say which won at what.

    CHECKPOINT is exported to every format that is missing, proven, and served by every backend that
    this machine has. MODEL... are published models, NAME, NAME:VERSION or a folder, of one
    signature.

    Each round starts every server anew, in an order that rotates: cold start, one request at a
    time, many in flight, then the highest rate whose p99 stays within the bound. Every answer is
    checked; who answers wrongly is disqualified, however fast.

    Exit codes: 0 done, 1 no candidate qualified, 2 usage, 4 the extra 'load' is not installed, 130
    interrupted (what was measured until then is written). A disqualified candidate is information,
    not a failure: 'modelport gate' decides.
    """
    started = time.monotonic()
    require_extra("load")
    check_writable((options["output"], options["json_file"]))
    with interruptible():
        try:
            result, stopped = _measure(subjects, options, started)
        except OSError as error:  # of this machine, such as a full disk
            raise Failure(RuntimeError(f"cannot prepare the comparison: {error}")) from error
    unwritten = tell_and_write(result, options["output"], options["json_file"])
    if stopped:
        click.echo(f"modelport: error: {stopped}; reported is what was measured by then", err=True)
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
    """What was measured, and why it stopped early; empty: it did not."""
    from rich.console import Console

    with (
        temporary.folder("modelport-compare-") as work,
        _progress(Console(stderr=True, quiet=options["quiet"])) as tell,
    ):
        lineup = _lineup(subjects, options, work, tell.what)
        if not lineup.contenders:
            why = "; ".join(f"{one.name}: {one.why}" for one in lineup.absent)
            raise UsageError(f"there is nothing to measure: {why}")
        shootout = _shootout(lineup, options, work, started)
        stopped = _run(shootout, tell)
    return shootout.result(*([f"{stopped}: not all was measured"] if stopped else [])), stopped


def _run(shootout: Shootout, tell: _Progress) -> str:
    """Why it stopped early; empty: it did not."""
    try:
        shootout.run(tell.step)
    except KeyboardInterrupt:
        return "interrupted"
    except OSError as error:  # of this machine, such as a full disk
        return str(error)
    return ""


def _lineup(
    names: Sequence[str], options: dict[str, Any], work: Path, tell: Callable[[str], None]
) -> Lineup:
    from modelport.loadtests.command import Failed
    from modelport.loadtests.compare import subjects
    from modelport.loadtests.environments import Missing

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


def _wanted(options: dict[str, Any]) -> Wanted:
    from modelport.loadtests.compare.subjects import Wanted

    return Wanted(
        formats=options["formats"],
        backends=options["backends"],
        requests=QUICK_REQUESTS if options["quick"] else REQUESTS,
        seed=options["seed"],
    )


def _cache(given: Path | None) -> Path:
    return (given or environments.cache() / "compare").absolute()


def _settings(options: dict[str, Any]) -> Settings:
    from modelport.loadtests.compare.rounds import Settings

    quick = options["quick"]
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    apart = len(cores) > 1
    return Settings(
        protocols=tuple(map(Protocol, options["protocols"])) or (Protocol.OIP_HTTP,),
        users=(1, options["users"]),
        rates=options["rates"],
        duration_seconds=QUICK_SECONDS if quick else options["duration_seconds"],
        probes=QUICK_PROBES if quick else Settings.probes,
        slo_p99_ms=options["slo_p99_ms"],
        seed=options["seed"],
        server_cores=tuple(cores[:-1]) if apart else (),
        client_core=cores[-1] if apart else None,
    )


def _shootout(lineup: Lineup, options: dict[str, Any], work: Path, started: float) -> Shootout:
    from modelport.loadtests.compare.shootout import Shootout, Subject

    price = options["price_per_hour"]
    return Shootout(
        subject=Subject(
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


class _Progress:
    """A bar on a terminal; elsewhere a line for each candidate."""

    def __init__(self, console: Console) -> None:
        from rich.progress import (
            BarColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )

        self.bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self.task = self.bar.add_task("starting", total=None)
        self.console = console
        self.said = ""
        self.heartbeat: Heartbeat | None = None

    def what(self, text: str) -> None:
        self.bar.update(self.task, description=text)
        self._say(text)

    def step(self, step: Step) -> None:
        self.bar.tasks[self.task].total = step.total
        self.bar.update(self.task, description=step.what, completed=step.done)
        self._say(step.what.rpartition(" · ")[0] or step.what)

    def _say(self, text: str) -> None:
        if self.heartbeat is not None:
            self.heartbeat.text = text
        if not self.console.is_terminal and text != self.said:
            self.said = text
            self.console.print(text, highlight=False)


@contextmanager
def _progress(console: Console) -> Iterator[_Progress]:
    progress = _Progress(console)
    with progress.bar, ExitStack() as stack:
        if not console.is_terminal and not console.quiet:
            progress.heartbeat = stack.enter_context(heartbeat())
        yield progress


def tell_and_write(result: Comparison, output: Path, json_file: Path | None) -> str:
    """On the terminal and as files; why the first that could not be written was not, or nothing."""
    from modelport.loadtests.compare import document
    from modelport.loadtests.report import console as printed
    from modelport.loadtests.report import html

    console = printed.standard()
    printed.comparison(result, console)
    problem = ""
    for path, write in ((json_file, document.write), (output, html.write_comparison)):
        if path is None:
            continue
        try:
            write(result, path)
            console.print(f"written: {path}", highlight=False)
        except OSError as error:
            problem = problem or f"'{path}' cannot be written: {error.strerror}"
    return problem
