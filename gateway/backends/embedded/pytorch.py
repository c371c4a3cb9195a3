"""Embedded PyTorch: TorchScript, ``torch.export`` archives, and AOTInductor's compiled archives.

An archive that modelport wrote names its inputs and outputs. For other archives the configuration
does, by the rules of Triton's pytorch backend: inputs by the names of ``forward``'s arguments, else
``<name>__<index>``, else in order; outputs by index or in order, or by the keys of a dict. Strings
are lists: ``List[str]`` of TorchScript, which has no tensors of them.

Instances share one module; if it keeps state, one runs at a time, from the first values. A compiled
archive is machine code, which runs when it is loaded.
"""

from __future__ import annotations

import contextlib
import functools
import re
import threading
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import structlog
import torch

from modelport.gateway.backends import parameters
from modelport.gateway.backends.base import Artifact
from modelport.gateway.backends.embedded import embedded_backend, placement, serving
from modelport.gateway.backends.embedded.embedded_backend import EmbeddedBackend
from modelport.gateway.backends.embedded.pytorch_archives import (
    Forward,
    OpenedArchive,
    compiled_for,
    in_one_thread,
    open_compiled,
    open_exported,
    open_torchscript,
)
from modelport.gateway.backends.embedded.warmup import Contradiction
from modelport.gateway.errors import InvalidArgument, Unsupported
from modelport.gateway.repository import autocomplete
from modelport.gateway.repository import config as configuration
from modelport.gateway.repository.artifact_checks import pt2_guard, torchscript_guard, trial_load
from modelport.gateway.repository.artifact_checks.torch_archive import (
    Archive,
    Kind,
    native_code_refused,
)
from modelport.gateway.repository.autocomplete import ArtifactTensor
from modelport.gateway.repository.config import ModelConfig
from modelport.gateway.types import DTYPE_NAMES, NUMPY_DTYPES, Array, Datatype

log = structlog.get_logger("modelport.backends")

#: TorchScript compiles for the shapes of its first runs, during the run after them.
WARMUP_REPEATS = 3
_INDEXED = re.compile(r".*__(\d+)\Z")
_DTYPES: dict[Datatype, torch.dtype] = {
    datatype: getattr(torch, name)
    for datatype, name in DTYPE_NAMES.items()
    if datatype is not Datatype.BYTES
}
_WORDS = {dtype: datatype for datatype, dtype in _DTYPES.items()}

#: Thread counts are per process: the first model that sets one decides, as in Triton.
_counts: dict[str, int] = {}
_counts_lock = threading.Lock()
#: Archives are opened one at a time, because opening patches torch and the warnings filter.
_opening = threading.Lock()


def load(artifact: Artifact) -> EmbeddedBackend:
    """Open and warm a module (blocking).

    Raises:
        InvalidArgument: the file does not load, or contradicts its configuration.
        IntegrityError: the file is damaged, or holds pickled objects that loading would run.
        Unsupported: the file is not a torch archive, was compiled for another machine, or cannot
            run on the requested device.
    """
    path = embedded_backend.artifact_file(artifact)
    if not path.is_file():
        raise InvalidArgument(f"'{path.name}' of version {artifact.version} is not a file")
    archive = Archive(path)
    kind = archive.kind()
    _check(archive, kind, artifact.native)
    gpu = placement.gpu_of(artifact, lambda index: _why_no_gpu(archive, kind, index))
    if kind is Kind.TORCHSCRIPT and not artifact.native:
        trial_load.run(
            f"{__name__}:try_load", path, model=artifact.model_name, version=artifact.version,
            config=configuration.to_text(artifact.config), threads=artifact.threads,
        )  # fmt: skip
    return _load(artifact, archive, kind, gpu)


def try_load(path: Path, model: str, version: int, config: str, threads: int) -> None:
    """Load an artifact that passed the checks, and run it as ``load`` does, but on the CPU."""
    artifact = Artifact(model, version, path.parent, configuration.parse(config), threads)
    _load(artifact, archive := Archive(path), archive.kind(), None)


