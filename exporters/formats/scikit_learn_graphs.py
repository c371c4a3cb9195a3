"""Repairs of graphs that skl2onnx writes with other answers than scikit-learn's."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx

from modelport.exporters.sources.trees.fitted_model import FittedModel
from modelport.exporters.sources.trees.skops_file import trees_of

#: Few machines have skl2onnx's default, en_US.
LOCALE = "C.UTF-8"
#: Rounding errors of the steps before a tree are smaller, in relation to a split or to 1.
MARGIN = 2.0**-18


def repair(model: onnx.ModelProto, fitted: FittedModel) -> None:
    """Repair locale, missing values, distances of neighbours and isotonic calibration."""
    for node in model.graph.node:
        if node.op_type == "StringNormalizer":
            kept = [each for each in node.attribute if each.name != "locale"]
            del node.attribute[:]
            node.attribute.extend((*kept, onnx.helper.make_attribute("locale", LOCALE)))
    send_missing(model, fitted)
    weigh_by_distance(model)
    interpolate(model)
    if not fitted.direct:
        lower_splits(model)


def send_missing(model: onnx.ModelProto, fitted: FittedModel) -> None:
    """Have NaN take the branch that it takes in scikit-learn; skl2onnx sends it to the right."""
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


def lower_splits(model: onnx.ModelProto) -> None:
    """Lower XGBoost's splits (``x < t``) by more than the rounding errors of earlier steps.

    XGBoost splits at values of the training, scaled in float64: whole numbers would often lie on
    the other side of their split, once a step computes them in float32.
    """
    for node in model.graph.node:
        fields = {attribute.name: attribute for attribute in node.attribute}
        if "nodes_modes" not in fields:
            continue
        values = fields["nodes_values"].floats
        for index, mode in enumerate(fields["nodes_modes"].strings):
            if mode == b"BRANCH_LT":
                values[index] -= MARGIN * max(1.0, abs(values[index]))


def weigh_by_distance(model: onnx.ModelProto) -> None:
    """Weigh neighbours by their distance; skl2onnx negates it, and then weighs all alike."""
    sources = {name: node for node in model.graph.node for name in node.output}
    for node in model.graph.node:
        product = sources.get(node.input[0]) if node.op_type == "Max" else None
        if product is not None and product.op_type == "Mul":
            distances = sources.get(product.input[0])
            if distances is not None and distances.op_type == "TopK":
                node.input[0] = product.input[0]


def interpolate(model: onnx.ModelProto) -> None:
    """Interpolate isotonic calibration; skl2onnx takes the nearest of the trained points."""
    graph: Any = model.graph
    constants = {each.name: each for each in graph.initializer}
    sources = {name: node for node in graph.node for name in node.output}
    for node in list(graph.node):
        if node.op_type != "ArrayFeatureExtractor" or node.input[0] not in constants:
            continue
        chain: list[Any] = [node]
        for place in (1, 0, 0):  # of the input that is computed
            chain.append(sources.get(chain[-1].input[place]) if chain[-1] else None)
        if [each and each.op_type for each in chain[1:]] != ["ArgMin", "Abs", "Sub"]:
            continue
        nearest, absolute, distance = chain[1:]
        x = onnx.numpy_helper.to_array(constants[distance.input[1]]).astype(np.float64)
        y = onnx.numpy_helper.to_array(constants[node.input[0]]).astype(np.float64)
        steps, name = np.diff(x), node.output[0]
        values = {
            "zero": np.float32(0),
            "steps": steps.astype(np.float32),
            "slopes": (np.diff(y) / steps)[:, None].astype(np.float32),
            "start": np.float32(y[0]),
            "starts": np.arange(len(steps)),
        }
        new = {key: f"{name}_{key}" for key in (*values, "beyond", "above", "within", "risen")}
        graph.initializer.extend(
            onnx.numpy_helper.from_array(np.asarray(v), new[k]) for k, v in values.items()
        )
        make = onnx.helper.make_node
        nodes = [
            make("Gather", [distance.output[0], new["starts"]], [new["beyond"]], axis=1),
            make("Max", [new["beyond"], new["zero"]], [new["above"]]),
            make("Min", [new["above"], new["steps"]], [new["within"]]),
            make("MatMul", [new["within"], new["slopes"]], [new["risen"]]),
            make("Add", [new["risen"], new["start"]], [name]),
        ]
        place = list(graph.node).index(node)
        graph.node.remove(node)
        for offset, each in enumerate(nodes):
            graph.node.insert(place + offset, each)
        graph.node.remove(nearest)
        graph.node.remove(absolute)
