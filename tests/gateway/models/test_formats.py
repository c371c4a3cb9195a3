"""A version 2 that is no good leaves version 1 in service, whatever the format it is in."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from modelport.gateway.models.manager import ModelManager
from modelport.gateway.models.model import VersionState
from modelport.gateway.repository import manifest
from modelport.gateway.settings import ModelControlMode, Settings
from modelport.gateway.types import NO_DEADLINE, InferRequest, finished
from tests.gateway.backends.embedded import runtimes
from tests.gateway.models.managers import refresh
from tests.thorough import sampled

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.*is deprecated:DeprecationWarning")


@pytest.fixture(scope="module", params=runtimes.QUICK)
def published(request: pytest.FixtureRequest, shared_folder: Path) -> Path:
    """Version 1 of a small model, with a manifest."""
    return runtimes.published(shared_folder, "vit", request.param)


def largest(version: Path) -> Path:
    """The graph of a SavedModel, or else what holds most."""
    graphs = list(version.rglob("saved_model.pb"))
    files = [path for path in version.rglob("*") if path.is_file()]
    return graphs[0] if graphs else max(files, key=lambda path: path.stat().st_size)


def truncated(version: Path) -> None:
    file = largest(version)
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def garbage(version: Path) -> None:
    file = largest(version)
    file.write_bytes(b"\xa5" * file.stat().st_size)


def empty(version: Path) -> None:
    shutil.rmtree(version)
    version.mkdir()


DAMAGE = {
    "truncated": truncated,
    "garbage": garbage,
    "empty": empty,
}
QUICK = ("truncated",)


@pytest.mark.parametrize("damage", sampled(DAMAGE, *QUICK))
async def test_a_damaged_version_2_leaves_version_1_ready_and_the_index_says_why(
    published: Path, damage: str, tmp_path: Path
) -> None:
    root = tmp_path / "repository"
    name = published.name
    shutil.copytree(published, root / name)
    manager = ModelManager(Settings((root,), ModelControlMode.POLL))
    await manager.start()
    assert manager.ready
    second = root / name / "2"
    shutil.copytree(root / name / "1", second)
    DAMAGE[damage](second)
    (second / manifest.FILENAME).unlink(missing_ok=True)  # it would be found out by its hash
    for _ in range(2):  # a folder without a manifest is looked at twice
        await refresh(manager)
    one, two = manager.states(name)
    assert one == (1, VersionState.READY, "")
    number, state, reason = two
    assert (number, state) == (2, VersionState.UNAVAILABLE)
    assert reason
    assert str(tmp_path) not in reason
    assert manager.ready
    case = runtimes.cases(runtimes.source("vit"))[0]
    served = manager.get(name)
    request = InferRequest(name, runtimes.tensors(case.inputs, served.signature))
    response = await finished(served.backend(request, NO_DEADLINE))
    assert len(response.outputs) == len(case.outputs)
    await manager.stop()
