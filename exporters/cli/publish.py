"""``modelport publish``: copy a verified version to another repository, bit for bit."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from modelport.exporters.options import MODEL_VERSION, PUBLIC_KEY, SIGN_KEY
from modelport.exporters.publishing import contract
from modelport.exporters.publishing.python_environment import ENVIRONMENTS, OFFLINE, WHEELS
from modelport.exporters.runtime.interruption import InterruptibleCommand
from modelport.gateway.cli.paths import ExistingRepository, WrittenRepository
from modelport.gateway.errors import UsageError
from modelport.gateway.repository.storage.location import Location

if TYPE_CHECKING:
    from modelport.exporters.proof.verify import Checked
    from modelport.gateway.repository.config import ModelConfig


@click.command(cls=InterruptibleCommand)
@click.argument("path", type=ExistingRepository())
@click.option(
    "--repository",
    type=WrittenRepository(),
    required=True,
    help="The model repository to publish into: a folder, or s3://, gs:// or az://BUCKET/PREFIX.",
)
@MODEL_VERSION.named("model_version", str)
@PUBLIC_KEY.named("public_key", Sequence[Path])
@SIGN_KEY.named("sign_key", Path)
@ENVIRONMENTS.named("python_environments", Path)
@WHEELS.named("wheels", Sequence[Path])
@OFFLINE.named("offline", bool)
def publish_command(
    path: Path | Location,
    repository: Path | Location,
    model_version: str,
    public_key: tuple[Path, ...],
    sign_key: Path | None,
    python_environments: Path | None,
    wheels: tuple[Path, ...],
    offline: bool,
) -> None:
    """Copy a published version, or the newest version of a model, to another repository.

    DIR is the folder of the version or of the model; URL is s3://, gs:// or
    az://BUCKET/PREFIX/MODEL[/VERSION].

    The files are published unchanged if they match their manifest and their certificate. A
    model that is new in the repository gets the configuration, labels and warm-up samples too.

    A Python model (model.py) or a pipeline (pipeline.toml) of your own gets a certificate of its
    files, and a signature with --sign-key. The environment that a Python model's lock file pins is
    installed on this machine, as by 'modelport install'.

    Exit codes: 0 done, 2 usage, 5 the files were changed.
    """
    from modelport.exporters.proof import verify
    from modelport.exporters.publishing import (
        download,
        publish,
        python_environment,
        written_version,
    )
    from modelport.exporters.runtime.file_errors import writing_to
    from modelport.gateway.backend_registry import PYTHON
    from modelport.gateway.repository import config, lock_file, manifest, signing_keys

    keys = [signing_keys.load_public_key(key) for key in public_key]
    key = None if sign_key is None else signing_keys.load_private_key(sign_key)
    with contextlib.ExitStack() as stack:
        version = verify.find_version(stack.enter_context(download.local(path)))
        written = written_version.uncertified(version)
        if written is None and key is not None:
            raise UsageError(
                f"--sign-key signs Python models and pipelines, and '{version.parent.name}' is "
                "neither, or has a certificate; sign it with 'modelport export --sign-key'"
            )
        if written is None:
            wanted = _published_config(verify.check(version, keys))
        elif keys:
            raise UsageError(
                f"'{version.parent.name}' is not signed, so --public-key cannot verify it; sign it "
                "with --sign-key"
            )
        else:
            wanted = written.config
        installed = None
        if wanted.backend == PYTHON.backend and lock_file.PARAMETER not in wanted.parameters:
            given = python_environment.InstallSettings(python_environments, wheels, offline)
            installed = python_environment.install(version, given)
        number = contract.parse_version(model_version)
        stack.enter_context(writing_to(repository, "choose another --repository"))
        staged = stack.enter_context(publish.staging(repository))
        if written is not None:
            written_version.stage(version, staged, written, key)
        else:
            shutil.copytree(version, staged, dirs_exist_ok=True)
        for each in version.parent.iterdir():
            if each.name == config.WARMUP and each.is_dir():
                shutil.copytree(each, staged.parent / each.name)
            elif each.is_file():
                shutil.copy2(each, staged.parent / each.name)
        if written is None:
            manifest.verify(staged)  # verify the copy
        done = publish.publish(staged, repository, wanted, number)
    lines = [("model", done.name), ("version", done.version), ("path", done.path)]
    if installed is not None:
        lines.append(("python", installed))
    for label, value in lines:
        click.echo(f"{label:<10} {value}")


def _published_config(checked: Checked) -> ModelConfig:
    from modelport.gateway.repository import config, untrusted_files

    try:
        text = untrusted_files.read_text(
            checked.path.parent / config.FILENAME, untrusted_files.MAX_CONFIG_BYTES
        )
    except (OSError, UnicodeDecodeError):
        raise UsageError(
            f"'{checked.model}' has no {config.FILENAME} to publish beside the version"
        ) from None
    wanted = config.parse(text)
    wanted.name = checked.model
    return wanted
