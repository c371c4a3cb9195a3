"""Drift: shifts are found and named, and alike traffic raises no alarm."""

from __future__ import annotations

import hashlib
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from modelport.gateway.errors import UsageError
from modelport.gateway.recording.recorder import RequestRecorder
from modelport.gateway.types import Datatype, Tensor
from modelport.loadtests.drift import baseline, features, shift
from modelport.loadtests.drift.features import FeatureName, RequestRows
from modelport.loadtests.drift.shift import Correction
from tests.commands import modelport
from tests.gateway.recording.test_recorded_traffic import ALL, put_tensors

HOSTILE = "<script>alert(1)</script>\x1b[2J"


def compared(before: Any, now: Any, **options: Any) -> shift.FeatureShift:
    columns = [
        features.columns([RequestRows({"x": np.asarray(each)}, {})]) for each in (before, now)
    ]
    [found] = shift.compare(*columns, **options).shifts
    return found


def texts(*values: bytes | None) -> Any:
    made = np.empty(len(values), object)
    made[:] = [b"" if each is None else each for each in values]
    return made


CHANCE = np.random.default_rng(3)
NORMAL = CHANCE.normal(size=2000)
MISSING = np.where(CHANCE.random(2000) < 0.1, np.nan, NORMAL)


@pytest.mark.parametrize(
    ("before", "now", "reasons"),
    [
        (NORMAL, CHANCE.normal(size=2000), ()),
        (NORMAL, CHANCE.normal(size=2000) + 0.5, ("distribution",)),
        (NORMAL, CHANCE.normal(size=2000) * 2, ("distribution",)),
        (NORMAL, CHANCE.normal(size=2000) + 0.01, ()),
        (NORMAL, MISSING, ("missing values",)),
        (MISSING, NORMAL, ("missing values",)),
        (NORMAL, np.full(2000, np.nan), ("missing values",)),
        (np.full(2000, np.inf), NORMAL, ("distribution",)),
        (np.zeros(2000), np.zeros(2000), ()),
        (np.zeros(2000), np.ones(2000), ("distribution", "new categories")),
        (np.arange(2000) % 5, np.arange(2000) % 5, ()),
        (np.arange(2000) % 5, np.arange(2000) % 6, ("distribution", "new categories")),
        (texts(*[b"a", b"b"] * 500), texts(*[b"a", b"b"] * 500), ()),
        (
            texts(*[b"a", b"b"] * 500), texts(*[b"a", None] * 500),
            ("distribution", "missing values"),
        ),
        (
            texts(*[b"%d" % n for n in range(900)]), texts(*[b"long" * 9] * 900),
            ("distribution", "new categories"),
        ),
        (
            texts(*[b"%d" % n * 200 for n in range(900)]),
            texts(*[b"%d" % n * 900 for n in range(900)]),
            ("distribution", "new categories"),
        ),
        (np.r_[NORMAL, [1e308] * 8], np.r_[NORMAL, [1e308] * 8], ()),
    ],
)  # fmt: skip
def test_a_shift_is_found_and_named(before: Any, now: Any, reasons: tuple[str, ...]) -> None:
    assert compared(before, now).reasons == reasons


def test_p_values_are_corrected_as_in_the_textbook() -> None:
    given = [0.01, 0.04, 0.03, 0.005]
    np.testing.assert_allclose(shift.adjusted(given, Correction.HOLM), [0.03, 0.06, 0.06, 0.02])
    np.testing.assert_allclose(
        shift.adjusted(given, Correction.BENJAMINI_HOCHBERG), [0.02, 0.04, 0.04, 0.02]
    )
    assert len(shift.adjusted([], Correction.HOLM)) == 0


def test_few_rows_decide_nothing() -> None:
    columns = features.columns([RequestRows({"x": np.zeros((50, 2))}, {})])
    found = shift.compare(columns, columns)
    assert found.shifts == ()
    assert len(found.notes) == 2


def test_large_and_uneven_tensors_are_described() -> None:
    image = features.columns([RequestRows({"image": np.ones((3, 40, 40), np.float32)}, {})])
    assert {each.name for each in image} == {
        "image size", "image mean", "image std", "image min", "image max",
    }  # fmt: skip
    endless = np.full((3, 40, 40), np.inf, np.float32)
    assert features.columns([RequestRows({"image": endless}, {})]).keys() == image.keys()
    uneven = [RequestRows({"ids": np.ones((1, n), np.int64)}, {}) for n in (2, 3)]
    found = features.columns([*uneven, RequestRows({}, {"y": np.ones((1,))})])
    sizes = found[FeatureName("input", "ids size")]
    assert sizes[:2].tolist() == [2.0, 3.0]
    assert np.isnan(sizes[2])  # a request without the input


