"""Verification of a published version: unchanged files, and a proof that still holds.

``check`` reads files and runs no code of the version. ``prove`` loads the checkpoint and runs the
artifact, as serving does.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from modelport.exporters.arguments import MOST
from modelport.exporters.errors import ParityError
from modelport.exporters.formats.base import ExportTarget, ParitySession
from modelport.exporters.formats.registry import Format, find_format
from modelport.exporters.loaded_model import Origin, Source
from modelport.exporters.model_registry import registered
from modelport.exporters.optimization import result
from modelport.exporters.optimization.result import GraphOptimization
from modelport.exporters.proof import evaluation, proof
from modelport.exporters.proof.evaluation import Evaluation
from modelport.exporters.proof.model_proportion import in_proportion
from modelport.exporters.proof.parity_report import ParityReport
from modelport.exporters.proof.proof import Checks, Progress
from modelport.exporters.sources import SourceRequest, reader_selection
from modelport.exporters.tolerance import BOUNDS
from modelport.gateway.errors import IntegrityError, ModelportError, UsageError, first_line
from modelport.gateway.repository import manifest, signing
from modelport.gateway.repository.manifest import sha256_of
from modelport.gateway.repository.scan import VERSION_NAME
from modelport.gateway.repository.signing import VersionCertificate
from modelport.gateway.repository.signing_keys import PublicKey

#: Folders searched for the checkpoint named in the certificate.
CHECKPOINT_FOLDERS = (Path(), Path("checkpoints"))
#: The last batch of a proof may have more samples than are left.
MAX_SAMPLES = 2 * MOST["samples"]
MAX_NAME_BYTES = 255


@dataclass(frozen=True, slots=True)
class Checked:
    """A version whose files match its manifest and its certificate.

    Attributes:
        signer: fingerprint of the key that the version says it is signed with; None: not signed.
        keys: the caller's keys; one of them verified the signature.
    """

    path: Path
    model: str
    number: int
    certificate: VersionCertificate
    signer: str | None
    keys: tuple[PublicKey, ...] = ()

    @property
    def trusted(self) -> bool:
        """Whether a key that the caller trusts signed the version."""
        return bool(self.keys)


@dataclass(frozen=True, slots=True)
class Claim:
    """The contents of a certificate's proof, and the sources needed to repeat it.

    Attributes:
        source: its ``checkpoint`` is a file name without a path.
        origins: the checkpoint, then the adapters.
    """

    format: Format
    target: ExportTarget
    source: SourceRequest
    origins: tuple[Origin, ...]
    checks: Checks
    max_abs_errors: Mapping[str, float]
    agreement: float | None
    evaluation: Evaluation | None
    optimization: GraphOptimization | None = None

    @property
    def held_to(self) -> str:
        """The key of the bounds that the artifact was held to, or ``fp32``."""
        return proof.held_to(self.target, self.optimization)


@dataclass(frozen=True, slots=True)
class VerificationInputs:
    """The files and permissions that the caller supplies to repeat a proof.

    Attributes:
        checkpoint: None searches ``CHECKPOINT_FOLDERS`` for the one in the certificate.
        lora: the adapters, if the certificate names some.
        model: the certificate's factory, as permission to run its code.
        data: the held-out inputs, if the certificate has an evaluation.
        trust: run the version's artifact and the certificate's factory although no given key
            signed them.
    """

    checkpoint: Path | None = None
    lora: Path | None = None
    model: str | None = None
    data: Path | None = None
    trust: bool = False


@dataclass(frozen=True, slots=True)
class Proven:
    """The results of this proof, beside those of the certificate."""

    claim: Claim
    report: ParityReport
    evaluation: Evaluation | None


def find_version(path: Path) -> Path:
    """Find the folder of a version: ``path`` itself, or the newest version of the model there.

    Raises:
        UsageError: ``path`` is neither.
    """
    path = Path(os.path.abspath(path))
    try:
        names = {entry.name for entry in path.iterdir()}
    except OSError as error:
        raise UsageError(
            f"'{path}' cannot be read ({error.strerror}); give the folder of a version or a model"
        ) from error
    versions = [name for name in names if VERSION_NAME.match(name) and (path / name).is_dir()]
    if versions and not names & signing.UNLISTED:
        return path / max(versions, key=int)
    if VERSION_NAME.match(path.name):
        return path
    raise UsageError(f"'{path}' is neither a published version nor a model that has one")


def check(version: Path, keys: Collection[PublicKey] = ()) -> Checked:
    """Check the files of ``version`` against its manifest, its certificate and its signature.

    Args:
        keys: one of them must have signed the version; without keys the signer is not verified.

    Raises:
        IntegrityError: a file is changed, missing or unlisted, or the signature does not match.
    """
    model = version.parent.name
    if not manifest.verify(version):
        raise IntegrityError(f"{manifest.FILENAME} is missing; publish the version again")
    if keys:
        certificate = signing.verify_signature(version, model, keys)
    else:
        certificate = signing.read_certificate(version, model)
    signing.verify_files(version, certificate)
    signer = signing.signer_of(version)
    return Checked(version, model, int(version.name), certificate, signer, tuple(keys))


def prove(
    version: Checked,
    given: VerificationInputs,
    progress: Progress = lambda stage, done, total: None,
) -> Proven:
    """Run the artifact and the checkpoint on the inputs that the certificate describes.

    An artifact that can do more than compute runs only if it is signed, or if ``given.trust``; a
    signed one runs from a private copy, so that nobody can change it meanwhile.

    Raises:
        Unsupported: the artifact is native code that no trusted key signed.
        UsageError: a file named in the certificate is missing, or is another one.
        ParityError: the artifact does not compute what the checkpoint computes.
        IntegrityError: the certificate is incomplete, or the checkpoint is damaged.
    """
    claim = _claim(version.certificate.document)
    _check_factory(claim.source.model, version, given)
    progress("loading", 0, 0)
    source = _load(claim, given, version.trusted or given.trust)
    checks = replace(claim.checks, data=_held_out(claim, given, source))
    where = f"version {version.number} of '{version.model}'"
    with _as_verified(version) as folder:
        session = _open(claim, folder, where, version.trusted or given.trust)
        try:
            report, found = proof.prove(source, session, claim.held_to, checks, progress)
        except ParityError as error:
            raise ParityError(f"{where} is not the verified one: {error}") from error
    return Proven(claim, report, found)


def _as_verified(version: Checked) -> contextlib.AbstractContextManager[Path]:
    if version.trusted:
        return signing.verified_copy(version.path, version.certificate)
    return contextlib.nullcontext(version.path)


# -- the certificate ------------------------------------------------------------------------------


def _claim(document: Mapping[str, Any]) -> Claim:
    with _reading_certificate():
        model, artifact, proven = document["model"], document["artifact"], document["parity"]
        outputs, decision = proven["outputs"], proven["decision"]
        found = document["evaluation"] and Evaluation(**document["evaluation"])
        optimized = document.get("optimization")
        source = SourceRequest(
            checkpoint=Path(document["checkpoint"]["file"]),
            model=model["factory"],
            model_kwargs=dict(model["model_kwargs"]),
            max_batch_size=int(model["max_batch_size"]),
            inputs=tuple(model["inputs"]),
            output_names=tuple(model["output_names"]),
            masks=tuple(model.get("masks", ())),
            task=model.get("task"),
        )
        if source.checkpoint.name != str(source.checkpoint):  # it is searched for by this name
            raise ValueError(source.checkpoint)
        names = (source.checkpoint.name, *source.inputs, *source.output_names, *source.masks)
        optional = (source.model, source.task)
        if not all(isinstance(n, str | None) for n in optional) or not all(
            isinstance(n, str) for n in names
        ):
            raise TypeError(source.model)
        if not 1 <= source.max_batch_size < 2**31 and source.max_batch_size != 0:
            raise ValueError(source.max_batch_size)
        return Claim(
            format=find_format(artifact["format"]),
            target=ExportTarget(
                artifact["dtype"],
                artifact["quantize"],
                artifact["opset"],
                optimize=artifact.get("optimize"),
            ),
            source=source,
            origins=tuple(
                Origin(_filename(origin["file"]), str(origin["sha256"]))
                for origin in (document["checkpoint"], *document["adapters"])
            ),
            checks=_checks(proven, found),
            max_abs_errors={name: float(outputs[name]["max_abs_error"]) for name in outputs},
            agreement=decision and decision["agreement"],
            evaluation=found,
            optimization=None if optimized is None else result.from_certificate(optimized),
        )


def _checks(proven: Mapping[str, Any], found: Evaluation | None) -> Checks:
    """The limits that the artifact was held to."""
    tolerance, bounds = proven["tolerance"], proven["bounds"]
    return Checks(
        samples=_count(proven["samples"], 1, MAX_SAMPLES),
        seed=_count(proven["seed"], 0, MOST["seed"]),
        atol=_limit(tolerance["atol"]),
        rtol=_limit(tolerance["rtol"]),
        agreement=bounds and _limit(bounds["agreement"]),
        relative_error=bounds and _limit(bounds["relative_error"]),
        max_drop=evaluation.DEFAULT_MAX_DROP if found is None else _limit(found.max_drop),
    )


def _count(value: Any, least: int, most: int) -> int:
    if type(value) is not int or not least <= value <= most:
        raise ValueError(value)
    return value


def _filename(value: Any) -> str:
    """A name that a file here may have."""
    if not 0 < len(os.fsencode(value)) <= MAX_NAME_BYTES or "\0" in value:
        raise ValueError(value)
    return str(value)


def _limit(value: Any) -> float:
    """Refuse NaN and infinity, which would limit nothing."""
    if not 0 <= float(value) < float("inf"):
        raise ValueError(value)
    return float(value)


@contextlib.contextmanager
def _reading_certificate() -> Iterator[None]:
    try:
        yield
    except signing.MALFORMED as error:
        raise IntegrityError(
            f"{signing.CERTIFICATE} does not describe the proof; export the model again, "
            "or pass --integrity"
        ) from error


# -- what it names --------------------------------------------------------------------------------


def _check_factory(factory: str | None, version: Checked, given: VerificationInputs) -> None:
    """Refuse to run the certificate's factory unless the caller vouches for it."""
    if given.model is not None and given.model != factory:
        raise UsageError(f"--model '{given.model}' is not the certificate's '{factory}'")
    known = registered()
    if version.trusted or given.trust or given.model or factory in (None, *known, *known.values()):
        return
    if reader_selection.is_vision_model(factory):
        return
    raise UsageError(
        f"the proof runs '{factory}', which an unsigned certificate names; give "
        f"--model {factory} or --trust if you trust it, or check the signature with --public-key"
    )


