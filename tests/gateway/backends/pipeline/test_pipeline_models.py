"""Pipelines of real models of several backends: equal to the same steps by hand."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from ai_edge_litert import schema_py_generated as schema
from ai_edge_litert.interpreter import Interpreter
from ai_edge_litert.tools import flatbuffer_utils
from onnx import TensorProto, helper, numpy_helper

from modelport.gateway.types import Array
from tests import models
from tests.gateway.backends.python import python_models
from tests.server import Gateway, serving

READ = """
inputs = ["image"]

[outputs]
text = ["spell.text", { value = "" }]
boxes = "detect.boxes"

[steps.detect]
model = "detector"
inputs = { image = "image", threshold = { value = 0.9 } }

[steps.crop]
model = "cropper"
inputs = { image = "image", boxes = "detect.boxes" }

[steps.classify]
model = "classifier"
inputs = { crop = "crop.crops" }
condition = "crop.count > 0"

[steps.recognise]
model = "recogniser"
inputs = { crop = "crop.crops", kind = "classify.kind" }

[steps.spell]
model = "speller"
inputs = { letters = "recognise.letter" }
"""
HEAR = """
inputs = ["audio"]
outputs = { word = "word.y" }

[steps.mel]
model = "mel"
inputs = { x = "audio" }

[steps.embedding]
model = "embedding"
inputs = { x = "mel.y" }

[steps.word]
model = "word"
inputs = { x = "embedding.y" }
"""
CROP = """
def compute(image, boxes):
    padded = np.pad(image, ((0, 1), (0, 1)))
    crops = [padded[row : row + 2, column : column + 2].reshape(4) for row, column in boxes]
    crops = np.array(crops, np.float32).reshape(-1, 4)
    return {"crops": crops, "count": np.array([len(crops)], np.int64)}
"""
SPELL = """
def compute(letters):
    text = "".join(chr(97 + letter) for letter in letters.flat)
    return {"text": np.array([text.encode()], object)}
