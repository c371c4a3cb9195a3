"""A Python model that crashes, hangs or floods: its request fails, and others do not notice."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from modelport.gateway.backends.python import limits, python_process
from modelport.gateway.backends.python.environment import WorkerEnvironment
from modelport.gateway.backends.python_worker.frames import Frame
from tests.gateway.backends.python import python_models
from tests.gateway.backends.python.asking import ask
from tests.server import Gateway, serving

FLAGS = ("--allow-python", "--python-max-seconds", "2", "--python-max-memory", str(200 << 20))
ONE = "return [reply(1)]"
#: What a model does, and the reason in its answer.
ENDS = {
    "os._exit": ("os._exit(3)", "it has ended with status 3"),
    "abort": ("os.abort()", "it was ended by signal 6 (SIGABRT)"),
    "kill": ("os.kill(os.getpid(), 9)", "it was ended by signal 9 (SIGKILL)"),
    "segfault": ("import ctypes; ctypes.string_at(0)", "it was ended by signal 11 (SIGSEGV)"),
    "hang": (
        "while True: pass",
        "an execution exceeds 2 s, the limit of --python-max-seconds",
    ),
    "stop": ("os.kill(os.getpid(), 19)", "it is stopped (SIGSTOP)"),
    "leak": (
        "self.leak = b'x' * (250 << 20)\ntime.sleep(60)",
        "the limit of --python-max-memory is 200 MiB",
    ),
    "close all files": (
        "os.closerange(3, 1000); time.sleep(60)",
        "it has closed its socket",
    ),
    "garbage": (
        "import stat\n"
        "sockets = [fd for fd in map(int, os.listdir('/proc/self/fd')) if fd > 2]\n"
        "for fd in sockets:\n"
        "  try:\n"
        "    if stat.S_ISSOCK(os.fstat(fd).st_mode): os.write(fd, b'x' * 4096)\n"
        "  except OSError: pass\n"
        "time.sleep(60)",
        "it has broken the protocol of workers: a frame has a false size",
    ),
    "a child that lives on": (
        "os.fork() and os._exit(0)\ntime.sleep(60)",
        "it has ended with status 0",
    ),
}  # fmt: skip

#: Lines of ``initialize``: it fails once a marker is beside the model's folder.
ONCE = """
        if os.path.exists(os.path.join(args["model_repository"], "..", "began")):
            raise ValueError("no second time")
"""
#: Those of the default suite.
USUAL = ("os._exit", "hang", "stop", "leak", "garbage")


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    repository = tmp_path_factory.mktemp("repository")
    python_models.coded(repository, "act")
    python_models.coded(repository, "other")
    python_models.coded(
        repository, "small",
        f'parameters {{ key: "RLIMIT_DATA" value {{ string_value: "{200 << 20}" }} }}',
    )  # fmt: skip
    python_models.coded(
        repository, "sequences",
        "instance_group { kind: KIND_CPU count: 2 } sequence_batching { "
        "max_sequence_idle_microseconds: 60000000 oldest { max_candidate_sequences: 2 } }",
    )  # fmt: skip
    with serving(repository, *FLAGS, "--python-max-data", str(1 << 30)) as gateway:
        yield gateway


def crash(gateway: Gateway, end: str) -> None:
    code, reason = ENDS[end]
    status, text = ask(gateway, code)
    assert status == 503, text
    assert text.startswith("Stub process 'act_0' is not healthy. ")
    assert reason in text
    assert ask(gateway, ONE)[0] == 200
    assert ask(gateway, ONE, "other")[0] == 200


@pytest.mark.parametrize(
    "end", [end if end in USUAL else pytest.param(end, marks=pytest.mark.thorough) for end in ENDS]
)
def test_a_worker_that_ends_fails_its_request_at_once_and_is_restarted(
    gateway: Gateway, end: str
) -> None:
    crash(gateway, end)


#: A worker without a model, whose large file stays after its socket when it is killed.
LARGE = """#!{python}
import os, signal
os.posix_fallocate(os.memfd_create("large"), 0, 256 << 20)
os.kill(os.getpid(), signal.SIGKILL)
"""


async def test_the_reason_of_an_end_outlives_the_socket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Out of memory, the kernel ends large workers, and an end of theirs takes long."""

    class LargeWorkerOwner:
        def __init__(self) -> None:
            self.reason: asyncio.Future[str] = loop.create_future()

        def received(self, frame: Frame) -> None:
            raise AssertionError(frame)

        def gone(self, reason: str) -> None:
            self.reason.set_result(reason)

    monkeypatch.setattr(python_process, "_END_SECONDS", 0)
    loop, program = asyncio.get_running_loop(), tmp_path / "worker"
    program.write_text(LARGE.format(python=sys.executable))
    program.chmod(0o700)
    owner = LargeWorkerOwner()
    environment = WorkerEnvironment(str(program), dict(os.environ), tmp_path, None, ())
    python_process.PythonProcess(loop, environment, "large_0", owner, 1 << 20)
    assert (await owner.reason).startswith("it was ended by signal 9 (SIGKILL)")


