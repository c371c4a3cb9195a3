"""``modelport migrate``: import archives of other model servers into a model repository.

This module imports no runtime, which keeps ``--help`` fast.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from modelport.exporters.errors import ParityError
from modelport.exporters.publishing import contract
from modelport.exporters.runtime.interruption import InterruptibleCommand
from modelport.gateway.cli.errors import OneLineGroup, renamed_option
from modelport.gateway.cli.paths import EXISTING, WRITTEN, WrittenRepository
from modelport.gateway.cli.tables import print_table, printable
from modelport.gateway.errors import UsageError
from modelport.gateway.extras import missing_extra
from modelport.gateway.runtime.progress import progress_bar

if TYPE_CHECKING:
    from modelport.exporters.migration.report import MigrationReport


@click.group(cls=OneLineGroup)
def migrate() -> None:
    """Import models from another server into a model repository."""


@migrate.command("torchserve", cls=InterruptibleCommand)
@click.argument("path", type=EXISTING)
@click.option(
    "--model-repository",
    "--repository",
    "repository",
    type=WrittenRepository(),
    default=Path("model_repository"),
    show_default=True,
    help="The model repository to publish into: a folder, or s3://, gs:// or az://BUCKET/PREFIX.",
)
@click.option(
    "--config-properties",
    "config_file",
    type=EXISTING,
    metavar="FILE",
    help="The old server's config.properties, for names, batching and workers of its models.",
)
@click.option("--name", default="", help="The model's name.  [default: the old server's]")
@click.option(
    "--model-version",
    default="",
    metavar="N|auto",
    help="The version.  [default: the archive's, '1.0' is 1; else the next free one]",
)
@click.option(
    "--input",
    "inputs",
    multiple=True,
    metavar="NAME:DATATYPE[DIMS]",
    help="Declare an input, without the batch dimension: 'image:FP32[3,224,224]'. TorchScript that "
    "modelport did not write stores neither datatypes nor sizes. Repeatable.",
)
@click.option(
    "--output-tensor",
    "outputs",
    multiple=True,
    metavar="NAME:DATATYPE[DIMS]",
    help="Declare an output in the same way, in the model's order. Repeatable.",
)
@renamed_option("--config", "--config-properties")
@renamed_option("--output", "--output-tensor")
@click.option(
    "--max-batch-size",
    type=click.IntRange(0, 2**31 - 1),
    help="Maximum batch size; 0: no batch dimension.  [default: the old server's batchSize]",
)
@click.option(
    "--report",
    "report_file",
    type=WRITTEN,
    metavar="FILE",
    help="Write the report: Markdown if FILE ends in .md, else JSON.",
)
@click.option(
    "--compare", metavar="URL", help="The old server's inference address; needs --requests."
)
@click.option(
    "--token",
    envvar="TORCHSERVE_TOKEN",
    help="The old server's inference token, if required.  [env: TORCHSERVE_TOKEN]",
)
@click.option(
    "--gateway",
    metavar="URL",
    help="A gateway that serves --model-repository.  [default: a new one]",
)
@click.option(
    "--requests",
    type=EXISTING,
    metavar="FILE|FOLDER",
    help="Recorded request bodies, one per file, or folders of them named like models.",
)
@click.option(
    "--allow-python",
    is_flag=True,
    help="Let that gateway run the handlers of the archives, which are code and can do anything.",
)
@click.option(
    "--tolerance",
    type=click.FloatRange(0, max_open=True, max=float("inf")),
    default=1e-4,
    show_default=True,
    help="Accepted difference of numbers in answers; relative for numbers above 1.",
)
def torchserve(path: Path, **options: Any) -> None:
    """Import a TorchServe archive, or a model store, at PATH into a model repository.

    A .mar, a .tar.gz or a folder with MAR-INF becomes a version that 'modelport serve' serves, if
    its model is TorchScript, ONNX or .pt2. Its code is not executed. A handler that is derived from
    BaseHandler becomes a Python model around the archive's, which becomes NAME-graph.

    With --compare and --requests each recorded request goes to /predictions/MODEL of the old
    server and of the gateway, and the answers are compared.

    Exit codes: 0 all carried over, 2 usage, 3 answers differ, 4 no model that can be served, 5
    integrity, 6 published but needs a manual step. Of several archives the gravest counts: 5,
    4, 2, 3, 6.
    """
    _check_together(options)
    with progress_bar() as progress:
        progress("starting", 0, 0)
        try:
            from modelport.exporters.migration import report as reporting
        except ImportError as error:
            raise missing_extra(error) from error
        reports, failure = _migrate(path, options, progress)
    if options["report_file"] is not None:
        reporting.write(reports, options["report_file"])
    _print(reports)
    if failure is not None:
        raise failure
    raise click.exceptions.Exit(reporting.exit_code(reports))


def _check_together(options: dict[str, Any]) -> None:
    if (options["compare"] is None) != (options["requests"] is None):
        raise UsageError(
            "--compare and --requests go together: the old server, and the requests to send"
        )
    if options["gateway"] is not None and options["compare"] is None:
        raise UsageError("--gateway is for a comparison: add --compare and --requests")
    if options["allow_python"] and (options["compare"] is None or options["gateway"] is not None):
        raise UsageError("--allow-python is for a comparison with a new gateway: add --compare")
    if math.isnan(options["tolerance"]):
        raise UsageError("--tolerance must be a number")
    repository = options["repository"]
    if isinstance(repository, Path) and any(
        path.exists() and not path.is_dir() for path in (repository, *repository.parents)
    ):
        raise UsageError(f"--model-repository '{repository}' is not a folder")
    file = options["report_file"]
    if file is not None and (file.is_dir() or not file.parent.is_dir()):
        raise UsageError(f"--report '{file}' is not a file in an existing folder")


def _migrate(
    path: Path, options: dict[str, Any], progress: Callable[[str, int, int], None]
) -> tuple[list[MigrationReport], Exception | None]:
    """The reports, and the error to exit with if the table is not enough."""
    from modelport.exporters.migration import model_store, replay, torchserve_settings
    from modelport.exporters.migration.artifact import Flags
    from modelport.exporters.migration.migrate import MigrationRequest

    archives = model_store.archives(path)
    flags = Flags(options["inputs"], options["outputs"], options["max_batch_size"])
    if len(archives) > 1 and (flags or options["name"] or options["model_version"]):
        raise UsageError(
            "--name, --model-version, --input, --output and --max-batch-size are for one archive; "
            f"'{path}' holds {len(archives)}: name one of them"
        )
    if options["model_version"]:
        contract.parse_version(options["model_version"])
    properties = torchserve_settings.Properties()
    if options["config_file"] is not None:
        properties = torchserve_settings.read_properties(options["config_file"])
    wanted = MigrationRequest(
        options["repository"],
        properties,
        flags,
        options["name"],
        options["model_version"],
        options["allow_python"],
    )
    old = new = None
    if options["compare"] is not None:
        token = options["token"]
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        old = replay.server(options["compare"], "--compare", headers)
        if not options["requests"].exists():
            raise UsageError(f"--requests '{options['requests']}' does not exist")
    if options["gateway"] is not None:
        new = replay.server(options["gateway"], "--gateway")
    reports, failures = model_store.migrate_all(archives, wanted, progress)
    failure = failures[0] if failures and len(archives) == 1 else None
    if old is not None and any(report.version is not None for report in reports):
        try:
            model_store.compare_all(
                reports, old, new, wanted, options["requests"], options["tolerance"], progress
            )
        except ParityError as error:
            failure = error
    return reports, failure


def _print(reports: Sequence[MigrationReport]) -> None:
    from modelport.exporters.migration.report import compared, defined, summary

    for report in reports:
        if report.version is not None:
            title = f"{report.archive}: {report.model}, version {report.version}"
            click.echo(printable(title))
            items = [(item.what, item.state.value, item.detail) for item in report.items]
            print_table(("what", "state", "detail"), items)
        if report.code:
            code = [(c.file, c.sha256[:12], ", ".join(c.imports), defined(c)) for c in report.code]
            print_table(("code, not run", "SHA-256", "imports", "defines"), code)
        if report.comparisons:
            head = ("request", "old, new", "max difference", "verdict")
            print_table(head, compared(report))
    if len(reports) > 1 or not reports[0].error:
        rows = [summary(report) for report in reports]
        print_table(("archive", "model", "version", "format", "outcome"), rows)
