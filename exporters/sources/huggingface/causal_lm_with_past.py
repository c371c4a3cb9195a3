"""A causal language model with its key-value cache as inputs and outputs.

Names are those of Hugging Face Optimum's ``model.onnx`` with past.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from modelport.exporters.model_spec import Decision, ModelSpec
from modelport.exporters.requests.random_inputs import draw
from modelport.exporters.runtime.output_capture import quiet
from modelport.gateway.errors import Unsupported
from modelport.gateway.types import Array, Axis, Datatype, ModelSignature, TensorSpec

SEQUENCE, PAST, TOTAL = "sequence", "past_sequence", "past_and_sequence"
#: ``past_key_values.N.key`` in, ``present.N.key`` out.
KINDS = ("key", "value")


class CachedLanguageModel(nn.Module):
    """A causal language model of ``transformers`` on new tokens after past ones.

    The first request has a past of one position, with 0 in ``attention_mask``: an empty one is no
    size that every format has. Attention is ``eager``, as in ``CausalLanguageModel``.

    Args:
        max_positions: the longest past, and the most new tokens.
        longest: the model's own limit of positions.
    """

    def __init__(self, model: Any, vocab_size: int, max_positions: int, longest: int) -> None:
        super().__init__()
        self.model = model
        self.vocab_size = vocab_size
        self.max_positions = max_positions
        self.longest = longest
        self.shapes = _cache_shapes(model)

    @property
    def modelport_spec(self) -> ModelSpec:
        """The specification; its tolerance is ``CausalLanguageModel``'s."""
        return ModelSpec(
            name="causal-lm",
            signature=_signature,
            sample=_sample,
            atol=1e-4,
            rtol=1e-4,
            decision=Decision("logits"),
        )

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor, *past: Tensor
    ) -> tuple[Tensor, ...]:
        """Scores of the next token after each new one, and the cache of all positions.

        Args:
            input_ids: int64 ``[B, T]``.
            attention_mask: int64 ``[B, P + T]``, 1 for a token, 0 for padding.
            position_ids: int64 ``[B, T]``.
            past: keys and values of each layer, ``[B, heads, P, width]``.

        Returns:
            ``[B, T, vocab_size]``, 0 at padding; then keys and values of each layer,
            ``[B, heads, P + T, width]``.
        """
        from transformers import DynamicCache

        cache = DynamicCache()
        for layer in range(len(self.shapes)):
            cache.update(past[2 * layer], past[2 * layer + 1], layer)
        count = past[0].shape[2] + input_ids.shape[1]
        # Without a guard on the mask's size, which exporters cannot write as a sum of two axes.
        mask = attention_mask.index_select(1, torch.arange(count, device=input_ids.device))
        result = self.model(
            input_ids=input_ids,
            attention_mask=mask,
            position_ids=position_ids,
            past_key_values=cache,
            use_cache=True,
            return_dict=True,
        )
        real = mask[:, past[0].shape[2] :].unsqueeze(-1) != 0
        logits = torch.where(real, result.logits, torch.zeros_like(result.logits))
        present = (t for layer in result.past_key_values.layers for t in (layer.keys, layer.values))
        return (logits, *present)


def _cache_shapes(model: Any) -> Sequence[tuple[tuple[int, int], tuple[int, int]]]:
    """Heads and width of the keys and of the values of each layer.

    Raises:
        Unsupported: the cache holds something else, such as the state of a recurrence.
    """
    with quiet(), torch.no_grad():
        cache = model(input_ids=torch.zeros(1, 2, dtype=torch.int64), use_cache=True)[
            "past_key_values"
        ]
    shapes = []
    for layer in cache.layers:
        key, value = (_heads_and_width(getattr(layer, kind, None)) for kind in ("keys", "values"))
        if key is None or value is None:
            raise Unsupported(
                f"the cache of {type(model).__name__} is not of keys and values; use --task "
                "text-generation"
            )
        shapes.append((key, value))
    return shapes


def _heads_and_width(found: Any) -> tuple[int, int] | None:
    is_cache = isinstance(found, Tensor) and found.ndim == 4 and found.shape[2] == 2
    return (int(found.shape[1]), int(found.shape[3])) if is_cache else None


def _signature(module: Any, max_batch_size: int) -> ModelSignature:
    inputs = [
        TensorSpec("input_ids", Datatype.INT64, (SEQUENCE,), 0, module.vocab_size - 1),
        TensorSpec("attention_mask", Datatype.INT64, (TOTAL,), 0, 1),
        TensorSpec("position_ids", Datatype.INT64, (SEQUENCE,), 0, module.longest - 1),
    ]
    outputs = [TensorSpec("logits", Datatype.FP32, (SEQUENCE, module.vocab_size))]
    for layer, shapes in enumerate(module.shapes):
        for kind, (heads, width) in zip(KINDS, shapes, strict=True):
            past, present = f"past_key_values.{layer}.{kind}", f"present.{layer}.{kind}"
            inputs.append(TensorSpec(past, Datatype.FP32, (heads, PAST, width)))
            outputs.append(TensorSpec(present, Datatype.FP32, (heads, -1, width)))
    most = module.max_positions
    axes = {
        SEQUENCE: Axis(SEQUENCE, 1, most),
        PAST: Axis(PAST, 1, most),
        # Above the sum of both in the middle of the range too, where formats take their example.
        TOTAL: Axis(TOTAL, 2, 2 * most + 2),
    }
    return ModelSignature(tuple(inputs), tuple(outputs), max_batch_size, axes)


def _sample(
    signature: ModelSignature, batch: int, sizes: Mapping[str, int], rng: np.random.Generator
) -> dict[str, Array]:
    """Random tokens and caches, with padding on the left in two of three rows."""
    total = sizes[PAST] + sizes[SEQUENCE]
    inputs = draw(signature, batch, {**sizes, TOTAL: total}, rng)
    mask = np.ones((batch, total), np.int64)
    for row in range(batch):
        if rng.integers(3):
            mask[row, : int(rng.integers(total))] = 0  # at least one token is real
    return {**inputs, "attention_mask": mask}
