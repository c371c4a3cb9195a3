"""A model store, a folder of archives: each migrated by itself, so that one costs only itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from modelport.exporters.migration import comparison
from modelport.exporters.migration.archive import is_archive
from modelport.exporters.migration.comparison import Server
from modelport.exporters.migration.entry import Run, Wanted, migrate
from modelport.exporters.migration.report import Report, State
from modelport.exporters.serving import serving
from modelport.gateway.cli.errors import ParityError, UsageError, exit_code
from modelport.gateway.errors import ModelportError, Unavailable

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
    paths: list[Path], wanted: Wanted, progress: Progress
) -> tuple[list[Report], list[Exception]]:
    """A report for every archive, and the errors of those that failed."""
    run, reports = Run(), []
    failures: list[Exception] = []
    loaded = wanted.properties.loaded
    for index, path in enumerate(paths):
        progress(path.name, index, len(paths))
        report = Report(path.name)
        reports.append(report)
        try:
            migrate(path, wanted, report, run)
        except (ModelportError, OSError) as error:
            failures.append(error)
            report.error, report.error_code = str(error), exit_code(error)
            continue
        if loaded is not None and path.name not in loaded:
            report.add("load_models", State.NOTED, "it does not name this archive")
    _check_defaults(reports, wanted, run)
    return reports, failures


def _check_defaults(reports: list[Report], wanted: Wanted, run: Run) -> None:
    """Requests without a version get the newest here, and TorchServe's default there."""
    for name, versions in run.versions.items():
        default = wanted.properties.default_version(name)
        newest = max(versions)
        if len(versions) > 1 and default and versions[newest] != default:
            for report in reports:
                if report.model == name and report.version == newest:
                    report.add(
                        "defaultVersion",
                        State.PERSON,
                        f"it was {default}; requests without a version get {newest} now, the "
                        "newest: name it in requests, or publish it last",
                    )


def compare_all(
    reports: list[Report],
    old: Server,
    new: Server | None,
    wanted: Wanted,
    requests: Path,
    tolerance: float,
    progress: Progress,
) -> None:
    """Send recorded requests for every model that was published; the reports get the findings.

    A folder in ``requests`` of a model's name holds its requests; else all are for every model.

    Raises:
        ParityError: the gateway does not serve what was published.
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
            bodies[name] = comparison.recorded(own if own.is_dir() else requests)
        except UsageError as error:
            report.add("comparison", State.PERSON, str(error))
    if not bodies:
        return
    with _gateway(new, wanted.repository, list(bodies)) as gateway:
        for name in bodies:
            for index, file in enumerate(bodies[name]):
                progress(f"comparing {name}", index, len(bodies[name]))
                found = comparison.compare(old, gateway, name, file, tolerance)
                newest[name].comparisons.append(found)


@contextmanager
def _gateway(new: Server | None, repository: Path, names: list[str]) -> Iterator[Server]:
    """The running one, or one that serves these models while it is needed."""
    if new is not None:
        yield new
        return
    flags = ["--model-control-mode", "explicit", "--exit-on-error", "true"]
    flags += [part for name in names for part in ("--load-model", name)]
    try:
        with serving(repository, *flags) as ports:
            yield Server(f"http://127.0.0.1:{ports['http_port']}", {})
    except Unavailable as error:
        raise ParityError(f"what was published cannot be compared: {error}") from error
