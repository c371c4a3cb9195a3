"""The process that starts the workers: it holds the ports and the hub, and ends when they have.

The workers are started before anything is imported that takes long, for they take longer.
"""

from __future__ import annotations

from collections.abc import Sequence

from modelport.gateway.server.workers.ports import HeldPort
from modelport.gateway.server.workers.process import Assignment, WorkerProcess
from modelport.gateway.settings import Settings


def run(settings: Settings, arguments: Sequence[str]) -> None:
    """Serve with the workers that ``settings`` ask for, until SIGTERM or SIGINT.

    Args:
        arguments: those that ``settings`` were parsed from.

    Raises:
        Unavailable: the gateway cannot start.
    """
    http = HeldPort(settings.http_address, settings.http_port, "--http-port")
    grpc = HeldPort(settings.grpc_address, settings.grpc_port, "--grpc-port")
    # Found taken now rather than when the workers have been started.
    HeldPort(settings.metrics_address, settings.metrics_port, "--metrics-port").close()
    workers: list[WorkerProcess] = []
    try:
        for number in range(settings.workers):
            assignment = Assignment(number, http.number, grpc.number, tuple(arguments))
            workers.append(WorkerProcess(assignment))
            workers[-1].spawn()
        from modelport.gateway.server.workers import supervisor

        supervisor.run(settings, workers, {"http": http.number, "grpc": grpc.number})
    finally:
        for worker in workers:
            worker.kill()
        http.close()
        grpc.close()
