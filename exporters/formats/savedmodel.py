"""SavedModel with one signature, ``serving_default``, and the model's own tensor names.

A PyTorch model is lowered to TensorFlow's operations; a ``tf.Module`` holds its weights, and one
function the model. ``keras.Model.export`` would write every variable twice and rename the outputs.
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from modelport.exporters.decompositions.composites import traceable_composites
from modelport.exporters.formats import pt2
from modelport.exporters.formats.base import ExportTarget
from modelport.exporters.loaded_model import Framework, Source
from modelport.exporters.lowering import lower
from modelport.exporters.lowering.program import prepared
from modelport.exporters.requests.random_inputs import model_dims
from modelport.exporters.runtime.output_capture import quiet
from modelport.exporters.runtime.tensorflow_runtime import tf
from modelport.exporters.sources import torch_errors
from modelport.exporters.sources.torch_eager import inference_mode
from modelport.gateway.errors import IntegrityError, Unsupported, first_line
from modelport.gateway.repository.artifact_checks import saved_model_guard
from modelport.gateway.types import NUMPY_DTYPES, Array, ModelSignature, TensorSpec

SIGNATURE = "serving_default"

#: Names that a function argument may have; TensorFlow replaces others and only logs that.
NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*")
RESERVED = frozenset({*keyword.kwlist, "self"})

Model = Callable[[Mapping[str, Any]], Mapping[str, Any]]


class ServableModule(tf.Module):  # type: ignore[misc]
    """The weights that a function uses, each once."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.weights = list(function.graph.variables)


def export(source: Source, path: Path, target: ExportTarget) -> None:
    """Write ``source`` to the folder ``path``; batch and axes are dynamic.

    Raises:
        Unsupported: TensorFlow cannot trace or save the model, or lacks one of its operators.
    """
    lowered = source.framework is Framework.PYTORCH
    model = _lowered(source, target) if lowered else source.model
    try:
        with quiet():
            function = signature_function(model, source.signature)
            tf.saved_model.save(
                ServableModule(function) if lowered else model,
                str(path),
                signatures={SIGNATURE: function},
                options=tf.saved_model.SaveOptions(experimental_custom_gradients=False),
            )
    except (OSError, Unsupported):
        raise
    except Exception as error:
        # An error in traced code begins with the trace; Keras writes the reason in bold type.
        text = str(error).partition("\x1b[1m")[2].partition("\x1b[0m")[0] or str(error)
        reason = (text.strip() or type(error).__name__).splitlines()[-1].strip()[:300]
        raise Unsupported(
            f"TensorFlow cannot save this model ({reason}); rewrite what it names"
        ) from error


def _lowered(source: Source, target: ExportTarget) -> Model:
    with torch_errors.translated("torch.export"), quiet():
        traced = pt2.traced_program(source, target)
        with inference_mode(source.model), pt2.recurrent_layers(), traceable_composites():
            program = prepared(traced)
    return lower(program, source.signature)


def signature_function(model: Model, signature: ModelSignature) -> Any:
    """``model`` as a concrete function with the names of ``signature``.

    The function holds the model in a closure. Batch and axes are None in its shapes.

    Raises:
        Unsupported: TensorFlow cannot keep an input's name.
    """
    for spec in signature.inputs:
        if not NAME.fullmatch(spec.name) or spec.name in RESERVED:
            raise Unsupported(
                f"TensorFlow does not accept the input name '{spec.name}'; use letters, digits and "
                "underscores, a letter first, and no keyword of Python"
            )
    small: dict[str, str] = {}
    for spec in signature.inputs:
        if (other := small.setdefault(spec.name.lower(), spec.name)) != spec.name:
            raise Unsupported(
                f"TensorFlow does not tell the input names '{other}' and '{spec.name}' apart; "
                "rename one of them"
            )
    outputs = [spec.name for spec in signature.outputs]

    # AutoGraph would wrap the errors of a lowering, and Keras converts its layers itself.
    @tf.function(autograph=False)  # type: ignore[untyped-decorator]
    def serve(**inputs: Any) -> dict[str, Any]:
        results = model(inputs)
        return {name: results[name] for name in outputs}

    batch = [None] if signature.max_batch_size else []
    specs = {spec.name: _tensor_spec(spec, batch) for spec in signature.inputs}
    return serve.get_concrete_function(**specs)


def _tensor_spec(spec: TensorSpec, batch: list[None]) -> Any:
    dims = [None if isinstance(dim, str) or dim == -1 else dim for dim in model_dims(spec)]
    return tf.TensorSpec([*batch, *dims], tf.as_dtype(NUMPY_DTYPES[spec.datatype]), name=spec.name)


class SavedModelParitySession:
    """The signature ``serving_default`` of a SavedModel, on the CPU."""

    def __init__(self, path: Path) -> None:
        try:
            # the variables live as long as this object
            self._model = tf.saved_model.load(str(path))
        except Exception as error:  # damage raises a dozen different classes
            reason = first_line(error)
            raise IntegrityError(f"'{path.name}' is not a complete SavedModel: {reason}") from error
        if SIGNATURE not in self._model.signatures:
            raise IntegrityError(f"'{path.name}' has no signature '{SIGNATURE}'")
        self._function = self._model.signatures[SIGNATURE]
        self.inputs = list(self._function.structured_input_signature[1])
        self.outputs = list(self._function.structured_outputs)

    def __call__(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        results = self._function(**{name: tf.constant(inputs[name]) for name in self.inputs})
        return {name: value.numpy() for name, value in results.items()}


def open_session(path: Path, trusted: bool = False) -> SavedModelParitySession:
    """Open a SavedModel; raise ``IntegrityError`` if it is damaged, unsafe or lacks the
    signature."""
    if not trusted:
        saved_model_guard.check(path)
    return SavedModelParitySession(path)
