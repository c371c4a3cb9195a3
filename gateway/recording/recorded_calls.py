"""The tensors of recorded requests, for commands that take data: a sample of one model's calls."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import click

from modelport.gateway.errors import UsageError
from modelport.gateway.recording.record_files import files_in
from modelport.gateway.recording.record_reader import (
    DamagedRecord,
    Note,
    RecordedTensor,
    read,
)
from modelport.gateway.repository import manifest
from modelport.gateway.repository.storage.location import Location
from modelport.gateway.types import Array

#: Calls in a sample, and their size.
MOST_CALLS, MOST_SAMPLE_BYTES = 2048, 1 << 30


class RecordedCall(NamedTuple):
    """A call of a model that was answered."""

    model: str
    version: int
    inputs: Mapping[str, RecordedTensor]
    outputs: Mapping[str, RecordedTensor]

    @property
    def size(self) -> int:
        tensors = (*self.inputs.values(), *self.outputs.values())
        return sum(each.size_bytes for each in tensors)

    @property
    def is_whole(self) -> bool:
        """Whether the values of all inputs are recorded."""
        return all(each.data is not None for each in self.inputs.values())


def calls(where: Path | Location, note: Note) -> Iterator[RecordedCall]:
    """The calls of the models in records without a failure.

    Raises:
        UsageError: there are no records.
    """
    for record in read(where, note):
        if record.is_failure:
            continue
        try:
            for inputs, outputs in record.inferences():
                yield RecordedCall(
                    record.model,
                    record.version,
                    {each.name: each for each in inputs},
                    {each.name: each for each in outputs if not each.response},
                )
        except DamagedRecord as error:
            note(f"record {record.id[:64]!r} is skipped: {error}")


def tell(note: str) -> None:
    """Print a note to standard error; it may quote a hostile record."""
    shown = "".join(each if each.isprintable() else "?" for each in note)
    click.echo(f"modelport: {shown}", err=True)


def sample(
    where: Path,
    names: Collection[str] | None,
    most: int = MOST_CALLS,
    note: Note = tell,
    needs_values: bool = True,
) -> list[RecordedCall]:
    """A random sample of the calls of one model, the same each time, in their order.

    Args:
        names: of the inputs that the model has; other calls are left out. None: any.
        needs_values: leave calls out that lack the values of an input.

    Raises:
        UsageError: there are none, or those of several models.
    """
    drawn: list[tuple[int, RecordedCall]] = []
    chance, seen, size, models = random.Random(0), 0, 0, dict[str, None]()
    for call in calls(where, note):
        fits = names is None or call.inputs.keys() <= {*names}
        if not fits or (needs_values and not call.is_whole):
            continue
        models[call.model] = None
        seen += 1
        if len(drawn) < most:
            drawn.append((seen, call))
            size += call.size
        elif (at := chance.randrange(seen)) < most:
            size += call.size - drawn[at][1].size
            drawn[at] = (seen, call)
        while size > MOST_SAMPLE_BYTES and len(drawn) > 1:  # what stays is as random
            size -= drawn.pop(chance.randrange(len(drawn)))[1].size
            most = len(drawn)
    if len(models) > 1:
        shown = ", ".join(f"'{each}'" for each in sorted(models)[:5])
        raise UsageError(
            f"'{where}' holds records of several models, {shown}; name the folder of one of them"
        )
    if not drawn:
        wanted = f" with the inputs {', '.join(names)}" if names is not None else ""
        raise UsageError(f"'{where}' holds no answered requests{wanted} whose values are recorded")
    if seen > len(drawn):
        note(f"{len(drawn)} of {seen} recorded requests are used, chosen at random")
    return [call for _, call in sorted(drawn, key=lambda each: each[0])]


def values(tensors: Mapping[str, RecordedTensor]) -> dict[str, Array]:
    """The arrays of tensors whose values are recorded."""
    return {name: each.data for name, each in tensors.items() if each.data is not None}


def requests(
    where: Path, names: Collection[str] | None
) -> tuple[list[dict[str, Array]], list[dict[str, Array]], dict[str, str]]:
    """The inputs of a sample, the outputs that all of its calls have, and the inputs' datatypes.

    Raises:
        UsageError: as ``sample``.
    """
    found = sample(where, names)
    answers = [values(call.outputs) for call in found]
    shared = sorted(set.intersection(*map(set, answers)))  # a client may ask for some of them
    datatypes = {name: str(each.datatype) for call in found for name, each in call.inputs.items()}
    expected = [{name: each[name] for name in shared} for each in answers] if shared else []
    return [values(call.inputs) for call in found], expected, datatypes


def digest(where: Path) -> str:
    """The SHA-256 of the digests of all files."""
    made = hashlib.sha256()
    for each in files_in(where) if where.is_dir() else []:
        made.update(bytes.fromhex(manifest.sha256_of(where / each.key)))
    return made.hexdigest()
