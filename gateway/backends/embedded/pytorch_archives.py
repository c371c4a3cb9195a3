"""Opened PyTorch archives: the function that runs one, and what is known of its state."""

from __future__ import annotations

import functools
import queue
import re
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NamedTuple, TypeVar

import torch

from modelport.gateway.backends.embedded import pytorch_graphs
from modelport.gateway.backends.embedded.pytorch_graphs import ModuleState, Traits
from modelport.gateway.errors import Unsupported
from modelport.gateway.repository.artifact_checks import torchscript_guard
from modelport.gateway.repository.artifact_checks.load_guard import no_code
from modelport.gateway.repository.artifact_checks.torch_archive import (
    COMPILED,
    COMPILED_MODEL,
    Archive,
    arguments,
    check_machine,
)
from modelport.gateway.types import ModelSignature

#: Calls of random generators in AOTInductor's sources.
_DRAWS = re.compile(
    rb"rand(n|int64)?_cpu\(|aoti_torch_(cpu|cuda)_(rand|normal|bernoulli|multinomial)"
)

T = TypeVar("T")
#: Takes tensors in the order of the inputs; returns a tensor, a sequence or a dict of them.
Forward = Callable[..., Any]


def _nothing() -> None: ...


class OpenedArchive(NamedTuple):
    """An opened archive; ``release`` frees the weights, as dropping ``forward`` does not."""

    forward: Forward
    traits: Traits
    release: Callable[[], None] = _nothing


def open_torchscript(archive: Archive, device: torch.device, native: bool) -> OpenedArchive:
    file = archive.path
    with no_code(file.name):
        module, functions = torchscript_guard.load(file, device)
    if not native:
        torchscript_guard.check_operators(module, functions, file.name)
    for part in module.modules():
        for name in part._c._method_names():
            torchscript_guard.use_device(part._c._get_method(name).graph, device)
    module.eval()
    return OpenedArchive(module.forward, pytorch_graphs.of_script(module))


def in_one_thread(work: Callable[[], T]) -> T:
    """Run ``work`` in a thread that lives as long as the process.

    A build of torch for CUDA on a machine without a GPU keeps a device guard in the thread that
    first traces with fake tensors, as opening a program does. Another thread would find it freed
    after that one has ended, and the process would end with SIGSEGV.
    """
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:  # raised in the caller
            done.set_exception(error)

    _tracing_thread().put(run)
    return done.result()


@functools.cache
def _tracing_thread() -> queue.SimpleQueue[Callable[[], None]]:
    """The queue of the thread, which the exit of the process does not wait for."""
    jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()

    def serve() -> None:
        while True:
            jobs.get()()

    threading.Thread(target=serve, name="tracing", daemon=True).start()
    return jobs


def open_exported(
    archive: Archive, signature: ModelSignature | None, device: torch.device
) -> OpenedArchive:
    import torch._inductor.cpp_builder  # imported before ``no_code`` forbids it
    import torch.export._trace
    import torch.export.pt2_archive._package
    from torch.export.passes import move_to_device_pass

    with no_code(archive.path.name):
        program = torch.export.load(archive.path)
        if device.type != "cpu":
            program = move_to_device_pass(program, device)
        module = program.module()
    program.state_dict.clear()
    program.constants.clear()
    # Clear torch's caches for ``program``, which form reference cycles through C++.
    from torch._guards import detect_fake_mode
    from torch._subclasses.fake_tensor import FakeTensorMode

    FakeTensorMode.cache_clear()
    mode = detect_fake_mode([node.meta.get("val") for node in program.graph.nodes])
    if mode is not None and mode.shape_env is not None:
        mode.shape_env.fake_tensor_cache.clear()
    forward = _by_keyword(module, signature)
    return OpenedArchive(forward, pytorch_graphs.of_exported(module), lambda: _empty(module))


def compiled_for(archive: Archive) -> str:
    """The type of device that a compiled archive is for: ``cpu`` or ``cuda``."""
    metadata = check_machine(archive, torch.backends.cpu.get_cpu_capability())
    return str(metadata.get("AOTI_DEVICE_KEY", "cpu"))


def open_compiled(
    archive: Archive, signature: ModelSignature | None, runners: int, gpu: int | None
) -> OpenedArchive:
    from torch.export.pt2_archive._package import AOTICompiledModel

    built_for = compiled_for(archive)
    if gpu is None and built_for != "cpu":
        raise Unsupported(
            f"'{archive.path.name}' was compiled for {built_for}; set KIND_GPU in its "
            "instance_group, or export it for the CPU"
        )
    # aoti_load_package() would first compile ten probes to compare instruction sets.
    file, device = str(archive.path), -1 if gpu is None else gpu
    loader = torch._C._aoti.AOTIModelPackageLoader(file, COMPILED_MODEL, False, runners, device)
    sources = archive.below(COMPILED, ".cpp")
    random = any(_DRAWS.search(archive.read(source)) for source in sources)
    # Its state is in native memory; a run finds it.
    traits = Traits(ModuleState(()), random=random)
    return OpenedArchive(_by_keyword(AOTICompiledModel(loader), signature), traits)


def _empty(module: torch.nn.Module) -> None:
    """Drop the weights; the modules of a graph form reference cycles, so freeing them is late."""
    for part in module.modules():
        part._parameters.clear()
        part._buffers.clear()


def _by_keyword(program: Callable[..., Any], signature: ModelSignature | None) -> Forward:
    """``program``, exported by modelport with inputs by name, called with inputs in order."""
    if signature is None:
        return program
    names = arguments(signature)
    return lambda *tensors: program(**dict(zip(names, tensors, strict=True)))
