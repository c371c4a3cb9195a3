"""Run the peers' own suites, and write the table of every test.

    python -m tests.peer_suites [--sources FOLDER] [--output FOLDER] [SUITE …]

Exits with 1 if a test fails that is not among its suite's expected failures.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from modelport.loadtests.system import environments
from tests import verb
from tests.peer_suites import (
    grpc_clients,
    kserve,
    network,
    oip,
    report,
    schemathesis,
    sources,
    tensorflow_serving,
    torchserve,
    triton_examples,
    triton_qa,
)
from tests.peer_suites.sources import PinnedSource
from tests.peer_suites.suite import Bench, Suite, SuiteOutcome, SuiteVerdict, reason_of

MODULES = (
    triton_examples,
    triton_qa,
    tensorflow_serving,
    torchserve,
    kserve,
    oip,
    grpc_clients,
    schemathesis,
)
SUITES: dict[str, Suite] = {
    suite.name: suite
    for suite in (*(module.SUITE for module in MODULES), triton_qa.INFER, triton_qa.PYTHON)
}
MARKS = dict(zip(SuiteVerdict, ".cF-s?", strict=True))


def run_suite(
    suite: Suite, folders: Mapping[PinnedSource, Path], python: Path, only: str
) -> list[SuiteOutcome]:
    print(f"{suite.name}: {suite.title}", flush=True)
    found: list[SuiteOutcome] = []
    with tempfile.TemporaryDirectory(prefix="peer-suites-") as work:
        bench = Bench(folders, Path(work), python, suite.not_applicable, only)
        for outcome in suite.run(bench):
            found.append(outcome)
            failed = outcome.verdict is SuiteVerdict.FAIL
            known = failed and reason_of(
                outcome.test, {**suite.expected_failures, **suite.not_supported}
            )
            line = f"  {'x' if known else MARKS[outcome.verdict]} {outcome.test}"
            print(line, flush=True)
            if failed and not known:
                print("    " + outcome.detail.replace("\n", "\n    "), flush=True)
    return report.with_missing(suite, bench, report.judged(suite, found))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.peer_suites", description=__doc__)
    parser.add_argument("suites", nargs="*", metavar="SUITE", help=f"of: {', '.join(SUITES)}")
    parser.add_argument("--sources", type=Path, help="folder with clones (else: the user's cache)")
    parser.add_argument(
        "--output", type=Path, help="folder of the table; without it none is written"
    )
    parser.add_argument("--only", default="", help="run files whose path holds this alone")
    options = parser.parse_args()
    if options.output and options.only:
        parser.error("--only writes no table: it would have results of two commits")
    unknown = sorted(set(options.suites) - set(SUITES))
    if unknown:
        parser.error(f"no suite '{unknown[0]}'; there are: {', '.join(SUITES)}")
    chosen = [SUITES[name] for name in options.suites] or list(SUITES.values())
    # All that needs the network comes first.
    given = options.sources and options.sources.resolve()
    folders = {
        source: sources.checkout(source, given) for suite in chosen for source in suite.sources
    }
    pythons = {
        suite.name: environments.venv(f"peer_{suite.name}", *suite.requirements) / "python"
        for suite in chosen
    }
    network.enter()
    results = {
        suite.name: run_suite(suite, folders, pythons[suite.name], options.only) for suite in chosen
    }
    problems = []
    for suite in chosen:
        outcomes = results[suite.name]
        told = ", ".join(f"{count} {word}" for word, count in report.counts(outcomes).items())
        print(f"{suite.name}: {told}")
        problems += report.unexpected(suite, outcomes, options.only)
    if options.output:
        report.write(options.output, SUITES, results, verb.commit())
    for problem in problems:
        print(f"unexpected: {problem}", file=sys.stderr)
    return int(bool(problems))


if __name__ == "__main__":
    verb.run(main)