def _load(artifact: Artifact, archive: Archive, kind: Kind, gpu: int | None) -> EmbeddedBackend:
    signature = archive.signature()
    config = placement.as_placed(artifact.config, gpu)
    config.platform = kind.value
    _set_threads(artifact)
    named = config
    if signature is not None:
        named = configuration.build("", configuration.Platform("", "", "", ""), signature)
        _adopt(config, named)
    elif not (config.input and config.output):
        raise InvalidArgument(
            f"'{archive.path.name}' does not name its inputs and outputs; declare every 'input' "
            "and 'output' in config.pbtxt, or export the model with modelport"
        )
    inputs, outputs = _tensors(named, kind)
    device = torch.device("cpu" if gpu is None else f"cuda:{gpu}")
    if gpu is not None:
        torch.cuda.init()  # type: ignore[no-untyped-call]  # before ``no_code``: it loads libraries
        # A model has the precision that its certificate states: TF32 has fp16's ten bits.
        torch.backends.cudnn.allow_tf32 = False
    # ``catch_warnings`` would undo the filters that another thread sets in the meantime, such as
    # those of a runtime that is being imported.
    warnings.filterwarnings("ignore", r"`?torch\.jit", DeprecationWarning)
    with embedded_backend.opening(artifact):
        with _opening:
            if kind is Kind.TORCHSCRIPT:
                opened = open_torchscript(archive, device, artifact.native)
            elif kind is Kind.EXPORTED:
                opened = in_one_thread(functools.partial(open_exported, archive, signature, device))
            else:
                count = configuration.instance_count(config)
                opened = open_compiled(archive, signature, count, gpu)
        if signature is None:
            inputs, outputs = _in_order(opened.forward, inputs, outputs)
    session = TorchModuleSession(opened, inputs, outputs, device, config)
    return serving.serve(artifact, session, config, WARMUP_REPEATS)


def _check(archive: Archive, kind: Kind, native: bool) -> None:
    """Refuse unsafe archives; TorchScript operators are checked after torch has parsed them."""
    if kind is Kind.EXPORTED:
        pt2_guard.check(archive, native)
    elif not native:
        if kind is Kind.COMPILED:
            raise native_code_refused(archive.path.name)
        torchscript_guard.check_archive(archive)


def _why_no_gpu(archive: Archive, kind: Kind, index: int) -> str:
    if kind is Kind.COMPILED and (built_for := compiled_for(archive)) != "cuda":
        return f"'{archive.path.name}' was compiled for {built_for}"
    if not torch.backends.cuda.is_built():  # type: ignore[no-untyped-call]
        return "this build of PyTorch supports only the CPU; install one with CUDA"
    if index >= torch.cuda.device_count():
        return f"PyTorch finds {torch.cuda.device_count()} usable GPUs, none with index {index}"
    return ""


def _set_threads(artifact: Artifact) -> None:
    config = artifact.config
    for key, default, setter in (
        ("INTRA_OP_THREAD_COUNT", artifact.threads, torch.set_num_threads),
        ("INTER_OP_THREAD_COUNT", 0, torch.set_num_interop_threads),
    ):
        asked = parameters.threads(config, key, 0)
        with _counts_lock:
            if asked and _counts.setdefault(key, asked) != asked:
                log.warning(
                    "thread counts are per process, and another model has set this one",
                    model=artifact.model_name, parameter=key, asked=asked, is_set=_counts[key],
                )  # fmt: skip
            count = _counts.get(key, default)
            with contextlib.suppress(RuntimeError):  # inter-op threads are set once, or never
                if count:
                    setter(count)


# -- names ----------------------------------------------------------------------------------------


def _adopt(config: ModelConfig, named: ModelConfig) -> None:
    """Copy what ``named`` declares, bounds included, to a ``config`` without inputs and outputs."""
    if config.input or config.output:
        return
    config.max_batch_size = config.max_batch_size or named.max_batch_size
    config.input.extend(named.input)
    config.output.extend(named.output)
    for key in named.parameters:
        if key not in config.parameters:
            config.parameters[key].CopyFrom(named.parameters[key])


