"""The gateway inside a program: ``Server`` in a thread, ``serve`` in the main thread."""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import functools
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Self, Unpack

import click
import uvloop

from modelport.gateway.cli import serve as command
from modelport.gateway.cli.serve import ProcessOptions
from modelport.gateway.cli.serve import ServeOptions as ServeOptions
from modelport.gateway.errors import Unavailable, UsageError, suggestion
from modelport.gateway.runtime import signals
from modelport.gateway.server import app
from modelport.gateway.server.app import Ports
from modelport.gateway.settings import Settings
from modelport.gateway.telemetry import logs

#: Options of the command that concern its process, which here belongs to the caller.
PROCESS_OPTIONS = frozenset(ProcessOptions.__annotations__)
#: Addresses that stand for every interface, and how to reach them from this machine.
_LOOPBACK = {"0.0.0.0": "127.0.0.1", "::": "::1"}


class Server:
    """A gateway in a thread of this process.

        with modelport.Server("model_repository") as server:
            client = modelport.Client(server.http_url)

    A process may have several; one that is not stopped ends with the process. Each takes three free
    ports unless told otherwise. Signals stay with the program, logs go to ``logging`` under
    ``modelport``, and the requests of all servers share one memory budget. All of them compete with
    the program for the interpreter's lock: a service of its own is better started by ``modelport
    serve``.
    """

    def __init__(self, *paths: Path | str, **options: Unpack[ServeOptions]) -> None:
        """Check the options; ``start`` opens the ports.

        Args:
            paths: model repositories, models' own folders, models' files.
            options: those of ``modelport serve``; a port that is not given is 0, a free one.

        Raises:
            InvalidArgument: an option is wrong, or there is nothing to serve; the message names the
                flag of the command.
        """
        ports: ServeOptions = {"http_port": 0, "grpc_port": 0, "metrics_port": 0}
        self._settings = settings_of(paths, {**ports, **options})
        self._started: concurrent.futures.Future[Ports] = concurrent.futures.Future()
        #: Set on the loop, which the thread makes; ``_stop_asked`` may come before there is one.
        self._stopping = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop_asked = False
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="modelport-server", daemon=True)

    def start(self) -> None:
        """Open the ports and load the models; return when the server answers.

        A model that does not load is an error only with ``exit_on_error=True``, or if no model is
        served and some were named; ``Client.models`` has the reason otherwise.

        Raises:
            Unavailable: a port is taken, or with ``exit_on_error`` a model does not load.
            InvalidArgument: the server was started before.
        """
        if self._thread.ident is not None:
            raise UsageError("a Server can start only once; create another")
        atexit.register(self._hold)
        self._thread.start()
        try:
            self._started.result()
        except BaseException:
            self._failure = None
            self.stop()
            raise

    def stop(self) -> None:
        """Finish the requests in flight, close the ports and unload the models.

        It takes ``exit_timeout_secs`` at most. A second call does nothing.

        Raises:
            Exception: the server ended by an error of its own before.
        """
        if self._thread.ident is None:
            return
        self._stop_asked = True
        if self._loop is not None:
            with suppress(RuntimeError):  # the loop is closed: the server has ended
                self._loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join()
        atexit.unregister(self._hold)
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def wait(self, timeout_seconds: float | None = None) -> bool:
        """Wait until the server has ended, and return whether it has."""
        self._thread.join(timeout_seconds)
        return not self._thread.is_alive()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def ports(self) -> Ports:
        """The ports that the server listens on.

        Raises:
            Unavailable: it has not started.
        """
        if not self._started.done():
            raise Unavailable("the server has not started; call start(), or use it in a 'with'")
        return self._started.result()

    @property
    def http_url(self) -> str:
        """``http://HOST:PORT`` of the Open Inference Protocol and the other HTTP dialects."""
        return f"http://{_host(self._settings.http_address)}:{self.ports.http_port}"

    @property
    def grpc_url(self) -> str:
        """``grpc://HOST:PORT``."""
        return f"grpc://{_host(self._settings.grpc_address)}:{self.ports.grpc_port}"

    @property
    def metrics_url(self) -> str:
        """The URL of the Prometheus metrics."""
        return f"http://{_host(self._settings.metrics_address)}:{self.ports.metrics_port}/metrics"

    def _hold(self) -> None:
        """Hold the loop where the process ends; uvloop crashes when it outlives the interpreter."""
        held = threading.Event()
        hold = functools.partial(_hold_after, held)

        while self._thread.is_alive() and not held.is_set():
            with suppress(RuntimeError):  # the loop is closed
                if self._loop is not None:
                    self._loop.call_soon_threadsafe(hold)
            held.wait(0.01)

    def _run(self) -> None:
        try:
            with (
                logs.STANDARD_LIBRARY_LOGS,
                asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
            ):
                runner.run(self._serve())
        except BaseException as error:  # it is raised where the caller is
            self._failure = error
            if not self._started.done():
                self._started.set_exception(error)
        if not self._started.done():
            self._started.set_exception(Unavailable("the server was stopped before it had started"))

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        if self._stop_asked:
            self._stopping.set()
        await app.serve(self._settings, self._stopping, self._started.set_result)


