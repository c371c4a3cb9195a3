"""Modules that a lowering of single operators does not see: their sizes, weights and refusals."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from modelport.exporters.formats import savedmodel
from modelport.exporters.formats.base import ExportTarget
from modelport.exporters.loaded_model import Source
from modelport.exporters.model_spec import ModelSpec
from modelport.exporters.sources.pytorch import source
from modelport.gateway.errors import Unsupported
from modelport.gateway.types import Axis, Datatype, ModelSignature, TensorSpec

SERIES = ModelSignature(
    (TensorSpec("x", Datatype.FP32, ("time", 16)),),
    (TensorSpec("y", Datatype.FP32, (-1, 16)),),
    4,
    {"time": Axis("time", 1, 32)},
)


class FromWeightsAlone(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.randn(32, 16))

    def forward(self, x: Tensor) -> Tensor:
        assert isinstance(self.table, Tensor)
        return x + self.table.sin().unsqueeze(0)[:, : x.shape[1]]


class BranchOnLength(nn.Module):
    """A size made of another, for which ``torch.export`` refuses the declared bounds."""

    def forward(self, x: Tensor) -> Tensor:
        pairs = x[:, : x.shape[1] // 2 * 2].reshape(x.shape[0], -1, 2, 16)
        return x + pairs.mean((1, 2)).nan_to_num().unsqueeze(1)


class FixedLength(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([x[:, : step + 1].sum(1) for step in range(x.shape[1])], 1)


def of(module: nn.Module) -> Source:
    return source(module, ModelSpec("series", lambda *_: SERIES), SERIES)


@pytest.mark.parametrize("build", [FromWeightsAlone, BranchOnLength])
def test_a_module_is_lowered_for_every_length(
    build: Callable[[], nn.Module], tmp_path: Path
) -> None:
    loaded = of(build())
    savedmodel.export(loaded, tmp_path / "model", ExportTarget())
    session = savedmodel.open_session(tmp_path / "model", trusted=True)
    for time in (1, 5, 32):
        x = np.random.default_rng(time).standard_normal((3, time, 16)).astype(np.float32)
        np.testing.assert_allclose(
            session({"x": x})["y"], loaded.reference({"x": x})["y"], rtol=1e-5, atol=1e-6
        )


def test_a_module_that_fixes_a_declared_size_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(
        Unsupported, match=r"loops along an axis of open length \(test_modules\.py"
    ) as refused:
        savedmodel.export(of(FixedLength()), tmp_path / "model", ExportTarget())
    assert "\n" not in str(refused.value)
