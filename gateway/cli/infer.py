"""``modelport models`` and ``modelport infer``: query a running gateway, as any client would."""

from __future__ import annotations

import json
import sys
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np

from modelport.client import Client
from modelport.client_models import ModelDescription, TensorDescription, as_datatype
from modelport.gateway.cli import server_credentials
from modelport.gateway.cli.errors import renamed_option
from modelport.gateway.cli.server_credentials import CommandT, credential_options
from modelport.gateway.cli.tables import print_table
from modelport.gateway.errors import InvalidArgument, NotFound, suggestion
from modelport.gateway.inference import audio_decoding, image_decoding
from modelport.gateway.repository import untrusted_files
from modelport.gateway.repository.artifact_checks import zip_guard
from modelport.gateway.types import Array, Datatype, TensorSpec

DEFAULT_URLS = {"http": "127.0.0.1:8000", "grpc": "127.0.0.1:8001"}
TIMEOUT_SECONDS = 60.0
#: The size of a file of requests.
MAX_FILE_BYTES = 1 << 30
IMAGE_SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp"})

_url = click.option(
    "--url",
    "-u",
    help="Gateway: HOST:PORT, or for TLS https://HOST:PORT or grpcs://HOST:PORT.  [default: "
    "127.0.0.1:8000, gRPC :8001]",
)
protocol_option = click.option(
    "--protocol", "-i", type=click.Choice(["http", "grpc"]), default="http", show_default=True,
    help="Protocol of the requests.",
)  # fmt: skip


def url_option(command: CommandT) -> CommandT:
    """Add ``--url``, and the options with which ``connect`` authenticates."""
    return _url(credential_options(command))


def connect(protocol: str, url: str | None) -> Client:
    """A client of the gateway at ``url``, HOST:PORT, over ``protocol``.

    Raises:
        InvalidArgument: the URL is not HOST:PORT, or a file of the credentials cannot be used.
    """
    target = (url or DEFAULT_URLS[protocol]).removeprefix("http://")
    if "@" in target:
        raise InvalidArgument(server_credentials.USER_IN_URL)
    given = server_credentials.current()
    scheme, separator, rest = target.partition("://")
    if separator and scheme not in ("https", "grpc", "grpcs"):
        raise InvalidArgument(f"'{target}' is not HOST:PORT")
    if separator:
        protocol, target = scheme, rest
    elif given.needs_tls:
        protocol += "s"
    token, tls = given.token(), given.context() if protocol.endswith("s") else None
    try:
        return Client(
            f"{protocol}://{target}", timeout_seconds=TIMEOUT_SECONDS, token=token, tls=tls
        )
    except InvalidArgument as error:
        raise InvalidArgument(f"'{target}' is not HOST:PORT") from error


def _describe(client: Client, model: str, version: str) -> ModelDescription:
    try:
        return client.metadata(model, version)
    except NotFound as error:
        known = {status.name for status in client.models()} - {model}
        raise NotFound(f"{error}{suggestion(model, known, '; ')}") from error


def _parameters(client: Client, model: str, version: str) -> dict[str, str]:
    """The ``parameters`` of the model's configuration."""
    found = client.config(model, version).get("parameters", {})
    return {key: value.get("string_value", "") for key, value in found.items()}


@click.command()
@url_option
@protocol_option
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def models(url: str | None, protocol: str, as_json: bool) -> None:
    """List the models of a running gateway: versions, states, reasons, signatures."""
    with connect(protocol, url) as client:
        rows = []
        for status in client.models():
            row: dict[str, Any] = status._asdict()
            if status.state == "READY":
                described = client.metadata(status.name, status.version)
                row["platform"] = described.platform
                for side in ("inputs", "outputs"):
                    row[side] = [tensor._asdict() for tensor in getattr(described, side)]
            rows.append(row)
    if as_json:
        click.echo(json.dumps(rows, indent=2))
        return
    if not rows:
        click.echo("The gateway's repository holds no model.")
        return
    head = ("model", "version", "state", "inputs", "outputs", "reason")
    table = [
        (
            *(row["name"], row["version"], row["state"]),
            *(_signature(row.get(side, [])) for side in ("inputs", "outputs")),
            row["reason"],
        )
        for row in rows
    ]
    print_table(head, table, colours={row["state"]: "red" for row in rows} | {"READY": "green"})


def _signature(tensors: list[dict[str, Any]]) -> str:
    return "\n".join(f"{t['name']} {t['datatype']} {list(t['shape'])}" for t in tensors)


