"""Pipelines of trained models of Python packages, equal to the same steps by hand.

An image of text: detect the lines, classify which way up they are, recognise them; the steps
between are Python. Audio: mel spectrogram, embeddings, a word; all three are TFLite models.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from PIL import Image, ImageDraw, ImageFont

from tests import models
from tests.gateway.backends.python import python_models
from tests.server import serving

OCR, WORDS = "rapidocr-onnxruntime==1.4.4", "pyopen-wakeword==1.1.0"
#: Model → the end of its file's name.
FILES: Mapping[str, Mapping[str, str]] = {
    OCR: {
        "detector": "PP-OCRv4_det_infer.onnx",
        "classifier": "mobile_v2.0_cls_infer.onnx",
        "recogniser": "PP-OCRv4_rec_infer.onnx",
    },
    WORDS: {
        "spectrogram": "melspectrogram.tflite",
        "embedding": "embedding_model.tflite",
        "word": "hey_rhasspy.tflite",
    },
}
READ = """
inputs = ["image"]
[outputs]
texts = ["read.texts", { value = [] }]
boxes = "crop.boxes"

[steps.prepare]
model = "prepare"
inputs = { image = "image" }

[steps.detect]
model = "detector"
inputs = { x = "prepare.x" }

[steps.crop]
model = "crop"
inputs = { image = "image", map = "detect.sigmoid_0.tmp_0" }

[steps.classify]
model = "classifier"
inputs = { x = "crop.small" }
condition = "crop.count > 0"

[steps.turn]
model = "turn"
inputs = { crops = "crop.crops", ways = "classify.save_infer_model/scale_0.tmp_1" }

[steps.recognise]
model = "recogniser"
inputs = { x = "turn.x" }

[steps.read]
model = "read"
inputs = { scores = "recognise.softmax_11.tmp_0" }
"""
HEAR = """
inputs = ["audio"]
outputs = { score = "word.39", embeddings = "embed.conv2d_19" }

[steps.mel]
model = "spectrogram"
inputs = { input = "audio" }

[steps.window]
model = "window"
inputs = { mel = "mel.output" }

[steps.embed]
model = "embedding"
inputs = { input_1 = "window.windows" }

[steps.stack]
model = "stack"
inputs = { embeddings = "embed.conv2d_19" }

[steps.word]
model = "word"
inputs = { onnx_tf__tf_Flatten_0_cdbaf27b = "stack.x" }
"""
#: Used by ``prepare`` and ``crop``.
SCALED = """
def scaled(image, height, width):
    rows = np.linspace(0, image.shape[0] - 1, height)
    columns = np.linspace(0, image.shape[1] - 1, width)
    top, left = rows.astype(int), columns.astype(int)
    below = np.minimum(top + 1, image.shape[0] - 1)
    right = np.minimum(left + 1, image.shape[1] - 1)
    down, along = (rows - top)[:, None, None], (columns - left)[None, :, None]
    upper = image[top][:, left] * (1 - along) + image[top][:, right] * along
    lower = image[below][:, left] * (1 - along) + image[below][:, right] * along
    return (upper * (1 - down) + lower * down).astype(np.float32)
"""
#: Model → its inputs, its outputs, its code.
STEPS: Mapping[str, tuple[str, str, str]] = {
    "prepare": ("image UINT8 -1,-1,3", "x FP32 1,3,-1,-1", SCALED + """
