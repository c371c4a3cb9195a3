"""Python models for tests: their requests bring the code that they run."""

from __future__ import annotations

from pathlib import Path

#: ``execute`` of each request is its input ``code``. The last request's code decides for a batch.
MODEL = """
import asyncio, os, sys, threading, time
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        self.args = args
        self.kept = []
        self.calls = 0

    {prefix}def execute(self, requests):
        self.calls += 1
        code = pb_utils.get_input_tensor_by_name(requests[-1], "code").as_numpy().flat[0].decode()
        scope = {{"self": self, "requests": requests, "pb": pb_utils, "np": np, "os": os,
                 "sys": sys, "time": time, "threading": threading, "asyncio": asyncio,
                 "reply": reply, "Tensor": pb_utils.Tensor, "Response": pb_utils.InferenceResponse,
                 "Error": pb_utils.TritonError, "FINAL": 1}}
        source = "{prefix}def run():\\n" + "".join(f"    {{line}}\\n" for line in code.splitlines())
        exec(compile(source, "request.py", "exec"), scope)
        return {awaited}scope["run"]()

    def finalize(self):
        print("finalized")


def reply(*values, name="y"):
    return pb_utils.InferenceResponse([pb_utils.Tensor(name, np.array(values, np.float32))])
"""
#: ``compute`` of its code takes the arrays of a request, and returns those of its response by name.
COMPUTED = """
import numpy as np
import triton_python_backend_utils as pb_utils

{code}

class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            arrays = compute(*(tensor.as_numpy() for tensor in request.inputs()))
            tensors = [pb_utils.Tensor(*pair) for pair in arrays.items()]
            responses.append(pb_utils.InferenceResponse(tensors))
        return responses
"""
TENSORS = """
input { name: "code" data_type: TYPE_STRING dims: 1 }
input { name: "x" data_type: TYPE_FP32 dims: -1 optional: true }
output { name: "y" data_type: TYPE_FP32 dims: -1 }
"""
DECOUPLED = "model_transaction_policy { decoupled: true }\n"


def model(repository: Path, name: str, source: str, config: str | None = "") -> Path:
    """Write a Python model; ``config`` None: it completes its configuration itself."""
    folder = repository / name / "1"
    folder.mkdir(parents=True)
    (folder / "model.py").write_text(source)
    if config is not None:
        (folder.parent / "config.pbtxt").write_text(f'backend: "python"\n{config}')
    return folder


def coded(repository: Path, name: str, extra: str = "", asynchronous: bool = False) -> Path:
    """Write a model whose requests bring their code."""
    prefix, awaited = ("async ", "await ") if asynchronous else ("", "")
    return model(repository, name, MODEL.format(prefix=prefix, awaited=awaited), TENSORS + extra)


def computed(repository: Path, name: str, code: str, config: str | None) -> Path:
    """Write a model whose ``compute`` is in ``code``."""
    return model(repository, name, COMPUTED.format(code=code), config)
