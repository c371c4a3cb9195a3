"""Runs inside the `ray` environment: ray_server.py MODEL PORT FOLDER."""

from __future__ import annotations

import signal
import sys
from typing import Any

import ray
from plain import Plain
from ray import serve
from starlette.requests import Request
from starlette.responses import Response

LOGGING = {"enable_access_log": False, "log_level": "WARNING"}


@serve.deployment(max_ongoing_requests=100, num_replicas=1, ray_actor_options={"num_cpus": 0})
class RayDeployment:
    """The model."""

    def __init__(self, path: str) -> None:
        self._plain = Plain(path)

    async def __call__(self, request: Request) -> Any:
        if request.headers["content-type"] == "application/json":
            return self._plain.json(await request.json())
        return Response(self._plain.binary(await request.body()))


def main(model: str, port: int, folder: str) -> None:
    ray.init(num_cpus=1, include_dashboard=False, _temp_dir=folder, log_to_driver=False)
    serve.start(http_options={"host": "127.0.0.1", "port": port}, logging_config=LOGGING)
    serve.run(RayDeployment.bind(model), route_prefix="/predict", logging_config=LOGGING)
    signal.sigwait({signal.SIGTERM, signal.SIGINT})


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
