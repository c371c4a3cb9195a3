"""``modelport check``: run the models of a Python file in this process, with sample requests."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import click
import numpy as np

from modelport.client_models import TensorDescription, as_datatype
from modelport.gateway.backend_registry import PYTHON
from modelport.gateway.backends.python.in_process import InProcessModel
from modelport.gateway.cli.infer import read_requests, show
from modelport.gateway.cli.paths import EXISTING
from modelport.gateway.errors import InvalidArgument, ModelportError, suggestion
from modelport.gateway.inference.validation import Validator
from modelport.gateway.models.model_config import read_config
from modelport.gateway.repository import config as configuration
from modelport.gateway.repository import standalone_model
from modelport.gateway.types import (
    Array,
    Datatype,
    InferRequest,
    ModelSignature,
    Tensor,
    TensorSpec,
    dims_text,
)

#: Items of a batch, and sizes of dims that may have any.
ROWS, SIZE = 2, 3
WORDS = (b"to be or not to be", b"hello world", "über".encode())


@click.command()
@click.argument("file", type=EXISTING)
@click.argument("requests", nargs=-1, type=EXISTING)
@click.option("--model", "only", metavar="NAME", help="Only this model of FILE.")
@click.option("--json", "as_json", is_flag=True, help="Print outputs as JSON.")
def check(file: Path, requests: tuple[Path, ...], only: str | None, as_json: bool) -> None:
    """Run the models of FILE in this process, and check their answers.

    FILE is Python, with @modelport.model or a class TritonPythonModel; its code runs. REQUESTS are
    files as for 'modelport infer'; without any, each model gets random inputs. Requests and answers
    are checked against the model's inputs and outputs, as in a gateway.
    """
    if standalone_model.check(file) is not PYTHON:
        raise InvalidArgument(f"'{file}' is not a Python file; serve it, and use 'modelport infer'")
    names = standalone_model.names_of(file)
    if only is not None and only not in names:
        hint = suggestion(only, names, "; ")
        raise InvalidArgument(f"'{file}' declares {', '.join(names)}, and no '{only}'{hint}")
    chosen = names if only is None else [only]
    if requests and len(chosen) > 1:
        raise InvalidArgument(
            f"'{file}' declares the models {', '.join(names)}; choose that of the requests with "
            "--model"
        )
    for name in chosen:
        try:
            _check(file, name, requests, as_json)
        except ModelportError as error:
            text = str(error).replace("\n\nAt:\n", "; at ")
            place = "" if text.startswith(f"model '{name}'") else f"model '{name}': "
            raise type(error)(f"{place}{text}") from error


def _check(file: Path, name: str, files: Sequence[Path], as_json: bool) -> None:
    entry = standalone_model.scan(file, name)
    (version,) = entry.versions.values()
    number = "" if version.path == entry.path else str(version.number)
    model = InProcessModel(name, version.path, number, read_config(entry))
    with contextlib.closing(model):
        signature = configuration.signature(model.config)
        validator = Validator(name, signature)
        inputs, outputs = (
            [TensorDescription(s.name, s.datatype, _shape(s, signature)) for s in side]
            for side in (signature.inputs, signature.outputs)
        )
        click.echo(f"{name}: {_shown(inputs)} -> {_shown(outputs)}")
        specs = {each.name: each for each in inputs}
        given = [each for path in files for each in read_requests(path, specs, dict)]
        for arrays in given if files else _samples(signature):
            tensors = [Tensor(key, specs[key].datatype, array) for key, array in arrays.items()]
            request = InferRequest(name, tensors)
            validator.check(request)
            for response in model.infer(request):
                validator.restore(response)
                show({each.name: each.data for each in response.outputs}, as_json)


def _shown(tensors: Sequence[TensorDescription]) -> str:
    return ", ".join(f"{each.name} {each.datatype} {dims_text(each.shape)}" for each in tensors)


def _shape(
    spec: TensorSpec, signature: ModelSignature, rows: int = -1, size: int = -1
) -> tuple[int, ...]:
    """The shape of a tensor, with these sizes where it may have any."""
    dims = tuple(size if dim == -1 else dim for dim in spec.wire_dims)
    return (rows, *dims) if signature.max_batch_size else dims


def _samples(signature: ModelSignature) -> Iterator[Mapping[str, Array]]:
    """Random inputs: all of them, and without the optional ones."""
    random = np.random.default_rng(0)
    rows = min(ROWS, signature.max_batch_size)
    everything = {
        spec.name: _sample(spec.datatype, _shape(spec, signature, rows, SIZE), random)
        for spec in signature.inputs
    }
    yield everything
    needed = {spec.name: everything[spec.name] for spec in signature.inputs if not spec.optional}
    if needed and len(needed) < len(everything):
        yield needed


def _sample(datatype: Datatype, shape: tuple[int, ...], random: np.random.Generator) -> Array:
    if datatype is Datatype.BYTES:
        texts: Array = np.empty(shape, object)
        texts.reshape(-1)[:] = [WORDS[i % len(WORDS)] for i in range(texts.size)]
        return texts
    if datatype in (Datatype.FP16, Datatype.FP32, Datatype.FP64):
        return as_datatype(random.standard_normal(shape), datatype)
    if datatype is Datatype.BOOL:
        return random.integers(0, 2, shape) > 0
    return as_datatype(random.integers(0, 10, shape), datatype)
