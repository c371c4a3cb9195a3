"""A TorchServe handler as a Python model: the ``model.py`` that ``migrate torchserve`` publishes.

``handler.json`` beside it names the handler and the served model that its ``self.model`` calls. The
handler sees what it uses of TorchServe: ``BaseHandler``, the context, the batch of requests.
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import json
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import triton_python_backend_utils as pb_utils

FOLDER = Path(__file__).parent


class ServedGraph:
    """The archive's model: a call is a request to it, with the remaining time."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._settings = settings

    def __call__(self, *values: Any, **named: Any) -> Any:
        inputs = {**dict(zip(self._settings["inputs"], values, strict=False)), **named}
        arrays = self._answers(self._settings["outputs"], inputs)
        outputs = {name: _tensor(array) for name, array in arrays.items()}
        if self._settings["by_name"]:
            return outputs
        found = list(outputs.values())
        return found[0] if len(found) == 1 else tuple(found)

    def run(self, names: Sequence[str] | None, inputs: Mapping[str, Any]) -> list[Any]:
        """Run an ONNX model, as the session of ONNX Runtime does."""
        return list(self._answers(names or self._settings["outputs"], inputs).values())

    def _answers(self, names: Sequence[str], inputs: Mapping[str, Any]) -> dict[str, Any]:
        settings = self._settings
        request = pb_utils.InferenceRequest(
            model_name=settings["model"],
            model_version=settings["version"],
            inputs=[pb_utils.Tensor(name, _array(value)) for name, value in inputs.items()],
            requested_output_names=list(names),
        )
        response = request.exec()
        if response.has_error():
            raise pb_utils.TritonModelException(response.error().message())
        arrays = {each.name(): each.as_numpy() for each in response.output_tensors()}
        return {name: arrays[name] for name in names}

    def eval(self) -> ServedGraph:
        return self

    def to(self, *_: Any, **__: Any) -> ServedGraph:
        return self


class IgnoredMetrics:
    """TorchServe's metrics; the gateway has its own."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda *_, **__: None


class HandlerContext:
    """The context of a batch."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self.model_name = settings["name"]
        self.manifest = settings["manifest"]
        self.model_yaml_config = settings["yaml"]
        self.system_properties = {
            "model_dir": str(FOLDER),
            "gpu_id": None,
            "batch_size": settings["batch_size"],
            "server_name": "modelport",
        }
        self.metrics = IgnoredMetrics()
        self.headers: Sequence[Mapping[str, str]] = []
        self.request_ids: dict[int, str] = {}
        self.statuses: dict[int, int] = {}

    def get_request_id(self, idx: int = 0) -> str:
        return self.request_ids[idx]

    def get_all_request_header(self, idx: int) -> Mapping[str, str]:
        return self.headers[idx]

    def get_request_header(self, idx: int, key: str) -> str | None:
        return self.headers[idx].get(key.lower())

    def set_response_status(self, code: int = 200, phrase: str = "", idx: int = 0) -> None:
        self.statuses[idx] = code

    def set_all_response_status(self, code: int = 200, phrase: str = "") -> None:
        self.statuses = dict.fromkeys(self.request_ids, code)

    def set_response_content_type(self, request_id: str, value: str) -> None:
        """Accept a content type; the gateway sets its own."""


class BaseHandler:
    """The base class of handlers, whose model is served by the gateway."""

    def __init__(self) -> None:
        self.model: Any = None
        self.mapping: Any = None
        self.device: Any = None
        self.initialized = self.explain = False
        self.context: Any = None
        self.manifest: Any = None
        self.map_location = "cpu"

    def initialize(self, context: HandlerContext) -> None:
        self.context, self.manifest = context, context.manifest
        if (torch := sys.modules.get("torch")) is not None:
            self.device = torch.device("cpu")
        self.model = ServedGraph(_settings())
        labels = FOLDER / "index_to_name.json"
        if labels.is_file():
            self.mapping = _labels(json.loads(labels.read_text()))
        self.initialized = True

    def preprocess(self, data: Any) -> Any:
        return np.asarray(data)

    def inference(self, data: Any, *args: Any, **kwargs: Any) -> Any:
        return self.model(data, *args, **kwargs)

    def postprocess(self, data: Any) -> Any:
        return data.tolist() if hasattr(data, "tolist") else list(data)

    def handle(self, data: Any, context: HandlerContext) -> Any:
        self.context = context
        return self.postprocess(self.inference(self.preprocess(data)))


