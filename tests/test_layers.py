"""The house of the architecture: imports point downward, and importing is cheap."""

from __future__ import annotations

import ast
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
#: The first prefix that matches decides; a module imports its own layer or a lower one.
LAYERS = {
    "gateway.types": 0,
    "gateway.errors": 0,
    "gateway.repository": 1,
    "gateway.settings": 1,
    "gateway.request_memory": 1,
    "gateway.routes": 1,
    "gateway.signals": 1,
    "gateway.offload": 1,
    "gateway.haste": 1,
    "gateway.hops": 1,
    "gateway.allocator": 1,
    "gateway.timers": 1,
    "gateway.watchdog": 1,
    "gateway.wire": 1,
    "gateway.telemetry": 1,
    "gateway.backends": 2,
    "gateway.upstream": 2,
    "gateway.admission": 2,
    "gateway.batching": 2,
    "gateway.cache": 2,
    "gateway.shared_memory": 2,
    "gateway.streaming": 2,
    "gateway.signatures": 2,
    "gateway.policy": 2,
    "gateway.validation": 2,
    "gateway.classification": 2,
    "gateway.images": 2,
    "gateway.image_cost": 2,
    "gateway.model": 3,
    "gateway.loader": 3,
    "gateway.load_threads": 3,
    "gateway.reconciler": 3,
    "gateway.discovery": 3,
    "gateway.standing": 3,
    "gateway.catalogue": 3,
    "gateway.lifecycle": 3,
    "gateway.control": 3,
    "gateway.dataplane": 3,
    "gateway.protocols": 4,
    "gateway.admin": 4,
    "gateway.front": 4,
    "gateway.client": 5,
    "gateway.control_cli": 5,
    "gateway.option_sources": 5,
    "gateway.versions_cli": 5,
    "gateway.doctor": 5,
    "gateway.cli": 5,
    "gateway.serve_cli": 5,
    "gateway.server": 5,
    "gateway.workers": 5,
}
#: What the exporters may know of the gateway.
EXPORTERS_MAY_IMPORT = (
    "gateway.types",
    "gateway.errors",
    "gateway.images",
    "gateway.repository",
    "gateway.__init__",
)
#: Clients of other servers, and what they may know of the web besides the rest of the core.
CLIENTS = ("gateway.upstream", "gateway.backends.remote", "gateway.backends.managed")
CLIENT_LIBRARIES = ("grpc", "aiohttp")
WEB = ("fastapi", "starlette", "uvicorn", "grpc", "aiohttp", "flask")


def modules(package: str) -> dict[str, Path]:
    return {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
        for path in sorted((ROOT / package).rglob("*.py"))
    }


def imports(path: Path, module_level: bool = False) -> set[str]:
    """Every module that ``path`` imports, names of submodules included."""
    tree = ast.parse(path.read_text())
    nodes = tree.body if module_level else list(ast.walk(tree))
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def layer(module: str) -> int | None:
    for prefix, number in LAYERS.items():
        if module == prefix or module.startswith(prefix + "."):
            return number
    return None


def arrows_up(sources: dict[str, set[str]]) -> list[str]:
    return [
        f"{module} (L{layer(module)}) imports {target} (L{layer(target)})"
        for module, targets in sources.items()
        for target in targets
        if (mine := layer(module)) is not None
        and (theirs := layer(target)) is not None
        and theirs > mine
    ]


def test_every_module_of_the_gateway_has_a_layer() -> None:
    assert [m for m in modules("gateway") if layer(m) is None and m != "gateway"] == []


def test_imports_point_downward_only() -> None:
    assert arrows_up({name: imports(path) for name, path in modules("gateway").items()}) == []


def test_an_arrow_that_points_up_is_seen() -> None:
    assert arrows_up({"gateway.types": {"gateway.server"}}) != []


def test_there_is_no_cycle_between_modules() -> None:
    known = modules("gateway") | modules("exporters") | modules("loadtests")
    graph = {
        name: {target for target in imports(path, module_level=True) if target in known} - {name}
        for name, path in known.items()
    }
    done: set[str] = set()

    def visit(name: str, way: tuple[str, ...]) -> None:
        assert name not in way, f"cycle: {' -> '.join((*way, name))}"
        if name not in done:
            for target in graph[name]:
                visit(target, (*way, name))
            done.add(name)

    for name in graph:
        visit(name, ())


def test_the_exporters_know_only_types_errors_images_and_the_repository_of_the_gateway() -> None:
    for name, path in modules("exporters").items():
        for target in imports(path):
            if target.startswith("gateway."):
                assert target.startswith(EXPORTERS_MAY_IMPORT) or target == "gateway.__version__", (
                    f"{name} imports {target}"
                )


def test_the_exporters_and_the_core_import_no_web_framework() -> None:
    core = {n: p for n, p in modules("gateway").items() if (layer(n) or 0) <= 3}
    for name, path in (modules("exporters") | core).items():
        allowed = CLIENT_LIBRARIES if name.startswith(CLIENTS) else ()
        for target in imports(path):
            root = target.split(".")[0]
            assert root not in WEB or root in allowed, f"{name} imports {target}"


def test_the_load_tests_know_nothing_of_the_gateways_inside() -> None:
    for name, path in modules("loadtests").items():
        inside = [
            target
            for target in imports(path)
            if target.startswith(("gateway", "exporters"))
            # How a command says what is wrong, and what it is doing.
            and not target.startswith(("exporters.errors", "exporters.progress"))
        ]
        assert inside == [], f"{name} imports {inside}"


@pytest.mark.parametrize("module", ["gateway", "gateway.cli", "exporters.cli", "gateway.server"])
def test_importing_pulls_in_no_framework_that_serves_or_trains_models(module: str) -> None:
    code = (
        f"import {module}, sys; "
        "print([m for m in ('torch', 'tensorflow', 'onnxruntime', 'onnx') if m in sys.modules])"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert printed.stdout.strip() == "[]", printed.stderr


def test_help_is_as_cheap_as_starting_python_and_click() -> None:
    """A ratio, not a time: ``--help`` costs little more than importing click does."""

    def best(*command: str) -> float:
        times = []
        for _ in range(5):
            started = time.perf_counter()
            subprocess.run([sys.executable, *command], capture_output=True, check=True)
            times.append(time.perf_counter() - started)
        return min(times)

    assert best("-m", "gateway.cli", "--help") < 3 * best("-c", "import click")