def serve(*paths: Path | str, **options: Unpack[ServeOptions]) -> None:
    """Serve until SIGTERM or SIGINT, as ``modelport serve`` does, and return.

    Args:
        paths: model repositories, models' own folders, models' files.
        options: those of ``modelport serve``, with its ports: 8000 for HTTP, 8001 for gRPC and 8002
            for metrics.

    Raises:
        InvalidArgument: an option is wrong, or this is not the main thread.
        Unavailable: a port is taken, or with ``exit_on_error`` a model does not load.
    """
    if threading.current_thread() is not threading.main_thread():
        raise UsageError("serve() handles signals, which needs the main thread; use Server instead")
    ports: ServeOptions = {"http_port": 8000, "grpc_port": 8001, "metrics_port": 8002}
    merged: ServeOptions = {**ports, **options}
    server = Server(*paths, **merged)
    with _signalled() as ending, server:
        ending.wait()


def _hold_after(held: threading.Event) -> None:
    held.set()
    threading.Event().wait()


@contextmanager
def _signalled() -> Iterator[threading.Event]:
    """An event that the signals which end a server set; their handlers are restored afterwards."""
    ending = threading.Event()
    before = {number: signal.signal(number, lambda *_: ending.set()) for number in signals.ending()}
    try:
        yield ending
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def settings_of(paths: Sequence[Path | str], options: Mapping[str, Any]) -> Settings:
    """The settings that ``modelport serve`` has with these arguments.

    Raises:
        InvalidArgument: an option is unknown or wrong.
    """
    try:
        return command.settings_of(list(_arguments(paths, options)), environment=False)
    except click.ClickException as error:
        raise UsageError(error.format_message()) from error


def _arguments(paths: Sequence[Path | str], options: Mapping[str, Any]) -> Iterator[str]:
    """The command line for ``options``, so that the command's own checks hold for all values."""
    known = {
        flag.removeprefix("--").replace("-", "_"): option
        for option in command.serve.params
        if isinstance(option, click.Option)
        for flag in option.opts
    }
    for name, value in options.items():
        if name in PROCESS_OPTIONS:
            raise UsageError(
                f"option '{name}' is only for the command line; start a process with 'modelport "
                "serve'"
            )
        if name not in known:
            hint = suggestion(name, known.keys() - PROCESS_OPTIONS)
            raise UsageError(f"there is no option '{name}'; {hint}".removesuffix("; "))
        option, flag = known[name], f"--{name.replace('_', '-')}"
        if option.is_flag:
            yield from [flag] if value else []
        elif option.multiple and not isinstance(value, str | Path):
            yield from (f"{flag}={each}" for each in value)
        else:
            yield f"{flag}={value}"
    yield from ("--", *map(str, paths))


def _host(address: str) -> str:
    host = _LOOPBACK.get(address, address)
    return f"[{host}]" if ":" in host else host
