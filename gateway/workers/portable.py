"""A worker with the portable front."""

from __future__ import annotations

import functools

import uvloop

from gateway.front.portable import PortableFront
from gateway.workers.worker import Worker


def main() -> None:
    worker = Worker.from_environment()
    uvloop.run(worker.run(functools.partial(PortableFront, reuse_port=True)))
