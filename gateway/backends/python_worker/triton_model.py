"""A Python model: its file, its class or declaration, and the rules of its answers."""

from __future__ import annotations

import inspect
import json
import os
import sys
import types
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from modelport.gateway.errors import ModelportError, Unavailable
from triton_python_backend_utils._errors import TritonError
from triton_python_backend_utils._model_config import ModelConfig
from triton_python_backend_utils._requests import (
    RELEASE_RESCHEDULE,
    InferenceRequest,
    InferenceResponse,
)


class Rescheduled:
    """The answer to a request that the model wants to get again."""


RESCHEDULED = Rescheduled()
#: The answer to one request: a response, an error, or None if its sender answers it.
Answer = InferenceResponse | TritonError | Rescheduled | None


class TritonPythonModelAdapter:
    """One instance of a ``TritonPythonModel``, or of a function or class with ``@modelport.model``.

    Args:
        start: ``model``, ``instance``, ``folder``, ``file`` in the folder ``code``, and
            ``version``, which is empty for a file outside of a repository.
    """

    def __init__(self, start: dict[str, Any]) -> None:
        self._name, self._instance = start["model"], start["instance"]
        self._file: str = start["file"]
        folder: str = start["code"]
        self._class: Any = None
        self._model: Any = None
        self.decoupled = self.asynchronous = False
        version = start["version"]
        sys.path += [folder, os.path.dirname(folder)] if version else [folder]
        # The model's folder is a package path: ``from . import helper`` works in the version. A
        # folder of any name may have that of a library.
        package = types.ModuleType(version or "modelport_models")
        package.__path__ = [folder]
        sys.modules[package.__name__] = package
        self._module = f"{package.__name__}.{self._file.removesuffix('.py')}"

    def complete(self, config: str) -> dict[str, Any] | None:
        """Import the model, and let it complete its configuration; None: it does not."""
        module = import_module(self._module)
        self._class = getattr(module, "TritonPythonModel", None) or self._declared(module)
        if self._class is None:
            raise AttributeError(f"module '{self._module}' has no attribute 'TritonPythonModel'")
        function = getattr(self._class, "auto_complete_config", None)
        if function is None or not config:
            return None
        completed = function(ModelConfig(config))
        if not isinstance(completed, ModelConfig):
            raise _PlainError(
                f"auto_complete_config function in model '{self._name}' must return a valid "
                "pb.ModelConfig object."
            )
        return completed.as_dict()

    def _declared(self, module: types.ModuleType) -> Any:
        """The model's declaration by ``@modelport.model``: that of its name, or the only one."""
        found = {}
        for each in vars(module).values():
            if isinstance(each, types.FunctionType | type) and each.__module__ == module.__name__:
                definition = vars(each).get("__modelport_model__")
                # A decorator around it may have copied the attribute.
                if definition is not None and definition.target is each:
                    found[definition.name] = definition
        if self._name not in found and len(found) > 1:
            raise _PlainError(
                f"{self._file} declares the models {', '.join(found)}, and no '{self._name}'"
            )
        return found.get(self._name) or next(iter(found.values()), None)

    def initialize(self, arguments: dict[str, str]) -> None:
        """Make the instance, and initialize it."""
        config = json.loads(arguments["model_config"])
        self.decoupled = bool(config.get("model_transaction_policy", {}).get("decoupled"))
        self._model = self._class()
        self.asynchronous = inspect.iscoroutinefunction(getattr(self._model, "execute", None))
        if hasattr(self._model, "initialize"):
            self._model.initialize(arguments)

    def execute(self, requests: list[InferenceRequest]) -> Any:
        """Run the model; an awaitable for a model with ``async def execute``."""
        execute = getattr(self._model, "execute", None)
        if execute is None:
            raise _PlainError(f"Python model {self._file} does not implement `execute` method.")
        return execute(requests)

    def answers(self, requests: Sequence[InferenceRequest], returned: Any) -> list[Answer]:
        """The answers in what ``execute`` has returned, if that keeps to the rules."""
        if self.decoupled:
            if returned is not None:
                raise _PlainError(
                    f"Python model '{self._instance}' is using the decoupled mode and the execute "
                    "function must return None."
                )
            returned = [None] * len(requests)
        elif returned is None:
            returned = [None] * len(requests)
        elif not isinstance(returned, list):
            raise _PlainError(
                f"Expected a list in the execute return, found type '{type(returned)}'."
            )
        if len(returned) != len(requests):
            raise _PlainError(
                "Number of InferenceResponse objects do not match the number of InferenceRequest "
                f"objects. InferenceRequest(s) size is:{len(requests)}, and InferenceResponse(s) "
                f"size is:{len(returned)}\n"
            )
        for response in returned:
            if response is not None and not isinstance(response, InferenceResponse):
                raise _PlainError(
                    "Expected an 'InferenceResponse' object in the execute function return list, "
                    f"found type '{type(response)}'."
                )
        return [self._answer(*pair) for pair in zip(requests, returned, strict=True)]

    def _answer(self, request: InferenceRequest, response: InferenceResponse | None) -> Answer:
        again = request.release_flags() == RELEASE_RESCHEDULE
        if response is not None and again:
            raise _PlainError(
                "Expected a None object in the execute function return list for reschduled "
                f"request, found type '{type(response)}'."
            )
        if response is not None:
            return response.error() or response
        if again:
            return RESCHEDULED
        if request.sender is None:
            return TritonError(
                f"Python model '{self._instance}' has returned no response to a request; return an "
                "InferenceResponse, or send one by get_response_sender()"
            )
        return None

    @property
    def concurrent(self) -> bool:
        """Whether the model works on several batches at once."""
        return self.asynchronous and (self.decoupled or self.interruptible)

    @property
    def interruptible(self) -> bool:
        """Whether ``execute`` may be cancelled; Triton never does that."""
        found: bool = getattr(self._model, "interruptible", False)
        return found

    def may_separate(self, requests: Sequence[InferenceRequest], error: BaseException) -> bool:
        """Whether one request may have failed the others, which can be answered without it.

        Triton's models get a batch once; those of ``@modelport.model`` may get its requests again.
        """
        again: bool = getattr(self._model, "separable", False)
        return again and len(requests) > 1 and not isinstance(error, Unavailable)

    @property
    def checks(self) -> bool:
        """Whether the model says itself if it is ready."""
        return hasattr(self._model, "is_ready")

    def is_ready(self) -> Any:
        """Ask the model whether it is ready; the answer may be an awaitable."""
        return self._model.is_ready()

    def finalize(self) -> Any:
        """Let the model free what it holds."""
        function = getattr(self._model, "finalize", None)
        return None if function is None else function()


class _PlainError(Exception):
    """An error of the model's whose text is all there is to say."""


def is_plain(error: BaseException) -> bool:
    """Whether the text of ``error`` is complete without its type and place."""
    return isinstance(error, _PlainError | ModelportError)
