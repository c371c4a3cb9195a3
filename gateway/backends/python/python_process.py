"""A worker process of the gateway: its start, its socket, its end."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import os
import resource
import select
import signal
import socket
from collections import deque
from pathlib import Path
from typing import Protocol

import structlog

from modelport.gateway.backends.python.environment import WorkerEnvironment
from modelport.gateway.backends.python.output import WorkerOutput
from modelport.gateway.backends.python_worker import frames
from modelport.gateway.backends.python_worker.frames import (
    Frame,
    FrameError,
    FrameReader,
    OutgoingFrame,
)
from modelport.gateway.backends.python_worker.regions import SentRegions
from modelport.gateway.runtime.child_process import ChildProcess

log = structlog.get_logger("modelport.python")

_PROGRAM = Path(__file__).resolve().parents[1] / "python_worker" / "program.py"
_UTILITIES = "triton_python_backend_utils"
#: The folder of the module for models: beside the package, or at the top of a checkout.
_LIBRARY = next(
    folder / _UTILITIES
    for folder in _PROGRAM.parents
    if (folder / _UTILITIES / "__init__.py").is_file()
)
_SOCKET_BYTES = 1024 * 1024
#: From the end of a socket to the end of its process.
_END_SECONDS = 0.05
#: Reads of a socket before other work has its turn.
_READS = 8
#: The longest wait of ``receive_soon``.
_SOON_MILLISECONDS = 1


class WorkerOwner(Protocol):
    """The owner of a worker. Its methods are called on the event loop."""

    def received(self, frame: Frame) -> None:
        """Take a frame; raises ``FrameError`` if the worker may not send it."""

    def gone(self, reason: str) -> None:
        """The process has ended, and its last frame is received."""


class PythonProcess:
    """One process. Belongs to the event loop, whose thread starts it.

    Linux ends the worker with the thread that has started it, so a thread of a load would be wrong.

    Args:
        most_bytes: the largest memory file that it may send.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        environment: WorkerEnvironment,
        instance: str,
        owner: WorkerOwner,
        most_bytes: int,
    ) -> None:
        self._loop, self._owner = loop, owner
        self._reason = ""
        self._backlog: deque[OutgoingFrame] = deque()
        #: Whether the socket takes nothing more now.
        self._blocked = False
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        out, into = os.pipe()
        try:
            for end in (ours, theirs):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BYTES)
            command = [
                environment.interpreter, "-I", "-B", str(_PROGRAM), str(theirs.fileno()),
                str(os.getpid()), str(_LIBRARY),
            ]  # fmt: skip
            # Its program sets the signal of its parent's end, so that no Python runs after a fork.
            self._process = ChildProcess(
                command, parent_death=None, pass_fds=(theirs.fileno(),), env=environment.variables,
                stdout=into, stderr=into,
            )  # fmt: skip
        except BaseException:
            ours.close()
            os.close(out)
            raise
        finally:
            theirs.close()
            os.close(into)
        self.pid = self._process.pid
        try:
            if environment.max_data_bytes is not None:
                _limit_data(self.pid, environment.max_data_bytes)
            self._pidfd = os.pidfd_open(self.pid)
        except OSError:  # too many files are open
            self._process.stop(0)
            ours.close()
            os.close(out)
            raise
        ours.setblocking(False)
        self._socket: socket.socket | None = ours
        self.regions = SentRegions()
        self._reader = FrameReader(ours, most_bytes, writable=False)
        self._output = WorkerOutput(loop, out, instance)
        loop.add_reader(ours.fileno(), self._readable)
        loop.add_reader(self._pidfd, self._ended)
        #: For ``receive_soon``: that of no request.
        self._context = contextvars.copy_context()
        self._events = _events_of(loop)

    # -- frames -----------------------------------------------------------------------------------

    def send(self, frame: OutgoingFrame, soon: bool = False) -> None:
        """Send ``frame``; ``soon``: when this turn of the event loop ends, with those of the turn.

        Each send may wake the worker, which costs more than everything else about a small frame.
        """
        if self._socket is None:
            if frame.descriptor >= 0:
                os.close(frame.descriptor)
            return
        waits = bool(self._backlog)
        if not waits and not soon:
            rest = self._sent(frame)
            if rest is None:
                return
            frame = rest
        self._backlog.append(frame)
        if not waits:
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        """Send what waits, or as much as the socket takes now."""
        while self._backlog and self._socket is not None:
            rest = self._sent(self._joined())
            if rest is not None:
                self._backlog.appendleft(rest)
                self._loop.add_writer(self._socket.fileno(), self._flush)
                self._blocked = True
                return
        if self._blocked and self._socket is not None:
            self._loop.remove_writer(self._socket.fileno())
            self._blocked = False

    def _joined(self) -> OutgoingFrame:
        """Take the first frame that waits, with those after it that have no descriptor."""
        first = self._backlog.popleft()
        if not self._backlog or first.descriptor >= 0:
            return first
        data, size = [first.data], len(first.data)
        while self._backlog and self._backlog[0].descriptor < 0 and size < _SOCKET_BYTES:
            data.append(self._backlog.popleft().data)
            size += len(data[-1])
        return OutgoingFrame(b"".join(data))

    def _sent(self, frame: OutgoingFrame) -> OutgoingFrame | None:
        assert self._socket is not None
        try:
            return frames.send(self._socket, frame)
        except BlockingIOError:
            return frame
        except OSError:  # the process ends; ``gone`` tells
            if frame.descriptor >= 0:
                with contextlib.suppress(OSError):
                    os.close(frame.descriptor)
            return None

    def receive_soon(self) -> None:
        """Wait a moment for a frame, and receive it; anything else for the loop ends the wait."""
        if self._events is not None and self._events.poll(_SOON_MILLISECONDS):
            self._context.run(self._readable)

    def _readable(self) -> None:
        try:
            for _ in range(_READS):
                found = self._reader.read()
                for frame in found:
                    self._owner.received(frame)
                if self._socket is None:
                    return
                if len(found) < 2:  # likely all there is
                    return
        except BlockingIOError:
            pass
        except (EOFError, OSError):
            self._close_socket()
            # A process that ends closes it, too, and has a better reason in a moment.
            self._loop.call_later(_END_SECONDS, self._kill_deaf)
        except FrameError as error:
            self._close_socket()
            self.kill(f"it has broken the protocol of workers: {error}")
        except Exception:  # a frame that is lost would leave its request without an answer
            log.exception("a frame of a worker cannot be read")
            self._close_socket()
            self.kill("it has sent a frame that cannot be read")

    def _kill_deaf(self) -> None:
        if self._pidfd < 0:
            return
        if self.state()[1]:
            self.kill("it has closed its socket")
        else:  # it ends: its memory has gone before its files, which take long if they are large
            self._loop.call_later(_END_SECONDS, self._kill_deaf)

    # -- the end ----------------------------------------------------------------------------------

    def kill(self, reason: str) -> None:
        """Kill the process and its group; ``gone`` is called with the reason."""
        self._reason = self._reason or reason
        self._process.kill()

    def _ended(self) -> None:
        status = self._process.poll()
        if status is None:
            return
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._pidfd = -1
        while self._socket is not None:  # answers that were sent before the end
            try:
                for frame in self._reader.read():
                    self._owner.received(frame)
            except (EOFError, OSError, FrameError):
                self._close_socket()
        self._process.kill()  # what it has started
        self._output.close()
        # The end that the process has chosen itself says more than what was seen of it.
        seen = self._reason if status == -signal.SIGKILL else ""
        self._owner.gone(seen or _end_of(status))

    def _close_socket(self) -> None:
        if self._socket is None:
            return
        self._loop.remove_reader(self._socket.fileno())
        self._loop.remove_writer(self._socket.fileno())
        self._socket.close()
        self._socket = None
        self._reader.close()
        self.regions = SentRegions()
        for frame in self._backlog:
            if frame.descriptor >= 0:
                os.close(frame.descriptor)
        self._backlog.clear()

    def state(self) -> tuple[str, int]:
        """The letter of the process's state, and its resident memory in bytes."""
        try:
            text = Path(f"/proc/{self.pid}/stat").read_text()
        except OSError:
            return "X", 0
        fields = text.rpartition(")")[2].split()
        return fields[0], int(fields[21]) * _PAGE


def _limit_data(pid: int, most_bytes: int) -> None:
    """Limit the data of a process that has just begun, and of its children."""
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)  # only root may raise it
    limit = most_bytes if hard == resource.RLIM_INFINITY else min(most_bytes, hard)
    with contextlib.suppress(ProcessLookupError):
        resource.prlimit(pid, resource.RLIMIT_DATA, (limit, limit))


def _events_of(loop: asyncio.AbstractEventLoop) -> select.poll | None:
    """Tells whether anything waits for the event loop; None: the loop does not show it."""
    descriptor = getattr(loop, "_get_backend_id", None)  # uvloop's, whose epoll can be polled
    if descriptor is None:
        return None
    events = select.poll()
    events.register(descriptor(), select.POLLIN)
    return events


_PAGE = os.sysconf("SC_PAGE_SIZE")


def _end_of(status: int) -> str:
    """The end of a process in words."""
    if status >= 0:
        return f"it has ended with status {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = "a signal"
    why = ", which often means that memory ran out" if status == -signal.SIGKILL else ""
    return f"it was ended by signal {-status} ({name}){why}"
