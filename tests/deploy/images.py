"""Images built from the Dockerfile by the real ``buildah``, and run without a container engine.

Registries may be out of reach, so a Debian of the same release, made by ``debootstrap``, stands in
for the base image. What is built runs under ``bubblewrap``, from the image's own configuration: its
root file system read-only, its user, no capability, no privilege to gain, process 1 of its own.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import subprocess
import sys
import urllib.parse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import programs
from modelport.loadtests.system import environments
from tests.deploy import DEPLOY, tools

ROOT = DEPLOY.parent
DOCKERFILE = DEPLOY / "docker" / "Dockerfile"
BASE = "docker.io/library/python:3.11-slim-bookworm"
#: Debian's own Python 3.11, where the official image has one under /usr/local.
PACKAGES = "python3,python3-venv,ca-certificates"
START_SECONDS = 120.0


@dataclass(frozen=True)
class Image:
    name: str
    user: str
    environment: dict[str, str]
    entrypoint: list[str]
    command: list[str]
    health: list[str]
    root: Path
    size_bytes: int


def _buildah(*words: str | Path) -> str:
    program = programs.debian_program("buildah", "buildah")
    store = environments.folder("images")
    command = [program, "--root", store / "root", "--runroot", store / "run", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}: {done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


@functools.cache
def base() -> str:
    """The stand-in, under the name of the base image."""
    _buildah("rm", "--all")  # what a run that was ended left behind
    if BASE not in _buildah("images", "--format", "{{.Name}}:{{.Tag}}").split():
        debootstrap = programs.debian_program("debootstrap", "debootstrap")
        root = environments.folder("images") / "debian"
        if not (root / "usr" / "bin" / "python3").exists():
            tools.check(debootstrap, "--variant=minbase", f"--include={PACKAGES}", "bookworm", root)
        container = _buildah("from", "scratch").strip()
        _buildah("add", "--quiet", container, root, "/")
        _buildah("config", "--env", "PATH=/usr/local/bin:/usr/bin:/bin", container)
        _buildah("commit", "--quiet", container, BASE)
        _buildah("rm", container)
    return BASE


def _pips_places() -> Iterator[str]:
    """Certificates and folders of wheels that this machine's pip uses; the build gets the same."""
    for path in ("/etc/ssl/certs", "/etc/pip.conf"):
        if Path(path).exists():
            yield path
    told = tools.check(sys.executable, "-m", "pip", "config", "list")
    for word in told.replace("'", " ").replace("\\n", " ").split():
        place = urllib.parse.urlparse(word).path if word.startswith("file:") else word
        if place.startswith("/") and Path(place).is_dir():
            yield place


@functools.cache
def build(target: str) -> Image:
    """The image of a target of the Dockerfile, as ``docker build --target`` makes it."""
    base()
    flags: list[str | Path] = []
    for place in dict.fromkeys(_pips_places()):
        flags += ["--volume", f"{place}:{place}:ro"]
    for name in ("PIP_FIND_LINKS", "PIP_CERT", "PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL"):
        if value := os.environ.get(name):
            flags += ["--env", f"{name}={value}"]
    # PyTorch's own index may be out of reach: pip's usual one has the wheel too.
    flags += ["--build-arg", "TORCH_INDEX=https://pypi.org/simple"]
    name = f"localhost/modelport:{target}"
    _buildah(
        *("build", "--isolation", "chroot", "--network", "host", "--format", "docker", "--layers"),
        *("--pull-never", "--ignorefile", f"{DOCKERFILE}.dockerignore", *flags),
        *("--target", target, "--tag", name, "--file", DOCKERFILE, ROOT),
    )
    return _described(name)


def release() -> None:
    """Unmount what was built; the images stay, for the next build."""
    if build.cache_info().currsize:
        build.cache_clear()
        _buildah("rm", "--all")


def _described(name: str) -> Image:
    told: dict[str, Any] = json.loads(_buildah("inspect", "--type", "image", name))
    config = told["Docker"]["config"]
    container = _buildah("from", "--pull-never", name).strip()
    root = Path(_buildah("mount", container).strip())
    kind, *health = config["Healthcheck"]["Test"]
    assert kind == "CMD"  # no shell
    size = sum(p.stat().st_size for p in (root / "opt" / "modelport").rglob("*") if p.is_file())
    pairs = (pair.partition("=") for pair in config["Env"])
    # What the build was told of this machine's pip stays in it, and is not the file's doing.
    environment = {key: value for key, _, value in pairs if not key.startswith("PIP_")}
    return Image(
        name, config["User"], environment, config["Entrypoint"], config["Cmd"], health, root, size
    )


@dataclass
class Container:
    image: Image
    #: Of process 1 in the container, as this machine numbers it.
    pid: int
    process: subprocess.Popen[bytes]
    log: Path

    def execute(self, *command: str) -> tuple[int, str]:
        """Run as ``docker exec`` does: in the container's namespaces, as its user."""
        uid, _, gid = self.image.user.partition(":")
        inside = ("nsenter", "--target", str(self.pid), "--mount", "--net", "--pid", "--root")
        user = ("--setuid", uid, "--setgid", gid, "--wd=/")
        env = [f"{name}={value}" for name, value in self.image.environment.items()]
        return tools.said(*inside, *user, "--", "env", "-i", *env, *command)

    def healthy(self) -> bool:
        return self.execute(*self.image.health)[0] == 0


@contextlib.contextmanager
def running(
    image: Image, models: Path, log: Path, command: Sequence[str] = ()
) -> Iterator[Container]:
    """Run read-only, with /tmp in memory, without capabilities or new privileges.

    ``command`` replaces the image's own. The network is a loopback of its own.
    """
    uid, _, gid = image.user.partition(":")
    sandbox = [
        programs.debian_program("bwrap", "bubblewrap"),
        *("--ro-bind", str(image.root), "/", "--ro-bind", str(models), "/models"),
        *("--perms", "1777", "--tmpfs", "/tmp", "--proc", "/proc", "--dev", "/dev"),
        *("--unshare-pid", "--unshare-net", "--unshare-ipc", "--as-pid-1", "--clearenv"),
        *("--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID", "--cap-add", "CAP_SETPCAP"),
        *(word for pair in image.environment.items() for word in ("--setenv", *pair)),
        *("setpriv", f"--reuid={uid}", f"--regid={gid}", "--clear-groups", "--no-new-privs"),
        *("--bounding-set=-all", "--inh-caps=-all", "--"),
    ]
    with log.open("wb") as out:
        process = subprocess.Popen(
            [*sandbox, *image.entrypoint, *(command or image.command)], stderr=out, stdout=out
        )
    try:
        yield Container(image, _first(process), process, log)
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()


def _first(process: subprocess.Popen[bytes]) -> int:
    """Process 1 of the container: the child of bubblewrap, which waits for it."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    while process.poll() is None:
        if found := children.read_text().split():
            return int(found[0])
    raise AssertionError(f"bubblewrap ended with {process.returncode}")
