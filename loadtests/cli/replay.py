"""``modelport replay``: send recorded traffic again, and compare the answers."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from modelport.gateway.cli.errors import OneLineCommand
from modelport.gateway.cli.paths import WRITTEN, ExistingRepository
from modelport.gateway.cli.server_credentials import credential_options
from modelport.gateway.errors import UsageError
from modelport.gateway.extras import require_extra
from modelport.gateway.recording.record_encryption import record_key_option
from modelport.gateway.repository.storage.location import Location
from modelport.gateway.runtime.progress import progress_bar
from modelport.loadtests.cli.options import (
    DurationParam,
    PositiveParam,
    check_writable,
    interruptible,
)
from modelport.loadtests.load.target import (
    SCHEMES,
    LoadTestProtocol,
    LoadTestTarget,
    address,
    is_tls,
)

if TYPE_CHECKING:
    from modelport.loadtests.replay.replay import ReplayRequest, ReplayResult

EXIT_DIFFERENT = 1
#: Interval of the progress.
SHOWN_SECONDS = 0.2


@click.command(cls=OneLineCommand)
@click.argument("records", type=ExistingRepository())
@click.option(
    "--target",
    "targets",
    required=True,
    multiple=True,
    metavar="URL",
    help="Server: http://HOST:PORT for requests over HTTP, grpc://HOST:PORT for those over gRPC; "
    "https:// and grpcs:// over TLS. Give both if the records have both.",
)
@click.option(
    "--speed",
    type=PositiveParam(),
    default=None,
    help="Multiple of the recorded pace.  [default: 1]",
)
@click.option("--rate", type=PositiveParam(), help="Requests per second, whatever their own pace.")
@click.option(
    "--concurrency",
    type=click.IntRange(1, 1024),
    default=64,
    show_default=True,
    help="Most requests in flight.",
)
@click.option("--model", "-m", help="Send the requests for this model only.")
@click.option("--limit", type=click.IntRange(min=1), help="Send at most this many requests.")
@click.option(
    "--atol",
    type=click.FloatRange(min=0),
    default=0.0,
    show_default=True,
    help="Absolute tolerance of numbers.",
)
@click.option(
    "--rtol",
    type=click.FloatRange(min=0),
    default=0.0,
    show_default=True,
    help="Relative tolerance of numbers.",
)
@click.option(
    "--timeout", type=DurationParam(), default=30.0, help="Time limit of a request.  [default: 30s]"
)
@click.option("--json-report", "json_file", type=WRITTEN, help="Write the counts as JSON.")
@click.option("--quiet", "-q", is_flag=True, help="Do not show progress.")
@record_key_option
@credential_options
def replay(records: Path | Location, **options: Any) -> None:
    """Send recorded requests to a server again, and compare the answers.

    RECORDS is a folder of 'modelport serve --record', a model's folder or a file in it, or
    s3://BUCKET/PREFIX, gs://, az://.

    \b
    modelport replay records --target http://localhost:8000 --target grpc://localhost:8001
    modelport replay records/fraud --target http://staging:8000 --speed 10 --rtol 1e-4

    Requests are sent in the order of their times. An answer must have the recorded status, and the
    recorded content: bit by bit, or its numbers within --atol + --rtol * the recorded number. Not
    sent are requests whose bodies are not recorded, and those whose status depends on
    circumstances, such as an overload or credentials.

    Exit status: 0; 1 if an answer differs or is missing, or none was compared; 2 usage; 4 the
    extra 'load' is not installed; 130 interrupted.
    """
    require_extra("load")
    from modelport.gateway.recording import record_reader, recorded_calls
    from modelport.loadtests.replay import replay as replaying

    if options["rate"] is not None and options["speed"] is not None:
        raise UsageError("--speed and --rate exclude each other; give one of them")
    check_writable([options["json_file"]])
    asked = _asked(options)

    found = (
        each
        for each in record_reader.read(records, recorded_calls.tell)
        if options["model"] in (None, each.model)
    )
    limit = options["limit"]
    if limit is not None:
        found = (each for _, each in zip(range(limit), found, strict=False))
    with interruptible(), progress_bar(options["quiet"]) as progress:
        told = [0.0]

        def show(done: int, seconds: float) -> None:
            now = time.monotonic()
            if now - told[0] >= SHOWN_SECONDS:
                told[0] = now
                progress(f"{done} requests sent", 0, 0)

        result = replaying.replay(found, asked, show)
    _tell(result)
    if options["json_file"] is not None:
        options["json_file"].write_text(json.dumps(document(result), indent=2) + "\n")
    if not result.is_same:
        sys.exit(EXIT_DIFFERENT)


def _asked(options: dict[str, Any]) -> ReplayRequest:
    from modelport.loadtests.replay.replay import ReplayRequest

    found: dict[str, LoadTestTarget] = {}
    for url in options["targets"]:
        target = _target(url)
        kind = "grpc" if target.protocol.is_grpc else "http"
        if kind in found:
            raise UsageError(f"--target '{url}': two servers for the same requests; give one")
        found[kind] = target
    return ReplayRequest(
        found.get("http"),
        found.get("grpc"),
        options["speed"] or 1.0,
        options["rate"],
        options["concurrency"],
        options["atol"],
        options["rtol"],
        options["timeout"],
    )


def _target(url: str) -> LoadTestTarget:
    from modelport.loadtests.users.authentication import authenticated

    scheme, _, rest = url.rpartition("://")
    if scheme not in ("http", "https", "grpc", "grpcs") or "/" in rest.strip("/"):
        raise UsageError(f"--target '{url}' is not http[s]://HOST:PORT or grpc[s]://HOST:PORT")
    try:
        protocol = SCHEMES.get(scheme, LoadTestProtocol.OIP_HTTP)
        made = LoadTestTarget(protocol, address(url), "", tls=is_tls(scheme))
    except ValueError as error:
        raise UsageError(f"--target '{url}': {error}") from error
    return authenticated(made, url)


def _tell(result: ReplayResult) -> None:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    from modelport.loadtests.replay.answer_comparison import ReplayOutcome
    from modelport.loadtests.report import console, text_escaping

    grid = Table("model", "dialect", box=box.SIMPLE)
    for outcome in ReplayOutcome:
        grid.add_column(outcome, justify="right")
    for (model, dialect), counts in sorted(result.counts.items()):
        cells = [text_escaping.line(model) or "-", text_escaping.line(dialect) or "-"]
        grid.add_row(*map(Text, cells), *(str(counts[each]) for each in ReplayOutcome))
    screen = console.standard()
    screen.print(grid)
    for reason, count in result.skipped.most_common():
        screen.print(Text(f"skipped {count}: {text_escaping.line(reason)}"))
    for each in result.examples:
        screen.print(Text(text_escaping.line(f"{each.id} {each.target}: {each.reason}", 300)))
    if result.late_seconds > 1.0:
        screen.print(
            Text(f"requests were up to {result.late_seconds:.1f} s late; raise --concurrency")
        )


def document(result: ReplayResult) -> dict[str, Any]:
    """The result as JSON."""
    return {
        "same": result.is_same,
        "seconds": result.seconds,
        "late_seconds": result.late_seconds,
        "counts": [
            {"model": model, "dialect": dialect, **{str(k): n for k, n in counts.items()}}
            for (model, dialect), counts in sorted(result.counts.items())
        ],
        "skipped": dict(result.skipped),
        "differences": [each._asdict() for each in result.examples],
    }
