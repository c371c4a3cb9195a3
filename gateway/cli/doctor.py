"""``modelport doctor``: the backends this machine can run, their versions, and what is missing.

All checks run concurrently, each in its own process, so that a broken library affects only its row.
Nothing heavier than ONNX Runtime is imported unless there is a GPU to test.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import os
import re
import shutil
import signal
import sys
from collections.abc import Awaitable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

from modelport.gateway import extensions
from modelport.gateway.backend_registry import BACKENDS, Library, find_versions
from modelport.gateway.cli.errors import OneLineCommand
from modelport.gateway.cli.paths import EXISTING
from modelport.gateway.cli.tables import print_table
from modelport.gateway.errors import ModelportError
from modelport.gateway.extras import install_extra
from modelport.gateway.repository.routes_file import ModelRoute

#: A program or a library that takes longer to respond is reported as broken.
ASK_SECONDS = 60.0
#: Device files of GPUs for CUDA.
GPU_DEVICES = ("/dev/nvidia0", "/dev/nvidiactl", "/dev/dxg")
MAX_SAID = 200

#: y = Identity(x), one FP32 number, as an ONNX model (IR 8, opset 17).
IDENTITY = (
    "080812003a370a100a017812017922084964656e746974791201675a0f0a0178120a0a08080112040a020801"
    "620f0a0179120a0a08080112040a02080142040a001011"
)
_ONNXRUNTIME = f"""
import json, numpy, onnxruntime, sys
model, said = bytes.fromhex("{IDENTITY}"), {{"version": onnxruntime.__version__}}
said["providers"] = onnxruntime.get_available_providers()
onnxruntime.preload_dlls()
options = onnxruntime.SessionOptions()
options.log_severity_level = 4
for provider in sys.argv[1:]:
    if provider in said["providers"]:
        session = onnxruntime.InferenceSession(model, options, [provider])
        session.run(None, {{"x": numpy.ones(1, numpy.float32)}})
        said[provider] = provider in session.get_providers()
