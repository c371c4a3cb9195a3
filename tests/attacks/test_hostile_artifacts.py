"""Artifacts that want to run code or reach files: no entrance opens one, and no mark is left.

``README.md`` beside this lists them. Where a guard is taken away the mark is made: the artifacts
are no duds.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import io
import json
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from click.testing import CliRunner

from modelport.cli import modelport
from modelport.exporters.formats.registry import FORMATS
from modelport.exporters.proof import evaluation, verify
from modelport.exporters.sources import checkpoint, keras_guard
from modelport.gateway.backend_registry import find_loader
from modelport.gateway.errors import IntegrityError, ModelportError, UsageError
from modelport.gateway.models.loader import VersionLoader
from modelport.gateway.models.model_config import read_config
from modelport.gateway.repository import config as configuration
from modelport.gateway.repository import manifest, scan, signed_config, signing, signing_keys
from modelport.gateway.repository.artifact_checks import (
    openvino_guard,
    pt2_guard,
    saved_model_guard,
    torchscript_guard,
    zip_guard,
)
from modelport.gateway.repository.artifact_checks.load_guard import no_code
from modelport.gateway.settings import Settings
from modelport.gateway.telemetry import Statistics
from tests import archives, models, processor
from tests.attacks import hostile_graphs, hostile_torch, zips
from tests.pickle_bomb import PickleBomb

TORCH = {"torchscript": hostile_torch.TORCHSCRIPT, "pt2": hostile_torch.EXPORTED}
#: A source of a model that batches.
BATCHED: Any = SimpleNamespace(signature=SimpleNamespace(max_batch_size=1))
DEFAULT = {row.name: row.platform.default_filename for row in FORMATS.builtin.values()}


@pytest.fixture
def mark(tmp_path: Path) -> Path:
    return tmp_path / "mark"


class HostileRepository:
    """A repository with one model, whose one version is hostile."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.version = root / "m" / "1"

    def put(self, name: str, content: bytes, text: str) -> Path:
        shutil.rmtree(self.root, ignore_errors=True)
        self.version.mkdir(parents=True)
        (self.version.parent / "config.pbtxt").write_text(text)
        (self.version / name).write_bytes(content)
        return self.version / name

    def serve(self, **settings: Any) -> Any:
        entry = scan.scan([self.root])["m"]
        loader = VersionLoader(Settings((self.root,), **settings), find_loader, 1)
        config = read_config(entry)
        return loader.load(entry, entry.versions[1], config, Statistics()).backend

    def certify(self, form: str, **more: Any) -> None:
        """A certificate and a manifest that fit the files, whoever wrote them."""
        files = {
            name: {"sha256": manifest.sha256_of(self.version / name)}
            for name in manifest.files_of(self.version)
            if name not in signing.UNLISTED
        }
        size = sum((self.version / name).stat().st_size for name in files)
        document = {
            "model": {"name": "m", "factory": "fraud", "model_kwargs": {}, "max_batch_size": 8,
                      "inputs": [], "output_names": []},
            "artifact": {"format": form, "dtype": "fp32", "quantize": None, "opset": None,
                         "size_bytes": size, "files": files},
            "checkpoint": {"file": "c.pt", "sha256": 64 * "0"}, "adapters": [],
            "parity": {"outputs": {}, "decision": None, "samples": 1, "seed": 0, "bounds": None,
                       "tolerance": {"atol": 1e-5, "rtol": 1e-5}},
            "evaluation": None,
        } | more  # fmt: skip
        (self.version / signing.CERTIFICATE).write_text(json.dumps(document))
        manifest.write(self.version)

    def prove(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """``modelport verify`` as far as the artifact, which is opened after the checkpoint."""
        monkeypatch.setattr(verify, "_load", lambda claim, given, trusted: None)
        checked = verify.check(verify.find_version(self.version))
        verify.prove(checked, verify.VerificationInputs())


@pytest.fixture
def repository(tmp_path: Path) -> HostileRepository:
    return HostileRepository(tmp_path / "repository")


def refused(open_it: Callable[[], object], *words: str, what: str = "") -> None:
    """It is refused with a reason that names what is wrong."""
    with pytest.raises(ModelportError) as caught:
        open_it()
    assert all(word in str(caught.value) for word in words), (what, str(caught.value))


def inspect(path: Path) -> None:
    """It reads what is there, or refuses: it never runs anything."""
    result = CliRunner().invoke(modelport, ["inspect", str(path)])
    assert result.exit_code in (0, 4, 5), result.output
    assert result.exception is None or isinstance(result.exception, SystemExit)


# -- zips -----------------------------------------------------------------------------------------


@functools.cache
def carriers() -> dict[str, bytes]:
    """An honest zip of every kind that is opened."""
    made = {"torchscript": hostile_torch.scripted("return x + 1"), "pt2": hostile_torch.exported()}
    state, arrays, keras = io.BytesIO(), io.BytesIO(), io.BytesIO()
    torch.save({"w": torch.ones(4)}, state)
    np.savez(arrays, x=np.ones((2, 4), np.float32), y=np.ones(2, np.float32))
    with zipfile.ZipFile(keras, "w") as archive:
        archive.writestr("m/config", "{}")
        archive.writestr("config.json", json.dumps({"class_name": "Sequential", "config": {}}))
    return made | {
        "checkpoint": state.getvalue(), "npz": arrays.getvalue(), "keras": keras.getvalue(),
    }  # fmt: skip


def opened(kind: str, path: Path, repository: HostileRepository) -> Callable[[], object]:
    """The function that opens a zip of this kind."""
    ways: dict[str, Callable[[], object]] = {
        "checkpoint": lambda: checkpoint.read(path),
        "keras": lambda: keras_guard.read_config(path),
        "npz": lambda: evaluation.read(path, BATCHED),
    }
    return ways.get(kind, repository.serve)


@pytest.mark.parametrize("kind", ["torchscript", "pt2", "checkpoint", "keras", "npz"])
def test_a_zip_that_two_readers_read_differently_is_opened_by_none(
    kind: str, repository: HostileRepository, tmp_path: Path
) -> None:
    suffix = {"checkpoint": ".pt", "keras": ".keras", "npz": ".npz"}.get(kind, "")
    honest = zips.read(carriers()[kind])
    for what, (manipulate, reason) in zips.MANIPULATIONS.items():
        content = manipulate(honest).content()
        if suffix:
            path = tmp_path / f"a{suffix}"
            path.write_bytes(content)
        else:
            path = repository.put(DEFAULT[kind], content, TORCH[kind])
        if what == "bytes in front" and kind in ("checkpoint", "npz"):
            reason = ""  # it is no zip then, and no honest file of another kind
        refused(opened(kind, path, repository), reason, what=f"{kind}: {what}")
        if not suffix:
            inspect(path)


def test_an_archive_of_torchserve_that_two_readers_read_differently_is_not_migrated(
    tmp_path: Path,
) -> None:
    files = {"model.pt": hostile_torch.scripted("return x + 1")}
    honest = zips.read(archives.mar(tmp_path / "m.mar", "m", files).read_bytes())
    for what, (manipulate, reason) in zips.MANIPULATIONS.items():
        (tmp_path / "m.mar").write_bytes(manipulate(honest).content())
        result = archives.migrate(tmp_path / "m.mar", tmp_path / "repository")
        assert result.exit_code == 5, (what, result.output)
        assert reason in result.stderr, (what, result.stderr)
        assert not (tmp_path / "repository").exists()


@pytest.mark.parametrize("kind", sorted(TORCH))
def test_an_archive_of_torch_has_one_top_folder(kind: str, repository: HostileRepository) -> None:
    honest = zips.read(carriers()[kind])
    for name in (b"other/data.pkl", b"data.pkl"):
        content = replace(honest, entries=(*honest.entries, zips.ZipRecord(name, b"x"))).content()
        repository.put(DEFAULT[kind], content, TORCH[kind])
        refused(repository.serve, "more than one top folder")


def test_an_honest_zip_written_by_hand_passes(tmp_path: Path) -> None:
    """The known-good variant: what refuses the others is the manipulation alone."""
    for kind, content in carriers().items():
        (tmp_path / kind).write_bytes(zips.read(content).content())
        zip_guard.check(tmp_path / kind, one_root=kind in TORCH)


# -- torch ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["torchscript", "pt2"])
def test_an_archive_of_torch_that_does_more_than_compute_is_not_opened(
    form: str, repository: HostileRepository, mark: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hostile = {"torchscript": hostile_torch.torchscripts, "pt2": hostile_torch.programs}[form]
    for what, (content, reason) in hostile(mark).items():
        path = repository.put(DEFAULT[form], content, TORCH[form])
        if what != "brings machine code":
            refused(repository.serve, reason, what=what)
        inspect(path)
        repository.certify(form)
        refused(repository.serve, what=what)
        refused(functools.partial(FORMATS.builtin[form].open_session, path), what=what)
        assert not mark.exists(), what


def test_machine_code_is_not_loaded_unless_someone_says_so(
    repository: HostileRepository, mark: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = hostile_torch.compiled(tmp_path, mark)
    if content is None:
        pytest.skip("there is no C compiler")
    path = repository.put("model.pt2", content, hostile_torch.COMPILED)
    refused(repository.serve, "is native code", "--allow-native-code")
    inspect(path)
    repository.certify("aoti")
    refused(lambda: repository.prove(monkeypatch), "is native code", "--trust")
    assert not mark.exists()
    with contextlib.suppress(ModelportError):
        repository.serve(allow_native_code=True)
    assert mark.exists(), "the library is a dud: this test could not fail"


def test_without_the_check_a_program_runs_its_code(
    repository: HostileRepository, mark: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The known-bad variant."""
    content, _ = hostile_torch.programs(mark)["evaluates a size"]
    repository.put("model.pt2", content, hostile_torch.EXPORTED)
    monkeypatch.setattr(pt2_guard, "check", lambda archive, native=False: None)
    with contextlib.suppress(ModelportError):
        repository.serve()
    assert mark.exists()


def test_without_the_check_pickles_are_refused_while_they_are_read(
    repository: HostileRepository, mark: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second line; and without it as well the pickle runs."""
    content, _ = hostile_torch.programs(mark)["unpickles an opaque constant"]
    repository.put("model.pt2", content, hostile_torch.EXPORTED)
    monkeypatch.setattr(pt2_guard, "check", lambda archive, native=False: None)
    refused(repository.serve, "wants to unpickle")
    assert not mark.exists()

    @contextlib.contextmanager
    def unguarded(name: str) -> Iterator[None]:
        yield

    monkeypatch.setattr("modelport.gateway.backends.embedded.pytorch_archives.no_code", unguarded)
    with contextlib.suppress(ModelportError):
        repository.serve()
    assert mark.exists()


def test_a_load_may_be_the_first_to_ask_for_the_folder_of_temporary_files(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Python finds that folder by a file that it makes and removes."""
    monkeypatch.setattr(tempfile, "tempdir", None)
    with no_code("model.pt2"):
        tempfile.gettempdir()


def test_garbage_that_is_collected_during_a_load_is_not_taken_for_the_artifacts_work(
    tmp_path: Path,
) -> None:
    """Only the collector is excused: after a collection the thread may not remove anything."""

    class FinalizedFile:
        def __init__(self, path: Path) -> None:
            self.path, self.itself = path, self
            path.touch()

        def __del__(self) -> None:
            self.path.unlink()

    with no_code("model.pt2"):
        FinalizedFile(tmp_path / "garbage")
        gc.collect()
    assert not list(tmp_path.iterdir())
    kept = tmp_path / "kept"
    kept.touch()

    def load() -> None:
        with no_code("model.pt2"):
            gc.collect()
            kept.unlink()

    with pytest.raises(IntegrityError, match="wants to remove files"):
        load()
    assert kept.exists()


def test_garbage_that_does_more_than_remove_files_is_refused(mark: Path) -> None:
    class FinalizedCommand:
        def __init__(self) -> None:
            self.itself = self

        def __del__(self) -> None:
            with contextlib.suppress(PermissionError):
                os.system(f"touch {mark}")

    def load() -> None:
        with no_code("model.pt2"):
            FinalizedCommand()
            gc.collect()

    with pytest.raises(IntegrityError, match="wants to start a program"):
        load()
    assert not mark.exists()


def test_without_the_check_torchscript_writes_its_file(
    repository: HostileRepository, mark: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The known-bad variant; and the graph is looked at where the text says nothing."""
    content, reason = hostile_torch.torchscripts(mark)["writes a file"]
    repository.put("model.pt", content, hostile_torch.TORCHSCRIPT)
    monkeypatch.setattr(torchscript_guard, "check_archive", lambda archive: None)
    refused(repository.serve, reason)
    assert not mark.exists()
    monkeypatch.setattr(torchscript_guard, "check_operators", lambda *_: None)
    repository.serve().unload()
    assert mark.exists()


# -- TensorFlow, TensorFlow Lite, ONNX ------------------------------------------------------------


def test_a_saved_model_that_does_more_than_compute_is_not_opened(
    repository: HostileRepository, mark: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for what, (fill, reason) in hostile_graphs.graphs(mark).items():
        shutil.rmtree(repository.root, ignore_errors=True)
        folder = hostile_graphs.saved_model(repository.version / "model.savedmodel", fill)
        (repository.version.parent / "config.pbtxt").write_text(hostile_graphs.TENSORFLOW)
        refused(repository.serve, reason, what=what)
        exported = CliRunner().invoke(
            modelport,
            ["export", str(folder), "--format", "onnx", "--output", str(tmp_path / "out")],
        )
        assert exported.exit_code == 5, (what, exported.output)
        assert reason in exported.output, (what, exported.output)
        repository.certify("savedmodel")
        refused(lambda: repository.prove(monkeypatch), reason, what=what)
        inspect(folder)
        assert not mark.exists(), what


def test_without_the_check_a_saved_model_writes_its_file(
    repository: HostileRepository, mark: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The known-bad variant."""
    fill, _ = hostile_graphs.graphs(mark)["writes a file while it loads"]
    hostile_graphs.saved_model(repository.version / "model.savedmodel", fill)
    (repository.version.parent / "config.pbtxt").write_text(hostile_graphs.TENSORFLOW)
    monkeypatch.setattr(saved_model_guard, "check", lambda folder: None)
    with contextlib.suppress(ModelportError):
        repository.serve()
    assert mark.exists()


@pytest.mark.parametrize("kind", ["variables", "nodes in a row"])
def test_checking_a_saved_model_takes_time_linear_in_its_nodes(kind: str, tmp_path: Path) -> None:
    """Ten thousand of either took minutes where each was looked for among all of them."""
    (tmp_path / saved_model_guard.FILENAME).write_bytes(hostile_graphs.large(kind, 10_000))
    before = time.process_time()
    saved_model_guard.check(tmp_path)
    assert processor.seconds_since(before) < 10


def test_a_lite_model_that_needs_more_than_built_in_operators_is_not_opened(
    repository: HostileRepository, monkeypatch: pytest.MonkeyPatch
) -> None:
    for what, (content, reason) in hostile_graphs.lites().items():
        path = repository.put("model.tflite", content, hostile_graphs.LITE)
        refused(repository.serve, reason, what=what)
        inspect(path)
        repository.certify("tflite")
        refused(lambda: repository.prove(monkeypatch), reason, what=what)


def test_an_onnx_model_that_uses_other_code_or_files_is_not_opened(
    repository: HostileRepository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "secret").write_bytes(bytes(64))
    for what, (content, reason) in hostile_graphs.onnxes(tmp_path).items():
        path = repository.put("model.onnx", content, hostile_graphs.ONNX)
        if what == "takes weights behind a link":
            (repository.version / "link").symlink_to("/etc/passwd")
            refused(repository.serve, "symbolic link", what=what)
        else:
            refused(repository.serve, reason, what=what)
        inspect(path)
        repository.certify("onnx")
        if "link" not in what:
            refused(lambda: repository.prove(monkeypatch), reason, what=what)


def test_an_openvino_model_that_uses_other_code_or_files_is_not_opened(
    repository: HostileRepository, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(openvino_guard, "CONSTANT_ALLOWANCE", 0)
    for what, (content, reason) in hostile_graphs.openvinos().items():
        path = repository.put("model.xml", content, hostile_graphs.OPENVINO)
        (repository.version / "model.bin").write_bytes(bytes(16))
        refused(repository.serve, reason, what=what)
        inspect(path)
        repository.certify("openvino")
        refused(lambda: repository.prove(monkeypatch), reason, what=what)
    harmless = hostile_graphs.intermediate_representation().encode()
    repository.put("model.xml", harmless, hostile_graphs.OPENVINO)
    (repository.version / "model.bin").write_bytes(bytes(16))
    assert [tensor.name for tensor in repository.serve().config.output] == ["y"]


# -- checkpoints and data -------------------------------------------------------------------------


def _saved(value: object, **options: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer, **options)
    return buffer.getvalue()


def _safetensors(header: str, values: bytes) -> bytes:
    return len(header).to_bytes(8, "little") + header.encode() + values


def _tensor(begin: int, end: int) -> str:
    return f'{{"dtype": "F32", "shape": [1], "data_offsets": [{begin}, {end}]}}'


def checkpoints(mark: Path) -> dict[str, tuple[bytes, str]]:
    """Checkpoints by what they do, with their suffix, and what the refusal names."""
    touch = PickleBomb(mark)
    return {
        "pickles a call.pt": (_saved({"w": touch}), "wants to run"),
        "pickles a call as a key.pth": (_saved({"state_dict": {"w": touch}}), "wants to run"),
        "is a bare pickle.bin": (pickle.dumps(touch), "damaged"),
        "is of the old layout.pt": (
            _saved({"w": touch}, _use_new_zipfile_serialization=False),
            "wants to run",
        ),
        "holds a name twice.safetensors": (
            _safetensors(f'{{"w": {_tensor(0, 4)}, "w": {_tensor(0, 4)}}}', bytes(4)),
            "twice",
        ),
        "overlaps.safetensors": (
            _safetensors(f'{{"a": {_tensor(0, 4)}, "b": {_tensor(0, 4)}}}', bytes(4)),
            "overlap",
        ),
        "hides bytes.safetensors": (
            _safetensors(f'{{"w": {_tensor(0, 4)}}}', bytes(9)),
            "leave gaps",
        ),
        "has no header.safetensors": (bytes(8), "no plausible length"),
    }


def test_a_checkpoint_that_wants_to_run_code_or_to_be_read_twice_is_not_read(
    tmp_path: Path, mark: Path
) -> None:
    for name, (content, reason) in checkpoints(mark).items():
        path = tmp_path / name.replace(" ", "-")
        path.write_bytes(content)
        refused(functools.partial(checkpoint.read, path), reason, what=name)
        for arguments in (
            [
                "export",
                str(path),
                "--model",
                "fraud",
                "--format",
                "onnx",
                "--output",
                str(tmp_path),
            ],
            ["convert", str(path), "--model", "fraud", "--to", str(tmp_path / "x.keras")],
        ):
            result = CliRunner().invoke(modelport, arguments)
            assert result.exit_code in (2, 5), (name, result.output)
        assert not mark.exists(), name
    torch.load(tmp_path / "pickles-a-call.pt", weights_only=False)
    assert mark.exists(), "the pickle is a dud: this test could not fail"


def test_data_that_is_pickled_is_not_read(tmp_path: Path, mark: Path) -> None:
    path = tmp_path / "data.npz"
    np.savez(path, x=np.array([PickleBomb(mark)], dtype=object))
    with pytest.raises(UsageError, match="is not a readable"):
        evaluation.read(path, BATCHED)
    assert not mark.exists()
    with np.load(path, allow_pickle=True) as file:
        assert file["x"].size
    assert mark.exists(), "the pickle is a dud: this test could not fail"


def _layer(**fields: Any) -> dict[str, Any]:
    layers = [{"module": "keras.layers", "class_name": "Dense", "config": {}} | fields]
    return {"module": "keras", "class_name": "Sequential", "config": {"layers": layers}}


KERAS = {
    "runs a lambda": (_layer(class_name="Lambda"), "Lambda"),
    "runs a pickled module": (_layer(class_name="TorchModuleWrapper"), "TorchModuleWrapper"),
    "loads another model": (_layer(class_name="TFSMLayer"), "TFSMLayer"),
    "names a class of the system": (_layer(module="subprocess", class_name="Popen"), "Popen"),
    "names a function of the system": (
        _layer(config={"activation": {"module": "os", "class_name": "function", "config": "x"}}),
        "os.x",
    ),
    "lifts safe mode": (
        _layer(
            config={
                "a": {
                    "module": "keras.config",
                    "class_name": "function",
                    "config": "enable_unsafe_deserialization",
                }
            }
        ),
        "enable_unsafe_deserialization",
    ),
    "reads a vocabulary": (_layer(config={"vocabulary": "/etc/passwd"}), "/etc/passwd"),
}


def test_a_keras_file_that_names_other_code_or_files_is_not_loaded(tmp_path: Path) -> None:
    path = tmp_path / "a.keras"
    for what, (config, reason) in KERAS.items():
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("config.json", json.dumps(config))
        refused(lambda: keras_guard.read_config(path), reason, what=what)
    with h5py.File(tmp_path / "w.h5", "w") as file:
        file["x"] = h5py.ExternalLink("/etc/other.h5", "/")
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("config.json", json.dumps({"class_name": "Sequential"}))
        archive.write(tmp_path / "w.h5", "model.weights.h5")
    refused(lambda: keras_guard.read_config(path), "leads elsewhere")
    path.write_bytes((tmp_path / "w.h5").read_bytes())
    refused(lambda: keras_guard.read_config(path), "legacy HDF5")


# -- certificates, manifests, configurations ------------------------------------------------------

LINE = (
    hostile_graphs.ONNX
    + """max_batch_size: 8
input { name: "x" data_type: TYPE_FP32 dims: 4 }
output { name: "y" data_type: TYPE_FP32 dims: 4 label_filename: "labels.txt" }
parameters { key: "range.x" value { string_value: "0..1" } }
"""
)

#: What is done to the configuration of a signed version, and what the refusal names.
RECONFIGURED: dict[str, tuple[Callable[[str], str], str]] = {
    "another backend": (
        lambda t: t.replace('"onnxruntime" platform: "onnxruntime_onnx"', '"fake"'),
        "asks for backend 'fake'",
    ),
    "another platform": (
        lambda t: t.replace("onnxruntime_onnx", "torch_aoti"),
        "platform 'torch_aoti'",
    ),
    "an ensemble": (
        lambda t: (
            'platform: "ensemble" ensemble_scheduling { step { model_name: "o" } }\n'
            + t.replace(hostile_graphs.ONNX, "")
        ),
        "no signature",
    ),
    "another batch size": (lambda t: t.replace("_size: 8", "_size: 2147483647"), "max_batch_size"),
    "another range": (lambda t: t.replace("0..1", "0..9"), "parameter 'range.x'"),
    "one more parameter": (
        lambda t: t + 'parameters { key: "image.scale" value { string_value: "2" } }',
        "parameter 'image.scale'",
    ),
    "another input": (lambda t: t.replace('"x" data', '"z" data'), "input 'z'"),
    "another datatype": (
        lambda t: t.replace("TYPE_FP32 dims: 4 }", "TYPE_FP64 dims: 4 }", 1),
        "input 'x'",
    ),
    "other sizes": (lambda t: t.replace("dims: 4 label", "dims: 9 label"), "output 'y'"),
    "another file": (
        lambda t: t + 'default_model_filename: "other.onnx"',
        "'default_model_filename'",
    ),
    "an accelerator": (
        lambda t: (
            t + "optimization { execution_accelerators { cpu_execution_accelerator { "
            'name: "openvino" } } }'
        ),
        "'optimization'",
    ),
    "a decoupled model": (
        lambda t: t + "model_transaction_policy { decoupled: true }",
        "'model_transaction_policy'",
    ),
    "an agent": (
        lambda t: t + 'model_repository_agents { agents { name: "evil" } }',
        "'model_repository_agents'",
    ),
    "a library of operators": (
        lambda t: t + 'model_operations { op_library_filename: "evil.so" }',
        "'model_operations'",
    ),
}

#: What a certificate says, and what the refusal names; formats that it names; files that a manifest
#: lists; suffixes of files.
CERTIFICATES = {
    "names a function": "an unsigned certificate names",
    "names a path": "does not describe the proof",
    "names an absolute path": "does not describe the proof",
    "allows any error": "does not describe the proof",
    "is of another model": "is of model 'o'",
    "is a list": "is not a certificate",
}
FORMS = ("evil", "../aoti", "pickle")
LISTED = ("../config.pbtxt", "/etc/passwd", "sub/../../x", "missing")
SUFFIXES = (".pkl", ".pickle", ".h5", ".hdf5", ".joblib")

#: What may change without a signature.
RUN = """version_policy { all { } }
instance_group { count: 2 kind: KIND_CPU }
dynamic_batching { max_queue_delay_microseconds: 5 }
response_cache { enable: true }
parameters { key: "version_label.stable" value { string_value: "1" } }
parameters { key: "intra_op_thread_count" value { string_value: "1" } }
"""


@functools.cache
def _multiply() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        return models.multiply(Path(folder) / "model.onnx").read_bytes()


def _signed(repository: HostileRepository, key: signing_keys.PrivateKey, more: str = LINE) -> None:
    repository.put("model.onnx", _multiply(), LINE)
    (repository.version.parent / "labels.txt").write_text("a\nb\nc\nd\n")
    config = configuration.complete(configuration.parse(LINE), "m")
    repository.certify("onnx", configuration=signed_config.document(config))
    signing.sign(repository.version, key)
    manifest.write(repository.version)
    (repository.version.parent / "config.pbtxt").write_text(more)


def test_what_is_signed_of_a_configuration_cannot_be_changed(repository: HostileRepository) -> None:
    key = signing_keys.PrivateKey.generate()
    for what, (change, reason) in RECONFIGURED.items():
        _signed(repository, key, change(LINE))
        assert change(LINE) != LINE, what
        serve = functools.partial(repository.serve, require_signature=(key.public,))
        refused(serve, reason, what=what)
    for text in (LINE, LINE + RUN, hostile_graphs.ONNX):
        _signed(repository, key, text)
        backend = repository.serve(require_signature=(key.public,))
        assert backend.config.max_batch_size == 8
        assert backend.config.parameters["range.x"].string_value == "0..1"
        backend.unload()


def test_an_ensemble_does_not_take_the_name_of_a_signed_model(
    repository: HostileRepository,
) -> None:
    """It has no file that could be signed: any signed model would answer in the name of another."""
    key = signing_keys.PrivateKey.generate()
    _signed(
        repository,
        key,
        'platform: "ensemble" ensemble_scheduling { step { model_name: "o" model_version: -1 '
        'input_map { key: "x" value: "x" } output_map { key: "y" value: "y" } } }\n'
        + LINE.replace(hostile_graphs.ONNX, ""),
    )
    shutil.rmtree(repository.version)
    repository.version.mkdir()
    refused(functools.partial(repository.serve, require_signature=(key.public,)), "no signature")


def test_an_unsigned_certificate_binds_the_backend_too(repository: HostileRepository) -> None:
    repository.put("model.onnx", _multiply(), 'backend: "fake"\n' + hostile_torch.CONFIG)
    repository.certify("onnx")
    refused(repository.serve, "asks for backend 'fake'", "is onnx")
    (repository.version / signing.CERTIFICATE).unlink()
    manifest.write(repository.version)
    repository.serve().unload()


def test_a_certificate_names_data_and_never_code_or_paths(
    repository: HostileRepository, monkeypatch: pytest.MonkeyPatch, mark: Path
) -> None:
    repository.put("model.onnx", _multiply(), LINE)
    model = {"name": "m", "factory": "os:system", "model_kwargs": {"command": f"touch {mark}"},
             "max_batch_size": 8, "inputs": [], "output_names": []}  # fmt: skip
    parity = {"outputs": {}, "decision": None, "samples": 1, "seed": 0, "bounds": None,
              "tolerance": {"atol": float("nan"), "rtol": 0}}  # fmt: skip
    hostile: dict[str, tuple[dict[str, Any], str]] = {
        "names a function": ({"model": model}, "an unsigned certificate names"),
        "names a path": (
            {"checkpoint": {"file": "../c.pt", "sha256": ""}},
            "does not describe the proof",
        ),
        "names an absolute path": (
            {"checkpoint": {"file": "/etc/passwd", "sha256": ""}},
            "does not describe the proof",
        ),
        "allows any error": ({"parity": parity}, "does not describe the proof"),
        "is of another model": ({"model": {**model, "name": "o"}}, "is of model 'o'"),
        "is a list": ({"artifact": []}, "is not a certificate"),
    }
    for what, (fields, reason) in hostile.items():
        repository.certify("onnx", **fields)
        refused(lambda: repository.prove(monkeypatch), reason, what=what)
    assert {what: reason for what, (_, reason) in hostile.items()} == CERTIFICATES
    for form in FORMS:
        repository.certify(form)
        refused(lambda: repository.prove(monkeypatch), "is not supported")
        refused(repository.serve, "names no format that can be served")
    assert not mark.exists()


def test_a_manifest_names_files_of_its_version_alone(repository: HostileRepository) -> None:
    for name in LISTED:
        repository.put("model.onnx", _multiply(), LINE)
        path = manifest.write(repository.version)
        document = json.loads(path.read_text())
        document["files"][name] = {"sha256": 64 * "0", "size_bytes": 1}
        path.write_text(json.dumps(document))
        refused(repository.serve, f"'{name}' is listed in manifest.json but missing")


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_version_with_a_file_that_runs_code_when_it_is_read_is_not_served(
    suffix: str, repository: HostileRepository
) -> None:
    repository.put("model.onnx", _multiply(), LINE)
    (repository.version / f"weights{suffix}").write_bytes(b"")
    refused(repository.serve, "may run code when it is read")


def test_folders_without_end_cost_their_version_alone(repository: HostileRepository) -> None:
    repository.put("model.onnx", _multiply(), LINE)
    other = repository.root / "o" / "1"
    shutil.copytree(repository.version, other)
    descriptor = os.open(repository.version, os.O_RDONLY)
    for _ in range(sys.getrecursionlimit() + 500):  # some libraries raise it
        os.mkdir("a", dir_fd=descriptor)
        below = os.open("a", os.O_RDONLY, dir_fd=descriptor)
        os.close(descriptor)
        descriptor = below
    os.close(descriptor)
    try:
        found = scan.scan([repository.root])
        assert found["m"].versions[1].problem
        assert not found["o"].versions[1].problem
    finally:
        subprocess.run(["rm", "-rf", repository.version], check=True)


def test_labels_without_end_are_not_read(repository: HostileRepository) -> None:
    repository.put("model.onnx", _multiply(), LINE)
    labels = repository.version.parent / "labels.txt"
    with labels.open("wb") as file:
        file.truncate(scan.MAX_LABEL_BYTES + 1)
    with pytest.raises(OSError, match="larger than"):
        scan.scan([repository.root])["m"].labels("labels.txt")


def test_every_attack_is_listed_with_its_verdict(mark: Path, tmp_path: Path) -> None:
    listed = (Path(__file__).parent / "README.md").read_text()
    attacks = {
        "zip": zips.MANIPULATIONS,
        "TorchScript": hostile_torch.torchscripts(mark),
        "TorchScript ": hostile_torch.CRASHES,
        "torch.export": hostile_torch.programs(mark),
        "SavedModel": hostile_graphs.graphs(mark),
        "TensorFlow Lite": hostile_graphs.lites(),
        "ONNX": hostile_graphs.onnxes(tmp_path),
        "OpenVINO": hostile_graphs.openvinos(),
        "Keras": KERAS,
        "configuration": RECONFIGURED,
        "certificate": CERTIFICATES,
    }
    missing = [
        f"{kind}: {name}"
        for kind, names in attacks.items()
        for name in names
        if f"| {kind.strip()}: {name} |" not in listed
    ]
    assert missing == []
    assert sum(map(len, attacks.values())) >= 60
