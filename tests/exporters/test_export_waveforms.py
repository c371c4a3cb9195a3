"""Sound as input: the proof's edges are silence, faint noise and square waves."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from modelport.exporters.errors import ParityError
from modelport.exporters.model_spec import ModelSpec
from modelport.exporters.proof import parity
from modelport.exporters.requests.random_inputs import FAINT, LOUD, Fill, draw
from modelport.exporters.sources.pytorch import source
from modelport.gateway.types import Axis, Datatype, ModelSignature, TensorSpec
from tests.exporters.test_export_parity import ModuleSession

SOUND = TensorSpec("sound", Datatype.FP32, ("samples",))
LOGITS = TensorSpec("logits", Datatype.FP32, (4,))
SIGNATURE = ModelSignature((SOUND,), (LOGITS,), 4, {"samples": Axis("samples", 40, 4000)})
SPEC = ModelSpec("sound", lambda *_: SIGNATURE, atol=1e-4, waveforms=("sound",))


class NormalizesTime(nn.Module):
    """A front end that divides by the standard deviation over time, as wav2vec 2.0 does."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.convolution = nn.Conv1d(1, 8, 10, 5, bias=False)
        self.normalization = nn.GroupNorm(8, 8)
        self.head = nn.Linear(8, 4)

    def forward(self, sound: Tensor) -> Tensor:
        frames = self.normalized(self.convolution(sound[:, None]))
        result: Tensor = self.head(torch.relu(frames).mean(-1))
        return result

    def normalized(self, frames: Tensor) -> Tensor:
        normalized: Tensor = self.normalization(frames)
        return normalized


class InOneSum(NormalizesTime):
    """The same; the mean is summed up in order, as a runtime may."""

    def normalized(self, frames: Tensor) -> Tensor:
        mean = frames.cumsum(-1)[..., -1:] / frames.shape[-1]
        centred = frames - mean
        return centred * torch.rsqrt((centred**2).mean(-1, keepdim=True) + self.normalization.eps)


def prove(artifact: nn.Module) -> None:
    module = source(NormalizesTime(), SPEC, SIGNATURE)
    session = ModuleSession(artifact.eval(), SIGNATURE)
    parity.check(module, session, samples=30, seed=0, atol=SPEC.atol, rtol=SPEC.rtol)


def test_edges_of_sound_are_silent_or_faint_or_square() -> None:
    def edge(batch: int, fill: Fill) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
        rng = np.random.default_rng(0)
        return draw(SIGNATURE, batch, {"samples": 400}, rng, {"sound": fill}, waveforms=("sound",))[
            "sound"
        ]

    assert edge(1, Fill.MINIMUM).dtype == np.float32
    assert set(np.unique(edge(2, Fill.MINIMUM))) == {-FAINT, FAINT}
    assert set(np.unique(edge(2, Fill.MAXIMUM))) == {-LOUD, LOUD}
    assert not edge(2, Fill.ZERO).any()
    assert len(np.unique(edge(1, Fill.CONSTANT))) > 2, "a constant is no sound"


def test_a_model_that_divides_by_the_deviation_over_time_is_proven_on_sound() -> None:
    prove(InOneSum())


@pytest.mark.parametrize("name", ["eps", "bias", "weight"])
def test_a_wrong_front_end_is_refused(name: str) -> None:
    wrong = copy.deepcopy(NormalizesTime())
    with torch.no_grad():
        if name == "eps":
            wrong.normalization.eps = 2e-5  # of no account but for faint sound
        else:
            getattr(wrong.normalization, name)[3] += 1e-3
    with pytest.raises(ParityError, match="differs"):
        prove(wrong)
