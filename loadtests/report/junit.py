"""Checks as JUnit XML for GitLab, Jenkins and GitHub Actions.

The dialect is the common part of Jenkins's xunit schema and of what GitLab documents: a
`testsuites` with one `testsuite`, a `testcase` for each check, `failure` for a failed check and
`error` for an undecided one: neither passes a pipeline.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from xml.etree import ElementTree

from modelport.loadtests import marked_block
from modelport.loadtests.checks import Check, CheckStatus
from modelport.loadtests.report import text_escaping

#: Elements of checks that do not pass.
ELEMENTS = {CheckStatus.FAIL: "failure", CheckStatus.INCONCLUSIVE: "error"}


def write(
    path: Path,
    suite: str,
    checks: Sequence[Check],
    *,
    properties: Mapping[str, str] | None = None,
    began_at: str = "",
) -> None:
    """Write one suite named ``suite`` with a case for each check.

    ``properties`` describe the measurement.
    """
    totals = {
        "name": text_escaping.line(suite),
        "tests": str(len(checks)),
        "failures": str(sum(check.status is CheckStatus.FAIL for check in checks)),
        "errors": str(sum(check.status is CheckStatus.INCONCLUSIVE for check in checks)),
        "time": f"{sum(check.seconds for check in checks):.3f}",
    }
    root = ElementTree.Element("testsuites", totals)
    found = ElementTree.SubElement(root, "testsuite", totals | {"skipped": "0"})
    if began_at:
        found.attrib["timestamp"] = _timestamp(began_at)
    if properties:
        holder = ElementTree.SubElement(found, "properties")
        for name, value in properties.items():
            attributes = {"name": text_escaping.line(name), "value": text_escaping.line(value)}
            ElementTree.SubElement(holder, "property", attributes)
    for check in checks:
        _case(found, suite, check)
    ElementTree.indent(root)
    text = ElementTree.tostring(root, encoding="unicode")
    marked_block.write(path, f'<?xml version="1.0" encoding="UTF-8"?>\n{text}\n')


def _case(suite: ElementTree.Element, name: str, check: Check) -> None:
    case = ElementTree.SubElement(
        suite,
        "testcase",
        {
            "classname": text_escaping.line(name),
            "name": text_escaping.line(check.name),
            "time": f"{check.seconds:.3f}",
        },
    )
    seen = f"{check.observed}, {check.bound}" if check.bound else check.observed
    told = text_escaping.fit("\n".join(part for part in (seen, check.detail) if part))
    kind = ELEMENTS.get(check.status)
    if kind is None:
        ElementTree.SubElement(case, "system-out").text = told
        return
    message = ": ".join(part for part in (seen, check.detail) if part) or check.name
    attributes = {"message": text_escaping.line(message), "type": str(check.status)}
    ElementTree.SubElement(case, kind, attributes).text = told


def _timestamp(moment: str) -> str:
    """ISO 8601 without a zone, as in Jenkins' schema."""
    try:
        return datetime.fromisoformat(moment).strftime("%Y-%m-%dT%H:%M:%S")
    except ValueError:
        return text_escaping.line(moment)
