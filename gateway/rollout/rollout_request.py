"""A person's request for a rollout, and the plan that it becomes."""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from modelport.gateway.access.context import CURRENT
from modelport.gateway.errors import InvalidArgument, NotFound, Unsupported
from modelport.gateway.repository.scan import VERSION_NAME, is_model_name
from modelport.gateway.repository.version_proof import VersionProof, is_retrained
from modelport.gateway.rollout.plan import (
    AssignmentKind,
    ComparisonKind,
    RolloutChoices,
    RolloutLimits,
    RolloutPlan,
    RolloutSide,
)
from modelport.gateway.rollout.side_description import RolloutModelDescription, VersionDescription
from modelport.gateway.runtime import checked_json

#: The tolerance without certificates, as that of load tests.
DEFAULT_ATOL, DEFAULT_RTOL = 1e-4, 1e-3
_PARAMETER = "parameter:"


@dataclass(frozen=True, slots=True)
class RolloutRequest(RolloutChoices):
    """The body of ``POST /v2/rollouts/MODEL``. Omitted fields have the plan's defaults.

    If a request omits the decision that callers take from an answer, the certificates state it.
    """

    #: A version of the model, a label of it, or another model: ``NAME`` or ``NAME/VERSION``.
    candidate: str
    #: 0: the version of ``label``, else the default version.
    baseline: int = 0
    #: ``request``, ``header``, ``principal`` or ``parameter:NAME``.
    sticky: str = AssignmentKind.REQUEST
    #: Whether the candidate has another checkpoint; None: the certificates say.
    retrained: bool | None = None
    #: The limits that differ from ``RolloutLimits``' defaults.
    limits: dict[str, float | None] = field(default_factory=dict)
    #: The person who asks, for the history.
    by: str = ""


def read(content: bytes) -> RolloutRequest:
    """The request in ``content``.

    Raises:
        InvalidArgument: a field is missing, unknown, or of another type.
    """
    request = checked_json.read(RolloutRequest, content)
    known = [each.name for each in dataclasses.fields(RolloutLimits)]
    for name in request.limits:
        if name not in known:
            raise InvalidArgument(f"there is no limit '{name}'; use {', '.join(known)}")
    return request


def candidate_of(request: RolloutRequest, model: RolloutModelDescription) -> RolloutSide:
    """The candidate that ``request`` names for ``model``; version 0 is another model's default.

    Raises:
        InvalidArgument: it is neither a version nor a model.
    """
    text = request.candidate
    if VERSION_NAME.match(text):
        return RolloutSide(model.name, int(text))
    if text in model.labels:
        return RolloutSide(model.name, model.labels[text])
    name, slash, version = text.partition("/")
    if not is_model_name(name) or (slash and not VERSION_NAME.match(version)):
        raise InvalidArgument(
            f"candidate '{text}' is neither a version nor a model: write 3, NAME or NAME/3"
        )
    return RolloutSide(name, int(version or 0))


def draft(
    request: RolloutRequest, model: RolloutModelDescription, candidate: RolloutSide
) -> RolloutPlan:
    """The plan of ``request``, without what the answers' comparison depends on.

    Raises:
        InvalidArgument: the request cannot be carried out.
        NotFound: the model has no such label.
        Unsupported: the assignment needs authentication.
    """
    baseline = request.baseline or model.default
    if request.label:
        if request.label not in model.labels:
            known = ", ".join(model.labels) or "none"
            raise NotFound(f"model '{model.name}' has no label '{request.label}'; it has {known}")
        baseline = model.labels[request.label]
        if request.baseline not in (0, baseline):
            raise InvalidArgument(
                f"label '{request.label}' is version {baseline} of '{model.name}', not "
                f"{request.baseline}; omit baseline or label"
            )
    assignment, parameter = _assignment(request.sticky)
    choices = {each.name for each in dataclasses.fields(RolloutChoices)} - {*_Decision._fields}
    return RolloutPlan(
        id=secrets.token_hex(16),
        model=model.name,
        baseline=RolloutSide(model.name, baseline),
        candidate=candidate,
        assignment=assignment,
        parameter=parameter,
        default_version=model.default if request.label else baseline,
        limits=RolloutLimits(**_limits(request)),
        **{name: getattr(request, name) for name in choices},
    )


def _limits(request: RolloutRequest) -> dict[str, Any]:
    limits: dict[str, Any] = dict(request.limits)
    for name in ("confidence", "atol", "rtol", "min_regression_ms"):
        if limits.get(name, 0.5) is None:
            raise InvalidArgument(f"the limit '{name}' cannot be switched off")
    return limits


def _assignment(sticky: str) -> tuple[AssignmentKind, str]:
    if sticky.startswith(_PARAMETER) and sticky != _PARAMETER:
        return AssignmentKind.PARAMETER, sticky.removeprefix(_PARAMETER)
    if sticky == AssignmentKind.PRINCIPAL and CURRENT.get() is None:
        raise Unsupported(
            "sticky 'principal' needs authenticated requests, which this gateway does not have; "
            "start it with --access, or use 'header' or 'parameter:NAME'"
        )
    if sticky not in (AssignmentKind.REQUEST, AssignmentKind.HEADER, AssignmentKind.PRINCIPAL):
        raise InvalidArgument(
            f"sticky '{sticky}' must be request, header, principal or parameter:NAME"
        )
    return AssignmentKind(sticky), ""


