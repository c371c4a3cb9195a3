"""``modelport models`` and ``modelport infer``: query a running gateway, as any client would."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import click
import numpy as np

from modelport.client_operations import as_datatype
from modelport.gateway.cli.errors import suggestion
from modelport.gateway.errors import InvalidArgument, NotFound, Unavailable
from modelport.gateway.inference import images
from modelport.gateway.repository.artifact_checks import zip_guard
from modelport.gateway.types import Array, Datatype, TensorSpec

DEFAULT_URLS = {"http": "127.0.0.1:8000", "grpc": "127.0.0.1:8001"}
TIMEOUT_SECONDS = 60.0
IMAGE_SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp"})

url_option = click.option("--url", "-u", help="HOST:PORT.  [default: 127.0.0.1:8000, gRPC :8001]")
protocol_option = click.option(
    "--protocol", "-i", type=click.Choice(["http", "grpc"]), default="http", show_default=True
)


class TritonClient:
    """``tritonclient`` over either protocol, with modelport's errors and dictionaries as
    results."""

    def __init__(self, protocol: str, url: str | None) -> None:
        if protocol == "http":
            import tritonclient.http as module
        else:
            import tritonclient.grpc as module
        self.module = module
        self.protocol = protocol
        self.url = (url or DEFAULT_URLS[protocol]).removeprefix("http://").rstrip("/")
        timeouts = {"network_timeout": TIMEOUT_SECONDS} if protocol == "http" else {}
        try:
            self._client = module.InferenceServerClient(self.url, **timeouts)
        except Exception as error:
            raise InvalidArgument(f"'{self.url}' is not HOST:PORT: {error}") from error

    def close(self) -> None:
        self._client.close()

    def call(self, method: str, *arguments: Any, **options: Any) -> Any:
        """Call ``method`` of the client.

        Raises:
            Unavailable: no gateway responds at the address.
            InvalidArgument, NotFound: the gateway's error, with its message.
        """
        if self.protocol == "grpc" and method.startswith("get_"):
            options["as_json"] = True
        try:
            return getattr(self._client, method)(*arguments, **options)
        except self.module.InferenceServerException as error:
            status = str(error.status() or "")
            if "UNAVAILABLE" in status and "connect" in str(error.message()):
                raise self._unreachable() from error
            kind: type[Exception] = InvalidArgument
            if "404" in status or "NOT_FOUND" in status:
                kind = NotFound
            elif "503" in status or "UNAVAILABLE" in status:
                kind = Unavailable
            raise kind(str(error.message())) from error
        except OSError as error:
            raise self._unreachable() from error

    def _unreachable(self) -> Unavailable:
        return Unavailable(
            f"no gateway responds over {self.protocol} at {self.url}; start one with 'modelport "
            "serve', or set --url"
        )

    def index(self) -> list[dict[str, str]]:
        answer = self.call("get_model_repository_index")
        rows: list[dict[str, str]] = (
            answer if isinstance(answer, list) else answer.get("models", [])
        )
        return rows

    def metadata(self, model: str, version: str = "") -> dict[str, Any]:
        try:
            document: dict[str, Any] = self.call("get_model_metadata", model, version)
        except NotFound as error:
            known = {row["name"] for row in self.index()}
            raise NotFound(f"{error}{suggestion(model, known, '; ')}") from error
        for tensor in document["inputs"] + document["outputs"]:
            tensor["shape"] = [int(size) for size in tensor["shape"]]
        return document

    def parameters(self, model: str, version: str = "") -> dict[str, str]:
        """The ``parameters`` of the model's configuration."""
        document = self.call("get_model_config", model, version)
        found = document.get("config", document).get("parameters", {})
        return {key: value.get("string_value", "") for key, value in found.items()}


@click.command()
@url_option
@protocol_option
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def models(url: str | None, protocol: str, as_json: bool) -> None:
    """List the models of a running gateway: versions, states, reasons, signatures."""
    with closing(TritonClient(protocol, url)) as client:
        rows = []
        for entry in client.index():
            row: dict[str, Any] = {"version": "", "state": "", "reason": "", **entry}
            if row["state"] == "READY":
                row |= client.metadata(row["name"], row["version"])
            rows.append({key: row[key] for key in row if key != "versions"})
    if as_json:
        click.echo(json.dumps(rows, indent=2))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("model", "version", "state", "inputs", "outputs", "reason")
    for row in rows:
        style = "" if row["state"] in ("READY", "") else "red"
        signature = [_signature(row.get(side, [])) for side in ("inputs", "outputs")]
        table.add_row(
            row["name"], row["version"], row["state"], *signature,
            row["reason"], style=style,
        )  # fmt: skip
    Console().print(table if rows else "The gateway's repository holds no model.")


def _signature(tensors: list[dict[str, Any]]) -> str:
    return "\n".join(f"{t['name']} {t['datatype']} {t['shape']}" for t in tensors)


