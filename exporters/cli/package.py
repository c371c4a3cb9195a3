"""``modelport package``: package published models for TorchServe, TensorFlow Serving and Triton.

This module imports no runtime, which keeps ``--help`` fast.
"""

from __future__ import annotations

from pathlib import Path

import click

from modelport.exporters.packaging import SERVERS
from modelport.exporters.runtime.interruption import InterruptibleCommand
from modelport.gateway.cli.paths import ExistingRepository, WrittenPath
from modelport.gateway.errors import UsageError
from modelport.gateway.extras import missing_extra
from modelport.gateway.repository.storage.location import Location
from modelport.gateway.runtime.progress import progress_bar


@click.command("package", cls=InterruptibleCommand)
@click.argument("path", type=ExistingRepository())
@click.option(
    "--for", "server", required=True, type=click.Choice(list(SERVERS)), help="The server."
)
@click.option(
    "-o",
    "--output",
    required=True,
    type=WrittenPath(),
    help="The package: a .mar file for torchserve, else a folder. Never overwritten.",
)
@click.option(
    "--base-path",
    metavar="PATH",
    help="For tfserving: the folder's path on the server.  [default: --output]",
)
def package_command(
    path: Path | Location, server: str, output: Path, base_path: str | None
) -> None:
    """Package a published version, model or repository at PATH for another server.

    PATH is a folder, or s3://, gs:// or az://BUCKET/PREFIX.

    torchserve takes TorchScript, one version; tfserving takes SavedModels; triton takes ONNX,
    TorchScript, SavedModels and OpenVINO IR. Every version is checked against its manifest first.

    Exit codes: 0 done, 2 usage, 4 a format that the server does not load, 5 integrity.
    """
    if base_path is not None and server != "tfserving":
        raise UsageError("--base-path is for --for tfserving only")
    if base_path is not None and not (base_path.startswith("/") or "://" in base_path):
        raise UsageError(f"--base-path '{base_path}' must be absolute, such as /models")
    with progress_bar() as progress:
        progress("packaging", 0, 0)
        try:
            from modelport.exporters.packaging.package import package, size_of
            from modelport.exporters.publishing import download

            with download.whole(path) as folder:
                result = package(folder, server, output, base_path)
        except ImportError as error:
            raise missing_extra(error) from error
    for name, versions in result.models.items():
        click.echo(f"{'model':<10} {name}, version {', '.join(map(str, versions))}")
    for reason in result.left_out.values():
        click.echo(f"{'left out':<10} {reason}")
    click.echo(f"{'path':<10} {result.path}")
    click.echo(f"{'size':<10} {size_of(result.path) / 1e6:.2f} MB")
