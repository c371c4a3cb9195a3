"""scikit-learn, XGBoost, LightGBM and CatBoost to ONNX."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from modelport.exporters.formats import catboost_onnx, onnx_opsets, scikit_learn_onnx
from modelport.exporters.formats.base import ExportTarget
from modelport.exporters.loaded_model import Framework, Source
from modelport.exporters.runtime.output_capture import quiet
from modelport.exporters.sources.trees.fitted_model import (
    FEATURES,
    PREDICTION,
    PROBABILITIES,
    SCORES,
    FittedModel,
)
from modelport.gateway.errors import Unsupported, first_line

#: Libraries whose probabilities are means of many trees, which rounding takes above 1; those of the
#: others come from a sigmoid or a softmax.
AVERAGING = frozenset({Framework.SCIKIT_LEARN})
_LESS_OR_EQUAL = b"BRANCH_LEQ"
#: An error about an estimator that has no conversion.
_MISSING = re.compile(r"for type '?<class '([\w.]+)'>")


def export(source: Source, path: Path, target: ExportTarget) -> None:
    """Write ``source`` to ``path``; the batch is symbolic.

    Raises:
        Unsupported: the model has no conversion, or another operator set is requested.
    """
    if target.opset not in (None, onnx_opsets.TREES):
        raise Unsupported(f"--opset {target.opset} is not supported for this model; omit it")
    fitted: FittedModel = source.model
    try:
        with quiet():
            model = _convert(fitted)
            _tighten(model, fitted)
            _name(model, fitted)
            onnx.checker.check_model(model)
            onnx.save(model, path)
    except OSError:
        raise
    except Exception as error:
        missing = _MISSING.search(str(error))
        reason = f"it does not know {missing[1]}" if missing else first_line(error)
        tool = "skl2onnx" if fitted.framework is Framework.SCIKIT_LEARN else "onnxmltools"
        raise Unsupported(
            f"{tool} cannot export this model ({reason}); train one without that part"
        ) from error


def _convert(fitted: FittedModel) -> onnx.ModelProto:
    model: onnx.ModelProto
    if fitted.framework is Framework.SCIKIT_LEARN:
        return scikit_learn_onnx.convert(fitted)
    if fitted.framework is Framework.CATBOOST:
        return catboost_onnx.convert(fitted)
    import onnxmltools
    from onnxmltools.convert.common import data_types

    types = [(FEATURES, data_types.FloatTensorType([None, fitted.features]))]
    if fitted.framework is Framework.XGBOOST:
        model = onnxmltools.convert_xgboost(fitted.model, initial_types=types)
    else:
        model = onnxmltools.convert_lightgbm(fitted.model, initial_types=types, zipmap=False)
    return model


def _tighten(model: onnx.ModelProto, fitted: FittedModel) -> None:
    """Round each threshold of ``x <= t`` down, as float32 features compare with it.

    Converters round to the nearest, and send a feature between the two to the wrong side.
    """
    below = {
        (feature, float(np.float32(t))): float(np.nextafter(np.float32(t), np.float32(-np.inf)))
        for feature, splits in fitted.splits.items()
        for t in splits
        if np.float32(t) > t
    }
    for node in model.graph.node:
        if not node.op_type.startswith("TreeEnsemble"):
            continue
        fields = {attribute.name: attribute for attribute in node.attribute}
        rows = zip(fields["nodes_modes"].strings, fields["nodes_featureids"].ints, strict=True)
        values = fields["nodes_values"].floats
        for index, (mode, feature) in enumerate(rows):
            if mode == _LESS_OR_EQUAL and (feature, values[index]) in below:
                values[index] = below[feature, values[index]]


def _name(model: onnx.ModelProto, fitted: FittedModel) -> None:
    """Keep the probabilities or predictions alone, under their name; name the batch."""
    graph: Any = model.graph
    # Classifiers give labels first, clusterers and outlier detectors labels and then scores.
    chosen = graph.output[0 if fitted.output == PREDICTION else -1]
    old, new = chosen.name, fitted.output
    if chosen.type.tensor_type.elem_type != onnx.TensorProto.FLOAT:
        graph.initializer.append(
            onnx.numpy_helper.from_array(np.array([-1, fitted.outputs]), "label_shape")
        )
        graph.node.extend(
            (
                onnx.helper.make_node("Cast", [old], ["label_float"], to=onnx.TensorProto.FLOAT),
                onnx.helper.make_node("Reshape", ["label_float", "label_shape"], [fitted.output]),
            )
        )
        old = ""
    elif fitted.output == PROBABILITIES and fitted.framework in AVERAGING:
        new = "unclipped"
        bounds = {"clip_minimum": 0, "clip_maximum": 1}
        graph.initializer.extend(
            onnx.numpy_helper.from_array(np.array(v, np.float32), n) for n, v in bounds.items()
        )
    elif fitted.output == SCORES and fitted.outputs == 1:
        new = "both"
        last = onnx.numpy_helper.from_array(np.array([-1]), "last")
        graph.initializer.append(last)  # of two classes, the second's score; some have only that
    for node in graph.node:
        node.output[:] = [new if old and name == old else name for name in node.output]
        node.input[:] = [new if old and name == old else name for name in node.input]
    if new == "unclipped":
        graph.node.append(onnx.helper.make_node("Clip", [new, *bounds], [fitted.output]))
    if new == "both":
        graph.node.append(onnx.helper.make_node("Gather", [new, "last"], [fitted.output], axis=1))
    shape: list[str | int | None] = ["batch", fitted.outputs]
    value = onnx.helper.make_tensor_value_info(fitted.output, onnx.TensorProto.FLOAT, shape)
    del graph.output[:]
    graph.output.append(value)
    for taken in graph.input:
        taken.type.tensor_type.shape.dim[0].dim_param = "batch"
    del graph.value_info[:]