def _tensors(config: ModelConfig, kind: Kind) -> tuple[list[ArtifactTensor], list[ArtifactTensor]]:
    """The inputs and outputs of ``config``, with datatypes of PyTorch."""
    inputs, outputs = autocomplete.declared(config)
    for tensor in (*inputs.values(), *outputs.values()):
        if tensor.datatype is Datatype.BYTES:
            if kind is not Kind.TORCHSCRIPT:
                raise Unsupported(
                    f"'{tensor.name}' is BYTES, which PyTorch has in TorchScript alone: List[str]"
                )
            if not 1 <= len(tensor.shape) <= 1 + (config.max_batch_size > 0):
                raise Unsupported(
                    f"'{tensor.name}' is BYTES, which TorchScript has as a list; declare it with "
                    "one dimension"
                )
        elif tensor.datatype not in _DTYPES:
            raise Unsupported(f"'{tensor.name}' is {tensor.datatype}, which PyTorch does not have")
    return list(inputs.values()), list(outputs.values())


def _in_order(
    forward: Forward, inputs: list[ArtifactTensor], outputs: list[ArtifactTensor]
) -> tuple[list[ArtifactTensor], list[ArtifactTensor]]:
    """Apply Triton's rules for an archive that names nothing."""
    schema = getattr(forward, "schema", None)
    arguments = [a.name for a in schema.arguments[1:]] if schema is not None else []
    required = [a for a in schema.arguments[1:] if not a.has_default_value()] if schema else []
    if arguments and not len(required) <= len(inputs) <= len(arguments):
        raise InvalidArgument(
            f"the configuration declares {len(inputs)} inputs, but forward() takes "
            f"{', '.join(arguments)}"
        )
    names = {tensor.name for tensor in inputs}
    if arguments and names == set(arguments[: len(names)]):
        inputs.sort(key=lambda tensor: arguments.index(tensor.name))
        outputs = _sorted(outputs) if _indexed(outputs) else outputs
    elif _indexed(inputs) and _indexed(outputs):
        inputs, outputs = _sorted(inputs), _sorted(outputs)
    for tensor, argument in zip(inputs, schema.arguments[1:] if schema else (), strict=False):
        if (tensor.datatype is Datatype.BYTES) != (str(argument.type) == "List[str]"):
            raise InvalidArgument(
                f"'{tensor.name}' is {tensor.datatype}, but forward() takes {argument.type} for it"
            )
    return inputs, outputs


def _indexed(tensors: Sequence[ArtifactTensor]) -> bool:
    """Whether the names end in ``__`` and each index of ``tensors`` once."""
    matches = [_INDEXED.match(tensor.name) for tensor in tensors]
    return sorted(int(match[1]) for match in matches if match) == list(range(len(tensors)))


def _sorted(tensors: list[ArtifactTensor]) -> list[ArtifactTensor]:
    return sorted(tensors, key=lambda tensor: int(tensor.name.rpartition("__")[2]))


# -- running --------------------------------------------------------------------------------------