def test_an_allocation_beyond_the_limit_of_data_is_an_error_of_its_request(
    gateway: Gateway,
) -> None:
    limit = "import resource\nreturn [reply(resource.getrlimit(resource.RLIMIT_DATA)[0] >> 20)]"
    for model, megabytes in (("small", 200.0), ("act", 1024.0)):
        assert ask(gateway, limit, model)[1]["outputs"][0]["data"] == [megabytes]
    pid = "return [Response(error=Error(str(os.getpid())))]"
    before = ask(gateway, pid, "small")
    status, text = ask(gateway, "bytearray(300 << 20)", "small")
    assert (status, "message: MemoryError" in text) == (500, True), text
    assert ask(gateway, pid, "small") == before


def test_a_worker_that_a_profiler_looks_at_goes_on(gateway: Gateway) -> None:
    """A tracer stops it, again and again, and is not what a stop by the model is."""
    pid = "import json\nreturn [Response([], Error(json.dumps(os.getpid())))]"
    before = ask(gateway, pid)
    libc = ctypes.CDLL(None, use_errno=True)
    seize, interrupt, detach = 0x4206, 0x4207, 17
    libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
    worker = int(before[1])
    if libc.ptrace(seize, worker, None, None):
        pytest.skip("no process may be traced here")
    libc.ptrace(interrupt, worker, None, None)
    os.waitpid(worker, 0x40000000)  # __WALL: it is not a child
    state = Path(f"/proc/{worker}/stat").read_text().rpartition(")")[2].split()[0]
    assert limits.process_violation(state, 0, None) == ""
    libc.ptrace(detach, worker, None, None)
    assert state == "t"
    assert limits.process_violation("T", 0, None)
    assert ask(gateway, pid) == before


#: Counts the requests of the sequence in this process.
COUNTS = """
id = requests[0].correlation_id()
self.kept = [*self.kept, id] if requests[0].flags() != 1 else [id]
return [reply(self.kept.count(id), os.getpid())]
"""


def test_a_sequence_keeps_its_worker_and_ends_with_it(gateway: Gateway) -> None:
    def step(id: int | str, code: str = COUNTS, **flags: bool) -> Any:
        parameters = {"sequence_id": id, **flags}
        status, told = ask(gateway, code, "sequences", parameters=parameters)
        return told["outputs"][0]["data"] if status == 200 else (status, told)

    begun = [step(id, sequence_start=True) for id in (7, "seven")]
    processes = [process for _, process in begun]
    assert len({*processes}) == 2, "the instances take turns"
    for count in (2.0, 3.0):
        assert [step(id) for id in (7, "seven")] == [[count, each] for each in processes]
    status, told = step(7, "os._exit(3)")
    assert (status, "it has ended with status 3" in told) == (503, True)
    status, told = step(7)
    assert (status, "must specify the START flag" in told) == (400, True), told
    assert step("seven", sequence_end=True) == [4.0, processes[1]]
    assert step("seven")[0] == 400


