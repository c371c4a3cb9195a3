"""``modelport gate``: the release decision, for people and pipelines."""

from __future__ import annotations

import dataclasses
import json
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from exporters.errors import OneLineCommand, UsageError
from loadtests.arguments import Positive, Seconds, check_writable, interruptible
from loadtests.target import Protocol

if TYPE_CHECKING:
    from loadtests.gate.decision import Decision
    from loadtests.gate.gate import Asked
    from loadtests.gate.slo import Slo

_FILE = click.Path(path_type=Path)
EXIT = {"pass": 0, "fail": 1, "inconclusive": 3}


@click.command(cls=OneLineCommand)
@click.argument("baseline")
@click.argument("candidate")
@click.option("--slo", "slo_file", type=_FILE, required=True, help="Limits and load; see above.")
@click.option(
    "--data",
    type=_FILE,
    metavar="FILE",
    help="Recorded requests: perf_analyzer's JSON, or .npz rows by input name; outputs in it are "
    "the right answers.  [default: seeded inputs, and the baseline's answers]",
)
@click.option(
    "--protocol",
    type=click.Choice([protocol.value for protocol in Protocol]),
    help="Asked on both sides.  [default: the SLO file's, else oip-http-binary or oip-grpc]",
)
@click.option("--users", type=click.IntRange(min=1), help="Requests in flight.")
@click.option("--rate", type=Positive(), help="Open loop: requests a second, whatever is answered.")
@click.option("--batch-size", type=click.IntRange(min=1), help="Rows in a request.")
@click.option(
    "--max-duration", type=Seconds(least=1), help="Decide by then: 90s, 10m.  [default: 10m]"
)
@click.option(
    "--public-key",
    "public_keys",
    type=_FILE,
    metavar="PUBKEY",
    multiple=True,
    help="The candidate must be signed with it. Repeatable: any one of the keys.",
)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
@click.option("--json", "json_file", type=_FILE, help="Write the decision, for programs.")
@click.option("--junit", "junit_file", type=_FILE, help="Write JUnit XML, for a pipeline.")
@click.option("--markdown", "markdown_file", type=_FILE, help="Write it for a pull request.")
@click.option("--html", "html_file", type=_FILE, help="Write one page with plots.")
def gate(baseline: str, candidate: str, slo_file: Path, **options: Any) -> None:
    """Decide whether CANDIDATE may replace BASELINE.

    Each is a published version (model_repository/fraud/2), a model's folder (its newest version),
    or the URL of a model on a running server: http://HOST:PORT/v2/models/NAME[/versions/V] or
    grpc://HOST:PORT/NAME[/V].

    A candidate in a folder first shows its manifest, certificate and signature. Then both are asked
    the same in turn, in rounds, each round with new processes, until every limit of the SLO file is
    decided or the longest duration is over. One user without a rate asks both in turn, request by
    request; several users, or a rate, load one side after the other, seconds long. The candidate's
    answers must be the baseline's, within what the certificates allow; of a model that was trained
    anew, give what its own checkpoint answers with --data ('modelport sample' writes it). A limit
    is held against the confidence interval (a bootstrap over rounds) of p50, p99, time to first
    response, errors and wrong answers: beyond it, within it, or neither.

    The SLO file is TOML with the tables [limits], [regressions], [verdict], [duration], [load],
    [certificate] and [answers]; an empty one allows 5 % more at p50 and p99, 15 % more until the
    first response, one error and one wrong answer in a thousand. docs/slo.toml shows every key.

    \b
    Exit codes:
      0    pass: every limit is kept
      1    fail: a limit is broken, or the candidate is not what was published
      2    usage: an argument, the SLO file, or a model that is not there
      3    inconclusive: neither; it says how much longer it would need
      130  interrupted
    """
    asked = _asked(baseline, candidate, slo_file, **options)
    files = {kind: options[f"{kind}_file"] for kind in ("json", "junit", "markdown", "html")}
    check_writable(files.values())
    with interruptible():
        decision = _judged(asked)
    _report(decision, files)
    raise click.exceptions.Exit(EXIT[decision.status])


def _asked(baseline: str, candidate: str, slo_file: Path, **options: Any) -> Asked:
    try:
        from loadtests.gate import gate as gating
        from loadtests.gate import sides, slo
    except ImportError as error:
        raise UsageError(
            f"'{error.name}' is not installed; this needs it: pip install 'modelport[load]'"
        ) from error
    limits = _overridden(slo.read(slo_file), **options)
    for key in limits.certificate.public_keys:
        if not key.is_file():
            raise UsageError(f"the public key '{key}' is no file; 'modelport keygen' makes a pair")
    data = options["data"]
    if data is not None and not data.is_file():
        raise UsageError(f"--data '{data}' is no file; 'modelport sample' writes one")
    one, other = sides.side(baseline), sides.side(candidate)
    said = "load.protocol" in limits.said
    protocol = sides.protocol(one, other, limits.load.protocol, said)
    asked = gating.Asked(
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
    """The file's, with what the command line says instead."""
    load, said = {}, set(slo.said)
    for option, key in (
        ("users", "users"),
        ("rate", "rate_per_second"),
        ("batch_size", "batch_size"),
    ):
        if options[option] is not None:
            load[key] = options[option]
    if options["protocol"] is not None:
        load["protocol"] = Protocol(options["protocol"])
        said.add("load.protocol")
    duration, certificate = {}, {}
    if options["max_duration"] is not None:
        duration["max_seconds"] = options["max_duration"]
    if options["public_keys"]:
        certificate["public_keys"] = options["public_keys"]
    return dataclasses.replace(
        slo,
        load=dataclasses.replace(slo.load, **load),
        duration=dataclasses.replace(slo.duration, **duration),
        certificate=dataclasses.replace(slo.certificate, **certificate),
        said=frozenset(said),
    )


def _judged(asked: Asked) -> Decision:
    from rich.console import Console

    from loadtests.gate.gate import judge
    from loadtests.gate.live import Live

    with Live(asked, Console(stderr=True)) as live:
        return judge(asked, say=live.say, watch=live.watch)


def _report(decision: Decision, files: dict[str, Path | None]) -> None:
    from rich.console import Console

    from loadtests.gate.document import document
    from loadtests.report import blocks, console, html, junit, markdown

    console.decision(decision, Console())
    if files["json"]:
        blocks.write(files["json"], json.dumps(document(decision), indent=2) + "\n")
    if files["junit"]:
        suite = f"modelport gate: {decision.candidate}"
        told = {"verdict": str(decision.status), "baseline": decision.baseline}
        junit.write(
            files["junit"],
            suite,
            decision.checks,
            properties={**told, **decision.hardware},
            began_at=decision.began_at,
        )
    if files["markdown"]:
        blocks.write(files["markdown"], markdown.decision(decision))
    if files["html"]:
        html.write_gate(decision, files["html"])
