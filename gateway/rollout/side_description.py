"""The versions that a rollout may compare, as a serving process describes them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from modelport.gateway.errors import IntegrityError
from modelport.gateway.models.manager import ModelManager
from modelport.gateway.models.model import ServedVersion
from modelport.gateway.repository.version_proof import VersionProof, proof_in
from modelport.gateway.runtime.checked_json import STRICT


@dataclass(frozen=True, slots=True)
class OutputDescription:
    """One output of a version. ``columns``: its last dimension; -1 if that is open."""

    __pydantic_config__: ClassVar = STRICT

    name: str
    datatype: str
    columns: int

    @property
    def is_float(self) -> bool:
        return self.datatype.startswith(("FP", "BF"))


@dataclass(frozen=True, slots=True)
class VersionDescription:
    """One version that is served."""

    __pydantic_config__: ClassVar = STRICT

    model: str
    version: int
    #: The inputs and outputs as text, one a line, with the largest batch.
    signature: tuple[str, ...]
    #: The reason why no rollout can divert its requests; empty: it can.
    obstacle: str = ""
    proof: VersionProof | None = None
    outputs: tuple[OutputDescription, ...] = ()


@dataclass(frozen=True, slots=True)
class RolloutModelDescription:
    """One model: the versions that are served, the labels, and the default version."""

    __pydantic_config__: ClassVar = STRICT

    name: str
    default: int
    versions: tuple[int, ...]
    labels: dict[str, int]


def model(manager: ModelManager, name: str) -> RolloutModelDescription:
    """Describe the model ``name``.

    Raises:
        NotFound: there is no such model.
        Unavailable: it is not served.
    """
    default = manager.get(name).number
    return RolloutModelDescription(
        name, default, tuple(manager.versions(name)), dict(manager.labels(name))
    )


def version(manager: ModelManager, name: str, number: int) -> VersionDescription:
    """Describe a version that is served; blocking.

    Raises:
        NotFound, Unavailable: it is not served.
    """
    served = manager.get(name, number)
    folder = manager.folder(name, number)
    proof = None if folder is None else read_proof(folder, name)
    outputs = tuple(
        OutputDescription(
            spec.name, str(spec.datatype), spec.wire_dims[-1] if spec.wire_dims else 1
        )
        for spec in served.signature.outputs
    )
    return VersionDescription(name, number, _signature(served), _obstacle(served), proof, outputs)


def _signature(served: ServedVersion) -> tuple[str, ...]:
    signature = served.signature
    lines = [
        f"{kind} '{spec.name}' {spec.datatype} {list(spec.wire_dims)}"
        for kind, specs in (("input", signature.inputs), ("output", signature.outputs))
        for spec in specs
    ]
    return (*lines, f"max_batch_size {signature.max_batch_size}")


def _obstacle(served: ServedVersion) -> str:
    if served.source:
        return (
            f"it is registered from the model '{served.source}'; start a rollout of that model, "
            "because a promotion changes its config.pbtxt"
        )
    if served.decoupled:
        return (
            "its transaction policy is decoupled: it returns any number of responses to a request"
        )
    if served.config.HasField("sequence_batching"):
        return "it batches sequences, and all requests of one need the same version"
    return ""


def read_proof(folder: Path, name: str) -> VersionProof | None:
    """The proof of the version in ``folder``; None without a certificate that can be read."""
    from modelport.gateway.repository import signing  # needed by few gateways

    try:
        return proof_in(signing.read_certificate(folder, name).document)
    except IntegrityError:
        return None
