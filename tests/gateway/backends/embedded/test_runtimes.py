"""Tests common to all embedded runtimes: the demo models in each, and device placement."""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from modelport.exporters.loaded_model import Source
from modelport.gateway.backend_registry import BACKENDS, find_loader
from modelport.gateway.backends.embedded import warmup
from modelport.gateway.backends.embedded.embedded_backend import (
    SessionPool,
    artifact_file,
    public_reason,
)
from modelport.gateway.errors import (
    InvalidArgument,
    ModelportError,
    Unsupported,
    first_line,
    reason_of,
)
from modelport.gateway.repository import config
from modelport.gateway.repository.autocomplete import ArtifactTensor
from modelport.gateway.types import NUMPY_DTYPES, Array, Datatype
from tests import models
from tests.gateway.backends.embedded import runtimes
from tests.gateway.backends.embedded.runtimes import QUICK, RuntimeCase
from tests.server import serving
from tests.thorough import thorough

ROOT = Path(__file__).parents[4]
Published = Callable[[str, str], Path]


@pytest.fixture(scope="module")
def sources() -> dict[str, Source]:
    return {name: runtimes.source(name) for name in runtimes.MODELS}


@pytest.fixture(scope="module")
def cases(sources: dict[str, Source]) -> dict[str, list[RuntimeCase]]:
    return {name: runtimes.cases(source) for name, source in sources.items()}


@pytest.fixture(scope="module")
def published(shared_folder: Path) -> Published:
    """The folder of a model in a format, written when a test asks for it first."""
    return functools.partial(runtimes.published, shared_folder)


# -- the demo models ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "format_name"),
    [
        *(("vit", format_name) for format_name in QUICK),
        *(("fraud", format_name) for format_name in ("onnx", "torchscript")),
        *(thorough("fraud", each) for each in ("pt2", "savedmodel", "tflite", "openvino")),
    ],
)
def test_a_runtime_answers_as_eager_pytorch_does(
    name: str,
    format_name: str,
    published: Published,
    sources: dict[str, Source],
    cases: dict[str, list[RuntimeCase]],
) -> None:
    backend = runtimes.load(published(name, format_name) / "1")
    for case in cases[name]:
        assert runtimes.error_of(backend, sources[name], case) <= sources[name].spec.atol
    backend.unload()


@pytest.mark.parametrize("format_name", QUICK)
def test_what_was_read_from_the_artifact_must_agree_with_the_configuration(
    format_name: str, published: Published
) -> None:
    version = published("vit", format_name) / "1"
    described = (version.parent / config.FILENAME).read_text()
    with pytest.raises(InvalidArgument, match="but the model has"):
        runtimes.load(version, described.replace("TYPE_FP32", "TYPE_INT64", 1))
    elsewhere = re.sub(r'output \{\s*name: "\w+"', 'output { name: "elsewhere"', described, count=1)
    with pytest.raises(InvalidArgument, match="declares output 'elsewhere', but the model has"):
        runtimes.load(version, elsewhere)


@pytest.mark.parametrize("format_name", QUICK)
def test_inputs_and_outputs_that_are_not_declared_are_taken_from_the_artifact(
    format_name: str,
    published: Published,
    sources: dict[str, Source],
    cases: dict[str, list[RuntimeCase]],
) -> None:
    version = published("vit", format_name) / "1"
    platform = next(p for p in config.PLATFORMS if p.format == format_name)
    text = f'backend: "{platform.backend}" platform: "{platform.platform}"'
    text += f' max_batch_size: 8 default_model_filename: "{platform.default_filename}"'
    backend = runtimes.load(version, text)
    assert runtimes.error_of(backend, sources["vit"], cases["vit"][0]) <= sources["vit"].spec.atol
    backend.unload()


