"""Check of an OpenVINO IR, ``model.xml`` with ``model.bin``, before OpenVINO reads it.

OpenVINO's own operations only compute; those of an extension are foreign code. Constants lie in the
one file beside the XML. The XML is read by expat as a stream, without entities.
"""

from __future__ import annotations

import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from xml.parsers import expat

from modelport.gateway.errors import IntegrityError
from modelport.gateway.repository import untrusted_files

ROOT = "net"
CONSTANT = "Const"
#: Each loop nests three elements.
MAX_DEPTH = 64
CHUNK_BYTES = 1 << 20
#: Constants may share their bytes. Compilation copies each one.
MAX_CONSTANT_RATIO = 4
CONSTANT_ALLOWANCE = 64 << 20

_OPSET = re.compile(r"opset[1-9][0-9]?")
_SIZE = re.compile(r"[0-9]{1,18}")


@dataclass(slots=True)
class Port:
    """An input or output of a layer; -1 is a dynamic size. ``names`` are separated by commas."""

    precision: str
    names: str
    dims: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Layer:
    """An operation of the graph, or of a graph inside of one.

    Attributes:
        depth: of its element; those of the model's own graph have the least.
        output_names: of a ``Result``, separated by commas; older files have none.
        data: the operation's attributes.
    """

    name: str
    kind: str
    opset: str
    depth: int
    output_names: str
    data: dict[str, str] = field(default_factory=dict)
    inputs: list[Port] = field(default_factory=list)
    outputs: list[Port] = field(default_factory=list)


def check(path: Path) -> None:
    """Refuse a model with foreign operations, or with constants outside of its file.

    Raises:
        IntegrityError: naming the operation or the constant; or it is no OpenVINO IR.
    """
    available = _size(path.with_suffix(".bin"))
    total = 0
    for layer in layers(path):
        if not _OPSET.fullmatch(layer.opset):
            raise IntegrityError(
                f"'{path.name}' uses operation '{layer.kind}' of '{layer.opset}', which is not "
                "OpenVINO's own: refused and not loaded; convert the model with OpenVINO's "
                "operations alone"
            )
        if layer.kind == CONSTANT:
            offset, size = (layer.data.get(key, "") for key in ("offset", "size"))
            if not (_SIZE.fullmatch(offset) and _SIZE.fullmatch(size)):
                raise damaged(path, f"constant '{layer.name}' has no valid offset and size")
            if int(offset) + int(size) > available:
                raise damaged(path, f"constant '{layer.name}' lies beyond the end of the weights")
            total += int(size)
    if total > MAX_CONSTANT_RATIO * available + CONSTANT_ALLOWANCE:
        raise IntegrityError(
            f"'{path.name}' has constants of {total:,} bytes in a file of {available:,}: refused "
            "and not loaded; save the model again"
        )


def damaged(path: Path, reason: str) -> IntegrityError:
    """The error for a file that cannot be read."""
    return IntegrityError(
        f"'{path.name}' does not load: it is damaged or not an OpenVINO IR ({reason}); export the "
        "model again"
    )


def _size(weights: Path) -> int:
    """The size of the file with constants; 0 if there is none."""
    try:
        found = weights.lstat()
    except FileNotFoundError:
        return 0
    if not stat.S_ISREG(found.st_mode):
        raise IntegrityError(
            f"'{weights.name}' is not a file in the model's folder; publish it with its weights"
        )
    return found.st_size


def layers(path: Path) -> Iterator[Layer]:
    """Yield every layer of the graph and of the graphs inside of it.

    Raises:
        IntegrityError: the file is damaged, nested too deeply, or declares a document type.
    """
    reader = _LayerReader(path)
    try:
        with untrusted_files.open_file(path) as file:
            if file.read(1) != b"<":  # expat would honour the mark of another encoding
                raise damaged(path, "it does not start with '<'")
            file.seek(0)
            while chunk := file.read(CHUNK_BYTES):
                reader.parser.Parse(chunk, False)
                yield from reader.taken()
            reader.parser.Parse(b"", True)
            yield from reader.taken()
    except expat.ExpatError as error:
        raise damaged(path, str(error)) from error
    except OSError as error:
        raise IntegrityError(f"'{path.name}' does not load: {error.strerror}") from error


class _LayerReader:
    """Collects layers from the events of one parser."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._depth = 0
        self._open: list[Layer] = []
        self._closed: list[Layer] = []
        self._ports: list[Port] | None = None
        self._dim: str | None = None
        # Whatever the document declares; OpenVINO's parser guesses by the first bytes.
        self.parser = parser = expat.ParserCreate("utf-8")
        parser.buffer_text = True
        parser.StartDoctypeDeclHandler = self._refuse_doctype
        parser.StartElementHandler = self._start
        parser.EndElementHandler = self._end
        parser.CharacterDataHandler = self._text

    def taken(self) -> list[Layer]:
        """The layers that ended since the last call."""
        closed, self._closed = self._closed, []
        return closed

    def _refuse_doctype(self, *_: object) -> None:
        raise IntegrityError(
            f"'{self._path.name}' declares a document type, as no OpenVINO IR does: refused "
            "and not loaded; export the model again"
        )

    def _start(self, tag: str, attributes: dict[str, str]) -> None:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise damaged(self._path, f"it is nested more than {MAX_DEPTH} levels deep")
        if self._depth == 1 and tag != ROOT:
            raise damaged(self._path, f"its root is '{tag}'")
        if tag == "layer":
            keys = ("name", "type", "version", "output_names")
            name, kind, opset, output_names = (attributes.get(key, "") for key in keys)
            self._open.append(Layer(name, kind, opset, self._depth, output_names))
        elif self._open and tag == "data" and self._depth == self._open[-1].depth + 1:
            self._open[-1].data |= attributes
        elif self._open and tag in ("input", "output"):
            layer = self._open[-1]
            self._ports = layer.inputs if tag == "input" else layer.outputs
        elif tag == "port" and self._ports is not None:
            self._ports.append(Port(attributes.get("precision", ""), attributes.get("names", "")))
        elif tag == "dim":
            self._dim = ""

    def _end(self, tag: str) -> None:
        self._depth -= 1
        if tag == "layer" and self._open:
            self._closed.append(self._open.pop())
        elif tag in ("input", "output"):
            self._ports = None
        elif tag == "dim" and self._dim is not None:
            text, self._dim = self._dim.strip(), None
            if not _SIZE.fullmatch(text.removeprefix("-")):
                raise damaged(self._path, f"'{text[:20]}' is not a size")
            if self._ports:
                self._ports[-1].dims.append(int(text))

    def _text(self, text: str) -> None:
        if self._dim is not None:
            self._dim += text
