"""Optimisation of a converted ONNX file: fusions first, then quantisation."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import onnx

from modelport.exporters import inspection
from modelport.exporters.formats.base import ExportTarget
from modelport.exporters.inspection import Inspection
from modelport.exporters.loaded_model import Source
from modelport.exporters.optimization import quantization, transformer_fusion
from modelport.exporters.optimization.result import GraphOptimization
from modelport.exporters.runtime.output_capture import quiet
from modelport.gateway.errors import Unsupported, UsageError

#: Larger weights go to ``<file>.data`` beside the model, as a protobuf message ends at 2 GiB.
EXTERNAL_DATA_BYTES = 1 << 30


def optimize(source: Source, draft: Path, path: Path, target: ExportTarget) -> GraphOptimization:
    """Write the converted file ``draft`` to ``path``, optimised and quantised as ``target`` says.

    Raises:
        Unsupported: ONNX Runtime cannot do so with this graph.
        UsageError: the model does not run on the calibration data.
    """
    before = inspection.inspect(draft)
    external_data = before.size_bytes > EXTERNAL_DATA_BYTES
    graph = draft
    fusion = transformer_fusion.Fusion()
    if target.optimize is not None:
        graph = draft.with_name(f"optimized-{draft.name}") if target.quantize else path
        half = target.dtype == "fp16"
        transformer = transformer_fusion.describe(source)
        with _refused("onnxruntime.transformers", f"--optimize {target.optimize}"):
            fusion = transformer_fusion.fuse(
                draft, graph, transformer, target.optimize, half, external_data
            )
    if target.quantize is not None:
        with _refused("onnxruntime.quantization", f"--quantize {target.quantize}"), quiet():
            _quantize(graph, path, target, external_data)
    after = inspection.inspect(path)
    portable = _is_standard(path)
    if target.optimize == "O1" and not target.quantize and _is_standard(draft) and not portable:
        raise Unsupported(
            "--optimize O1 would add ONNX Runtime's own operators to this graph, but O1 promises "
            "only ONNX's; use O2"
        )
    return _compare(before, after, fusion, portable)


def _quantize(graph: Path, path: Path, target: ExportTarget, external_data: bool) -> None:
    if target.quantize in quantization.BITS:
        bits = quantization.BITS[target.quantize]
        quantization.to_blocks(graph, path, bits, target.block_size, external_data)
    elif target.calibration is None:
        quantization.to_dynamic_int8(graph, path, target.per_channel, external_data)
    else:
        quantization.to_static_int8(
            graph,
            path,
            target.calibration,
            target.calibration_method,
            target.per_channel,
            external_data,
        )


@contextlib.contextmanager
def _refused(tool: str, option: str) -> Iterator[None]:
    """Translate a failure of ``tool`` into ``Unsupported``."""
    try:
        yield
    except (OSError, Unsupported, UsageError):
        raise
    except Exception as error:
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise Unsupported(
            f"{tool} cannot change this graph ({reason}); export it without {option}"
        ) from error


def _is_standard(path: Path) -> bool:
    """Whether every operator is one of ONNX's own, in the file's operator sets."""
    model = onnx.load(path, load_external_data=False)
    versions = {
        "" if entry.domain == "ai.onnx" else entry.domain: entry.version
        for entry in model.opset_import
    }
    own = {(function.domain, function.name) for function in model.functions}
    return all(
        (node.domain, node.op_type) in own
        or onnx.defs.has(node.op_type, versions.get(node.domain, 1), node.domain)
        for node in model.graph.node
    )


def _compare(
    before: Inspection,
    after: Inspection,
    fusion: transformer_fusion.Fusion,
    portable: bool,
) -> GraphOptimization:
    then, now = Counter(before.operators or {}), Counter(after.operators or {})
    added, transformer = now - then, fusion.transformer
    return GraphOptimization(
        size_bytes_before=before.size_bytes,
        size_bytes_after=after.size_bytes,
        operators_before=then.total(),
        operators_after=now.total(),
        portable=portable,
        model_type=transformer.model_type if transformer else None,
        num_heads=transformer.num_heads if transformer else 0,
        hidden_size=transformer.hidden_size if transformer else 0,
        fused={n.rpartition(".")[2]: count for n, count in added.items() if "." in n},
        approximate=fusion.approximate,
    )
