"""A sampling profiler of a process' CPU time, from outside and under load.

Linux's ``perf`` finds the library that a thread is in, or the kernel; ``py-spy`` finds the Python
package that called it. CPython writes its own functions into ``perf``'s maps from 3.12 on only
(``-X perf``).
"""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks import programs
from modelport.gateway.runtime.child_process import ChildProcess
from modelport.loadtests.system import environments
from modelport.loadtests.system.processes import ServerFailed

PY_SPY = "py-spy==0.4.3"
#: Not multiples of the kernel's ticks, or periodic work would be seen always, or never.
PERF_HERTZ, PY_SPY_HERTZ = 1999, 499
ATTACH_SECONDS = 20.0
POLL_SECONDS = 0.02
LOOP, THREADS = "event loop", "other threads"
#: Layers by name of the shared object; the first match counts.
LIBRARIES = (
    (re.compile(r"^\[kernel|^\[vdso|^\[guest"), "kernel"),
    (re.compile(r"onnxruntime"), "ONNX Runtime"),
    (re.compile(r"libpython|/python3?[\d.]*$"), "Python's interpreter"),
    (re.compile(r"uvloop|httptools|_asyncio"), "uvloop, asyncio, httptools"),
    (re.compile(r"numpy|_multiarray|openblas"), "numpy"),
    (
        re.compile(r"libc[.-]|libpthread|ld-linux|libstdc|libgcc"),
        "C library: copies, locks, malloc",
    ),
)
OTHER_LIBRARY = "other libraries"
OTHER_PACKAGE = "the event loop itself"
#: Layers by Python file; the innermost matching frame of a stack counts. The outermost are the
#: program that runs the loop.
PACKAGES = (
    (re.compile(r"\bgateway/(cli/|server/app\.py)"), OTHER_PACKAGE),
    (re.compile(r"\bgateway/(server|wire)/"), "HTTP and gRPC on the socket (server, wire)"),
    (re.compile(r"\bgateway/protocols/"), "decode and encode (protocols)"),
    (re.compile(r"\bgateway/inference/batching/"), "batching"),
    (re.compile(r"\bgateway/backends/embedded/"), "embedded backend"),
    (re.compile(r"\bgateway/(upstream|backends)/"), "upstream, remote backends"),
    (re.compile(r"\bgateway/"), "data plane: routing, checks, admission, statistics"),
)
_SAMPLE = re.compile(r"^\s*(\d+)\s.*\(([^()]*)\)\s*$")


@dataclass(frozen=True)
class Profile:
    """CPU microseconds per request.

    Attributes:
        requests: answered while ``perf`` sampled.
        libraries: thread (``LOOP``, ``THREADS``) → library's layer.
        packages: of the event loop's thread, by the package's layer; empty for other programs.
        switches: thread switches per request.
    """

    requests: int
    libraries: Mapping[str, Mapping[str, float]]
    packages: Mapping[str, float]
    switches: float


def record(process: int, drive: Callable[[], int], folder: Path, python: bool = True) -> Profile:
    """Sample ``process`` while ``drive`` loads it and counts the answered requests.

    With ``python`` the process is loaded a second time for ``py-spy``, which stops it at each
    sample.

    Raises:
        environments.Missing: a tool is missing, or may not inspect other processes.
        ServerFailed: there were no samples.
    """
    file = folder / "perf.data"
    command = [programs.debian_program("perf", "linux-perf"), "record", "--quiet"]
    command += ["--event", "cpu-clock", "--freq", str(PERF_HERTZ), "--pid", str(process)]
    before = _used(process)
    with _sampling([*command, "--output", str(file)], file):
        requests = drive()
    after = _used(process)
    samples = _perf(file)
    libraries: dict[str, dict[str, float]] = {}
    for thread, main in ((LOOP, True), (THREADS, False)):
        found: Counter[str] = Counter()
        for (tid, layer), count in samples.items():
            if (tid == process) == main:
                found[layer] += count
        if found:
            spent = _nanoseconds(before, after, process, main) / 1e3 / requests
            libraries[thread] = _shares(found, spent)
    packages = _packages(process, drive, folder, libraries) if python else {}
    switches = sum(after.switches.values()) - sum(before.switches.values())
    return Profile(requests, libraries, packages, switches / requests)


