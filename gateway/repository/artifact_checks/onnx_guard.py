"""Check of an ONNX file before ONNX Runtime reads it.

Operators of ONNX's and ONNX Runtime's own domains only compute, except for the few that pass work
to a library. Weights may be in files beside the model and nowhere else. The message is
``onnx.proto``'s; it is traversed in the mapped file, so that weights are skipped and not read.
"""

from __future__ import annotations

import mmap
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

from modelport.gateway.errors import IntegrityError
from modelport.gateway.repository import untrusted_files
from modelport.gateway.repository.artifact_checks import inlined_size

#: The domains of ONNX and of every build of ONNX Runtime.
DOMAINS = frozenset({"", "ai.onnx", "ai.onnx.ml", "com.microsoft", "com.microsoft.nchwc"})
#: Their operators that run native code from the file, or Python.
FORBIDDEN = frozenset({"EPContext", "PythonOp", "PythonOpGrad", "ExternalOp", "Snpe", "ATen"})

MAX_DEPTH = 64

_Form = Mapping[int, str]
#: By message: the fields with a nested message, or a text, named in capitals.
_FORMS: Mapping[str, _Form] = {
    "model": {7: "graph", 25: "function"},
    "graph": {1: "node", 5: "tensor", 15: "sparse"},
    "function": {1: "NAME", 7: "node", 10: "DOMAIN"},
    "node": {4: "OPERATOR", 5: "attribute", 7: "DOMAIN"},
    "attribute": {5: "tensor", 6: "graph", 10: "tensor", 11: "graph", 22: "sparse", 23: "sparse"},
    "sparse": {1: "tensor", 2: "tensor"},
    "tensor": {13: "external"},
    "external": {1: "KEY", 2: "VALUE"},
}
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


def check(path: Path) -> None:
    """Refuse a model that uses other code, or weights from outside of its folder.

    Raises:
        IntegrityError: naming the operator or the file; or it is not an ONNX file.
    """
    try:
        with untrusted_files.open_file(path) as file:
            if not os.fstat(file.fileno()).st_size:
                raise _damaged(path)
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                _OnnxFileCheck(path, content).check()
    except OSError as error:
        raise IntegrityError(f"'{path.name}' does not load: {error.strerror}") from error


def _damaged(path: Path) -> IntegrityError:
    return IntegrityError(
        f"'{path.name}' does not load: it is damaged or not an ONNX file; export the model again"
    )


class _OnnxFileCheck:
    """The check of one file."""

    def __init__(self, path: Path, content: mmap.mmap) -> None:
        self._path, self._content = path, content
        #: The operators of the current message: the model's graph, or a function.
        self._body: Counter[tuple[str, str]] = Counter()
        self._functions: dict[tuple[str, str], Counter[tuple[str, str]]] = {}

    def check(self) -> None:
        self._message("model", 0, len(self._content), 0)
        bodies = self._functions | {("", "graph"): self._body}
        for domain, name in sorted(set[tuple[str, str]]().union(*bodies.values())):
            own = (domain, name) in self._functions  # it cannot replace an operator of ONNX Runtime
            if name in FORBIDDEN if domain in DOMAINS else not own:
                operator = f"{domain}.{name}" if domain else name
                raise IntegrityError(
                    f"'{self._path.name}' uses operator '{operator}', which is neither ONNX's nor "
                    "a computation of ONNX Runtime's: refused and not loaded; export the model "
                    "with ONNX's own operators"
                )
        inlined_size.check(f"'{self._path.name}'", bodies)

    def _message(self, form: str, begin: int, end: int, depth: int) -> None:
        if depth > MAX_DEPTH:
            raise _damaged(self._path)
        outer = self._body
        if form == "function":
            self._body = Counter()
        texts: dict[str, set[str]] = {}
        for field, start, stop in self._fields(begin, end):
            leads = _FORMS[form].get(field, "")
            if leads.isupper():
                texts.setdefault(leads, set()).add(
                    self._content[start:stop].decode(errors="backslashreplace")
                )
            elif leads:
                self._message(leads, start, stop, depth + 1)
        # Protobuf uses the last of a repeated field; here each one is checked.
        domains = texts.get("DOMAIN", {""})
        if form == "node":
            self._body.update((d, o) for d in domains for o in texts.get("OPERATOR", {""}))
        elif form == "function":
            body, self._body = self._body, outer
            if not len(domains) == len(texts.get("NAME", "")) == 1:
                raise _damaged(self._path)
            key = domains.pop(), texts["NAME"].pop()
            self._functions[key] = self._functions.get(key, Counter()) | body  # of any overload
        elif form == "external" and texts.get("KEY", set()) & {"location"}:
            for value in texts.get("VALUE", {""}):
                self._check_location(value)

    def _fields(self, begin: int, end: int) -> Iterator[tuple[int, int, int]]:
        """The fields of the message with a length, and their positions."""
        position = begin
        while position < end:
            key, position = self._varint(position, end)
            kind = key & 7
            if kind == _VARINT:
                _, position = self._varint(position, end)
            elif kind == _BYTES:
                length, position = self._varint(position, end)
                if length > end - position:
                    raise _damaged(self._path)
                yield key >> 3, position, position + length
                position += length
            elif kind in (_FIXED32, _FIXED64):
                position += 4 if kind == _FIXED32 else 8
            else:
                raise _damaged(self._path)
        if position != end:
            raise _damaged(self._path)

    def _varint(self, position: int, end: int) -> tuple[int, int]:
        value = shift = 0
        while True:
            if position >= end or shift > 63:
                raise _damaged(self._path)
            byte = self._content[position]
            value |= (byte & 0x7F) << shift
            position += 1
            if byte < 0x80:
                return value, position
            shift += 7

    def _check_location(self, location: str) -> None:
        folder = self._path.parent.resolve()
        path = folder / location
        named = location and ".." not in location.replace("\\", "/").split("/")
        if not (named and path.is_file() and path.resolve().is_relative_to(folder)):
            raise IntegrityError(
                f"'{self._path.name}' does not load: it takes weights from '{path.name}', which "
                "is not a file beside it; publish the model with the files it names"
            )
