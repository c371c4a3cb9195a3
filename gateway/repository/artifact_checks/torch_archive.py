"""torch's zip archives, TorchScript and ``.pt2``, read without torch and without running them.

    <root>/extra/modelport/signature.json    the signature, as a Triton model configuration in JSON

``torch.jit.load`` and ``torch.export.load`` return that record under the name
``modelport/signature.json``. The exporters write it; no code of the archive runs here.
"""

from __future__ import annotations

import itertools
import json
import keyword
import platform
import struct
import sys
import zipfile
import zlib
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar

from modelport.gateway.errors import IntegrityError, InvalidArgument, Unsupported
from modelport.gateway.repository import config
from modelport.gateway.repository.artifact_checks import zip_guard
from modelport.gateway.types import ModelSignature

SIGNATURE = "modelport/signature.json"

EXTRA = "extra/"

#: The largest record to read: code, a graph, a description. Weights are not read.
MAX_RECORD_BYTES = 1 << 28
#: The limit of an archive's inflated size, relative to its own, above a small size.
MAX_RATIO, LITTLE_BYTES = 100, 8 << 20

#: Exceptions from reading a damaged zip; encryption raises RuntimeError.
DAMAGE = (
    EOFError,
    LookupError,
    RuntimeError,
    ValueError,
    struct.error,
    zipfile.BadZipFile,
    zlib.error,
)

#: The folder of the compiled model that AOTInductor's archives call ``model``.
COMPILED_MODEL = "model"
COMPILED = f"data/aotinductor/{COMPILED_MODEL}/"
COMPILED_METADATA = ".wrapper_metadata.json"

#: torch's names for vector instruction sets, from the weakest.
CAPABILITIES = ("DEFAULT", "AVX2", "AVX512")

#: Words with another meaning in TorchScript, or in a call of a module.
RESERVED = frozenset({"self", "torch", "ops", "args", "kwargs"})

T = TypeVar("T")


class Kind(StrEnum):
    """The kind of an archive; the value is the platform's name in a configuration."""

    TORCHSCRIPT = "pytorch_libtorch"
    EXPORTED = "torch_export"
    COMPILED = "torch_aoti"


class Archive:
    """An archive's records by their names without the root folder.

    Raises:
        IntegrityError: the file is not an archive, or a record is damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with zipfile.ZipFile(path) as file:
                self._records = {
                    info.filename.partition("/")[2]: info
                    for info in file.infolist()
                    if not info.is_dir()
                }
        except DAMAGE as error:
            raise self._damaged(error) from error
        zip_guard.check(path, one_root=True)
        total = sum(info.file_size for info in self._records.values())
        if total > max(LITTLE_BYTES, MAX_RATIO * path.stat().st_size):
            raise IntegrityError(
                f"'{path.name}' inflates to more than {MAX_RATIO} times its size: refused; write "
                "it again without compression"
            )

    def __contains__(self, name: str) -> bool:
        return name in self._records

    def names(self) -> list[str]:
        """The names of all records."""
        return list(self._records)

    def below(self, folder: str, suffix: str = "") -> list[str]:
        """The records in ``folder``, at any depth, whose names end in ``suffix``."""
        return [n for n in self._records if n.startswith(folder) and n.endswith(suffix)]

    def size(self, name: str) -> int:
        """The size of a record in bytes."""
        return self._info(name).file_size

    def _info(self, name: str) -> zipfile.ZipInfo:
        if name not in self._records:
            raise IntegrityError(f"'{self.path.name}' is damaged: it has no record '{name}'")
        return self._records[name]

    def read(self, name: str) -> bytes:
        """The content of a record."""
        info = self._info(name)
        if info.file_size > MAX_RECORD_BYTES:
            raise IntegrityError(f"'{self.path.name}': record '{name}' is larger than 256 MiB")
        try:
            with zipfile.ZipFile(self.path) as file:
                return file.read(info)
        except DAMAGE as error:
            raise self._damaged(error) from error

    def text(self, name: str) -> str:
        """The content of a record, as UTF-8."""
        return self._parsed(lambda content: content.decode(), name)

    def json(self, name: str) -> Any:
        """The content of a record, as JSON."""
        return self._parsed(json.loads, name)

    def _parsed(self, parse: Callable[[bytes], T], name: str) -> T:
        try:
            return parse(self.read(name))
        except (ValueError, RecursionError) as error:
            raise self._damaged(f"record '{name}' does not parse") from error

    def signature(self) -> ModelSignature | None:
        """The signature that the exporters wrote; None in an archive of another tool."""
        if EXTRA + SIGNATURE not in self:
            return None
        try:
            return config.signature(config.parse_json(self.text(EXTRA + SIGNATURE)))
        except InvalidArgument as error:
            raise self._damaged(error) from error

    def kind(self) -> Kind:
        """The kind of the archive; raises ``Unsupported`` if it is another, such as a
        checkpoint."""
        if self.below("data/aotinductor/"):
            return Kind.COMPILED
        if self.below("models/", ".json"):
            return Kind.EXPORTED
        if "constants.pkl" in self and self.below("code/"):
            return Kind.TORCHSCRIPT
        raise Unsupported(
            f"'{self.path.name}' is neither TorchScript nor a pt2 archive: a checkpoint holds "
            "pickled objects, which run code when they are loaded; export the model with modelport"
        )

    def _damaged(self, reason: object) -> IntegrityError:
        return IntegrityError(
            f"'{self.path.name}' is damaged ({reason}); export the model again, or copy it again"
        )


def native_code_refused(file: str) -> Unsupported:
    """The error for a compiled archive that is not trusted."""
    return Unsupported(
        f"'{file}' is native code, which can do anything when it is loaded; sign the version and "
        "give --require-signature, or give --allow-native-code (modelport verify: --public-key, or "
        "--trust)"
    )


def arguments(signature: ModelSignature) -> list[str]:
    """The names of the inputs, made valid identifiers where necessary."""
    names = [spec.name for spec in signature.inputs]
    free = (name for name in map("input_{}".format, itertools.count()) if name not in names)
    return [name if _is_identifier(name) else next(free) for name in names]


def _is_identifier(name: str) -> bool:
    plain = name.isascii() and name.isidentifier() and not name.startswith("_")
    return plain and not keyword.iskeyword(name) and name not in RESERVED


def check_machine(archive: Archive, capability: str) -> dict[str, Any]:
    """The metadata of a compiled model, if it was compiled for a machine like this.

    Machine code for another processor would end the process instead of raising.

    Args:
        capability: torch's name for this processor's vector instructions.

    Raises:
        IntegrityError: the archive has no compiled model.
        Unsupported: it was compiled for another processor or system.
    """
    records = archive.below(COMPILED, COMPILED_METADATA)
    if not records:
        raise IntegrityError(f"'{archive.path.name}' holds no compiled model; use --format aoti")
    metadata: dict[str, Any] = archive.json(records[0])
    built = (metadata.get("AOTI_PLATFORM"), metadata.get("AOTI_MACHINE"))
    vectors = str(metadata.get("AOTI_CPU_ISA")).partition(" ")[0]
    if built != (sys.platform, platform.machine()) or _rank(vectors) > _rank(capability):
        raise Unsupported(
            f"'{archive.path.name}' was compiled for {built[0]} on {built[1]} with {vectors}, this "
            f"is {sys.platform} on {platform.machine()} with {capability}; export the model here"
        )
    return metadata


def _rank(capability: str) -> int:
    return CAPABILITIES.index(capability) if capability in CAPABILITIES else 0
