"""``modelport certify``: prove an ONNX file from elsewhere, and publish it with a certificate.

This module imports neither torch nor a runtime, which keeps ``--help`` fast.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from modelport.exporters import api
from modelport.exporters.cli import export as export_command
from modelport.exporters.options import ExportOptions
from modelport.exporters.runtime.interruption import InterruptibleCommand
from modelport.gateway.cli.declared_options import declared_by
from modelport.gateway.cli.paths import EXISTING
from modelport.gateway.runtime.progress import progress_bar

#: Options of ``export`` that choose a conversion.
_OF_CONVERSION = frozenset(
    {
        *("format", "opset", "name_template", "optimize", "calibrate", "calibration_method"),
        *("per_channel", "block_size"),
    }
)


@click.command(cls=InterruptibleCommand)
@click.argument("artifact", type=EXISTING)
@click.option(
    "--against",
    type=EXISTING,
    required=True,
    metavar="CHECKPOINT|FILE.npz",
    help="The checkpoint that the file was exported from, as for 'export' (with --model, --input "
    "...); or recorded inputs and outputs by name, one row per sample.",
)
@declared_by(ExportOptions, but=_OF_CONVERSION)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@click.option("--quiet", "-q", is_flag=True, help="Do not show progress.")
def certify(artifact: Path, against: Path, **options: Any) -> None:
    """Prove that the ONNX file ARTIFACT computes what a checkpoint or recorded answers say, and
    publish it with a certificate, as 'serve --require-manifest' and '--require-signature' need.

    --dtype or --quantize states the precision of the file, which sets the accepted differences.

    Exit codes: 0 done, 2 usage, 3 parity, 4 unsupported, 5 integrity.
    """
    arguments, as_json, quiet = export_command.arguments(options)
    with progress_bar(quiet) as progress:
        progress("starting", 0, 0)
        results = api.certify(artifact, against, **arguments, progress=progress)
    export_command.show(results, as_json)
