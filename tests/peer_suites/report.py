"""The table of every test: ``docs/peer-suites.md``, and the same as JSON."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tests.peer_suites.suite import (
    Bench,
    Suite,
    SuiteOutcome,
    SuiteVerdict,
    of_changed,
    reason_of,
)

HEAD = """\
# The peers' own suites

`make peer-suites` runs the test suites of the servers and clients that speak the gateway's
protocols against a running gateway, and writes this page. `peer-suites.json` has the same results
with the output of each failing test.

- **pass**: the peer's test passes with the peer's own set-up: its models, files and settings, and
  the gateway in place of the server.
- **changed set-up**: it passes, but models, files or settings differ; the row says how.
- **fail**: it fails; the row says why.
- **not supported**: it is about a feature that the gateway lacks.
- **not applicable**: it needs a GPU, TensorRT, a peer's own name, log, build or private setting,
  native code as a model, files that are not public, such as trained weights that no package index
  has, or contradicts another of the peer's tests. Some run with other files all the same; the row
  says with which it passes.
- **not run**: the last run ended before it, or the row says why.

Triton's models are made by its own generators (`qa/common`). Where its tests let one choose the
backends, they run with ONNX Runtime; one runs with TorchScript and OpenVINO, too. Models of
TensorRT or of a GPU that a test does not ask are left out, or do not load. Its Python models run
unmodified, by `--allow-python`; the probe of leaks in its Python backend's shared memory finds no
region of the gateway's. Flags of logs, of the time to exit and of the interval of metrics, which
are read when they are asked for, are left out. Tests that fail while others run beside them run
again alone: some measure milliseconds.

"""


_FOLDERS = re.compile(r"(?<![\w.:/])/(?:[\w.@+-]+/)+(?=[\w.-]+\.\w+)")


def judged(suite: Suite, outcomes: Iterable[SuiteOutcome]) -> list[SuiteOutcome]:
    """Every test once, by its id, with its worst verdict; failures that are known have their
    reason first."""
    found: dict[str, SuiteOutcome] = {}
    for outcome in outcomes:
        changed = reason_of(outcome.test, suite.changed_setup)
        if outcome.verdict is SuiteVerdict.FAIL:
            outcome = _failed(suite, outcome)
        elif outcome.verdict is SuiteVerdict.PASS and changed:
            outcome = outcome._replace(verdict=of_changed(changed), detail=changed)
        earlier = found.get(outcome.test)
        if earlier is None or _WORST.index(outcome.verdict) <= _WORST.index(earlier.verdict):
            found[outcome.test] = outcome
    return sorted(found.values())


#: Verdicts of a test that ran, the worst one first.
_WORST = (
    *(SuiteVerdict.FAIL, SuiteVerdict.NOT_SUPPORTED, SuiteVerdict.CHANGED),
    *(SuiteVerdict.NOT_APPLICABLE, SuiteVerdict.PASS),
)


def _failed(suite: Suite, outcome: SuiteOutcome) -> SuiteOutcome:
    lacking = reason_of(outcome.test, suite.not_supported)
    if lacking:
        return outcome._replace(verdict=SuiteVerdict.NOT_SUPPORTED, detail=lacking)
    known = reason_of(outcome.test, suite.expected_failures)
    return outcome._replace(detail=f"{known}\n\n{outcome.detail}") if known else outcome


def with_missing(suite: Suite, bench: Bench, outcomes: list[SuiteOutcome]) -> list[SuiteOutcome]:
    """``outcomes``, and those tests that the suite declares and that did not run."""
    seen = {outcome.test.split(" [")[0].split("[")[0] for outcome in outcomes}
    missing = []
    for test in suite.declared(bench) if suite.declared else ():
        if test not in seen:
            verdict, detail = SuiteVerdict.NOT_RUN, reason_of(test, suite.not_run)
            if reason := reason_of(test, suite.not_applicable):
                verdict, detail = SuiteVerdict.NOT_APPLICABLE, reason
            elif reason := reason_of(test, suite.not_supported):
                verdict, detail = SuiteVerdict.NOT_SUPPORTED, reason
            missing.append(SuiteOutcome(test, verdict, detail))
    return sorted([*outcomes, *missing])


def unexpected(suite: Suite, outcomes: Iterable[SuiteOutcome], only: str = "") -> list[str]:
    """One line for each failure that is not listed, for each listed test that passes, and for each
    test that neither ran nor has a reason.

    Args:
        only: part of the paths of the files that ran; empty: all did.
    """
    lines = []
    for outcome in outcomes:
        known = reason_of(outcome.test, suite.expected_failures)
        if outcome.verdict is SuiteVerdict.FAIL and not known:
            last = outcome.detail.splitlines()[-1:] or [""]
            lines.append(f"{outcome.test}: {last[0]}")
        listed = outcome.test in suite.expected_failures or outcome.test in suite.not_supported
        if outcome.verdict in (SuiteVerdict.PASS, SuiteVerdict.CHANGED) and listed:
            lines.append(f"{outcome.test} passes: take it out of the expected failures")
        unexplained = outcome.verdict is SuiteVerdict.NOT_RUN and not outcome.detail
        if unexplained and only in _file(outcome):
            lines.append(f"{outcome.test} did not run: give it a gateway, or a reason")
    return lines


def counts(outcomes: Iterable[SuiteOutcome]) -> dict[str, int]:
    found = Counter(outcome.verdict for outcome in outcomes)
    return {verdict.value: found[verdict] for verdict in SuiteVerdict}


def document(
    suites: Mapping[str, Suite], results: Mapping[str, list[SuiteOutcome]], commit: str
) -> dict[str, Any]:
    return {
        name: {
            "commit": commit,
            "source": suites[name].sources[0].link if suites[name].sources else "",
            "counts": counts(outcomes),
            "tests": [
                {**outcome._asdict(), "detail": _without_folders(outcome.detail)}
                for outcome in outcomes
            ],
        }
        for name, outcomes in results.items()
    }


def _without_folders(detail: str) -> str:
    """``detail`` without the places of files on the machine of this run."""
    return _FOLDERS.sub("", detail)


def write(
    folder: Path,
    suites: Mapping[str, Suite],
    results: Mapping[str, list[SuiteOutcome]],
    commit: str,
) -> None:
    """The table and the JSON; suites that did not run now keep what the JSON has of them."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "peer-suites.json"
    told = json.loads(file.read_text()) if file.is_file() else {}
    told = {name: each for name, each in told.items() if name in suites}
    told |= document(suites, results, commit)
    told = {name: told[name] for name in suites if name in told}
    file.write_text(json.dumps(told, indent=1) + "\n")
    (folder / "peer-suites.md").write_text(markdown(suites, told))