@click.command()
@click.argument("model")
@click.argument("file", type=click.Path(exists=True, allow_dash=True, path_type=Path))
@url_option
@protocol_option
@click.option(
    "--model-version", default="", help="Version of the model.  [default: the newest that is ready]"
)
@click.option(
    "--output-name", "outputs", multiple=True, help="Return only this output. Repeatable."
)
@renamed_option("-o", "--output-name")
@renamed_option("--output", "--output-name")
@click.option(
    "--class-count",
    type=click.IntRange(min=0),
    default=0,
    help="Return the top K classes instead of values.",
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

    FILE is JSON (an OIP request, a list of them, or an object from input name to nested list; -
    reads standard input), .npy (the model's only input), .npz (arrays by input name), an image, or
    a WAV file.
    """
    with connect(protocol, url) as client:
        described = _describe(client, model, model_version)
        specs = {tensor.name: tensor for tensor in described.inputs}
        requests = read_requests(file, specs, lambda: _parameters(client, model, model_version))
        names = outputs or tuple(tensor.name for tensor in described.outputs)
        options: dict[str, Any] = {"version": model_version, "class_count": class_count}
        for arrays in requests:
            show(client.infer(model, arrays, outputs=names, **options), as_json)


def show(answers: Mapping[str, Array], as_json: bool) -> None:
    """Print the outputs of an answer."""
    if as_json:
        click.echo(json.dumps({name: _shown(array).tolist() for name, array in answers.items()}))
        return
    for name, array in answers.items():
        shape = "x".join(map(str, array.shape)) or "scalar"
        click.echo(f"{name} {array.dtype} {shape}\n{np.array2string(_shown(array), threshold=200)}")


def _shown(array: Array) -> Array:
    if array.dtype != object:
        return array
    texts: Array = np.empty(array.shape, dtype=object)
    texts.reshape(-1)[:] = [item.decode(errors="replace") for item in array.flat]
    return texts


def read_requests(
    file: Path, specs: Mapping[str, TensorDescription], parameters: Callable[[], dict[str, str]]
) -> list[dict[str, Array]]:
    """Read the requests in ``file``: inputs by name, of the datatype and rank of the model.

    Raises:
        InvalidArgument: naming the file and the problem.
    """
    suffix = file.suffix.lower()
    requests: Sequence[Mapping[str, Any]]
    try:
        if suffix == ".npy":
            with untrusted_files.open_file(file) as stream:
                requests = [{_only(specs, file): np.load(stream, allow_pickle=False)}]
        elif suffix == ".npz":
            zip_guard.check(file)
            with np.load(file, allow_pickle=False) as archive:
                requests = [dict(archive)]
        elif suffix in IMAGE_SUFFIXES:
            name = _only(specs, file)
            requests = [{name: _image(file, specs[name], parameters())}]
        elif suffix == ".wav":
            name = _only(specs, file)
            requests = [{name: _sound(file, specs[name], parameters())}]
        else:
            stdin = str(file) == "-"
            text = sys.stdin.read() if stdin else untrusted_files.read_text(file, MAX_FILE_BYTES)
            requests = _from_json(json.loads(text), specs, file)
    except FileNotFoundError:
        raise InvalidArgument(f"'{file}' does not exist") from None
    except (OSError, ValueError, EOFError, RecursionError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        if file.exists() and not file.is_file():
            reason = f"{reason}; name a file, or '-' for JSON from standard input"
        raise InvalidArgument(f"'{file}' cannot be read: {reason}") from error
    for name in {name: None for request in requests for name in request}:
        if name not in specs:
            raise InvalidArgument(
                f"'{file}' holds '{name}', but the model's inputs are {', '.join(specs)}"
            )
    return [
        {name: _typed(name, value, specs[name], file) for name, value in request.items()}
        for request in requests
    ]


def _only(specs: Mapping[str, TensorDescription], file: Path) -> str:
    if len(specs) != 1:
        raise InvalidArgument(
            f"'{file}' holds one tensor, but the model takes the inputs {', '.join(specs)}; use a "
            ".npz or JSON file with one entry for each"
        )
    return next(iter(specs))


def _from_json(
    document: Any, specs: Mapping[str, TensorDescription], file: Path
) -> list[Mapping[str, Any]]:
    if isinstance(document, list):
        if document and all(_is_oip(each, specs) for each in document):
            return [_oip_inputs(each, file) for each in document]
        return [{_only(specs, file): document}]
    if not isinstance(document, dict):
        raise InvalidArgument(f"'{file}' must hold a JSON object or array")
    return [_oip_inputs(document, file) if _is_oip(document, specs) else document]


def _is_oip(document: Any, specs: Mapping[str, TensorDescription]) -> bool:
    """Whether ``document`` is a request of the Open Inference Protocol."""
    listed = isinstance(document, dict) and isinstance(document.get("inputs"), list)
    return listed and "inputs" not in specs


def _oip_inputs(document: Mapping[str, Any], file: Path) -> Mapping[str, Any]:
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


def _typed(name: str, value: Any, spec: TensorDescription, file: Path) -> Array:
    datatype, shape = spec.datatype, spec.shape
    try:
        array = as_datatype(value, datatype)
    except (TypeError, ValueError, ArithmeticError) as error:
        raise InvalidArgument(f"'{file}': input '{name}' is not {datatype}: {error}") from error
    if array.ndim == len(shape) - 1 and shape[0] == -1:
        array = array[np.newaxis]
    return np.ascontiguousarray(array)


def _image(file: Path, spec: TensorDescription, parameters: Mapping[str, str]) -> Array:
    """Read ``file`` as the model's image input, without the batch dimension."""
    # The client rounds to BF16 itself.
    datatype = Datatype.FP32 if spec.datatype is Datatype.BF16 else spec.datatype
    wanted = TensorSpec(spec.name, datatype, spec.shape[-3:])
    decode = image_decoding.from_parameters(parameters, wanted, formats=None)
    if decode is None:
        raise InvalidArgument(
            f"'{file}' is an image, but input '{spec.name}' is {datatype} {list(spec.shape)}: not "
            "three dimensions with 1 or 3 channels"
        )
    return decode(untrusted_files.read(file, MAX_FILE_BYTES))[np.newaxis]


def _sound(file: Path, spec: TensorDescription, parameters: Mapping[str, str]) -> Array:
    """Read ``file`` as the model's sound input, without the batch dimension."""
    wanted = TensorSpec(spec.name, spec.datatype, spec.shape[1:])
    decode = audio_decoding.from_parameters(parameters, wanted)
    if decode is None:
        raise InvalidArgument(
            f"'{file}' is a sound, but the config.pbtxt of the model declares no audio.rate for "
            f"input '{spec.name}'; export with its preprocessor_config.json, or send an array"
        )
    return decode(untrusted_files.read(file, MAX_FILE_BYTES))[np.newaxis]
