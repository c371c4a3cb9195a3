"""A person's request for a rollout, and the plan that it becomes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from modelport.gateway.errors import InvalidArgument, ModelportError, NotFound, Unsupported
from modelport.gateway.repository.version_proof import VersionProof
from modelport.gateway.rollout import gate_report, rollout_request, side_description
from modelport.gateway.rollout.plan import (
    AssignmentKind,
    ComparisonKind,
    RolloutLimits,
    RolloutPlan,
    RolloutSide,
)
from modelport.gateway.rollout.side_description import (
    OutputDescription,
    RolloutModelDescription,
    VersionDescription,
)
from modelport.loadtests.gate import json_document as gate_document

MODEL = RolloutModelDescription("m", 2, (1, 2), {"stable": 1, "latest": 2})
SIGNATURE = ("input 'x' FP32 [4]", "output 'y' FP32 [4]", "max_batch_size 8")
PROOF = VersionProof(("aa",), 1e-5, 1e-4, "y")


def request(**fields: Any) -> rollout_request.RolloutRequest:
    return rollout_request.read(json.dumps({"candidate": "3", **fields}).encode())


def draft(**fields: Any) -> RolloutPlan:
    return rollout_request.draft(request(**fields), MODEL, RolloutSide("m", 3))


def completed(
    before: VersionProof | None,
    after: VersionProof | None,
    outputs: tuple[OutputDescription, ...] = (OutputDescription("y", "FP32", 4),),
    **fields: Any,
) -> RolloutPlan:
    sides = (VersionDescription("m", 2, SIGNATURE, "", before, outputs),
             VersionDescription("m", 3, SIGNATURE, "", after, outputs))  # fmt: skip
    return rollout_request.completed(draft(**fields), request(**fields), *sides)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("3", ("m", 3)),
        ("stable", ("m", 1)),
        ("other", ("other", 0)),
        ("other/7", ("other", 7)),
    ],
)
def test_a_candidate_is_a_version_a_label_or_another_model(
    text: str, named: tuple[str, int]
) -> None:
    assert rollout_request.candidate_of(request(candidate=text), MODEL) == named


@pytest.mark.parametrize("text", ["", "../x", "other/", "other/0", "other/1/2", "a\\b", ".x"])
def test_anything_else_is_no_candidate(text: str) -> None:
    with pytest.raises(InvalidArgument, match="neither a version nor a model"):
        rollout_request.candidate_of(request(candidate=text), MODEL)


def test_the_baseline_is_the_default_version_which_stays_the_default() -> None:
    plan = draft()
    assert (plan.baseline, plan.candidate) == (RolloutSide("m", 2), RolloutSide("m", 3))
    assert plan.default_version == 2


def test_a_baseline_that_is_named_becomes_the_default_during_the_rollout() -> None:
    plan = draft(baseline=1)
    assert (plan.baseline.version, plan.default_version) == (1, 1)


def test_a_label_names_the_baseline_and_the_default_version_stays() -> None:
    plan = draft(label="stable")
    assert (plan.baseline.version, plan.default_version, plan.label) == (1, 2, "stable")


def test_sticky_requests_are_assigned_by_a_header_or_a_parameter() -> None:
    assert draft(sticky="header").assignment is AssignmentKind.HEADER
    plan = draft(sticky="parameter:user")
    assert (plan.assignment, plan.parameter) == (AssignmentKind.PARAMETER, "user")


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"steps": [0.5, 0.25]}, InvalidArgument, "steps must increase"),
        ({"steps": [0.5, 1.5]}, InvalidArgument, "steps must increase"),
        ({"steps": []}, InvalidArgument, "1 to 100 steps"),
        ({"shadow": 2.0}, InvalidArgument, "shadow"),
        ({"label": "beta"}, NotFound, "has no label 'beta'; it has stable, latest"),
        ({"label": "stable", "baseline": 2}, InvalidArgument, "omit baseline or label"),
        ({"baseline": 3}, InvalidArgument, "the candidate must be another"),
        ({"sticky": "principal"}, Unsupported, "needs authenticated requests"),
        ({"sticky": "cookie"}, InvalidArgument, "'cookie' must be request"),
        ({"sticky": "parameter:"}, InvalidArgument, "sticky .parameter:. must be request"),
        ({"limits": {"p42": 1}}, InvalidArgument, "there is no limit 'p42'"),
        ({"limits": {"confidence": None}}, InvalidArgument, "cannot be switched off"),
        ({"limits": {"min_regression_ms": None}}, InvalidArgument, "cannot be switched off"),
        ({"webhooks": ["ftp://hooks"]}, InvalidArgument, "ftp://hooks"),
        ({"limits": {"max_disagreement": 7}}, InvalidArgument, "it must be less than 1"),
        ({"unknown": 1}, InvalidArgument, "'unknown'"),
        ({"candidate": 3}, InvalidArgument, "'candidate'"),
        ({"min_seconds": "1"}, InvalidArgument, "'min_seconds'"),
    ],
)
def test_a_request_that_cannot_be_carried_out_is_refused_in_one_line(
    fields: dict[str, Any], error: type[ModelportError], message: str
) -> None:
    with pytest.raises(error, match=message) as raised:
        draft(**fields)
    assert "\n" not in str(raised.value)


# -- the comparison -------------------------------------------------------------------------------


def test_versions_of_one_checkpoint_are_compared_by_values_within_both_tolerances() -> None:
    plan = completed(PROOF, replace(PROOF, atol=2e-5, rtol=0.0))
    assert plan.comparison is ComparisonKind.VALUES
    assert (plan.limits.atol, plan.limits.rtol) == pytest.approx((3e-5, 1e-4))


def test_the_limits_of_the_request_go_before_those_of_the_certificates() -> None:
    plan = completed(PROOF, PROOF, limits={"atol": 0.5, "max_p99_regression": None})
    assert (plan.limits.atol, plan.limits.rtol) == pytest.approx((0.5, 2e-4))
    assert plan.limits.max_p99_regression is None
    assert plan.limits.max_p50_regression == RolloutLimits().max_p50_regression


NO_LIMIT = {"max_disagreement": None}


def test_a_retrained_candidate_is_compared_by_decisions_and_needs_a_limit_or_the_word() -> None:
    other = replace(PROOF, checkpoint=("bb",), decision_output="y", decision_threshold=0.5)
    for given in (0.1, None):
        plan = completed(PROOF, other, limits={"max_disagreement": given})
        assert plan.comparison is ComparisonKind.DECISIONS
        assert (plan.decision_output, plan.decision_threshold) == ("y", 0.5)
        assert plan.limits.max_disagreement == given
    for limits in ({}, {"max_invalid": None}):
        with pytest.raises(InvalidArgument) as refusal:
            completed(PROOF, other, limits=limits)
        text = str(refusal.value)
        assert "--max-disagreement SHARE" in text
        assert "--no-disagreement-limit" in text
        assert "\n" not in text


@pytest.mark.parametrize("before", [None, VersionProof(), PROOF])
def test_versions_without_certificates_are_compared_by_values(before: VersionProof | None) -> None:
    plan = completed(before, None)
    assert plan.comparison is ComparisonKind.VALUES
    assert (plan.limits.atol, plan.limits.rtol) == (1e-4, 1e-3)
    plan = completed(before, None, retrained=True, limits=NO_LIMIT)
    assert plan.comparison is ComparisonKind.DECISIONS


ONE_COLUMN = OutputDescription("y", "FP32", 1)
FOUR, TEXT = OutputDescription("z", "FP16", 4), OutputDescription("t", "BYTES", 1)
CLASS, OPEN = OutputDescription("c", "INT64", 1), OutputDescription("o", "FP32", -1)


@pytest.mark.parametrize(
    ("outputs", "fields", "message"),
    [
        ((ONE_COLUMN,), {}, r"no decision to compare: the largest class is .* \('y' has 1\); give"),
        ((ONE_COLUMN, CLASS), {}, r"decision_threshold = 0.5 in \[answers\], or .*same-checkpoint"),
        ((ONE_COLUMN, FOUR), {"decision_output": "y"}, "always the same"),
        ((FOUR,), {"decision_top_k": 4}, "the 4 largest classes are always the same"),
        ((CLASS,), {"decision_output": "c", "decision_top_k": 2}, "always the same"),
        ((FOUR,), {"decision_output": "y"}, "has no output 'y' that decides .* it has z"),
        ((TEXT,), {"decision_threshold": 0.5}, "they are not numbers"),
        ((TEXT,), {"decision_output": "t", "decision_threshold": 0.5}, "they are not numbers"),
        ((FOUR,), {"decision_threshold": 0.5, "decision_top_k": 2}, "without a decision_threshold"),
        ((FOUR,), {"decision_top_k": -1}, "at least 1"),
    ],
)
def test_a_decision_that_no_answer_leads_to_is_refused_with_the_remedy(
    outputs: tuple[OutputDescription, ...], fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidArgument, match=message) as raised:
        completed(None, None, outputs, retrained=True, limits=NO_LIMIT, **fields)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("outputs", "fields", "decision"),
    [
        ((ONE_COLUMN,), {"decision_threshold": 0.5}, ("", 0.5, 1)),
        ((ONE_COLUMN, FOUR), {}, ("", None, 1)),
        ((OPEN,), {"decision_top_k": 5}, ("", None, 5)),
        ((FOUR,), {"decision_top_k": 3, "decision_output": "z"}, ("z", None, 3)),
        ((CLASS,), {}, ("", None, 1)),
        ((CLASS,), {"decision_output": "c"}, ("c", None, 1)),
        ((TEXT,), {"decision_output": "t"}, ("t", None, 1)),
    ],
)
def test_decisions_are_those_of_the_request(
    outputs: tuple[OutputDescription, ...],
    fields: dict[str, Any],
    decision: tuple[str, float | None, int],
) -> None:
    plan = completed(None, None, outputs, retrained=True, limits=NO_LIMIT, **fields)
    assert (plan.decision_output, plan.decision_threshold, plan.decision_top_k) == decision


def test_the_decision_of_the_request_goes_before_that_of_the_certificates() -> None:
    proof = replace(PROOF, decision_threshold=0.5)
    given = completed(proof, proof, decision_threshold=0.7)
    assert (given.decision_output, given.decision_threshold) == ("y", 0.7)
    given = completed(proof, proof, decision_top_k=2)
    assert (given.decision_output, given.decision_threshold, given.decision_top_k) == ("y", None, 2)
    # The same checkpoint is compared by values; labels that come later are judged by decisions.
    same = completed(proof, proof)
    assert same.comparison is ComparisonKind.VALUES
    assert (same.decision_output, same.decision_threshold) == ("y", 0.5)


def test_a_candidate_with_another_signature_is_refused_with_the_difference() -> None:
    other = (*SIGNATURE[:1], "output 'y' FP64 [4]", *SIGNATURE[2:])
    with pytest.raises(InvalidArgument, match=r"output 'y' FP64 \[4\] instead of output 'y' FP32"):
        rollout_request.completed(
            draft(),
            request(),
            VersionDescription("m", 2, SIGNATURE),
            VersionDescription("m", 3, other),
        )


def test_a_side_that_no_rollout_can_divert_is_refused_with_the_reason() -> None:
    with pytest.raises(Unsupported, match=r"version 3 of model 'm' .*: it is decoupled"):
        rollout_request.completed(
            draft(),
            request(),
            VersionDescription("m", 2, SIGNATURE),
            VersionDescription("m", 3, SIGNATURE, "it is decoupled"),
        )


# -- certificates and reports ---------------------------------------------------------------------


def certificate(folder: Path, **changes: Any) -> VersionProof | None:
    document = {
        "model": {"name": "m"},
        "artifact": {
            "format": "onnx",
            "size_bytes": 1,
            "files": {"model.onnx": {"sha256": "0" * 64}},
        },
        "checkpoint": {"sha256": "aa"},
        "adapters": [{"sha256": "bb"}],
        "parity": {
            "tolerance": {"atol": 1e-5, "rtol": 1e-4},
            "bounds": None,
            "outputs": {"y": {"max_abs_error": 0.5}},
            "decision": {"output": "y", "kind": ">= 0.25"},
        },
        **changes,
    }
    (folder / "certificate.json").write_text(json.dumps(document))
    return side_description.read_proof(folder, "m")


def test_a_certificate_gives_checkpoint_tolerance_and_decision(tmp_path: Path) -> None:
    assert certificate(tmp_path) == VersionProof(("aa", "bb"), 1e-5, 1e-4, "y", 0.25)


def test_the_tolerance_of_a_quantised_version_is_its_measured_error(tmp_path: Path) -> None:
    parity = {
        "tolerance": {"atol": 1e-5, "rtol": 1e-4},
        "bounds": {"agreement": 0.97},
        "outputs": {"y": {"max_abs_error": 0.5}},
        "decision": None,
    }
    assert certificate(tmp_path, parity=parity) == VersionProof(("aa", "bb"), 0.75, 1e-4)


@pytest.mark.parametrize(
    "parity", [None, [], {}, {"tolerance": 3}, {"tolerance": {"atol": "nan", "rtol": -1}}]
)
def test_a_certificate_of_another_form_gives_what_it_has(tmp_path: Path, parity: Any) -> None:
    assert certificate(tmp_path, parity=parity) == VersionProof(("aa", "bb"))
    assert side_description.read_proof(tmp_path, "another") is None


def test_a_gate_report_gives_the_limit_of_changed_decisions(tmp_path: Path) -> None:
    report = tmp_path / "gate.json"
    report.write_text(json.dumps({"agreement": {"decisions": 10_000, "changed": 100}}))
    limit = gate_report.max_disagreement(report)
    assert limit is not None
    assert 0.0125 < limit < 0.025
    report.write_text(json.dumps({"format": gate_document.FORMAT, "agreement": None}))
    assert gate_report.max_disagreement(report) is None
    for wrong in ("{}", '{"agreement": null}', "[]", '{"agreement": {"decisions": 0}}', "x"):
        report.write_text(wrong)
        with pytest.raises(InvalidArgument, match="is not a report of 'modelport gate"):
            gate_report.max_disagreement(report)
    with pytest.raises(InvalidArgument, match="cannot be read"):
        gate_report.max_disagreement(tmp_path / "missing.json")
    with report.open("wb") as stream:
        stream.truncate(gate_report.MAX_REPORT_BYTES + 1)
    with pytest.raises(InvalidArgument, match="cannot be read: it is larger than"):
        gate_report.max_disagreement(report)
