"""tritonclient's examples, as ``qa/L0_http/test.sh`` and ``qa/L0_grpc/test.sh`` call them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from tests.peer_suites import triton_models
from tests.peer_suites.sources import PinnedSource
from tests.peer_suites.suite import Bench, Suite, SuiteOutcome
from tests.peer_suites.triton_models import SERVER

CLIENT = PinnedSource("triton-inference-server/client", "58a44caa0dce77303115302e6dbdf64626b2b093")

#: The environment of everything that talks through tritonclient.
REQUIREMENTS = (
    *("tritonclient[grpc,http]==2.73.0", "numpy<3", "pillow", "pytest", "pytest-timeout"),
    *("requests", "psutil", "sseclient-py", "aiohttp", "attrdict3", "pytest-asyncio"),
)
_EXAMPLES = "src/python/examples"
_MODELS = ("simple", "simple_identity", "simple_int8", "simple_string")
_SEQUENCES = ("simple_sequence", "simple_dyna_sequence")
_VULTURE = 23

NOT_APPLICABLE = {
    "simple_http_cudashm_client.py": "GPU: CUDA shared memory",
    "simple_grpc_cudashm_client.py": "GPU: CUDA shared memory",
    "ensemble_image_client.py": "needs a trained model, which is not public on any package index",
    "simple_http_health_metadata.py": "wants the server's name to be 'triton'",
    "simple_grpc_health_metadata.py": "wants the server's name to be 'triton'",
    "simple_grpc_custom_repeat.py": "its model is native code",
}
_VULTURES = (
    "needs a trained densenet, which no package index has; it passes with a model that sees a "
    "vulture in every picture"
)
CHANGED_SETUP = {"image_client.py": _VULTURES, "grpc_image_client.py": _VULTURES}


def _vulture(path: Path) -> None:
    """A model of densenet's signature which sees a vulture in every picture."""
    scores = np.zeros((1, 1000, 1, 1), np.float32)
    scores[0, _VULTURE] = 10
    nodes = [
        helper.make_node("ReduceMean", ["data_0", "axes"], ["mean"], keepdims=1),
        helper.make_node("Mul", ["mean", "zero"], ["nothing"]),
        helper.make_node("Add", ["nothing", "scores"], ["fc6_1"]),
    ]
    graph = helper.make_graph(
        nodes,
        "vulture",
        [helper.make_tensor_value_info("data_0", TensorProto.FLOAT, [1, 3, 224, 224])],
        [helper.make_tensor_value_info("fc6_1", TensorProto.FLOAT, [1, 1000, 1, 1])],
        [
            numpy_helper.from_array(np.array([1, 2, 3]), "axes"),
            numpy_helper.from_array(np.zeros((), np.float32), "zero"),
            numpy_helper.from_array(scores, "scores"),
        ],
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)]), path)


def repository(bench: Bench) -> Path:
    """The seven models of ``qa/L0_http/models``."""
    root = bench.work / "examples"
    if not root.is_dir():
        examples = bench.source(SERVER) / triton_models.EXAMPLES
        triton_models.copy(examples, root, *_MODELS, *_SEQUENCES, "densenet_onnx")
        _vulture(root / "densenet_onnx" / "1" / "model.onnx")
    return root


def run(bench: Bench) -> Iterator[SuiteOutcome]:
    if not bench.wanted(_EXAMPLES):
        return
    root = repository(bench)
    image = str(bench.source(SERVER) / "qa" / "images" / "vulture.jpeg")
    folder = bench.source(CLIENT) / _EXAMPLES
    reported = {"simple_http_aio_infer_client.py", "simple_http_async_infer_client.py"}

    def call(test: str, *arguments: str, says: str = "") -> SuiteOutcome:
        file = test.split(" ")[0]
        return bench.script(test, file, *arguments, cwd=folder, says=says)

    with bench.gateway(root, "--allow-client-shm", "true"):
        for file in sorted(path.name for path in folder.glob("*.py")):
            if "model_control" in file or "memory_growth" in file:
                continue
            if file in ("image_client.py", "grpc_image_client.py", "ensemble_image_client.py"):
                yield from _image_calls(call, file, image)
            elif file == "reuse_infer_objects_client.py":
                yield call(file, "-v")
                yield call(f"{file} gRPC", "-v", "-i", "grpc", "-u", "localhost:8001")
            else:
                printed = "grpc" in file and "health" not in file and file not in reported
                yield call(file, "-v", says="PASS" if printed else "")
    yield from _controlled(bench, call, root)
    echo = bench.work / "echo"
    growth = bench.source(SERVER) / "qa" / "L0_client_memory_growth" / "models"
    triton_models.copy(growth, echo, "*")
    with bench.gateway(echo):
        yield call("memory_growth_test.py")
        yield call("memory_growth_test.py gRPC", "-i", "gRPC")


def _image_calls(call, file: str, image: str) -> Iterator[SuiteOutcome]:  # type: ignore[no-untyped-def]
    flags = ("-m", "densenet_onnx", "-s", "INCEPTION", "-c", "1", "-b", "1")
    if file == "ensemble_image_client.py":
        yield call(file)
        return
    if file == "image_client.py":
        yield call(file, *flags, image, says="VULTURE")
        yield call(f"{file} asynchronous", "-a", *flags, image, says="VULTURE")
        flags = (*flags, "-i", "grpc", "-u", "localhost:8001")
    for label, more in (
        ("", ()),
        (" asynchronous", ("-a",)),
        (" streaming", ("-a", "--streaming")),
    ):
        yield call(f"{file} gRPC{label}", *more, *flags, image, says="VULTURE")


def _controlled(bench, call, root) -> Iterator[SuiteOutcome]:  # type: ignore[no-untyped-def]
    for file in ("simple_http_model_control.py", "simple_grpc_model_control.py"):
        if "grpc" in file:  # L0_grpc has an eighth model
            triton_models.renamed(root, "simple_dyna_sequence", "simple_string_dyna_sequence")
        with bench.gateway(root, "--model-control-mode", "explicit"):
            yield call(file, "-v", says="PASS")


SUITE = Suite(
    name="triton-examples",
    title="tritonclient 2.73's examples",
    sources=(CLIENT, SERVER),
    requirements=REQUIREMENTS,
    run=run,
    not_applicable=NOT_APPLICABLE,
    changed_setup=CHANGED_SETUP,
)