@pytest.mark.parametrize("format_name", QUICK)
def test_a_damaged_artifact_is_refused_without_its_path(
    format_name: str, published: Published, tmp_path: Path
) -> None:
    platform = next(p for p in config.PLATFORMS if p.format == format_name)
    whole = published("vit", format_name) / "1" / platform.default_filename
    whole = whole / "saved_model.pb" if whole.is_dir() else whole
    described = (
        whole.parents[2 if format_name == "savedmodel" else 1] / config.FILENAME
    ).read_text()
    version = tmp_path / "secret" / "vit" / "1"
    target = version / platform.default_filename
    if format_name == "savedmodel":
        target.mkdir(parents=True)
        target = target / "saved_model.pb"
    version.mkdir(parents=True, exist_ok=True)
    described = described.replace("vit_" + format_name, "m")
    for content in (b"", b"hello", whole.read_bytes()[: whole.stat().st_size // 2]):
        target.write_bytes(content)
        with pytest.raises(ModelportError) as caught:
            runtimes.load(version, described)
        assert platform.default_filename in str(caught.value)
        assert "secret" not in str(caught.value)
        assert "/" not in str(caught.value).replace(f"{platform.default_filename}/", "")


@pytest.mark.parametrize("format_name", QUICK)
def test_a_missing_artifact_is_named(format_name: str, tmp_path: Path) -> None:
    platform = next(p for p in config.PLATFORMS if p.format == format_name)
    text = f'platform: "{platform.platform}" backend: "{platform.backend}"'
    reason = f"'{platform.default_filename}' is missing from version 1"
    with pytest.raises(InvalidArgument, match=reason):
        runtimes.load(tmp_path, text + f' default_model_filename: "{platform.default_filename}"')


@pytest.mark.parametrize("format_name", QUICK)
def test_a_gpu_that_is_not_there_is_said_plainly(
    format_name: str, published: Published, capfd: pytest.CaptureFixture[str]
) -> None:
    version = published("vit", format_name) / "1"
    described = (version.parent / config.FILENAME).read_text()
    with pytest.raises(Unsupported, match=r"asks for KIND_GPU, but .*; set KIND_CPU, or KIND_AUTO"):
        runtimes.load(version, described + " instance_group { kind: KIND_GPU }")
    backend = runtimes.load(version, described + " instance_group { kind: KIND_AUTO count: 2 }")
    (group,) = backend.config.instance_group
    assert (group.kind, group.count) == (2, 2)  # KIND_CPU
    assert "served on the CPU" in "".join(capfd.readouterr())
    backend.unload()


@pytest.mark.parametrize(
    "groups",
    [
        "instance_group { kind: KIND_GPU } instance_group { kind: KIND_CPU }",
        "instance_group { kind: KIND_MODEL }",
        "instance_group { kind: KIND_GPU gpus: [ 0, 1 ] }",
    ],
)
def test_instances_in_several_places_are_refused(groups: str, tmp_path: Path) -> None:
    models.multiply(tmp_path / "model.onnx")
    with pytest.raises(Unsupported, match="must put every instance on the CPU"):
        runtimes.load(tmp_path, 'backend: "onnxruntime" ' + groups)


# -- all of them in one gateway -------------------------------------------------------------------


@pytest.mark.thorough
def test_every_runtime_serves_in_one_process_at_once(
    published: Published,
    sources: dict[str, Source],
    cases: dict[str, list[RuntimeCase]],
    tmp_path: Path,
) -> None:
    names = [f"{name}_{format_name}" for name in sources for format_name in QUICK]
    for name in names:
        shutil.copytree(published(*name.split("_")), tmp_path / name)
    with serving(tmp_path) as gateway, httpx.Client(base_url=f"http://{gateway.http}") as client:
        index = client.post("/v2/repository/index").json()
        assert {row["name"]: row["state"] for row in index} == dict.fromkeys(names, "READY"), index

        def ask(number: int) -> float:
            full = names[number % len(names)]
            name = full.split("_")[0]
            case = cases[name][number // len(names) % len(cases[name])]
            answer = client.post(f"/v2/models/{full}/infer", json=_body(sources[name], case))
            assert answer.status_code == 200, answer.text
            return (
                max(
                    float(np.max(np.abs(np.reshape(output["data"], output["shape"]) - expected)))
                    for output in answer.json()["outputs"]
                    for expected in (case.outputs[output["name"]].reshape(output["shape"]),)
                )
                / sources[name].spec.atol
            )

        with ThreadPoolExecutor(8) as threads:
            errors = list(threads.map(ask, range(6 * len(names))))
        assert max(errors) <= 1.0
        assert gateway.terminate() == 0
    unknown = [entry["event"] for entry in gateway.logs if set(entry) == {"event"}]
    assert unknown == ["<closed>"], "a runtime wrote to the log by itself"


def _body(source: Source, case: RuntimeCase) -> dict[str, Any]:
    inputs = []
    for spec in source.signature.inputs:
        data = case.inputs[spec.name]
        shape = [len(data), *data.shape[1:]] if spec.reshape is None else [len(data), *spec.dims]
        entry = {"name": spec.name, "datatype": spec.datatype.value, "shape": shape}
        inputs.append({**entry, "data": data.reshape(-1).tolist()})
    return {"inputs": inputs}


# -- the library is not there ---------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["pytorch", "tensorflow", "tflite", "openvino"])
def test_a_missing_library_is_named_by_the_extra_that_brings_it(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    libraries = ("torch", "tensorflow", "ai_edge_litert.interpreter", "tflite_runtime", "openvino")
    for library in libraries:
        monkeypatch.setitem(sys.modules, library, None)
    monkeypatch.delitem(sys.modules, "modelport.gateway.runtime.openvino_import", raising=False)
    monkeypatch.delitem(sys.modules, BACKENDS.builtin[backend].module, raising=False)
    with pytest.raises(Unsupported) as caught:
        find_loader(backend)
    assert BACKENDS.builtin[backend].libraries[0].install in str(caught.value)


# -- the shared parts -----------------------------------------------------------------------------


class Exclusive:
    """A session that sees whether two runs overlap in it."""

    inputs = outputs = (ArtifactTensor("x", Datatype.FP32, (-1,)),)
    bounded, random, state = True, False, ""

    def __init__(self) -> None:
        self.closed = False
        self._lock = threading.Lock()

    def run(self, names: Sequence[str], inputs: dict[str, Array]) -> list[Array]:
        assert self._lock.acquire(blocking=False), "two runs at once"
        try:
            return [inputs["x"] + 1 for _ in names]
        finally:
            self._lock.release()

    def close(self) -> None:
        self.closed = True


def test_a_pool_gives_a_session_one_run_at_a_time_and_closes_all() -> None:
    sessions = [Exclusive(), Exclusive()]
    pool = SessionPool(sessions)
    with ThreadPoolExecutor(4) as threads:
        answers = threads.map(lambda n: pool.run(["x"], {"x": np.full(1, n)})[0][0], range(2000))
        assert list(answers) == list(range(1, 2001))
    pool.close()
    assert [session.closed for session in sessions] == [True, True]


def test_a_pool_gets_its_session_back_from_a_run_that_fails() -> None:
    pool = SessionPool([Exclusive()])
    for _ in range(3):
        with pytest.raises(KeyError):
            pool.run(["x"], {})
    assert pool.run(["x"], {"x": np.zeros(1)})[0].tolist() == [1.0]


def test_batches_are_warmed_from_the_largest_down() -> None:
    assert list(warmup.batch_sizes(0)) == [1]
    assert list(warmup.batch_sizes(6)) == [6, 3, 1, 2, 4, 5]


def test_a_reason_holds_no_folder() -> None:
    text = (
        "[ONNXRuntimeError] : 7 : INVALID_PROTOBUF : Load of /srv/models/m/1/model.onnx failed\nx"
    )
    assert public_reason(RuntimeError(text)) == "Load of model.onnx failed"
    assert len(public_reason(RuntimeError("x" * 10_000))) < 600
    text = "Graph execution error:\n\nRead less bytes than requested\n\t [[{{node RestoreV2}}]]"
    assert public_reason(RuntimeError(text)) == "Read less bytes than requested"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            "Graph execution error:\n\nDetected at node G defined at (most recent call last):\n"
            '  File "a.py", line 17\n\nindices = 101 is not in [0, 4)\n\t [[{{node G}}]]',
            "indices = 101 is not in [0, 4)",
        ),
        (
            "Graph execution error:\n\nDetected at node x defined at (most recent call last):\n"
            "<stack traces unavailable>\nMatrix size-incompatible\n\t [[{{node x}}]] [Op:f]",
            "Matrix size-incompatible",
        ),
        ("Graph execution error:", ""),
        (
            "The following operation failed in the TorchScript interpreter.\n"
            "Traceback of TorchScript, serialized code (most recent call last):\n"
            '  File "code/__torch__/m.py", line 9, in forward\n    return torch.add(x, y)\n'
            "           ~~~~~~~~~ <--- HERE\nRuntimeError: The size of tensor a (3) must match b\n",
            "The size of tensor a (3) must match b",
        ),
        ("", ""),
    ],
)
def test_the_reason_is_found_behind_what_only_announces_it(text: str, reason: str) -> None:
    assert reason_of(RuntimeError(text)) == reason
    assert first_line(RuntimeError(text)) == (reason or "RuntimeError")


def test_a_path_is_never_joined_to_more_than_a_name(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").touch()
    artifact = runtimes.artifact(tmp_path, 'backend: "onnxruntime"')
    assert artifact_file(artifact) == tmp_path / "model.onnx"


def test_a_runtimes_noise_is_filtered_and_the_lines_of_others_are_not() -> None:
    code = (
        "import os, sys\n"
        "from modelport.gateway.backends.embedded.native_output import filtered_stderr\n"
        "with filtered_stderr(), filtered_stderr():\n"
        "    os.write(2, b'I0000 00:00:1.2 3 port.cc:153] oneDNN is on\\n')\n"
        "    os.write(2, b'INFO: Created TensorFlow Lite XNNPACK delegate for CPU.\\n')\n"
        "    os.write(2, b'F0000 00:00:1.2 3 x.cc:1] fatal\\n')\n"
        "    print('mine', file=sys.stderr)\n"
        "    os.write(2, b'half ')\n"
        "os.write(2, b'a line\\n')\n"
        "for _ in range(200):\n"
        "    with filtered_stderr():\n"
        "        os.write(2, b'again\\n')\n"
        "print(len(os.listdir('/proc/self/fd')))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60
    )
    lines = done.stderr.splitlines()
    assert lines[:3] == ["F0000 00:00:1.2 3 x.cc:1] fatal", "mine", "half a line"]
    assert lines[3:] == ["again"] * 200
    assert int(done.stdout) < 12, "descriptors are left open"


def test_importing_the_seam_imports_no_runtime() -> None:
    code = (
        "import sys, modelport.gateway.backends.pipeline.ensemble; "
        "import modelport.gateway.backends.embedded.embedded_backend; "
        "print([m for m in ('torch', 'tensorflow', 'onnxruntime', 'ai_edge_litert', 'openvino') "
        "if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, env=os.environ
    )
    assert done.stdout.strip() == "[]", done.stderr


def test_every_datatype_has_a_numpy_type() -> None:
    assert set(NUMPY_DTYPES) == set(Datatype)
