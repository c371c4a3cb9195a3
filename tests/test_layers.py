"""The layers of the architecture: imports point downward, and importing is cheap."""

from __future__ import annotations

import ast
import functools
import gc
import resource
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
#: Folders and the files beside them, from the bottom up: each imports from itself and from lower
#: lines.
LAYERS = {
    "gateway": (
        ("types", "errors", "settings"),
        ("extensions", "extras", "runtime"),
        ("backend_registry", "telemetry", "wire"),
        ("repository",),
        ("recording", "toml_tables", "upstream"),
        ("slo", "backends"),
        ("inference",),
        ("models",),
        ("access",),
        ("rollout",),
        ("protocols",),
        ("server",),
        ("batch_prediction",),
        ("cli",),
    ),
    "exporters": (
        ("arguments", "errors", "model_registry", "tolerance", "runtime"),
        ("model_spec", "options", "packaging"),
        ("loaded_model",),
        ("requests",),
        ("inspection", "models"),
        ("demo_models", "keras_ports", "sources"),
        ("keras_conversion", "decompositions"),
        ("lowering",),
        ("formats",),
        ("optimization",),
        ("proof",),
        ("artifact_conversion", "publishing"),
        ("artifact_destination", "migration"),
        ("export_request",),
        ("export_pipeline",),
        ("api",),
        ("cli",),
    ),
    "loadtests": (
        ("checks", "confidence_intervals", "number_format", "system"),
        ("marked_block", "load"),
        ("users",),
        ("locustfile", "model_quality", "serving"),
        ("compare", "drift", "gate", "replay"),
        ("report",),
        ("loadtest",),
        ("cli",),
    ),
}
#: The highest layer of the gateway without a web framework.
CORE = "rollout"
#: What the exporters may know of the gateway.
EXPORTERS_MAY_IMPORT = (
    "modelport.gateway.types",
    "modelport.gateway.errors",
    "modelport.gateway.extras",
    "modelport.gateway.backend_registry",
    "modelport.gateway.extensions",
    "modelport.gateway.inference.audio_decoding",
    "modelport.gateway.inference.image_decoding",
    "modelport.gateway.recording.record",
    "modelport.gateway.repository",
    "modelport.gateway.runtime.checked_json",
    "modelport.gateway.runtime.child_process",
    "modelport.gateway.runtime.litert_outputs",
    "modelport.gateway.runtime.openvino_import",
    "modelport.gateway.runtime.progress",
    "modelport.gateway.server.trial_request",
    "modelport.gateway.cli.declared_options",
    "modelport.gateway.cli.errors",
    "modelport.gateway.cli.paths",
    "modelport.gateway.cli.tables",
    "modelport.gateway.upstream.connection_errors",
    "modelport.gateway.wire.raw_tensors",
)
#: Clients of other servers, and what they may know of the web besides the rest of the core.
CLIENTS = (
    "modelport.gateway.upstream",
    "modelport.gateway.backends.remote",
)
CLIENT_LIBRARIES = ("aiohttp",)
WEB = ("fastapi", "starlette", "uvicorn", "grpc", "aiohttp", "flask")


#: The folders at the top that are packages below ``modelport``.
PRODUCT = ("gateway", "exporters", "loadtests")


def modules(folder: str) -> dict[str, Path]:
    prefix = "modelport." if folder in PRODUCT else ""
    return {
        prefix
        + ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
        for path in sorted((ROOT / folder).rglob("*.py"))
    }


def product() -> dict[str, Path]:
    found = {f"modelport.{path.stem}": path for path in (ROOT / "modelport").glob("*.py")}
    for package in PRODUCT:
        found |= modules(package)
    return found


def is_module(name: str) -> bool:
    path = ROOT.joinpath(*name.removeprefix("modelport.").split("."))
    return path.is_dir() or path.with_suffix(".py").is_file()


class SourceNames(NamedTuple):
    """The names of one file.

    Attributes:
        imports: every module that it imports, lazily too, but not for type checkers alone.
        taken: line, module and name of all that it imports from modules.
        bound: what it defines, imports or assigns.
    """

    imports: set[str]
    taken: list[tuple[int, str, str]]
    bound: set[str]


