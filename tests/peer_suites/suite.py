"""A suite, the bench its tests run on, and the outcome of one test."""

from __future__ import annotations

import ast
import contextlib
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple
from unittest import mock

from modelport.gateway.cli import serve_settings
from tests import server
from tests.peer_suites.sources import PinnedSource
from tests.server import Gateway

INSIDE = Path(__file__).parent / "inside"
#: Of one test, of a file of them, and of the start of a gateway, which may load a hundred models.
TEST_SECONDS, FILE_SECONDS, START_SECONDS = 60, 900, 600
#: Of what a test said, the end that is kept.
DETAIL_CHARACTERS = 2000


class SuiteVerdict(StrEnum):
    PASS = "pass"
    CHANGED = "changed set-up"
    FAIL = "fail"
    NOT_SUPPORTED = "not supported"
    NOT_APPLICABLE = "not applicable"
    NOT_RUN = "not run"


#: A reason of a changed set-up that begins so: what the test needs is not to be had.
NEEDS = "needs "


def of_changed(changed: str) -> SuiteVerdict:
    """The verdict of a pass with a set-up that is changed as said; empty: the peer's own."""
    if changed.startswith(NEEDS):
        return SuiteVerdict.NOT_APPLICABLE
    return SuiteVerdict.CHANGED if changed else SuiteVerdict.PASS


class SuiteOutcome(NamedTuple):
    """The outcome of one test. ``detail`` is the reason or the end of its output."""

    test: str
    verdict: SuiteVerdict
    detail: str = ""


class Suite(NamedTuple):
    """The tests of one peer.

    Attributes:
        sources: where its tests are, and then whatever else they need; empty if its requirements
            bring them.
        requirements: packages of the environment that its tests run in.
        not_applicable: reasons, by a test's id or the beginning of it.
        not_supported: what the gateway lacks, likewise; such a test may run, and then fails.
        changed_setup: what differs from the peer's own set-up, likewise; such a test never passes:
            ``of_changed``.
        not_run: reasons of tests that apply and do not run yet, likewise.
        expected_failures: reasons of tests that fail and are known to; likewise. A failure that is
            not listed, and a listed one that passes, make the run fail.
        shared: its ``run`` takes a test only if it ``Bench.claims`` it, so that processes can share
            them.
        ours: the tests are this project's own, with a peer's client or document; the sums leave
            them out.
        declared: every test that the suite has, where its files tell. One that did not run and has
            no reason makes the run fail, too.
    """

    name: str
    title: str
    sources: tuple[PinnedSource, ...]
    requirements: tuple[str, ...]
    run: Callable[[Bench], Iterator[SuiteOutcome]]
    not_applicable: Mapping[str, str] = {}
    not_supported: Mapping[str, str] = {}
    changed_setup: Mapping[str, str] = {}
    not_run: Mapping[str, str] = {}
    expected_failures: Mapping[str, str] = {}
    declared: Callable[[Bench], Iterator[str]] | None = None
    shared: bool = False
    ours: bool = False


def reason_of(test: str, reasons: Mapping[str, str]) -> str:
    """The reason of the longest entry that ``test`` is or begins with; empty: there is none.

    An entry that ends in ``$`` is a whole id.
    """
    fitting = [prefix for prefix in reasons if f"{test}$".startswith(prefix)]
    return reasons[max(fitting, key=len)] if fitting else ""


