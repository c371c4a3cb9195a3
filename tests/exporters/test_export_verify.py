"""``modelport verify``: what was published is still there, and still computes what was proven."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from click.testing import CliRunner, Result
from onnx import numpy_helper

from modelport.exporters.cli.export import export
from modelport.exporters.cli.verify import verify
from modelport.exporters.models.fraud import FraudTransformer
from modelport.exporters.proof import model_proportion
from modelport.gateway.errors import IntegrityError
from modelport.gateway.repository import manifest, signing
from modelport.gateway.repository.signing_keys import PrivateKey

KWARGS: dict[str, Any] = {
    "vocab_size": 32,
    "d_model": 16,
    "nhead": 2,
    "num_layers": 1,
    "dim_feedforward": 24,
    "max_positions": 12,
}
KEY = PrivateKey(bytes(range(32)))


def save_checkpoint(path: Path, seed: int) -> Path:
    torch.manual_seed(seed)
    module = FraudTransformer(**KWARGS)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.2)
    torch.save({"model_state_dict": module.state_dict(), "model_kwargs": KWARGS}, path)
    return path


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``fraud.pt``, its repository, and ``half``: fp16, held to the rows of ``rows.npz``."""
    root = tmp_path_factory.mktemp("published")
    checkpoint = save_checkpoint(root / "fraud.pt", 0)
    (root / "release.key").write_bytes(KEY.pem())
    (root / "release.pub").write_bytes(KEY.public.pem())
    rng = np.random.default_rng(0)
    np.savez(
        root / "rows.npz",
        tokens=rng.integers(0, 32, (40, 12)),
        seq_lens=rng.integers(1, 12, (40,)),
        labels=np.arange(40) % 2,
    )
    common = [str(checkpoint), "--model", "fraud", "--format", "onnx", "--samples", "40"]
    common += ["--repository", str(root / "repository"), "--seed", "7", "--max-batch-size", "4"]
    half = ["--name", "half", "--dtype", "fp16", "--data", str(root / "rows.npz")]
    for more in (["--sign-key", str(root / "release.key")], half):
        result = CliRunner().invoke(export, [*common, *more])
        assert result.exit_code == 0, result.stderr
    return root


