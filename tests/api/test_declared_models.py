"""``@modelport.model`` without a gateway: type hints, and values that a model returns."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, TypedDict

import numpy as np
import pytest

import modelport
import triton_python_backend_utils as pb_utils
from modelport.gateway.errors import Internal
from modelport.python_models import ATTRIBUTE, ModelDefinition
from modelport.tensor_types import TensorType

Array = modelport.Array
Pair = Annotated[np.ndarray, modelport.Array["FP32", 2]]


class TextAndNumbers(TypedDict):
    first: str
    rest: list[int]


def definition(target: Any) -> ModelDefinition:
    found: ModelDefinition = vars(target)[ATTRIBUTE]
    return found


def config_of(target: Any) -> dict[str, Any]:
    empty = pb_utils.ModelConfig('{"name": "m", "input": [], "output": []}')
    return definition(target).auto_complete_config(empty).as_dict()


def test_a_declared_model_stays_what_it_is() -> None:
    @modelport.model(batch=8)
    def count(text: list[str]) -> list[int]:
        return [len(each) for each in text]

    @modelport.model
    class Doubled:
        def predict(self, x: float) -> float:
            return 2 * x

    assert count(["a", "bc"]) == [1, 2]
    assert Doubled().predict(2.0) == 4.0


@pytest.mark.parametrize(
    ("hint", "batch", "data_type", "dims"),
    [
        (str, 0, "TYPE_STRING", None), (bytes, 0, "TYPE_STRING", None),
        (int, 0, "TYPE_INT64", None), (float, 0, "TYPE_FP64", None), (bool, 0, "TYPE_BOOL", None),
        (list[str], 0, "TYPE_STRING", [-1]), (list[str], 4, "TYPE_STRING", None),
        (list[int], 4, "TYPE_INT64", None), (Array["FP32", 2, -1], 4, "TYPE_FP32", [2, -1]),
        (Array["FP16"], 4, "TYPE_FP16", None), (Array[np.uint8, 3], 0, "TYPE_UINT8", [3]),
        (Array["BYTES", 3], 0, "TYPE_STRING", [3]), (Pair, 4, "TYPE_FP32", [2]),
        (str | None, 0, "TYPE_STRING", None), ("list[float]", 0, "TYPE_FP64", [-1]),
    ],
)  # fmt: skip
def test_type_hints_are_tensors(
    hint: Any, batch: int, data_type: str, dims: list[int] | None
) -> None:
    def both(x: Any) -> Any: ...

    both.__annotations__ = {"x": hint, "return": hint}
    config = config_of(modelport.model(batch=batch)(both))
    single = {"reshape": {"shape": []}} if dims is None else {}
    tensor = {"data_type": data_type, "dims": dims or [1], **single}
    assert config["input"] == [{"name": "x", **tensor}]
    assert config["output"] == [{"name": "output", **tensor}]
    assert config["max_batch_size"] == batch
    assert ("dynamic_batching" in config) == (batch > 0)


def test_hints_are_completed_by_declarations() -> None:
    @modelport.model(
        name="other", inputs={"x": Array["FP32", 4], "y": float}, outputs={"z": Array["FP32", 4]}
    )
    def scale(x, **others): ...

    @modelport.model
    def named(text: str, limit: int = 3) -> TextAndNumbers: ...

    assert [each["name"] for each in config_of(scale)["input"]] == ["x", "y"]
    assert [each["name"] for each in config_of(scale)["output"]] == ["z"]
    assert [each.get("optional", False) for each in config_of(named)["input"]] == [False, True]
    assert [each["name"] for each in config_of(named)["output"]] == ["first", "rest"]


def test_generators_are_decoupled() -> None:
    @modelport.model
    def one(text: str) -> Iterator[str]:
        yield text

    @modelport.model
    async def two(text: str) -> AsyncIterator[str]:
        yield text

    @modelport.model(outputs={"part": str})
    def three(text: str):
        yield text

    for model in (one, two, three):
        assert config_of(model)["model_transaction_policy"] == {"decoupled": True}


def no_hint(x) -> float: ...
def no_return(x: float): ...
def nothing() -> float: ...
def unknown(x: dict[str, int]) -> float: ...
def array(x: np.ndarray) -> float: ...
def missing(x: Missing) -> float: ...  # noqa: F821
def datatype(x: Annotated[np.ndarray, modelport.Array["FP31", 2]]) -> float: ...
def dim(x: Annotated[np.ndarray, modelport.Array["FP32", 0]]) -> float: ...
def single(x: str) -> list[float]: ...
def many(*x: float) -> float: ...
def others(**x: float) -> float: ...
def generator(x: float) -> float:
    yield x


def stream(x: list[float]) -> Iterator[float]: ...


class NoPredict: ...


class AsyncLoad:
    async def load(self) -> None: ...
    def predict(self, x: float) -> float: ...


@pytest.mark.parametrize(
    ("target", "options", "words"),
    [
        (no_hint, {}, "model 'no_hint' has no type hint for its input 'x'; write x: list[str], or"),
        (no_return, {}, "has no type hint for what it returns; write -> modelport.Array"),
        (nothing, {}, "model 'nothing' takes no input"),
        (unknown, {}, "input 'x' has the type hint dict[str, int], which is not one of str, bytes"),
        (array, {}, "input 'x' has the type hint ndarray, which is not one of"),
        (missing, {}, "a type hint that cannot be evaluated: name 'Missing' is not defined"),
        (datatype, {}, "there is no datatype 'FP31'; name one of BOOL, UINT8"),
        (dim, {}, "a dim is a number above 0, or -1 for any size, not 0"),
        (single, {"batch": 2}, "input 'x' has the type hint str; with 'batch', the model gets"),
        (many, {}, "has the parameter *x: float; inputs are passed by name"),
        (others, {}, "has the parameter **x: float; inputs are passed by name"),
        (unknown, {"inputs": {"y": float, "x": float}}, "declares the input 'y', which it does"),
        (generator, {}, "has no type hint for what it returns; write -> Iterator[str]"),
        (stream, {"batch": 2}, "streams its responses to one request at a time; remove 'batch'"),
        (single, {"batch": -1}, "has the batch -1, which is not a number of items"),
        (NoPredict, {}, "model 'NoPredict' is a class without a method 'predict'"),
        (AsyncLoad, {}, "has an 'async def load'; write 'def load'"),
        (print, {}, "decorates a function or a class, not builtin_function_or_method"),
    ],
)  # fmt: skip
def test_a_declaration_that_is_no_model_is_refused(
    target: Callable[..., Any], options: Any, words: str
) -> None:
    with pytest.raises(modelport.InvalidArgument) as caught:
        modelport.model(**options)(target)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


#: Type, size of the batch, and values that are right, or their errors.
VALUES: list[tuple[TensorType, int | None, Any, str]] = [
    (Array["FP32", 2], None, np.zeros(2, np.float32), ""),
    (Array["FP32", 2], None, [1, 2.5], ""),
    (Array["FP32", 2], 3, np.zeros((3, 2), np.float32), ""),
    (Array["FP32", 2], None, np.zeros(2, np.float16), ""),
    (Array["FP32", -1], None, [], ""),
    (Array["FP32"], 2, np.zeros(2, np.float32), ""),
    (Array["FP32"], None, np.float32(3), ""),
    (Array["INT8", 1], None, [127], ""),
    (Array["BYTES", 2], None, ["a", b"b"], ""),
    (Array["BYTES", 2], None, np.array(["a", "b"]), ""),
    (Array["FP32", 2], None, np.zeros(2), "must be FP32, but the model returns FP64; convert it"),
    (Array["INT64", 1], None, [1.5], "must be INT64, but the model returns FP64"),
    (Array["INT8", 1], None, [128], "is not INT8: "),
    (Array["INT64", 1], None, np.ones(1, np.uint64), "must be INT64, but the model returns UINT64"),
    (Array["FP32", 2], None, np.zeros(3, np.float32), "must have dims [2], but the model returns"),
    (Array["FP32", 2], None, np.zeros((1, 2), np.float32), "must have dims [2], but the model re"),
    (Array["FP32", 2], None, [[1], [1, 2]], "is not FP32: "),
    (Array["FP32", 2], None, None, "must be FP32, but the model returns NoneType"),
    (Array["FP32", 2], None, "ab", "must be FP32, but the model returns str"),
    (Array["FP32", 2], 3, np.zeros((2, 2), np.float32), "must have 3 items, one for each of the"),
    (Array["FP32"], 2, np.float32(1), "must have 2 items, one for each of the batch, but the mod"),
    (Array["BYTES", 2], None, [1, 2], "must be BYTES, of str or bytes, but the model returns int"),
    (Array["BYTES", 1], None, [None], "must be BYTES, of str or bytes, but the model returns None"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "rows", "value", "words"), VALUES, ids=range(len(VALUES)))
def test_a_returned_value_is_checked(
    kind: TensorType, rows: int | None, value: Any, words: str
) -> None:
    if words:
        with pytest.raises(Internal) as caught:
            kind.array(value, "y", rows)
        assert f"output 'y' {words}" in str(caught.value)
        return
    array = kind.array(value, "y", rows)
    assert pb_utils.Tensor("y", array).triton_dtype() == kind.triton_type
    assert array.tolist() == np.array(value, object).tolist()


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        (1.0, "model 'm' must return a dictionary of its outputs a, b, not float"),
        ({"a": 1.0}, "model 'm' must return the outputs a, b, not a"),
        ({"a": 1.0, "b": 1.0, "c": 1.0}, "model 'm' must return the outputs a, b, not a, b, c"),
        ({}, "model 'm' must return the outputs a, b, not none"),
    ],
)
def test_each_output_is_returned_once(returned: Any, words: str) -> None:
    @modelport.model(name="m", outputs={"a": float, "b": float})
    def two(x: float) -> Any: ...

    with pytest.raises(Internal) as caught:
        definition(two).arrays(returned)
    assert str(caught.value) == words


def test_other_models_are_not_there_without_a_gateway() -> None:
    with pytest.raises(modelport.Unavailable, match="only be called while a gateway's model"):
        modelport.infer("other", {"x": [1.0]})
    with pytest.raises(modelport.Unavailable):
        next(modelport.infer_stream("other", {"x": [1.0]}))


def test_a_declaration_needs_numpy_alone() -> None:
    """A worker's interpreter may be that of an environment without modelport."""
    code = (
        "import sys; sys.path += sys.argv[1:]; import numpy; before = set(sys.modules)\n"
        "import modelport\n"
        "@modelport.model\ndef f(x: float) -> float: return modelport.infer('m', {'x': x})\n"
        "try: f(1.0)\nexcept modelport.Unavailable: pass\n"
        "others = {m.split('.')[0] for m in set(sys.modules) - before} - sys.stdlib_module_names\n"
        "print(sorted(others), [m for m in sys.modules if m.startswith('modelport.gateway.')])"
    )
    paths = [str(Path(package.__file__).parents[1]) for package in (modelport, np)]
    command = [sys.executable, "-I", "-S", "-c", code, *paths]
    done = subprocess.run(command, capture_output=True, text=True)
    known = ["modelport", "numpy", "triton_python_backend_utils"]
    assert done.stdout == f"{known} ['modelport.gateway.errors']\n", done.stderr
