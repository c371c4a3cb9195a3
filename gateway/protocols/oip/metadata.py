"""Metadata, statistics and repository operations, shared by HTTP and gRPC."""

from __future__ import annotations

import base64
import contextlib
import os
from collections.abc import Collection
from typing import TYPE_CHECKING, Any, NamedTuple

from modelport import __version__
from modelport.gateway.errors import Internal, InvalidArgument, NotFound
from modelport.gateway.models.control import Control
from modelport.gateway.models.model import ServedVersion
from modelport.gateway.models.model_view import ModelView
from modelport.gateway.repository import config as configuration
from modelport.gateway.repository.scan import MAX_VERSION
from modelport.gateway.types import ModelFiles, TensorSpec

if TYPE_CHECKING:
    from modelport.gateway.repository.signing_keys import PublicKey

SERVER_NAME = "modelport"
_FILE = "file:"
#: Longest component of a path, in bytes (NAME_MAX).
MAX_FILE_NAME = 255


class LoadRequest(NamedTuple):
    """The parameters of a load request: a configuration in JSON, and files by their path."""

    config: str | None
    files: dict[str, bytes]

    def model_files(self, may_run_code: bool) -> ModelFiles | None:
        return ModelFiles(self.files, may_run_code) if self.files else None


#: Supported extensions; shared memory is listed only if it is enabled.
EXTENSIONS = (
    "classification",
    "sequence",
    "model_repository",
    "model_repository(unload_dependents)",
    "schedule_policy",
    "model_configuration",
    "system_shared_memory",
    "binary_tensor_data",
    "parameters",
    "statistics",
    "trace",
    "logging",
    "generate",
)


def parse_version(text: str) -> int:
    """Parse the version of a request; 0 if it names none.

    Raises:
        InvalidArgument: ``text`` is not an integer above 0.
        NotFound: It is 0, which is never served.
    """
    if not text:
        return 0
    digits = text.lstrip("0") or "0"
    if not (text.isascii() and text.isdigit()) or len(digits) > 19 or int(digits) > MAX_VERSION:
        raise InvalidArgument(
            f"failed to get model version from specified version string '{text[:64]}', version "
            "should be an integral value > 0"
        )
    if digits == "0":
        raise NotFound("Request for unknown model: version 0 is not found")
    return int(digits)


def ready_models(manager: ModelView) -> list[str]:
    """Return the models that have a READY version."""
    return [name for name in manager.names() if manager.versions(name)]


def server_metadata(shared_memory: bool) -> dict[str, Any]:
    names = [name for name in EXTENSIONS if shared_memory or name != "system_shared_memory"]
    return {"name": SERVER_NAME, "version": __version__, "extensions": names}


def model_metadata(manager: ModelView, name: str, version: int) -> dict[str, Any]:
    served = manager.get(name, version)
    batch = [-1] if served.signature.max_batch_size else []
    return {
        "name": name,
        "versions": [str(number) for number in manager.versions(name)],
        "platform": served.config.platform or served.config.backend,
        "inputs": [_tensor(spec, batch) for spec in served.signature.inputs],
        "outputs": [_tensor(spec, batch) for spec in served.signature.outputs],
    }


def _tensor(spec: TensorSpec, batch: list[int]) -> dict[str, Any]:
    return {
        "name": spec.name,
        "datatype": spec.datatype.value,
        "shape": [*batch, *spec.wire_dims],
    }


def model_config(manager: ModelView, name: str, version: int) -> dict[str, Any]:
    return configuration.to_json(manager.get(name, version).config)


async def model_statistics(
    manager: ModelView, control: Control, name: str, version: int
) -> dict[str, Any]:
    """Return the statistics of one version, of a model (0), or of all models (empty ``name``)."""
    if name:
        try:
            manager.get(name, version)
        except NotFound as error:  # Triton's words, which clients match on
            known = name in {model["name"] for model in manager.index()}
            raise NotFound(
                f"requested model version is not available for model '{name}'"
                if known
                else f"requested model '{name}' is not available"
            ) from error
    return {"model_stats": await control.statistics(name, version)}


def model_certificate(served: ServedVersion, keys: Collection[PublicKey]) -> dict[str, Any]:
    """Return the certificate of a version, and the key that has signed it.

    ``verified`` says whether the gateway trusts the key, and serves nothing else. Blocking.

    Raises:
        NotFound: The version has no certificate.
        IntegrityError: It is damaged, or its signature is not valid.
    """
    from modelport.gateway.repository import signing

    folder = served.folder
    if folder is None or not os.path.lexists(folder / signing.CERTIFICATE):
        raise NotFound(
            f"version {served.number} of '{served.name}' has no certificate; 'modelport export' "
            "and 'modelport certify' publish one"
        )
    if keys:
        found = signing.verify_signature(folder, served.repository_name, keys)
    else:
        found = signing.read_certificate(folder, served.repository_name)
    signer = signing.signer_of(folder)
    return {"certificate": found.document, "key": signer, "verified": bool(keys)}


def load_request(name: str, parameters: Any) -> LoadRequest:
    """Read the parameters of a request to load the model ``name``.

    Raises:
        InvalidArgument: The name is not valid, a parameter is unknown, or a file is no base64.
        Internal: The name of a file is too long; Triton fails in the same way.
    """
    if not name.strip():
        raise InvalidArgument("Model name cannot be empty. Please enter a valid name to deploy.")
    if "/" in name or name.strip() == "..":
        raise InvalidArgument("model name must not contain path traversal characters")
    override, files = None, {}
    for key, value in _object(parameters).items():
        if key.startswith(_FILE):
            path = key.removeprefix(_FILE)
            if max(map(len, path.encode().split(b"/"))) > MAX_FILE_NAME:
                raise Internal(f"failed to load '{name}', failed to poll from model repository")
            files[path] = _content(name, key, value)
        elif key == "config" and type(value) is str:
            override = value
        else:
            raise InvalidArgument(
                f"unknown load parameter '{key[:MAX_FILE_NAME]}'; 'config' takes a JSON string, "
                "'file:1/model.onnx' the bytes of a file"
            )
    return LoadRequest(override, files)


def _content(name: str, parameter: str, value: Any) -> bytes:
    """The content of a file: bytes over gRPC, base64 over HTTP."""
    if type(value) is bytes:
        return value
    try:
        return base64.b64decode(value if type(value) is str else "-", validate=True)
    except ValueError as error:
        raise InvalidArgument(
            f"failed to load '{name}': '{parameter}' must be base64, and bytes_param over gRPC"
        ) from error


async def unload(control: Control, name: str, parameters: Any) -> None:
    """Unload a model; a model that does not exist counts as unloaded.

    Raises:
        InvalidArgument: A parameter is unknown.
        Unavailable: The control mode does not allow it.
    """
    dependents = False
    for key, value in _object(parameters).items():
        if key != "unload_dependents" or type(value) is not bool:
            raise InvalidArgument(
                f"unknown unload parameter '{key}'; 'unload_dependents' takes true or false"
            )
        dependents = value
    with contextlib.suppress(NotFound):
        await control.unload(name, dependents)


def _object(parameters: Any) -> dict[str, Any]:
    if type(parameters) is not dict:
        raise InvalidArgument("Unable to parse 'parameters': it must be an object")
    return parameters
