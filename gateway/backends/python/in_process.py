"""A Python model in this process, without a worker and a gateway, for ``modelport check``."""

from __future__ import annotations

import asyncio
import inspect
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import triton_python_backend_utils as pb_utils
from modelport.gateway.backends.python import codec
from modelport.gateway.backends.python.backend import completed_config, model_arguments
from modelport.gateway.backends.python_worker import regions, tensors
from modelport.gateway.backends.python_worker.errors import text_of
from modelport.gateway.backends.python_worker.triton_model import (
    RESCHEDULED,
    Answer,
    TritonPythonModelAdapter,
    is_plain,
)
from modelport.gateway.errors import Internal, ModelportError, Unsupported
from modelport.gateway.repository import config as configuration
from modelport.gateway.repository.config import ModelConfig
from modelport.gateway.types import InferRequest, InferResponse
from triton_python_backend_utils._requests import InferenceResponseSender
from triton_python_backend_utils._runtime import Current

#: The longest time from the return of ``execute`` to the end of the responses.
SENDER_SECONDS = 10.0
_PAUSE_SECONDS = 0.01


class InProcessModel:
    """A Python model, loaded and initialized.

    Args:
        folder: the one with its file, which the configuration names.
        version: empty for a file outside of a repository.

    Raises:
        ModelportError: it does not load; the message has its exception.
    """

    def __init__(self, name: str, folder: Path, version: str, config: ModelConfig) -> None:
        self._name, self._folder = name, str(folder)
        self._runner = asyncio.Runner()
        Current.runtime.model_dir = self._folder
        start = {
            "model": name, "instance": name, "folder": self._folder, "version": version,
            "file": config.default_model_filename, "code": self._folder,
        }  # fmt: skip
        with self._translated():
            self._model = TritonPythonModelAdapter(start)
            completed = self._model.complete(json.dumps(configuration.to_json(config)))
        self.config = completed_config(config, completed, name)
        self._decoder = codec.ResponseDecoder(name, 1, self.config, strict=True)
        arguments = {
            **model_arguments(self.config, name, int(version or 1), folder),
            "model_instance_name": name,
            "model_instance_kind": "CPU",
            "model_instance_device_id": "0",
        }
        with self._translated():
            self._model.initialize(arguments)

    def infer(self, request: InferRequest) -> list[InferResponse]:
        """The responses to a valid ``request``, checked against the configuration.

        Raises:
            ModelportError: the model has failed; the message has its exception.
        """
        buffers: list[regions.Buffer] = []
        rows = codec.describe(request.inputs, buffers)
        inputs, _ = tensors.restore(rows, _joined(buffers))
        names = [output.name for output in self.config.output]
        asked = pb_utils.InferenceRequest(
            inputs=inputs, requested_output_names=names, model_name=self._name
        )
        with self._translated():
            returned = self._model.execute([asked])
            if inspect.iscoroutine(returned):
                returned = self._runner.run(returned)
            answers = self._model.answers([asked], returned)
        if answers == [None] and asked.sender is not None:
            self._wait_for(asked.sender)
            answers = [each.error() or each for each in asked.origin.responses]
        if RESCHEDULED in answers:
            raise Unsupported("the model reschedules the request; serve it to see its responses")
        return [self._response(answer, request) for answer in answers]

    def _wait_for(self, sender: InferenceResponseSender) -> None:
        """Wait for the end of the responses, which threads and tasks of the model may send."""
        limit = time.monotonic() + SENDER_SECONDS
        while not sender.closed:
            if time.monotonic() > limit:
                raise Internal(
                    f"the model has not sent the end of its responses within {SENDER_SECONDS:g} s"
                )
            self._runner.run(asyncio.sleep(_PAUSE_SECONDS))

    def _response(self, answer: Answer, request: InferRequest) -> InferResponse:
        buffers: Sequence[regions.Buffer] = ()
        if isinstance(answer, pb_utils.InferenceResponse):
            rows, buffers = tensors.describe(answer.output_tensors())
            row: list[Any] = [0, rows, json.loads(answer.parameters())]
        else:
            assert isinstance(answer, pb_utils.TritonError)
            row = [1, answer.message(), answer.code()]
        described = codec.described(codec.parsed(json.dumps(row).encode()))
        assert described is not None
        outcome, _ = self._decoder.response(described, _joined(buffers), 0, request)
        if isinstance(outcome, ModelportError):
            raise outcome
        return outcome

    def close(self) -> None:
        """Let the model free what it holds."""
        with self._translated(), self._runner:
            ended = self._model.finalize()
            if inspect.iscoroutine(ended):
                self._runner.run(ended)

    @contextmanager
    def _translated(self) -> Iterator[None]:
        """Make an error of whatever the model raises, ``sys.exit()`` too."""
        try:
            yield
        except (ModelportError, KeyboardInterrupt):
            raise
        except BaseException as error:
            text = str(error) if is_plain(error) else text_of(error, self._folder)
            raise Internal(text) from error


def _joined(buffers: Sequence[regions.Buffer]) -> bytes:
    padded = (bytes(each) + bytes(regions.aligned(len(each)) - len(each)) for each in buffers)
    return b"".join(padded)