@pytest.fixture
def place(published: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it to tamper with, as the working directory."""
    shutil.copytree(published, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def version(place: Path) -> Path:
    return place / "repository" / "fraud" / "1"


def run(*arguments: object) -> Result:
    return CliRunner().invoke(verify, [str(argument) for argument in arguments])


def document(*arguments: object) -> dict[str, Any]:
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.stderr
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def line_of(result: Result, code: int) -> str:
    assert result.exit_code == code, result.output
    assert result.stdout == ""
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1, result.stderr
    return lines[0].removeprefix("modelport: error: ")


def rewrite(version: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the certificate as whoever can write the files can; the manifest is made to match."""
    path = version / signing.CERTIFICATE
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    manifest.write(version)


def spoil(version: Path) -> None:
    """Scale one weight, and have certificate and manifest list the new file."""
    path = version / "model.onnx"
    model = onnx.load(path)
    weight = next(w for w in model.graph.initializer if "head" in w.name and len(w.dims) == 2)
    array = numpy_helper.to_array(weight) * np.float32(1.01)
    weight.CopyFrom(numpy_helper.from_array(array, weight.name))
    onnx.save(model, path)

    def relist(content: dict[str, Any]) -> None:
        content["artifact"]["files"]["model.onnx"]["sha256"] = manifest.sha256_of(path)
        content["artifact"]["size_bytes"] = path.stat().st_size

    rewrite(version, relist)


# -- it holds -------------------------------------------------------------------------------------


def test_the_proof_of_an_untouched_version_holds_again(version: Path) -> None:
    found = document(version)
    assert (found["model"], found["version"], found["format"]) == ("fraud", 1, "onnx")
    assert found["signature"] == {"key": KEY.public.fingerprint, "verified": False}
    proof, certified = found["proof"], json.loads((version / "certificate.json").read_text())
    assert (proof["seed"], proof["precision"]) == (7, "fp32")
    for same in ("samples", "edge_samples", "tolerance"):
        assert proof[same] == certified["parity"][same]
    error = proof["max_abs_errors"]["probability"]
    assert error["certified"] == certified["parity"]["outputs"]["probability"]["max_abs_error"]
    assert 0 <= error["now"] <= 5e-6
    assert proof["agreement"] == {"certified": 1.0, "now": 1.0}


def test_what_was_found_stands_beside_what_was_certified(version: Path) -> None:
    result = run(version, "--public-key", "release.pub")
    assert result.exit_code == 0, result.stderr
    text = result.stdout
    for said in (
        f"1 ({version})",
        f"verified: key {KEY.public.fingerprint}",
        "holds in fp32",
        "seed 7",
    ):
        assert said in text
    assert "error probability" in text
    assert "5e-06 + 1e-05 * |reference|" in text
    assert "100.00% (certified 100.00%)" in text


def test_of_a_model_its_newest_version_is_verified_and_named(version: Path) -> None:
    for number in ("9", "10"):
        shutil.copytree(version, version.with_name(number))
    (version.parent / "011").mkdir()
    assert document(version.parent, "--integrity")["version"] == 10
    assert document("repository/fraud", "--integrity")["version"] == 10


def test_the_working_directory_can_be_the_version(
    version: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(version)
    assert document(".", "--integrity")["model"] == "fraud"
    assert document("..", "--integrity")["version"] == 1


def test_the_files_are_checked_without_any_runtime(version: Path) -> None:
    code = (
        "import sys; from modelport.exporters.cli.verify import verify; "
        "verify(sys.argv[1:], standalone_mode=False); "
        "print([m for m in ('torch', 'tensorflow', 'onnxruntime', 'onnx') if m in sys.modules])"
    )
    root = str(Path(__file__).resolve().parents[2])
    finished = subprocess.run(
        [sys.executable, "-c", code, str(version), "--integrity", "--public-key", "release.pub"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": root},
    )
    assert finished.stdout.splitlines()[-1] == "[]", finished.stderr
    assert "proof" not in finished.stdout


# -- it does not hold -----------------------------------------------------------------------------


def test_another_artifact_whose_digests_were_made_to_match_fails_the_proof(
    version: Path,
) -> None:
    (version / signing.SIGNATURE).unlink()
    spoil(version)
    assert document(version, "--integrity")["proof"] is None
    line = line_of(run(version), 3)
    assert line.startswith("version 1 of 'fraud' is not the verified one: output 'probability'")


def test_such_an_artifact_does_not_even_pass_for_signed(version: Path) -> None:
    spoil(version)
    line = line_of(run(version, "--integrity", "--public-key", "release.pub"), 5)
    assert line.startswith("certificate.json does not match certificate.json.sig")


def test_an_invalid_artifact_fails_verification(version: Path) -> None:
    (version / "model.onnx").write_bytes(b"not a model")

    def relist(content: dict[str, Any]) -> None:
        digest = manifest.sha256_of(version / "model.onnx")
        content["artifact"]["files"]["model.onnx"]["sha256"] = digest

    rewrite(version, relist)
    assert "'model.onnx' does not load: " in line_of(run(version), 5)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda v: (v / "model.onnx").write_bytes(b""), "'model.onnx' has 0 bytes"),
        (lambda v: (v / "extra.bin").write_bytes(b""), "'extra.bin' is not listed"),
        (lambda v: (v / "model.onnx").unlink(), "'model.onnx' is listed"),
        (lambda v: (v / "certificate.json").unlink(), "'certificate.json' is listed"),
        (lambda v: (v / "manifest.json").unlink(), "manifest.json is missing"),
        (lambda v: (v / "manifest.json").write_text("{}"), "manifest.json is not a manifest"),
        (
            lambda v: ((v / "certificate.json").unlink(), manifest.write(v)),
            "certificate.json is missing",
        ),
        (
            lambda v: ((v / "extra.bin").write_bytes(b""), manifest.write(v)),
            "'extra.bin' is not listed in certificate.json",
        ),
        (
            lambda v: ((v / "certificate.json.sig").write_text("{}"), manifest.write(v)),
            "certificate.json.sig is not a signature",
        ),
        (
            lambda v: rewrite(v, lambda content: content["model"].update(name="vit")),
            "certificate.json is of model 'vit', not 'fraud'",
        ),
    ],
)
def test_damage_is_named_before_anything_is_run(
    version: Path, damage: Callable[[Path], object], reason: str
) -> None:
    damage(version)
    assert line_of(run(version), 5).startswith(reason)


