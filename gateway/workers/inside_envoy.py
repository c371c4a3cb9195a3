"""What the Python inside Envoy imports: the ASGI application of a worker."""

from __future__ import annotations

from gateway.haste import hasten

hasten()  # before anything else is imported

from gateway.front.envoy.application import Application  # noqa: E402
from gateway.workers.worker import Worker  # noqa: E402

application = Application(Worker.from_environment().run)
