"""``modelport install``: the environments of Python models on this machine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from modelport.exporters.publishing.python_environment import ENVIRONMENTS, OFFLINE, WHEELS
from modelport.exporters.runtime.interruption import InterruptibleCommand
from modelport.gateway.cli.paths import ExistingRepository
from modelport.gateway.errors import UsageError
from modelport.gateway.repository.storage.location import Location


@click.command(cls=InterruptibleCommand)
@click.argument("path", type=ExistingRepository())
@ENVIRONMENTS.named("python_environments", Path)
@WHEELS.named("wheels", Sequence[Path])
@OFFLINE.named("offline", bool)
def install(
    path: Path | Location,
    python_environments: Path | None,
    wheels: tuple[Path, ...],
    offline: bool,
) -> None:
    """Install the environments that the lock files of Python models pin.

    DIR is the folder of a version, of a model or of a repository; URL is s3://, gs:// or
    az://BUCKET/PREFIX. A lock file lies in the version's folder: requirements.lock, uv.lock with
    its pyproject.toml, or a requirements.txt with hashes.

    uv installs, from its cache, its indexes or --wheels; hashes are required, and nothing is built.
    'modelport publish' does the same on the machine that publishes.
    """
    from modelport.exporters.publishing import download, python_environment
    from modelport.gateway.repository import manifest

    settings = python_environment.InstallSettings(python_environments, wheels, offline)
    with download.whole(path) as folder:
        versions = _locked_versions(folder)
        if not versions:
            raise UsageError(f"'{path}' has no version of a Python model with a lock file")
        for version in versions:
            manifest.verify(version)
            place = python_environment.install(version, settings)
            click.echo(f"{version.parent.name}/{version.name}  {place}")


def _locked_versions(folder: Path) -> list[Path]:
    """The versions with a lock file of a repository, a model, or the one in ``folder``."""
    from modelport.gateway.repository import lock_file
    from modelport.gateway.repository.scan import VERSION_NAME

    folder = folder.absolute()
    for around in ([folder], folder.glob("*"), folder.glob("*/*")):
        found = [
            each
            for each in sorted(around)
            if VERSION_NAME.match(each.name) and any(each.glob("*.py"))
        ]
        if found:
            return [each for each in found if lock_file.find(each) is not None]
    return []
