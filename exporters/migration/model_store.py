"""Migration of a model store, a folder of archives; a failure affects only its own archive."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from modelport.exporters.errors import ParityError
from modelport.exporters.migration import replay
from modelport.exporters.migration.archive import is_archive
from modelport.exporters.migration.migrate import MigrationRequest, MigrationRun, migrate
from modelport.exporters.migration.replay import ReplayServer
from modelport.exporters.migration.report import MigrationReport, MigrationState
from modelport.exporters.runtime.file_errors import explained
from modelport.exporters.runtime.local_gateway import serving
from modelport.gateway.cli.errors import exit_code
from modelport.gateway.errors import ModelportError, Unavailable, UsageError

Progress = Callable[[str, int, int], None]


def archives(path: Path) -> list[Path]:
    """``path`` itself, or the archives in a model store, by name.

    Raises:
        UsageError: there are none.
    """
    if not path.exists():
        raise UsageError(f"'{path}' does not exist; give an archive or a model store")
    if not path.is_dir() or is_archive(path):
        return [path]
    found = sorted(p for p in path.iterdir() if not p.name.startswith(".") and is_archive(p))
    if not found:
        raise UsageError(
            f"'{path}' holds no archive: no .mar, .tar.gz, or folder with MAR-INF in it"
        )
    return found


def migrate_all(
    paths: list[Path], wanted: MigrationRequest, progress: Progress
) -> tuple[list[MigrationReport], list[Exception]]:
    """Migrate every archive; return the reports, and the errors of those that failed."""
    run, reports = MigrationRun(), []
    failures: list[Exception] = []
    loaded = wanted.properties.loaded
    for index, path in enumerate(paths):
        progress(path.name, index, len(paths))
        report = MigrationReport(path.name)
        reports.append(report)
        try:
            migrate(path, wanted, report, run)
        except (ModelportError, OSError) as error:
            failure = error
            if isinstance(error, OSError):
                failure = explained(wanted.repository, error, "choose another --repository")
            failures.append(failure)
            report.error, report.error_code = str(failure), exit_code(failure)
            continue
        if loaded is not None and path.name not in loaded:
            report.add("load_models", MigrationState.NOTED, "it does not name this archive")
    _check_defaults(reports, wanted, run)
    return reports, failures


def _check_defaults(
    reports: list[MigrationReport], wanted: MigrationRequest, run: MigrationRun
) -> None:
    """Report models whose requests without a version get another version than at TorchServe."""
    for name, versions in run.versions.items():
        default = wanted.properties.default_version(name)
        newest = max(versions)
        if len(versions) > 1 and default and versions[newest] != default:
            for report in reports:
                if report.model == name and report.version == newest:
                    report.add(
                        "defaultVersion",
                        MigrationState.PERSON,
                        f"it was {default}; requests without a version now get {newest}, the "
                        f"newest; name {default} in requests, or publish it last",
                    )


def compare_all(
    reports: list[MigrationReport],
    old: ReplayServer,
    new: ReplayServer | None,
    wanted: MigrationRequest,
    requests: Path,
    tolerance: float,
    progress: Progress,
) -> None:
    """Send recorded requests for every published model, and add the findings to the reports.

    A folder in ``requests`` with a model's name holds that model's requests; without such folders
    all requests are for every model.

    Raises:
        ParityError: the gateway does not serve a published version.
    """
    published = [report for report in reports if report.version is not None]
    newest = {report.model: report for report in published}
    for report in published:
        if (report.version or 0) > (newest[report.model].version or 0):
            newest[report.model] = report
    bodies: dict[str, list[Path]] = {}
    for name, report in newest.items():
        try:
            own = requests / name
            bodies[name] = replay.recorded(own if own.is_dir() else requests)
        except UsageError as error:
            report.add("comparison", MigrationState.PERSON, str(error))
    if not bodies:
        return
    with _gateway(new, wanted, list(bodies)) as gateway:
        for name in bodies:
            for index, file in enumerate(bodies[name]):
                progress(f"comparing {name}", index, len(bodies[name]))
                found = replay.compare(old, gateway, name, file, tolerance)
                newest[name].comparisons.append(found)


@contextmanager
def _gateway(
    new: ReplayServer | None, wanted: MigrationRequest, names: list[str]
) -> Iterator[ReplayServer]:
    """The running gateway, or a temporary one that serves these models."""
    if new is not None:
        yield new
        return
    flags = ["--model-control-mode", "explicit", "--exit-on-error", "true"]
    flags += ["--allow-python"] if wanted.allow_python else []
    flags += [part for name in names for part in ("--load-model", name)]
    try:
        with serving(wanted.repository, *flags) as ports:
            yield ReplayServer(f"http://127.0.0.1:{ports['http_port']}", {})
    except Unavailable as error:
        raise ParityError(f"the published models cannot be compared: {error}") from error
