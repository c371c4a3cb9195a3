"""The gateway as a measured server, with an embedded backend."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from modelport.loadtests.load.target import LoadTestProtocol, LoadTestTarget
from modelport.loadtests.serving.server import MeasuredServerLaunch, get
from modelport.loadtests.system.environments import Missing
from modelport.loadtests.system.modelport_command import MODELPORT
from modelport.loadtests.system.processes import HOST, free_ports

HTTP = (
    LoadTestProtocol.OIP_HTTP,
    LoadTestProtocol.OIP_HTTP2,
    LoadTestProtocol.OIP_HTTP_BINARY,
    LoadTestProtocol.TFSERVING_HTTP,
    LoadTestProtocol.TORCHSERVE_HTTP,
    LoadTestProtocol.TRITON_HTTP,
)
GRPC = (
    LoadTestProtocol.OIP_GRPC,
    LoadTestProtocol.TFSERVING_GRPC,
    LoadTestProtocol.TORCHSERVE_GRPC,
    LoadTestProtocol.TRITON_GRPC,
)


@dataclass(frozen=True)
class MeasuredGateway:
    """``modelport serve`` with one version of one model.

    Attributes:
        folder: the model's folder as published: ``config.pbtxt`` and numbered versions.
        version: the version to serve; empty: the newest.
        flags: further flags of ``modelport serve``, such as ``--workers 2``.
    """

    folder: Path
    version: str = ""
    flags: tuple[str, ...] = ()

    def launch(self, work: Path) -> MeasuredServerLaunch:
        model, version = self.folder.name, self.version or newest_version(self.folder)
        repository = work / "repository"
        only_version(self.folder, version, repository / model)
        http, grpc, metrics = free_ports(3)
        flags = ["--model-repository", str(repository), "--http-address", HOST]
        flags += ["--exit-timeout-secs", "0"]  # no requests are in flight when it is stopped
        for name, port in (("http", http), ("grpc", grpc), ("metrics", metrics)):
            flags += [f"--{name}-port", str(port)]
        targets = {
            protocol: LoadTestTarget(protocol, f"{HOST}:{port}", model)
            for port, protocols in ((http, HTTP), (grpc, GRPC))
            for protocol in protocols
        }
        return MeasuredServerLaunch(
            command=(*MODELPORT, "serve", *flags, *self.flags),
            targets=targets,
            ready=lambda: get(f"{HOST}:{http}", "/v2/health/ready")[0] == 200,
        )


def newest_version(folder: Path) -> str:
    """The number of a published model's newest version.

    Raises:
        Missing: ``folder`` is not a published model.
    """
    try:
        numbers = [int(child.name) for child in folder.iterdir() if child.name.isdecimal()]
    except OSError as error:
        raise Missing(f"{folder} cannot be read: {error.strerror}") from error
    if not numbers:
        raise Missing(f"{folder} has no published version; 'modelport export' makes one")
    return str(max(numbers))


def only_version(folder: Path, version: str, target: Path) -> None:
    """Copy the model at ``folder`` with a single version; large files are linked.

    Raises:
        Missing: there is no such version.
    """
    if not (folder / version).is_dir():
        raise Missing(f"{folder} has no version {version}")
    target.mkdir(parents=True)
    for child in folder.iterdir():
        if child.is_file():
            shutil.copy(child, target)
        elif child.name == version or not child.name.isdecimal():
            shutil.copytree(child, target / child.name, copy_function=link)


def link(source: str, target: str) -> None:
    """Link a file, or copy it to another file system."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy(source, target)
