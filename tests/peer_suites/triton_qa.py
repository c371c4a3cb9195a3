"""Triton's own tests (``qa/``), each with the models and flags that its ``test.sh`` gives it."""

from __future__ import annotations

import contextlib
import os
import shutil
import urllib.error
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from unittest import mock

from tests.peer_suites import triton_python_examples, triton_verdicts
from tests.peer_suites.suite import (
    TEST_SECONDS,
    Bench,
    Suite,
    SuiteOutcome,
    SuiteVerdict,
    declared_tests,
    of_changed,
)
from tests.peer_suites.triton_examples import REQUIREMENTS
from tests.peer_suites.triton_models import SERVER
from tests.peer_suites.triton_python_models import PYTHON_BACKEND
from tests.peer_suites.triton_python_stages import STAGES as PYTHON_STAGES
from tests.peer_suites.triton_sequences import STAGES as SEQUENCE_STAGES
from tests.peer_suites.triton_stages import STAGES, Stage

#: Suites of their own, by the beginning of their files; the first takes half of the time.
_PARTS = {"triton-infer": "L0_infer", "triton-python": "L0_backend_python"}


def _part(file: str) -> str:
    """The suite that has the tests of ``file``."""
    return next((name for name, start in _PARTS.items() if file.startswith(start)), "triton-qa")


def run(bench: Bench, part: str) -> Iterator[SuiteOutcome]:
    qa = bench.copy(SERVER, "qa") / "qa"
    for number, stage in enumerate((*STAGES, *SEQUENCE_STAGES, *PYTHON_STAGES)):
        if _part(stage.file) != part or not bench.wanted(stage.file):
            continue
        if not bench.claims(str(number)):
            continue
        root = bench.work / "models" / str(number)
        if part == "triton-python":  # a model looks where it is
            root = (qa / stage.file).parent / "models"
            shutil.rmtree(root, ignore_errors=True)
        root.mkdir(parents=True)
        stage.models(bench, root)
        tests = [""]
        if stage.alone:
            found = declared_tests(qa / stage.file, stage.file)
            tests = [t.partition("::")[2] for t in found if stage.alone in t]
        for test in tests:
            yield from _run(bench, stage, root, qa / stage.file, test)
    if part == "triton-python" and bench.claims("examples"):
        yield from triton_python_examples.run(bench)


def _run(bench: Bench, stage: Stage, root: Path, file: Path, test: str) -> Iterator[SuiteOutcome]:
    """The tests of ``stage``; of a ``test.sh``, what it looks for in the log is one."""
    places = {"folder": file.parent, "server": bench.work / SERVER.name}
    name = f"{stage.file} [{stage.label}]" if stage.label else stage.file
    log = file.parent / (stage.log or "inference_server.log")
    settings = {key: value.format(**places) for key, value in stage.settings.items()}
    environment = {key: value.format(**places) for key, value in stage.environment.items()}
    started = False
    try:
        with (
            contextlib.chdir(file.parent),  # where ``test.sh`` starts the server
            mock.patch.dict(os.environ, settings),
            bench.gateway(
                root, *(flag.format(**places) for flag in stage.flags), log_file=log
            ) as gateway,
        ):
            started = True
            if stage.before:
                stage.before(gateway)
            if file.suffix == ".py":
                variables = {"SERVER_PID": str(gateway.process.pid), "SERVER_LOG": log.name}
                yield from bench.pytest(
                    file,
                    stage.file,
                    label=stage.label,
                    select=stage.select,
                    test=test,
                    environment={**variables, **environment},
                    seconds=stage.seconds or TEST_SECONDS,
                    changed=stage.changed,
                )
            if stage.says or file.suffix == ".sh":
                gateway.terminate()
    except (AssertionError, urllib.error.HTTPError) as error:
        if stage.starts:
            yield SuiteOutcome(name, SuiteVerdict.FAIL, str(error)[-1000:])
            return
    if stage.says or file.suffix == ".sh":
        test_sh = f"{stage.file.rpartition('/')[0]}/test.sh"
        yield _looked(f"{test_sh}::{stage.label or 'log'}", stage, started, log.read_text())


def _looked(test: str, stage: Stage, started: bool, log: str) -> SuiteOutcome:
    """Whether the gateway has started, and its log has what ``test.sh`` looks for."""
    counts = {text: sum(text in line for line in log.splitlines()) for text, _ in stage.says}
    wrong = [
        f"{counts[text]} lines with {text!r}, not {wanted if wanted >= 0 else 'one'}"
        for text, wanted in stage.says
        if (counts[text] != wanted if wanted >= 0 else not counts[text])
    ]
    if started is not stage.starts:
        wrong.append("it has started" if started else "it has not started")
    if wrong:
        return SuiteOutcome(test, SuiteVerdict.FAIL, "; ".join(wrong) + f"\n\n{log[-1500:]}")
    return SuiteOutcome(test, of_changed(stage.changed), stage.changed)


def declared(bench: Bench, part: str) -> Iterator[str]:
    qa = bench.source(SERVER) / "qa"
    for file in sorted((*qa.glob("*/*.py"), *qa.glob("L0_backend_python/*/*.py"))):
        name = str(file.relative_to(qa))
        if _part(name) == part:
            yield from declared_tests(file, name)


def _suite(name: str, title: str, *more: str) -> Suite:
    return Suite(
        name=name,
        title=title,
        sources=(SERVER, PYTHON_BACKEND) if name == "triton-python" else (SERVER,),
        requirements=(*REQUIREMENTS, *more),
        run=partial(run, part=name),
        not_applicable=triton_verdicts.NOT_APPLICABLE,
        not_supported=triton_verdicts.NOT_SUPPORTED,
        not_run=triton_verdicts.NOT_RUN,
        expected_failures=triton_verdicts.EXPECTED_FAILURES,
        declared=partial(declared, part=name),
        shared=True,
    )


SUITE = _suite("triton-qa", "Triton 26.09's own tests (qa/)")
INFER = _suite("triton-infer", "Triton 26.09's tests of every datatype and shape")
PYTHON = _suite("triton-python", "Triton 26.09's tests of its Python backend", "ml-dtypes")
