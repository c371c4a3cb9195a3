"""Versions in object storage, fetched before anything is measured.

``modelport publish`` copies one, with the credentials that it finds, into a folder, if its files
are what its manifest and certificate say; what is under way there is never seen in part.
"""

from __future__ import annotations

from pathlib import Path

from modelport.gateway.cli.errors import UsageError
from modelport.loadtests.command import INTEGRITY, INTERRUPTED, TIMED_OUT, Failed, modelport
from modelport.loadtests.gate.paired_rounds import Lost
from modelport.loadtests.gate.sides import Published, Side, Stored
from modelport.loadtests.serving.gateway import newest_version


class NotAsPublished(Exception):
    """The files there are not those of manifest and certificate; the message names one."""


def fetched(side: Side | Stored, folder: Path, within_seconds: float | None = None) -> Side:
    """``side``, or its copy in ``folder``, which does not exist yet and is named for it.

    Raises:
        NotAsPublished: see there.
        Lost: it took longer than ``within_seconds``.
        UsageError: there is no such version, or the storage does not answer.
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
            why = f"fetching the {folder.name} took all of --max-duration; give it longer"
            raise Lost(why, is_candidate=False) from error
        # Not what was given: a refused URL may hold a secret.
        raise UsageError(f"the {folder.name} cannot be fetched: {error}") from error
    (model,) = (path for path in folder.iterdir() if not path.name.startswith("."))
    return Published(side.given, model, newest_version(model))
