"""What the benchmark must know of a server: how it starts, what it is asked, what it answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from modelport.loadtests.benchmarks import tiny_model
from modelport.loadtests.peers.exchanges import Encode, oip_binary, oip_json

# Programs that run inside the peers' own environments: they import nothing from here.
INSIDE = Path(__file__).resolve().parent.parent / "inside"
#: The same runtime in every server.
ONNXRUNTIME = "onnxruntime==1.31.1"


@dataclass(frozen=True)
class Launch:
    """Where one server is to run, and the one model it is to serve."""

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
    arguments: list[str]
    env: Mapping[str, str] = field(default_factory=dict)
    cwd: Path | None = None
    leftovers: tuple[Path, ...] = ()  # folders of its own that it may leave behind


@dataclass(frozen=True)
class Server:
    """A server and its dialect; the defaults are those of the Open Inference Protocol.

    ``encodings``: what it understands over HTTP, ``json`` and ``binary``. ``batching``: it is
    measured with dynamic batching on, and only where that
    matters. ``perf_analyzer``: it serves the model configuration, which that client asks for.
    ``stoppable``: it bears a SIGSTOP while others are measured. ``apart``: its event loop is on the
    clients' core, so that the model's threads have the server's core to themselves, as the raw loop
    has; measured only where that matters.
    """

    name: str
    about: str
    command: Callable[[Launch], Command]
    encodings: Mapping[str, Encode] = field(
        default_factory=lambda: {"json": oip_json, "binary": oip_binary}
    )
    grpc: bool = True
    perf_analyzer: bool = False
    batching: bool = False
    apart: bool = False
    stoppable: bool = True
    ready_path: str = "/v2/models/{model}/ready"