def _file(outcome: SuiteOutcome) -> str:
    return outcome.test.partition("::")[0]


def markdown(suites: Mapping[str, Suite], told: Mapping[str, Any]) -> str:
    columns = [verdict.value for verdict in SuiteVerdict]
    lines = [f"| suite | {' | '.join(columns)} |", "|---|" + "---:|" * len(columns)]
    total: Counter[str] = Counter()
    for name, each in told.items():
        if not suites[name].ours:
            total.update(each["counts"])
        cells = " | ".join(str(each["counts"][column]) for column in columns)
        mark = "*" if suites[name].ours else ""
        lines.append(f"| [{suites[name].title}](#{name}){mark} | {cells} |")
    lines.append(
        f"| **all of the peers' tests** | {' | '.join(str(total[column]) for column in columns)} |"
    )
    lines += ["", _share(total), "", "\\* Tests of this project, with a peer's client or document."]
    for name, each in told.items():
        lines += [
            "",
            f"## {name}",
            "",
            f"{suites[name].title}{_at(each['source'])}. The gateway was at {each['commit']}.",
        ]
        lines += ["", "| test | verdict | why |", "|---|---|---|"]
        for test in each["tests"]:
            why = "" if test["verdict"] == SuiteVerdict.PASS else _line(test["detail"])
            lines.append(f"| `{test['test']}` | {test['verdict']} | {why} |")
    return HEAD + "\n".join(lines) + "\n"


def _share(total: Mapping[str, int]) -> str:
    """The share of passes, with and without the tests of features that the gateway lacks."""
    passed = total[SuiteVerdict.PASS]
    ran = passed + total[SuiteVerdict.CHANGED] + total[SuiteVerdict.FAIL]
    every = ran + total[SuiteVerdict.NOT_SUPPORTED] + total[SuiteVerdict.NOT_RUN]
    return (
        f"{passed} of {ran} tests that ran ({passed / max(1, ran):.1%}) pass with the peer's own "
        f"set-up; of all {every} that apply, {passed / max(1, every):.1%}."
    )


def _at(link: str) -> str:
    return f", at [{link.rsplit('/')[-1][:12]}]({link})" if link else ""


def _line(detail: str) -> str:
    """The reason, or the first line of a failure that says something."""
    first = detail.split("\n\n")[0].strip().splitlines()
    text = next((line for line in first if line.startswith("E  ")), first[0] if first else "")
    return text.removeprefix("E").strip().replace("|", "\\|").replace("<", "&lt;")[:200]
