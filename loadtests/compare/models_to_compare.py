"""The subjects of a comparison from the command line: a checkpoint, or published models."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from modelport.gateway.errors import UsageError
from modelport.gateway.repository.storage.location import Location
from modelport.loadtests.compare import artifacts, candidates, plan
from modelport.loadtests.compare.artifacts import ComparedArtifact, ComparedCheckpoint
from modelport.loadtests.compare.measured_candidate import MeasuredCandidate
from modelport.loadtests.compare.plan import EMBEDDED, Entry
from modelport.loadtests.compare.result import Absent
from modelport.loadtests.system.modelport_command import modelport

#: Files with weights only; their model has to be named.
WEIGHTS = frozenset({".pt", ".pth", ".safetensors"})
CHECKPOINTS = WEIGHTS | {".keras"}
#: Files that make a folder a checkpoint: of Hugging Face, of PEFT, of TensorFlow.
CHECKPOINT_FILES = ("config.json", "adapter_config.json", "saved_model.pb")
#: Name of held-out rows beside the checkpoint, as ``modelport demo`` writes them.
HELD_OUT = "{stem}-held-out.npz"

Tell = Callable[[str], None]


@dataclass(frozen=True)
class ComparisonRequest:
    """The options that choose the candidates and their requests."""

    formats: tuple[str, ...]
    backends: tuple[str, ...]
    requests: int
    seed: int


@dataclass(frozen=True)
class SelectedCandidates:
    """The candidates that can be measured, and the absent ones."""

    model: str
    source: str
    contenders: list[MeasuredCandidate]
    absent: list[Absent]


def is_checkpoint(names: Sequence[str]) -> bool:
    """Whether ``names`` are one checkpoint rather than published models.

    Raises:
        UsageError: a checkpoint does not exist, or several are given.
    """
    like = [
        name
        for name in names
        if not _is_published(Path(name)) and (Path(name).suffix in CHECKPOINTS or os.sep in name)
    ]
    found = [name for name in like if Path(name).exists()]
    if not like:
        return len(names) == 1 and _holds_checkpoint(Path(names[0]))
    if len(names) > 1:
        raise UsageError(f"give one checkpoint at a time, not {', '.join(names)}")
    if found and Path(names[0]).is_dir() and not _holds_checkpoint(Path(names[0])):
        raise UsageError(
            f"'{names[0]}' is a folder without {', '.join(CHECKPOINT_FILES)} (a checkpoint) or "
            "config.pbtxt (a published model)"
        )
    if not found:
        raise UsageError(
            f"checkpoint '{names[0]}' does not exist; 'modelport demo' trains two; name a "
            "published model without its path, with --repository"
        )
    return True


def checkpoint(
    path: Path, model: str | None, data: Path | None, kwargs: str | None
) -> ComparedCheckpoint:
    """Derive the model from the file name, and find held-out rows beside the checkpoint.

    Raises:
        UsageError: ``data`` does not exist.
    """
    if data is not None and not data.is_file():
        raise UsageError(f"--data '{data}' does not exist")
    beside = path.with_name(HELD_OUT.format(stem=path.stem))
    if data is None and beside.is_file():
        data = beside
    if model is None and path.suffix in WEIGHTS:
        model = path.stem
    return ComparedCheckpoint(path, model, data, ("--model-kwargs", kwargs) if kwargs else ())


def from_checkpoint(
    given: ComparedCheckpoint, wanted: ComparisonRequest, cache: Path, work: Path, tell: Tell
) -> SelectedCandidates:
    """Export every format missing in ``cache``, for every backend of this machine.

    Raises:
        UsageError: the options or the checkpoint are invalid.
        Failed: the checkpoint is damaged.
    """
    entries = plan.entries(wanted.formats, wanted.backends)
    variants = list(dict.fromkeys(entry.variant for entry in entries))
    tell(f"reading {given.path}")
    home = cache / artifacts.key_of(given)
    try:
        home.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"--cache '{cache}' cannot be used: {error.strerror}; give a writable folder"
        ) from error
    exported, absent = artifacts.export(given, variants, home / "repository", tell)
    tell("computing the checkpoint's answers")
    answers = work / "checkpoint.json"
    count = ("--count", str(wanted.requests), "--seed", str(wanted.seed))
    modelport(["sample", *given.flags, *count, "--output", str(answers)])
    found, missing = candidates.contenders(
        [(entry, exported[entry.variant]) for entry in entries if entry.variant in exported],
        lambda artifact: candidates.sampled(
            artifact, work / "requests", wanted.requests, wanted.seed, answers
        ),
        work,
        tell,
        data=given.data,
    )
    digest = artifacts.sha256_of(given.path) if given.path.is_file() else home.name
    source = f"{given.path.name}, SHA-256 {digest}"
    return SelectedCandidates(given.model or given.path.stem, source, found, absent + missing)


def from_published(
    names: Sequence[str],
    repository: Path | Location,
    wanted: ComparisonRequest,
    work: Path,
    tell: Tell,
    data: Path | None = None,
) -> SelectedCandidates:
    """Published models, ``NAME`` or ``NAME:VERSION``, each on the backends that run its format.

    Raises:
        UsageError: a model is missing, two names mean one version, or the signatures differ.
        Failed: an artifact does not run.
    """
    if data is not None and not data.is_file():
        raise UsageError(f"--data '{data}' does not exist")
    found = [_published(name, repository, work) for name in names]
    _check_different(names, found)
    candidates.check_alike(found)
    allowed = wanted.backends or tuple(EMBEDDED.values())
    for name in allowed:
        if name not in plan.BACKENDS:
            raise UsageError(f"--backend '{name}' is unknown; use {', '.join(plan.BACKENDS)}")
    if wanted.formats:
        raise UsageError("--format is for checkpoints, not for published models; omit --format")
    chosen = [
        (Entry(artifact.variant, name), artifact)
        for artifact in found
        for name in dict.fromkeys(allowed)
        if _runs(name, artifact)
    ]
    absent: list[Absent] = [
        Absent(a.folder.name, f"none of {', '.join(allowed)} runs {a.variant}")
        for a in found
        if not any(_runs(name, a) for name in allowed)
    ]
    contenders, missing = candidates.contenders(
        chosen,
        lambda artifact: candidates.sampled(
            artifact, work / "requests", wanted.requests, wanted.seed
        ),
        work,
        tell,
        prefix=lambda artifact: f"{artifact.folder.name}:{artifact.version} · ",
        data=data,
    )
    source = ", ".join(f"{a.folder.name}:{a.version}" for a in found)
    return SelectedCandidates(
        " and ".join(dict.fromkeys(a.folder.name for a in found)),
        source,
        contenders,
        absent + missing,
    )


def _check_different(names: Sequence[str], found: Sequence[ComparedArtifact]) -> None:
    """A version would be slower or faster than itself by chance."""
    named: dict[Path, str] = {}
    for name, artifact in zip(names, found, strict=True):
        version = (artifact.folder / artifact.version).resolve()
        if version in named:
            raise UsageError(
                f"'{named[version]}' and '{name}' are one version, "
                f"{artifact.folder.name}:{artifact.version}; name another as NAME:VERSION"
            )
        named[version] = name


def _runs(name: str, artifact: ComparedArtifact) -> bool:
    kind = artifact.variant.format
    return EMBEDDED.get(kind) == name or plan.SERVERS.get(name) == kind


def _holds_checkpoint(folder: Path) -> bool:
    return any((folder / name).is_file() for name in CHECKPOINT_FILES)


def _is_published(path: Path) -> bool:
    return (path / "config.pbtxt").is_file()


def _published(text: str, repository: Path | Location, work: Path) -> ComparedArtifact:
    """Find ``NAME[:VERSION]`` in the repository, or the folder of a model anywhere."""
    if _is_published(Path(text)):
        return artifacts.published(Path(text).absolute())
    name, _, version = text.partition(":")
    if isinstance(repository, Location):
        return _downloaded(repository, name, version, work / "repository")
    folder = (repository / name).absolute()
    if not folder.is_dir():
        raise UsageError(
            f"'{name}' is neither a checkpoint nor a model in {repository}; give its repository "
            "with --repository"
        )
    if version and not (folder / version).is_dir():
        raise UsageError(f"model '{name}' has no version {version} in {repository}")
    return artifacts.published(folder, version)


def _downloaded(repository: Location, name: str, version: str, folder: Path) -> ComparedArtifact:
    """Copy a version, by default the newest, to the repository ``folder``.

    Raises:
        Failed: there is no such version, or its files were changed.
    """
    if not version:
        checked = json.loads(modelport(["verify", str(repository / name), "--integrity", "--json"]))
        version = str(checked["version"])
    place = str(repository / name / version)
    modelport(["publish", place, "--repository", str(folder), "--model-version", version])
    return artifacts.published(folder / name, version)
