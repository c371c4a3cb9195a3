"""A TensorFlow model as a reader found it: tensors by name, and the model that takes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from modelport.exporters.runtime.tensorflow_runtime import tf
from modelport.exporters.tolerance import FP32

Call = Callable[[Mapping[str, Any]], Mapping[str, Any]]


class TensorFlowModule(tf.Module):  # type: ignore[misc]
    """A model that takes and returns tensors by name.

    It tracks the variables and other resources of the model, but not a Keras model, which would be
    saved too.
    """

    def __init__(self, call: Call, tracked: Any) -> None:
        super().__init__()
        self.tracked = tracked
        self._call = call

    def __call__(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        return dict(self._call(inputs))


@dataclass(frozen=True, slots=True)
class DeclaredTensor:
    """An input or output as declared by TensorFlow, with its batch dimension."""

    name: str
    dtype: str
    shape: tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class LoadedModule:
    """A model that was read.

    Attributes:
        words: texts that it knows, such as those of a vocabulary.
        pads: whether it takes 0 for padding; its answer to padding alone may be no number.
        notices: what the user should know that the artifact lacks.
    """

    model: TensorFlowModule
    inputs: Sequence[DeclaredTensor]
    outputs: Sequence[DeclaredTensor]
    parameter_count: int
    rtol: float = FP32.rtol
    words: Sequence[str] = ()
    pads: bool = False
    notices: Sequence[str] = ()