print(json.dumps(said))
"""
_TORCH = """
import json, torch
found = torch.cuda.is_available()
said = {"device": torch.cuda.get_device_name(0) if found else ""}
if found: said["sum"] = float(torch.ones(8, device="cuda").sum())
print(json.dumps(said))
"""
#: It comes with the base installation, and is tried, not only looked for.
DEFAULT_BACKEND = "onnxruntime"
#: Extras for work on modelport itself.
CONTRIBUTORS = frozenset({"dev", "docs"})
_REQUIREMENT = re.compile(r"([\w.-]+)(?:\[([\w,.-]+)\])?[^;]*;?(.*)")
_EXTRA = re.compile(r"extra == ['\"]([\w-]+)['\"]")
_BEFORE = re.compile(r"python_version < ['\"](\d+)\.(\d+)['\"]")
TOOLS = {"java": "-version", "perf_analyzer": "--version"}


@dataclass(frozen=True, slots=True)
class Finding:
    """A row. ``state`` is ok, missing (not installed), broken, or down (a remote server)."""

    kind: str
    name: str
    state: str
    version: str = ""
    detail: str = ""


@click.command(cls=OneLineCommand)
@click.option("--routes", "file", metavar="FILE", type=EXISTING,
              help="Also check the servers in this routes file.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def doctor(file: Path | None, as_json: bool) -> None:
    """Show which backends this machine can run, with versions.

    The exit status is 0 if the default backend, ONNX Runtime, works.
    """
    from modelport.gateway.repository import routes_file as routes

    findings = asyncio.run(examine(routes.load(file) if file is not None else {}))
    if as_json:
        click.echo(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        _show(findings)
    if not any(f.name == "onnxruntime" and f.state == "ok" for f in findings):
        sys.exit(1)


async def examine(routes: Mapping[str, ModelRoute]) -> list[Finding]:
    """All rows in the order of the report."""
    gpu = any(Path(device).exists() for device in GPU_DEVICES)
    looks: list[Awaitable[list[Finding]]] = [
        _onnxruntime(gpu),
        _libraries(gpu),
        _extras(),
        *(_extension(entry) for entry in _extensions()),
        *(_tool(name, flag) for name, flag in TOOLS.items()),
        *(_endpoint(name, each) for name, route in routes.items() for each in _each(route)),
    ]
    return [finding for found in await asyncio.gather(*looks) for finding in found]


# -- libraries ------------------------------------------------------------------------------------


async def _onnxruntime(gpu: bool) -> list[Finding]:
    providers = ["CPUExecutionProvider", *(["CUDAExecutionProvider"] if gpu else [])]
    status, text = await _ask(sys.executable, "-c", _ONNXRUNTIME, *providers)
    said = _document(text) if status == 0 else {}
    if not said.get("CPUExecutionProvider"):
        return [Finding("embedded", "onnxruntime", "broken", detail=_last(text))]
    version = str(said["version"])
    names = ", ".join(name.removesuffix("ExecutionProvider") for name in said["providers"])
    found = [Finding("embedded", "onnxruntime", "ok", version, f"providers: {names}")]
    if not gpu:
        state, reason = "missing", "this machine has no NVIDIA GPU device"
    elif "CUDAExecutionProvider" not in said["providers"]:
        state, reason = "missing", "this machine has a GPU; replace onnxruntime by onnxruntime-gpu"
    elif not said.get("CUDAExecutionProvider"):
        state, reason = "broken", "the provider falls back to the CPU"
    else:
        state, reason = "ok", "a model ran on it"
    return [*found, Finding("embedded", "onnxruntime on CUDA", state, version, reason)]


async def _libraries(gpu: bool) -> list[Finding]:
    found = []
    for backend in BACKENDS.builtin.values():
        for library in backend.libraries if backend.name != DEFAULT_BACKEND else ():
            finding = _library(backend.name, library)
            found.append(finding)
            if library.distribution == "torch" and finding.state == "ok" and gpu:
                status, text = await _ask(sys.executable, "-c", _TORCH)
                said = _document(text) if status == 0 else {}
                device = str(said.get("device", ""))
                state = "ok" if device else "broken"
                detail = device or ("torch sees no GPU" if said else _last(text))
                found.append(Finding("embedded", "pytorch on CUDA", state, finding.version, detail))
    return found


async def _extras() -> list[Finding]:
    """Every extra of the installed package, and what it lacks here."""
    found = []
    for extra, distributions in extras().items():
        versions = {name: _version_of(name) for name in distributions}
        missing = [name for name, version in versions.items() if not version]
        detail = f"lacks {', '.join(missing)}: {install_extra(extra)}"
        state, detail = ("missing", detail) if missing else ("ok", ", ".join(distributions[:3]))
        only = versions[distributions[0]] if len(distributions) == 1 else ""
        found.append(Finding("extra", extra, state, only, detail))
    return found


def extras() -> dict[str, list[str]]:
    """Extra → the distributions that it installs, those of the extras in it included."""
    try:
        package = importlib.metadata.distribution("modelport")
    except importlib.metadata.PackageNotFoundError:  # run from its source
        return {}
    direct: dict[str, list[str]] = {}
    within: dict[str, list[str]] = {}
    for text in package.requires or ():
        requirement = _REQUIREMENT.match(text)
        extra = _EXTRA.search(text)
        before = _BEFORE.search(text)
        if requirement is None or extra is None:
            continue
        if before is not None and sys.version_info[:2] >= tuple(map(int, before.groups())):
            continue
        if requirement[1] == "modelport":
            within.setdefault(extra[1], []).extend(requirement[2].split(","))
        else:
            direct.setdefault(extra[1], []).append(requirement[1])

    def all_of(name: str) -> list[str]:
        inner = [each for other in within.get(name, ()) for each in all_of(other)]
        return list(dict.fromkeys([*direct.get(name, ()), *inner]))

    names = package.metadata.get_all("Provides-Extra") or ()
    return {name: all_of(name) for name in names if name not in CONTRIBUTORS}


def _library(name: str, library: Library) -> Finding:
    name, version = f"{name} ({library.distribution})", _version_of(library.distribution)
    if not version:
        return Finding("embedded", name, "missing", "", library.install)
    return Finding("embedded", name, "ok", version, "installed")


def _version_of(distribution: str) -> str:
    """The installed version; empty if there is none."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