def completed(
    plan: RolloutPlan,
    request: RolloutRequest,
    baseline: VersionDescription,
    candidate: VersionDescription,
) -> RolloutPlan:
    """``plan`` with the comparison of answers that fits both sides.

    Raises:
        InvalidArgument: the candidate has another signature.
        Unsupported: a side cannot take part in a rollout.
    """
    for side in (baseline, candidate):
        if side.obstacle:
            raise Unsupported(
                f"version {side.version} of model '{side.model}' cannot be in a rollout: "
                f"{side.obstacle}"
            )
    before, after = set(baseline.signature), set(candidate.signature)
    if before != after:
        lost, new = sorted(before - after), sorted(after - before)
        raise InvalidArgument(
            f"version {candidate.version} of model '{candidate.model}' has another signature: "
            f"{' and '.join(new) or 'nothing'} instead of {' and '.join(lost) or 'nothing'}"
        )
    proofs = [side.proof or VersionProof() for side in (baseline, candidate)]
    retrained = request.retrained
    if retrained is None:
        retrained = is_retrained(*proofs)
    decision = _decision(request, proofs, candidate)
    defaults: dict[str, Any] = {}
    if retrained:
        _require_decision(decision, candidate)
        if "max_disagreement" not in request.limits:
            raise InvalidArgument(
                f"version {candidate.version} of model '{candidate.model}' was retrained, and "
                "nothing says how many of its decisions may differ: give --max-disagreement SHARE "
                "(such as 5%) or --gate-report FILE, or --no-disagreement-limit; in JSON, limits."
                "max_disagreement, which may be null"
            )
    else:
        defaults["atol"], defaults["rtol"] = _tolerance(*proofs)
    left_out = {name: each for name, each in defaults.items() if name not in request.limits}
    return dataclasses.replace(
        plan,
        comparison=ComparisonKind.DECISIONS if retrained else ComparisonKind.VALUES,
        limits=dataclasses.replace(plan.limits, **left_out),
        **decision._asdict(),
    )


class _Decision(NamedTuple):
    """The fields of a plan about the decision that callers take from an answer."""

    decision_output: str
    decision_threshold: float | None
    decision_top_k: int


def _decision(
    request: RolloutRequest, proofs: Sequence[VersionProof], candidate: VersionDescription
) -> _Decision:
    """The decision of the request, or what it leaves open of the certificates'.

    Raises:
        InvalidArgument: there is no such output.
    """
    declared = [proof for proof in proofs if proof.decision_output]
    proof = declared[-1] if declared else VersionProof()
    output = request.decision_output or proof.decision_output
    threshold, top_k = request.decision_threshold, request.decision_top_k
    if threshold is None and top_k == 1 and output == proof.decision_output:
        threshold = proof.decision_threshold
    names = [each.name for each in candidate.outputs]
    if request.decision_output and output not in names:
        raise InvalidArgument(
            f"model '{candidate.model}' has no output '{output}' that decides (answers."
            f"decision_output); it has {', '.join(names)}"
        )
    return _Decision(output, threshold, top_k)


def _require_decision(decision: _Decision, candidate: VersionDescription) -> None:
    """Raise ``InvalidArgument`` if no answer leads to a decision, so that nothing is compared."""
    output, threshold, top_k = decision
    if output:
        chosen = [each for each in candidate.outputs if each.name == output]
        numbers = [each for each in chosen if each.datatype != "BYTES"]
    else:
        numbers = [each for each in candidate.outputs if each.is_float]
    if threshold is not None:
        if not numbers:
            raise InvalidArgument(
                f"the outputs of model '{candidate.model}' have no threshold, because they are not "
                "numbers; omit answers.decision_threshold"
            )
        return
    # One integer is a class itself.
    same = [e for e in numbers if 0 <= e.columns <= top_k and (e.is_float or top_k > 1)]
    if numbers and len(same) == len(numbers):
        columns = ", ".join(f"'{each.name}' has {each.columns}" for each in same)
        largest = "the largest class is" if top_k == 1 else f"the {top_k} largest classes are"
        raise InvalidArgument(
            f"model '{candidate.model}' was retrained, and its answers lead to no decision to "
            f"compare: {largest} always the same ({columns}); give the threshold in slo.toml, as "
            "decision_threshold = 0.5 in [answers], or compare values with --same-checkpoint"
        )


def _tolerance(baseline: VersionProof, candidate: VersionProof) -> tuple[float, float]:
    """The sum of both tolerances, because the sides may err in opposite directions."""
    atols, rtols = (
        [getattr(proof, name) for proof in (baseline, candidate)] for name in ("atol", "rtol")
    )
    if None in (*atols, *rtols):
        return DEFAULT_ATOL, DEFAULT_RTOL
    return sum(atols), sum(rtols)
