"""Description of a compared server: its start, its requests, its answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks import tiny_model
from benchmarks.peers.http_formats import Encode, oip_binary, oip_json

# Programs for the peers' own environments; they import nothing from this package.
INSIDE = Path(__file__).resolve().parent.parent / "inside"


@dataclass(frozen=True)
class PeerLaunch:
    """The ports and folders of one server, and its model."""

    repository: Path
    work: Path  # a folder of its own
    http: int
    grpc: int
    metrics: int
    model: str = tiny_model.NAME
    more: tuple[int, ...] = ()  # further free ports

    @property
    def onnx(self) -> Path:
        return self.repository / self.model / "1" / "model.onnx"


@dataclass(frozen=True)
class Command:
    """The command line of a server, with its environment."""

    arguments: list[str]
    env: Mapping[str, str] = field(default_factory=dict)
    cwd: Path | None = None
    leftovers: tuple[Path, ...] = ()  # folders that it may leave behind


@dataclass(frozen=True)
class PeerServer:
    """A server and its protocols; the defaults are those of the Open Inference Protocol.

    ``encodings``: its HTTP encodings, ``json`` and ``binary``. ``batching``: it is measured with
    dynamic batching on, where that matters. ``perf_analyzer``: it serves the model configuration,
    which that client needs. ``stoppable``: it survives a SIGSTOP while others are measured.
    ``apart``: its event loop is on the clients' core, so that the model's threads have the server's
    core to themselves, as in the raw loop; measured only where that matters.
    """

    name: str
    about: str
    command: Callable[[PeerLaunch], Command]
    encodings: Mapping[str, Encode] = field(
        default_factory=lambda: {"json": oip_json, "binary": oip_binary}
    )
    grpc: bool = True
    perf_analyzer: bool = False
    batching: bool = False
    apart: bool = False
    stoppable: bool = True
    ready_path: str = "/v2/models/{model}/ready"
