"""A pytest plugin in the suite's own environment: tells the runner of each test as it ends.

It knows nothing of the project. ``PEER_SUITES_PIPE`` is the file descriptor the results go to, one
JSON object a line; ``PEER_SUITES_SKIP`` is JSON: the tests that do not apply (a test's id or the
beginning of it), with the reason.
"""

import contextlib
import json
import os

import pytest
from _pytest.unittest import TestCaseFunction

# Triton's ``TestResultCollector`` reads the counts of unittest's own results from the runner.
TestCaseFunction.testsRun, TestCaseFunction.errors, TestCaseFunction.failures = 0, (), ()

with contextlib.suppress(ImportError):
    import numpy

    numpy.NINF = -numpy.inf  # as before NumPy 2, which some tests are from

_LINES = os.fdopen(int(os.environ["PEER_SUITES_PIPE"]), "w", buffering=1)
_SKIP = json.loads(os.environ["PEER_SUITES_SKIP"])


def pytest_collection_modifyitems(items):
    for item in items:
        if hasattr(item.cls, "SERVER_PID"):  # which Triton's tests set when they are a program
            item.cls.SERVER_PID = os.environ["SERVER_PID"]
        for prefix, reason in _SKIP.items():
            if f"{item.nodeid}$".startswith(prefix):
                item.add_marker(pytest.mark.skip(reason=reason))
                break


def pytest_runtest_logreport(report):
    if report.when == "call" or report.outcome != "passed":
        skipped = report.outcome == "skipped"
        text = report.longrepr[2] if skipped else report.longreprtext
        _tell(report.nodeid, report.outcome, text)


def pytest_collectreport(report):
    if report.failed:
        _tell(report.nodeid, "failed", report.longreprtext)


def _tell(test, outcome, text):
    _LINES.write(json.dumps({"test": test, "outcome": outcome, "text": text}) + "\n")
