"""Checks that every route gives the same answers, bit for bit, and the same errors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from onnx import TensorProto, helper, numpy_helper

from modelport.gateway.repository import manifest
from tests import models
from tests.ray.traffic import WIDTH, Ask, over_grpc, over_http

DENSE_CONFIG = f"""name: "dense"
backend: "onnxruntime"
max_batch_size: 8
input {{ name: "x" data_type: TYPE_FP32 dims: {WIDTH} }}
output {{ name: "y" data_type: TYPE_FP32 dims: {WIDTH} }}
"""
#: Its answer is its input, after a while: many are in flight, and few processor seconds are spent.
SLOW_CONFIG = f"""name: "slow"
backend: "fake"
max_batch_size: 8
input {{ name: "x" data_type: TYPE_FP32 dims: {WIDTH} }}
output {{ name: "x" data_type: TYPE_FP32 dims: {WIDTH} }}
parameters {{ key: "delay_seconds" value {{ string_value: "0.1" }} }}
version_policy {{ latest {{ num_versions: 2 }} }}
"""
CASES = 40


def publish(repository: Path) -> None:
    """``dense`` 1, and a version 2 with one byte changed since; ``slow`` 1."""
    for version in (1, 2):
        dense(repository / "dense" / str(version) / "model.onnx", seed=version)
        manifest.write(repository / "dense" / str(version))
    artifact = repository / "dense" / "2" / "model.onnx"
    content = bytearray(artifact.read_bytes())
    content[len(content) // 2] ^= 1
    artifact.write_bytes(content)
    (repository / "dense" / "config.pbtxt").write_text(DENSE_CONFIG)
    (repository / "slow").mkdir()
    (repository / "slow" / "config.pbtxt").write_text(SLOW_CONFIG)
    release(repository, 1)


def release(repository: Path, version: int) -> None:
    """A version of ``slow``, complete when it appears. Its backend needs no file."""
    hidden = repository / "slow" / f".{version}"
    hidden.mkdir()
    manifest.write(hidden)
    hidden.rename(repository / "slow" / str(version))


def dense(path: Path, seed: int) -> None:
    """``y = tanh(x @ weights)``, whose bits show who computed it."""
    weights = np.random.default_rng(seed).standard_normal((WIDTH, WIDTH)).astype(np.float32)
    infos = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", WIDTH]) for name in "xy"
    ]
    nodes = [
        helper.make_node("MatMul", ["x", "weights"], ["product"]),
        helper.make_node("Tanh", ["product"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes, "dense", infos[:1], infos[1:], [numpy_helper.from_array(weights, "weights")]
    )
    models.save(path, graph)


def parity(plain: Any, front: Any, nodes: list[str]) -> int:
    """Compare every way with the plain gateway over gRPC; how many answers were the same.

    Raises:
        AssertionError: one differs in a bit.
    """
    ways: dict[str, tuple[Ask, Callable[[], None]]] = {
        "plain gateway, HTTP binary": over_http(plain.http, "dense", "y"),
        "gateway, gRPC": over_grpc(front.grpc, "dense", "y"),
        "gateway, HTTP binary": over_http(front.http, "dense", "y"),
        "gateway, HTTP JSON": over_http(front.http, "dense", "y", binary=False),
        **{f"Serve's proxy {node}": over_grpc(node, "dense", "y") for node in nodes},
    }
    reference, close = over_grpc(plain.grpc, "dense", "y")
    random, same = np.random.default_rng(7), 0
    for case in range(CASES):
        values = random.standard_normal((1 + case % 8, WIDTH)).astype(np.float32)
        expected = reference(values)
        for way, (ask, _) in ways.items():
            got = ask(values)
            assert got.dtype == expected.dtype, way
            assert got.tobytes() == expected.tobytes(), f"{way}: {got} is not {expected}"
            same += 1
    for closing in (close, *(end for _, end in ways.values())):
        closing()
    return same


#: case → model, version, input's name, datatype, shape
BAD: Mapping[str, tuple[str, str, str, str, list[int]]] = {
    "unknown model": ("nobody", "", "x", "FP32", [1, WIDTH]),
    "unknown version": ("dense", "9", "x", "FP32", [1, WIDTH]),
    "unknown input": ("dense", "", "z", "FP32", [1, WIDTH]),
    "wrong datatype": ("dense", "", "x", "INT64", [1, WIDTH]),
    "wrong shape": ("dense", "", "x", "FP32", [1, WIDTH + 1]),
    "batch too large": ("dense", "", "x", "FP32", [9, WIDTH]),
    "no batch": ("dense", "", "x", "FP32", [WIDTH]),
}
TAMPERED = ("dense", "2", "x", "FP32", [1, WIDTH])
NUMPY = {"FP32": np.float32, "INT64": np.int64}


def refusal(module: Any, address: str, request: tuple[str, str, str, str, list[int]]) -> str:
    """The status and the message that a bad request meets."""
    model, version, name, datatype, shape = request
    client = module.InferenceServerClient(address)
    tensor = module.InferInput(name, shape, datatype)
    tensor.set_data_from_numpy(np.zeros(shape, NUMPY[datatype]))
    try:
        client.infer(model, [tensor], model_version=version)
    except Exception as error:
        return f"{getattr(error, 'status', lambda: '')()}: {error}"
    finally:
        client.close()
    return "answered"


def refusals(plain: Any, front: Any, nodes: list[str]) -> int:
    """Count the errors that equal the plain gateway's, to the letter.

    Raises:
        AssertionError: one was not, or a bad request was answered.
    """
    same = 0
    for case, request in BAD.items():
        grpc_words = refusal(triton_grpc, plain.grpc, request)
        http_words = refusal(triton_http, plain.http, request)
        assert "answered" not in (grpc_words, http_words), case
        asked = [
            ("gateway, HTTP", http_words, refusal(triton_http, front.http, request)),
            *(
                (where, grpc_words, refusal(triton_grpc, where, request))
                for where in (front.grpc, *nodes)
            ),
        ]
        for where, expected, got in asked:
            assert got == expected, f"{case}, {where}: {got!r} is not {expected!r}"
            same += 1
    return same


def tampered(plain: Any, front: Any, nodes: list[str]) -> str:
    """A version whose file was changed after it was published is served by nobody.

    The gateway in front never hears of it: replicas name only what they serve.
    """
    expected = refusal(triton_grpc, plain.grpc, TAMPERED)
    assert "not at ready state" in expected, expected
    for node in nodes:
        got = refusal(triton_grpc, node, TAMPERED)
        assert got == expected, f"{node}: {got!r} is not {expected!r}"
    got = refusal(triton_grpc, front.grpc, TAMPERED)
    assert "NOT_FOUND" in got, got
    return f"refused by {len(nodes) + 2} of {len(nodes) + 2}"