@functools.cache
def names(path: Path) -> SourceNames:
    found = SourceNames(set(), [], set())
    gc.disable()  # a syntax tree has no cycles, and is gone before the next one is made
    try:
        _collect(ast.parse(path.read_text()), found, runs=True)
    finally:
        gc.enable()
    return found


def _collect(block: ast.AST, found: SourceNames, runs: bool) -> None:
    """Collect the names in the statements of ``block``; not those of ``if TYPE_CHECKING`` run."""
    for node in ast.iter_child_nodes(block):
        if isinstance(node, ast.Import):
            found.bound.update(alias.asname or alias.name for alias in node.names)
            if runs:
                found.imports.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.bound.update(alias.asname or alias.name for alias in node.names)
            found.taken.extend((node.lineno, node.module, alias.name) for alias in node.names)
            if runs:
                whole = {f"{node.module}.{alias.name}" for alias in node.names}
                submodules = {name for name in whole if is_module(name)}
                found.imports.update(
                    submodules if submodules == whole else {*submodules, node.module}
                )
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.bound.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign | ast.For | ast.withitem):
            found.bound.update(
                each.id
                for target in _targets(node)
                for each in ast.walk(target)
                if isinstance(each, ast.Name)
            )
        if isinstance(node, ast.stmt | ast.excepthandler | ast.match_case):
            checks_types = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
            _collect(node, found, runs and not checks_types)


def _targets(node: ast.Assign | ast.AnnAssign | ast.For | ast.withitem) -> list[ast.expr]:
    if isinstance(node, ast.Assign):
        return node.targets
    target = node.optional_vars if isinstance(node, ast.withitem) else node.target
    return [target] if target is not None else []


def imports(path: Path) -> set[str]:
    """Every module that ``path`` imports, lazily too, but not for type checkers alone."""
    return names(path).imports


def place(module: str) -> tuple[str, str, int] | None:
    """The package of a module, its folder there or its own name, and the layer of that."""
    package, _, rest = module.removeprefix("modelport.").partition(".")
    folder = rest.partition(".")[0]
    for number, names in enumerate(LAYERS.get(package, ())):
        if folder in names:
            return package, folder, number
    return None


def arrows_up(sources: dict[str, set[str]]) -> list[str]:
    """Imports from the same package that do not point to the same folder or a lower layer."""
    return [
        f"{module} imports {target}"
        for module, targets in sources.items()
        for target in targets
        if (mine := place(module)) is not None
        and (theirs := place(target)) is not None
        and mine[0] == theirs[0]
        and mine[1] != theirs[1]
        and theirs[2] >= mine[2]
    ]


@pytest.mark.parametrize("package", LAYERS)
def test_every_module_has_a_layer(package: str) -> None:
    assert [m for m in modules(package) if place(m) is None and m != f"modelport.{package}"] == []


@pytest.mark.parametrize("package", LAYERS)
def test_imports_point_downward_only(package: str) -> None:
    assert arrows_up({name: imports(path) for name, path in modules(package).items()}) == []


def test_an_arrow_that_points_up_or_aside_is_seen() -> None:
    for target in ("server.app", "errors"):
        assert arrows_up({"modelport.gateway.types": {f"modelport.gateway.{target}"}}) != []


