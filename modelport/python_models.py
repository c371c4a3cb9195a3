"""Models declared by ``@modelport.model``.

A worker of the gateway runs a declared model like one of Triton's: ``ModelDefinition`` has what a
class ``TritonPythonModel`` has. So this needs numpy, and nothing of the gateway but its errors.
"""

from __future__ import annotations

import contextlib
import inspect
import typing
from collections import defaultdict
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    AsyncIterator,
    Callable,
    Generator,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from typing import Any, TypeVar, overload

import numpy as np

import triton_python_backend_utils as pb_utils
from modelport import python_model_instances
from modelport.gateway.errors import Internal, UsageError
from modelport.python_model_instances import DeclaredModel
from modelport.tensor_types import TensorType, tensor_type

T = TypeVar("T", bound=Callable[..., Any])
#: The attribute of a function or class that has its definition.
ATTRIBUTE = "__modelport_model__"
#: The name of the only output, unless it is declared.
OUTPUT = "output"
_ASYNC_STREAMS = (AsyncGenerator, AsyncIterable, AsyncIterator)
_STREAMS = (Generator, Iterable, Iterator, *_ASYNC_STREAMS)


@overload
def model(target: T, /) -> T:
    """Declare ``target`` with the defaults."""


@overload
def model(
    *,
    name: str = "",
    batch: int = 0,
    inputs: Mapping[str, Any] | None = None,
    outputs: Mapping[str, Any] | None = None,
) -> Callable[[T], T]:
    """Declare with these options."""


def model(
    target: Any = None,
    /,
    *,
    name: str = "",
    batch: int = 0,
    inputs: Mapping[str, Any] | None = None,
    outputs: Mapping[str, Any] | None = None,
) -> Any:
    """Declare a function, or a class with a method ``predict``, as a model to serve.

        @modelport.model(batch=32)
        def score(text: list[str]) -> modelport.Array["FP32", 2]: ...

    Its type hints are the model's inputs and outputs. It stays what it is, and can be called
    without a gateway. A class may have ``load``, ``unload`` and ``is_ready``. An ``async`` function
    answers many requests at a time; a generator streams its responses.

    Args:
        name: of the model; that of the function or class unless given.
        batch: the most items that the model gets at a time, joined from several requests; 0: it
            gets one request at a time.
        inputs: type hints by input, in place of those of parameters.
        outputs: type hints by output; a model of several outputs returns a dictionary.

    Raises:
        InvalidArgument: a type hint is missing or stands for no tensor.
    """

    def declare(target: Any) -> Any:
        """Give ``target`` its definition."""
        setattr(target, ATTRIBUTE, ModelDefinition(target, name, batch, inputs, outputs))
        return target

    return declare if target is None else declare(target)