def _load(claim: Claim, given: VerificationInputs, trusted: bool) -> Source:
    checkpoint, *adapters = claim.origins
    if bool(adapters) != (given.lora is not None):
        raise UsageError(
            f"the certificate names the adapters '{adapters[0].name}'; give them with --lora"
            if adapters
            else "the certificate names no adapters; omit --lora"
        )
    path = given.checkpoint or _find_checkpoint(checkpoint)
    if path.is_file() and sha256_of(path) != checkpoint.sha256:
        raise _another("checkpoint", path, checkpoint)
    with contextlib.nullcontext() if trusted else in_proportion(claim.source.model_kwargs, path):
        source = reader_selection.load(replace(claim.source, checkpoint=path, lora=given.lora))
    if source.origins[0].sha256 != checkpoint.sha256:
        raise _another("checkpoint", path, checkpoint)
    if [origin.sha256 for origin in source.origins[1:]] != [a.sha256 for a in adapters]:
        raise _another("--lora", given.lora or path, adapters[0])
    return source


def _find_checkpoint(origin: Origin) -> Path:
    found = [folder / origin.name for folder in CHECKPOINT_FOLDERS]
    found = [path for path in found if path.exists()]
    if not found:
        raise UsageError(
            f"checkpoint '{origin.name}' is neither here nor in checkpoints/; give its path with "
            "--checkpoint, or check the files alone with --integrity"
        )
    same = (path for path in found if path.is_file() and sha256_of(path) == origin.sha256)
    return next(same, found[0])


def _another(kind: str, path: Path, origin: Origin) -> UsageError:
    return UsageError(
        f"{kind} '{path}' is not the '{origin.name}' of the certificate, whose SHA-256 is "
        f"{origin.sha256}; give that one"
    )


def _held_out(claim: Claim, given: VerificationInputs, source: Source) -> evaluation.HeldOut | None:
    if given.data is not None:
        data = evaluation.read(given.data, source)
        if claim.evaluation is not None and data.sha256 != claim.evaluation.sha256:
            raise _another(
                "--data", given.data, Origin(claim.evaluation.file, claim.evaluation.sha256)
            )
        return data
    if claim.evaluation is not None and claim.held_to in BOUNDS:
        raise UsageError(
            f"the version was compared on '{claim.evaluation.file}'; give it with --data"
        )
    return None


def _open(claim: Claim, folder: Path, where: str, trusted: bool) -> ParitySession:
    try:
        return claim.format.open_session(folder / claim.format.platform.default_filename, trusted)
    except ModelportError:
        raise
    except Exception as error:
        reason = first_line(error)
        raise ParityError(f"{where} does not open: {reason}; export the model again") from error
