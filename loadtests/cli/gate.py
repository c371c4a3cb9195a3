"""``modelport gate``: a release decision for people and pipelines."""

from __future__ import annotations

import dataclasses
import json
import shlex
import sys
from collections.abc import Callable, Mapping
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
from modelport.loadtests.load.target import LoadTestProtocol

if TYPE_CHECKING:
    from modelport.gateway.slo import Slo
    from modelport.loadtests.gate.decision import GateDecision
    from modelport.loadtests.gate.gate import GateRequest

#: Options that name a file to write.
REPORTS = ("json-report", "junit", "markdown", "html")
EXIT = {"pass": 0, "fail": 1, "inconclusive": 3}


class GateCommand(OneLineCommand):
    """A command whose exit code 1 means a failed candidate; its own failures have others."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except Failure as failure:
            if failure.exit_code != EXIT["fail"]:
                raise
            undecided = Failure(RuntimeError(f"inconclusive: {failure.message}"))
            undecided.exit_code = EXIT["inconclusive"]  # type: ignore[misc]  # click: per instance
            raise undecided from failure


@click.command(cls=GateCommand)
@click.argument("baseline")
@click.argument("candidate")
@click.option(
    "--slo", "slo_file", type=EXISTING, required=True, help="File with limits and load; see above."
)
@click.option(
    "--data",
    type=EXISTING,
    metavar="FILE",
    help="Recorded requests: a folder of 'serve --record', perf_analyzer's JSON, or .npz rows by "
    "input name; its outputs are the expected answers, its 'labels' the true labels.  [default: "
    "seeded inputs]",
)
@click.option(
    "--protocol",
    type=click.Choice([protocol.value for protocol in LoadTestProtocol]),
    help="Protocol for both sides.  [default: the SLO file's, else oip-http-binary or oip-grpc]",
)
@click.option("--users", type=click.IntRange(min=1), help="Requests in flight.")
@click.option("--rate", type=PositiveParam(), help="Rate of an open loop, in requests per second.")
@click.option("--batch-size", type=click.IntRange(min=1), help="Rows of a request.")
@click.option(
    "--max-duration", type=DurationParam(least=1), help="Time limit: 90s, 10m.  [default: 10m]"
)
@click.option(
    "--max-drop",
    type=click.FloatRange(0, 1),
    help="Accepted loss of accuracy or AUC on --data with 'labels'.  [default: 0.01]",
)
@click.option(
    "--retrained/--same-checkpoint",
    default=None,
    help="Compare each side with its own answers, or the candidate with the baseline.  [default: "
    "from the certificates]",
)
@click.option(
    "--public-key",
    "public_keys",
    type=EXISTING,
    metavar="PUBKEY",
    multiple=True,
    help="Require the candidate's signature by this key. Repeatable: any one of the keys.",
)
@seed_option
@click.option("--json-report", "json_file", type=WRITTEN, help="Write the decision as JSON.")
@renamed_option("--json", "--json-report")
@click.option("--junit", "junit_file", type=WRITTEN, help="Write the decision as JUnit XML.")
@click.option("--markdown", "markdown_file", type=WRITTEN, help="Write the decision as Markdown.")
@click.option(
    "--html", "html_file", type=WRITTEN, help="Write the decision as one HTML page with plots."
)
@click.option("--quiet", "-q", is_flag=True, help="Do not show progress.")
@credential_options
def gate(baseline: str, candidate: str, slo_file: Path, quiet: bool, **options: Any) -> None:
    """Decide whether CANDIDATE may replace BASELINE.

    Each is a published version (model_repository/fraud/2) or a model's folder (its newest version),
    here or in object storage (s3://BUCKET/PREFIX/fraud/2, gs://, az://); or the URL of a model on a
    running server: http://HOST:PORT/v2/models/NAME[/versions/V] or grpc://HOST:PORT/NAME[/V], over
    TLS https:// or grpcs://. The token and the files for TLS are for running servers.

    A candidate in a folder is first checked: manifest, certificate, signature. Then both are asked
    the same in turn, in rounds, each round with new processes, until every limit of the SLO file is
    decided or the longest duration is over. One user without a rate asks both in turn, request by
    request; several users, or a rate, load one side after the other for seconds. Each limit is
    compared with the confidence interval (a bootstrap over rounds) of p50, p99, time to first
    response, errors or wrong answers: the limit is kept, broken, or undecided.

    With the same checkpoint, the candidate's answers must equal the baseline's, within the
    tolerance of the certificates. With a retrained model, each side must answer as its own
    checkpoint did when it was exported; their differences are reported, and accuracy or AUC on
    --data with 'labels' may fall by --max-drop.

    The SLO file is TOML with the tables [limits], [regressions], [verdict], [duration], [load],
    [certificate] and [answers]; an empty one allows 5 % more at p50 and p99, 15 % more until the
    first response, one error and one wrong answer in a thousand, 0.01 less accuracy or AUC.
    docs/slo.toml shows every key.

    \b
    Exit codes:
      0    pass: every limit is kept
      1    fail: a limit is broken, or the candidate's files were changed
      2    usage: an argument, the SLO file, or a missing model
      3    inconclusive: neither; the message says how much longer it would take, or what broke
      4    the extra 'load' is not installed
      130  interrupted
    """
    require_extra("load")
    files = {kind: options[f"{kind.partition('-')[0]}_file"] for kind in REPORTS}
    _check(files)
    asked = _asked(baseline, candidate, slo_file, **options)
    with interruptible():
        decision = _judged(asked, quiet)
        unwritten = _report(decision, files)
    for problem in unwritten:
        click.echo(f"modelport: error: {problem}", err=True)
    undecided = EXIT["inconclusive"] if unwritten and decision.status == "pass" else None
    raise click.exceptions.Exit(undecided or EXIT[decision.status])


def _check(files: Mapping[str, Path | None]) -> None:
    """Check before measuring that each report has its own file, which can be written."""
    kinds: dict[Path, str] = {}
    for kind, path in files.items():
        if path is not None and (other := kinds.setdefault(path.absolute(), kind)) != kind:
            raise UsageError(f"--{other} and --{kind} name the same file '{path}'; give another")
    check_writable(files.values())


def _asked(baseline: str, candidate: str, slo_file: Path, **options: Any) -> GateRequest:
    from modelport.gateway import slo
    from modelport.gateway.recording.record_reader import is_records
    from modelport.loadtests.gate import baseline_and_candidate
    from modelport.loadtests.gate import gate as gating

    limits = _overridden(slo.read(slo_file), **options)
    for key in limits.certificate.public_keys:
        if not key.is_file():
            raise UsageError(
                f"the public key '{key}' is not a file; 'modelport keygen' makes a pair"
            )
    data = options["data"]
    if data is not None and not (data.is_file() or is_records(data)):
        raise UsageError(f"--data '{data}' is not a file; 'modelport sample' writes one")
    one, other = baseline_and_candidate.side(baseline), baseline_and_candidate.side(candidate)
    said = "load.protocol" in limits.said
    wanted = LoadTestProtocol(limits.load.protocol)
    protocol = baseline_and_candidate.protocol(one, other, wanted, said)
    asked = gating.GateRequest(
        one,
        other,
        limits,
        protocol,
        data,
        options["seed"],
        shlex.join(["modelport", *sys.argv[1:]]),
    )
    gating.check(asked)
    return asked


def _overridden(slo: Slo, **options: Any) -> Slo:
    """The SLO of the file, with the values of the command line."""
    from modelport.gateway.slo import parse

    load, said = {}, set(slo.said)
    for option, key in (
        ("users", "users"),
        ("rate", "rate_per_second"),
        ("batch_size", "batch_size"),
    ):
        if options[option] is not None:
            load[key] = options[option]
    if options["protocol"] is not None:
        load["protocol"] = LoadTestProtocol(options["protocol"])
        said.add("load.protocol")
    duration, certificate = {}, {}
    if options["max_duration"] is not None:
        duration["max_seconds"] = options["max_duration"]
    regressions, answers = {}, {}
    if options["max_drop"] is not None:
        regressions["max_drop"] = options["max_drop"]
        said.add("regressions.max_drop")
    if options["retrained"] is not None:
        answers["retrained"] = options["retrained"]
    if options["public_keys"]:
        certificate["public_keys"] = options["public_keys"]
    try:
        parse({"load": load, "duration": duration})  # the file's bounds apply here too
    except ValueError as error:
        raise UsageError(str(error)) from error
    return dataclasses.replace(
        slo,
        load=dataclasses.replace(slo.load, **load),
        duration=dataclasses.replace(slo.duration, **duration),
        certificate=dataclasses.replace(slo.certificate, **certificate),
        regressions=dataclasses.replace(slo.regressions, **regressions),
        answers=dataclasses.replace(slo.answers, **answers),
        said=frozenset(said),
    )


def _judged(asked: GateRequest, quiet: bool) -> GateDecision:
    from rich.console import Console

    from modelport.loadtests.gate.gate import judge
    from modelport.loadtests.gate.progress_display import GateProgress

    if quiet:
        return judge(asked)
    with GateProgress(asked, Console(stderr=True)) as live:
        return judge(asked, say=live.say, watch=live.watch)


def _report(decision: GateDecision, files: Mapping[str, Path | None]) -> list[str]:
    """Print the decision and write the files; return the errors of those that could not be
    written."""
    from modelport.loadtests import marked_block
    from modelport.loadtests.gate.json_document import document
    from modelport.loadtests.report import console, html, junit, markdown

    console.decision(decision, console.standard())
    for check in decision.checks:
        if check.status != "pass":
            detail = ": ".join(part for part in (check.observed, check.bound, check.detail) if part)
            annotate(f"{check.name}: {check.status}: {detail}", "modelport gate")
    told = {"verdict": str(decision.status), "baseline": decision.baseline}
    writers: dict[str, Callable[[Path], None]] = {
        "json-report": lambda path: marked_block.write(
            path, json.dumps(document(decision), indent=2) + "\n"
        ),
        "junit": lambda path: junit.write(
            path,
            f"modelport gate: {decision.candidate}",
            decision.checks,
            properties={**told, **decision.hardware},
            began_at=decision.began_at,
        ),
        "markdown": lambda path: marked_block.write(path, markdown.decision(decision)),
        "html": lambda path: html.write_gate(decision, path),
    }
    unwritten = []
    for kind, write in writers.items():
        path = files[kind]
        try:
            if path is not None:
                write(path)
        except OSError as error:
            unwritten.append(
                f"--{kind} '{path}' cannot be written: {error.strerror}; the verdict is "
                f"{decision.status}"
            )
    return unwritten
