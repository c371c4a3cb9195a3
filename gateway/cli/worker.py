"""Entry point of the worker processes of ``modelport serve --workers N``."""

from __future__ import annotations

import uvloop

from modelport.gateway.cli import serve
from modelport.gateway.server.workers import worker


def main() -> None:
    """Serve until the parent process asks this one to stop, or ends."""
    assignment = worker.take_assignment()
    settings = serve.settings_of(assignment.arguments)._replace(
        http_port=assignment.http_port,
        grpc_port=assignment.grpc_port,
        http_socket=assignment.http_socket if assignment.http_socket >= 0 else None,
        grpc_socket=assignment.grpc_socket if assignment.grpc_socket >= 0 else None,
    )
    uvloop.run(worker.run(settings, assignment))
