"""``modelport label`` and ``modelport rollback``: choose the served version of a repository."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import click

from modelport.gateway.cli.paths import ExistingRepository
from modelport.gateway.errors import InvalidArgument, NotFound, suggestion
from modelport.gateway.repository.scan import is_model_name
from modelport.gateway.repository.storage.location import Location
from modelport.gateway.repository.version_choice import VersionChoice

_repository = click.option(
    "--model-repository",
    "--repository",
    "repository",
    type=ExistingRepository(),
    default=Path("model_repository"),
    show_default=True,
    help="The model repository: a folder, or s3://, gs:// or az://BUCKET/PREFIX.",
)
_FOLLOWS = (
    "A gateway with --model-control-mode poll applies this by itself; with explicit, run: "
    "modelport load {}"
)


@click.command()
@click.argument("model")
@click.argument("label", required=False, default="")
@click.argument("version", required=False, type=click.IntRange(min=1))
@_repository
@click.option("--remove", is_flag=True, help="Remove the label.")
def label(
    model: str, label: str, version: int | None, repository: Path | Location, remove: bool
) -> None:
    """Assign LABEL to VERSION of MODEL; without them, list the labels and versions.

    Requests use labels in TensorFlow Serving's API. A label moves once its version is served.
    """
    choice = _choice(repository, model)
    if not label:
        _list(choice)
        return
    if (version is None) != remove:
        raise click.UsageError("give a LABEL and its VERSION, or a LABEL and --remove")
    choice.label(label, version)
    click.echo(f"{model}: {label} " + ("is removed" if remove else f"is version {version}"))
    if version is not None and version not in choice.allowed():
        click.echo(
            f"Version {version} is not served yet: the version_policy of {model} serves "
            f"{', '.join(map(str, choice.allowed()))}."
        )
    click.echo(_FOLLOWS.format(model))


@click.command()
@click.argument("model")
@_repository
@click.option(
    "--model-version",
    type=click.IntRange(min=1),
    help="Version to serve.  [default: the previous one]",
)
@click.option("--label", "name", default="", help="Move only this label, not the served version.")
@click.option("--latest", is_flag=True, help="Undo a rollback: serve the newest version again.")
def rollback(
    model: str, repository: Path | Location, model_version: int | None, name: str, latest: bool
) -> None:
    """Go back to the version of MODEL before the served one, or before the one of --label.

    The configuration then allows only that version and those with a label: versions published later
    are not served until 'modelport rollback MODEL --latest'.
    """
    choice = _choice(repository, model)
    if latest:
        if name or model_version:
            raise click.UsageError("--latest takes neither --label nor --model-version")
        choice.serve_latest()
        click.echo(f"{model}: version {choice.versions[-1]}, the newest, is served")
        for each, named in choice.labels.items():
            if named != str(choice.versions[-1]):
                click.echo(f"Label {each} is version {named}, which is not served: move the label.")
    elif name:
        if name not in choice.labels:
            raise NotFound(
                f"model '{model}' has no label '{name}'" + suggestion(name, choice.labels, "; ")
            )
        named = choice.labels[name]
        choice.label(name, model_version or choice.before(int(named)))
        click.echo(f"{model}: {name} is version {choice.labels[name]}, was {named}")
    else:
        before = choice.default()
        version = model_version or choice.before(before)
        choice.serve_only(version)
        click.echo(f"{model}: version {version} is served, was {before}")
    click.echo(_FOLLOWS.format(model))


def _choice(repository: Path | Location, model: str) -> VersionChoice:
    if isinstance(repository, Path) and not repository.is_dir():
        raise NotFound(f"--model-repository '{repository}' is not a folder")
    if not is_model_name(model):
        raise InvalidArgument(f"'{model}' is not a valid model name")
    choice = VersionChoice.find(repository, model)
    if choice is None:
        known = filter(is_model_name, _names(repository))
        raise NotFound(f"'{repository}' holds no model '{model}'" + suggestion(model, known, "; "))
    return choice


def _names(repository: Path | Location) -> Iterable[str]:
    """The names of the folders in ``repository``."""
    if isinstance(repository, Path):
        return [path.name for path in repository.iterdir() if path.is_dir()]
    from modelport.gateway.repository.storage.objects import ObjectStore  # slow imports

    return {key.partition("/")[0] for key in ObjectStore(repository).listing() if "/" in key}


def _list(choice: VersionChoice) -> None:
    labels, allowed = choice.labels, choice.allowed()
    for version in choice.versions:
        names = [name for name, named in labels.items() if named == str(version)]
        served = " (served)" if version in allowed else ""
        click.echo(f"{choice.name} version {version}{served}: {', '.join(names) or 'no label'}")
