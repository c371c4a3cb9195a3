"""``triton_python_backend_utils`` in a plain program: models are tested without a server."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import triton_python_backend_utils as pb_utils
from triton_python_backend_utils import _in_triton

ROOT = Path(__file__).parents[4]


@pytest.mark.parametrize(
    "values",
    [
        np.array([True]), np.arange(6, dtype=np.float16).reshape(2, 3).T,
        np.array([b"a", b""], dtype=object), np.array([b"ab"]), np.zeros((0, 2), np.int64),
        np.array(3, np.uint8),
    ],
    ids=lambda value: str(value.dtype),
)  # fmt: skip
def test_a_tensor_has_its_array(values: Any) -> None:
    tensor = pb_utils.Tensor("x", values)
    assert tensor.name() == "x"
    assert tensor.shape() == list(values.shape)
    assert tensor.as_numpy().flags.c_contiguous
    assert np.array_equal(tensor.as_numpy(), values)
    assert tensor.is_cpu()


@pytest.mark.parametrize(
    "values",
    [np.array(["a"]), np.array([1j]), np.array([1], ">f4"), np.array([1], "M8[s]"),
     np.array([1], np.longdouble)],
    ids=lambda value: str(value.dtype),
)  # fmt: skip
def test_a_datatype_that_triton_lacks_is_refused(values: Any) -> None:
    with pytest.raises(pb_utils.TritonModelException, match=r"^NumPy dtype is not supported\.$"):
        pb_utils.Tensor("x", values)


@pytest.mark.parametrize("wrong", [[1.0], np.float32(1), None])
def test_only_an_array_makes_a_tensor(wrong: Any) -> None:
    with pytest.raises(TypeError, match="incompatible constructor arguments"):
        pb_utils.Tensor("x", wrong)


def test_tensors_travel_by_dlpack() -> None:
    values = np.arange(4, dtype=np.float32)
    shared = pb_utils.Tensor.from_dlpack("y", pb_utils.Tensor("x", values))
    assert np.array_equal(shared.as_numpy(), values)
    capsule = pb_utils.Tensor("x", values).to_dlpack()
    assert np.array_equal(pb_utils.Tensor.from_dlpack("y", capsule).as_numpy(), values)
    with pytest.raises(pb_utils.TritonModelException, match="support for string tensors"):
        pb_utils.Tensor("x", np.array([b"a"], dtype=object)).to_dlpack()


def test_bfloat16_travels_by_dlpack_alone() -> None:
    torch = pytest.importorskip("torch")
    values = torch.tensor([1.0, -2.5], dtype=torch.bfloat16)
    tensor = pb_utils.Tensor.from_dlpack("x", values)
    assert tensor.triton_dtype() == "TYPE_BF16"
    with pytest.raises(pb_utils.TritonModelException, match=r"Tensor dtype is BF16"):
        tensor.as_numpy()
    assert torch.equal(torch.from_dlpack(tensor.to_dlpack()), values)
    capsule = torch.utils.dlpack.to_dlpack(values)
    tensor = pb_utils.Tensor.from_dlpack("x", capsule)
    assert tensor.triton_dtype() == "TYPE_BF16"
    assert torch.equal(torch.utils.dlpack.from_dlpack(tensor.to_dlpack()), values)
    with pytest.raises(pb_utils.TritonModelException, match="cannot be imported"):
        pb_utils.Tensor.from_dlpack("x", capsule)  # it has been taken


def test_a_tensor_of_a_capsule_makes_another_capsule() -> None:
    tensor = pb_utils.Tensor.from_dlpack("x", np.arange(3.0).__dlpack__())
    assert np.array_equal(
        pb_utils.Tensor.from_dlpack("y", tensor.to_dlpack()).as_numpy(), [0, 1, 2]
    )


@pytest.mark.parametrize(
    "wrong",
    [{"model_name": None}, {"inputs": None}, {"requested_output_names": [None]}, {"flags": None},
     {"request_id": None}, {"correlation_id": None}, {"model_version": None}, {"timeout": "1"}],
    ids=str,
)  # fmt: skip
def test_a_request_of_wrong_arguments_is_a_type_error(wrong: dict[str, Any]) -> None:
    right = {"model_name": b"m", "inputs": [], "requested_output_names": [b"y"]}
    assert pb_utils.InferenceRequest(**right).model_name() == "m"
    with pytest.raises(TypeError, match="incompatible constructor arguments"):
        pb_utils.InferenceRequest(**{**right, **wrong})


@pytest.mark.parametrize("wrong", [[], {1: "a"}, {"a": 0.5}, {"a": None}, {"a": ["b"]}], ids=str)
def test_parameters_have_tritons_types(wrong: Any) -> None:
    with pytest.raises(pb_utils.TritonModelException, match=r"^Expect (dict|parameters \w+)"):
        pb_utils.InferenceResponse([], parameters=wrong)


@pytest.mark.parametrize("wrong", [None, 1, "x", object()])
def test_an_object_that_is_no_dlpack_tensor_is_refused(wrong: Any) -> None:
    with pytest.raises(pb_utils.TritonModelException, match="cannot be imported"):
        pb_utils.Tensor.from_dlpack("x", wrong)


def test_strings_are_serialized_as_on_the_wire() -> None:
    values = np.array([[b"ab", "c"], [2, None]], dtype=object)
    encoded = pb_utils.serialize_byte_tensor(values)
    assert isinstance(encoded, bytes)
    assert list(pb_utils.deserialize_bytes_tensor(encoded)) == [b"ab", b"c", b"2", b"None"]
    assert pb_utils.serialize_byte_tensor(np.zeros(0, object)) == ()
    ends = {0, 6, 11, 16, len(encoded)}
    for cut in set(range(len(encoded))) - ends:
        with pytest.raises(ValueError, match="the tensor ends within"):
            pb_utils.deserialize_bytes_tensor(encoded[:cut])


def test_datatypes_have_their_numbers_and_names() -> None:
    for number, kind in enumerate(pb_utils.TRITON_STRING_TO_NUMPY.values(), 1):
        assert pb_utils.triton_to_numpy_type(number) is kind
        assert pb_utils.numpy_to_triton_type(kind) == number
    assert pb_utils.triton_to_numpy_type(14) is None
    assert pb_utils.numpy_to_triton_type(np.complex64) is None
    assert pb_utils.triton_string_to_numpy("TYPE_INT8") is np.int8
    with pytest.raises(KeyError):
        pb_utils.triton_string_to_numpy("TYPE_BF16")


def test_a_sender_collects_what_a_model_sends() -> None:
    request = pb_utils.InferenceRequest("", 0, [pb_utils.Tensor("x", np.ones(1))], [], "")
    sender = request.get_response_sender()
    sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("y", np.ones(2))]))
    sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
    assert [len(each.output_tensors()) for each in request.origin.responses] == [1]
    with pytest.raises(pb_utils.TritonModelException, match="has been closed"):
        sender.send(pb_utils.InferenceResponse())


def test_there_is_no_other_model_to_ask() -> None:
    request = pb_utils.InferenceRequest("", 0, [], [], "other")
    with pytest.raises(pb_utils.TritonModelException, match="BLS is only supported"):
        request.exec()
    with pytest.raises(pb_utils.TritonModelException, match="BLS is only supported"):
        pb_utils.load_model("other")


def test_metrics_count_here(capsys: pytest.CaptureFixture[str]) -> None:
    family = pb_utils.MetricFamily("seen", "Seen", pb_utils.MetricFamily.COUNTER)
    counter = family.Metric({"a": "b"})
    counter.increment(2)
    assert counter.value() == 2
    with pytest.raises(pb_utils.TritonModelException, match="monotonically"):
        counter.increment(-1)
    with pytest.raises(pb_utils.TritonModelException, match="Missing required buckets"):
        pb_utils.MetricFamily("h", "", pb_utils.MetricFamily.HISTOGRAM).Metric()
    with pytest.raises(pb_utils.TritonModelException, match="Invalid metric name"):
        pb_utils.MetricFamily("a b", "", pb_utils.MetricFamily.GAUGE)
    pb_utils.Logger.log_warn("careful")
    assert "careful" in capsys.readouterr().err


def test_in_tritons_stub_its_own_module_is_imported(tmp_path: Path) -> None:
    """A checkout or an installation of modelport comes first in the path of Triton's stub."""
    (tmp_path / f"{pb_utils.__name__}.py").write_text("THEIRS = True")
    stub = tmp_path / "triton_python_backend_stub"
    stub.symlink_to(sys.executable)
    (tmp_path / "exe").symlink_to(stub)
    code = (
        f"import sys; sys.path[:0] = [{str(ROOT)!r}, {str(tmp_path)!r}]\n"
        f"from {pb_utils.__name__} import _in_triton\n"
        f"_in_triton.give_way({pb_utils.__name__!r}, {str(tmp_path / 'exe')!r})\n"
        f"import {pb_utils.__name__} as found; print(found.THEIRS)"
    )
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True)
    assert done.stdout == "True\n", done.stderr
    before = sys.modules[pb_utils.__name__]
    _in_triton.give_way(pb_utils.__name__)
    assert sys.modules[pb_utils.__name__] is before


@pytest.mark.parametrize("wrong", [(None,), (1,), ("text", None), ("text", "INFO")])
def test_only_a_text_with_a_level_is_logged(wrong: tuple[Any, ...]) -> None:
    with pytest.raises(TypeError, match="incompatible function arguments"):
        pb_utils.Logger.log(*wrong)