# -- extensions -----------------------------------------------------------------------------------


def _extensions() -> Iterator[importlib.metadata.EntryPoint]:
    for group in extensions.GROUPS:
        for entries in extensions.installed(group).values():
            yield from entries


async def _extension(entry: importlib.metadata.EntryPoint) -> list[Finding]:
    """The extension, and the libraries that it asks for."""
    word, package = extensions.GROUPS[entry.group], extensions.package_of(entry)
    check = ("-m", "modelport.extension_check", entry.group, entry.name)
    status, text = await _ask(sys.executable, *check)
    said = _document(text) if status == 0 else {}
    reason = str(said.get("reason", _last(text)))
    version = entry.dist.version if entry.dist is not None else ""
    found = Finding(
        *("extension", f"{word} {entry.name}", "broken" if reason else "ok", version),
        f"{package}: {reason}" if reason else package,
    )
    libraries = [Library(str(name), str(install)) for name, install in said.get("libraries", ())]
    return [found, *(_library(entry.name, library) for library in libraries)]


# -- tools ----------------------------------------------------------------------------------------


async def _tool(name: str, flag: str) -> list[Finding]:
    path = shutil.which(name)
    if path is None:
        return [Finding("tool", name, "missing")]
    status, text = await _ask(path, flag)
    state = "ok" if status == 0 else "broken"
    return [Finding("tool", name, state, _version(text), path if status == 0 else _last(text))]


# -- remote servers -------------------------------------------------------------------------------


def _each(route: ModelRoute) -> Iterator[ModelRoute]:
    for endpoint in route.endpoints:
        yield route._replace(endpoints=(endpoint,))


async def _endpoint(model: str, route: ModelRoute) -> list[Finding]:
    where = f"{model} at {route.endpoints[0]}"
    try:
        async with asyncio.timeout(ASK_SECONDS):
            found = await find_versions(route.backend)(route, model)
    except TimeoutError:
        return [Finding(route.backend, where, "down", detail="it does not respond")]
    except ModelportError as error:
        return [Finding(route.backend, where, "down", detail=str(error))]
    except Exception as error:  # a client's error must not affect the other rows
        return [Finding(route.backend, where, "broken", detail=_last(str(error)))]
    numbers = ", ".join(map(str, found.numbers)) or "none"
    return [Finding(route.backend, where, "ok", detail=f"versions READY: {numbers}")]


# -- processes ------------------------------------------------------------------------------------


async def _ask(*command: str) -> tuple[int, str]:
    """Run a command; its exit status (-1: not run, or timed out) and its output."""
    try:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
        )
    except OSError as error:
        return -1, error.strerror or "it cannot be run"
    try:
        async with asyncio.timeout(ASK_SECONDS):
            printed, _ = await process.communicate()
    except TimeoutError:
        os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
        return -1, f"no response within {ASK_SECONDS:g} s"
    return process.returncode or 0, printed.decode("utf-8", "replace")


def _document(text: str) -> dict[str, Any]:
    """The JSON object in the last line; libraries may print before it."""
    try:
        found = json.loads(_last(text, 100_000))
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _last(text: str, most: int = MAX_SAID) -> str:
    return (text.strip().splitlines() or [""])[-1].strip()[:most]


def _version(text: str) -> str:
    found = re.search(r"(?<!\d)\d++(?:\.\d++)++\S*+", text)
    return found[0].strip("\",'") if found else ""


def _show(findings: list[Finding]) -> None:
    rows = [(f.kind, f.name, f.state, f.version, f.detail) for f in findings]
    colours = {"ok": "green", "missing": "yellow", "broken": "red", "down": "red"}
    print_table(("kind", "name", "state", "version", "detail"), rows, colours=colours)