class ModelDefinition:
    """A declared model, with the interface of a class ``TritonPythonModel``."""

    def __init__(
        self,
        target: Any,
        name: str,
        batch: int,
        inputs: Mapping[str, Any] | None,
        outputs: Mapping[str, Any] | None,
    ) -> None:
        if not inspect.isfunction(target) and not inspect.isclass(target):
            raise UsageError(
                f"@modelport.model decorates a function or a class, not {type(target).__name__}"
            )
        self.name = name or target.__name__
        if type(batch) is not int or batch < 0:
            raise self._error(f"has the batch {batch!r}, which is not a number of items")
        self.target, self.batch = target, batch
        function = self._function()
        with self._evaluating():
            signature = inspect.signature(function, eval_str=True)
        parameters = list(signature.parameters.values())
        #: Inputs that requests may leave out.
        self.optional: set[str] = set()
        self.inputs = self._inputs(
            parameters[1:] if inspect.isclass(target) else parameters, dict(inputs or {})
        )
        hint = signature.return_annotation
        origin = typing.get_origin(hint) or hint
        generates = inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function)
        self.streams = generates or origin in _STREAMS
        self.asynchronous = (
            inspect.iscoroutinefunction(function)
            or inspect.isasyncgenfunction(function)
            or origin in _ASYNC_STREAMS
        )
        if self.streams and batch:
            raise self._error("streams its responses to one request at a time; remove 'batch'")
        if self.streams and not outputs:
            hint = next(iter(typing.get_args(hint)), inspect.Signature.empty)
        self.outputs = self._outputs(hint, outputs)

    def _function(self) -> Any:
        """The function that answers requests."""
        if inspect.isfunction(self.target):
            return self.target
        if inspect.iscoroutinefunction(getattr(self.target, "load", None)):
            raise self._error("has an 'async def load'; write 'def load'")
        predict = inspect.getattr_static(self.target, "predict", None)
        if not inspect.isfunction(predict):
            raise self._error("is a class without a method 'predict', which answers requests")
        return predict

    def _inputs(
        self, parameters: Sequence[inspect.Parameter], declared: dict[str, Any]
    ) -> dict[str, TensorType]:
        found: dict[str, TensorType] = {}
        rest = False
        for parameter in parameters:
            name = parameter.name
            if parameter.kind is parameter.VAR_KEYWORD:
                rest = bool(declared)
                if rest:
                    continue
            if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
                raise self._error(
                    f"has the parameter {parameter}; inputs are passed by name: declare those of "
                    "**inputs with @modelport.model(inputs={...})"
                )
            hint = declared.pop(name, parameter.annotation)
            if hint is parameter.empty:
                raise self._error(
                    f"has no type hint for its input '{name}'; write {name}: list[str], or "
                    f'{name}: modelport.Array["FP32", 2]'
                )
            found[name] = self._type(hint, f"input '{name}'")
            if parameter.default is not parameter.empty:
                self.optional.add(name)
        if declared and not rest:
            raise self._error(
                f"declares the input '{next(iter(declared))}', which it does not take"
            )
        found.update((name, self._type(hint, f"input '{name}'")) for name, hint in declared.items())
        if not found:
            raise self._error("takes no input")
        return found

    def _outputs(self, hint: Any, declared: Mapping[str, Any] | None) -> dict[str, TensorType]:
        if not declared and typing.is_typeddict(hint):
            with self._evaluating():
                declared = typing.get_type_hints(hint, include_extras=True)
        if declared:
            return {name: self._type(hint, f"output '{name}'") for name, hint in declared.items()}
        if hint in (inspect.Signature.empty, None):
            wanted = "Iterator[str]" if self.streams else 'modelport.Array["FP32", 2]'
            raise self._error(f"has no type hint for what it returns; write -> {wanted}")
        return {OUTPUT: self._type(hint, "the returned value")}

    @contextlib.contextmanager
    def _evaluating(self) -> Iterator[None]:
        """Evaluate type hints that are strings."""
        try:
            yield
        except UsageError:
            raise
        except Exception as error:  # a hint may be any expression
            raise self._error(f"has a type hint that cannot be evaluated: {error}") from error

    def _type(self, hint: Any, place: str) -> TensorType:
        return tensor_type(hint, self.batch > 0, f"model '{self.name}': {place}")

    def _error(self, text: str) -> UsageError:
        return UsageError(f"model '{self.name}' {text}")

    # -- the interface of a class TritonPythonModel ------------------------------------------------

    def auto_complete_config(self, config: pb_utils.ModelConfig) -> pb_utils.ModelConfig:
        """Declare the model's inputs, outputs, batch and responses."""
        for name, kind in self.inputs.items():
            optional = {"optional": True} if name in self.optional else {}
            config.add_input({**_declared(name, kind), **optional})
        for name, kind in self.outputs.items():
            config.add_output(_declared(name, kind))
        for side, kinds in (("input", self.inputs), ("output", self.outputs)):
            for tensor in config.as_dict()[side]:
                # There are no empty dims in a configuration: one value is sent as a tensor of one.
                if tensor["name"] in kinds and not kinds[tensor["name"]].dims:
                    tensor["reshape"] = {"shape": []}
        config.set_max_batch_size(self.batch)
        if self.batch:
            config.set_dynamic_batching()
        if self.streams:
            config.set_model_transaction_policy({"decoupled": True})
        return config

    def __call__(self) -> DeclaredModel:
        """An instance, to be initialized."""
        return python_model_instances.KINDS[self.streams, self.asynchronous](self)

    # -- values and tensors ------------------------------------------------------------------------

    def arguments(self, requests: Sequence[pb_utils.InferenceRequest]) -> dict[str, Any]:
        """The arguments of a call that answers ``requests``, which have the same inputs."""
        arrays: dict[str, list[Any]] = defaultdict(list)
        for request in requests:
            for tensor in request.inputs():
                arrays[tensor.name()].append(tensor.as_numpy())
        return {
            name: self.inputs[name].value(
                found[0] if len(found) == 1 else np.concatenate(found), name
            )
            for name, found in arrays.items()
        }

    def arrays(self, returned: Any, rows: int | None = None) -> dict[str, Any]:
        """The arrays of what the model has returned, by output.

        Raises:
            Internal: it is not what the model has declared.
        """
        if not isinstance(returned, Mapping):
            if len(self.outputs) > 1:
                raise Internal(
                    f"model '{self.name}' must return a dictionary of its outputs "
                    f"{', '.join(self.outputs)}, not {type(returned).__name__}"
                )
            returned = {next(iter(self.outputs)): returned}
        if returned.keys() != self.outputs.keys():
            raise Internal(
                f"model '{self.name}' must return the outputs {', '.join(self.outputs)}, not "
                f"{', '.join(map(str, returned)) or 'none'}"
            )
        return {name: kind.array(returned[name], name, rows) for name, kind in self.outputs.items()}


def _declared(name: str, kind: TensorType) -> dict[str, Any]:
    return {"name": name, "data_type": kind.triton_type, "dims": list(kind.dims or (1,))}
