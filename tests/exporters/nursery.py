"""A process that breeds publishers and kills them; the publishing tests run it as a script.

It imports the publisher once and forks, so that a killing costs milliseconds. What it is asked to
do is its first argument; results go to stdout as one JSON document.
"""

from __future__ import annotations

import json
import os
import random
import select
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from modelport.exporters.publishing import publish
from modelport.gateway.errors import AlreadyExists
from modelport.gateway.repository import config
from modelport.gateway.types import Datatype, ModelSignature, TensorSpec

ONNX = config.PLATFORMS[0]
FINISHED, TAKEN = 0, 17

#: What Python announces of its file operations (sys.addaudithook).
FILE_EVENTS = ("os.", "open", "shutil.", "fcntl.", "tempfile.")


def wanted(name: str) -> config.ModelConfig:
    tensor = TensorSpec("x", Datatype.FP32, (4,))
    return config.build(name, ONNX, ModelSignature((tensor,), (tensor,), 8))


def fill(folder: Path) -> None:
    (folder / "model.onnx").write_bytes(os.urandom(20_000))
    (folder / "model.onnx.data").write_bytes(os.urandom(50_000))
    (folder / "certificate.json").write_text("{}")


def properly(repository: Path, name: str, version: int | None = None) -> None:
    with publish.staging(repository) as staged:
        fill(staged)
        publish.publish(staged, repository, wanted(name), version)


def in_place(repository: Path, name: str, version: int | None = None) -> None:
    """The known-bad variant: the tests that watch ``properly`` must catch this one."""
    folder = repository / name / "1"
    folder.mkdir(parents=True)
    fill(folder)
    (repository / name / config.FILENAME).write_text(config.to_text(wanted(name)))
    publish.manifest.write(folder)


PUBLISHERS: dict[str, Callable[..., None]] = {"properly": properly, "in_place": in_place}


def breed(work: Callable[[], None]) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        work()
    except AlreadyExists:
        os._exit(TAKEN)
    except BaseException:
        os._exit(1)
    os._exit(FINISHED)


def reap(pid: int) -> int:
    """The exit code, negative for a signal."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def kill_at_every_step(publisher: str, repository: Path) -> int:
    """Publish to a model of its own per step, each killed one file operation later."""

    def doomed(step: int) -> None:
        left = step

        def count(event: str, _: object) -> None:
            nonlocal left
            if event != "os.kill" and event.startswith(FILE_EVENTS):
                left -= 1
                if left < 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(count)
        # Odd steps publish into a model that exists already, which ``in_place`` cannot.
        known = step % 2 and publisher == "properly"
        PUBLISHERS[publisher](repository, "shared" if known else f"model{step}")

    if publisher == "properly":
        properly(repository, "shared")
    killed = 0
    for step in range(500):
        code = reap(breed(lambda step=step: doomed(step)))
        if code == -signal.SIGKILL:
            killed += 1
        elif code != FINISHED:
            raise SystemExit(f"the publisher failed by itself at step {step}")
        elif step % 2 == 0:
            break
    return killed


def kill_at_random(repository: Path, times: int) -> int:
    """Publish in a loop, killed at a random moment after none to two whole ones, over and over."""

    def endless(done: int) -> None:
        while True:
            properly(repository, random.choice(["a", "b", "c"]))
            os.write(done, b".")

    started = time.monotonic()
    for _ in range(5):
        properly(repository, "a")
    longest_seconds = (time.monotonic() - started) / 5
    chance, killed = random.Random(0), 0
    for _ in range(times):
        told, done = os.pipe()
        pid = breed(lambda done=done: endless(done))
        for _ in range(chance.randint(0, 2)):
            os.read(told, 1)
        select.select([], [], [], chance.uniform(0.0, longest_seconds))
        os.kill(pid, signal.SIGKILL)
        killed += reap(pid) == -signal.SIGKILL
        os.close(told)
        os.close(done)
    return killed


def race(repository: Path, racers: int, rounds: int, version: int | None) -> list[int]:
    def run() -> None:
        for _ in range(rounds):
            properly(repository, "raced", version)

    return [reap(pid) for pid in [breed(run) for _ in range(racers)]]


def main() -> None:
    task, repository = sys.argv[1], Path(sys.argv[2])
    arguments = sys.argv[3:]
    if task == "every_step":
        result: object = kill_at_every_step(arguments[0], repository)
    elif task == "random":
        result = kill_at_random(repository, int(arguments[0]))
    else:
        racers, rounds, version = map(int, arguments)
        result = race(repository, racers, rounds, version or None)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