def test_shared_memory_goes_with_its_worker(gateway: Gateway) -> None:
    def mapped() -> int:
        maps = Path(f"/proc/{gateway.process.pid}/maps").read_text()
        return maps.count("/memfd:tensors")

    assert ask(gateway, "return [reply(*range(40_000))]")[0] == 200
    assert mapped() == 1
    crash(gateway, "os._exit")
    assert mapped() == 0


@pytest.mark.thorough
@pytest.mark.parametrize("end", ENDS)
def test_a_worker_that_ends_again_and_again_is_restarted(gateway: Gateway, end: str) -> None:
    for _ in range(5 if end == "hang" else 50):
        crash(gateway, end)


def test_requests_that_wait_outlive_the_end_of_the_worker(gateway: Gateway) -> None:
    found: list[tuple[int, Any]] = []
    crashing = threading.Thread(
        target=lambda: found.append(ask(gateway, "time.sleep(0.3); os._exit(1)"))
    )
    crashing.start()
    waiting = [threading.Thread(target=lambda: found.append(ask(gateway, ONE))) for _ in range(8)]
    for thread in waiting:
        thread.start()
    for thread in (crashing, *waiting):
        thread.join()
    assert sorted(status for status, _ in found) == [200] * 8 + [503]


def test_a_flood_of_output_is_cut_and_harms_nobody(gateway: Gateway) -> None:
    flood = "import sys\nfor _ in range(20000): print('x' * 100)\nreturn [reply(1)]"
    assert ask(gateway, flood)[0] == 200
    assert ask(gateway, ONE, "other")[0] == 200
    assert ask(gateway, ONE)[0] == 200
    lines = [row for row in gateway.logs if row.get("line", "").startswith("xxx")]
    assert 0 < len(lines) < 5000


def test_a_model_cannot_be_asked_to_end_by_the_signals_of_a_service_manager(
    gateway: Gateway,
) -> None:
    code = "import json\nreturn [Response([], Error(json.dumps(os.getpid())))]"
    pid = int(ask(gateway, code)[1])
    os.kill(pid, signal.SIGTERM)
    os.kill(pid, signal.SIGINT)
    assert int(ask(gateway, code)[1]) == pid


def test_workers_end_with_their_gateway_however_it_ends(tmp_path: Path) -> None:
    python_models.coded(tmp_path, "act")
    code = "import json\nreturn [Response([], Error(json.dumps(os.getpid())))]"
    with serving(tmp_path, "--allow-python") as gateway:
        pid = int(ask(gateway, code)[1])
        pidfd = os.pidfd_open(pid)
        gateway.process.kill()
        gateway.process.wait()
        import select

        ended, _, _ = select.select([pidfd], [], [], 10)
        os.close(pidfd)
    assert ended


def test_a_model_that_does_not_start_again_is_refused_with_the_reason(tmp_path: Path) -> None:
    folder = python_models.coded(tmp_path, "act")
    source = (folder / "model.py").read_text()
    (folder / "model.py").write_text(
        source.replace("        self.args = args\n", "        self.args = args\n" + ONCE)
    )
    marker = tmp_path / "began"
    with serving(tmp_path, "--allow-python") as gateway:
        assert ask(gateway, f"open({str(marker)!r}, 'w'); os._exit(1)")[0] == 503
        gateway.wait_for("a worker does not start")
        status, text = ask(gateway, ONE)
        assert (status, text.partition("\n")[0]) == (
            503, "Stub process 'act_0' is not healthy. ValueError: no second time",
        )  # fmt: skip
        marker.unlink()
        gateway.wait_for("a worker has been restarted")
        assert ask(gateway, ONE)[0] == 200