class TorchModuleSession:
    """A ``ModelSession``, which alone keeps ``forward`` alive."""

    def __init__(
        self,
        opened: OpenedArchive,
        inputs: Sequence[ArtifactTensor],
        outputs: Sequence[ArtifactTensor],
        device: torch.device,
        config: ModelConfig,
    ) -> None:
        self.inputs, self.outputs = inputs, outputs
        self._forward: Forward | None = opened.forward
        self._release = opened.release
        traits = opened.traits
        self.bounded, self.random, self.state = not traits.loops, traits.random, traits.state.names
        self._first = traits.state if self.state else None
        self._alone = threading.Lock() if self.state else contextlib.nullcontext()
        self._device, self._batched = device, config.max_batch_size > 0
        self._on_gpu = device.type != "cpu"
        self._names = [tensor.name for tensor in inputs]
        self._tensors = {tensor.name: tensor for tensor in (*inputs, *outputs)}
        inference = parameters.boolean(config, "INFERENCE_MODE", True)
        self._mode = torch.inference_mode if inference else torch.no_grad
        self._optimised = not parameters.boolean(config, "DISABLE_OPTIMIZED_EXECUTION", False)

    def run(self, names: Sequence[str], inputs: dict[str, Array]) -> list[Array]:
        assert self._forward is not None
        specs = self._tensors
        given = [name for name in self._names if name in inputs]
        arguments = [self._argument(name, specs[name].datatype, inputs[name]) for name in given]
        rows = len(inputs[given[0]]) if self._batched and given else 0
        # Both settings are per thread, so every run sets them.
        optimised: Any = contextlib.nullcontext()
        if not self._optimised:
            optimised = torch.jit.optimized_execution(False)  # type: ignore[attr-defined]
        with self._mode(), optimised, self._alone:
            if self._first is not None:
                self._first.reset()
            results = self._forward(*arguments)
            by_name = self._named(results)
            return [_array(specs[name], by_name[name], rows) for name in names]

    def _argument(self, name: str, datatype: Datatype, data: Array) -> torch.Tensor | list[str]:
        if datatype is Datatype.BYTES:
            try:
                return [item.decode() for item in data.flat]
            except UnicodeDecodeError:
                raise InvalidArgument(
                    f"input '{name}' has a string that is not UTF-8, as the model's must be"
                ) from None
        # A copy, because a model may write to its inputs and the client's data is shared.
        copy = np.array(data, order="C")
        if datatype is Datatype.BF16:
            tensor = torch.from_numpy(copy.view(np.int16)).view(torch.bfloat16)
        else:
            tensor = torch.from_numpy(copy)
        return tensor.to(self._device) if self._on_gpu else tensor

    def _named(self, results: Any) -> Mapping[str, torch.Tensor]:
        if isinstance(results, Mapping):
            missing = [t.name for t in self.outputs if t.name not in results]
            if not missing:
                return results
            results = tuple(results.values())
        if isinstance(results, torch.Tensor) or _are_strings(results):
            results = (results,)
        if not isinstance(results, tuple | list) or len(results) < len(self.outputs):
            raise Contradiction(
                f"the model returns {len(results) if isinstance(results, tuple | list) else 'no'} "
                f"tensors, but the configuration declares {len(self.outputs)} outputs"
            )
        return {spec.name: result for spec, result in zip(self.outputs, results, strict=False)}

    def close(self) -> None:
        self._forward = self._first = None
        self._release()
        self._release = lambda: None
        if self._on_gpu:  # torch would keep what the model had for its next tensors
            torch.cuda.empty_cache()


def _array(spec: ArtifactTensor, tensor: Any, rows: int) -> Array:
    """The output ``spec``, which the model returns for ``rows`` rows (0: it does not batch)."""
    name, datatype, shape = spec
    if datatype is Datatype.BYTES:
        strings = _strings(name, tensor)
        # What is no whole number of strings for each row stays as it is, and is refused.
        whole = rows and len(shape) > 1 and len(strings) % rows == 0
        return strings.reshape(rows, -1) if whole else strings
    if not isinstance(tensor, torch.Tensor) or tensor.dtype is not _DTYPES[datatype]:
        dtype = getattr(tensor, "dtype", None)
        given = _WORDS.get(dtype, "an unsupported datatype") if dtype else "no tensor"
        raise Contradiction(
            f"output '{name}' is declared {datatype}, but the model returns {given}"
        )
    tensor = tensor.detach().resolve_neg().contiguous().cpu()
    if datatype is Datatype.BF16:
        tensor = tensor.view(torch.int16)
    array: Array = tensor.numpy()
    return array.view(NUMPY_DTYPES[datatype])


def _are_strings(items: Any) -> bool:
    return isinstance(items, list) and all(isinstance(item, str) for item in items)


def _strings(name: str, items: Any) -> Array:
    if not _are_strings(items):
        raise Contradiction(
            f"output '{name}' is declared BYTES, but the model returns no List[str]"
        )
    return np.array([item.encode() for item in items], object)
