"""Embedded OpenVINO: names, integers of 64 bits, parameters, files that change, no telemetry."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from modelport.exporters.formats.openvino import from_onnx
from modelport.gateway.errors import IntegrityError, InvalidArgument, ModelportError, Unsupported
from modelport.gateway.repository.artifact_checks import trial_load
from modelport.gateway.types import Datatype, Tensor
from tests.attacks.hostile_graphs import intermediate_representation
from tests.gateway.backends.embedded.runtimes import fp32, load, run

TEXT = 'backend: "openvino" '


def write(
    folder: Path, datatype: int = TensorProto.FLOAT, op: str = "Add", batch: int | str = "batch"
) -> Path:
    """``y = x + x``, or ``op`` of the same."""
    x, y = (helper.make_tensor_value_info(name, datatype, [batch, 4]) for name in "xy")
    graph = helper.make_graph([helper.make_node(op, ["x", "x"], ["y"])], "g", [x], [y])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)]), folder / "m")
    from_onnx(folder / "m", folder / "model.xml", half=False)
    return folder


def parameter(key: str, value: str) -> str:
    return TEXT + f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}'


def test_a_config_of_tritons_openvino_backend_serves_the_model(tmp_path: Path) -> None:
    backend = load(write(tmp_path), TEXT)
    assert backend.config.default_model_filename == "model.xml"
    assert [(t.name, list(t.dims)) for t in backend.config.input] == [("x", [4])]
    assert backend.config.max_batch_size == 4
    (first,) = run(backend, fp32([[1] * 4])).outputs
    run(backend, fp32([[9] * 4] * 3))
    assert first.data.tolist() == [[2.0] * 4], "an answer was written over by the next run"
    backend.unload()


def test_a_model_of_a_fixed_batch_size_answers_smaller_batches(tmp_path: Path) -> None:
    """Triton's OpenVINO backend fills them up if ``ENABLE_BATCH_PADDING`` is set."""
    backend = load(write(tmp_path, batch=3), f"{TEXT} max_batch_size: 3")
    assert [list(t.dims) for t in (*backend.config.input, *backend.config.output)] == [[4], [4]]
    for rows in ([[1] * 4], [[1] * 4, [2] * 4], [[1] * 4, [2] * 4, [3] * 4]):
        (answer,) = run(backend, fp32(rows)).outputs
        assert answer.data.tolist() == [[2 * value for value in row] for row in rows]
    backend.unload()
    with pytest.raises(InvalidArgument, match="fixed first dimension of 3"):
        load(tmp_path, f"{TEXT} max_batch_size: 2")


def test_integers_beyond_32_bits_are_refused_and_not_wrapped(tmp_path: Path) -> None:
    backend = load(write(tmp_path, TensorProto.INT64), TEXT)

    def ask(value: int) -> list[int]:
        data = np.full((1, 4), value, np.int64)
        answer: list[list[int]] = run(backend, Tensor("x", Datatype.INT64, data)).outputs[0].data
        return list(answer[0])

    assert ask(-(2**30)) == [-(2**31)] * 4
    for value in (2**31, -(2**31) - 1, 2**40 + 1):
        with pytest.raises(InvalidArgument, match="'x' has values beyond -2147483648 to"):
            ask(value)


@pytest.mark.parametrize("datatype", [TensorProto.DOUBLE, TensorProto.STRING])
def test_a_datatype_that_openvino_does_not_compute_in_is_refused(
    datatype: int, tmp_path: Path
) -> None:
    if datatype == TensorProto.STRING:
        write(tmp_path)
        xml = (tmp_path / "model.xml").read_text()
        text = xml.replace('"f32"', '"string"').replace('"FP32"', '"STRING"')
        (tmp_path / "model.xml").write_text(text)
    else:
        write(tmp_path, datatype)
    with pytest.raises(ModelportError, match=r"is of type f64|does not load"):
        load(tmp_path, TEXT)


def test_parameters_are_those_of_tritons_openvino_backend(tmp_path: Path) -> None:
    write(tmp_path)
    for key, value in (("INFERENCE_NUM_THREADS", "1"), ("NUM_STREAMS", "AUTO"),
                       ("PERFORMANCE_HINT", "throughput"), ("HINT_BF16", "no")):  # fmt: skip
        assert run(load(tmp_path, parameter(key, value)), fp32([[1] * 4])).outputs
    for key, value, reason in (("TARGET_DEVICE", "GPU", "must be CPU, not 'GPU'"),):
        with pytest.raises(Unsupported, match=reason):
            load(tmp_path, parameter(key, value))
    for key, value in (("PERFORMANCE_HINT", "fast"), ("NUM_STREAMS", "x"), ("HINT_BF16", "x")):
        with pytest.raises(InvalidArgument, match=f"'{key}'"):
            load(tmp_path, parameter(key, value))


def test_weights_that_change_after_loading_change_no_answer(tmp_path: Path) -> None:
    (tmp_path / "model.xml").write_text(intermediate_representation())
    (tmp_path / "model.bin").write_bytes(np.full(4, 3, np.float32).tobytes())
    backend = load(tmp_path, TEXT)
    os.truncate(tmp_path / "model.bin", 0)
    assert run(backend, fp32([1] * 4)).outputs[0].data.tolist() == [4.0] * 4


def test_nothing_is_reported_to_the_makers(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from modelport.gateway.runtime.openvino_import import openvino\n"
        "print('openvino_telemetry' in sys.modules, openvino.convert_model.__name__)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, "HOME": str(tmp_path)},
    )
    assert done.stdout.split() == ["False", "convert_model"], done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_model_that_ends_its_process_is_refused_unless_native_code_is_allowed(
    tmp_path: Path, trials: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model.xml").write_text(intermediate_representation())
    (tmp_path / "model.bin").write_bytes(bytes(16))
    load(tmp_path, TEXT).unload()
    assert [verdict.read_bytes() for verdict in trials.iterdir()] == [b"passed"]
    run_trial = trial_load.run
    monkeypatch.setattr(
        trial_load,
        "run",
        lambda function, file, **_: run_trial("tests.attacks.trial_functions:crashes", file),
    )
    with pytest.raises(IntegrityError, match="signal 11"):
        load(tmp_path, TEXT)
    assert load(tmp_path, TEXT, native=True).config.output[0].name == "y"
