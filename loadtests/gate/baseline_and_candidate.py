"""Baseline and candidate: published versions, locally or in object storage, and running servers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from modelport.gateway.errors import UsageError
from modelport.loadtests.load import target
from modelport.loadtests.load.target import LoadTestProtocol, LoadTestTarget
from modelport.loadtests.serving.gateway import newest_version
from modelport.loadtests.system.environments import Missing
from modelport.loadtests.users import signature
from modelport.loadtests.users.authentication import authenticated
from modelport.loadtests.users.signature import RequestSignature, SignatureUnknown

FORMS = (
    "give a published version (model_repository/fraud/2), a model's folder, either of them in "
    "object storage (s3://BUCKET/PREFIX/fraud/2), http://HOST:PORT/v2/models/NAME[/versions/V] or "
    "grpc://HOST:PORT/NAME[/V]; over TLS https:// or grpcs://"
)
#: URL schemes of object storage.
STORAGES = ("s3", "gs", "az")
CONFIG = "config.pbtxt"


@dataclass(frozen=True)
class Published:
    """A version that the gate serves itself."""

    given: str
    #: The model's folder.
    folder: Path
    version: str

    @property
    def path(self) -> Path:
        return self.folder / self.version

    @property
    def title(self) -> str:
        return f"{self.folder.name} version {self.version}"

    def signature(self) -> RequestSignature:
        """The model's signature; raises ``SignatureUnknown``."""
        return signature.read_file(self.folder / CONFIG)


@dataclass(frozen=True)
class Running:
    """A server that is running already."""

    given: str
    #: Its model in the Open Inference Protocol.
    named: LoadTestTarget

    @property
    def title(self) -> str:
        return self.given

    @property
    def is_grpc(self) -> bool:
        return self.named.protocol.is_grpc

    def target(self, protocol: LoadTestProtocol) -> LoadTestTarget:
        return replace(self.named, protocol=protocol)

    def signature(self) -> RequestSignature:
        """The model's signature; raises ``SignatureUnknown``."""
        return signature.ask(self.named)


@dataclass(frozen=True)
class Stored:
    """A version in object storage, or a model's newest one there; ``object_storage`` fetches it."""

    given: str


Side = Published | Running


def side(given: str) -> Side | Stored:
    """Parse one argument of the command.

    Raises:
        UsageError: it is neither a published version nor the URL of a model.
    """
    scheme, separator, _ = given.partition("://")
    if scheme in STORAGES and separator:
        return Stored(given)
    if separator:
        return _running(given, scheme)
    path = Path(given)
    if not path.is_dir():
        raise UsageError(f"'{given}' is not a folder; {FORMS}")
    path = path.resolve()
    if path.name.isdecimal() and (path.parent / CONFIG).is_file():
        return Published(given, path.parent, path.name)
    try:
        version = newest_version(path)
    except Missing as error:
        raise UsageError(f"{error}; {FORMS}") from error
    if not (path / CONFIG).is_file():
        raise UsageError(f"'{given}' has no {CONFIG}; 'modelport export' publishes one")
    return Published(given, path, version)


def _running(given: str, scheme: str) -> Running:
    if scheme not in target.SCHEMES:
        raise UsageError(
            f"'{given}' does not begin with http://, grpc:// or s3:// (gs://, az://); {FORMS}"
        )
    try:
        found = target.parse(given)
    except ValueError as error:
        raise UsageError(f"{error}; {FORMS}") from error
    return Running(given, authenticated(found, given))


def protocol(
    baseline: Side | Stored, candidate: Side | Stored, wanted: LoadTestProtocol, said: bool
) -> LoadTestProtocol:
    """The protocol for both sides.

    Args:
        said: ``wanted`` was chosen by the user; a URL's scheme must match it.

    Raises:
        UsageError: the sides speak different protocols.
    """
    found = wanted
    for one in (baseline, candidate):
        if isinstance(one, Running) and one.is_grpc != found.is_grpc:
            if said:
                raise UsageError(
                    f"'{one.given}' cannot be tested in {wanted}; give another protocol or URL"
                )
            found = LoadTestProtocol.OIP_GRPC if one.is_grpc else LoadTestProtocol.OIP_HTTP_BINARY
            said = True
    for one in (baseline, candidate):
        if isinstance(one, Running) and one.is_grpc != found.is_grpc:
            raise UsageError("one URL is HTTP and the other gRPC; give two of one protocol")
    return found


def interface_problem(baseline: RequestSignature, candidate: RequestSignature) -> str:
    """The reason that the baseline's clients cannot call the candidate; empty if they can."""
    theirs = {one.name: one for one in candidate.inputs}
    for one in baseline.inputs:
        other = theirs.pop(one.name, None)
        if other is None:
            return f"the candidate has no input '{one.name}', which the baseline has"
        if other.datatype != one.datatype:
            return f"input '{one.name}' is {other.datatype}, the baseline's {one.datatype}"
        if _sizes(other.dims) != _sizes(one.dims):
            return f"input '{one.name}' is {_sizes(other.dims)}, the baseline's {_sizes(one.dims)}"
    if theirs:
        return f"the candidate has an input '{next(iter(theirs))}', which the baseline lacks"
    if missing := sorted(set(baseline.outputs) - set(candidate.outputs)):
        return f"the candidate has no output '{missing[0]}', which the baseline has"
    for name, wanted in baseline.outputs.items():
        if (found := candidate.outputs[name].datatype) != wanted.datatype:
            return f"output '{name}' is {found}, the baseline's {wanted.datatype}"
    if candidate.max_batch_size < baseline.max_batch_size:
        return (
            f"the candidate takes batches of {candidate.max_batch_size}, "
            f"the baseline of {baseline.max_batch_size}"
        )
    return ""


def _sizes(dims: tuple[int | str, ...]) -> list[int]:
    """The dims, with -1 for every axis."""
    return [-1 if isinstance(dim, str) else dim for dim in dims]


def unknown(one: Side, error: SignatureUnknown) -> UsageError:
    """The error about a side without a readable signature, raised before measuring."""
    return UsageError(f"'{one.given}': {error}")