@dataclass(frozen=True)
class _Used:
    """CPU use by thread since its start: nanoseconds on a core, and number of switches to one."""

    nanoseconds: Mapping[int, int]
    switches: Mapping[int, int]


def _used(process: int) -> _Used:
    """Read the CPU use of every thread of ``process``."""
    nanoseconds, switches = {}, {}
    for task in Path(f"/proc/{process}/task").iterdir():
        with contextlib.suppress(OSError):  # it has ended
            ran, _, times = (task / "schedstat").read_text().split()
            nanoseconds[int(task.name)], switches[int(task.name)] = int(ran), int(times)
    return _Used(nanoseconds, switches)


def _nanoseconds(before: _Used, after: _Used, process: int, main: bool) -> int:
    return sum(
        ran - before.nanoseconds.get(thread, 0)
        for thread, ran in after.nanoseconds.items()
        if (thread == process) == main
    )


@contextlib.contextmanager
def _sampling(command: list[str], file: Path) -> Iterator[None]:
    """Run ``command`` once it has begun to write ``file`` or has reported so."""
    file.unlink(missing_ok=True)
    said = file.with_suffix(".log")
    sampler = ChildProcess(command, log=said)
    try:
        give_up = time.monotonic() + ATTACH_SECONDS
        while not (file.is_file() and file.stat().st_size) and b"Sampling" not in said.read_bytes():
            if sampler.poll() is not None or time.monotonic() > give_up:
                problem = said.read_text(errors="replace").strip()[-300:]
                raise environments.Missing(f"{command[0]} cannot sample (run as root?): {problem}")
            time.sleep(POLL_SECONDS)
        yield
        sampler.send_signal(signal.SIGINT)
        sampler.wait(ATTACH_SECONDS)
    finally:
        sampler.kill()
        sampler.wait()


def _perf(file: Path) -> Counter[tuple[int, str]]:
    command = ["perf", "script", "--input", str(file), "--fields", "tid,ip,sym,dso"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = library_samples(done.stdout)
    if not found:
        raise ServerFailed(f"perf saw nothing: {done.stderr.strip()[-300:]}")
    return found


def library_samples(script: str) -> Counter[tuple[int, str]]:
    """Count the samples in the output of ``perf script`` by thread and library's layer."""
    return Counter(
        (int(match[1]), _layer(match[2], LIBRARIES, OTHER_LIBRARY))
        for line in script.splitlines()
        if (match := _SAMPLE.match(line))
    )


def _packages(
    process: int,
    drive: Callable[[], int],
    folder: Path,
    libraries: Mapping[str, Mapping[str, float]],
) -> dict[str, float]:
    """The event loop's microseconds by package."""
    file = folder / "py-spy.txt"
    program = environments.venv("py-spy", PY_SPY) / "py-spy"
    command = [str(program), "record", "--pid", str(process), "--rate", str(PY_SPY_HERTZ)]
    # Without the interpreter's lock a thread waits: for requests, for its core, or for the lock.
    command += ["--format", "raw", "--full-filenames", "--threads", "--gil", "--duration", "3600"]
    with _sampling([*command, "--output", str(file)], file):
        drive()
    return _shares(package_samples(file.read_text()), sum(libraries.get(LOOP, {}).values()))


def package_samples(raw: str) -> Counter[str]:
    """Count the main thread's samples in ``py-spy``'s raw format by package's layer.

    A line is a thread, its frames from the outermost inwards, and the number of samples.
    """
    found: Counter[str] = Counter()
    for line in raw.splitlines():
        stack, _, count = line.rpartition(" ")
        thread, *frames = stack.split(";")
        if "MainThread" in thread:
            layers = (_layer(frame, PACKAGES, "") for frame in reversed(frames))
            found[next(filter(None, layers), OTHER_PACKAGE)] += int(count)
    return found


def _layer(name: str, layers: tuple[tuple[re.Pattern[str], str], ...], other: str) -> str:
    return next((layer for pattern, layer in layers if pattern.search(name)), other)


def _shares(samples: Counter[str], whole: float) -> dict[str, float]:
    """Split ``whole`` in proportion to the samples, the largest share first."""
    total = samples.total()
    return {layer: whole * count / total for layer, count in samples.most_common()}
