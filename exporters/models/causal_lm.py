"""A causal language model: token ids and their mask in, the logits of every next token out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from modelport.exporters.samples import draw
from modelport.exporters.spec import Decision, ModelSpec, Shape
from modelport.gateway.cli.errors import UsageError
from modelport.gateway.types import Array, Axis, Datatype, ModelSignature, TensorSpec

#: Longest sequence unless told otherwise: the logits of 512 positions take 0.1 GB for a vocabulary
#: of 50 000, and this for each element of a batch.
DEFAULT_MAX_POSITIONS = 512


def _signature(module: Any, max_batch_size: int) -> ModelSignature:
    return ModelSignature(
        inputs=(
            TensorSpec("input_ids", Datatype.INT64, ("sequence",), 0, module.vocab_size - 1),
            TensorSpec("attention_mask", Datatype.INT64, ("sequence",), 0, 1),
        ),
        outputs=(TensorSpec("logits", Datatype.FP32, ("sequence", module.vocab_size)),),
        max_batch_size=max_batch_size,
        # Padding on the right, which the mask's 0 says it is, changes no logit before it.
        axes={"sequence": Axis("sequence", 1, module.max_positions, padding=0)},
    )


def _sample(
    signature: ModelSignature, batch: int, sizes: Mapping[str, int], rng: np.random.Generator
) -> dict[str, Array]:
    """Random tokens; no padding, padding on the right, and padding on the left, in turn."""
    inputs = draw(signature, batch, sizes, rng)
    mask = np.ones_like(inputs["attention_mask"])
    for row, start in enumerate(rng.integers(3, size=len(mask))):
        padding = int(rng.integers(sizes["sequence"]))  # at least one token is real
        if start == 1:
            mask[row, sizes["sequence"] - padding :] = 0
        elif start == 2:
            mask[row, :padding] = 0
    return {**inputs, "attention_mask": mask}


def _refuse(shapes: Mapping[str, Shape], known: Mapping[str, Any]) -> dict[str, Any]:
    raise UsageError(
        "--model causal-lm is read from a Hugging Face folder; give the folder that holds its "
        "config.json as checkpoint"
    )


class CausalLanguageModel(nn.Module):
    """A causal language model of ``transformers``, whole sequences at a time, no key-value cache.

    Computes what the model's own ``forward`` does: positions count from the left end, padding
    included, so that a model with absolute positions wants its padding on the right. Attention must
    be ``eager``: it gives a position that may see nothing the mean over all positions in every
    format, where ``sdpa`` depends on the kernel.
    """

    modelport_spec = ModelSpec(
        name="causal-lm",
        signature=_signature,
        infer_kwargs=_refuse,
        sample=_sample,
        atol=1e-4,
        rtol=1e-4,
        decision=Decision("logits"),
    )

    def __init__(self, model: nn.Module, vocab_size: int, max_positions: int) -> None:
        super().__init__()
        self.model = model
        self.vocab_size = vocab_size
        self.max_positions = max_positions

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Unnormalised scores of the token that follows each position.

        Args:
            input_ids: int64 ``[B, T]``, ids in ``[0, vocab_size)``, ``T`` at most
                ``max_positions``.
            attention_mask: int64 ``[B, T]``, 1 for a token, 0 for padding.

        Returns:
            float32 ``[B, T, vocab_size]``, 0 at padding.
        """
        result = self.model(
            input_ids=input_ids, attention_mask=attention_mask, use_cache=False, return_dict=True
        )
        # What stands at padding depends on precision and runtime, and means nothing.
        real = attention_mask.unsqueeze(-1) != 0
        return torch.where(real, result.logits, torch.zeros_like(result.logits))