def compute(image):
    height, width = (max(32, size // 32 * 32) for size in image.shape[:2])
    x = scaled(image, height, width) / 255
    x = (x - [0.485, 0.456, 0.406]) / [0.229, 0.224, 0.225]
    return {"x": x.transpose(2, 0, 1)[None].astype(np.float32)}
"""),
    "crop": ("image UINT8 -1,-1,3;map FP32 1,1,-1,-1",
             "crops FP32 -1,48,320,3;small FP32 -1,3,48,192;boxes INT64 -1,4;count INT64 1",
             SCALED + """
def compute(image, heat):
    found = heat[0, 0] > 0.3
    edges = np.flatnonzero(np.diff(np.r_[0, found.any(1), 0]))
    boxes = []
    for top, bottom in zip(edges[::2], edges[1::2]):
        columns = np.flatnonzero(found[top:bottom].any(0))
        more = (bottom - top) // 2
        boxes.append([top - more, bottom + more, columns[0] - more, columns[-1] + 1 + more])
    scale = np.repeat(np.array(image.shape[:2]) / found.shape, 2)
    limits = np.repeat(image.shape[:2], 2)
    boxes = np.clip(np.array(boxes).reshape(-1, 4) * scale, 0, limits).astype(np.int64)
    crops = np.zeros((len(boxes), 48, 320, 3), np.float32)
    small = np.zeros((len(boxes), 3, 48, 192), np.float32)
    for index, (top, bottom, left, right) in enumerate(boxes):
        line = image[top:bottom, left:right]
        width = min(320, max(1, 48 * line.shape[1] // line.shape[0]))
        crops[index, :, :width] = scaled(line, 48, width) / 127.5 - 1
        small[index] = (scaled(line, 48, 192) / 127.5 - 1).transpose(2, 0, 1)
    return {"crops": crops, "small": small, "boxes": boxes,
            "count": np.array([len(boxes)], np.int64)}
"""),
    "turn": ("crops FP32 -1,48,320,3;ways FP32 -1,2", "x FP32 -1,3,48,320", """
def compute(crops, ways):
    turned = (ways[:, 1] > 0.9)[:, None, None, None]
    crops = np.where(turned, crops[:, ::-1, ::-1], crops)
    return {"x": np.ascontiguousarray(crops.transpose(0, 3, 1, 2))}
"""),
    "read": ("scores FP32 -1,-1,6625", "texts BYTES -1", """
def compute(scores):
    texts = []
    for row in scores.argmax(2):
        kept = [int(code) for code, last in zip(row, np.r_[-1, row]) if code and code != last]
        texts.append(" ".join(map(str, kept)).encode())
    return {"texts": np.array(texts, object)}
"""),
    "window": ("mel FP32 -1,1,-1,32", "windows FP32 -1,76,32,1", """
def compute(mel):
    frames = mel[0, 0] / 10 + 2
    starts = range(0, len(frames) - 75, 8)
    return {"windows": np.stack([frames[s : s + 76] for s in starts])[..., None]}
"""),
    "stack": ("embeddings FP32 -1,1,1,96", "x FP32 1,16,96", """
def compute(embeddings):
    return {"x": np.ascontiguousarray(embeddings[-16:].reshape(1, 16, 96))}
"""),
}  # fmt: skip
Arrays = Mapping[str, np.ndarray[Any, Any]]


def repository(root: Path, packages: Mapping[str, Path]) -> dict[str, Path]:
    """Write a repository to ``root``; return the files of the trained models."""
    trained = {}
    for package, files in FILES.items():
        for name, end in files.items():
            (file,) = (p for p in packages[package].rglob("*") if str(p).endswith(end))
            trained[name] = root / name / "1" / f"model{file.suffix}"
            trained[name].parent.mkdir(parents=True)
            shutil.copyfile(file, trained[name])
    # Without a configuration, 4 windows are the largest batch.
    (root / "embedding" / "config.pbtxt").write_text("backend: 'tflite' max_batch_size: 32")
    for name, (inputs, outputs, code) in STEPS.items():
        described = ""
        for kind, tensors in (("input", inputs), ("output", outputs)):
            for tensor in tensors.split(";"):
                label, datatype, dims = tensor.split()
                datatype = datatype.replace("BYTES", "STRING")
                described += f'{kind} {{ name: "{label}" data_type: TYPE_{datatype} '
                described += f"dims: [{dims}] }}\n"
        python_models.computed(root, name, code, described)
    for name, text in (("ocr", READ), ("hear", HEAR)):
        models.pipeline(root, name, text)
    return trained


def picture(lines: list[str]) -> np.ndarray[Any, Any]:
    image = Image.new("RGB", (480, 96 * max(1, len(lines))), "white")
    for number, line in enumerate(lines):
        font = ImageFont.load_default(40)
        ImageDraw.Draw(image).text((40, 96 * number + 20), line, "black", font)
    return np.asarray(image)


def step(name: str, *inputs: np.ndarray[Any, Any]) -> Arrays:
    """Run a Python step by hand."""
    scope: dict[str, Any] = {"np": np}
    exec(STEPS[name][2], scope)
    outputs: Arrays = scope["compute"](*inputs)
    return outputs


def read_by_hand(trained: Mapping[str, Path], image: np.ndarray[Any, Any]) -> list[bytes]:
    import onnxruntime

    def run(name: str, x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        session = onnxruntime.InferenceSession(trained[name], providers=["CPUExecutionProvider"])
        found: np.ndarray[Any, Any] = session.run(None, {"x": x})[0]
        return found

    cropped = step("crop", image, run("detector", step("prepare", image)["x"]))
    if not cropped["count"][0]:
        return []
    turned = step("turn", cropped["crops"], run("classifier", cropped["small"]))
    return list(step("read", run("recogniser", turned["x"]))["texts"])


def hear_by_hand(trained: Mapping[str, Path], audio: np.ndarray[Any, Any]) -> Arrays:
    from tests.real_models.__main__ import by_litert

    (mel,) = by_litert(trained["spectrogram"], {"input": audio}).values()
    windows = step("window", mel)["windows"]
    (embeddings,) = by_litert(trained["embedding"], {"input_1": windows}).values()
    x = step("stack", embeddings)["x"]
    (score,) = by_litert(trained["word"], {"onnx_tf__tf_Flatten_0_cdbaf27b": x}).values()
    return {"score": score, "embeddings": embeddings}


def words(trained: Mapping[str, Path], codes: bytes) -> str:
    """The text of a line's characters."""
    import onnxruntime

    session = onnxruntime.InferenceSession(trained["recogniser"])
    characters = session.get_modelmeta().custom_metadata_map["character"].splitlines()
    return "".join([*characters, " "][int(code) - 1] for code in codes.split())


def problems(root: Path, packages: Mapping[str, Path]) -> list[str]:
    """Compare pipelines with the same steps by hand; return the differences."""
    trained, wrong = repository(root, packages), []
    with serving(root, "--allow-python", may_fork=False) as gateway:

        def ask(model: str, name: str, datatype: str, data: np.ndarray[Any, Any]) -> Any:
            tensor = {"name": name, "datatype": datatype, "shape": data.shape}
            body = {"inputs": [{**tensor, "data": data.ravel().tolist()}]}
            url = f"http://{gateway.http}/v2/models/{model}/infer"
            answer = httpx.post(url, json=body, timeout=120)
            if answer.status_code != 200:
                raise RuntimeError(answer.text[:300])
            return {output["name"]: output for output in answer.json()["outputs"]}

        for lines in (["PIPELINE 42"], ["Detect", "classify", "recognise"], []):
            image = picture(lines)
            texts = [text.encode() for text in ask("ocr", "image", "UINT8", image)["texts"]["data"]]
            if texts != read_by_hand(trained, image):
                wrong.append(f"ocr of {lines}: {texts}")
            read = [words(trained, text).replace(" ", "") for text in texts]
            if read != [line.replace(" ", "") for line in lines]:
                wrong.append(f"ocr of {lines} read {read}")
        random = np.random.default_rng(0)
        for seconds in (2, 3):
            audio = random.normal(0, 3000, (1, 16_000 * seconds)).astype(np.float32)
            outputs = ask("hear", "audio", "FP32", audio)
            for name, array in hear_by_hand(trained, audio).items():
                found = np.array(outputs[name]["data"]).reshape(outputs[name]["shape"])
                if found.shape != array.shape or not np.allclose(found, array, 1e-4, 1e-4):
                    wrong.append(f"hear, {seconds} s: {name} differs")
    return wrong
