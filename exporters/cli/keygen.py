"""``modelport keygen``: a private key that signs exports, and the public key that verifies them."""

from __future__ import annotations

import os
from pathlib import Path

import click

from modelport.exporters.runtime.file_errors import writing_to
from modelport.exporters.runtime.interruption import InterruptibleCommand
from modelport.gateway.errors import UsageError
from modelport.gateway.repository.signing_keys import PrivateKey


@click.command(cls=InterruptibleCommand)
@click.option(
    "--output",
    "-o",
    metavar="PREFIX",
    default="modelport",
    show_default=True,
    help="Prefix of the files PREFIX.key and PREFIX.pub.",
)
def keygen(output: str) -> None:
    """Make a pair of Ed25519 keys: sign with PREFIX.key, verify with PREFIX.pub.

    \b
    modelport export ... --sign-key PREFIX.key
    modelport serve ... --require-signature PREFIX.pub

    The private key is not encrypted; only its owner may read the file. Nothing is overwritten.
    """
    if Path(output).name in ("", "..") or output.endswith(os.sep) or Path(output).is_dir():
        raise UsageError(f"--output '{output}' is a folder; give a prefix, such as keys/release")
    private, public = Path(f"{output}.key"), Path(f"{output}.pub")
    key = PrivateKey.generate()
    with writing_to(private.parent, "choose another --output"):
        _create(private, key.pem(), 0o600)
        try:
            _create(public, key.public.pem(), 0o644)
        except BaseException:
            private.unlink()
            raise
    click.echo(f"private key  {click.format_filename(private)}")
    click.echo(f"public key   {click.format_filename(public)}")
    click.echo(f"fingerprint  {key.public.fingerprint}")


def _create(path: Path, content: bytes, mode: int) -> None:
    """Write a new file.

    Raises:
        UsageError: the file exists.
    """
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    except FileExistsError as error:
        raise UsageError(
            f"--output: '{path}' exists and is not overwritten; give another prefix"
        ) from error
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
    except OSError:
        path.unlink()
        raise
