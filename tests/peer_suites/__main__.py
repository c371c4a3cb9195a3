"""Run the peers' own suites, and write the table of every test.

    python -m tests.peer_suites [--sources FOLDER] [--output FOLDER] [--jobs N] [SUITE …]

Exits with 1 if a test fails that is not among its suite's expected failures.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
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


def run_suite(suite: Suite, bench: Bench, jobs: int) -> list[SuiteOutcome]:
    """Run it in ``jobs`` processes, where its tests can share them.

    Parts that fail unexpectedly beside others run again alone, as some tests measure milliseconds.
    """
    print(f"{suite.name}: {suite.title}", flush=True)
    if jobs == 1 or not suite.shared:
        found = _share(suite, bench)
    else:
        found = _shared(suite, [bench.beside(f"process-{number}") for number in range(jobs)])
        failed = {part for part, outcome in found if _is_unexpected(suite, outcome)}
        if failed:
            print(f"again, alone: {len(failed)}", flush=True)
            found = [told for told in found if told[0] not in failed]
            found += _shared(suite, [bench.beside("alone", failed)])
    outcomes = [outcome for _, outcome in found]
    return report.with_missing(suite, bench, report.judged(suite, outcomes))


def _shared(suite: Suite, benches: list[Bench]) -> list[tuple[str, SuiteOutcome]]:
    """The outcomes of processes, one for each bench, with the parts that they are of."""
    fork = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(len(benches), fork, network.apart) as pool:
        shares = [pool.submit(_share, suite, bench) for bench in benches]
        return [told for share in shares for told in share.result()]


def _share(suite: Suite, bench: Bench) -> list[tuple[str, SuiteOutcome]]:
    """The outcomes of the parts that no other process of this run has taken."""
    found = []
    since = time.monotonic()
    with bench.endings:
        for outcome in suite.run(bench):
            now = time.monotonic()
            found.append((bench.claimed, outcome))
            unexpected = _is_unexpected(suite, outcome)
            failed = outcome.verdict is SuiteVerdict.FAIL
            mark = "x" if failed and not unexpected else MARKS[outcome.verdict]
            line = f"  {mark} {outcome.test} ({now - since:.0f} s)"
            if unexpected:
                line += "\n    " + outcome.detail.replace("\n", "\n    ")
            print(line, flush=True)
            since = now
    return found


def _is_unexpected(suite: Suite, outcome: SuiteOutcome) -> bool:
    known = {**suite.expected_failures, **suite.not_supported}
    return outcome.verdict is SuiteVerdict.FAIL and not reason_of(outcome.test, known)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.peer_suites", description=__doc__)
    parser.add_argument("suites", nargs="*", metavar="SUITE", help=f"of: {', '.join(SUITES)}")
    parser.add_argument("--sources", type=Path, help="folder with clones (else: the user's cache)")
    parser.add_argument(
        "--output", type=Path, help="folder of the table; without it none is written"
    )
    parser.add_argument(
        "--jobs", type=int, default=1, help="processes that share the tests of a suite (1)"
    )
    parser.add_argument("--only", default="", help="run files whose path holds this alone")
    options = parser.parse_args()
    if options.jobs < 1:
        parser.error("--jobs must be at least 1")
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
    if not network.enter() and options.jobs > 1:
        parser.error("--jobs needs Linux's unshare, which gives each process ports of its own")
    results = {}
    for suite in chosen:
        with tempfile.TemporaryDirectory(prefix="peer-suites-") as work:
            python = pythons[suite.name]
            bench = Bench(folders, Path(work), python, suite.not_applicable, options.only)
            results[suite.name] = run_suite(suite, bench, options.jobs)
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