def test_there_is_no_cycle_between_modules() -> None:
    known = product() | modules("benchmarks")
    graph = {
        name: {target for target in imports(path) if target in known} - {name}
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


def test_the_gateway_imports_no_exporter_and_no_load_test() -> None:
    for name, path in modules("gateway").items():
        wrong = [
            target
            for target in imports(path)
            if target.startswith(("modelport.exporters", "modelport.loadtests"))
        ]
        assert wrong == [], f"{name} imports {wrong}"


def test_the_contract_of_backends_is_short_and_imports_only_types() -> None:
    path = ROOT / "gateway" / "backends" / "base.py"
    assert len(path.read_text().splitlines()) < 100
    ours = {m for m in imports(path) if m.startswith("modelport.")}
    assert {m for m in ours if not m.startswith("modelport.gateway.types")} == set()


def test_the_exporters_know_only_types_errors_images_and_the_repository_of_the_gateway() -> None:
    for name, path in modules("exporters").items():
        for target in imports(path):
            if target.startswith("modelport.gateway."):
                assert target.startswith(EXPORTERS_MAY_IMPORT), f"{name} imports {target}"


def test_the_exporters_and_the_core_import_no_web_framework() -> None:
    highest = place(f"modelport.gateway.{CORE}")
    core = {
        name: path
        for name, path in modules("gateway").items()
        if (found := place(name)) is not None and highest is not None and found[2] <= highest[2]
    }
    for name, path in (modules("exporters") | core).items():
        allowed = CLIENT_LIBRARIES if name.startswith(CLIENTS) else ()
        for target in imports(path):
            root = target.split(".")[0]
            assert root not in WEB or root in allowed, f"{name} imports {target}"


def test_the_load_tests_know_nothing_of_the_gateways_inside() -> None:
    for name, path in (modules("loadtests") | modules("benchmarks")).items():
        inside = [
            target
            for target in imports(path)
            if target.startswith(("modelport.gateway", "modelport.exporters"))
            # How a command says what is wrong and what it is doing; the descriptors of backends;
            # the addresses of repositories; the readers of untrusted files and of recorded traffic;
            # child processes; the limits that a rollout shares; the client of a gateway's API of
            # rollouts; the messages for failures of connections.
            and not target.startswith(
                (
                    "modelport.gateway.cli.admin_client",
                    "modelport.gateway.cli.server_credentials",
                    "modelport.gateway.cli.errors",
                    "modelport.gateway.cli.paths",
                    "modelport.gateway.errors",
                    "modelport.gateway.extras",
                    "modelport.gateway.backend_registry",
                    "modelport.gateway.recording.record",
                    "modelport.gateway.repository.storage.location",
                    "modelport.gateway.repository.untrusted_files",
                    "modelport.gateway.repository.version_proof",
                    "modelport.gateway.runtime.checked_json",
                    "modelport.gateway.runtime.child_process",
                    "modelport.gateway.slo",
                    "modelport.gateway.upstream.connection_errors",
                    "modelport.gateway.upstream.tls_errors",
                    "modelport.gateway.runtime.progress",
                )
            )
        ]
        assert inside == [], f"{name} imports {inside}"


def test_the_product_imports_no_benchmark() -> None:
    """Imports inside functions count too: an installed ``modelport compare`` would miss them."""
    wrong = [
        f"{name} imports {target}"
        for name, path in product().items()
        for target in imports(path)
        if target.split(".")[0] == "benchmarks"
    ]
    assert wrong == []


@pytest.mark.parametrize(
    "module",
    [
        "modelport",
        "modelport.cli",
        "modelport.exporters.cli.export",
        "modelport.gateway.server.app",
    ],
)
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
        for _ in range(3):
            started = children_seconds()
            subprocess.run([sys.executable, *command], capture_output=True, check=True)
            times.append(children_seconds() - started)
        return min(times)

    def children_seconds() -> float:
        spent = resource.getrusage(resource.RUSAGE_CHILDREN)
        return spent.ru_utime + spent.ru_stime

    assert best("-m", "modelport", "--help") < 3 * best("-c", "import click")


def test_every_name_that_a_test_imports_from_this_project_exists() -> None:
    """Also in programs that only the slower verbs of the Makefile run; mypy checks the packages."""
    paths = modules("tests") | modules("benchmarks")
    for package in PRODUCT:
        paths |= modules(package)
    assert [
        f"{module}:{line}: {source} has no {name}"
        for module, path in paths.items()
        if module.startswith("tests.") and "inside" not in path.parts
        for line, source, name in names(path).taken
        if source in paths and f"{source}.{name}" not in paths
        if name not in names(paths[source]).bound
    ] == []
