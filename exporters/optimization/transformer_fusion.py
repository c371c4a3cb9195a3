"""Graph optimisation by ONNX Runtime and its transformer optimiser, in Optimum's levels."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import onnxruntime
from onnxruntime.transformers import optimizer
from onnxruntime.transformers.fusion_options import FusionOptions

from modelport.exporters.loaded_model import Source
from modelport.exporters.runtime.output_capture import quiet

#: The optimiser's type for graphs that it has no other for.
GENERAL = "bert"
APPROXIMATE_GELU = "FastGelu"
#: Names of hyper-parameters in configurations of transformers and in arguments of factories.
_HEADS = ("num_attention_heads", "n_head", "num_heads", "nhead", "encoder_attention_heads")
_HIDDEN = ("hidden_size", "n_embd", "d_model", "dim")
#: Levels of ONNX Runtime: standard operators only; and its own, for any processor.
_BASIC, _EXTENDED = 1, 2
_ERRORS, _WARNINGS = 3, 2


@dataclass(frozen=True, slots=True)
class Transformer:
    """The optimiser's model type, with sizes that it else looks for in the graph (0)."""

    model_type: str = GENERAL
    num_heads: int = 0
    hidden_size: int = 0


def describe(source: Source) -> Transformer:
    """Read the type and sizes from the model's configuration, or its factory's arguments."""
    for known in (*_configurations(source.model), source.model_kwargs):
        heads, hidden = (_first(known, names) for names in (_HEADS, _HIDDEN))
        if heads and hidden and hidden % heads == 0:
            model_type = str(known.get("model_type"))
            return Transformer(
                model_type if model_type in optimizer.MODEL_TYPES else GENERAL, heads, hidden
            )
    return Transformer()


def _configurations(model: Any) -> Iterator[Mapping[str, Any]]:
    """The configurations of transformers in ``model``, the outermost first."""
    modules = getattr(model, "modules", None)
    for module in modules() if callable(modules) else ():
        config = getattr(module, "config", None)
        to_dict = getattr(config, "to_dict", None)
        if callable(to_dict):
            yield to_dict()


def _first(known: Mapping[str, Any], names: tuple[str, ...]) -> int:
    found = (known.get(name) for name in names)
    return next((n for n in found if type(n) is int and n > 0), 0)


@dataclass(frozen=True, slots=True)
class Fusion:
    """The fusions that were applied.

    Attributes:
        transformer: None: only those of ONNX Runtime itself.
        approximate: GELU was replaced by an approximation.
    """

    transformer: Transformer | None = None
    approximate: bool = False


def fuse(
    draft: Path, path: Path, transformer: Transformer, level: str, half: bool, external_data: bool
) -> Fusion:
    """Write ``draft``, optimised, to ``path``; raises whatever ONNX Runtime raises.

    ``O1`` keeps to standard operators. ``O2`` adds operators of ONNX Runtime's own, and fusions of
    transformers. ``O3`` approximates GELU.

    Args:
        half: compute in fp16; inputs and outputs keep their datatypes.
    """
    with _silent():
        if level == "O1":
            model = optimizer.optimize_model(str(draft), opt_level=_BASIC, only_onnxruntime=True)
            fusion = Fusion()
        else:
            model, transformer = _fused(draft, transformer)
            fusion = Fusion(transformer, level == "O3" and _approximate(model))
        if half:
            model.convert_float_to_float16(keep_io_types=True)
        # ONNX Runtime names every domain that it knows; other runtimes may know fewer.
        used = {"" if node.domain == "ai.onnx" else node.domain for node in model.model.graph.node}
        kept = [entry for entry in model.model.opset_import if entry.domain in used | {""}]
        if not model.model.functions:
            del model.model.opset_import[:]
            model.model.opset_import.extend(kept)
        model.save_model_to_file(str(path), use_external_data_format=external_data)
    return fusion


def _fused(draft: Path, transformer: Transformer) -> tuple[Any, Transformer]:
    """The model with the fusions of ``transformer``, or with general ones where these fail.

    Fusions of one architecture expect the nodes that one exporter writes for it.
    """
    try:
        return _with_fusions_of(draft, transformer), transformer
    except Exception:
        if transformer.model_type == GENERAL:
            raise
        general = replace(transformer, model_type=GENERAL)
        return _with_fusions_of(draft, general), general


def _with_fusions_of(draft: Path, transformer: Transformer) -> Any:
    options = FusionOptions(transformer.model_type)
    # A mask by lengths alone would be wrong for padding on the left.
    options.use_raw_attention_mask(True)
    return optimizer.optimize_model(
        str(draft),
        transformer.model_type,
        transformer.num_heads,
        transformer.hidden_size,
        optimization_options=options,
        opt_level=_EXTENDED,
    )


def _approximate(model: Any) -> bool:
    """Replace exact GELUs; return whether there was one."""
    before = len(model.get_nodes_by_op_type(APPROXIMATE_GELU))
    model.gelu_approximation()
    return len(model.get_nodes_by_op_type(APPROXIMATE_GELU)) > before


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    onnxruntime.set_default_logger_severity(_ERRORS)
    try:
        with quiet():
            yield
    finally:
        onnxruntime.set_default_logger_severity(_WARNINGS)
