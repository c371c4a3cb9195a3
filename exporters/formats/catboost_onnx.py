"""CatBoost's trees as one ``TreeEnsembleRegressor``, and the link function of the loss after it."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import helper, numpy_helper

from modelport.exporters.formats import onnx_opsets
from modelport.exporters.sources.trees import catboost_model
from modelport.exporters.sources.trees.fitted_model import FEATURES, FittedModel
from modelport.gateway.types import Array


def convert(fitted: FittedModel) -> onnx.ModelProto:
    """Write the graph; its output has the name of the model's."""
    ensemble: catboost_model.Ensemble = fitted.model
    leaf, count = ensemble.is_leaf, len(ensemble.below)
    tree = np.repeat(
        np.arange(len(ensemble.roots)), np.diff(np.append(ensemble.roots, count))
    )  # of each node
    number = np.arange(count) - ensemble.roots[tree]  # within its tree
    width = len(ensemble.bias)
    at = np.flatnonzero(leaf)
    raw = helper.make_node(
        "TreeEnsembleRegressor",
        [FEATURES],
        ["raw"],
        domain="ai.onnx.ml",
        n_targets=width,
        base_values=ensemble.bias.tolist(),
        nodes_treeids=tree.tolist(),
        nodes_nodeids=number.tolist(),
        nodes_featureids=ensemble.features.tolist(),
        nodes_values=ensemble.borders.tolist(),
        nodes_modes=np.where(leaf, "LEAF", "BRANCH_GT").tolist(),
        nodes_truenodeids=np.where(leaf, 0, number[ensemble.above]).tolist(),
        nodes_falsenodeids=np.where(leaf, 0, number[ensemble.below]).tolist(),
        nodes_missing_value_tracks_true=ensemble.missing_above.astype(int).tolist(),
        target_treeids=np.repeat(tree[at], width).tolist(),
        target_nodeids=np.repeat(number[at], width).tolist(),
        target_ids=np.tile(np.arange(width), len(at)).tolist(),
        target_weights=ensemble.values[at].ravel().tolist(),
    )
    links, constants = _link(ensemble.answer, fitted.output)
    graph = helper.make_graph(
        [raw, *links],
        "catboost",
        [helper.make_tensor_value_info(FEATURES, onnx.TensorProto.FLOAT, [None, fitted.features])],
        [helper.make_tensor_value_info(fitted.output, onnx.TensorProto.FLOAT, None)],
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    sets = (("", onnx_opsets.TREES), ("ai.onnx.ml", onnx_opsets.TREES_ML))
    return helper.make_model(graph, opset_imports=[helper.make_opsetid(*each) for each in sets])


def _link(answer: str, output: str) -> tuple[list[onnx.NodeProto], dict[str, Array]]:
    """The nodes from ``raw`` to ``output``, and their constants."""
    node = helper.make_node
    if answer == catboost_model.BINARY:
        return [
            node("Sigmoid", ["raw"], ["second"]),
            node("Sub", ["one", "second"], ["first"]),
            node("Concat", ["first", "second"], [output], axis=1),
        ], {"one": np.ones(1, np.float32)}
    if answer == catboost_model.UNCERTAINTY:  # a mean, and the logarithm of a standard deviation
        return [
            node("Add", ["raw", "raw"], ["twice"]),
            node("Exp", ["twice"], ["variance"]),
            node("Where", ["is_variance", "variance", "raw"], [output]),
        ], {"is_variance": np.array([False, True])}
    kinds = {
        catboost_model.SOFTMAX: "Softmax",
        catboost_model.SIGMOID: "Sigmoid",
        catboost_model.EXP: "Exp",
    }
    return [node(kinds.get(answer, "Identity"), ["raw"], [output])], {}
