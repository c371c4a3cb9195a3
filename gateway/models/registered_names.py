"""Models of the repository that are registered under other names, as TorchServe's clients do.

Each name has a ``ModelRecord`` of its own, whose entry is that of the ``source``. The record exists
until the model is unloaded, and the gateway's next start forgets it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

from modelport.gateway.errors import AlreadyExists, InvalidArgument, NotFound
from modelport.gateway.models.model import ModelRecord
from modelport.gateway.repository.scan import ModelEntry, is_model_name


def check_name(name: str) -> None:
    """Raises ``InvalidArgument`` if no model can have the name."""
    if not is_model_name(name):
        raise InvalidArgument(
            f"'{name[:64]}' cannot be a model's name; it begins with a dot, is too long, or has a "
            "slash, a backslash or unprintable characters"
        )


def register(name: str, source: str, models: Mapping[str, ModelRecord]) -> ModelEntry | None:
    """The entry of the model ``source`` under the new ``name``; None: it has that name already.

    Raises:
        InvalidArgument: no model can have the name, or another server runs the source.
        NotFound: the repository has no such source.
        AlreadyExists: another model has the name, or the same one without changes.
    """
    check_name(name)
    model, known = models.get(source), models.get(name)
    if model is None or model.entry.source:  # the repository has no name that was registered
        raise NotFound(f"failed to load '{source}', failed to poll from model repository")
    if known is not None and not known.entry.source:
        raise AlreadyExists(
            f"the name '{name}' is that of a model of the repository; choose another name"
        )
    if known is not None and known.entry.source != source:
        raise AlreadyExists(
            f"the name '{name}' is taken by another model; unregister that, or choose another name"
        )
    if known is not None and known.reconciled in (None, known.entry) and not known.withheld:
        version = known.default.number if known.default else max(known.entry.versions, default=0)
        raise AlreadyExists(f"Model version {version} is already registered for model {name}")
    if model.route is not None:
        raise InvalidArgument(
            f"another server runs the model '{source}'; give it the name '{name}' by a table "
            f'[models.{name}] with model = "{source}" in the file of --routes'
        )
    return model.entry.registered_as(name) if known is None else None


def check_folder(
    name: str, folder: Path, models: Collection[str], folders: Mapping[str, Path]
) -> None:
    """Check that a model in ``folder``, outside of the repositories, may have the name.

    Args:
        folders: those of other such models, loaded or about to be.

    Raises:
        InvalidArgument: no model can have the name.
        AlreadyExists: a model has it.
    """
    check_name(name)
    if name in models or name in folders:
        raise AlreadyExists(f"model '{name}' is loaded already; unload it first")
    if folder in folders.values():
        raise AlreadyExists(
            f"the model in '{folder}' is loaded under another name; unload it first"
        )


def check_replaced(
    name: str, models: Mapping[str, ModelRecord], folders: Mapping[str, Path]
) -> Path | None:
    """Check that files sent in a request may replace those of the model ``name``, if there is one.

    Returns:
        Its folder, if it is outside of the repositories.

    Raises:
        AlreadyExists: the name is registered for another model.
        InvalidArgument: another server runs the model.
    """
    model = models.get(name)
    if model is not None and model.route is not None:
        raise InvalidArgument(
            f"failed to load '{name}': another server runs the model; choose another name"
        )
    if model is not None and model.entry.source and not model.entry.source.startswith("/"):
        raise AlreadyExists(
            f"the name '{name}' is that of a registered model; unregister it, or choose another"
        )
    return folders.get(name)


def entries(
    found: Mapping[str, ModelEntry], models: Mapping[str, ModelRecord]
) -> dict[str, ModelEntry]:
    """The entries of all registered names after a scan that ``found`` their sources."""
    sources = {name: model.entry.source for name, model in models.items()}
    return {
        name: found[source].registered_as(name)
        for name, source in sources.items()
        if source and source in found
    }
