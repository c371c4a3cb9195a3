"""Settings of every test: none depends on the CI system that runs it, nor on how long it takes."""

from __future__ import annotations

import functools
import gc
import os
import signal
import sys
from pathlib import Path
from typing import Any

import httpx
import hypothesis
import pytest

from modelport.gateway.repository.artifact_checks import trial_load
from modelport.gateway.runtime import progress
from tests.logs import forget_logs

os.environ.pop("GITHUB_ACTIONS", None)  # errors would be annotated as well
# A shell may start a background job with these ignored, and so would be every program of a test.
for _number, _action in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGQUIT, signal.SIG_DFL),
    (signal.SIGHUP, signal.SIG_DFL),
):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, _action)
progress.LINE_SECONDS = 3600.0
# Several workers share two cores, and small models gain nothing from a second thread.
os.environ["OMP_NUM_THREADS"] = "1"
# Commands of the exporters set it, and a gateway is forked only in an unchanged environment.
os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
# Hundreds of servers start: without compiled modules each takes a third longer.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# Each client reads the certificates of all authorities, though few tests ask by TLS.
httpx._transports.default.create_ssl_context = functools.cache(httpx.create_ssl_context)
# Five seconds are too few for an answer while other tests keep the machine busy.
_patience = httpx._config.DEFAULT_TIMEOUT_CONFIG
_patience.connect = _patience.read = _patience.write = _patience.pool = 60.0
# Hypothesis fails tests that are slow for the same reason, and draws the same cases on a CI system.
hypothesis.settings.register_profile(
    "patient", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("patient")

#: Folders whose files share what takes long to make: one worker runs all of them.
TOGETHER = ("tests/exporters/lowering",)

#: Folders whose tests convert models. The first half of the workers begins with them, so that the
#: others need not import what conversions need, which takes ten seconds.
CONVERSIONS = ("tests/exporters", "tests/sweep", "tests/gateway/backends/embedded")

#: The files that take longest in either suite, longest first: started first, so that no worker ends
#: long after the others. The rest fills in.
LONG = [
    Path(__file__).parent / f"{name}.py"
    for name in (
        "exporters/lowering/test_mutations",
        "sweep/test_sweep",
        "exporters/test_export_folder_fuzz",
        "attacks/test_unread",
        "gateway/rollout/test_names_keep_answering",
        "test_demo",
        "docs/test_blocks",
        "exporters/test_export_interrupted",
        "test_editable",
        "faults/test_shutdown",
        "gateway/server/workers/test_processes",
        "exporters/test_export_huggingface_tasks",
        "exporters/test_export_formats",
        "exporters/test_export_cli",
        "exporters/test_export_convert",
        "exporters/test_export_verify",
        "loadtests/test_run",
        "gateway/rollout/test_rollout_command",
        "faults/test_upstream",
        "exporters/test_export_precision",
        "exporters/test_export_lora",
        "exporters/test_export_savedmodel",
        "exporters/test_export_trees",
        "exporters/test_export_models",
        "exporters/test_export_keras_ports",
        "exporters/test_export_traps",
        "exporters/test_export_served_once",
        "exporters/test_export_decorated",
        "gateway/backends/embedded/test_runtimes",
        "faults/test_overload",
        "gateway/access/test_access",
        "gateway/repository/storage/test_served",
        "api/test_servers",
        "loadtests/test_secured_servers",
        "loadtests/test_gate_retrained",
        "exporters/test_export_optimize",
        "exporters/test_export_pt2",
        "exporters/test_export_inspect",
        "exporters/test_export_tflite",
        "exporters/test_export_datatypes",
        "gateway/rollout/test_gateways_at_random",
        "faults/test_chaos",
        "attacks/test_connections",
        "attacks/test_cost",
        "attacks/test_trial",
        "attacks/test_holds",
        "attacks/test_fuzz",
        "docs/test_references",
        "faults/test_batching_served",
        "faults/test_readiness",
        "faults/test_routes",
        "faults/test_versions",
        "faults/test_damaged_artifacts",
        "loadtests/test_loadtest_cli",
        "loadtests/test_gate_cli",
        "loadtests/test_compare_servers",
    )
]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Keep the tests of a file together, as ``--dist loadfile`` does, and those of some folders."""
    from xdist.scheduler import LoadFileScheduling

    class FolderScheduling(LoadFileScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            path = str(super()._split_scope(nodeid))
            return next((folder for folder in TOGETHER if path.startswith(f"{folder}/")), path)

        def _assign_work_unit(self, node: Any) -> None:
            converts = list(self.assigned_work).index(node) < len(self.assigned_work) // 2
            scopes = (s for s in self.workqueue if s.startswith(CONVERSIONS) is converts)
            if (scope := next(scopes, None)) is not None:
                self.workqueue.move_to_end(scope, last=False)
            super()._assign_work_unit(node)

    return FolderScheduling(config, log) if config.getvalue("dist") == "loadfile" else None


# Thousands of tests and all of torch live until the end. The collector looks at none of it again.
gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.set_threshold(10_000)  # few tests leave cycles behind
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = [path for path in LONG if not path.exists()]
    assert not missing, missing
    turns = {path: turn for turn, path in enumerate(LONG)}
    items.sort(key=lambda item: turns.get(item.path, len(LONG)))


#: Each trial is a process that imports torch, and most tests are not about it.
_run = trial_load.run
pytest.MonkeyPatch().setattr(trial_load, "run", lambda *_, **__: None)


@pytest.fixture(scope="module", autouse=True)
def _unconfigured_logs() -> None:
    """Forget how another file's tests configured logs."""
    forget_logs()


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of all processes that run tests at the same time."""
    folder = tmp_path_factory.getbasetemp()
    return folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder


@pytest.fixture
def trials(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Trial loads take place, as outside of tests; the result is the folder of what passed."""
    monkeypatch.setattr(trial_load, "run", _run)
    monkeypatch.setattr(trial_load, "_failures", {})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "modelport" / "trials"
