"""Plans of a comparison, its search for a rate, and its document."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from modelport.gateway.errors import UsageError
from modelport.loadtests.compare import candidates as lineup
from modelport.loadtests.compare import json_document, models_to_compare, plan
from modelport.loadtests.compare.measured_candidate import cost_per_million, evaluate
from modelport.loadtests.compare.plan import Entry, Variant
from modelport.loadtests.compare.result import Absent, Comparison
from modelport.loadtests.compare.rounds import highest_rate
from modelport.loadtests.compare.verdict_matrix import matrix
from modelport.loadtests.load.target import LoadTestProtocol, LoadTestTarget
from tests import packages
from tests.loadtests import oip_server
from tests.loadtests.contenders import SLO_P99_MS, candidate, contender


def test_every_format_meets_the_backend_that_runs_it() -> None:
    names = [entry.name for entry in plan.entries()]
    assert names == [
        "onnx fp32 · ONNX Runtime",
        "onnx int8 · ONNX Runtime",
        "torchscript fp32 · PyTorch",
        "savedmodel fp32 · TensorFlow",
        "tflite fp32 · LiteRT",
        "tflite int8 · LiteRT",
        "openvino fp32 · OpenVINO",
        "pt2 fp32 · PyTorch",
        "torchscript fp32 · TorchServe",
        "onnx fp32 · Triton",
        "savedmodel fp32 · TensorFlow Serving",
    ]


def test_formats_and_backends_narrow_the_plan() -> None:
    found = plan.entries(["torchscript", "tflite:fp16"], ["tflite", "torchserve"])
    assert found == [
        Entry(Variant("tflite", "fp16"), "tflite"),
        Entry(Variant("torchscript"), "torchserve"),
    ]


def test_a_variant_names_its_precision_and_its_optimisation() -> None:
    for text, flags, slug in (
        ("onnx", (), "onnx-fp32"),
        ("onnx:O2", ("--optimize", "O2"), "onnx-fp32-O2"),
        ("onnx:fp16:O3", ("--dtype", "fp16", "--optimize", "O3"), "onnx-fp16-O3"),
        ("onnx:int4", ("--quantize", "int4"), "onnx-int4"),
        ("onnx:int8:O1", ("--quantize", "int8", "--optimize", "O1"), "onnx-int8-O1"),
    ):
        variant = plan.parse(text)
        assert variant.flags == flags
        assert variant.slug == slug
    assert str(plan.parse("onnx:int8:O1")) == "onnx int8 O1"


@pytest.mark.parametrize(
    ("formats", "backends", "named"),
    [
        (["h5"], [], "--format 'h5'"),
        (["onnx:int2"], [], "--format 'onnx:int2'"),
        (["onnx:O2:int8"], [], "--format 'onnx:O2:int8'"),
        ([], ["tensorrt"], "--backend 'tensorrt'"),
        (["onnx"], ["tflite"], "no backend of tflite runs onnx fp32"),
    ],
)
def test_what_cannot_be_planned_is_named(
    formats: list[str], backends: list[str], named: str
) -> None:
    with pytest.raises(UsageError, match=named):
        plan.entries(formats, backends)


def test_a_server_is_asked_in_its_own_dialect_of_the_same_kind() -> None:
    torchserve = {LoadTestProtocol.TORCHSERVE_HTTP: None, LoadTestProtocol.TORCHSERVE_GRPC: None}
    assert (
        plan.protocol_for(LoadTestProtocol.OIP_HTTP, torchserve) is LoadTestProtocol.TORCHSERVE_HTTP
    )
    assert (
        plan.protocol_for(LoadTestProtocol.OIP_GRPC, torchserve) is LoadTestProtocol.TORCHSERVE_GRPC
    )
    assert plan.protocol_for(LoadTestProtocol.OIP_GRPC, {LoadTestProtocol.OIP_HTTP: None}) is None


@pytest.mark.parametrize("limit", [90.0, 300.0, 740.0, 1000.0, 1400.0])
def test_the_search_comes_close_to_the_highest_rate_from_below(limit: float) -> None:
    asked: list[float] = []

    def passes(rate: float) -> bool:
        asked.append(rate)
        return rate <= limit

    found = highest_rate(passes, 1000.0, 8)
    assert found is not None
    assert 0.93 * limit <= found <= limit
    assert len(asked) == 8


def test_a_search_in_which_nothing_passes_finds_nothing() -> None:
    assert highest_rate(lambda rate: False, 1000.0, 3) is None


def test_a_million_inferences_cost_what_the_hour_costs_over_the_rate() -> None:
    assert cost_per_million([400.0, 500.0, 600.0], 1.8) == pytest.approx(1.0)
    assert cost_per_million([None, None, 600.0], 1.8) is None
    assert cost_per_million([500.0], None) is None
    assert cost_per_million([], 1.8) is None


def comparison() -> Comparison:
    candidates = (candidate("a", metric_name="AUC", metric=0.9), candidate("b", rates=(None, 5.0)))
    return Comparison(
        model="fraud",
        source="fraud.pt, SHA-256 0",
        began_at="2026-01-01T00:00:00+00:00",
        seconds=12.5,
        hardware={"cpu": "one", "cores": "2"},
        slo_p99_ms=SLO_P99_MS,
        rounds=3,
        candidates=candidates,
        absent=(Absent("tfserving", "not here"),),
        matrix=matrix(candidates, SLO_P99_MS),
        notes=("a note",),
    )


def test_a_comparison_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    file = tmp_path / "new" / "comparison.json"
    json_document.write(comparison(), file)
    assert json_document.read(file) == comparison()
    assert [path.name for path in file.parent.iterdir()] == ["comparison.json"]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"format": "other/1"}, "'format' is not"),
        ({"rounds": "three"}, "'rounds': .*valid integer"),
        ({"colour": 1}, "'colour': Unexpected keyword"),
        ({"absent": [{"name": "x"}]}, r"'absent\.0\.why'"),
    ],
)
def test_a_foreign_document_is_refused_with_the_place(
    tmp_path: Path, change: dict[str, object], named: str
) -> None:
    file = tmp_path / "c.json"
    content = json.loads(json.dumps(json_document.to_dict(comparison())))
    file.write_text(json.dumps({**content, **change}))
    with pytest.raises(json_document.BadDocument, match=named):
        json_document.read(file)


def test_a_file_that_is_not_there_or_no_json_is_refused(tmp_path: Path) -> None:
    (tmp_path / "broken.json").write_text("{")
    for name in ("missing.json", "broken.json"):
        with pytest.raises(json_document.BadDocument, match=name):
            json_document.read(tmp_path / name)


def test_a_checkpoint_is_distinguished_from_published_models(tmp_path: Path) -> None:
    weights = tmp_path / "net.pt"
    weights.touch()
    assert models_to_compare.is_checkpoint([str(weights)])
    assert not models_to_compare.is_checkpoint(["fraud", "vit:2"])
    with pytest.raises(UsageError, match="does not exist"):
        models_to_compare.is_checkpoint([str(tmp_path / "missing.pt")])
    with pytest.raises(UsageError, match="one checkpoint at a time"):
        models_to_compare.is_checkpoint([str(weights), "fraud"])


@pytest.mark.parametrize(
    ("names", "refused"),
    [
        (("tiny", "tiny:2"), "'tiny' and 'tiny:2' are one version, tiny:2; name another"),
        (("tiny:1", "tiny:2", "tiny:1"), "'tiny:1' and 'tiny:1' are one version, tiny:1"),
        (("tiny:2", "{folder}/tiny"), "'tiny:2' and '{folder}/tiny' are one version"),
        (("again", "tiny"), "'again' and 'tiny' are one version"),
        (("tiny:1", "tiny:2"), ""),
    ],
)
def test_a_version_is_not_compared_with_itself(
    tmp_path: Path, names: tuple[str, ...], refused: str
) -> None:
    for version in ("1", "2"):
        packages.put(tmp_path, "tiny", "onnx", version=int(version))
        certificate = {
            "artifact": {"format": "onnx", "dtype": "fp32", "quantize": None, "size_bytes": 1},
            "checkpoint": {"file": "tiny.pt", "sha256": version},
            "evaluation": None,
            "parity": {
                "tolerance": {"atol": 0, "rtol": 0}, "decision": None, "bounds": None,
                "outputs": {"y": {"max_abs_error": 0, "mean_abs_error": 0}},
            },
        }  # fmt: skip
        (tmp_path / "tiny" / version / "certificate.json").write_text(json.dumps(certificate))
    (tmp_path / "again").symlink_to(tmp_path / "tiny")
    wanted = models_to_compare.ComparisonRequest((), ("unknown",), 1, 0)
    given = [name.format(folder=tmp_path) for name in names]
    expected = re.escape(refused.format(folder=tmp_path)) or "'unknown' is unknown"
    with pytest.raises(UsageError, match=expected):
        models_to_compare.from_published(given, tmp_path, wanted, tmp_path / "work", print)


def test_model_and_held_out_rows_are_found_by_the_checkpoints_name(tmp_path: Path) -> None:
    weights, rows = tmp_path / "net.pt", tmp_path / "net-held-out.npz"
    weights.touch()
    assert models_to_compare.checkpoint(weights, None, None, None).data is None
    rows.touch()
    found = models_to_compare.checkpoint(weights, None, None, None)
    assert (found.model, found.data) == ("net", rows)
    assert models_to_compare.checkpoint(weights, "fraud", None, None).model == "fraud"
    with pytest.raises(UsageError, match="--data"):
        models_to_compare.checkpoint(weights, None, tmp_path / "no.npz", None)


def test_a_round_less_of_a_candidate_is_still_a_comparison() -> None:
    short = replace(candidate("b"), runs=candidate("b").runs[:2], rate_under_slo=(500.0, 501.0))
    found = {v.concern: v for v in matrix([candidate("a"), short], SLO_P99_MS)}
    assert len(found["Tail latency"].ranking) == 2


def test_the_quality_of_a_server_is_measured_on_labelled_rows(tmp_path: Path) -> None:
    """By what the server answers, whatever the certificate says."""
    rows = np.random.default_rng(0).normal(size=(40, 4)).astype(np.float32)
    labels = rows.argmax(1)
    labels[:10] = (labels[:10] + 1) % 4
    np.savez(tmp_path / "held-out.npz", x=rows, labels=labels)
    one = contender("one", tmp_path)
    found = lineup.labelled(one.artifact, tmp_path / "held-out.npz")
    assert found is not None
    one.labelled = found
    with oip_server.serving() as server:
        target = LoadTestTarget(LoadTestProtocol.OIP_HTTP, server.address, "double")
        assert evaluate(one, SimpleNamespace(http_target=target)) is None  # type: ignore[arg-type]
    made = one.candidate(None)
    assert (made.metric_name, made.metric) == ("accuracy", 0.75)
    assert made.metric_interval is not None
    assert made.metric_interval[0] < 0.75 < made.metric_interval[1]
    np.savez(tmp_path / "rows.npz", x=rows)
    assert lineup.labelled(one.artifact, tmp_path / "rows.npz") is None