@click.command()
@click.argument("model")
@click.argument("file", type=click.Path(path_type=Path, allow_dash=True))
@url_option
@protocol_option
@click.option("--model-version", default="", help="[default: the newest that is ready]")
@click.option("--output", "-o", "outputs", multiple=True, help="Only this output. Repeatable.")
@click.option(
    "--class-count", type=click.IntRange(min=0), default=0, help="Only the top K classes."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def infer(
    model: str,
    file: Path,
    url: str | None,
    protocol: str,
    model_version: str,
    outputs: tuple[str, ...],
    class_count: int,
    as_json: bool,
) -> None:
    """Send FILE to MODEL on a running gateway and print the outputs.

    FILE is JSON (an OIP request, or an object from input name to nested list; - reads standard
    input), .npy (the model's only input), .npz (arrays by input name), or an image.
    """
    with closing(TritonClient(protocol, url)) as client:
        metadata = client.metadata(model, model_version)
        specs = {tensor["name"]: tensor for tensor in metadata["inputs"]}
        arrays = _read(file, specs, lambda: client.parameters(model, model_version))
        inputs = []
        for name, array in arrays.items():
            tensor = client.module.InferInput(name, list(array.shape), specs[name]["datatype"])
            try:
                tensor.set_data_from_numpy(array)
            except client.module.InferenceServerException as error:
                raise InvalidArgument(f"input '{name}': {error.message()}") from error
            inputs.append(tensor)
        names = outputs or tuple(tensor["name"] for tensor in metadata["outputs"])
        wanted = [client.module.InferRequestedOutput(n, class_count=class_count) for n in names]
        result = client.call("infer", model, inputs, model_version=model_version, outputs=wanted)
        answers = {name: result.as_numpy(name) for name in names}
    if as_json:
        click.echo(json.dumps({name: _plain(array) for name, array in answers.items()}))
        return
    for name, array in answers.items():
        shape = "x".join(map(str, array.shape)) or "scalar"
        click.echo(f"{name} {array.dtype} {shape}\n{np.array2string(_shown(array), threshold=200)}")


def _plain(array: Array) -> Any:
    return _shown(array).tolist()


def _shown(array: Array) -> Array:
    if array.dtype != object:
        return array
    texts: Array = np.empty(array.shape, dtype=object)
    texts.reshape(-1)[:] = [item.decode(errors="replace") for item in array.flat]
    return texts


def _read(
    file: Path, specs: Mapping[str, dict[str, Any]], parameters: Callable[[], dict[str, str]]
) -> dict[str, Array]:
    """Read the inputs in ``file``, by name, with the datatype and rank that the model declares.

    Raises:
        InvalidArgument: naming the file and the problem.
    """
    suffix = file.suffix.lower()
    found: Mapping[str, Any]
    try:
        if suffix == ".npy":
            found = {_only(specs, file): np.load(file, allow_pickle=False)}
        elif suffix == ".npz":
            zip_guard.check(file)
            with np.load(file, allow_pickle=False) as archive:
                found = dict(archive)
        elif suffix in IMAGE_SUFFIXES:
            name = _only(specs, file)
            found = {name: _image(file, specs[name], parameters())}
        else:
            text = sys.stdin.read() if str(file) == "-" else file.read_text()
            found = _from_json(json.loads(text), specs, file)
    except FileNotFoundError:
        raise InvalidArgument(f"'{file}' does not exist") from None
    except (OSError, ValueError) as error:
        raise InvalidArgument(f"'{file}' cannot be read: {error}") from error
    for name in found:
        if name not in specs:
            raise InvalidArgument(
                f"'{file}' holds '{name}', but the model's inputs are {', '.join(specs)}"
            )
    return {name: _typed(name, value, specs[name], file) for name, value in found.items()}


def _only(specs: Mapping[str, dict[str, Any]], file: Path) -> str:
    if len(specs) != 1:
        raise InvalidArgument(
            f"'{file}' holds one tensor, but the model has the inputs {', '.join(specs)}; use a "
            ".npz or JSON file with one entry for each"
        )
    return next(iter(specs))


def _from_json(document: Any, specs: Mapping[str, dict[str, Any]], file: Path) -> Mapping[str, Any]:
    if isinstance(document, list):
        return {_only(specs, file): document}
    if not isinstance(document, dict):
        raise InvalidArgument(f"'{file}' must hold a JSON object or array")
    if isinstance(document.get("inputs"), list) and "inputs" not in specs:
        try:
            return {
                item["name"]: np.array(
                    item["data"], object if item["datatype"] == Datatype.BYTES else None
                ).reshape(item["shape"])
                for item in document["inputs"]
            }
        except (KeyError, TypeError) as error:
            raise InvalidArgument(
                f"'{file}': each of 'inputs' needs 'name', 'datatype', 'shape' and 'data'"
            ) from error
    return document


def _typed(name: str, value: Any, spec: dict[str, Any], file: Path) -> Array:
    datatype, shape = Datatype(spec["datatype"]), spec["shape"]
    try:
        array = as_datatype(value, datatype)
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidArgument(f"'{file}': input '{name}' is not {datatype}: {error}") from error
    if array.ndim == len(shape) - 1 and shape[0] == -1:
        array = array[np.newaxis]
    return np.ascontiguousarray(array)


def _image(file: Path, spec: dict[str, Any], parameters: Mapping[str, str]) -> Array:
    """Read ``file`` as the model's image input, without the batch dimension."""
    # tritonclient rounds to BF16 itself.
    datatype = "FP32" if spec["datatype"] == Datatype.BF16 else spec["datatype"]
    wanted = TensorSpec(spec["name"], Datatype(datatype), tuple(spec["shape"][-3:]))
    decode = images.from_parameters(parameters, wanted, formats=None)
    if decode is None:
        raise InvalidArgument(
            f"'{file}' is an image, but input '{spec['name']}' is {datatype} {spec['shape']}: not "
            "three dimensions with 1 or 3 channels"
        )
    return decode(file.read_bytes())[np.newaxis]
