"""Start parameters and readiness checks of TorchServe, TensorFlow Serving and Triton.

All listen on loopback and serve one version of one model, without model control.
``tensorflow_model_server`` has no option for the address: it listens on all interfaces
(``server.cc``).
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import aiohttp
import structlog

from modelport.gateway.backends.base import Artifact
from modelport.gateway.backends.managed.supervisor import ServerLaunch
from modelport.gateway.errors import Unsupported
from modelport.gateway.repository.config import instance_count
from modelport.gateway.repository.routes_file import ModelRoute, Program

log = structlog.get_logger("modelport.managed")

LOOPBACK = "127.0.0.1"
#: The largest response to a readiness check.
MAX_ANSWER_BYTES = 1 << 20
#: TorchServe's own limit is 6.5 MB; requests have passed the gateway's limits already.
TORCHSERVE_MAX_REQUEST_BYTES = 1 << 30

#: Only warnings, and only to standard output, which the gateway reads.
LOG4J = """<?xml version="1.0" encoding="UTF-8"?>
<Configuration>
  <Appenders>
    <Console name="STDOUT" target="SYSTEM_OUT">
      <PatternLayout pattern="%d{ISO8601} [%-5p] %t %c - %m%n"/>
    </Console>
  </Appenders>
  <Loggers>
    <Logger name="ACCESS_LOG" level="off"/>
    <Logger name="MODEL_METRICS" level="off"/>
    <Logger name="TS_METRICS" level="off"/>
    <Logger name="MODEL_LOG" level="info"/>
    <Root level="warn"><AppenderRef ref="STDOUT"/></Root>
  </Loggers>