def test_a_required_signature_must_be_there_and_of_that_key(version: Path, place: Path) -> None:
    (place / "other.pub").write_bytes(PrivateKey.generate().public.pem())
    line = line_of(run(version, "--public-key", "other.pub"), 5)
    assert f"signed with key {KEY.public.fingerprint}" in line
    both = ("--public-key", "other.pub", "--public-key", "release.pub", "--integrity")
    assert document(version, *both)["signature"]["verified"] is True
    (version / signing.SIGNATURE).unlink()
    manifest.write(version)
    line = line_of(run(version, "--public-key", "release.pub"), 5)
    assert line.startswith("certificate.json.sig is missing")
    assert document(version, "--integrity")["signature"] is None


@pytest.mark.parametrize(
    "change",
    [
        lambda c: c.pop("parity"),
        lambda c: c["parity"].pop("seed"),
        lambda c: c["parity"].update(tolerance={"atol": float("inf"), "rtol": 0}),
        lambda c: c["parity"].update(tolerance={"atol": float("nan"), "rtol": 0}),
        lambda c: c["parity"].update(tolerance={"atol": None, "rtol": 0}),
        lambda c: c["parity"].update(samples="many"),
        lambda c: c["checkpoint"].update(file="../fraud.pt"),
        lambda c: c["checkpoint"].update(file="/fraud.pt"),
        lambda c: c["model"].update(factory=["os:system"]),
        lambda c: c["model"].update(model_kwargs=[1]),
        lambda c: c["artifact"].update(format=[]),
        lambda c: c.update(evaluation={"rows": 1, "surprise": 2}),
    ],
)
def test_a_certificate_that_proves_nothing_is_refused(
    version: Path, change: Callable[[dict[str, Any]], object]
) -> None:
    rewrite(version, lambda content: change(content) and None)
    line = line_of(run(version), 5)
    assert line.startswith("certificate.json does not describe the proof")


# -- what the certificate names -------------------------------------------------------------------


def test_the_checkpoint_is_found_by_its_name_and_known_by_its_digest(
    version: Path, place: Path
) -> None:
    (place / "checkpoints").mkdir()
    shutil.move("fraud.pt", "checkpoints/fraud.pt")
    assert document(version)["proof"]
    save_checkpoint(place / "fraud.pt", 1)
    assert document(version)["proof"]
    shutil.move("checkpoints/fraud.pt", "elsewhere.pt")
    line = line_of(run(version), 2)
    assert line.startswith("checkpoint 'fraud.pt' is not the 'fraud.pt' of the certificate")
    assert document(version, "--checkpoint", "elsewhere.pt")["proof"]
    (place / "fraud.pt").unlink()
    line = line_of(run(version), 2)
    assert line.startswith("checkpoint 'fraud.pt' is neither here nor in checkpoints/")
    assert "--checkpoint" in line
    assert "'nowhere.pt' does not exist" in line_of(run(version, "--checkpoint", "nowhere.pt"), 2)


