"""scikit-learn, XGBoost and LightGBM to ONNX, through skl2onnx and onnxmltools."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from modelport.exporters.formats import onnx_opsets
from modelport.exporters.formats.base import ExportTarget
from modelport.exporters.loaded_model import Framework, Source
from modelport.exporters.runtime.output_capture import quiet
from modelport.exporters.sources.trees.fitted_model import (
    FEATURES,
    PREDICTION,
    PROBABILITIES,
    FittedModel,
)
from modelport.gateway.errors import Unsupported, first_line
from modelport.gateway.types import Datatype

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
            if fitted.framework is Framework.SCIKIT_LEARN:
                _send_missing(model, fitted)
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
    opsets = {"": onnx_opsets.TREES, "ai.onnx.ml": onnx_opsets.TREES_ML}
    model: onnx.ModelProto
    if fitted.framework is Framework.SCIKIT_LEARN:
        import skl2onnx
        from skl2onnx.common import data_types

        kinds = {
            Datatype.FP32: data_types.FloatTensorType,
            Datatype.BYTES: data_types.StringTensorType,
        }
        types = [(spec.name, kinds[spec.datatype]([None, *spec.dims])) for spec in fitted.inputs]
        last = {id(_last(fitted.model)): {"raw_scores": True}} if fitted.scores else {}
        whole = {id(fitted.model): {"zipmap": False}} if hasattr(fitted.model, "classes_") else {}
        both = {key: {**whole.get(key, {}), **last.get(key, {})} for key in {**whole, **last}}
        for options in (both, last, whole):
            with contextlib.suppress(NameError):  # not every classifier has each of the options
                model = skl2onnx.convert_sklearn(
                    fitted.model, initial_types=types, options=options, target_opset=opsets
                )
                break
        for node in model.graph.node:
            if node.op_type == "StringNormalizer":  # few machines have the default, en_US
                kept = [each for each in node.attribute if each.name != "locale"]
                del node.attribute[:]
                node.attribute.extend((*kept, onnx.helper.make_attribute("locale", "C.UTF-8")))
        return model
    import onnxmltools
    from onnxmltools.convert.common import data_types

    types = [(FEATURES, data_types.FloatTensorType([None, fitted.features]))]
    if fitted.framework is Framework.XGBOOST:
        model = onnxmltools.convert_xgboost(fitted.model, initial_types=types)
    else:
        model = onnxmltools.convert_lightgbm(fitted.model, initial_types=types, zipmap=False)
    return model


def _last(estimator: Any) -> Any:
    """The last step of a pipeline, which decides."""
    while hasattr(estimator, "steps"):
        estimator = estimator.steps[-1][1]
    return estimator


def _send_missing(model: onnx.ModelProto, fitted: FittedModel) -> None:
    """Have NaN take the branch that it takes in scikit-learn; skl2onnx sends it to the right."""
    from modelport.exporters.sources.trees.scikit_learn import trees_of

    trees = [(*_splits(x), x.missing_go_to_left) for x in trees_of(fitted.model)]
    for node in model.graph.node:
        if not node.op_type.startswith("TreeEnsemble"):
            continue
        fields = {attribute.name: attribute for attribute in node.attribute}
        numbers = np.array(fields["nodes_treeids"].ints)
        named = ("nodes_truenodeids", "nodes_falsenodeids", "nodes_featureids")
        columns = np.array([fields[name].ints for name in named])
        values = np.array(fields["nodes_values"].floats)
        missing = np.array(fields["nodes_missing_value_tracks_true"].ints)
        for number in np.unique(numbers):
            rows = numbers == number
            for structure, thresholds, left in trees:
                if np.array_equal(structure, columns[:, rows]) and np.allclose(
                    thresholds, values[rows], rtol=1e-6
                ):
                    missing[rows] = left
                    break
        fields["nodes_missing_value_tracks_true"].ints[:] = missing.tolist()


def _splits(tree: Any) -> tuple[Any, Any]:
    """Branches and features of each node, and its threshold, as skl2onnx writes them."""
    inner = tree.children_left >= 0
    structure = np.array([tree.children_left, tree.children_right, tree.feature])
    return np.where(inner, structure, 0), np.where(inner, tree.threshold, 0)


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
    elif fitted.scores and fitted.outputs == 1:
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
