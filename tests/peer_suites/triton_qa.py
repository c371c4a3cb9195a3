"""Triton's own tests (``qa/``), each with the models and flags that its ``test.sh`` gives it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from unittest import mock

from tests.peer_suites import triton_models, triton_verdicts
from tests.peer_suites.suite import (
    Bench,
    Suite,
    SuiteOutcome,
    SuiteVerdict,
    declared_tests,
    mentions,
)
from tests.peer_suites.triton_examples import REQUIREMENTS
from tests.peer_suites.triton_models import SERVER
from tests.peer_suites.triton_stages import STAGES, Stage

#: They take half of the time, and are a suite of their own.
_INFER_TESTS = "L0_infer"


def run(bench: Bench, infers: bool) -> Iterator[SuiteOutcome]:
    """``infers``: those of every datatype and shape, or all others."""
    qa = bench.copy(SERVER, "qa") / "qa"
    for number, stage in enumerate(STAGES):
        if stage.file.startswith(_INFER_TESTS) is not infers or not bench.wanted(stage.file):
            continue
        root = bench.work / "models" / str(number)
        root.mkdir(parents=True)
        stage.models(bench, root)
        tests = [""]
        if stage.alone:
            found = declared_tests(qa / stage.file, stage.file)
            tests = [t.partition("::")[2] for t in found if stage.alone in t]
        for test in tests:
            yield from _run(bench, stage, root, qa / stage.file, test)


def _run(bench: Bench, stage: Stage, root: Path, file: Path, test: str) -> Iterator[SuiteOutcome]:
    flags = (flag.format(folder=file.parent) for flag in stage.flags)
    echoes = triton_models.echoes(root)
    try:
        with (
            mock.patch.dict(os.environ, stage.settings),
            bench.gateway(root, *flags) as gateway,
        ):
            outcomes = bench.pytest(
                file,
                stage.file,
                label=stage.label,
                select=stage.select,
                test=test,
                environment={"SERVER_PID": str(gateway.process.pid), **stage.environment},
            )
            yield from (_with_changes(outcome, stage, file, echoes) for outcome in outcomes)
    except AssertionError as error:
        yield SuiteOutcome(f"{stage.file} [{stage.label}]", SuiteVerdict.FAIL, str(error)[-1000:])


def _with_changes(
    outcome: SuiteOutcome, stage: Stage, file: Path, echoes: set[str]
) -> SuiteOutcome:
    if outcome.verdict is not SuiteVerdict.PASS:
        return outcome
    test = outcome.test.removeprefix(stage.file).removesuffix(f" [{stage.label}]")
    changes = [stage.changed] if stage.changed else []
    if used := sorted(mentions(file, test, echoes)):
        changes.append(f"an echo in place of the Python code of {', '.join(used)}")
    changed = SuiteVerdict.CHANGED if changes else SuiteVerdict.PASS
    return outcome._replace(verdict=changed, detail="; ".join(changes))


def declared(bench: Bench, infers: bool) -> Iterator[str]:
    qa = bench.source(SERVER) / "qa"
    for file in sorted(qa.glob("*/*.py")):
        name = str(file.relative_to(qa))
        if name.startswith(_INFER_TESTS) is infers:
            yield from declared_tests(file, name)


def _suite(name: str, title: str, infers: bool) -> Suite:
    return Suite(
        name=name,
        title=title,
        sources=(SERVER,),
        requirements=REQUIREMENTS,
        run=partial(run, infers=infers),
        not_applicable=triton_verdicts.NOT_APPLICABLE,
        not_supported=triton_verdicts.NOT_SUPPORTED,
        expected_failures=triton_verdicts.EXPECTED_FAILURES,
        declared=partial(declared, infers=infers),
    )


SUITE = _suite("triton-qa", "Triton 26.09's own tests (qa/)", False)
INFER = _suite("triton-infer", "Triton 26.09's tests of every datatype and shape", True)
