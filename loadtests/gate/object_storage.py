"""Download of versions from object storage before measuring.

``modelport publish`` copies a version to a folder with the credentials it finds, if its files match
their manifest and certificate. An incomplete version is never visible.
"""

from __future__ import annotations

from pathlib import Path

from modelport.gateway.errors import UsageError
from modelport.loadtests.gate.baseline_and_candidate import Published, Side, Stored
from modelport.loadtests.gate.paired_rounds import SideFailed
from modelport.loadtests.serving.gateway import newest_version
from modelport.loadtests.system.modelport_command import (
    INTEGRITY,
    INTERRUPTED,
    TIMED_OUT,
    Failed,
    modelport,
)


class NotAsPublished(Exception):
    """Files do not match their manifest or certificate; the message names one."""


def fetched(side: Side | Stored, folder: Path, within_seconds: float | None = None) -> Side:
    """``side``, or its copy in the new folder ``folder``.

    Raises:
        NotAsPublished: its files were changed.
        SideFailed: it took longer than ``within_seconds``.
        UsageError: there is no such version, or the storage does not respond.
    """
    if not isinstance(side, Stored):
        return side
    try:
        modelport(["publish", side.given, "--repository", str(folder)], within_seconds)
    except Failed as error:
        if error.status == INTERRUPTED:
            raise KeyboardInterrupt from error
        if error.status == INTEGRITY:
            raise NotAsPublished(str(error)) from error
        if error.status == TIMED_OUT:
            why = f"fetching the {folder.name} took all of --max-duration; increase it"
            raise SideFailed(why, is_candidate=False) from error
        # Without the given URL, which may hold a secret.
        raise UsageError(f"the {folder.name} cannot be fetched: {error}") from error
    (model,) = (path for path in folder.iterdir() if not path.name.startswith("."))
    return Published(side.given, model, newest_version(model))
