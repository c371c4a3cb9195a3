"""The baseline of a drift report: records, rows in an ``.npz``, or the data of a certificate."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from modelport.gateway.errors import UsageError
from modelport.gateway.recording import recorded_calls
from modelport.gateway.repository import untrusted_files
from modelport.loadtests.drift.features import RequestRows, rows_of, rows_of_arrays
from modelport.loadtests.load import payloads
from modelport.loadtests.load.payloads import Array

#: Requests of each side, chosen at random.
MOST_REQUESTS = 20_000


def recorded(path: Path) -> list[RequestRows]:
    """A sample of the requests for one model.

    Raises:
        UsageError: there are none.
    """
    found = recorded_calls.sample(path, None, MOST_REQUESTS, needs_values=False)
    return [rows_of(each) for each in found]


def read(path: Path, inputs: Iterable[str]) -> list[RequestRows]:
    """The rows of a baseline.

    Args:
        inputs: names of the inputs, to tell them from outputs in an ``.npz``.

    Raises:
        UsageError: it cannot be read.
    """
    if path.suffix == ".json":
        path = _data_of(path)
    if path.suffix != ".npz":
        return recorded(path)
    arrays = _arrays(path)
    lengths = {name: len(each) for name, each in arrays.items()}
    if len(set(lengths.values())) != 1:
        raise UsageError(f"--baseline '{path}' has different numbers of rows: {lengths}")
    return rows_of_arrays(arrays, inputs)


def _arrays(path: Path) -> Mapping[str, Array]:
    try:
        arrays = payloads.read_arrays(path)
        found = {name: np.atleast_1d(arrays[name]) for name in arrays if name != payloads.LABELS}
        if any(each.dtype.kind not in "biufSU" for each in found.values()):
            raise ValueError("its arrays are neither numbers nor texts")
    except payloads.UNREADABLE as error:
        raise UsageError(
            f"--baseline '{path}' is not a readable .npz; write one with numpy.savez"
        ) from error
    if not found:
        raise UsageError(f"--baseline '{path}' has no arrays; write one with numpy.savez")
    return found


def _data_of(certificate: Path) -> Path:
    """The held-out data that a certificate names, beside it or in this folder."""
    try:
        most = untrusted_files.MAX_CERTIFICATE_BYTES
        document: Any = json.loads(untrusted_files.read_text(certificate, most))
        evaluation = document["evaluation"]
        name, digest = (evaluation["file"], evaluation["sha256"]) if evaluation else ("", "")
    except (*payloads.UNREADABLE, LookupError, TypeError, AttributeError) as error:
        raise UsageError(f"--baseline '{certificate}' is not a certificate") from error
    if not name:
        raise UsageError(
            f"--baseline '{certificate}' names no data, because the model was exported without "
            "--data; give an .npz of rows, or earlier records"
        )
    for folder in (Path(), *certificate.absolute().parents[:3]):
        path = folder / Path(str(name)).name
        if path.is_file():
            with untrusted_files.open_file(path) as file:
                if hashlib.file_digest(file, "sha256").hexdigest() == digest:
                    return path
    raise UsageError(
        f"--baseline '{certificate}': the data that it names, '{Path(str(name)).name}', is not in "
        "this folder, or has changed; give the .npz itself"
    )
