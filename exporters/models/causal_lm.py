"""A causal language model: from token ids and their mask to the logits of every next token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from modelport.exporters.model_spec import Decision, ModelSpec, Shape
from modelport.exporters.requests.random_inputs import draw
from modelport.gateway.errors import UsageError
from modelport.gateway.types import Array, Axis, Datatype, ModelSignature, TensorSpec

#: Default for the longest sequence: the logits of 512 positions with a vocabulary of 50 000 take
#: 0.1 GB for each element of a batch.
DEFAULT_MAX_POSITIONS = 512


def _signature(module: Any, max_batch_size: int) -> ModelSignature:
    return ModelSignature(
        inputs=(
            TensorSpec("input_ids", Datatype.INT64, ("sequence",), 0, module.vocab_size - 1),
            TensorSpec("attention_mask", Datatype.INT64, ("sequence",), 0, 1),
        ),
        outputs=(TensorSpec("logits", Datatype.FP32, ("sequence", module.vocab_size)),),
        max_batch_size=max_batch_size,
        # Padding on the right, marked by 0 in the mask, changes no earlier logit.
        axes={"sequence": Axis("sequence", 1, module.max_positions, padding=0)},
    )


def _sample(
    signature: ModelSignature, batch: int, sizes: Mapping[str, int], rng: np.random.Generator
) -> dict[str, Array]:
    """Random tokens with no padding, padding on the right, and padding on the left, in turn."""
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
    """A causal language model of ``transformers`` on whole sequences, without a key-value cache.

    Computes the model's own ``forward``. Positions count from the left end, padding included, so a
    model with absolute positions needs its padding on the right. Attention must be ``eager``: a
    fully masked position then gets the mean over all positions in every format, while with ``sdpa``
    it depends on the kernel.
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
        """Unnormalised scores of the next token at each position.

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
        # Values at padding depend on precision and runtime, and mean nothing.
        real = attention_mask.unsqueeze(-1) != 0
        return torch.where(real, result.logits, torch.zeros_like(result.logits))
