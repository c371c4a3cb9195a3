"""Documents of other people: whatever stands in any place of them, the error names what is wrong.

A generator puts every hostile value into every place of an honest document.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from modelport.exporters.proof import verify
from modelport.gateway import slo
from modelport.gateway.errors import ModelportError
from modelport.gateway.repository import manifest, signing
from modelport.loadtests.load import payloads
from modelport.loadtests.load.payloads import BadPayload, Payloads

#: As JSON writes them, or does not: Python reads NaN, and numbers of any length.
VALUES = (
    "null", "true", "-1", "0", "0.5", "1e400", "-1e400", "NaN", "1" + 400 * "0", "1" + 5000 * "0",
    "[]", "{}", '""', '"x"', '"\\ud800"', '"\\u0000"', '"../x"', '"' + 1_000_000 * "x" + '"',
    "[1, null, {}]", '{"x": {}}', 100_000 * "[" + 100_000 * "]",
    100_000 * '{"a":' + "1" + 100_000 * "}",
)  # fmt: skip
MARK = "@hostile@"
DIGEST = 64 * "0"

MANIFEST = {
    "format": manifest.FORMAT,
    "files": {"model.onnx": {"sha256": DIGEST, "size_bytes": 1}},
}
CERTIFICATE: dict[str, Any] = {
    "model": {"name": "m", "factory": "fraud", "model_kwargs": {"a": 1}, "max_batch_size": 8,
              "inputs": ["x:FP32[4]=0..1"], "output_names": ["y"]},
    "artifact": {"format": "onnx", "dtype": "fp32", "quantize": None, "opset": None,
                 "size_bytes": 1, "files": {"model.onnx": {"sha256": DIGEST}}},
    "checkpoint": {"file": "c.pt", "sha256": DIGEST}, "adapters": [],
    "parity": {"outputs": {"y": {"max_abs_error": 0.0}}, "decision": {"agreement": 1.0},
               "samples": 1, "seed": 0, "bounds": {"agreement": 1.0, "relative_error": 0.1},
               "tolerance": {"atol": 1e-5, "rtol": 1e-5}},
    "evaluation": None,
    "samples": {"file": "samples.json", "sha256": DIGEST, "requests": 1},
}  # fmt: skip
SLO = {
    "limits": {"p99_ms": 50}, "regressions": {"throughput": 0.1}, "duration": {"max": 60},
    "load": {"users": 4}, "answers": {"atol": 0.1},
}  # fmt: skip


def spoiled(document: Any) -> Iterator[tuple[str, str]]:
    """``document`` as JSON with each value of it, and each part, replaced by each hostile one."""

    def places(part: Any, path: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
        yield path
        if isinstance(part, dict | list):
            for key, value in part.items() if isinstance(part, dict) else enumerate(part):
                yield from places(value, (*path, key))

    for path in places(document, ()):
        changed = copy.deepcopy({"": document})
        holder: Any = changed
        for key in ("", *path)[:-1]:
            holder = holder[key]
        holder[("", *path)[-1]] = MARK
        text = json.dumps(changed[""])
        for value in VALUES:
            yield f"{path}: {value[:20]}", text.replace(f'"{MARK}"', value)


def check(
    document: Any, path: Path, read: Callable[[Path], object], *errors: type[Exception]
) -> None:
    """``read`` takes every spoiled document, or raises one of ``errors``."""
    refused = 0
    for what, text in spoiled(document):
        path.write_text(text)
        try:
            read(path)
        except errors:
            refused += 1
        except Exception as error:
            raise AssertionError(what) from error
    assert refused, "no document was refused: this test could not fail"


def test_a_manifest_is_read_or_refused(tmp_path: Path) -> None:
    check(
        MANIFEST,
        tmp_path / manifest.FILENAME,
        lambda path: manifest.verify(path.parent),
        ModelportError,
    )


def test_a_certificate_is_read_or_refused(tmp_path: Path) -> None:
    def read(path: Path) -> None:
        certificate = signing.read_certificate(tmp_path, "m")
        checked = verify.Checked(tmp_path, "m", 1, certificate, None)
        verify._find_checkpoint(verify._claim(checked.certificate.document).origins[0])

    check(CERTIFICATE, tmp_path / signing.CERTIFICATE, read, ModelportError)


@pytest.mark.thorough
def test_recorded_answers_are_read_or_refused(tmp_path: Path) -> None:
    path = tmp_path / "samples.json"
    rows = {"x": np.ones((2, 4), np.float32), "ids": np.ones((2, 4), np.int64)}
    words = {"x": "FP32", "ids": "INT64"}
    payloads.write(
        Payloads((rows,), words, (rows,), {}, output_datatypes=words, batch_size=2), path
    )

    def read(path: Path) -> None:
        found = payloads.read(path)
        for tolerance in (found.absolute_tolerance, found.relative_tolerance):
            assert 0 <= tolerance < math.inf, "any answer would be right"

    check(json.loads(path.read_text()), path, read, BadPayload)


@pytest.mark.thorough
def test_what_a_gate_is_held_to_is_read_or_refused(tmp_path: Path) -> None:
    path = tmp_path / "slo.toml"
    hostile = [
        "a = " + 10_000 * "[" + 10_000 * "]",
        ".".join(100_000 * "a") + " = 1",
        ".".join(10_000 * "a") + " = 1",
        "[" + ".".join(10_000 * "a") + "]",
        "[limits]\np99_ms = " + 5_000 * "9",
        "[limits]\np99_ms = 1" + 400 * "0",
        "[limits]\np99_ms = nan",
        "[limits]\np99_ms = -inf",
        "[limits]\np99_ms = 1979-05-27",
        "[duration]\nmax = 1e308",
        "[load]\nusers = 10000000000",
        '[load]\nusers = "4"',
        "[load]\nusers = {}",
        "x = '" + 10_000_000 * "x" + "'",
    ]
    for text in hostile:
        path.write_text(text)
        with pytest.raises(ModelportError) as caught:
            slo.read(path)
        assert "\n" not in str(caught.value), text[:50]
        assert len(str(caught.value)) < 3000
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ModelportError, match="not TOML"):
        slo.read(path)
    with path.open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(ModelportError, match="larger than"):
        slo.read(path)
