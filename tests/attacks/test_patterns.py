"""The time of every regular expression grows with the length of its text, and no faster."""

from __future__ import annotations

import re

import pytest

from tests.attacks import patterns

#: Patterns whose texts come from the operator, or are cut before.
TRUSTED = {
    "gateway/errors.py _ONNX_RUNTIME": "cut to SEARCHED_CHARACTERS",
    "exporters/sources/tensor_flags.py _INPUT": "an option of the command line",
}
#: Patterns that are made at run time, of what the operator writes.
MADE_AT_RUN_TIME = {
    "gateway/protocols/http.py": "parts of a path that end at a slash, in the dialects' tables",
    "gateway/cli/serve_settings.py": "--http-header-forward-pattern, of names of header fields",
    "gateway/access/policy.py": "globs of access.toml, which fnmatch makes linear",
    "gateway/repository/artifact_checks/pt2_guard.py": "a number behind a constant",
    "gateway/repository/version_choice.py": "a label of the command line, quoted",
}


def superlinear(package: str) -> dict[str, str]:
    found, made = patterns.found([package])
    assert found
    assert not [place for place in made if place.split()[0] not in MADE_AT_RUN_TIME]
    slow = {each.place: patterns.superlinear(each.pattern, each.methods) for each in found}
    return {
        place: text for place, text in slow.items() if text and not place.startswith(tuple(TRUSTED))
    }


@pytest.mark.thorough
@pytest.mark.parametrize("package", ["gateway", "exporters", "loadtests", "modelport"])
def test_no_pattern_takes_longer_than_its_text_is_long(package: str) -> None:
    assert superlinear(package) == {}


@pytest.mark.parametrize(
    ("pattern", "method"),
    [
        # Of the gateway, before: 40,000 digits took 5 s, and 64 KiB of 0xff in a JPEG seconds.
        (r"(?:ipv[46]:)?\d+\.\d+\.\d+\.\d+(?::\d+)?", "sub"),
        (rb"\xff+[^\x00\xff]", "search"),
        (r"(?:a+)+b", "match"),
        (r"\bversion_policy\s*:?\s*\{", "search"),
    ],
)
def test_a_pattern_that_takes_longer_is_caught(pattern: str | bytes, method: str) -> None:
    assert patterns.superlinear(re.compile(pattern), [method])