</Configuration>
"""


@dataclass(frozen=True, slots=True)
class StartContext:
    """The parameters of one start of a server.

    Attributes:
        folder: private to the server; contains ``package``.
        command: the program with its full path, and its first arguments.
        shared_memory: the prefix of its shared memory names.
    """

    artifact: Artifact
    route: ModelRoute
    program: Program
    folder: Path
    package: Path
    ports: Mapping[str, int]
    command: tuple[str, ...]
    shared_memory: str

    def launch(
        self, arguments: Sequence[str], ready: Callable[[], Awaitable[bool]], **environment: str
    ) -> ServerLaunch:
        """Start with ``arguments`` and with ``environment`` besides the gateway's variables.

        The folder of the server's program is first on PATH.
        """
        path = os.pathsep.join([os.path.dirname(self.command[0]), os.environ.get("PATH", "")])
        variables = {**os.environ, "PATH": path, **environment, **self.program.environment}
        probed = self.ports.get("management", self.ports["http"])
        return ServerLaunch(
            command=(*self.command, *arguments, *self.program.arguments),
            environment=variables,
            folder=self.folder,
            shared_memory=self.shared_memory,
            ready=ready,
            alive=lambda: get(probed, "/"),
        )


@dataclass(frozen=True, slots=True)
class ServerDefinition:
    """A row of ``SERVERS``.

    Attributes:
        program: its usual name on PATH.
        install: instructions to install it.
        ports: names of the ports it listens on; ``http`` and ``grpc`` are for requests.
        package: the path of the packaged model in its folder.
        needs: other required programs, and instructions to install them.
    """

    title: str
    program: str
    install: str
    ports: tuple[str, ...]
    package: str
    launch: Callable[[StartContext], ServerLaunch]
    needs: Mapping[str, str]

    def find(self, program: Program) -> tuple[str, ...]:
        """The command to run, with the program's full path.

        Raises:
            Unsupported: the program is not installed.
        """
        name, *arguments = program.command or (self.program,)
        paths = {**os.environ, **program.environment}
        found = shutil.which(name, path=paths.get("PATH"))
        if found is None:
            where = "at the path in 'command'" if program.command else "on PATH"
            raise Unsupported(f"{self.title} is not installed {where}: {self.install}")
        for needed, install in self.needs.items():
            home = paths.get(f"{needed.upper()}_HOME")
            search = f"{home}/bin" if home else paths.get("PATH")
            if not program.command and shutil.which(needed, path=search) is None:
                raise Unsupported(f"{self.title} needs {needed}, which is not installed: {install}")
        # Not resolved, because a virtual environment is found through the program's link.
        return (os.path.abspath(found), *arguments)


async def get(port: int, path: str) -> tuple[int, bytes]:
    """Send ``GET path`` to a server on this machine; its status and body.

    Raises:
        OSError: no response, or not an HTTP response.
    """
    url = f"http://{LOOPBACK}:{port}{path}"
    try:
        async with aiohttp.request("GET", url, allow_redirects=False) as answer:
            return answer.status, await answer.content.read(MAX_ANSWER_BYTES)
    except aiohttp.ClientError as error:
        raise ConnectionError("no answer") from error


async def _says(port: int, path: str, holds: Callable[[Any], bool]) -> bool:
    """Whether the server answers ``GET path`` with a JSON document that ``holds`` is true of."""
    status, body = await get(port, path)
    try:
        return status == 200 and holds(json.loads(body))
    except (ValueError, LookupError, TypeError):
        return False


# -- TorchServe -----------------------------------------------------------------------------------


def _torchserve(setting: StartContext) -> ServerLaunch:
    ports, folder, artifact = setting.ports, setting.folder, setting.artifact
    config = artifact.config
    batching = config.HasField("dynamic_batching")
    delay = config.dynamic_batching.max_queue_delay_microseconds // 1000
    workers = instance_count(config)
    model = {
        "defaultVersion": True,
        "marName": setting.package.name,
        "minWorkers": workers,
        "maxWorkers": workers,
        "batchSize": max(1, config.max_batch_size) if batching else 1,
        "maxBatchDelay": max(1, delay),
        "responseTimeout": math.ceil(setting.route.timeout_seconds),
    }
    properties = {
        "inference_address": f"http://{LOOPBACK}:{ports['http']}",
        "management_address": f"http://{LOOPBACK}:{ports['management']}",
        "metrics_address": f"http://{LOOPBACK}:{ports['metrics']}",
        "grpc_inference_address": LOOPBACK,
        "grpc_management_address": LOOPBACK,
        "grpc_inference_port": ports["grpc"],
        "grpc_management_port": ports["grpc_management"],
        "disable_token_authorization": "true",  # loopback only
        "enable_model_api": "false",
        "model_store": setting.package.parent,
        "models": json.dumps({artifact.model_name: {str(artifact.version): model}}),
        "load_models": setting.package.name,
        "max_request_size": TORCHSERVE_MAX_REQUEST_BYTES,
        "max_response_size": setting.route.max_reply_bytes,
    }
    file = folder / "config.properties"
    file.write_text("".join(f"{key}={value}\n" for key, value in properties.items()))
    (folder / "log4j2.xml").write_text(LOG4J)
    # A new server must not find the pid file of the previous one there.
    temporary = folder / "tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    places = {
        name: str(temporary) for name in ("TMPDIR", "TEMP", "LOG_LOCATION", "METRICS_LOCATION")
    }

    def ready() -> Awaitable[bool]:
        return _says(
            ports["management"],
            f"/models/{quote(artifact.model_name, safe='')}",
            lambda models: any(worker["status"] == "READY" for worker in models[0]["workers"]),
        )

    arguments = ["--start", "--foreground", "--ncs", "--ts-config", str(file)]
    arguments += ["--log-config", str(folder / "log4j2.xml")]
    return setting.launch(arguments, ready, **places)


# -- TensorFlow Serving ---------------------------------------------------------------------------


def _tfserving(setting: StartContext) -> ServerLaunch:
    ports, artifact = setting.ports, setting.artifact
    log.warning(
        "tensorflow_model_server listens on all interfaces; block its ports in the firewall",
        model=artifact.model_name, grpc_port=ports["grpc"], http_port=ports["http"],
    )  # fmt: skip
    flags = {
        "port": ports["grpc"],
        "rest_api_port": ports["http"],
        "model_config_file": setting.package / "models.config",
        "file_system_poll_wait_seconds": 0,  # scan once
    }

    def ready() -> Awaitable[bool]:
        return _says(
            ports["http"],
            f"/v1/models/{quote(artifact.model_name, safe='')}/versions/{artifact.version}",
            lambda said: any(s["state"] == "AVAILABLE" for s in said["model_version_status"]),
        )

    return setting.launch([f"--{name}={value}" for name, value in flags.items()], ready)


# -- Triton ---------------------------------------------------------------------------------------


def _triton(setting: StartContext) -> ServerLaunch:
    ports, artifact = setting.ports, setting.artifact
    flags = {
        "model-repository": setting.package,
        "model-control-mode": "none",
        "strict-readiness": "true",
        "exit-on-error": "true",
        "exit-timeout-secs": 3,
        "http-address": LOOPBACK,
        "http-port": ports["http"],
        "grpc-address": LOOPBACK,
        "grpc-port": ports["grpc"],
        "allow-metrics": "false",
        "backend-config": f"python,shm-region-prefix-name={setting.shared_memory}",
    }

    async def ready() -> bool:
        path = f"/v2/models/{quote(artifact.model_name, safe='')}/versions/{artifact.version}/ready"
        status, _ = await get(ports["http"], path)
        return status == 200

    return setting.launch([f"--{name}={value}" for name, value in flags.items()], ready)


SERVERS: Mapping[str, ServerDefinition] = {
    "torchserve": ServerDefinition(
        "TorchServe",
        "torchserve",
        "pip install torch torchserve torch-model-archiver pyyaml",
        ("http", "grpc", "management", "metrics", "grpc_management"),
        "store/{model}.mar",
        _torchserve,
        {"java": "install Java 17, such as Debian's openjdk-17-jre-headless"},
    ),
    "tfserving": ServerDefinition(
        "TensorFlow Serving",
        "tensorflow_model_server",
        "install tensorflow-model-server from Google's apt repository, or run the container "
        "tensorflow/serving and set its endpoint in the route",
        ("grpc", "http"),
        "models",
        _tfserving,
        {},
    ),
    "triton": ServerDefinition(
        "Triton",
        "tritonserver",
        "run the container nvcr.io/nvidia/tritonserver, or pip install nvidia-pytriton, which "
        "has only the Python backend",
        ("grpc", "http"),
        "repository",
        _triton,
        {},
    ),
}