class TritonPythonModel:
    """The handler, with a request of the batch for each element of its list."""

    def initialize(self, args: Mapping[str, str]) -> None:
        self._settings = settings = _settings()
        self._batched = json.loads(args["model_config"])["max_batch_size"] > 0
        self._context = HandlerContext(settings)
        for name in ("ts", "ts.torch_handler"):
            sys.modules[name] = types.ModuleType(name)
        for name, member in (
            ("ts.torch_handler.base_handler", BaseHandler), ("ts.context", HandlerContext),
        ):  # fmt: skip
            sys.modules[name] = module = types.ModuleType(name)
            vars(module)["Context" if member is HandlerContext else "BaseHandler"] = member
        with contextlib.suppress(pb_utils.TritonModelException):  # else it is loaded at the start
            pb_utils.load_model(settings["model"])
        handler = _module(FOLDER / settings["file"])
        self._entry: Any = getattr(handler, settings["function"], None)
        if inspect.isclass(self._entry) or self._entry is None:
            kinds: list[Any] = [
                each
                for each in vars(handler).values()
                if inspect.isclass(each) and each.__module__ == handler.__name__
            ]
            if len(kinds) != 1:  # TorchServe's rule
                raise pb_utils.TritonModelException(
                    f"{settings['file']} must have one class or the function handle()"
                )
            service = kinds[0]()
            service.initialize(self._context)
            self._entry = service.handle
        else:
            self._entry(None, self._context)

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        data: list[dict[str, Any]] = []
        headers: list[dict[str, str]] = []
        places: list[range | Any] = []  # of a request in the batch, or its error
        for request in requests:
            (body,) = request.inputs()
            told = json.loads(request.parameters() or "{}")
            kind = str(told.get("content_type", ""))
            try:
                read = [{"body": _parsed(each, kind)} for each in body.as_numpy().reshape(-1)]
            except ValueError as error:
                text = f"the body is not JSON: {error}"
                places.append(pb_utils.TritonError(text, pb_utils.TritonError.INVALID_ARG))
                continue
            places.append(range(len(data), len(data) + len(read)))
            data += read
            headers += [{"content-type": kind}] * len(read)
        context = self._context
        context.headers, context.statuses = headers, {}
        context.request_ids = {index: str(index) for index in range(len(data))}
        answers = self._entry(data, context) if data else []
        if not isinstance(answers, list | tuple) or len(answers) != len(data):
            raise pb_utils.TritonModelException(
                f"the handler must return a list of {len(data)} answers, one for each request"
            )
        written = [_written(answer) for answer in answers]
        return [
            self._response(written, place)
            if isinstance(place, range)
            else pb_utils.InferenceResponse(error=place)
            for place in places
        ]

    def _response(self, written: Sequence[bytes], rows: range) -> Any:
        for row in rows:
            status = self._context.statuses.get(row, 200)
            if status >= 400:
                code = pb_utils.TritonError.INTERNAL
                if status < 500:
                    code = pb_utils.TritonError.INVALID_ARG
                error = pb_utils.TritonError(written[row].decode(errors="replace"), code)
                return pb_utils.InferenceResponse(error=error)
        values = np.empty(len(rows), object)
        values[:] = [written[row] for row in rows]
        shaped = values.reshape(-1, 1) if self._batched else values
        return pb_utils.InferenceResponse([pb_utils.Tensor("response", shaped)])


def _module(file: Path) -> types.ModuleType:
    """The module in ``file``, whatever else has its name."""
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(file.stem, module)
    spec.loader.exec_module(module)
    return module


def _settings() -> Any:
    return json.loads((FOLDER / "handler.json").read_text())


def _array(value: Any) -> Any:
    """The numpy array of a tensor of PyTorch, or of anything alike."""
    if hasattr(value, "detach"):
        value = value.detach().cpu().numpy()
    return np.ascontiguousarray(value)


def _tensor(array: Any) -> Any:
    """The array as PyTorch's tensor, if the handler has imported PyTorch."""
    torch = sys.modules.get("torch")
    return array if torch is None or array.dtype == object else torch.from_numpy(array.copy())


def _labels(document: Mapping[str, Any]) -> dict[str, Any]:
    named = document.get("object_type_names")
    if isinstance(named, list):
        return {str(index): name for index, name in enumerate(named)}
    return {key: each[-1] if isinstance(each, list) else each for key, each in document.items()}


def _parsed(body: bytes, content_type: str) -> Any:
    """The body as TorchServe gives it to handlers: JSON is parsed if its content type says so."""
    return json.loads(body) if content_type == "application/json" else body


def _written(answer: Any) -> bytes:
    if isinstance(answer, bytes | bytearray):
        return bytes(answer)
    return answer.encode() if isinstance(answer, str) else json.dumps(answer, indent=2).encode()
