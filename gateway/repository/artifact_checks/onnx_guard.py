"""Check of an ONNX file before ONNX Runtime reads it.

Operators of ONNX's and ONNX Runtime's own domains only compute, except for the few that pass work
to a library. Weights may be in files beside the model and nowhere else. The message is
``onnx.proto``'s; it is traversed in the mapped file, so that weights are skipped and not read.
"""

from __future__ import annotations

import mmap
import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from google.protobuf.message import DecodeError

from modelport.gateway.errors import IntegrityError
from modelport.gateway.repository import untrusted_files
from modelport.gateway.repository.artifact_checks import inlined_size
from modelport.gateway.wire import incremental_protobuf

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
_BYTES = 2


def check(path: Path) -> None:
    """Refuse a model that uses other code, or weights from outside of its folder.

    Raises:
        IntegrityError: naming the operator or the file; or it is not an ONNX file.
    """
    try:
        with untrusted_files.open_file(path) as file:
            if not os.fstat(file.fileno()).st_size:
                raise _damaged(path)
            content = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        _OnnxFileCheck(path).check(content)
    except DecodeError as error:
        raise _damaged(path) from error
    except OSError as error:
        raise IntegrityError(f"'{path.name}' does not load: {error.strerror}") from error


def _damaged(path: Path) -> IntegrityError:
    return IntegrityError(
        f"'{path.name}' does not load: it is damaged or not an ONNX file; export the model again"
    )


class _OnnxFileCheck:
    """The check of one file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        #: The operators of the current message: the model's graph, or a function.
        self._body: Counter[tuple[str, str]] = Counter()
        self._functions: dict[tuple[str, str], Counter[tuple[str, str]]] = {}

    def check(self, content: memoryview) -> None:
        self._message("model", content, 0)
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

    def _message(self, form: str, content: memoryview, depth: int) -> None:
        if depth > MAX_DEPTH:
            raise _damaged(self._path)
        outer = self._body
        if form == "function":
            self._body = Counter()
        texts: dict[str, set[str]] = {}
        for field in incremental_protobuf.fields(content):
            leads = _FORMS[form].get(field.tag >> 3, "") if field.tag & 7 == _BYTES else ""
            value = content[field.start : field.end]
            if leads.isupper():
                texts.setdefault(leads, set()).add(str(value, errors="backslashreplace"))
            elif leads:
                self._message(leads, value, depth + 1)
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
            for location in texts.get("VALUE", {""}):
                self._check_location(location)

    def _check_location(self, location: str) -> None:
        folder = self._path.parent.resolve()
        path = folder / location
        named = location and ".." not in location.replace("\\", "/").split("/")
        if not (named and path.is_file() and path.resolve().is_relative_to(folder)):
            raise IntegrityError(
                f"'{self._path.name}' does not load: it takes weights from '{path.name}', which "
                "is not a file beside it; publish the model with the files it names"
            )
