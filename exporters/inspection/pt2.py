"""Inspection of a ``.pt2`` archive: ``torch.export``'s graph, or AOTInductor's library."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from modelport.exporters.inspection import AxisInfo, Inspection, TensorInfo, describe, tally
from modelport.gateway.repository.artifact_checks.torch_archive import Archive

#: ``torch._export.serde.schema.ScalarType``, mapped to the protocol's names if it has them.
DATATYPES = {
    1: "UINT8",
    2: "INT8",
    3: "INT16",
    4: "INT32",
    5: "INT64",
    6: "FP16",
    7: "FP32",
    8: "FP64",
    9: "COMPLEX32",
    10: "COMPLEX64",
    11: "COMPLEX128",
    12: "BOOL",
    13: "BF16",
    28: "UINT16",
    29: "FLOAT8E4M3FN",
    30: "FLOAT8E5M2",
    31: "FLOAT8E4M3FNUZ",
    32: "FLOAT8E5M2FNUZ",
    33: "FLOAT8E8M0FNU",
    34: "UINT32",
    35: "UINT64",
}

MODELS, COMPILED = "models/", "data/aotinductor/"
PAYLOADS = ("data/weights/", "data/constants/")

_SYMBOL = re.compile(r"(?:Symbol\(')?(\w+)")


def inspect(path: Path) -> Inspection:
    """Inspect an exported program or a compiled archive; raises as ``inspection.inspect``."""
    archive = Archive(path)
    return _inspect_compiled(archive) if archive.below(COMPILED) else _inspect_program(archive)


def _inspect_compiled(archive: Archive) -> Inspection:
    """Inspect a compiled archive; everything but the signature is machine code."""
    signature = archive.signature()
    tensors, axes = describe(signature) if signature else ((), ())
    count = len(signature.inputs) if signature else 0
    records = archive.below(COMPILED, "wrapper_metadata.json")
    built = archive.json(records[0]) if records else {}
    words = (built.get(f"AOTI_{key}") for key in ("PLATFORM", "MACHINE", "DEVICE_KEY", "CPU_ISA"))
    notes = ["operators and weights are compiled: they cannot be listed"]
    notes += [f"compiled for {', '.join(str(word) for word in words if word)}"] * bool(built)
    notes += ["inputs and outputs are not stored: modelport did not write it"] * (signature is None)
    return Inspection(
        format="aoti",
        inputs=tensors[:count],
        outputs=tensors[count:],
        size_bytes=archive.path.stat().st_size,
        format_version=archive.text("archive_version").strip(),
        dynamic_axes=axes,
        notes=tuple(notes),
    )


def _inspect_program(archive: Archive) -> Inspection:
    program = archive.json(archive.below(MODELS, ".json")[0])
    signature = archive.signature()
    if signature is None:
        inputs, outputs, axes = _own_signature(program)
    else:
        tensors, axes = describe(signature)
        inputs, outputs = tensors[: len(signature.inputs)], tensors[len(signature.inputs) :]
    schema = program["schema_version"]
    operators = Counter(_operators(program["graph_module"]["graph"]))
    return Inspection(
        format="pt2",
        inputs=inputs,
        outputs=outputs,
        size_bytes=archive.path.stat().st_size,
        opset=program["opset_version"].get("aten"),
        format_version=f"schema {schema['major']}.{schema['minor']}",
        producer=f"torch {program['torch_version']}",
        dynamic_axes=axes,
        weights=tally(_constants(archive)),
        operators=dict(operators.most_common()),
    )


def _operators(graph: Any) -> Iterator[str]:
    """Operator calls, including those in graphs passed as arguments."""
    for node in graph["nodes"]:
        yield str(node["target"]).removeprefix("torch.ops.")
        for argument in node["inputs"]:
            if "as_graph" in argument["arg"]:
                yield from _operators(argument["arg"]["as_graph"]["graph"])


def _constants(archive: Archive) -> Iterator[tuple[str, int]]:
    """Weights and other constants; views of the same values count once."""
    seen = set()
    for name in (n for folder in PAYLOADS for n in archive.below(folder, "_config.json")):
        for payload in archive.json(name)["config"].values():
            meta = payload["tensor_meta"]
            values = payload["path_name"], json.dumps(meta and meta["storage_offset"])
            if meta is not None and values not in seen:
                seen.add(values)
                sizes = (size["as_int"] for size in meta["sizes"])
                yield DATATYPES.get(meta["dtype"], "UNKNOWN"), math.prod(sizes)


_Signature = tuple[tuple[TensorInfo, ...], tuple[TensorInfo, ...], tuple[AxisInfo, ...]]


def _own_signature(program: Any) -> _Signature:
    """The signature that torch stores: the graph's names, symbolic sizes, and their ranges."""
    module = program["graph_module"]
    values = module["graph"]["tensor_values"]

    def tensor(argument: Any) -> TensorInfo:
        if "as_tensor" not in argument:
            return TensorInfo(str(next(iter(argument))), None, None)
        name = argument["as_tensor"]["name"]
        sizes = tuple(_size(size) for size in values[name]["sizes"])
        return TensorInfo(name, DATATYPES.get(values[name]["dtype"]), sizes)

    specs = module["signature"]
    taken = [s["user_input"]["arg"] for s in specs["input_specs"] if "user_input" in s]
    given = [s["user_output"]["arg"] for s in specs["output_specs"] if "user_output" in s]
    inputs, outputs = tuple(map(tensor, taken)), tuple(map(tensor, given))
    used = {d for value in (*inputs, *outputs) for d in value.shape or () if isinstance(d, str)}
    axes = (
        AxisInfo(name, bounds["min_val"], bounds["max_val"])
        for name, bounds in program["range_constraints"].items()
        if name in used
    )
    return inputs, outputs, tuple(axes)


def _size(size: Any) -> int | str:
    if "as_int" in size:
        return int(size["as_int"])
    symbol = _SYMBOL.fullmatch(size["as_expr"]["expr_str"].partition("',")[0])
    return symbol[1] if symbol else -1
