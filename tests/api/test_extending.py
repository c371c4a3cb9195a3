"""The package of docs/extending.md, really installed: one extension of each kind, end to end."""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch
from click.testing import CliRunner

import modelport
from modelport import extension_check
from modelport.cli import modelport as command
from modelport.exporters.formats.registry import FORMATS, find_format
from modelport.exporters.model_registry import MODELS, registered
from modelport.exporters.model_spec import find_factory
from modelport.exporters.packaging import SERVERS
from modelport.gateway import extensions
from modelport.gateway.access import located_toml
from modelport.gateway.access.authentication import AuthenticatorChain
from modelport.gateway.access.authenticators import ALWAYS, AUTHENTICATORS
from modelport.gateway.access.principal import ANONYMOUS, UNKNOWN_CONNECTION
from modelport.gateway.backend_registry import BACKENDS, find_loader
from modelport.gateway.errors import Unauthenticated, Unsupported
from modelport.gateway.protocols.dialects import DIALECTS
from modelport.gateway.runtime.file_watcher import FileWatcher
from tests.docs import pages
from tests.models import multiply

ROOT = Path(__file__).resolve().parents[2]
MODULES = ("acme_authenticator", "acme_backend", "acme_dialect", "acme_format", "acme_models")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that pip installed the document's package into."""
    source = tmp_path_factory.mktemp("acme-modelport")
    for block in pages.blocks(ROOT / "docs" / "extending.md"):
        if block.target:
            (source / Path(block.target).name).write_text(block.text)
    target = tmp_path_factory.mktemp("site")
    offline = ("--no-deps", "--no-build-isolation", "--no-index", "--quiet")
    command = (sys.executable, "-m", "pip", "install", *offline, "--target", str(target))
    done = subprocess.run([*command, str(source)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return target


@pytest.fixture
def installed(site: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.syspath_prepend(site)
    yield site
    for name in MODULES:
        sys.modules.pop(name, None)


def register(folder: Path, group: str, name: str, value: str, package: str = "broken") -> None:
    """The files that pip leaves of a package with one entry point."""
    metadata = folder / f"{package}-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[{group}]\n{name} = {value}\n")


def run(*arguments: str) -> str:
    done = CliRunner().invoke(command, list(arguments))
    assert done.exit_code == 0, done.output
    return done.output


@pytest.mark.thorough
def test_a_package_with_one_of_each_exports_serves_and_answers(
    installed: Path, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    net = find_factory("scorer")().eval()
    torch.save(net.state_dict(), tmp_path / "scorer.pt")
    repository = tmp_path / "models"
    run(*("export", str(tmp_path / "scorer.pt"), "--model", "scorer", "--format", "npz"),
        *("--repository", str(repository), "--samples", "20", "--quiet"))  # fmt: skip
    certificate = json.loads((repository / "scorer" / "1" / "certificate.json").read_text())
    assert certificate["artifact"]["format"] == "npz"
    assert certificate["parity"]["passed"]

    rows = np.arange(32, dtype=np.float32).reshape(2, 16) / 32
    expected = net(torch.from_numpy(rows)).detach().numpy()
    text = "\n".join(",".join(map(str, row)) for row in rows)
    with modelport.testing.serve(repository, dialect="csv") as server:
        with modelport.Client(server.http_url) as client:
            np.testing.assert_allclose(
                client.infer("scorer", {"features": rows})["score"], expected, rtol=1e-5
            )
        answer = httpx.post(f"{server.http_url}/csv/scorer", content=text)
        np.testing.assert_allclose(np.loadtxt(answer.text.splitlines()), expected[:, 0], rtol=1e-4)
        for path, body, status, words in (
            ("csv/scorer", "word", 400, "the body is not CSV"),
            ("csv/another", text, 404, "'another' is not found"),
            ("csv/scorer", "1,2", 400, "unexpected shape for input 'features'"),
            ("csv", "", 404, "Not Found"),
        ):
            refused = httpx.post(f"{server.http_url}/{path}", content=body)
            assert (refused.status_code, words in refused.text) == (status, True), refused.text
        assert "/csv/{model}" in httpx.get(f"{server.http_url}/openapi.json").json()["paths"]


def test_an_installed_dialect_opens_no_route_unless_it_is_named(
    installed: Path, tmp_path: Path
) -> None:
    multiply(tmp_path / "models" / "m" / "1" / "model.onnx")
    with modelport.testing.serve(tmp_path / "models") as server:
        assert httpx.post(f"{server.http_url}/csv/scorer", content="1").status_code == 404
    with pytest.raises(modelport.Unsupported, match=r"there is no dialect 'cvs'.*oip.*csv"):
        modelport.Server(tmp_path / "models", dialect="cvs").start()


def write_scorer(repository: Path) -> None:
    (repository / "model" / "1").mkdir(parents=True)
    np.savez(
        repository / "model" / "1" / "model.npz",
        weight=np.ones((1, 16), np.float32),
        bias=np.zeros(1),
    )
    (repository / "model" / "config.pbtxt").write_text(
        'backend: "numpy" max_batch_size: 4 '
        'input { name: "features" data_type: TYPE_FP32 dims: 16 } '
        'output { name: "score" data_type: TYPE_FP32 dims: 1 }'
    )


def test_a_lone_file_of_an_installed_format_is_served(installed: Path, tmp_path: Path) -> None:
    write_scorer(tmp_path)
    with modelport.testing.serve(tmp_path) as server, modelport.Client(server.grpc_url) as client:
        assert client.infer("model", {"features": np.ones((1, 16))})["score"].tolist() == [[16.0]]


@pytest.mark.thorough
def test_descriptors_reach_doctor_packaging_and_compare(
    installed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{installed}{os.pathsep}{ROOT}")
    rows = {(row["kind"], row["name"]): row for row in json.loads(run("doctor", "--json"))}
    names = ("authenticator acme", "backend numpy", "format npz", "model scorer", "dialect csv")
    for name in names:
        row = rows["extension", name]
        assert (row["state"], row["version"], row["detail"]) == ("ok", "1.0", "acme-modelport")
    assert rows["embedded", "numpy (numpy)"]["state"] == "ok"
    assert rows["embedded", "tflite (ai-edge-litert)"]["name"]
    code = (
        "from modelport.loadtests.compare import plan; "
        "print([entry.name for entry in plan.entries(['npz'], ['numpy'])])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "['npz fp32 · NumPy']\n", done.stderr


def test_an_installed_authenticator_recognises_its_credential(
    installed: Path, tmp_path: Path
) -> None:
    (tmp_path / "secret").write_text("s3cret\n")
    [[table]] = located_toml.parse(
        tmp_path / "access.toml", b'[acme]\nsecret = "secret"'
    ).tables.values()
    descriptor = AUTHENTICATORS.get("acme")
    assert descriptor is not None
    authenticators = (*ALWAYS, descriptor.make(table, FileWatcher()))

    def caller(ticket: bytes) -> str:
        return (
            AuthenticatorChain(authenticators)
            .authenticate({b"x-acme-ticket": ticket}, UNKNOWN_CONNECTION)
            .name
        )

    right = hmac.new(b"s3cret", b"alice", hashlib.sha256).hexdigest().encode()
    assert caller(b"alice:" + right) == "acme:alice"
    assert AuthenticatorChain(authenticators).authenticate({}, UNKNOWN_CONNECTION) is ANONYMOUS
    for wrong in (b"bob:" + right, b"alice:" + right[:-1], b"", b"\xff:\xff"):
        with pytest.raises(Unauthenticated):
            caller(wrong)
    with pytest.raises(
        modelport.InvalidArgument, match=r"access\.toml:1: .* needs the key 'secret'"
    ):
        descriptor.make(dataclasses.replace(table, values={}), FileWatcher())


def test_rules_name_the_callers_of_an_installed_authenticator(
    installed: Path, tmp_path: Path
) -> None:
    write_scorer(tmp_path / "models")
    (tmp_path / "secret").write_text("s3cret")
    (tmp_path / "access.toml").write_text(
        '[acme]\nsecret = "secret"\n[[rules]]\nprincipals = ["acme:al*"]\n'
        'operations = ["infer"]\nmodels = ["model"]\n'
    )
    text = ",".join(["1"] * 16)
    with modelport.testing.serve(
        tmp_path / "models", dialect="csv", access=tmp_path / "access.toml"
    ) as server:
        for user, status in (("alice", 200), ("bob", 403)):
            ticket = f"{user}:{hmac.new(b's3cret', user.encode(), hashlib.sha256).hexdigest()}"
            headers = {"x-acme-ticket": ticket}
            answer = httpx.post(f"{server.http_url}/csv/model", content=text, headers=headers)
            assert answer.status_code == status, answer.text
            headers["x-acme-ticket"] += "0"
            answer = httpx.post(f"{server.http_url}/csv/model", content=text, headers=headers)
            assert (answer.status_code, answer.text) == (401, "the ticket is wrong\n")
        assert httpx.post(f"{server.http_url}/csv/model", content=text).status_code == 401


def test_names_that_nobody_registers_are_refused_with_those_that_there_are(installed: Path) -> None:
    with pytest.raises(Unsupported, match=r"'nupmy' is not supported; this gateway has: .*numpy"):
        find_loader("nupmy")
    with pytest.raises(Unsupported, match=r"--format 'nzp' is not supported.*npz"):
        find_format("nzp")
    with pytest.raises(modelport.InvalidArgument, match=r"'scorr' is not registered; use .*scorer"):
        find_factory("scorr")


def test_without_the_package_its_names_are_unknown() -> None:
    assert BACKENDS.get("numpy") is None
    assert FORMATS.get("npz") is None
    assert DIALECTS.get("csv") is None
    assert AUTHENTICATORS.get("acme") is None


BROKEN = (
    ("modelport.backends", "no_such_module:BACKEND", "No module named 'no_such_module'"),
    ("modelport.formats", "acme_format:MISSING", "has no attribute 'MISSING'"),
    ("modelport.formats", "acme_format:ROUTE", "is a ExportRoute, not a"),
    ("modelport.dialects", "acme_dialect:DIALECT", "calls itself 'csv', not 'broken'"),
    ("modelport.models", "acme_models:signature.missing", "missing"),
    ("modelport.backends", "acme_exit:BACKEND", "SystemExit: 3"),
    ("modelport.authenticators", "acme_authenticator:Tickets", "not a modelport.gateway.access"),
)


@pytest.mark.parametrize(("group", "value", "words"), BROKEN)
def test_a_broken_extension_costs_nothing_but_itself(
    installed: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    group: str,
    value: str,
    words: str,
) -> None:
    register(tmp_path, group, "broken", value)
    (tmp_path / "acme_exit.py").write_text("raise SystemExit(3)\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert words in extension_check.check(group, "broken")
    assert extension_check.check("modelport.formats", "npz") == ""
    assert find_format("npz").platform.backend == "numpy"
    assert "broken" not in {**BACKENDS.all(), **FORMATS.all(), **DIALECTS.all()}
    assert "broken" not in AUTHENTICATORS.all()
    if group == "modelport.backends":
        with pytest.raises(Unsupported, match="package 'broken' and cannot be used") as caught:
            find_loader("broken")
        assert words not in str(caught.value)  # it reaches clients
    if group == "modelport.formats":
        with pytest.raises(Unsupported, match=re.escape(words)):
            find_format("broken")


def test_doctor_names_a_broken_extension_in_one_line(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    register(tmp_path, "modelport.backends", "broken", "no_such_module:BACKEND")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(tmp_path)
    rows = [row for row in json.loads(run("doctor", "--json")) if row["kind"] == "extension"]
    [row] = [row for row in rows if row["name"] == "backend broken"]
    assert row["state"] == "broken"
    assert row["detail"] == "broken: ModuleNotFoundError: No module named 'no_such_module'"


def test_a_name_that_two_packages_register_is_refused_and_both_are_named(
    installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    register(tmp_path, "modelport.backends", "numpy", "other:BACKEND", "other")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(Unsupported, match="'numpy' is registered twice") as caught:
        find_loader("numpy")
    assert "acme_backend:BACKEND by acme-modelport" in str(caught.value)
    assert "other:BACKEND by other" in str(caught.value)


def test_model_names_follow_the_same_rules(
    installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    register(tmp_path / "again", "modelport.models", "scorer", "acme_models:Scorer", "again")
    monkeypatch.syspath_prepend(tmp_path / "again")
    assert registered() == {**MODELS, "scorer": "acme_models:Scorer"}  # seen twice, no clash
    assert "acme_models" not in sys.modules
    register(tmp_path / "other", "modelport.models", "scorer", "other:Model", "other")
    register(tmp_path / "own", "modelport.models", "vit", "other:Model", "own")
    for folder in ("other", "own"):
        monkeypatch.syspath_prepend(tmp_path / folder)
    with pytest.raises(modelport.InvalidArgument, match="model 'scorer' is registered twice"):
        find_factory("scorer")
    assert registered() == MODELS
    assert find_factory("vit").__module__ == "modelport.exporters.models.vit"


def test_a_built_in_name_cannot_be_replaced(
    installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    register(tmp_path, "modelport.backends", "onnxruntime", "acme_backend:BACKEND")
    monkeypatch.syspath_prepend(tmp_path)
    found = BACKENDS.get("onnxruntime")
    assert found is BACKENDS.builtin["onnxruntime"]
    assert "the name is built in" in extension_check.check("modelport.backends", "onnxruntime")


def test_built_in_names_read_no_entry_points(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: str) -> list[EntryPoint]:
        raise AssertionError("entry points were read")

    monkeypatch.setattr(extensions, "entry_points", refuse)
    for name in BACKENDS.builtin:
        assert BACKENDS.get(name) is not None
    for name in FORMATS.builtin:
        assert find_format(name).platform.format == name
    assert DIALECTS.get("oip") is not None
    assert find_factory("fraud")


def test_the_extras_that_descriptors_name_bring_their_libraries() -> None:
    extras = (ROOT / "pyproject.toml").read_text()
    named = [
        (library.distribution, extra[1])
        for backend in BACKENDS.builtin.values()
        for library in backend.libraries
        if (extra := re.search(r"\[(\w+)\]", library.install))
    ]
    assert [extra for _, extra in named] == [
        *("torch", "tensorflow", "litert", "openvino", "executorch")
    ]
    for distribution, extra in named:
        block = re.search(rf"^{extra} = \[(.*?)\]$", extras, re.MULTILINE | re.DOTALL)
        assert block is not None
        assert re.search(rf'"{distribution}[=<>]', block[1]), (distribution, extra)
    assert SERVERS["triton"].formats == ("onnx", "torchscript", "savedmodel", "openvino")
