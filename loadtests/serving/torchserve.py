"""TorchServe with one archive of ``modelport package`` and one worker, at its own ports."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from modelport.loadtests.load.target import LoadTestProtocol, LoadTestTarget
from modelport.loadtests.serving.server import MeasuredServerLaunch, get_json
from modelport.loadtests.system import environments
from modelport.loadtests.system.environments import Missing
from modelport.loadtests.system.processes import HOST, free_ports

VERSION = "0.12.0"
REQUIREMENTS = ("torch==2.13.0", f"torchserve=={VERSION}", "pyyaml", "numpy")
MAX_REQUEST_BYTES = 64 << 20
#: Warnings only, as in the gateway's log: no line per request.
LOG4J = """<?xml version="1.0" encoding="UTF-8"?>
<Configuration>
  <Appenders>
    <Console name="STDOUT" target="SYSTEM_OUT">
      <PatternLayout pattern="%d [%p] %c - %m%n"/>
    </Console>
  </Appenders>
  <Loggers>
    <Logger name="ACCESS_LOG" level="off"/>
    <Logger name="MODEL_METRICS" level="off"/>
    <Logger name="TS_METRICS" level="off"/>
    <Root level="warn"><AppenderRef ref="STDOUT"/></Root>
  </Loggers>
</Configuration>
"""


def programs() -> Path:
    """The bin folder with ``torchserve``: of PATH, or of a cached environment.

    Raises:
        Missing: there is no Java, or the environment cannot be made.
    """
    if shutil.which("java") is None:
        raise Missing("TorchServe needs Java 17: install Debian's openjdk-17-jre-headless")
    found = shutil.which("torchserve")
    return Path(found).parent if found else environments.venv("torchserve", *REQUIREMENTS)


@dataclass(frozen=True)
class TorchServe:
    """TorchServe with one model; ``archive`` is a ``.mar`` named for the model."""

    archive: Path
    programs: Path

    def launch(self, work: Path) -> MeasuredServerLaunch:
        model = self.archive.stem
        inference, management, metrics, grpc, grpc_management = free_ports(5)
        worker = {"minWorkers": 1, "maxWorkers": 1, "batchSize": 1, "responseTimeout": 120}
        models = {model: {"1": {"defaultVersion": True, "marName": self.archive.name, **worker}}}
        settings = {
            "inference_address": f"http://{HOST}:{inference}",
            "management_address": f"http://{HOST}:{management}",
            "metrics_address": f"http://{HOST}:{metrics}",
            "grpc_inference_address": HOST,
            "grpc_management_address": HOST,
            "grpc_inference_port": grpc,
            "grpc_management_port": grpc_management,
            "disable_token_authorization": "true",  # loopback only
            "max_request_size": MAX_REQUEST_BYTES,
            "model_store": self.archive.parent,
            "models": json.dumps(models),
            "load_models": self.archive.name,
        }
        file = work / "config.properties"
        file.write_text("".join(f"{key}={value}\n" for key, value in settings.items()))
        (work / "log4j2.xml").write_text(LOG4J)
        # Its pid file is there too, so each process needs its own folder.
        temporary = work / "tmp"
        temporary.mkdir()
        places = ("TMPDIR", "TEMP", "LOG_LOCATION", "METRICS_LOCATION")

        def ready() -> bool:
            found = get_json(f"{HOST}:{management}", f"/models/{model}")
            return bool(found) and any(w["status"] == "READY" for w in found[0]["workers"])

        return MeasuredServerLaunch(
            command=(
                *(str(self.programs / "torchserve"), "--start", "--foreground", "--ncs"),
                *("--ts-config", str(file), "--log-config", str(work / "log4j2.xml")),
            ),
            targets={
                LoadTestProtocol.TORCHSERVE_HTTP: LoadTestTarget(
                    LoadTestProtocol.TORCHSERVE_HTTP, f"{HOST}:{inference}", model
                ),
                LoadTestProtocol.TORCHSERVE_GRPC: LoadTestTarget(
                    LoadTestProtocol.TORCHSERVE_GRPC, f"{HOST}:{grpc}", model
                ),
            },
            ready=ready,
            env={
                **dict.fromkeys(places, str(temporary)),
                "PATH": f"{self.programs}{os.pathsep}{os.environ.get('PATH', '')}",
            },
            cwd=work,
        )
