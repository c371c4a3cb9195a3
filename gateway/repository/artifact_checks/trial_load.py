"""Trial load of a file in a process of its own, before this process loads it.

Compilers in native code recurse: a hostile or damaged file can end the process that parses,
compiles or first runs it, and no check of the file foresees that. The trial's process has less
stack than a thread of this one, limits of memory and of CPU time, and is the first that the system
ends when memory runs out. Content that passed is remembered in ``<cache>/trials``, for every
process of this user; content that failed, in this process, so that a retry of its load costs
nothing until the file changes.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib
import importlib.metadata
import json
import os
import resource
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import modelport
from modelport.gateway import errors
from modelport.gateway.errors import IntegrityError, Internal, ModelportError, Unavailable
from modelport.gateway.repository import manifest
from modelport.gateway.runtime.child_process import ChildProcess

CPU_SECONDS = 600
WALL_SECONDS = 900.0
#: Of the machine's memory, and in relation to the file: its runtime, and copies of its content.
MEMORY_SHARE = 0.5
RUNTIME_BYTES, MEMORY_PER_BYTE = 4 << 30, 16
#: Of the stack that a thread gets by default: the caller's own frames take some of it.
STACK_SHARE = 0.875
#: What the C library gives a thread where the process' stack has no limit.
UNLIMITED_STACK = 2 << 20
#: The system ends this process before any other.
OOM_SCORE = "1000"
MAX_VERDICTS = 1000
MAX_FAILURES = 1000
MAX_REPORT_BYTES = 64 * 1024

_PASSED = b"passed"
#: The classes and reasons of failures, oldest first. Each is the content's own fault.
_failures: dict[str, tuple[type[ModelportError], str]] = {}
#: Folders with files that this process has made and run.
_made_here: set[Path] = set()
#: Signals that do not come from the file.
_FROM_OUTSIDE = frozenset({-signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT, -signal.SIGHUP})
#: Not ``-m``, which would look for the package in the current folder first.
_MAIN = f"""
import sys
sys.path.append(sys.argv.pop(1))
from {__name__} import main
main()
"""


def made_here(file: Path) -> bool:
    """Whether this process has made and run ``file``, and loads it to prove that it is served."""
    return not _made_here.isdisjoint(file.parents)


@contextlib.contextmanager
def omitted_in(folder: Path) -> Iterator[None]:
    """Load the files in ``folder``, which this process has made and run, without a trial."""
    _made_here.add(folder)
    try:
        yield
    finally:
        _made_here.discard(folder)


def run(function: str, file: Path, **arguments: Any) -> None:
    """Call ``function`` with ``file`` and ``arguments`` in a process of its own.

    Args:
        function: ``package.module:function``.
        arguments: values of JSON.

    Raises:
        IntegrityError: the process did not come to an end by itself.
        ModelportError: the error of the function, or of an earlier call for the same content.
    """
    if made_here(file):
        return
    request = {
        "function": function,
        "arguments": arguments,
        "cpu_seconds": CPU_SECONDS,
        "memory_bytes": min(
            int(MEMORY_SHARE * _memory_bytes()),
            RUNTIME_BYTES + MEMORY_PER_BYTE * file.stat().st_size,
        ),
    }
    facts = [request, file.name, manifest.sha256_of(file), modelport.__version__, _version("torch")]
    key = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
    with _verdict(key) as verdict:
        if verdict is not None and os.read(verdict, len(_PASSED)) == _PASSED:
            return
        if key in _failures:
            kind, reason = _failures[key]
            raise kind(reason)
        try:
            passing = _run(file, request | {"file": str(file)})
        except ModelportError as error:
            _failures[key] = type(error), str(error)
            for oldest in list(_failures)[:-MAX_FAILURES]:
                _failures.pop(oldest, None)
            raise
        if passing is not None:
            raise passing
        if verdict is not None:
            os.write(verdict, _PASSED)


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@contextlib.contextmanager
def _verdict(key: str) -> Iterator[int | None]:
    """The file with the verdict on ``key``, locked; None where this user has no safe cache."""
    from modelport.gateway.repository.storage.mirror import default_cache

    with contextlib.ExitStack() as stack:
        descriptor = None
        with contextlib.suppress(OSError, ModelportError):
            folder = default_cache() / "trials"
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            found = folder.stat()
            for old in sorted(folder.iterdir(), key=os.path.getmtime)[:-MAX_VERDICTS]:
                old.unlink(missing_ok=True)
            if found.st_uid == os.getuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
                descriptor = os.open(folder / key, flags, 0o600)
                stack.callback(os.close, descriptor)
                fcntl.flock(descriptor, fcntl.LOCK_EX)  # another process may be trying it
        yield descriptor


def _run(file: Path, request: dict[str, Any]) -> ModelportError | None:
    """Run the trial.

    Returns:
        A failure for a reason that may be gone next time; None: it passed.

    Raises:
        ModelportError: the content's own failure.
    """
    root = str(Path(modelport.__file__).parents[1])
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb") as report:
        try:
            process = ChildProcess(
                [sys.executable, "-P", "-c", _MAIN, root, str(writing)],
                parent_death=None,  # the end of its input tells it
                bufsize=0,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(writing,),
            )
        finally:
            os.close(writing)
        assert process.stdin is not None
        with process, process.stdin as asking:
            try:
                asking.write(json.dumps(request).encode() + b"\n")
                status = process.wait(WALL_SECONDS)
            except (subprocess.TimeoutExpired, BrokenPipeError):
                process.kill()
                status = process.wait()
        content = report.read(MAX_REPORT_BYTES)
    if status or not content:
        ended = IntegrityError(
            f"'{file.name}' does not load: the process that tried it ended with {_ending(status)}: "
            "refused; it is damaged, too deep for its compiler, or hostile: export the model "
            "again, or sign the version"
        )
        # The system kills for lack of memory, and this process after ``WALL_SECONDS``.
        if status in _FROM_OUTSIDE:
            return ended
        raise ended
    found = json.loads(content)
    if not found["error"]:
        return None
    error: ModelportError = getattr(errors, found["error"], Internal)(found["reason"])
    if found["lasting"]:
        raise error
    return error


def _ending(status: int) -> str:
    if status >= 0:
        return f"status {status}"
    limits: dict[int, str] = {
        signal.SIGXCPU: f" after {CPU_SECONDS:g} s of CPU time",
        signal.SIGKILL: ", for lack of memory or time",
    }
    return f"signal {-status} ({signal.Signals(-status).name}){limits.get(-status, '')}"


# -- in the process of its own --------------------------------------------------------------------


def main() -> None:
    """Run the trial requested on standard input; report to the descriptor in the arguments."""
    asked = sys.stdin.buffer
    request = json.loads(asked.readline())
    threading.Thread(target=lambda: (asked.read(), os._exit(1)), daemon=True).start()
    _limit(request)
    report = os.fdopen(int(sys.argv[1]), "w")

    def call() -> None:
        print(json.dumps(_call(request)), file=report, flush=True)
        os._exit(0)  # what is loaded need not be taken apart

    threading.stack_size(_stack_bytes())
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()


def _call(request: dict[str, Any]) -> dict[str, Any]:
    module, _, name = request["function"].partition(":")
    file = Path(request["file"])
    try:
        getattr(importlib.import_module(module), name)(file, **request["arguments"])
    except ModelportError as error:
        kinds = (kind.__name__ for kind in type(error).__mro__)
        return {
            "error": next(k for k in kinds if hasattr(errors, k)),
            "reason": str(error),
            "lasting": not isinstance(error, Unavailable | Internal),
        }
    except Exception as error:
        return {
            "error": Internal.__name__,
            "reason": f"'{file.name}' does not load: unexpected {type(error).__name__}",
            "lasting": not isinstance(error, OSError),
        }
    return {"error": ""}


def _limit(request: dict[str, Any]) -> None:
    for kind, limit in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_CPU, request["cpu_seconds"]),
        (resource.RLIMIT_DATA, request["memory_bytes"]),
    ):
        _, most = resource.getrlimit(kind)
        limit = limit if most == resource.RLIM_INFINITY else min(limit, most)
        resource.setrlimit(kind, (limit, most))
    with contextlib.suppress(OSError):  # Linux alone has it
        Path("/proc/self/oom_score_adj").write_text(OOM_SCORE)


def _stack_bytes() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_STACK)
    most = UNLIMITED_STACK if soft == resource.RLIM_INFINITY else soft
    return int(most * STACK_SHARE) // resource.getpagesize() * resource.getpagesize()
