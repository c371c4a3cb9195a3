"""The unit under a real systemd that runs as process 1, in namespaces of its own.

Nothing of it is outside: processes, mounts, network, control groups. It takes root.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from modelport.loadtests.system import environments
from tests.deploy import DEPLOY, tools

BOOT = Path(__file__).with_name("boot.sh")
NAMESPACES = ("--mount", "--pid", "--net", "--ipc", "--uts", "--cgroup")
START_SECONDS = 60.0
PROGRAM = """#!/bin/sh
export PYTHONPATH={packages}:{root}
exec {python} -m modelport "$@"
"""


def interpreter() -> Path:
    """This one; or Debian's of the same release, where ``ProtectHome`` hides this one.

    Raises:
        Missing: there is none.
    """
    same = Path("/usr/bin", f"python{sys.version_info.major}.{sys.version_info.minor}")
    for python in (Path(sys.executable).resolve(), same):
        if python.is_file() and python.parts[1] not in ("root", "home", "run"):
            return python
    raise environments.Missing(f"{same} is missing: install it, the unit cannot see a home folder")


@dataclass(frozen=True)
class Booted:
    #: Of systemd, as this machine numbers it.
    pid: int
    log: Path

    def inside(self, *command: str | Path) -> tuple[int, str]:
        where = ("nsenter", "--target", str(self.pid), *NAMESPACES, "--root", "--wd=/")
        return tools.said(*where, "--", *command)

    def show(self, key: str) -> str:
        return self.inside("systemctl", "show", "--value", "-p", key, "modelport.service")[
            1
        ].strip()

    def status_of(self, pid: str) -> dict[str, str]:
        """``/proc/<pid>/status``, numbered as inside."""
        lines = self.inside("cat", f"/proc/{pid}/status")[1].splitlines()
        return {key: value.strip() for key, _, value in (line.partition(":") for line in lines)}

    def python(self, code: str, *arguments: str) -> str:
        status, said = self.inside(interpreter(), "-c", code, *arguments)
        assert status == 0, said + self.log.read_text()
        return said.strip()


@contextlib.contextmanager
def booted(unit: Path, models: Path, folder: Path, *drop_in: Path) -> Iterator[Booted]:
    """``drop_in`` is one of the unit, and the folder of the files that it names."""
    program = folder / "modelport"
    program.write_text(
        PROGRAM.format(
            packages=sysconfig.get_path("purelib"), root=DEPLOY.parent, python=interpreter()
        )
    )
    program.chmod(0o755)
    tools.systemd_analyze()  # it comes with systemd
    work, log = folder / "boot", folder / "boot.log"
    work.mkdir()
    command = ["unshare", "--fork", "--kill-child", *NAMESPACES, "bash", BOOT]
    with log.open("wb") as out:
        process = subprocess.Popen(
            [*command, work, unit, program, models, *drop_in],
            stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True,
        )  # fmt: skip
    try:
        yield Booted(_child(process, log), log)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()


def _child(process: subprocess.Popen[bytes], log: Path) -> int:
    """Process 1 inside, when it answers."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    give_up = time.monotonic() + START_SECONDS
    while time.monotonic() < give_up:
        assert process.poll() is None, log.read_text()
        if (found := children.read_text().split()) and not tools.said(
            "nsenter", "--target", found[0], *NAMESPACES, "--root", "--wd=/",
            "systemctl", "show", "-p", "Version",
        )[0]:  # fmt: skip
            return int(found[0])
        time.sleep(0.1)
    raise AssertionError(f"systemd does not answer: {log.read_text()}")
