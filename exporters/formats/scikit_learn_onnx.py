"""scikit-learn to ONNX through skl2onnx, with the estimators and functions that it lacks."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx

from modelport.exporters.formats import onnx_opsets, scikit_learn_graphs, scikit_learn_rewriting
from modelport.exporters.formats.scikit_learn_rewriting import Affine, CategoryMembers
from modelport.exporters.sources.trees.fitted_model import SCORES, TRANSFORMED, FittedModel
from modelport.exporters.sources.trees.skops_file import BOOSTERS, values_of
from modelport.exporters.sources.trees.sound_arrays import kind_of
from modelport.gateway.types import Datatype

#: The tokens of scikit-learn's text vectorizers, in RE2's syntax, which has no ``(?u)``.
TOKENS = {r"(?u)\b\w\w+\b": r"[\pL\pN_][\pL\pN_]+", r"(?u)\b\w+\b": r"[\pL\pN_]+"}
#: Functions of NumPy by the operators that compute them; a number is added.
FUNCTIONS: dict[str, tuple[str | float, ...]] = {
    "log1p": (1.0, "Log"),
    "expm1": ("Exp", -1.0),
    "absolute": ("Abs",),
    "square": ("Square",),
    "negative": ("Neg",),
    "rint": ("Round",),
    "reciprocal": ("Reciprocal",),
    **{name: (name.capitalize(),) for name in ("log", "exp", "sqrt", "sin", "cos", "tan", "tanh")},
    **{name: (name.capitalize(),) for name in ("floor", "ceil", "sign")},
}


def convert(fitted: FittedModel) -> onnx.ModelProto:
    """Convert a model with skl2onnx.

    Raises:
        Exception: any, from skl2onnx, about a part that it does not convert.
    """
    import skl2onnx
    from skl2onnx.common import data_types

    _register(any(kind_of(value).startswith(BOOSTERS) for value in values_of(fitted.model)))
    estimator = scikit_learn_rewriting.rewritten(fitted.model, fitted.output == TRANSFORMED)
    kinds = {
        Datatype.FP32: data_types.FloatTensorType,
        Datatype.BYTES: data_types.StringTensorType,
    }
    types = [(spec.name, kinds[spec.datatype]([None, *spec.dims])) for spec in fitted.inputs]
    texts = {
        id(value): {"tokenexp": TOKENS[value.token_pattern]}
        for value in values_of(estimator)
        if getattr(value, "token_pattern", None) in TOKENS and value.analyzer == "word"
    }
    last = {id(_last(estimator)): {"raw_scores": True}} if fitted.output == SCORES else {}
    whole = {id(estimator): {"zipmap": False}} if hasattr(estimator, "classes_") else {}
    both = {key: {**whole.get(key, {}), **last.get(key, {})} for key in {**whole, **last}}
    for options in (both, last, whole, {}):
        with contextlib.suppress(NameError):  # not every classifier has each of the options
            model: onnx.ModelProto = skl2onnx.convert_sklearn(
                estimator,
                initial_types=types,
                options={**texts, **options},
                target_opset={"": onnx_opsets.TREES, "ai.onnx.ml": onnx_opsets.TREES_ML},
            )
            break
    scikit_learn_graphs.repair(model, fitted)
    return model


def _last(estimator: Any) -> Any:
    """The last step of a pipeline, which decides."""
    while hasattr(estimator, "steps"):
        estimator = estimator.steps[-1][1]
    return estimator


@functools.cache
def _register(boosters: bool) -> None:
    """Give skl2onnx the converters that it lacks."""
    from skl2onnx import update_registered_converter as register
    from sklearn.compose import TransformedTargetRegressor
    from sklearn.impute import MissingIndicator
    from sklearn.preprocessing import FunctionTransformer

    width: Callable[[Any], int]
    for kind, width, nodes in (
        (FunctionTransformer, lambda step: step.n_features_in_, _convert_function),
        (MissingIndicator, lambda step: len(step.features_), _convert_indicator),
        (CategoryMembers, lambda step: step.width, _convert_members),
        (Affine, lambda step: len(step.bias), _convert_affine),
        (TransformedTargetRegressor, _targets, _convert_target),
    ):
        shape = functools.partial(_calculate_width, width)
        register(kind, f"Modelport{kind.__name__}", shape, nodes)
    if boosters:
        _register_boosters()


def _calculate_width(width: Callable[[Any], int], operator: Any) -> None:
    from skl2onnx.common.data_types import FloatTensorType

    rows = operator.inputs[0].get_first_dimension()
    operator.outputs[0].type = FloatTensorType([rows, width(operator.raw_operator)])


def _register_boosters() -> None:
    import lightgbm
    import xgboost
    from onnxmltools.convert.lightgbm.operator_converters.LightGbm import convert_lightgbm
    from onnxmltools.convert.xgboost.operator_converters.XGBoost import convert_xgboost
    from skl2onnx import update_registered_converter as register
    from skl2onnx.common import shape_calculator as shapes

    options = {"nocl": [True, False], "zipmap": [True, False, "columns"]}
    libraries = ((xgboost.XGBModel, convert_xgboost), (lightgbm.LGBMModel, convert_lightgbm))
    for library, convert_one in libraries:
        for kind in library.__subclasses__():
            if kind.__name__.endswith("Classifier"):
                shape = shapes.calculate_linear_classifier_output_shapes
                register(kind, f"Modelport{kind.__name__}", shape, convert_one, options=options)
            else:
                shape = shapes.calculate_linear_regressor_output_shapes
                register(kind, f"Modelport{kind.__name__}", shape, convert_one)


class _Nodes:
    """Nodes of one operator, each with one output."""

    def __init__(self, scope: Any, operator: Any, container: Any):
        self.scope, self.container = scope, container
        self.inputs = [each.full_name for each in operator.inputs]
        self.result = operator.outputs[0].full_name

    @property
    def matrix(self) -> str:
        """All inputs side by side."""
        return self("Concat", *map(self.floats, self.inputs), axis=1)

    def constant(self, value: Any) -> str:
        array = np.asarray(value)
        name: str = self.scope.get_unique_variable_name("constant")
        kind = onnx.helper.np_dtype_to_tensor_dtype(array.dtype)
        self.container.add_initializer(name, kind, list(array.shape), array.ravel().tolist())
        return name

    def __call__(self, kind: str, *inputs: Any, **attributes: Any) -> str:
        found: str = self.scope.get_unique_variable_name("computed")
        names = [each if isinstance(each, str) else self.constant(each) for each in inputs]
        name = self.scope.get_unique_operator_name(kind)
        self.container.add_node(kind, names, found, name=name, **attributes)
        return found

    def floats(self, name: str) -> str:
        return self("Cast", name, to=onnx.TensorProto.FLOAT)

    def finish(self, name: str) -> None:
        self.container.add_node(
            "Identity", name, self.result, name=self.scope.get_unique_operator_name("Identity")
        )

    def apply(self, function: Any, value: str) -> str:
        """Compute a function of NumPy; None is the identity."""
        name = getattr(function, "__name__", str(function))
        if function is None:
            return value
        if name not in FUNCTIONS or getattr(np, name) is not function:
            raise NotImplementedError(f"the function {name}() has no conversion")
        for step in FUNCTIONS[name]:
            if isinstance(step, float):
                value = self("Add", value, np.float32(step))
            elif step == "Square":
                value = self("Mul", value, value)
            else:
                value = self(step, value)
        return value


def _convert_function(scope: Any, operator: Any, container: Any) -> None:
    nodes, step = _Nodes(scope, operator, container), operator.raw_operator
    if step.kw_args:
        raise NotImplementedError("a FunctionTransformer with kw_args has no conversion")
    nodes.finish(nodes.apply(step.func, nodes.matrix))


def _convert_indicator(scope: Any, operator: Any, container: Any) -> None:
    nodes, step = _Nodes(scope, operator, container), operator.raw_operator
    if isinstance(step.missing_values, float) and np.isnan(step.missing_values):
        found = nodes("IsNaN", nodes.matrix)
    else:
        found = nodes("Equal", nodes.matrix, np.float32(step.missing_values))
    chosen = np.asarray(step.features_, np.int64)
    nodes.finish(nodes.floats(nodes("Gather", found, chosen, axis=1)))


def _convert_members(scope: Any, operator: Any, container: Any) -> None:
    nodes, step = _Nodes(scope, operator, container), operator.raw_operator
    columns = nodes("Gather", nodes.matrix, step.order, axis=1)
    found = [columns]
    for column, categories, members in step.tables:
        if categories.dtype.kind in "OU":
            raise NotImplementedError("splits on categories of texts have no conversion")
        one = nodes("Gather", columns, np.array([column]), axis=1)
        equal = nodes.floats(nodes("Equal", one, categories.astype(np.float32)))
        others = members[-1].astype(np.float32)
        rows = members[: len(categories)] - others
        found.append(nodes("Add", nodes("MatMul", equal, rows), others))
    nodes.finish(nodes("Concat", *found, axis=1))


def _convert_affine(scope: Any, operator: Any, container: Any) -> None:
    nodes, step = _Nodes(scope, operator, container), operator.raw_operator
    nodes.finish(nodes("Add", nodes("MatMul", nodes.matrix, step.matrix), step.bias))


def _targets(step: Any) -> int:
    return 1 if step._training_dim == 1 else int(step.transformer_.n_features_in_)


def _convert_target(scope: Any, operator: Any, container: Any) -> None:
    from skl2onnx.algebra.onnx_operator import OnnxSubEstimator
    from skl2onnx.algebra.onnx_ops import OnnxIdentity

    nodes, step = _Nodes(scope, operator, container), operator.raw_operator
    inner = scope.get_unique_variable_name("regressor")
    opset = container.target_opset
    regressor = OnnxSubEstimator(step.regressor_, *operator.inputs, op_version=opset)
    OnnxIdentity(regressor, op_version=opset, output_names=[inner]).add_to(scope, container)
    transformer = step.transformer_
    kind = type(transformer).__name__
    if kind == "FunctionTransformer":
        value = nodes.apply(transformer.inverse_func, inner)
    elif kind == "StandardScaler":
        scale = 1.0 if transformer.scale_ is None else transformer.scale_
        centre = 0.0 if transformer.mean_ is None else transformer.mean_
        value = nodes("Add", nodes("Mul", inner, np.float32(scale)), np.float32(centre))
    else:
        raise NotImplementedError(f"a target that {kind} transforms has no conversion")
    nodes.finish(nodes("Reshape", value, np.array([-1, _targets(step)])))