class Bench:
    """The environment of a suite's ``run``.

    Attributes:
        work: a folder of this process alone.
        common: a folder of this run's processes.
        endings: what is done when the suite has run.
        claimed: the part that this process has taken last.
        python: of the suite's environment.
    """

    def __init__(
        self,
        folders: Mapping[PinnedSource, Path],
        work: Path,
        python: Path,
        not_applicable: Mapping[str, str],
        only: str = "",
    ) -> None:
        self._folders, self.work, self.python = folders, work, python
        self._only, self.common = only, work
        self.endings = contextlib.ExitStack()
        self.claimed = ""
        self._parts: Collection[str] | None = None
        self._not_applicable = not_applicable

    def wanted(self, file: str) -> bool:
        """Whether the tests of ``file`` are asked for."""
        return self._only in file

    def beside(self, name: str, parts: Collection[str] | None = None) -> Bench:
        """The bench of another process of this run.

        Args:
            parts: all that it runs, whoever has taken them; None: what nobody has taken yet.
        """
        work = self.work / name
        work.mkdir()
        bench = Bench(self._folders, work, self.python, self._not_applicable, self._only)
        bench.common, bench._parts = self.common, parts
        return bench

    def claims(self, part: str) -> bool:
        """Whether this process is to run ``part``: it is the first one that asks for it."""
        if self._parts is not None:
            self.claimed = part
            return part in self._parts
        claimed = self.common / "claimed"
        claimed.mkdir(exist_ok=True)
        try:
            (claimed / part).touch(exist_ok=False)
        except FileExistsError:
            return False
        self.claimed = part
        return True

    def source(self, source: PinnedSource) -> Path:
        """The tree of one of the suite's sources, which is only read."""
        return self._folders[source]

    @contextlib.contextmanager
    def gateway(
        self, repository: Path, *flags: str, log_file: Path | None = None
    ) -> Iterator[Gateway]:
        """A gateway on its own ports, which Triton's clients and tests take for granted.

        It runs Python models, as Triton does.
        """
        http = str(serve_settings.http_port())
        ports = ("--http-port", http, "--grpc-port", "8001", "--metrics-port", "8002")
        with (
            mock.patch.object(server, "START_SECONDS", START_SECONDS),
            server.serving(
                repository, *ports, "--allow-python", *flags, log_file=log_file
            ) as gateway,
        ):
            yield gateway

    def copy(self, source: PinnedSource, *folders: str) -> Path:
        """A writable copy of ``folders`` of a source; its root."""
        root = self.work / source.name
        for folder in folders:
            shutil.copytree(self.source(source) / folder, root / folder, dirs_exist_ok=True)
        return root

    def pytest(
        self,
        file: Path,
        prefix: str,
        *,
        label: str = "",
        select: str = "",
        test: str = "",
        environment: Mapping[str, str] | None = None,
        seconds: float = TEST_SECONDS,
        changed: str = "",
    ) -> Iterator[SuiteOutcome]:
        """Run the tests of ``file`` in its own folder; ids are ``prefix::Class::test [label]``.

        Args:
            select: pytest's ``-k``.
            test: ``Class::test``, to run this one alone.
            seconds: the limit of each test.
            changed: what differs from the peer's own set-up; a pass is then none.
        """
        suffix = f" [{label}]" if label else ""
        skip = {
            file.name + known[len(prefix) :]: reason
            for known, reason in self._not_applicable.items()
            if known.startswith(prefix)
        }
        whole = reason_of(prefix, self._not_applicable)
        if whole:
            skip[file.name] = whole
        read, write = os.pipe()
        command = [
            *(str(self.python), "-m", "pytest", "-q", "-p", "report_tests", "-c", os.devnull),
            *("--rootdir", str(file.parent), "-p", "no:cacheprovider", "--tb", "short"),
            *("--timeout", str(seconds), *(("-k", select) if select else ())),
            f"{file.name}::{test}" if test else file.name,
        ]
        asked = {"PEER_SUITES_PIPE": str(write), "PEER_SUITES_SKIP": json.dumps(skip)}
        paths = os.pathsep.join((str(INSIDE), (environment or {}).get("PYTHONPATH", "")))
        # Its output goes to a file: nobody reads a pipe before the last result is there.
        with tempfile.TemporaryFile("w+", errors="replace") as output:
            process = subprocess.Popen(
                command,
                cwd=file.parent,
                env={**os.environ, **asked, **(environment or {}), "PYTHONPATH": paths},
                pass_fds=[write],
                stdout=output,
                stderr=subprocess.STDOUT,
            )
            os.close(write)
            count = 0
            with os.fdopen(read) as lines:
                for line in lines:
                    told = json.loads(line)
                    count += 1
                    name = prefix + told["test"].removeprefix(file.name) + suffix
                    detail = _end(told["text"].removeprefix("Skipped: "))
                    verdict = _VERDICTS[told["outcome"]]
                    if verdict is SuiteVerdict.PASS and changed:
                        verdict, detail = of_changed(changed), changed
                    yield SuiteOutcome(name, verdict, detail)
            process.wait(FILE_SECONDS)
            output.seek(0)
            said = output.read()
        if not count and process.returncode != _NONE_SELECTED:
            yield SuiteOutcome(prefix + suffix, SuiteVerdict.FAIL, _end(said))

    def script(
        self, test: str, *command: str, cwd: Path, says: str = "", status: int = 0
    ) -> SuiteOutcome:
        """Run a program in the suite's environment; it passes by its exit status.

        Args:
            says: what must be in its output, too.
        """
        reason = reason_of(test, self._not_applicable)
        if reason:
            return SuiteOutcome(test, SuiteVerdict.NOT_APPLICABLE, reason)
        try:
            done = subprocess.run(
                [str(self.python), *command],
                cwd=cwd,
                capture_output=True,
                text=True,
                timeout=TEST_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return SuiteOutcome(test, SuiteVerdict.FAIL, f"no end after {TEST_SECONDS} s")
        said = done.stdout + done.stderr
        passed = done.returncode == status and says in said
        return SuiteOutcome(
            test, *((SuiteVerdict.PASS,) if passed else (SuiteVerdict.FAIL, _end(said)))
        )


_NONE_SELECTED = 5
_VERDICTS = {
    "passed": SuiteVerdict.PASS,
    "failed": SuiteVerdict.FAIL,
    "skipped": SuiteVerdict.NOT_APPLICABLE,
}


def _end(text: str) -> str:
    return text.strip()[-DETAIL_CHARACTERS:]


def declared_tests(file: Path, prefix: str) -> Iterator[str]:
    """The ids of the tests in ``file``, as pytest would name them."""
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.ClassDef):
            for member in node.body:
                if isinstance(member, _FUNCTIONS) and member.name.startswith("test"):
                    yield f"{prefix}::{node.name}::{member.name}"
        elif isinstance(node, _FUNCTIONS) and node.name.startswith("test_"):
            yield f"{prefix}::{node.name}"


_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
