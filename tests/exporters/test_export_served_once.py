"""Publishing ends with a load by the gateway and an answer through its service."""

from __future__ import annotations

import json
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from torch import Tensor, nn

from modelport.exporters import api, artifact_conversion
from modelport.exporters.errors import ParityError
from modelport.exporters.formats import onnx as onnx_format
from modelport.exporters.formats.registry import FORMATS
from modelport.exporters.publishing import served_once
from modelport.gateway.backends.embedded import warmup
from modelport.gateway.errors import Unsupported
from modelport.gateway.repository.artifact_checks import trial_load
from modelport.gateway.server import trial_request

FACTORY = "tests.exporters.test_export_served_once:build"


class RecurrentSeries(nn.Module):
    """A recurrent layer whose results keep the length of the series."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.layer = kind(4, 3, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[0].mean(-1)  # type: ignore[no-any-return]


class NamedAsOperators(nn.Module):
    """A head whose results have the names of the operators before them."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.where = nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        mean = self.mean(x).mean(-1, keepdim=True)
        chosen = torch.where(mean > 0, self.where(x), mean)
        return {"mean": mean.tanh(), "where": chosen + mean, "sigmoid": chosen.sigmoid() * 2}


class Scalars(nn.Module):
    """A result without dimensions beside one with some."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.layer(x).sum(), self.layer(x)


MODULES: dict[str, tuple[Callable[[], nn.Module], str, int]] = {
    "lstm": (lambda: RecurrentSeries(nn.LSTM), "x:FP32[time=1..8,4]", 4),
    "gru": (lambda: RecurrentSeries(nn.GRU), "x:FP32[time=1..8,4]", 4),
    "names": (NamedAsOperators, "x:FP32[4]", 4),
    "scalars": (Scalars, "x:FP32[3,4]", 0),
}


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODULES[name][0]()


def publish(name: str, row: str, folder: Path) -> None:
    _, declared, batch = MODULES[name]
    torch.save(build(name).state_dict(), folder / "m.pt")
    api.export(
        folder / "m.pt",
        format=row,
        model=FACTORY,
        model_kwargs={"name": name},
        input=[declared],
        max_batch_size=batch,
        repository=folder / "repository",
        name=name,
        samples=16,
    )


@pytest.mark.parametrize("name", ["names", "scalars"])
def test_an_onnx_file_that_is_published_is_served(name: str, tmp_path: Path) -> None:
    publish(name, "onnx", tmp_path)
    model = onnx.load(tmp_path / "repository" / name / "1" / "model.onnx")
    values = [output for node in model.graph.node for output in node.output]
    assert len(values) == len(set(values))


@pytest.mark.thorough
@pytest.mark.parametrize("row", [name for name in FORMATS.names() if name != "executorch"])
@pytest.mark.parametrize("name", MODULES)
def test_every_format_that_is_published_is_served(name: str, row: str, tmp_path: Path) -> None:
    if (name, row) != ("gru", "aoti"):  # the compiler fixes its length (torch 2.13)
        publish(name, row, tmp_path)


@pytest.mark.parametrize("row", ["torchscript", "pt2"])
def test_a_result_without_dimensions_is_published_without_a_process_of_its_own(
    row: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(trial_load, "_run", lambda *given: pytest.fail("a file made here is tried"))
    monkeypatch.chdir(tmp_path)
    publish("scalars", row, Path())


@pytest.mark.thorough
def test_a_file_that_the_gateway_refuses_is_not_published(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The known-bad variant: the lengths in the file are those of the example."""

    def declare_lengths(model: Any, signature: Any) -> None:
        declare(model, signature)
        for value in model.graph.outputs:
            value.shape[1] = 7

    declare = onnx_format._declare
    monkeypatch.setattr(onnx_format, "_declare", declare_lengths)
    with pytest.raises(Unsupported, match=r"the gateway does not serve this artifact: .*'output'"):
        publish("gru", "onnx", tmp_path)
    assert not (tmp_path / "repository").exists()


def test_an_answer_of_the_gateway_that_differs_is_not_published(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[Any] = []

    def answer(*given: Any) -> Any:
        asked.append(given)
        return [{name: np.add(value, 1) for name, value in each.items()} for each in trial(*given)]

    trial = trial_request.answers
    monkeypatch.setattr(trial_request, "answers", answer)
    with pytest.raises(ParityError, match="the gateway's output 'output_0' differs"):
        publish("scalars", "torchscript", tmp_path)
    assert len(asked) == 1


def test_a_version_is_served_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    checked: list[Path] = []
    monkeypatch.setattr(served_once, "check", lambda staged, *_: checked.append(staged))
    publish("scalars", "torchscript", tmp_path)
    assert [path.parent.name for path in checked] == ["scalars"]


def test_a_version_is_not_warmed_up_for_the_one_request(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Every batch size of a large model takes ten seconds."""
    batches: list[int] = []
    timed = warmup._timed

    def counted(run: Any, request: Any) -> Any:
        batches.append(len(request.inputs[0].data))
        return timed(run, request)

    monkeypatch.setattr(warmup, "_timed", counted)
    publish("names", "torchscript", tmp_path)
    assert batches == [MODULES["names"][2]]


def test_the_certificate_has_the_memory_of_the_proof_too(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    taken = 300_000_000

    def prove(*given: Any) -> Any:
        held = b"x" * taken
        return report(*given) if held else None

    report = artifact_conversion.prove
    monkeypatch.setattr(artifact_conversion, "prove", prove)
    before = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    publish("scalars", "torchscript", tmp_path)
    file = tmp_path / "repository" / "scalars" / "1" / "certificate.json"
    peak = json.loads(file.read_text())["resources"]["peak_memory_bytes"]
    assert peak > before + 0.9 * taken
