"""``modelport verify``: check a published version, or repeat its proof.

This module imports neither torch nor a runtime, which keeps ``--help`` fast.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from modelport.exporters import api
from modelport.exporters.cli.export import optimization_rows
from modelport.exporters.options import VerifyOptions
from modelport.exporters.runtime.interruption import InterruptibleCommand
from modelport.gateway.cli.declared_options import declared_by
from modelport.gateway.cli.paths import ExistingRepository
from modelport.gateway.repository.storage.location import Location
from modelport.gateway.runtime.progress import progress_bar

if TYPE_CHECKING:
    from modelport.exporters.proof.verify import Checked, Proven


@click.command(cls=InterruptibleCommand)
@click.argument("path", type=ExistingRepository())
@declared_by(VerifyOptions)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@click.option("--quiet", "-q", is_flag=True, help="Do not show progress.")
def verify(path: Path | Location, as_json: bool, quiet: bool, **given: Any) -> None:
    """Check a published version, or the newest version of a model.

    DIR is the folder of the version or of the model; URL is s3://, gs:// or
    az://BUCKET/PREFIX/MODEL[/VERSION].

    Checks the files first: manifest, certificate, signature. Then repeats the proof against the
    checkpoint, with the certificate's seed, samples and tolerances; this runs the artifact.
    An artifact that only computes is safe to run. Any other artifact runs only if it is signed
    with a --public-key, or with --trust.

    Exit codes: 0 the proof holds, 2 usage, 3 the proof fails, 4 unsupported, 5 the files were
    changed.
    """
    with progress_bar(quiet) as progress:
        progress("checking", 0, 0)
        found = api.verify(path, progress=progress, **given)
    checked, proven = found.checked, found.proven
    if as_json:
        click.echo(json.dumps(_document(checked, proven), indent=2))
    else:
        _print(checked, proven, str(path) if isinstance(path, Location) else str(checked.path))


def _document(checked: Checked, proven: Proven | None) -> dict[str, Any]:
    artifact = checked.certificate.document["artifact"]
    document: dict[str, Any] = {
        "model": checked.model,
        "version": checked.number,
        "format": artifact.get("format"),
        "files": len(checked.certificate.files),
        "size_bytes": checked.certificate.size_bytes,
        "signature": checked.signer and {"key": checked.signer, "verified": checked.trusted},
        "proof": None,
    }
    if proven is not None:
        claim, report = proven.claim, proven.report
        document["proof"] = {
            "precision": claim.target.precision,
            "seed": report.seed,
            "samples": report.samples,
            "edge_samples": report.edge_samples,
            "tolerance": {"atol": report.atol, "rtol": report.rtol},
            "max_abs_errors": {
                name: {"certified": claim.max_abs_errors.get(name), "now": output.max_abs_error}
                for name, output in report.outputs.items()
            },
            "agreement": {"certified": claim.agreement, "now": report.agreement},
            "optimization": claim.optimization and dataclasses.asdict(claim.optimization),
        }
    return document


def _print(checked: Checked, proven: Proven | None, where: str) -> None:
    document = _document(checked, proven)
    signature = "none"
    if checked.signer is not None:
        verified = "verified" if checked.trusted else "not verified (give --public-key)"
        signature = f"{verified}: key {checked.signer}"
    rows = {
        "model": checked.model,
        "version": f"{checked.number} ({click.format_filename(where)})",
        "artifact": f"{document['format']}, {document['size_bytes'] / 1e6:.2f} MB",
        "files": f"{document['files']}, as in manifest and certificate",
        "signature": signature,
    }
    if proven is not None:
        report = proven.report
        rows["proof"] = (
            f"holds in {proven.claim.target.precision}, {report.samples + report.edge_samples} "
            f"samples, seed {report.seed}"
        )
        rows["held to"] = f"{report.atol:g} + {report.rtol:g} * |reference|"
        if report.bounds is not None:
            rows["held to"] = (
                f"agreement {report.bounds.agreement:.2%}"
                if report.decision
                else f"relative error {report.bounds.relative_error:.2%}"
            )
        for name, error in document["proof"]["max_abs_errors"].items():
            rows[f"error {name}"] = _beside(error, ".2e")
        if proven.claim.optimization is not None:
            rows |= optimization_rows(proven.claim.optimization)
        if report.agreement is not None:
            rows["agreement"] = _beside(document["proof"]["agreement"], ".2%")
    width = max(map(len, rows))
    for label, value in rows.items():
        click.echo(f"{label:<{width}}  {value}")


def _beside(values: dict[str, float | None], form: str) -> str:
    """The repeated and the certified value in one line."""
    certified = values["certified"]
    then = "not in the certificate" if certified is None else f"certified {certified:{form}}"
    return f"{values['now']:{form}} ({then})"