"""


def info(name: str, kind: int, *shape: str | int) -> Any:
    return helper.make_tensor_value_info(name, kind, shape)


def write_readers(root: Path) -> None:
    """Write a detector of bright pixels, and a classifier and a recogniser of patches."""
    rng, float32, int64 = np.random.default_rng(0), TensorProto.FLOAT, TensorProto.INT64
    weights = [
        numpy_helper.from_array(rng.normal(size=shape).astype(np.float32), name)
        for name, shape in (("w3", (4, 3)), ("w26", (5, 26)))
    ]
    node = helper.make_node
    graphs = {
        "detector": (
            [
                node("Greater", ["image", "threshold"], ["bright"]),
                node("NonZero", ["bright"], ["places"]),
                node("Transpose", ["places"], ["boxes"]),
            ],
            [info("image", float32, 8, 8), info("threshold", float32, 1)],
            [info("boxes", int64, "n", 2)],
        ),
        "classifier": (
            [node("MatMul", ["crop", "w3"], ["s"]), node("ArgMax", ["s"], ["kind"], axis=1)],
            [info("crop", float32, "batch", 4)],
            [info("kind", int64, "batch", 1)],
        ),
        "recogniser": (
            [
                node("Cast", ["kind"], ["number"], to=float32),
                node("Concat", ["crop", "number"], ["both"], axis=1),
                node("MatMul", ["both", "w26"], ["s"]),
                node("ArgMax", ["s"], ["letter"], axis=1),
            ],
            [info("crop", float32, "batch", 4), info("kind", int64, "batch", 1)],
            [info("letter", int64, "batch", 1)],
        ),
    }
    for name, (nodes, inputs, outputs) in graphs.items():
        used = [each for each in weights if any(each.name in made.input for made in nodes)]
        graph = helper.make_graph(nodes, name, inputs, outputs, used)
        models.save(root / name / "1" / "model.onnx", graph)
    for name, inputs, outputs in (
        ("classifier", ["crop FP32 4"], ["kind INT64 1"]),
        ("recogniser", ["crop FP32 4", "kind INT64 1"], ["letter INT64 1"]),
    ):
        config = models.config(name, inputs, outputs, 16, extra="dynamic_batching {}")
        (root / name / "config.pbtxt").write_text(config)
    for name, function, inputs, outputs in (
        ("cropper", CROP, ["image FP32 8,8", "boxes INT64 -1,2"], ["crops FP32 -1,4",
         "count INT64 1"]),
        ("speller", SPELL, ["letters INT64 -1,1"], ["text BYTES 1"]),
    ):  # fmt: skip
        config = models.config(name, inputs, outputs, 0, backend="python")
        python_models.computed(root, name, function, None)
        (root / name / "config.pbtxt").write_text(config)


def fully_connected(file: Path, weights: Array) -> None:
    """Write a TFLite model: ``y = relu(weights @ x)`` for one row ``x``."""

    def tensor(name: str, shape: list[int], buffer: int) -> Any:
        made = schema.TensorT()
        made.name, made.shape, made.buffer = name, shape, buffer
        return made

    def buffer(content: bytes = b"") -> Any:
        made = schema.BufferT()
        made.data = np.frombuffer(content, np.uint8)
        return made

    rows, columns = weights.shape
    code, operator = schema.OperatorCodeT(), schema.OperatorT()
    options = schema.FullyConnectedOptionsT()
    code.builtinCode = code.deprecatedBuiltinCode = schema.BuiltinOperator.FULLY_CONNECTED
    options.fusedActivationFunction = schema.ActivationFunctionType.RELU
    operator.inputs, operator.outputs = [0, 1, -1], [2]
    operator.builtinOptionsType = schema.BuiltinOptions.FullyConnectedOptions
    operator.builtinOptions = options
    graph, model = schema.SubGraphT(), schema.ModelT()
    graph.tensors = [
        tensor("x", [1, columns], 0), tensor("w", [rows, columns], 1), tensor("y", [1, rows], 0),
    ]  # fmt: skip
    graph.inputs, graph.outputs, graph.operators = [0], [2], [operator]
    model.version, model.operatorCodes, model.subgraphs = 3, [code], [graph]
    model.buffers = [buffer(), buffer(weights.tobytes())]
    file.parent.mkdir(parents=True)
    file.write_bytes(flatbuffer_utils.convert_object_to_bytearray(model))


HEARERS = {"mel": (8, 16), "embedding": (6, 8), "word": (3, 6)}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("pipelines")
    write_readers(root)
    models.pipeline(root, "read", READ)
    rng = np.random.default_rng(1)
    for name, shape in HEARERS.items():
        fully_connected(root / name / "1" / "model.tflite", rng.normal(size=shape).astype("f4"))
    models.pipeline(root, "hear", HEAR)
    return root


@pytest.fixture(scope="module")
def gateway(root: Path) -> Iterator[Gateway]:
    with serving(root, "--allow-python") as gateway:
        yield gateway


def ask(gateway: Gateway, model: str, name: str, data: Array) -> dict[str, Any]:
    tensor = {"name": name, "datatype": "FP32", "shape": data.shape, "data": data.tolist()}
    body = json.dumps({"inputs": [tensor]}).encode()
    url = f"http://{gateway.http}/v2/models/{model}/infer"
    with urllib.request.urlopen(urllib.request.Request(url, body), timeout=30) as answer:
        return {each["name"]: each for each in json.load(answer)["outputs"]}


def by_hand(root: Path, image: Array) -> str:
    def run(name: str, **inputs: Array) -> Array:
        session = ort.InferenceSession(root / name / "1" / "model.onnx")
        found: Array = session.run(None, inputs)[0]
        return found

    scope: dict[str, Any] = {"np": np}
    exec(CROP, scope)
    boxes = run("detector", image=image, threshold=np.array([0.9], np.float32))
    crops = scope["compute"](image, boxes)["crops"]
    letters = run("recogniser", crop=crops, kind=run("classifier", crop=crops))
    exec(SPELL, scope)
    text: str = scope["compute"](letters)["text"][0].decode()
    return text


def test_detect_classify_recognise_with_python_between(gateway: Gateway, root: Path) -> None:
    rng, texts = np.random.default_rng(2), set()
    for _ in range(5):
        image = rng.random((8, 8), np.float32)
        outputs = ask(gateway, "read", "image", image)
        assert outputs["text"]["data"] == [by_hand(root, image)]
        assert outputs["boxes"]["data"] == np.argwhere(image > np.float32(0.9)).ravel().tolist()
        texts.add(outputs["text"]["data"][0])
    assert len(texts) == 5
    assert all(texts)


def test_what_is_not_there_is_not_classified(gateway: Gateway) -> None:
    outputs = ask(gateway, "read", "image", np.zeros((8, 8)))
    assert (outputs["text"]["data"], outputs["boxes"]["shape"]) == ([""], [0, 2])


def test_an_error_says_which_step_refused(gateway: Gateway) -> None:
    with pytest.raises(urllib.error.HTTPError) as caught:
        ask(gateway, "read", "image", np.ones((8, 8)))  # 64 crops in one batch
    with caught.value as error:
        text = json.load(error)["error"]
    assert (error.code, text[:41]) == (400, "in pipeline 'read', step 'classify': infe")
    assert "batch-size must be <= 16 for 'classifier'" in text


def test_mel_embedding_word_of_tflite_models(gateway: Gateway, root: Path) -> None:
    audio = np.random.default_rng(3).normal(size=(1, 16)).astype(np.float32)
    data = audio
    for name in HEARERS:
        interpreter = Interpreter(str(root / name / "1" / "model.tflite"))
        interpreter.allocate_tensors()
        interpreter.set_tensor(interpreter.get_input_details()[0]["index"], data)
        interpreter.invoke()
        data = interpreter.get_tensor(interpreter.get_output_details()[0]["index"])
    word = ask(gateway, "hear", "audio", audio)["word"]
    assert np.any(data)
    assert np.array_equal(np.array(word["data"], np.float32).reshape(word["shape"]), data)


def test_a_pipeline_tells_its_tensors_and_its_steps(gateway: Gateway) -> None:
    with urllib.request.urlopen(f"http://{gateway.http}/v2/models/read", timeout=30) as answer:
        metadata = json.load(answer)
    assert metadata["platform"] == "pipeline"
    assert metadata["inputs"] == [{"name": "image", "datatype": "FP32", "shape": [8, 8]}]
    assert metadata["outputs"] == [
        {"name": "text", "datatype": "BYTES", "shape": [1]},
        {"name": "boxes", "datatype": "INT64", "shape": [-1, 2]},
    ]
