"""ExecuTorch programs: proven, and served only where someone vouches for them.

Runs where ``modelport[executorch]`` is installed, which the extra ``all`` leaves out.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from modelport.exporters.cli.export import export
from modelport.gateway.errors import InvalidArgument, Unsupported
from tests.gateway.backends.embedded import runtimes

pytest.importorskip("executorch", reason="needs modelport[executorch]")


@pytest.mark.filterwarnings("ignore")
def test_a_program_is_proven_and_served_where_native_code_is_allowed(
    vit_checkpoint: Path, tmp_path: Path
) -> None:
    repository, kwargs = tmp_path / "repository", json.dumps({"num_heads": 2})
    arguments = ["--model", "vit", "--model-kwargs", kwargs, "--samples", "40", "--quiet"]
    arguments += ["--format", "executorch", "--repository", str(repository)]
    done = CliRunner().invoke(export, [str(vit_checkpoint), *arguments])
    assert done.exit_code == 0, done.output
    version = repository / "vit" / "1"
    text = (version.parent / "config.pbtxt").read_text()
    with pytest.raises(Unsupported, match="is native code"):
        runtimes.load(version, text)
    backend = runtimes.load(version, text, native=True)
    (image,) = backend.config.input
    for batch in (1, 8, 3):
        data = [[[[0.5] * 8] * 8]] * batch
        (logits,) = runtimes.run(backend, runtimes.fp32(data, image.name)).outputs
        assert logits.data.shape == (batch, 5)
    backend.unload()
    elsewhere = text.replace('"logits"', '"elsewhere"')
    with pytest.raises(InvalidArgument, match="declares outputs elsewhere, but the model has"):
        runtimes.load(version, elsewhere, native=True)
    whole = (version / "model.pte").read_bytes()
    for content in (b"", b"hello", whole[: len(whole) // 2]):
        (version / "model.pte").write_bytes(content)
        with pytest.raises(InvalidArgument, match=r"'model.pte' does not load"):
            runtimes.load(version, text, native=True)
