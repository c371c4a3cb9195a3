"""PyTorch to AOTInductor's ``.pt2``: the graph compiled to a shared library for this processor.

Opening such an artifact runs its machine code, so open only trusted ones.
"""

from __future__ import annotations

import io
import shlex
import shutil
from pathlib import Path
from typing import Any

import torch
from torch._inductor import config as inductor
from torch._inductor.runtime.cache_dir_utils import cache_dir
from torch._inductor.utils import fresh_cache
from torch.export import ExportedProgram
from torch.export.passes import move_to_device_pass
from torch.export.pt2_archive._package import AOTICompiledModel

from modelport.exporters.formats.base import ExportTarget
from modelport.exporters.formats.pt2 import program
from modelport.exporters.formats.torch_archive import seal
from modelport.exporters.formats.torch_binding import TorchParitySession, by_position, signature_of
from modelport.exporters.loaded_model import Source
from modelport.exporters.runtime.output_capture import quiet
from modelport.exporters.runtime.temporary_folder import temporary_folder
from modelport.exporters.sources import torch_errors
from modelport.gateway.errors import IntegrityError, Unsupported
from modelport.gateway.repository.artifact_checks.torch_archive import (
    COMPILED_MODEL,
    Archive,
    check_machine,
    native_code_refused,
)

#: Generated sources, which the compiled library no longer needs. Until torch 2.13 the loader takes
#: the library's name from that of its source.
SOURCES = (".cpp", ".kernel_metadata.json") if torch.__version__ >= "2.13" else ()


def export(source: Source, path: Path, target: ExportTarget) -> None:
    """Compile ``source`` to ``path`` for this processor or GPU type, system and version of torch.

    Inputs and outputs are named as in ``pt2``.

    Raises:
        Unsupported: there is no C++ compiler, or the model cannot be exported or compiled.
    """
    compiler = inductor.cpp.cxx[-1]
    if shutil.which(compiler) is None:
        raise Unsupported(
            f"--format aoti compiles the model, and '{compiler}' is missing; install a C++ "
            "compiler: apt-get install g++"
        )
    draft = io.BytesIO()
    with torch_errors.translated("torch._inductor"):
        # A failed compilation leaves its files; the folder around them is removed in any case.
        with quiet(), temporary_folder() as folder, fresh_cache(dir=str(folder)):
            torch._inductor.aoti_compile_and_package(
                _on_device(program(source, target), target.device),
                package_path=draft,
                inductor_configs=_options(compiler, Path(cache_dir())),
            )
        seal(draft, path, source.signature, without=SOURCES)


def _on_device(exported: ExportedProgram, device: str) -> ExportedProgram:
    return exported if device == "cpu" else move_to_device_pass(exported, device)


def _options(compiler: str, folder: Path) -> dict[str, Any]:
    # Assertion messages name the source file; torch has no option for compiler flags.
    prefixes = {str(folder): ".", str(Path(torch.__file__).parent): "torch"}
    flags = " ".join(shlex.quote(f"-ffile-prefix-map={k}={v}") for k, v in prefixes.items())
    wrapper = folder / Path(compiler).name
    wrapper.write_text(f'#!/bin/sh\nexec {shlex.quote(compiler)} {flags} "$@"\n')
    wrapper.chmod(0o700)
    options: dict[str, Any] = {
        "cpp.cxx": (None, str(wrapper)),
        "aot_inductor.enable_line_tables": False,  # an option since torch 2.13
        # Otherwise they are kept in a shared folder for the next compilation.
        "aot_inductor.precompile_headers": False,
        # The processor's flags name its features; asking the compiler takes ten compilations.
        "cpp.vec_isa_ok": True,
    }
    known = inductor.get_config_copy()
    return {name: value for name, value in options.items() if name in known}


def open_session(path: Path, trusted: bool = False) -> TorchParitySession:
    """Load the library in ``path``.

    Raises:
        Unsupported: it was compiled for another processor, or names no inputs and outputs.
        IntegrityError: the file is damaged.
    """
    if not trusted:
        raise native_code_refused(path.name)
    signature = signature_of(path)
    check_machine(Archive(path), torch.backends.cpu.get_cpu_capability())
    try:
        # aoti_load_package() would compile ten probes first to compare instruction sets.
        loader = torch._C._aoti.AOTIModelPackageLoader(str(path), COMPILED_MODEL, False, 1, -1)
    except RuntimeError as error:
        raise IntegrityError(
            f"'{path.name}' is damaged, or from another version of torch; export the model again"
        ) from error
    return TorchParitySession(by_position(AOTICompiledModel(loader), signature), signature)
