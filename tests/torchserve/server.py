"""A real TorchServe with archives made from small models."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from modelport.exporters.formats.base import ExportTarget
from modelport.exporters.formats.registry import FORMATS
from modelport.exporters.loaded_model import Source
from modelport.exporters.models.fraud import FraudTransformer
from modelport.exporters.models.vit import VisionTransformer
from modelport.exporters.requests import triton_warmup
from modelport.exporters.requests.random_inputs import sampler
from modelport.exporters.sources import pytorch
from modelport.gateway.repository import config, manifest
from modelport.loadtests.system import environments
from modelport.loadtests.system.processes import HOST, free_ports, running, tail

VERSION = "0.12.0"
REQUIREMENTS = ("torch==2.13.0", f"torchserve=={VERSION}", "pyyaml", "numpy")
MAX_BATCH_SIZE, MAX_LENGTH = 8, 64
#: Rows of TorchServe's own batches, and how long it waits for them.
ROWS, ROWS_DELAY_MILLISECONDS = 8, 50
READY_SECONDS, POLL_SECONDS = 120.0, 0.1


@dataclass(frozen=True)
class TorchServePorts:
    inference: int
    management: int
    grpc: int
    grpc_management: int


def sources() -> dict[str, Source]:
    """Models whose layers all differ; ``unchecked`` is fraud without ranges of values."""
    torch.manual_seed(0)
    modules = {
        "fraud": FraudTransformer(512, 64, 4, 3, 128, MAX_LENGTH),
        "vit": VisionTransformer(32, 8, 3, 10, 64, 3, 4, 128),
    }
    found = {}
    for name, module in modules.items():
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.add_(torch.randn(parameter.shape) * 0.05)
        spec = module.modelport_spec
        found[name] = pytorch.source(module, spec, spec.signature(module, MAX_BATCH_SIZE))
    fraud = found["fraud"]
    inputs = tuple(replace(i, minimum=None, maximum=None) for i in fraud.signature.inputs)
    found["unchecked"] = replace(fraud, signature=replace(fraud.signature, inputs=inputs))
    return found


def publish(
    repository: Path, name: str, source: Source, format_name: str = "torchscript", version: int = 1
) -> Path:
    """A version of ``source`` with warm-up requests, as the exporters publish it; its folder."""
    row = FORMATS.builtin[format_name]
    folder = repository / name / str(version)
    folder.mkdir(parents=True)
    row.export(source, folder / row.platform.default_filename, ExportTarget())
    wanted = config.build(name, row.platform, source.signature)
    requests = triton_warmup.requests(source.signature, sampler(source.spec), seed=0)
    triton_warmup.add(wanted, folder.parent, requests)
    (folder.parent / config.FILENAME).write_text(config.to_text(wanted))
    manifest.write(folder)
    return folder


@contextlib.contextmanager
def torchserve(
    work: Path, archives: Sequence[Path], programs: Path | None = None
) -> Iterator[TorchServePorts]:
    """A TorchServe with one worker for each archive; gone afterwards, whatever happens.

    ``programs`` is the bin folder of an environment with more than TorchServe needs.
    """
    if shutil.which("java") is None:
        raise environments.Missing("java is missing: install Java 17")
    programs = programs or environments.venv("torchserve", *REQUIREMENTS)
    inference, management, metrics, rpc, rpc_management = free_ports(5)
    models = {
        archive.stem: {
            "1": {
                "defaultVersion": True,
                "marName": archive.name,
                "minWorkers": 1,
                "maxWorkers": 1,
                "batchSize": ROWS,
                "maxBatchDelay": ROWS_DELAY_MILLISECONDS,
                "responseTimeout": 120,
            }
        }
        for archive in archives
    }
    settings = {
        "inference_address": f"http://{HOST}:{inference}",
        "management_address": f"http://{HOST}:{management}",
        "metrics_address": f"http://{HOST}:{metrics}",
        "grpc_inference_address": HOST,
        "grpc_management_address": HOST,
        "grpc_inference_port": rpc,
        "grpc_management_port": rpc_management,
        "disable_token_authorization": "true",
        "enable_model_api": "true",
        "model_store": archives[0].parent,
        "models": json.dumps(models),
        "load_models": ",".join(archive.name for archive in archives),
    }
    file = work / "config.properties"
    file.write_text("".join(f"{key}={value}\n" for key, value in settings.items()))
    temporary = work / "tmp"
    temporary.mkdir()
    places = {
        "TMPDIR": temporary,
        "TEMP": temporary,
        "LOG_LOCATION": work,
        "METRICS_LOCATION": work,
    }
    command = [programs / "torchserve", "--start", "--foreground", "--ncs"]
    command += ["--ts-config", file]
    log = work / "torchserve.log"
    with running(
        [str(part) for part in command],
        log=log,
        ready=f"http://{HOST}:{inference}/ping",
        env={
            **{name: str(place) for name, place in places.items()},
            "PATH": f"{programs}:{os.environ['PATH']}",
            "OMP_NUM_THREADS": "1",
        },
        cwd=work,
    ):
        ports = TorchServePorts(inference, management, rpc, rpc_management)
        for archive in archives:
            _wait_for_worker(ports, archive.stem, log)
        yield ports


def _wait_for_worker(ports: TorchServePorts, model: str, log: Path) -> None:
    url = f"http://{HOST}:{ports.management}/models/{model}"
    give_up = time.monotonic() + READY_SECONDS
    while time.monotonic() < give_up:
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=5) as answer:
            if any(worker["status"] == "READY" for worker in json.load(answer)[0]["workers"]):
                return
        time.sleep(POLL_SECONDS)
    raise RuntimeError(f"no worker of '{model}' is ready\n{tail(log)}")
