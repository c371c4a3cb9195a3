"""Candidates of a comparison: the servers that can be started, and those missing on this
machine."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

from modelport.gateway.errors import UsageError
from modelport.loadtests import model_quality
from modelport.loadtests.compare.artifacts import ComparedArtifact
from modelport.loadtests.compare.measured_candidate import MeasuredCandidate
from modelport.loadtests.compare.plan import Entry
from modelport.loadtests.compare.result import Absent
from modelport.loadtests.load import payloads
from modelport.loadtests.load.payloads import BadPayload, Payloads
from modelport.loadtests.model_quality import Deciding
from modelport.loadtests.serving import tfserving, torchserve, triton
from modelport.loadtests.serving.gateway import MeasuredGateway, only_version
from modelport.loadtests.serving.server import ServedBackend
from modelport.loadtests.serving.tfserving import TensorFlowServing
from modelport.loadtests.serving.torchserve import TorchServe
from modelport.loadtests.serving.triton import Triton
from modelport.loadtests.system.environments import Missing
from modelport.loadtests.system.modelport_command import Failed, modelport
from modelport.loadtests.users.signature import SignatureUnknown, read_file

Tell = Callable[[str], None]
#: Rows per request when accuracy is measured.
EVALUATION_BATCH = 8


def backend(entry: Entry, artifact: ComparedArtifact, work: Path) -> ServedBackend:
    """The server of ``artifact`` for ``entry``; packages the artifact under ``work`` if needed.

    Raises:
        Missing: this machine lacks the server; the message says what to install.
        Failed: ``modelport package`` refuses the artifact.
    """
    if not entry.direct:
        # It was just exported from the user's own checkpoint.
        return MeasuredGateway(artifact.folder, artifact.version, ("--allow-native-code",))
    folder = work / f"{entry.backend}-{artifact.variant.slug}"
    model = artifact.folder.name
    if entry.backend == "torchserve":
        programs = torchserve.programs()
        archive = folder / f"{model}.mar"
        folder.mkdir(parents=True)
        modelport(
            [
                *("package", str(artifact.folder / artifact.version)),
                *("--for", "torchserve", "--output", str(archive)),
            ]
        )
        return TorchServe(archive, programs)
    program = tfserving.program() if entry.backend == "tfserving" else triton.program()
    only = folder / "published" / model
    only_version(artifact.folder, artifact.version, only)
    package = folder / "package"
    modelport(["package", str(only), "--for", entry.backend, "--output", str(package)])
    if entry.backend == "tfserving":
        return TensorFlowServing(package, model, program)
    return Triton(package, model, program)


def contenders(
    chosen: Sequence[tuple[Entry, ComparedArtifact]],
    requests: Callable[[ComparedArtifact], Path],
    work: Path,
    tell: Tell,
    prefix: Callable[[ComparedArtifact], str] = lambda artifact: "",
    data: Path | None = None,
) -> tuple[list[MeasuredCandidate], list[Absent]]:
    """The candidates that can be started, and the reasons for the absence of others.

    Args:
        requests: returns the file of requests and expected answers for an artifact.
        prefix: of the names, if several models are compared.
        data: held-out rows; accuracy is measured on them if they have labels.

    Raises:
        UsageError: ``data`` cannot be read.
    """
    found: list[MeasuredCandidate] = []
    absent: list[Absent] = []
    for entry, artifact in chosen:
        tell(f"preparing {entry.name}")
        name = f"{prefix(artifact)}{entry.name}"
        try:
            server = backend(entry, artifact, work / "packages" / f"{len(found)}-{len(absent)}")
            file = requests(artifact)
            rows = None if data is None else labelled(artifact, data)
            asked = payloads.read(file)
            found.append(MeasuredCandidate(name, entry, artifact, server, file, asked, rows))
        except (Missing, Failed, BadPayload) as error:
            absent.append(Absent(name, " ".join(str(error).split())))
    return found, absent


def labelled(artifact: ComparedArtifact, data: Path) -> tuple[Payloads, Deciding] | None:
    """The rows of ``data`` in batches, and their decision; None without a decision or labels.

    Raises:
        UsageError: the rows cannot be read, or do not fit the model.
    """
    try:
        signature = read_file(artifact.folder / "config.pbtxt")
        batch = max(1, min(EVALUATION_BATCH, signature.max_batch_size))
        rows = payloads.read(data, signature, batch)
    except (BadPayload, SignatureUnknown) as error:
        raise UsageError(f"--data: {error}") from error
    decided = model_quality.deciding([artifact.certificate.proof], signature, True)
    return None if rows.labels is None or decided is None else (rows, decided)


def sampled(
    artifact: ComparedArtifact, folder: Path, count: int, seed: int, checkpoint: Path | None = None
) -> Path:
    """Write the file of requests for ``artifact``, once for each.

    In fp32 the expected answers are the checkpoint's own if it is available (``checkpoint`` is the
    file with them), within the certificate's tolerance. Lower precisions change values by design,
    by an amount proven at export; there a server must give the answers of the proven artifact in
    its own runtime, within the precision's mean error.

    Raises:
        Failed: the artifact does not run.
    """
    fp32 = artifact.variant.precision == "fp32" and not artifact.certificate.bounded
    name = f"{artifact.folder.name}-{artifact.version}-{count}-{seed}.json"
    target = folder / name
    if target.is_file():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    if fp32 and checkpoint is not None:
        found = payloads.read(checkpoint)
    else:
        own = folder / f"own-{name}"
        version = artifact.folder / artifact.version
        flags = ("--count", str(count), "--seed", str(seed), "--output", str(own))
        modelport(["sample", str(version), "--trust", *flags])
        found = payloads.read(own)
    proven = artifact.certificate
    atol = proven.atol if fp32 else max(proven.atol, proven.mean_abs_error)
    exact = dataclasses.replace(found, absolute_tolerance=atol, relative_tolerance=proven.rtol)
    payloads.write(exact, target)
    return target


def check_alike(artifacts: Sequence[ComparedArtifact]) -> None:
    """Check that the published models have the same inputs and outputs.

    Raises:
        UsageError: two models differ; the message names them.
    """
    first, *others = artifacts
    for other in others:
        one, two = (_signature(artifact) for artifact in (first, other))
        if one != two:
            raise UsageError(
                f"'{first.folder.name}' and '{other.folder.name}' have different inputs or outputs "
                f"({one} and {two}); compare models of one signature"
            )


def _signature(artifact: ComparedArtifact) -> str:
    """Names and datatypes in ``config.pbtxt``, in its order."""
    lines = (artifact.folder / "config.pbtxt").read_text().splitlines()
    found, inside = [], ""
    for line in lines:
        word = line.strip()
        if line[:1].isalpha():
            inside = word.split()[0] if word.startswith(("input {", "output {")) else ""
        elif inside and word.startswith(("name:", "data_type:")):
            found.append(word.partition(":")[2].strip().strip('"'))
    return " ".join(found)