def samples(text: str) -> list[Sample]:
    """The metrics of a report; each has a text and a type."""
    families = [*text_string_to_metric_families(text)]
    assert all(each.documentation and each.type == "gauge" for each in families)
    return [each for family in families for each in family.samples]


def value(metrics: list[Sample], name: str, labels: dict[str, str]) -> float:
    [found] = [e for e in metrics if (e.name, e.labels) == (f"modelport_drift_{name}", labels)]
    return float(found.value)


def record(folder: Path, values: Any, name: str = "x") -> None:
    made = RequestRecorder(ALL._replace(target=folder))
    for row in values:
        given = Tensor(name, Datatype.FP32, row[None].astype(np.float32))
        answer = Tensor("y", Datatype.FP32, row[None, :1].astype(np.float32))
        put_tensors(made, "m", [given], [answer])
    made.close()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, chance = tmp_path_factory.mktemp("drift"), np.random.default_rng(1)
    for name, offset in (("before", 0.0), ("alike", 0.0), ("moved", 1.0)):
        values = chance.normal(size=(400, 3))
        values[:, 2] += offset
        record(folder / name, values)
        np.savez(folder / f"{name}.npz", x=values.astype(np.float32))
    return folder


def test_records_are_compared_with_records_rows_and_a_certificate(
    folders: Path, tmp_path: Path
) -> None:
    before = str(folders / "before")
    assert modelport("drift", str(folders / "alike"), "--baseline", before).returncode == 0
    report, prom = tmp_path / "report.json", tmp_path / "drift.prom"
    moved = modelport(
        *("drift", str(folders / "moved"), "--baseline", before, "--json-report", str(report)),
        *("--prometheus", str(prom)),
    )
    assert moved.returncode == 1
    assert "1 of 4 features have drifted" in moved.stdout
    first = json.loads(report.read_text())["shifts"][0]
    assert first["feature"] == {"side": "input", "name": "x[2]"}
    metrics = samples(prom.read_text())
    feature = {"model": "m", "side": "input", "feature": "x[2]"}
    assert value(metrics, "feature_drifted", feature) == 1
    assert value(metrics, "feature_drifted", feature | {"feature": "x[0]"}) == 0
    assert value(metrics, "population_stability_index", feature) == first["psi"]
    assert value(metrics, "rows", feature | {"rows": "baseline"}) == 400
    assert value(metrics, "features", {"model": "m"}) == 4
    assert value(metrics, "drifted_features", {"model": "m"}) == 1
    assert abs(value(metrics, "last_run_timestamp_seconds", {"model": "m"}) - time.time()) < 3600
    rows = folders / "before.npz"
    found = modelport("drift", str(folders / "moved"), "--baseline", str(rows))
    assert (found.returncode, "output 'y[0]' is missing in the baseline" in found.stdout) == (
        1,
        True,
    )
    certificate = folders / "certificate.json"
    evaluation = {"file": rows.name, "sha256": hashlib.sha256(rows.read_bytes()).hexdigest()}
    certificate.write_text(json.dumps({"evaluation": evaluation}))
    found = modelport("drift", str(folders / "alike"), "--baseline", str(certificate))
    assert found.returncode == 0, found.stderr
    for content, said in (
        ({"evaluation": None}, "names no data"),
        ({"evaluation": evaluation | {"sha256": "0"}}, "has changed"),
        ([], "is not a certificate"),
    ):
        certificate.write_text(json.dumps(content))
        refused = modelport("drift", str(folders / "alike"), "--baseline", str(certificate))
        assert refused.returncode == 2
        assert said in refused.stderr


@pytest.mark.parametrize("kind", ["c16", "M8[s]", "V2", "i4,f4"])
def test_rows_that_are_no_numbers_are_refused(folders: Path, tmp_path: Path, kind: str) -> None:
    np.savez(tmp_path / "rows.npz", x=np.zeros(200, kind))
    with pytest.raises(UsageError, match=r"not a readable \.npz"):
        baseline.read(tmp_path / "rows.npz", ["x"])


def test_hostile_names_are_text_in_the_report(folders: Path, tmp_path: Path) -> None:
    record(tmp_path / "hostile", np.random.default_rng(5).normal(size=(200, 1)), HOSTILE)
    page, own = tmp_path / "drift.html", str(tmp_path / "hostile")
    prom = tmp_path / "drift.prom"
    done = modelport(
        "drift", own, "--baseline", own, "--html", str(page), "--prometheus", str(prom)
    )
    assert HOSTILE in {
        e.labels.get("feature", "").split("[0]")[0] for e in samples(prom.read_text())
    }
    assert done.returncode == 0, done.stderr
    assert "<script>" not in page.read_text()
    assert "&lt;script&gt;" in page.read_text()
    assert "\x1b" not in done.stdout + page.read_text()
