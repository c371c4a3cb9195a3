"""Names of exported models, and the files that artifacts are written to."""

from __future__ import annotations

import string
from dataclasses import dataclass
from pathlib import Path

from modelport.exporters.formats.base import ExportTarget
from modelport.exporters.formats.registry import Format
from modelport.exporters.publishing import contract
from modelport.exporters.sources import reader_selection
from modelport.gateway.backend_registry import platforms
from modelport.gateway.errors import UsageError
from modelport.gateway.repository.storage.location import Location

#: Default ``--name-template`` for one format and for several.
ONE_NAME, SEVERAL_NAMES = "{name}", "{name}-{format}"


@dataclass(frozen=True, slots=True)
class Destination:
    """The place that artifacts are written to, and their names there.

    Attributes:
        name: None uses the spec's.
        name_template: a template of ``{name}``, ``{format}`` and ``{precision}``; None uses
            ``{name}`` for one format and ``{name}-{format}`` for several.
        version: None uses the next free number.
        output: a file or folder to write to instead of publishing into ``repository``.
    """

    repository: Path | Location
    name: str | None = None
    name_template: str | None = None
    version: int | None = None
    output: Path | None = None

    def model_name(self, declared: str, row: Format, target: ExportTarget, several: bool) -> str:
        """The name of a model, checked; ``declared`` is the spec's."""
        template = self.name_template
        if template is None:
            template = SEVERAL_NAMES if several else ONE_NAME
        return _filled(template, self.name or declared, row, target)

    def file_of(self, row: Format, several: bool) -> tuple[Path | Location, str]:
        """The folder to write to, and the artifact's file name in it."""
        if self.output is None:
            return self.repository, row.platform.default_filename
        return _output_file(self.output, row, several)


def _filled(template: str, name: str, row: Format, target: ExportTarget) -> str:
    fields = {"name": name, "format": row.name, "precision": target.precision}
    try:
        for _, field, width, conversion in string.Formatter().parse(template):
            if field is not None and (field not in fields or width or conversion):
                raise ValueError(f"'{field}'")
        filled = template.format(**fields)
    except (ValueError, IndexError, KeyError) as error:
        raise UsageError(
            f"--name-template '{template}' is invalid ({error}); it may hold "
            "{name}, {format} and {precision}"
        ) from error
    contract.check_name(filled)
    return filled


def _output_file(output: Path, row: Format, several: bool) -> tuple[Path, str]:
    """The folder that ``--output`` means, and the artifact's file name in it."""
    default = row.platform.default_filename
    suffix = Path(default).suffix
    folder = output.is_dir() and not (output / reader_selection.SAVED_MODEL).is_file()
    if folder or output.suffix not in {Path(p.default_filename).suffix for p in platforms()}:
        return (output / row.name if several else output), default
    if several or output.suffix != suffix:
        raise UsageError(
            f"--output '{output}' is not a file of "
            + ("several formats; give a folder" if several else f"{row.name}; end it in {suffix}")
        )
    return output.parent, output.name
