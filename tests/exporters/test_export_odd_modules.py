"""Modules with unusual results, arguments, weights and operators are published and right, or
refused in one line."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import Result

from modelport.exporters import api
from modelport.exporters.formats.registry import FORMATS
from modelport.exporters.loaded_model import Source, WeightPrecision
from modelport.exporters.model_spec import ModelSpec
from modelport.exporters.requests.random_inputs import draw, name_axes, sizes_of
from modelport.exporters.sources import SourceRequest, pytorch
from modelport.exporters.sources.torch_eager import inference_mode, named_tensors
from modelport.gateway.errors import Unsupported
from modelport.gateway.repository import config
from modelport.gateway.types import Datatype, ModelSignature, TensorSpec
from tests.exporters import odd_modules

pytestmark = pytest.mark.thorough

FACTORY = "tests.exporters.odd_modules:build"

#: The exit codes and messages of modules that no format takes; all others are published.
REFUSED = {
    "number": (4, "returns int as 'count'"),
    "nothing": (4, "returns NoneType"),
    "text": (4, "returns str"),
    "no_name": (2, "names an output ''; name its outputs by --output-name"),
    "unprintable_name": (2, r"names an output '\ud800'"),
    "masked": (4, "output 'output' is MaskedTensor, which no protocol supports"),
    "ragged": (4, "output 'output' is a nested tensor, which no protocol supports"),
    "deep": (4, "nested more than 64 levels deep as 'output_0'"),
    "holds_itself": (4, "nested more than 64 levels deep as 'itself'"),
    "complex": (4, "torch.complex64"),
    "sparse": (4, "torch.sparse_coo"),
    "scalar_in_all": (2, "--max-batch-size 0"),
    "batch_second": (2, "--max-batch-size 0"),
    "unique": (2, "--max-batch-size 0"),
    "lstm_whole": (2, "output 'output_1.0' has shape [1, 2, 3]"),
    "empty": (2, "output 'output' is empty"),
    "not_a_number": (3, "the model's values are not finite"),
    "noise": (4, "draws random numbers (aten.randn_like in the forward() of LinearWithFunction)"),
    "random_part": (4, "(aten.bernoulli_ in module 'body.1' (Drops))"),
    "rarely_random": (4, "(aten.rand_like in the forward() of LinearWithFunction)"),
    "mean_of_rows": (4, "(aten.mean), which a server fills with the rows of other requests"),
    "python_noise": (4, "draws numbers outside torch"),
    "keeps_state": (4, "forward() keeps state"),
    "quantised": (4, "'fc' is a quantised Linear"),
    "raises": (2, "division or modulo by zero"),
    "exits": (2, "the model ends the process"),
    "recursive": (2, "maximum recursion depth"),
}
#: Modules that some formats refuse.
REFUSED_BY = {
    ("loop", "onnx"): (4, "torch.onnx cannot export this model"),
    ("loop", "pt2"): (4, "torch.export cannot export this model"),
    ("loop", "torchscript"): (4, "changes with the other rows of its batch"),
    ("data_dependent", "onnx"): (4, "torch.onnx cannot export this model"),
    ("data_dependent", "pt2"): (4, "torch.export cannot export this model"),
    ("data_dependent", "torchscript"): (4, "changes with the other rows of its batch"),
    ("input_name", "onnx"): (4, "output 'x' has the name of an input"),
    ("numpy_inside", "torchscript"): (3, "a dimension is baked in"),
    ("numpy_inside", "pt2"): (4, ".numpy() is not supported"),
}
#: Modules that every run takes through the slower formats, too.
QUICK = ("cached", "keyword_only", "half_weights", "graph", "lstm", "compiled", "input_name")
FORMAT_NAMES = ("torchscript", "onnx", "pt2")


def exported(invoke: Callable[..., Result], folder: Path, name: str, row: str) -> Result:
    _, inputs, options = odd_modules.MODULES[name]
    module = odd_modules.build("dict" if name == "quantised" else name)
    torch.save(module.state_dict(), folder / f"{name}.pt")
    arguments = [word for text in inputs for word in ("--input", text)]
    arguments += [
        word for text in options.get("output_names", ()) for word in ("--output-name", text)
    ]
    arguments += ["--max-batch-size", str(options.get("max_batch_size", 4)), "--samples", "16"]
    arguments += ["--model-kwargs", f'{{"name": "{name}"}}', "--format", row, "--name", name]
    return invoke(folder / f"{name}.pt", *arguments, model=FACTORY)


def check_answers(folder: Path, name: str, row: str) -> None:
    """Ask the published artifact what the module itself answers."""
    model = folder / "repository" / name
    text = (model / config.FILENAME).read_text()
    signature = name_axes(config.signature(config.complete(config.parse(text), name)))
    kind = FORMATS.builtin[row]
    session = kind.open_session(model / "1" / kind.platform.default_filename, trusted=True)
    module = odd_modules.build(name)  # the same weights each time
    sizes = {name: sizes_of(axis)[1] for name, axis in signature.axes.items()}
    inputs = draw(signature, min(3, signature.max_batch_size), sizes, np.random.default_rng(7))
    found = session(inputs)
    tensors = {key: torch.tensor(value) for key, value in inputs.items()}
    odd = module.float() if name in ("half_weights", "bfloat16_weights") else module
    with inference_mode(odd), torch.compiler.set_stance("force_eager"):
        keyed = name in ("keyword_only", "skipped_argument")
        result = odd(**tensors) if keyed else odd(*tensors.values())
    expected = {key: x.detach().resolve_neg() for key, x in named_tensors(result).items()}
    assert set(found) <= set(expected)
    for key, value in found.items():
        loose = 2e-3 if expected[key].dtype != torch.float32 else 1e-4
        np.testing.assert_allclose(value, expected[key].float(), rtol=loose, atol=loose)


@pytest.mark.timeout(1200)  # every module in every format is a minute of processor time
@pytest.mark.parametrize("row", FORMAT_NAMES)
def test_an_odd_module_is_published_and_right_or_refused_in_one_line(
    invoke: Callable[..., Result],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    row: str,
) -> None:
    every = row == "torchscript" or os.environ.get("MODELPORT_SLOW_TESTS")
    for name in odd_modules.MODULES if every else QUICK:
        done = exported(invoke, tmp_path, name, row)
        code, said = REFUSED.get(name) or REFUSED_BY.get((name, row)) or (0, "")
        assert (done.exit_code, said in done.stderr) == (code, True), (name, row, done.stderr)
        assert done.stderr.count("\n") == (1 if code else 0), (name, done.stderr)
        assert capfd.readouterr() == ("", ""), name
        if not code:
            check_answers(tmp_path, name, row)
            _remove(tmp_path / "repository" / name)


def _remove(folder: Path) -> None:
    for path in sorted(folder.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    folder.rmdir()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_weights_in_half_precision_are_widened_unless_the_model_insists(dtype: torch.dtype) -> None:
    x = TensorSpec("x", Datatype.FP32, (4,))
    for strict in (False, True):
        module = odd_modules.Halves(dtype, strict)
        module.modelport_spec = ModelSpec(  # type: ignore[assignment]
            "m", lambda *_: ModelSignature((x,), (TensorSpec("y", Datatype.FP32, (3,)),), 2)
        )
        stored = str(dtype).removeprefix("torch.")

        def described(module: Any = module) -> Source:
            spec = module.modelport_spec
            return pytorch.source(module, spec, spec.signature(module, 2))

        request = SourceRequest(Path("m.pt"), "m")
        found = pytorch._at_full_precision(module, module.modelport_spec, request, described)
        computed = stored if strict else "float32"
        assert found.weights == WeightPrecision(stored, computed)
        assert module.fc.weight.dtype is (dtype if strict else torch.float32)


def test_outputs_keep_the_names_that_the_model_gives_them() -> None:
    def names(function: Any) -> list[str]:
        return list(named_tensors(function(odd_modules.build("dict"), torch.ones(2, 4))))

    functions = odd_modules.FUNCTIONS
    assert names(functions["dict"]) == ["logits", "hidden"]
    assert names(functions["dataclass"]) == ["logits", "scores.0", "scores.1"]
    assert names(functions["named_tuple"]) == ["mean", "spread"]
    assert names(functions["nested"]) == ["output_0", "output_1.0", "output_1.1.0"]
    assert names(functions["one_of_a_tuple"]) == names(functions["argmax"]) == ["output"]
    assert names(lambda m, x: {1: x, "1": x}) == ["1", "1_"], "no two have one name"


def test_a_keras_class_of_the_users_own_is_named_and_not_called_damage(tmp_path: Path) -> None:
    keras = pytest.importorskip("keras")

    class Scaled(keras.layers.Layer):  # type: ignore[misc, name-defined]
        """Twice its input."""

        def call(self, x: Any) -> Any:
            return x * 2

    Scaled.__module__ = "__main__"  # as in a training script
    given = keras.Input((3,))
    keras.Model(given, Scaled()(given)).save(tmp_path / "own.keras")
    with pytest.raises(Unsupported, match=r"'own.keras' has the class 'Scaled'.*model.export"):
        api.export(tmp_path / "own.keras", repository=tmp_path / "repository")
