"""Inspection of a TensorFlow Lite file from its flatbuffer, with LiteRT's schema."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ai_edge_litert import schema_py_generated as schema

from modelport.exporters.inspection import Inspection, TensorInfo, tally, word
from modelport.gateway.errors import IntegrityError

IDENTIFIER = b"TFL3"


def inspect(path: Path) -> Inspection:
    """Inspect a TensorFlow Lite file; raises as ``inspection.inspect``."""
    content = path.read_bytes()
    if content[4:8] != IDENTIFIER:
        raise IntegrityError(f"'{path.name}' is damaged or not a TensorFlow Lite file")
    return _FlatbufferReader(schema.Model.GetRootAs(content, 0), len(content)).inspect()


class _FlatbufferReader:
    """Reads one flatbuffer."""

    def __init__(self, model: Any, size_bytes: int) -> None:
        self._model = model
        self._size_bytes = size_bytes
        self._graphs = [model.Subgraphs(i) for i in self._range(model.SubgraphsLength())]

    def _range(self, length: int) -> range:
        """The indexes of a vector; one longer than the file is damage."""
        if length > self._size_bytes:
            raise ValueError("a vector is longer than the file")
        return range(length)

    def inspect(self) -> Inspection:
        inputs, outputs = self._signature()
        operators = Counter(self._operators())
        notes = [f"needs runtime {version} or newer" for version in self._minimum_runtime()]
        if any(name.startswith("Flex") for name in operators):
            notes.append("Flex operators need TensorFlow in addition to the runtime")
        return Inspection(
            format="tflite",
            inputs=inputs,
            outputs=outputs,
            size_bytes=self._size_bytes,
            format_version=str(self._model.Version()),
            producer=_text(self._model.Description()) or None,
            weights=tally(self._constants()),
            operators=dict(operators.most_common()),
            notes=tuple(notes),
        )

    def _minimum_runtime(self) -> Iterator[str]:
        """The minimum runtime noted by the converter, if any; it is padded with zeros."""
        for i in self._range(self._model.MetadataLength()):
            metadata = self._model.Metadata(i)
            if metadata.Name() == b"min_runtime_version":
                content = self._model.Buffers(metadata.Buffer()).DataAsNumpy()
                if not isinstance(content, int):  # 0 if there is none
                    yield _text(content.tobytes().rstrip(b"\0"))

    def _signature(self) -> tuple[tuple[TensorInfo, ...], tuple[TensorInfo, ...]]:
        """The tensors of the first SignatureDef, whose names bind, or of the first subgraph."""
        if not self._model.SignatureDefsLength():
            graph = self._graphs[0]
            inputs = [(None, graph.Inputs(i)) for i in self._range(graph.InputsLength())]
            outputs = [(None, graph.Outputs(i)) for i in self._range(graph.OutputsLength())]
        else:
            signature = self._model.SignatureDefs(0)
            graph = self._graphs[signature.SubgraphIndex()]
            taken = (signature.Inputs(i) for i in self._range(signature.InputsLength()))
            given = (signature.Outputs(i) for i in self._range(signature.OutputsLength()))
            inputs = [(entry.Name(), entry.TensorIndex()) for entry in taken]
            outputs = [(entry.Name(), entry.TensorIndex()) for entry in given]
        return (
            tuple(self._tensor(graph.Tensors(index), name) for name, index in inputs),
            tuple(self._tensor(graph.Tensors(index), name) for name, index in outputs),
        )

    def _tensor(self, tensor: Any, name: bytes | None) -> TensorInfo:
        stored = _text(name if name is not None else tensor.Name())
        if tensor.ShapeSignatureLength():
            sizes = [tensor.ShapeSignature(i) for i in range(tensor.ShapeSignatureLength())]
        else:
            sizes = [tensor.Shape(i) for i in self._range(tensor.ShapeLength())]
        return TensorInfo(stored, _datatype(tensor), tuple(int(size) for size in sizes))

    def _operators(self) -> Iterator[str]:
        names = {value: key for key, value in vars(schema.BuiltinOperator).items() if key[0] != "_"}
        codes = []
        for i in self._range(self._model.OperatorCodesLength()):
            code = self._model.OperatorCodes(i)
            builtin = max(code.DeprecatedBuiltinCode(), code.BuiltinCode())
            custom = builtin == schema.BuiltinOperator.CUSTOM
            codes.append(_text(code.CustomCode()) if custom else names.get(builtin, str(builtin)))
        for graph in self._graphs:
            for i in self._range(graph.OperatorsLength()):
                yield codes[graph.Operators(i).OpcodeIndex()]

    def _constants(self) -> Iterator[tuple[str, int]]:
        seen: set[int] = set()
        for graph in self._graphs:
            for i in self._range(graph.TensorsLength()):
                tensor = graph.Tensors(i)
                index = tensor.Buffer()
                if index not in seen and self._stored(index):
                    seen.add(index)
                    shape = (tensor.Shape(d) for d in self._range(tensor.ShapeLength()))
                    yield _datatype(tensor), math.prod(int(size) for size in shape)

    def _stored(self, index: int) -> bool:
        """Whether a buffer has content; large buffers lie behind the flatbuffer."""
        buffer = self._model.Buffers(index)
        return bool(buffer.DataLength() or buffer.Size())


def _datatype(tensor: Any) -> str:
    known = {value: key for key, value in vars(schema.TensorType).items() if key[0] != "_"}
    return word(known[tensor.Type()])


def _text(content: bytes | None) -> str:
    return (content or b"").decode(errors="backslashreplace")