@pytest.fixture
def stranger(version: Path, place: Path) -> str:
    """A factory that the certificate names, nobody installed, and that leaves a trace."""
    module = f"stranger_{place.name}"
    (place / f"{module}.py").write_text(
        "import pathlib\n"
        "from modelport.exporters.models.fraud import FraudTransformer\n"
        "pathlib.Path('trace').touch()\n"
    )
    factory = f"{module}:FraudTransformer"
    rewrite(version, lambda content: content["model"].update(factory=factory))
    return factory


def test_code_that_only_a_certificate_names_is_not_run(
    version: Path, place: Path, stranger: str
) -> None:
    line = line_of(run(version), 2)
    assert f"--model {stranger}" in line
    line_of(run(version, "--model", "fraud"), 2)
    assert not (place / "trace").exists()


def test_code_that_the_caller_names_too_is_run(version: Path, place: Path, stranger: str) -> None:
    assert document(version, "--model", stranger)["proof"]
    assert (place / "trace").exists()


def test_code_that_a_verified_signature_vouches_for_is_run(
    version: Path, place: Path, stranger: str
) -> None:
    signing.sign(version, KEY)
    manifest.write(version)
    assert document(version, "--public-key", "release.pub")["proof"]
    assert (place / "trace").exists()


def test_a_registered_model_may_be_named_in_full(version: Path) -> None:
    factory = "modelport.exporters.models.fraud:FraudTransformer"
    rewrite(version, lambda content: content["model"].update(factory=factory))
    assert document(version)["proof"]


def test_adapters_are_asked_for_where_some_were_merged_and_only_there(version: Path) -> None:
    assert "names no adapters; omit --lora" in line_of(run(version, "--lora", "."), 2)
    adapter = {"file": "adapters", "sha256": "0" * 64}
    rewrite(version, lambda content: content.update(adapters=[adapter]))
    assert "the adapters 'adapters'; give them with --lora" in line_of(run(version), 2)


def test_where_held_out_data_decided_they_are_asked_for(place: Path) -> None:
    half = place / "repository" / "half"
    line = line_of(run(half), 2)
    assert "compared on 'rows.npz'; give it with --data" in line
    found = document(half, "--data", "rows.npz")
    assert found["proof"]["precision"] == "fp16"


def test_a_path_that_is_not_a_version_gets_a_one_line_error(place: Path) -> None:
    for path in ("repository", "fraud.pt", "nowhere", "repository/fraud/2"):
        assert path in line_of(run(path), 2)
    assert "Path '\N{REPLACEMENT CHARACTER}' does not exist" in line_of(
        run(os.fsdecode(b"\xff")), 2
    )
    (place / "repository" / "fraud" / "2").mkdir()
    assert (
        line_of(run("repository/fraud"), 5) == "manifest.json is missing; publish the version again"
    )


def test_options_of_the_proof_make_no_sense_without_it(version: Path) -> None:
    line = line_of(run(version, "--integrity", "--checkpoint", "fraud.pt"), 2)
    assert line == "--integrity does not repeat the proof; omit --checkpoint"


@pytest.mark.parametrize("value", [10**9, [1, {"deep": 10**9}]])
def test_a_model_out_of_proportion_to_its_checkpoint_is_not_built(
    version: Path, place: Path, value: Any
) -> None:
    rewrite(version, lambda content: content["model"]["model_kwargs"].update(num_layers=value))
    line = line_of(run(version), 5)
    assert line.startswith("the model of the unsigned certificate.json has the size 1000000000")


def test_a_model_that_takes_all_memory_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_proportion, "FREE_BYTES", 256 << 20)
    (tmp_path / "checkpoint").write_bytes(b"small")
    with (
        pytest.raises(IntegrityError, match="needs more memory than is allowed"),
        model_proportion.in_proportion({}, tmp_path / "checkpoint"),
    ):
        bytearray(1 << 30)
    assert len(bytearray(1 << 30)) == 1 << 30
